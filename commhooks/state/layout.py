"""The layout of ranks: replicas times shards; one shard without sharding."""

import re
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from commhooks.errors import CommHookStateError


class DistributedModel:
    """A model as this rank has it, and the ranks that train it together."""

    device: torch.device
    """The device of the gradients."""

    parameters: dict[str, Tensor]
    """The parameters that hooks average, by the names that :class:`CommHook` uses."""

    steps: int
    """The number of steps so far: synchronized backward passes, on FSDP2 those of an optimizer.

    A resumed run sets it.
    """

    shard_groups: Sequence[dist.ProcessGroup] = ()
    """The groups of ranks that share parameters with this one; none if ranks have whole ones."""

    _group: dist.ProcessGroup  # where it never changes

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks that gradients are averaged over."""
        return self._group

    @property
    def shards(self) -> int:
        """The number of ranks that share each parameter; 1 if ranks have whole ones."""
        return self.shard_groups[0].size() if self.shard_groups else 1

    @property
    def rank(self) -> int:
        """The number of this rank among all that train the model together."""
        shard = self.shard_groups[0].rank() if self.shard_groups else 0
        return self.group.rank() * self.shards + shard

    @property
    def world_size(self) -> int:
        """The number of ranks that train the model together."""
        return self.group.size() * self.shards

    @property
    def part(self) -> int:
        """The first of these ranks in the default group.

        It tells apart what other ranks train: stages of a pipeline, shards of tensor parallelism.
        """
        if not (groups := self._ranks_of_groups()):
            return 0
        return sum(min(ranks) for ranks in groups) - (len(groups) - 1) * dist.get_rank()

    @property
    def part_number(self) -> int:
        """The number of :attr:`part` among all parts, if ranks are laid out as on a mesh."""
        groups = [ranks for ranks in self._ranks_of_groups() if len(ranks) > 1]
        sizes = [(ranks[1] - ranks[0], len(ranks)) for ranks in groups]
        return sum(all(rank // a % n == 0 for a, n in sizes) for rank in range(self.part))

    def _ranks_of_groups(self) -> list[list[int]]:
        """Return the ranks of this one's groups in the default group; nothing if they are all."""
        groups = (self.group, *self.shard_groups[:1])
        if not dist.is_initialized() or self.world_size == dist.get_world_size():
            return []
        try:
            return [dist.get_process_group_ranks(group) for group in groups]
        except KeyError:  # a group that another library made
            return []

    def whole(self, name: str) -> tuple[torch.Size, int] | None:  # noqa: ARG002
        """Return the shape of a shared parameter, and the dimension that it is cut in."""
        return None


class Layout(NamedTuple):
    """Numbers of replicas and shards. A rank's number is ``replica * shards + shard``."""

    replicas: int
    shards: int

    def __str__(self) -> str:
        return f"{self.replicas}x{self.shards}"

    def sources(self, here: "Layout", rank: int, part: int = 0) -> list["Source"]:
        """Return the sources of a state, saved on these ranks, that ``rank`` of ``here`` reads."""
        ranks = range(rank, self.size, here.size)  # of the same shard, if there are as many shards
        shards: Iterable[int] = range(rank, self.shards, here.size)
        if self.shards == here.shards:
            shards = [rank % self.shards]
        numbers = {"rank": ranks, "shard": shards}
        return [Source(kind, each, self, part) for kind, found in numbers.items() for each in found]

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.replicas * self.shards


class Source(NamedTuple):
    """The owner of a part of a state: a rank, or a shard in all replicas."""

    kind: str
    number: int
    layout: Layout
    part: int
    """:attr:`DistributedModel.part`."""

    def __str__(self) -> str:
        part = f", part {self.part}" if self.part else ""
        return f"{self.kind} {self.number} of {self.layout}{part}"

    @classmethod
    def of(cls, text: object) -> "Source | None":
        """Return the source that ``text`` names, if any."""
        pattern = r"(rank|shard) (\d+) of (\d+)x(\d+)(?:, part (\d+))?"
        match = re.fullmatch(pattern, str(text), re.ASCII)
        if match is None:
            return None
        number, replicas, shards, part = map(int, match.groups("0")[1:])
        return cls(match[1], number, Layout(replicas, shards), part)


def of_part(sources: Iterable[Source], model: DistributedModel) -> list[Source]:
    """Return the sources of the part of the model that these ranks train, or of the only one.

    Raises CommHookStateError if there are other parts than on these ranks.
    """
    by_part: dict[int, list[Source]] = {}
    for source in sources:
        by_part.setdefault(source.part, []).append(source)
    found = sorted(by_part)
    if len(found) < 2:
        return by_part[found[0]] if found else []
    here, part = layout_of(model), model.part
    if any(each.layout != here for each in chain.from_iterable(by_part.values())):
        # Each part had more ranks, or fewer, so it may have had another first rank.
        is_whole = len(found) * here.size == dist.get_world_size()
        part = dict(enumerate(found)).get(model.part_number, -1) if is_whole else -1
    if part not in by_part:
        raise CommHookStateError(
            f"expected the state of part {model.part} of the model, found those of {found}. A part "
            "has the number of its first rank: resume on a mesh with as many parts"
        )
    return by_part[part]


def layout_of(model: DistributedModel) -> Layout:
    """Return the layout of the ranks of a model."""
    return Layout(model.group.size(), model.shards)


def rows_of(size: int, shard: int, shards: int) -> range:
    """Return the rows of a parameter, of ``size`` rows, that belong to a shard."""
    length = -(-size // shards)
    return range(min(shard * length, size), min((shard + 1) * length, size))
