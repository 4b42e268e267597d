"""The bytes that one rank puts on the wire in a collective.

Those of the algorithm that sends least; a backend may send more. N is the number of ranks. A tensor
that is cut into N parts is rounded up to a multiple of N bytes.
"""

__all__ = [
    "all_gather_bytes",
    "all_reduce_bytes",
    "all_to_all_bytes",
    "broadcast_bytes",
    "reduce_scatter_bytes",
]


def all_reduce_bytes(tensor_bytes: int, size: int) -> int:
    """A reduce-scatter, then an all-gather of the parts: 2·(N-1)·⌈n/N⌉."""
    return 2 * reduce_scatter_bytes(tensor_bytes, size)


def reduce_scatter_bytes(tensor_bytes: int, size: int) -> int:
    """Each part but one's own goes once around the ring: (N-1)·⌈n/N⌉ for n bytes on each rank."""
    return (size - 1) * _part(tensor_bytes, size)


def all_gather_bytes(tensor_bytes: int, size: int) -> int:
    """Each rank's n bytes pass every other rank: (N-1)·n."""
    return (size - 1) * tensor_bytes


def all_to_all_bytes(tensor_bytes: int, size: int) -> int:
    """One part for each other rank: (N-1)·⌈n/N⌉ for n bytes on each rank."""
    return (size - 1) * _part(tensor_bytes, size)


def broadcast_bytes(tensor_bytes: int, size: int, *, is_root: bool) -> int:
    """A pipeline: the root sends its n bytes once, and what others pass on is not counted."""
    return tensor_bytes if is_root and size > 1 else 0


def _part(tensor_bytes: int, size: int) -> int:
    return -(-tensor_bytes // size)
