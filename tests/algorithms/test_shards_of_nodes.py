"""Shards of a bucket: blocks of rows of each parameter."""

from dataclasses import dataclass

import pytest
import torch
from support.simulated_ranks import simulate
from torch import Tensor

import commhooks
from commhooks.algorithms.averaging.hierarchical import BucketShards, shard_of
from commhooks.algorithms.bucket_parameters import gradient_of, real_view
from commhooks.testing.probe import probe_parameters
from reducer import GradBucket

PARAMETERS = probe_parameters() | {
    "complex": torch.zeros(3, dtype=torch.complex64),
    "one row": torch.zeros(1, 4),
    "sliced": torch.zeros(5, 6)[:, 1:4],  # a gradient has no gaps
}
SIZES = [1, 2, 3, 7]


def make_bucket(names: list[str], dtype: torch.dtype = torch.float32) -> GradBucket:
    tensors = [PARAMETERS[name] for name in names]
    tensors = [real_view(tensor).to(dtype) for tensor in tensors]
    flat = torch.arange(1.0, 1 + sum(tensor.numel() for tensor in tensors)).to(dtype)
    return GradBucket(flat, tensors, names, index=3, step=5)


def split(bucket: GradBucket, size: int) -> tuple[Tensor, Tensor]:
    """Return all shards, and what they are together."""
    shards = BucketShards(bucket, size)
    parts = bucket.buffer().new_full((size, shards.numel), 99.0)
    shards.split(bucket.buffer(), parts)
    joined = torch.full_like(bucket.buffer(), 99.0)
    shards.join(list(parts), joined)
    return parts, joined


@pytest.mark.parametrize("size", SIZES)
def test_each_element_is_in_one_shard(size: int) -> None:
    bucket = make_bucket(list(PARAMETERS))
    parts, joined = split(bucket, size)
    assert torch.equal(joined, bucket.buffer())
    assert torch.equal(parts[parts != 0].sort().values, bucket.buffer())


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", PARAMETERS)
def test_a_shard_has_rows_of_the_parameter(name: str, size: int) -> None:
    """As torch cuts it, along one dimension, and in the order of the gradient's memory."""
    bucket = make_bucket([name])
    (gradient,) = bucket.gradients()
    parts, _ = split(bucket, size)
    shards = BucketShards(bucket, size)
    found = []
    for rank in range(size):
        own = shards.bucket(bucket, parts[rank].clone(), rank)
        assert (own.index(), own.is_last(), own.step, own.names) == (3, True, 5, [name])
        assert own.key == bucket.key
        found.append(own.gradients()[0])
        form = shard_of(real_view(PARAMETERS[name]), gradient_of(PARAMETERS[name]), rank, size)
        assert found[-1].shape == form.shape
        assert gradient_of(form).stride() == found[-1].stride()
    if gradient.numel() < 2:
        return
    dims = [d for d in range(gradient.dim()) if found[0].shape[d] != gradient.shape[d]]
    assert len(dims) <= 1
    whole = torch.cat(found, dims[0]) if dims else found[0]
    for dim in dims:
        whole = whole.narrow(dim, 0, gradient.shape[dim])
    assert torch.equal(whole, gradient)


def test_a_shard_does_not_depend_on_the_bucket() -> None:
    """So state by parameter name survives when buckets are rebuilt."""
    for names in (["matrix", "odd"], ["odd", "vector", "matrix"]):
        bucket = make_bucket(names)
        shards = BucketShards(bucket, 2)
        parts, _ = split(bucket, 2)
        own = shards.bucket(bucket, parts[1].clone(), 1)
        gradient = dict(zip(own.names, own.gradients(), strict=True))["matrix"]
        rows = gradient.shape[0]
        whole = dict(zip(names, bucket.gradients(), strict=True))["matrix"]
        assert torch.equal(gradient[: len(whole) - rows], whole[rows:])


@dataclass
class Remember(commhooks.CommHook):
    """Average between nodes, and remember the shard."""

    async def reduce(self, bucket: GradBucket, comm: commhooks.Communicator) -> Tensor:
        self.shard = bucket.buffer().clone()
        return bucket.buffer()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_number_that_is_not_finite_reaches_every_element(dtype: torch.dtype) -> None:
    hooks = [Remember() for _ in range(3)]
    nodes = [commhooks.create("hierarchical", inner=hook, ranks_per_node=3) for hook in hooks]
    buckets = [make_bucket(["scalar", "matrix", "one row"], dtype) for _ in range(3)]
    expected = buckets[0].buffer().clone()
    for found in simulate(nodes, buckets)[0]:
        torch.testing.assert_close(found, expected)
    assert all(hook.shard.isfinite().all() for hook in hooks)
    buckets[1].buffer()[4] = torch.inf
    for found in simulate(nodes, buckets)[0]:
        assert found.isnan().all()
    assert all(hook.shard.isnan().all() for hook in hooks)
