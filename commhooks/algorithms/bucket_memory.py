"""What a hook remembers of every gradient element from step to step, by parameter name."""

import torch
from torch import Tensor

from commhooks.algorithms.per_bucket_cache import PerBucketCache
from commhooks.errors import CommHookStateError
from commhooks.hook.base import TensorState
from commhooks.hook.derived_bucket import bucket_with
from commhooks.precision import at_least_float32
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
        self._cuts: PerBucketCache[Tensor] = PerBucketCache()

    def of(self, bucket: GradBucket, state: TensorState) -> Tensor:
        """(numel,), zeros at first; float32, or float64 for float64 gradients."""
        if state is not self._state:
            self._state = state
            self._cuts.clear()
        flat = self._cuts.get(bucket)
        return self._cuts.put(bucket, self._take_over(bucket, state)) if flat is None else flat

    def _take_over(self, bucket: GradBucket, state: TensorState) -> Tensor:
        buffer = bucket.buffer()
        dtype = at_least_float32(buffer.dtype)
        flat = torch.zeros(buffer.numel(), dtype=dtype, device=buffer.device)
        views = bucket_with(bucket, flat).gradients()
        for name, view in zip(bucket.names, views, strict=True):
            entry = state.setdefault(name, {})
            if self._field in entry:
                _check_shape(name, self._field, entry[self._field], view)
                view.copy_(entry[self._field])
            entry[self._field] = view
        return flat


def _check_shape(name: str, field: str, found: Tensor, expected: Tensor) -> None:
    if found.shape != expected.shape:
        raise CommHookStateError(
            f"state of {name!r}: expected {field!r} of shape {tuple(expected.shape)}, found "
            f"{tuple(found.shape)}: it was saved for another model"
        )
