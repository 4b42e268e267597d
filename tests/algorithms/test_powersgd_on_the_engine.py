"""PowerSGD under the reducer: counted bytes, overlapping buckets, parameters' own buckets."""

import pytest
import torch
from test_matrix_plan import resnet18
from torch import Tensor

from commhooks import CommHookError
from commhooks.algorithms.lowrank.powersgd import PowerSGD
from commhooks.testing.compare import disagreement
from commhooks.testing.probe import Trainer, draw_gradients, probe_parameters


def zeros_of_resnet18() -> dict[str, Tensor]:
    return {f"p{i}": torch.zeros(tensor.shape) for i, tensor in enumerate(resnet18())}


def count_bytes(rank: int, world_size: int, two_sided: bool) -> tuple[float, float]:
    parameters = zeros_of_resnet18()
    hook = PowerSGD(rank=4, start_step=0, two_sided=two_sided)
    trainer = Trainer(hook, parameters, bucket_cap_mb=25, stable_buckets=True)
    for _ in range(2):
        trainer.step(parameters)
    total = trainer.handle.stats().total
    assert total.wire_bytes is not None
    return total.gradient_bytes, total.wire_bytes


@pytest.mark.exhaustive
def test_counted_bytes_have_the_papers_ratio(run_ranks):
    vectors = sum(tensor.numel() for tensor in resnet18() if tensor.dim() == 1)
    sent = {}
    for two_sided in (True, False):
        of_ranks = run_ranks(count_bytes, 2, two_sided)
        assert of_ranks[0] == of_ranks[1]
        gradients, sent[two_sided] = of_ranks[0]
        assert gradients == 4 * 11_173_962
    # Two ranks send what they have: 2 (N - 1) / N is 1.
    assert round(gradients / sent[True], 1) == 72.1
    assert sent[False] - 4 * vectors == (sent[True] - 4 * vectors) / 2


def train_in_buckets(rank: int, world_size: int, bucket_mb: float) -> list[dict[str, Tensor]]:
    parameters = probe_parameters(torch.float64)
    hook = PowerSGD(rank=2, min_compression_rate=1.0, start_step=0)
    trainer = Trainer(hook, parameters, bucket_cap_mb=bucket_mb)
    return [trainer.step(draw_gradients(parameters, rank, step)) for step in range(5)]


@pytest.mark.parametrize("world_size", [2, 3])
def test_buckets_do_not_matter(run_ranks, world_size):
    """Many overlapping buckets, which are rebuilt after a step, give the same numbers as one."""
    many = run_ranks(train_in_buckets, world_size, 0.0003)
    one = run_ranks(train_in_buckets, world_size, 25)
    for rank in range(world_size):
        for step, (found, expected) in enumerate(zip(many[rank], one[rank], strict=True)):
            for name, gradient in expected.items():
                torch.testing.assert_close(found[name], gradient, msg=f"{name}, step {step}")


def fail_to_commit(rank: int, world_size: int) -> None:
    """The other rank has its new factors; with them, both would go on from different ones."""
    hook = PowerSGD(
        rank=2, min_compression_rate=1.0, start_step=0, two_sided=False, num_iters_per_step=2
    )
    trainer = Trainer(hook)
    commit = hook._commit
    for step in range(8):
        failing = step in (2, 3)
        hook._commit = raising if failing and rank == 1 else commit  # type: ignore[method-assign]
        gradients = draw_gradients(trainer.parameters, rank, step)
        if failing:
            with pytest.raises(CommHookError):
                trainer.step(gradients)
        else:
            assert not disagreement(trainer.step(gradients)), f"step {step}"


def raising(*_: object) -> None:
    raise MemoryError


def test_ranks_agree_after_some_have_failed(run_ranks):
    run_ranks(fail_to_commit, 2)
