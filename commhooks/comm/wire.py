"""The bytes that one rank puts on the wire in a collective.

They are those of the algorithm that sends the fewest bytes; a backend may send more. N is the
number of ranks. A tensor that is split into N parts counts as a multiple of N bytes, rounded up.
"""


def all_reduce_bytes(tensor_bytes: int, size: int) -> int:
    """Return 2·(N-1)·⌈n/N⌉: a reduce-scatter, then an all-gather of the parts."""
    return 2 * reduce_scatter_bytes(tensor_bytes, size)


def reduce_scatter_bytes(tensor_bytes: int, size: int) -> int:
    """Return (N-1)·⌈n/N⌉: each part but a rank's own is passed on once around the ring."""
    return (size - 1) * _part(tensor_bytes, size)


def all_gather_bytes(tensor_bytes: int, size: int) -> int:
    """Return (N-1)·n: the n bytes of each rank pass every other rank."""
    return (size - 1) * tensor_bytes


def all_to_all_bytes(tensor_bytes: int, size: int) -> int:
    """Return (N-1)·⌈n/N⌉: one part for each other rank."""
    return (size - 1) * _part(tensor_bytes, size)


def broadcast_bytes(tensor_bytes: int, size: int, *, is_root: bool) -> int:
    """Return n on the root and 0 elsewhere: what other ranks forward does not count."""
    return tensor_bytes if is_root and size > 1 else 0


def _part(tensor_bytes: int, size: int) -> int:
    return -(-tensor_bytes // size)
