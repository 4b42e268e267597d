"""The keys of a hook's state in a checkpoint that other ranks can read.

Each field of a parameter has a key, which tells what ranks saved it (2 replicas of 1 shard), and
what it is::

    2x1/mean//net.weight/error             averageable: (replicas, *parameter)
    2x1/same//net.weight/anchor            the same in all replicas: (*parameter)
    2x1/own.1//net.weight/average_error    of rank 1 only

A field that does not have one number per element, such as a factor, cannot be cut anew. If the
model is sharded, each shard has its own: ``mean.0`` and ``same.0`` are those of the first.
"""

from typing import NamedTuple

__all__ = ["Key"]


class Key(NamedTuple):
    """The parts of a key."""

    layout: str
    kind: str
    number: int
    """Of the shard or rank; -1: of all."""
    path: str
    """Of the hook, which may be nested in others."""
    name: str
    """Of the parameter or bucket."""
    field: str

    def __str__(self) -> str:
        kind = self.kind if self.number < 0 else f"{self.kind}.{self.number}"
        return "/".join((self.layout, kind, self.path, self.name, self.field))

    @classmethod
    def of(cls, text: str) -> "Key":
        """Return the parts of ``text``."""
        layout, kind, path, rest = text.split("/", 3)
        name, field = rest.rsplit("/", 1)
        kind, _, number = kind.partition(".")
        return cls(layout, kind, int(number or -1), path, name, field)

    @property
    def shards(self) -> int:
        """The number of shards when it was saved."""
        return int(self.layout.split("x")[1])
