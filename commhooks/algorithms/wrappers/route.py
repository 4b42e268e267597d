"""Run different hooks for different parameters::

    for hook, parameters in routes:
        result[parameters] = hook(gradient[parameters])

A bucket with parameters of several routes is split: the gradients of each route are copied into a
bucket of their own, the hooks run on these buckets in the order of the rules, and their averages
are copied back. commhooks' own wrapper builds buckets per route, so nothing is split or copied,
unless the model has its own ``group_key``.
"""

import importlib
import operator
import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property, partial
from typing import Annotated, TypeAlias, cast

import torch
import torch.distributed as dist
from torch import Tensor

from commhooks.comm.communicator import Communicator
from commhooks.errors import CommHookError, CommHookOptionError
from commhooks.hook.base import CommHook, Role
from commhooks.hook.derived_bucket import BucketPart, Progress
from commhooks.hook.options import Limits, Made
from commhooks.hook.registry import register_hook
from commhooks.hook.state import no_state
from commhooks.precision import at_least_float32
from reducer import GradBucket

Predicate: TypeAlias = Callable[[str, Tensor], bool]
"""Whether a rule matches a parameter, given its name and the parameter."""

_PREDICATE = re.compile(r"([A-Za-z_][\w.]*):([A-Za-z_][\w.]*)")  # module:function


def _to_name(rule: object) -> object:
    """Return a predicate as "module:function", which can be stored as JSON."""
    if not callable(rule):
        return rule
    name = f"{getattr(rule, '__module__', '')}:{getattr(rule, '__qualname__', '')}"
    if not _PREDICATE.fullmatch(name):
        raise ValueError(
            "a predicate is stored by its name, so it has to be a function of a module, not one "
            "that was defined inside another function or by lambda"
        )
    return name


Rule: TypeAlias = Annotated[str | Predicate, Made(_to_name)]
"""The type of the option. It is stored as a string."""


@register_hook("route")
@dataclass
class Route(CommHook):
    """Use different hooks for different parameters.

    ``route([("*.bias", "allreduce"), ("embedding.*", {"name": "topk", "density": 0.01})],
    default={"name": "powersgd", "rank": 4})``. The first rule that matches a parameter decides.

    A rule is a pattern for parameter names, as for file names (:mod:`fnmatch`, case-sensitive); a
    role: "@1d" for parameters of at most one dimension, "@embedding" and "@output" as in
    :func:`commhooks.hook.roles.roles_of`; or a predicate ``fn(name, parameter) -> bool`` defined in
    a module, "module:function" in configs. A role that no parameter has is no error.

    Each hook gets buckets that contain only its own parameters, numbered from 0 in each step. The
    last one is marked, but for two exceptions: see docs/hooks/route.md.

    Memory: a copy of each bucket with several routes until its average has arrived.

    Raises:
        CommHookOptionError: a predicate cannot be found, or there is no such role.
        CommHookError: at registration, if a rule matches no parameter, or only parameters that
            earlier rules match, or if no rule matches a parameter and there is no ``default``.
    """

    rules: Annotated[list[tuple[Rule, CommHook]], Limits(min_length=1)]
    """Patterns, roles or predicates, each with the hook for the parameters that it matches."""
    default: CommHook | None = None
    """The hook for parameters that no rule matches."""

    capturable_from = 0
    lossless = True
    tells_contribution = True
    state_fields = no_state
    wire = "what each hook sends for its parameters"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._routing = Routing(self._hooks, {})
        self._step = -1  # of the last bucket
        self._predicates()

    def prepare(self, parameters: Mapping[str, Tensor], group: dist.ProcessGroup) -> None:
        """Find the hook of each parameter, and prepare each hook for its parameters."""
        self._routing = Routing(self._hooks, self._table(parameters))
        super().prepare(parameters, group)

    def _table(self, parameters: Mapping[str, Tensor]) -> dict[str, int]:
        """Return the position in ``_hooks`` of each parameter's hook."""
        rules, predicates = [str(rule) for rule, _ in self.rules], self._predicates()
        matching = {
            name: [i for i, matches in enumerate(predicates) if matches(name, parameter)]
            for name, parameter in parameters.items()
        }
        used = {positions[0] for positions in matching.values() if positions}
        for i, rule in enumerate(rules):
            if i in used or rule in _ROLES:
                continue
            if names := [name for name, positions in matching.items() if i in positions]:
                raise CommHookError(
                    f"hook 'route': earlier rules take all that rule {rule!r} matches, "
                    f"{_listed(names)}; move it to the front, or remove it"
                )
            raise CommHookError(
                f"hook 'route': rule {rule!r} matches no parameter of the model, which has "
                f"{_listed(list(matching))}"
            )
        unmatched = [name for name, positions in matching.items() if not positions]
        if unmatched and self.default is None:
            raise CommHookError(
                f"hook 'route': no rule matches {_listed(unmatched)}; add a rule, or a default"
            )
        return {name: (*positions, len(rules))[0] for name, positions in matching.items()}

    def nested_parameters(
        self, parameters: Mapping[str, Tensor]
    ) -> Mapping[str, Mapping[str, Tensor]]:
        """Return the parameters of each route, without routes that have none."""
        own: dict[str, dict[str, Tensor]] = {}
        paths = list(self.nested())  # in the order of _hooks
        for name, tensor in parameters.items():
            own.setdefault(paths[self._routing.table[name]], {})[name] = tensor
        return own

    def bucket_key(self, parameter: str) -> Hashable:
        """Return the route and its hook's key, or None for a parameter that hooks do not see."""
        i = self._routing.table.get(parameter)
        return None if i is None else (i, self._hooks[i].bucket_key(parameter))

    async def reduce(self, bucket: GradBucket, comm: Communicator) -> Tensor:
        if bucket.index() == 0 or bucket.step != self._step:  # bucket 0 may have been a replay
            self._step = bucket.step
            self._routing.begin_step()
        buffer, contribution = bucket.buffer(), None
        if comm.wants_contribution:
            contribution = torch.zeros_like(buffer, dtype=at_least_float32(buffer.dtype))
        average = await self._routing.reduce(bucket, comm, contribution)
        comm.contribution = contribution
        return average

    def wire_bytes(self, bucket: GradBucket, size: int) -> int | None:
        return self._routing.wire_bytes(bucket, size)

    @cached_property
    def _hooks(self) -> list[CommHook]:
        return [hook for _, hook in self.rules] + ([] if self.default is None else [self.default])

    def _predicates(self) -> list[Predicate]:
        rules, roles = enumerate(self.rules), self.model_info.roles
        return [predicate_of(str(rule), f"rules.{i}.0", roles, self.name) for i, (rule, _) in rules]


