"""What a hook remembers of every gradient element from step to step, by parameter name."""

from dataclasses import dataclass

import torch
from torch import Tensor

from commhooks.algorithms.derived_bucket import bucket_with
from commhooks.errors import CommHookStateError
from commhooks.hook import TensorState
from reducer import GradBucket

__all__ = ["BucketMemory"]


class BucketMemory:
    """One number per gradient element, e.g. what error feedback has yet to send.

    The numbers of a bucket lie in one flat tensor, in the bucket's order, so that a kernel passes
    over them and the gradients together; ``state[parameter][field]`` are views of it, in the shape
    and memory format of the parameter. When buckets are cut anew, or a loaded state replaces the
    hook's, new flat tensors take over what the entries hold.
    """

    def __init__(self, field: str) -> None:
        self._field = field
        self._state: TensorState | None = None
        self._cuts: dict[str, _Cut] = {}

    def of(self, bucket: GradBucket, state: TensorState) -> Tensor:
        """(numel,), zeros at first; float32, or float64 for float64 gradients."""
        if state is not self._state:
            self._state = state
            self._cuts.clear()
        cut = self._cuts.get(bucket.key)
        if cut is None:
            cut = self._take_over(bucket, state)
            for key, other in list(self._cuts.items()):
                if not cut.names.isdisjoint(other.names):
                    del self._cuts[key]
            self._cuts[bucket.key] = cut
        return cut.flat

    def _take_over(self, bucket: GradBucket, state: TensorState) -> "_Cut":
        buffer = bucket.buffer()
        dtype = torch.promote_types(buffer.dtype, torch.float32)
        flat = torch.zeros(buffer.numel(), dtype=dtype, device=buffer.device)
        views = bucket_with(bucket, flat).gradients()
        for name, view in zip(bucket.names, views, strict=True):
            entry = state.setdefault(name, {})
            if self._field in entry:
                _check_shape(name, self._field, entry[self._field], view)
                view.copy_(entry[self._field])
            entry[self._field] = view
        return _Cut(frozenset(bucket.names), flat)


@dataclass(frozen=True)
class _Cut:
    """The numbers of one bucket, as it is cut at present."""

    names: frozenset[str]
    flat: Tensor


def _check_shape(name: str, field: str, found: Tensor, expected: Tensor) -> None:
    if found.shape != expected.shape:
        raise CommHookStateError(
            f"state of {name!r}: expected {field!r} of shape {tuple(expected.shape)}, found "
            f"{tuple(found.shape)}: it was saved for another model"
        )
