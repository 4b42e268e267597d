"""Different hooks for different parameters. Wire: that of each hook, for its part of the gradients.

A bucket with parameters of several routes is taken apart: the gradients of each route are copied
into a bucket of their own, the hooks run on these in the order of the rules, and their averages are
copied back. On our own wrapper buckets are cut by route beforehand, so none is mixed and nothing is
copied, unless the model has a ``group_key`` of its own.
"""

import operator
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, cast

import torch
import torch.distributed as dist
from torch import Tensor

from commhooks.algorithms.wrappers.route_rules import Pattern, Rule, choose
from commhooks.comm.communicator import Communicator
from commhooks.hook.base import CommHook
from commhooks.hook.derived_bucket import BucketPart
from commhooks.hook.options import MinLen
from commhooks.hook.registry import register_hook
from commhooks.precision import at_least_float32
from reducer import GradBucket

__all__ = ["Route"]


@register_hook("route")
@dataclass
class Route(CommHook):
    """Use different hooks for different parameters.

    ``route([("*.bias", "allreduce"), ("embedding.*", {"name": "topk", "density": 0.01})],
    default={"name": "powersgd", "rank": 4})``. The first rule that fits a parameter decides.

    A rule is a pattern for names of parameters as in file names (:mod:`fnmatch`, case-sensitive):
    ``*`` stands for any text, dots included, ``?`` for one character, ``[ab]`` for one of these. Or
    it is a predicate, a function ``fn(name, parameter) -> bool`` of a module, in configs
    "module:function".

    Each hook gets buckets of its own parameters only, numbered from 0 in each step, the last one
    marked as such. (Only the hook of the last bucket of all can be sure of that mark on torch's own
    wrapper under ``skip_all_reduce_unused_params``, which does not tell what it leaves out; and
    inside ``skip_nonfinite`` there is none where the last bucket is dropped.)

    Wire: that of each hook for its parameters. Memory: a copy of each bucket in which routes are
    mixed, while it is under way.

    Raises:
        CommHookOptionError: a predicate cannot be found.
        CommHookError: at registration, if a rule fits no parameter, or none but those of earlier
            rules; or if no rule fits a parameter and there is no ``default``.
    """

    rules: Annotated[list[tuple[Rule, CommHook]], MinLen(1)]
    """Patterns or predicates, and the hook for the parameters that they fit."""
    default: CommHook | None = None
    """The hook for parameters that no rule fits."""

    _routes: dict[str, int] = field(default_factory=dict, init=False, repr=False, compare=False)
    """By parameter: the position of its hook in ``_hooks``."""
    _progress: list["_Progress"] = field(
        default_factory=list, init=False, repr=False, compare=False
    )

    lossless = True
    tells_contribution = True
    wire = "what each hook sends for its parameters"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._patterns()

    def prepare(self, parameters: Mapping[str, Tensor], group: dist.ProcessGroup) -> None:
        """Finds the hook of each parameter, and prepares each for its own."""
        routes = choose(self._patterns(), parameters, has_default=self.default is not None)
        for i, hook in enumerate(self._hooks):
            own = {name: tensor for name, tensor in parameters.items() if routes[name] == i}
            if own:
                hook.prepare(own, group)
        self._routes = routes

    def bucket_key(self, parameter: str) -> Hashable:
        """The route, and what its hook says. None for a parameter that hooks do not see."""
        i = self._routes.get(parameter)
        return None if i is None else (i, self._hooks[i].bucket_key(parameter))

    async def reduce(self, bucket: GradBucket, comm: Communicator) -> Tensor:
        buffer = bucket.buffer()
        contribution = _empty_contribution(buffer) if comm.wants_contribution else None
        if bucket.index() == 0:
            self._begin_step()
        for i, members in self._members(bucket):
            hook, part = self._hooks[i], BucketPart(bucket, members)
            # Counted only now: while other hooks awaited, this one may have got a later bucket.
            index, is_last = self._progress[i].advance(part.names, bucket.left_out)
            # On torch's own wrapper others of the route may have been left out.
            own = part.bucket(index, is_last=is_last or bucket.is_last())
            nested = comm.within(hook, key=own.key, wants_contribution=comm.wants_contribution)
            part.store(await hook.reduce(own, nested), buffer)
            if contribution is not None and nested.contribution is not None:
                part.store(nested.contribution, contribution)
        comm.contribution = contribution
        return buffer

    def wire_bytes(self, bucket: GradBucket, size: int) -> int | None:
        costs = [
            self._hooks[i].wire_bytes(BucketPart(bucket, members).bucket(0, is_last=True), size)
            for i, members in self._members(bucket)
        ]
        return None if None in costs else sum(cast("list[int]", costs))

    @cached_property
    def _hooks(self) -> list[CommHook]:
        return [hook for _, hook in self.rules] + ([] if self.default is None else [self.default])

    def _patterns(self) -> list[Pattern]:
        return [Pattern.of(str(rule), f"rules.{i}.0") for i, (rule, _) in enumerate(self.rules)]

    def _begin_step(self) -> None:
        of_hooks: list[set[str]] = [set() for _ in self._hooks]
        for name, i in self._routes.items():
            of_hooks[i].add(name)
        self._progress = [_Progress(names) for names in of_hooks]

    def _members(self, bucket: GradBucket) -> list[tuple[int, list[int]]]:
        members: dict[int, list[int]] = {}
        for position, name in enumerate(bucket.names):
            members.setdefault(self._routes[name], []).append(position)
        return sorted(members.items(), key=operator.itemgetter(0))


@dataclass
class _Progress:
    """Of one route through a step: the parameters that are yet to come, and its buckets so far."""

    left: set[str]
    buckets: int = 0

    def advance(self, names: Sequence[str], left_out: Sequence[str]) -> tuple[int, bool]:
        """The index of the next bucket, with these parameters, and whether it is the last."""
        index = self.buckets
        self.buckets += 1
        self.left.difference_update(names, left_out)
        return index, not self.left


def _empty_contribution(buffer: Tensor) -> Tensor:
    return torch.zeros_like(buffer, dtype=at_least_float32(buffer.dtype))