class Routing:
    """The hook of each parameter, and the next bucket of each hook.

    The table may change between two steps.
    """

    def __init__(self, hooks: Sequence[CommHook], table: Mapping[str, int]) -> None:
        self._hooks = hooks
        self.table = dict(table)
        """The position of each parameter's hook, by name."""
        self._progress: dict[int, Progress] = {}

    def begin_step(self) -> None:
        """Number the buckets of each hook from 0 again."""
        self._progress = {}
        for name, i in self.table.items():
            self._progress.setdefault(i, Progress(set())).missing.add(name)

    def parts(self, bucket: GradBucket) -> list[tuple[int, BucketPart]]:
        """Return the positions of the bucket's hooks, each with its parameters, in order."""
        members: dict[int, list[int]] = {}
        for position, name in enumerate(bucket.names):
            members.setdefault(self.table[name], []).append(position)
        ordered = sorted(members.items(), key=operator.itemgetter(0))
        return [(i, BucketPart(bucket, positions)) for i, positions in ordered]

    async def reduce(
        self, bucket: GradBucket, comm: Communicator, contribution: Tensor | None = None
    ) -> Tensor:
        """Let each hook average its parameters of a bucket, and write what it has contributed."""
        average, parts, wants = bucket.buffer(), self.parts(bucket), contribution is not None
        for i, part in parts:
            # The next bucket of the hook, now and not before: while other hooks waited, it may have
            # got a part of a later bucket. On torch DDP, others of its buckets may be left out.
            index, is_last = self._progress[i].advance(part.names, bucket.left_out)
            own = part.bucket(index, is_last=is_last or bucket.is_last())
            nested = comm.within(self._hooks[i], key=own.key, wants_contribution=wants)
            found = await self.run(i, own, nested)
            if contribution is not None and nested.contribution is not None:
                part.store(nested.contribution, contribution)
            if len(parts) == 1:
                average = found
            else:
                part.store(found, average)
        return average

    async def run(self, i: int, bucket: GradBucket, comm: Communicator) -> Tensor:
        """Return the average of hook ``i``."""
        return await self._hooks[i].reduce(bucket, comm)

    def wire_bytes(self, bucket: GradBucket, size: int) -> int | None:
        """Return what the hooks send; None before registration, or if one has no formula."""
        if not self.table.keys() >= {*bucket.names}:
            return None
        costs = [
            self._hooks[i].wire_bytes(part.bucket(0, is_last=True), size)
            for i, part in self.parts(bucket)
        ]
        return None if None in costs else sum(cast("list[int]", costs))


_ROLES = ("@1d", "@embedding", "@output")


def predicate_of(rule: str, path: str, roles: Mapping[str, Role] | None, owner: str) -> Predicate:
    """Parse a rule: option ``path`` of the hook ``owner``. ``roles`` are of parameters."""
    if rule in _ROLES:
        return partial(_has_role, rule, roles, owner)
    if rule.startswith("@"):
        raise CommHookOptionError(
            f"option {path!r} of hook {owner!r}: expected one of the roles {', '.join(_ROLES)}, "
            f"found {rule!r}"
        )
    match = _PREDICATE.fullmatch(rule)
    if match is None:
        return lambda name, _: fnmatchcase(name, rule)
    module, name = match.groups()
    try:
        found: Predicate = operator.attrgetter(name)(importlib.import_module(module))
    except (ImportError, AttributeError) as error:
        raise CommHookOptionError(
            f"option {path!r} of hook {owner!r}: a rule with a colon is a predicate, "
            f"module:function, but there is no {name!r} in a module {module!r} ({error})"
        ) from error
    if not callable(found):
        raise CommHookOptionError(
            f"option {path!r} of hook {owner!r}: expected {rule} to be a function of a "
            f"parameter's name and the parameter, found {found!r}"
        )
    return found


def _has_role(
    rule: str, roles: Mapping[str, Role] | None, owner: str, name: str, parameter: Tensor
) -> bool:
    if rule == "@1d":
        return parameter.dim() <= 1
    if roles is None:
        raise CommHookError(
            f"hook {owner!r}: rule {rule!r} needs the modules of the model, and only its "
            "parameters are known here; use patterns for their names"
        )
    return roles.get(name) == rule[1:]


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:4])
    return shown if len(names) <= 4 else f"{shown} and {len(names) - 4} more"
