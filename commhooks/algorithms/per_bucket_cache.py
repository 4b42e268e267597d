"""Something for each bucket, as the buckets are cut at present."""

from typing import Generic, TypeVar

from reducer import GradBucket

__all__ = ["PerBucketCache"]

_Kept = TypeVar("_Kept")


class PerBucketCache(Generic[_Kept]):
    """Kept until another bucket has one of the parameters."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[frozenset[str], _Kept]] = {}

    def get(self, bucket: GradBucket) -> _Kept | None:
        """None for a bucket that is new, or was cut otherwise since."""
        _, kept = self._kept.get(bucket.key, (None, None))
        return kept

    def put(self, bucket: GradBucket, kept: _Kept) -> _Kept:
        """``kept``, in place of what there is of all buckets with the same parameters."""
        names = frozenset(bucket.names)
        for key, (others, _) in list(self._kept.items()):
            if not names.isdisjoint(others):
                del self._kept[key]
        self._kept[bucket.key] = names, kept
        return kept

    def clear(self) -> None:
        self._kept.clear()
