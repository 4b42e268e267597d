"""State of hooks per bucket and per gradient element, and the parts of a bucket."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Annotated, Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from commhooks.codecs.rounding import bits_of, round_stochastically
from commhooks.comm.communicator import Communicator
from commhooks.errors import CommHookStateError
from commhooks.hook.base import CommHook, TensorState
from commhooks.hook.derived_bucket import bucket_with
from commhooks.hook.options import Made
from commhooks.hook.state import StateField
from commhooks.kernels import require_for
from commhooks.precision import at_least_float32
from reducer import GradBucket

_Value = TypeVar("_Value")


class PerBucketCache(Generic[_Value]):
    """One value per bucket, kept until another bucket has one of its parameters.

    All are dropped when another state replaces ``hook.state``.
    """

    def __init__(self, hook: CommHook) -> None:
        self._values: dict[str, tuple[frozenset[str], _Value]] = {}
        hook.caches.append(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def get(self, bucket: GradBucket) -> _Value | None:
        """Return None if the bucket is new, or its composition has changed."""
        _, value = self._values.get(bucket.key, (None, None))
        return value

    def clear(self) -> None:
        """Drop all values."""
        self._values.clear()

    def put(self, bucket: GradBucket, value: _Value) -> _Value:
        """Store and return a value, and drop those of all buckets with the same parameters."""
        names = frozenset(bucket.names)
        for key, (others, _) in list(self._values.items()):
            if not names.isdisjoint(others):
                del self._values[key]
        self._values[bucket.key] = names, value
        return value


class BucketMemory:
    """One number per gradient element, for example the error of error feedback.

    Ranks may replace them by their mean over the ranks. The numbers of a bucket lie in one flat
    tensor, in the bucket's order, so that a kernel passes over them and the gradients together;
    ``state[parameter][name]`` are views of it, in the shape and memory format of the parameter.
    When buckets are rebuilt, or a loaded state replaces the hook's, new flat tensors take over the
    numbers of the entries.

    ``dtype``: None for float32, or float64 for float64 gradients.
    """

    def __init__(self, hook: CommHook, name: str, dtype: torch.dtype | None = None) -> None:
        self._name = name
        self._dtype = dtype
        self._flats: PerBucketCache[Tensor] = PerBucketCache(hook)

    def field(self, gradient: Tensor) -> StateField:
        """Return the declaration of these numbers for :meth:`CommHook.state_fields`."""
        return replace(StateField.like(gradient, self._name, "averageable"), dtype=self._dtype)

    def of(self, bucket: GradBucket, state: TensorState) -> Tensor:
        """Return (numel,), zeros at first."""
        flat = self._flats.get(bucket)
        if flat is None:
            buffer = bucket.buffer()
            flat = torch.zeros_like(buffer, dtype=self._dtype or at_least_float32(buffer.dtype))
            views = bucket_with(bucket, flat).gradients()
            adopt(state, self._name, zip(bucket.names, views, strict=True))
            self._flats.put(bucket, flat)
        return flat


def adopt(state: TensorState, field: str, views: Iterable[tuple[str, Tensor]]) -> None:
    """Copy ``state[key][field]`` to the view of each key, and put the view in its place.

    A view without an entry keeps its numbers.

    Raises:
        CommHookStateError: an entry has another shape than its view.
    """
    for key, view in views:
        entry = state.setdefault(key, {})
        if field in entry:
            if entry[field].shape != view.shape:
                raise CommHookStateError(
                    f"state of {key!r}: expected {field!r} of shape {tuple(view.shape)}, found "
                    f"{tuple(entry[field].shape)}. It was saved with other options, for example "
                    "another rank of powersgd, or for another model: load a state that fits, or "
                    "register a new hook to begin without one."
                )
            view.copy_(entry[field])
        entry[field] = view


def _check_error_dtype(value: Any) -> Any:
    if value not in (None, torch.bfloat16, "bfloat16", "torch.bfloat16"):
        raise ValueError("it is neither bfloat16 nor None")
    return value


ErrorDtype = Annotated[torch.dtype | None, Made(_check_error_dtype)]
"""The type of the option ``error_dtype`` of hooks with error feedback."""


@contextmanager
def widened(kept: Tensor, bucket: GradBucket, comm: Communicator) -> Iterator[Tensor]:
    """Give the errors that are kept of a bucket, to be changed, in the precision of its steps.

    Errors in bfloat16 are copied, and rounded stochastically when the step ends, or what is below
    half of their last digit would be lost in each step. If it raises, they stay as they were.
    """
    if kept.dtype != torch.bfloat16:
        yield kept
        return
    error = kept.to(at_least_float32(bucket.buffer().dtype))
    yield error
    seed = bits_of(f"error:{bucket.key}:{comm.step}:{comm.rank}")
    round_stochastically(error, 1.0, kept, seed)


class KeepsErrors(CommHook):
    """Base of hooks that can keep what they do not send, and that need kernels on a GPU."""

    # Without types, or they would be options of all hooks.
    error_feedback = False
    error_dtype: Any = None
    keeps = "error"
    """The name, in the state, of what the hook keeps of each element."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._errors = BucketMemory(self, self.keeps, self.error_dtype)

    @property
    def tells_contribution(self) -> bool:
        """Whether ``comm.contribution`` is set on request: not by hooks with error feedback.

        A second error feedback around them would count the errors twice. Hooks whose errors would
        grow do not set it either: see Note [Errors that do not grow] in quantized/base.py.
        """
        return not self.error_feedback

    def prepare(self, parameters: Mapping[str, Tensor], group: dist.ProcessGroup) -> None:
        """Raise CommHookError if a device of the parameters cannot run the kernels."""
        super().prepare(parameters, group)
        require_for(parameters.values())

    def state_fields(self, gradient: Tensor) -> Sequence[StateField]:
        return (self._errors.field(gradient),) if self.error_feedback else ()

    @contextmanager
    def _error(self, bucket: GradBucket, comm: Communicator) -> Iterator[Tensor | None]:
        """Give what was not sent of a bucket, to be changed; None without error feedback."""
        if not self.error_feedback:
            yield None
            return
        with widened(self._errors.of(bucket, self.state), bucket, comm) as error:
            yield error


def part_length(numel: int, size: int) -> int:
    """Return the length of the first part of ``size``; the last parts may be shorter, or empty.

    It is ⌈numel / size⌉, rounded up to a multiple of 32 so that no two parts share a cache line.
    """
    return min(-(-numel // (32 * size)) * 32, numel)


def part_of(numel: int, size: int, rank: int) -> slice:
    """Return the elements that ``rank`` averages."""
    length = part_length(numel, size)
    return slice(min(rank * length, numel), min((rank + 1) * length, numel))
