"""A cache of what a hook has made for each bucket, which ends when the buckets are rebuilt."""

from typing import Generic, TypeVar

from reducer import GradBucket

__all__ = ["PerBucketCache"]

_Value = TypeVar("_Value")


class PerBucketCache(Generic[_Value]):
    """One value per bucket, kept until another bucket has one of its parameters."""

    def __init__(self) -> None:
        self._values: dict[str, tuple[frozenset[str], _Value]] = {}

    def get(self, bucket: GradBucket) -> _Value | None:
        """Return None if the bucket is new or its composition has changed."""
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

    def clear(self) -> None:
        self._values.clear()
