"""Memory of each gradient element: laid out by bucket, kept by parameter."""

import pytest
import torch
from torch import Tensor

from commhooks import CommHook, CommHookStateError
from commhooks.algorithms.bucket_memory import BucketMemory
from reducer.native import GradBucket

SHAPES = {"a": (3, 4), "b": (5,), "c": ()}


def make_bucket(*names: str, dtype: torch.dtype = torch.float32) -> GradBucket:
    parameters = [torch.zeros(SHAPES[name], dtype=dtype) for name in names]
    elements = sum(parameter.numel() for parameter in parameters)
    return GradBucket(torch.zeros(elements, dtype=dtype), parameters, list(names))


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [(torch.bfloat16, torch.float32), (torch.float64, torch.float64)],
)
def test_starts_at_zero(dtype: torch.dtype, expected: torch.dtype) -> None:
    flat = BucketMemory(CommHook(), "error").of(make_bucket("a", "b", dtype=dtype), {})
    assert flat.dtype == expected
    assert torch.equal(flat, torch.zeros(17, dtype=expected))


def test_is_kept_by_parameter_when_buckets_are_rebuilt() -> None:
    state: dict[str, dict[str, Tensor]] = {}
    memory = BucketMemory(CommHook(), "error")
    memory.of(make_bucket("a", "b"), state).copy_(torch.arange(17.0))
    memory.of(make_bucket("c"), state).fill_(100)
    flat = memory.of(make_bucket("c", "b"), state)
    assert flat.tolist() == [100, 12, 13, 14, 15, 16]
    flat += 1
    assert state["b"]["error"].tolist() == [13, 14, 15, 16, 17]
    assert state["a"]["error"].shape == (3, 4)
    assert torch.equal(memory.of(make_bucket("a"), state), torch.arange(12.0))


def test_follows_a_state_that_was_replaced() -> None:
    hook, bucket = CommHook(), make_bucket("b")
    memory = BucketMemory(hook, "error")
    memory.of(bucket, hook.state).fill_(1)
    hook.state = {"b": {"error": torch.full((5,), 2.0)}}
    assert memory.of(bucket, hook.state).tolist() == [2] * 5


def test_state_of_another_shape_is_refused() -> None:
    state = {"b": {"error": torch.zeros(6)}}
    with pytest.raises(CommHookStateError, match=r"'b': expected 'error' of shape \(5,\)"):
        BucketMemory(CommHook(), "error").of(make_bucket("b"), state)


def test_entries_have_the_memory_format_of_their_parameter() -> None:
    """So that they fit a parameter of another format, in a run that is resumed."""
    rows = torch.arange(12.0).view(3, 4)
    columns = torch.zeros(4, 3).T
    state: dict[str, dict[str, Tensor]] = {"a": {"error": rows}}
    bucket = GradBucket(torch.zeros(12), [columns], ["a"])
    flat = BucketMemory(CommHook(), "error").of(bucket, state)
    assert torch.equal(state["a"]["error"], rows)
    assert torch.equal(flat, rows.T.reshape(-1))
