"""Run different hooks for different parameters::

    for hook, parameters in routes:
        result[parameters] = hook(gradient[parameters])

A bucket with parameters of several routes is split: the gradients of each route are copied into a
bucket of their own, the hooks run on these buckets in the order of the rules, and their averages
are copied back. commhooks' own wrapper builds buckets per route, so nothing is split or copied,
unless the model has its own ``group_key``.
"""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, cast

import torch
import torch.distributed as dist
from torch import Tensor

from commhooks.algorithms.routing import Routing
from commhooks.algorithms.wrappers.route_rules import Matcher, Rule, choose
from commhooks.comm.communicator import Communicator
from commhooks.hook.base import CommHook
from commhooks.hook.options import MinLen
from commhooks.hook.registry import register_hook
from commhooks.hook.state import no_state
from commhooks.precision import at_least_float32
from reducer import GradBucket

__all__ = ["Route"]


@register_hook("route")
@dataclass
class Route(CommHook):
    """Use different hooks for different parameters.

    ``route([("*.bias", "allreduce"), ("embedding.*", {"name": "topk", "density": 0.01})],
    default={"name": "powersgd", "rank": 4})``. The first rule that matches a parameter decides.

    A rule is a pattern for parameter names, as for file names (:mod:`fnmatch`, case-sensitive):
    ``*`` matches any text including dots, ``?`` one character, and ``[ab]`` one of the characters.
    Or it is a role: "@1d" matches parameters of at most one dimension, as biases and norms are,
    "@embedding" and "@output" those with this role in the model, see
    :func:`commhooks.hook.roles.roles_of`. A role that no parameter has is no error. Or it is a
    predicate: a function ``fn(name, parameter) -> bool`` defined in a module, "module:function" in
    configs.

    Each hook gets buckets that contain only its own parameters. They are numbered from 0 in each
    step, and the last one is marked as the last. There are two exceptions to the mark. On torch DDP
    with ``skip_all_reduce_unused_params``, which does not tell which buckets it leaves out, only
    the hook of the model's last bucket is sure to see the mark. Inside ``skip_nonfinite`` no bucket
    is marked if the last one is dropped.

    Wire: that of each hook for its parameters. Memory: a copy of each bucket with several routes
    until its average has arrived.

    Raises:
        CommHookOptionError: a predicate cannot be found, or there is no such role.
        CommHookError: at registration, if a rule matches no parameter, or only parameters that
            earlier rules match, or if no rule matches a parameter and there is no ``default``.
    """

    rules: Annotated[list[tuple[Rule, CommHook]], MinLen(1)]
    """Patterns, roles or predicates, each with the hook for the parameters that it matches."""
    default: CommHook | None = None
    """The hook for parameters that no rule matches."""

    _routing: Routing = field(
        default_factory=lambda: Routing({}), init=False, repr=False, compare=False
    )
    """Has the position of each parameter's hook in ``_hooks``."""

    lossless = True
    tells_contribution = True
    state_fields = no_state
    wire = "what each hook sends for its parameters"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._matchers()

    def prepare(self, parameters: Mapping[str, Tensor], group: dist.ProcessGroup) -> None:
        """Find the hook of each parameter, and prepare each hook for its parameters."""
        self._routing = Routing(
            choose(self._matchers(), parameters, has_default=self.default is not None)
        )
        super().prepare(parameters, group)

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
        buffer = bucket.buffer()
        contribution = _empty_contribution(buffer) if comm.wants_contribution else None
        if bucket.index() == 0:
            self._routing.begin_step()
        for i, part in self._routing.parts(bucket):
            hook, own = self._hooks[i], self._routing.next_bucket(i, part)
            nested = comm.within(hook, key=own.key, wants_contribution=comm.wants_contribution)
            part.store(await hook.reduce(own, nested), buffer)
            if contribution is not None and nested.contribution is not None:
                part.store(nested.contribution, contribution)
        comm.contribution = contribution
        return buffer

    def wire_bytes(self, bucket: GradBucket, size: int) -> int | None:
        costs = [
            self._hooks[i].wire_bytes(part.bucket(0, is_last=True), size)
            for i, part in self._routing.parts(bucket)
        ]
        return None if None in costs else sum(cast("list[int]", costs))

    @cached_property
    def _hooks(self) -> list[CommHook]:
        return [hook for _, hook in self.rules] + ([] if self.default is None else [self.default])

    def _matchers(self) -> list[Matcher]:
        return [
            Matcher.of(str(rule), f"rules.{i}.0", self.roles)
            for i, (rule, _) in enumerate(self.rules)
        ]


def _empty_contribution(buffer: Tensor) -> Tensor:
    return torch.zeros_like(buffer, dtype=at_least_float32(buffer.dtype))
