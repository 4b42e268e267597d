"""A cache of what a hook has made for each bucket, which ends when the buckets are rebuilt."""

from typing import Generic, TypeVar

from commhooks.hook.base import TensorState
from reducer import GradBucket

__all__ = ["PerBucketCache"]

_Value = TypeVar("_Value")


class PerBucketCache(Generic[_Value]):
    """One value per bucket, kept until another bucket has one of its parameters.

    Values are made from a state, and dropped when a loaded one replaces it.
    """

    def __init__(self) -> None:
        self._state: TensorState | None = None
        self._values: dict[str, tuple[frozenset[str], _Value]] = {}

    def get(self, bucket: GradBucket, state: TensorState) -> _Value | None:
        """Return None if the bucket is new, its composition has changed or the state is another."""
        if state is not self._state:
            self._state = state
            self._values.clear()
        _, value = self._values.get(bucket.key, (None, None))
        return value

    def put(self, bucket: GradBucket, value: _Value) -> _Value:
        """Store and return a value, and drop those of all buckets with the same parameters."""
        names = frozenset(bucket.names)
        for key, (others, _) in list(self._values.items()):
            if not names.isdisjoint(others):
                del self._values[key]
        self._values[bucket.key] = names, value
        return value
