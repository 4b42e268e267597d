"""DiLoCo: ranks train by themselves, and an outer optimizer moves their common model.

Douillard et al., 2023, https://arxiv.org/abs/2311.08105; in fragments, with delays: Streaming
DiLoCo, 2025, https://arxiv.org/abs/2501.18512. A fragment with the parameters x of a rank, the
anchor a and the momentum v of the outer optimizer, the period H and the delay τ. In step t, between
the gradients and the optimizer's step::

    if t == start_step:
        a, v = x, 0                             # x is the same on all ranks
    elif (t - start_step) % H == offset:        # of the fragment
        send(a - x)                             # the outer gradient, through the inner hook
    if t - τ is such a step:
        d = receive()                           # the mean of a - x over the ranks
        v = μ * v + d
        a = a - η * (d + μ * v)                 # SGD with Nesterov momentum
        x = merge * x + (1 - merge) * a
    x = x - u(g)                                # the inner optimizer's step
"""

import functools
import itertools
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from commhooks.algorithms.averaging.local_sgd import LocalSteps
from commhooks.algorithms.bucket_parameters import parameters_of, pieces, store_if
from commhooks.codecs.finite import all_finite, is_known_false
from commhooks.comm.communicator import Communicator
from commhooks.comm.exchange import Exchange
from commhooks.errors import CommHookError, CommHookOptionError
from commhooks.hook.base import CommHook, refuse, tree
from commhooks.hook.derived_bucket import Progress
from commhooks.hook.options import Limits, hook_default
from commhooks.hook.registry import register_hook
from commhooks.hook.state import StateField
from commhooks.precision import at_least_float32
from reducer import GradBucket

_SAMPLED = 17
"""With a delay, ``consensus_distance`` is estimated from every 17th number: a copy of all would be
kept until the average arrives. Odd: not one column of a matrix."""
_REFUSED = {
    "changes_parameters": "changes parameters",
    "consensus": "does not return the same on all ranks",
    "skips_steps": "skips steps of the training loop",
}


@register_hook("diloco")
@dataclass
class DiLoCo(LocalSteps):
    """Train locally, and move the common model by an outer optimizer every ``period`` steps.

    Every ``period`` steps the difference between the common model (the anchor) and the rank's own
    parameters is averaged by ``inner`` as if it was a gradient: the outer gradient. SGD with
    Nesterov momentum then moves the anchor, and the parameters follow it. Between two averages
    every rank has another model, so save and load each rank's own.

    The inner hook gets buckets in float32 (float64 for float64 parameters), and counts rounds as
    steps: its ``start_step`` or ``warmup_steps`` are rounds.

    With a ``delay`` training goes on while an average is under way: Note [Exchanges between steps]
    in comm/exchange.py. A resumed run takes the same averages in the same steps.

    Wire: before ``start_step`` one all-reduce of the gradients per step. Then nothing, except what
    the inner hook sends for each fragment once per period; with ``ranks_per_node`` also one
    all-reduce of the gradients among a node's ranks per step. In step ``start_step`` all ranks
    begin with the mean of their parameters: one all-reduce of these, in float32. After a failed
    step, and after ``join``, that happens in the next step in which a fragment is due, and the
    outer optimizer starts from the beginning. Memory: two numbers per parameter element, one more
    while an average is under way; and the inner hook's.

    If an average is not finite, no rank changes its parameters or state, and the gradients of the
    bucket become NaN on all ranks. If the first mean is not finite, each rank keeps its parameters;
    on the CPU the next step tries again, and on a GPU, where the host does not wait for the answer,
    anchors are NaN from then on, and so are the gradients of steps in which a fragment is due.

    Raises:
        CommHookOptionError: the delay is longer than the period; or the inner hook changes
            parameters, does not return the same on all ranks, or skips steps; or it is ``auto``
            without a plan.
    """

    period: Annotated[int, Limits(ge=1)] = 30
    """H, steps from one average of a fragment to the next."""
    outer_lr: Annotated[float, Limits(gt=0, lt=math.inf)] = 0.7
    """η. At 1, without momentum, the anchor becomes the average of the models."""
    outer_momentum: Annotated[float, Limits(ge=0, lt=1)] = 0.9
    """μ"""
    fragments: Annotated[int, Limits(ge=1)] = 1
    """F, parts of the model that are averaged in different steps; with FSDP2, of whole units."""
    delay: Annotated[int, Limits(ge=0)] = 0
    """τ, steps that an average may take while training goes on."""
    merge: Annotated[float, Limits(ge=0, le=1)] = 0.0
    """The share that a parameter keeps of its own value when an average arrives; the rest is the
    anchor. With a delay, 0 discards the steps taken in the meantime."""
    inner: CommHook = hook_default("allreduce")
    """The hook that averages outer gradients."""

    wire = "nothing, except what the inner hook sends for the parameters once per period"
    paper = "https://arxiv.org/abs/2311.08105"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._schedule = FragmentSchedule(self.start_step, self.period, self.fragments)
        self._pending: dict[str, Pending] = {}
        self._progress = Progress(set())
        self._step = -1
        self._has_recovered = False
        # Of messages that are not committed, by key: their parameters, and states of inner hooks.
        self._sent: dict[str, tuple[Sequence[str], list[Kept]]] = {}
        if self.delay > self.period:
            raise CommHookOptionError(
                f"option 'delay' of hook {self.name!r}: expected at most the period, "
                f"{self.period}, found {self.delay}"
            )
        where = f"option 'inner' of hook {self.name!r}"
        refuse(where, self.inner, "a hook that averages gradients, such as int8", _REFUSED)
        autos = (each for each in tree(self.inner) if each.name == "auto")
        if any(getattr(each, "plan", None) is None for each in autos):
            raise CommHookOptionError(
                f"{where}: auto cannot measure, because it runs once per period: give it a plan"
            )

    @property
    def has_exchanges(self) -> bool:
        return self.delay > 0

    def prepare(self, parameters: Mapping[str, Tensor], group: dist.ProcessGroup) -> None:
        """Raise CommHookError for unequal nodes or more fragments than parameters or units."""
        super().prepare(parameters, group)
        if self._schedule.names:  # registered again: averages are lost, and models have gone on
            self.state, self._pending, self._sent, self._has_recovered = {}, {}, {}, False
        self._schedule.assign(parameters, self.model_info.units)

    def bucket_key(self, parameter: str) -> Hashable:  # noqa: ARG002
        """Return the same key for all: the inner hook gets buckets of its own."""
        return None

    def state_fields(self, gradient: Tensor) -> Sequence[StateField]:
        fields = [StateField.like(gradient, name, "same") for name in ("anchor", "momentum")]
        if self.delay:
            result = StateField.like(gradient, "outer_gradient", "same")
            fields.append(replace(result, is_optional=True, is_finite=False))
        return fields

    async def synchronize(self, bucket: GradBucket, comm: Communicator) -> Tensor | None:
        if bucket.step != self._step:
            self._begin_step(bucket.step)
        parameters = dict(zip(bucket.names, parameters_of(bucket), strict=True))
        may_anchor = not self._has_recovered or self._schedule.is_any_due(bucket.step)
        new = {n: p for n, p in parameters.items() if may_anchor and n not in self.state}
        due = {n: p for n, p in parameters.items() if self._sends(n, bucket.step)}
        part = self._part(bucket, due) if due else None  # numbered before the first await
        finite = []
        if new:
            finite.append(await self._anchor(new, bucket.step, comm))
            if is_known_false(finite[0]):
                return finite[0]
        if part is not None:
            self._subtract(due, part)
        finite += await self._receive(parameters, bucket.step)
        if part is not None:
            finite += await self._send(part, due, comm)
        return torch.stack(finite).all() if finite else None

    def _begin_step(self, step: int) -> None:
        self._step = step
        names = self._schedule.names
        self._progress = Progress({name for name in names if self._sends(name, step)})

    async def _anchor(
        self, parameters: Mapping[str, Tensor], step: int, comm: Communicator
    ) -> Tensor:
        """Begin with parameters that are the same on all ranks; return whether they are finite."""
        finite = await self.average(parameters, step, comm)
        if is_known_false(finite):
            return finite
        for name, parameter in parameters.items():
            anchor = parameter.detach().to(at_least_float32(parameter.dtype), copy=True)
            anchor.masked_fill_(~finite, torch.nan)
            self.state[name] = {"anchor": anchor, "momentum": torch.zeros_like(anchor)}
        return finite

    def _sends(self, name: str, step: int) -> bool:
        """Return whether an outer gradient is due, of a parameter that has an anchor."""
        return name in self.state and self._schedule.is_due(name, step)

    def _subtract(self, due: Mapping[str, Tensor], part: GradBucket) -> None:
        """Write the outer gradients of this rank into their bucket."""
        for (name, parameter), view in zip(due.items(), part.gradients(), strict=True):
            torch.sub(self._entry(name, parameter)["anchor"], parameter, out=view)

    async def _receive(self, parameters: Mapping[str, Tensor], step: int) -> list[Tensor]:
        """Take the averages whose delay has passed, and let the outer optimizer step.

        Return as :meth:`_outer_step`.
        """
        due = {
            name: parameter
            for name, parameter in parameters.items()
            if name in self._pending and self._has_arrived(name, step)
        }
        if not due:
            return []
        pending = [self._pending.pop(name) for name in due]
        device = next(iter(due.values())).device  # a loaded average may be on another one
        averages = [(await each).to(device) for each in dict.fromkeys(p.exchange for p in pending)]
        gradients = [each.average.to(device) for each in pending]
        return [self._outer_step(due, gradients, averages)]

    def _has_arrived(self, name: str, step: int) -> bool:
        # In a step in which it was to arrive, the bucket may have been left out.
        schedule = self._schedule
        return schedule.is_due(name, step) or schedule.steps_since_due(name, step) >= self.delay

    async def _send(
        self, part: GradBucket, due: Mapping[str, Tensor], comm: Communicator
    ) -> list[Tensor]:
        """Send the outer gradients of the parameters that are due; without delay, also step.

        Return as :meth:`_outer_step`.
        """
        if self.delay:
            self._begin(part, comm)
            return []
        average, gradients = await self._average(part, comm), part.gradients()
        # Until the outer step, anchors and parameters still tell what was sent.
        anchors = [self._entry(name, parameter)["anchor"] for name, parameter in due.items()]
        triples = pieces(anchors, list(due.values()), gradients)
        self.measure(comm.step, map(_disagreement, triples))
        return [self._outer_step(due, gradients, [average])]

    def _begin(self, part: GradBucket, comm: Communicator) -> None:
        async def average(comm: Communicator) -> Tensor:
            own = part.buffer()[::_SAMPLED].clone()
            average = await self._average(part, comm)
            scale = math.sqrt(average.numel() / max(len(own), 1))
            self.measure(comm.step, [[own.sub_(average[::_SAMPLED]).mul_(scale)]])
            return average

        exchange = comm.begin(average)
        for name, view in zip(part.names, part.gradients(), strict=True):
            self._pending[name] = Pending(exchange, view)

    async def _average(self, part: GradBucket, comm: Communicator) -> Tensor:
        """Average the outer gradients of a part in its buffer, and return that."""
        if self._follows_commits:
            self._sent[part.key] = part.names, kept(self.inner, [*part.names, part.key])
        buffer = part.buffer()
        average = await self.inner.reduce(part, comm.within(self.inner, key=part.key))
        if average is not buffer:
            buffer.copy_(average.view(-1))
        return buffer

    def _outer_step(
        self,
        parameters: Mapping[str, Tensor],
        gradients: Sequence[Tensor],
        averages: Sequence[Tensor],
    ) -> Tensor:
        """Step with outer gradients, unless one is not finite: one number of ``averages``.

        Return whether all are, () bool.
        """
        finite = torch.stack(list(map(all_finite, averages))).all()
        if is_known_false(finite):
            return finite
        self.remember(parameters)
        entries = [self._entry(name, parameter) for name, parameter in parameters.items()]
        state = ([entry[name] for entry in entries] for name in ("anchor", "momentum"))
        for some, anchors, momenta, d in pieces(list(parameters.values()), *state, gradients):
            moved = torch._foreach_mul(momenta, self.outer_momentum)  # noqa: SLF001
            torch._foreach_add_(moved, d)
            change = torch._foreach_add(d, moved, alpha=self.outer_momentum)  # noqa: SLF001
            ends = torch._foreach_sub(anchors, change, alpha=self.outer_lr)  # noqa: SLF001
            mixed = ends
            if self.merge:
                own = [p.to(end.dtype) for p, end in zip(some, ends, strict=True)]
                mixed = torch._foreach_lerp(ends, own, self.merge)  # noqa: SLF001
            for values, into in ((mixed, some), (ends, anchors), (moved, momenta)):
                store_if(finite, values, into)
        return finite

    def _entry(self, name: str, parameter: Tensor) -> dict[str, Tensor]:
        """Return the state of a parameter on its device; a loaded one may be on another."""
        entry = self.state[name]
        if entry["anchor"].device != parameter.device:
            entry = {key: tensor.to(parameter.device) for key, tensor in entry.items()}
            self.state[name] = entry
        return entry

    def _part(self, bucket: GradBucket, due: Mapping[str, Tensor]) -> GradBucket:
        """Return a bucket for the outer gradients of the parameters that are due."""
        index, is_last = self._progress.advance(list(due), bucket.left_out)
        return self._outer_bucket(bucket, due, index, is_last=is_last)

    def _outer_bucket(
        self, bucket: GradBucket, due: Mapping[str, Tensor], index: int, *, is_last: bool
    ) -> GradBucket:
        elements = sum(parameter.numel() for parameter in due.values())
        dtype = functools.reduce(torch.promote_types, (p.dtype for p in due.values()))
        return GradBucket(
            bucket.buffer().new_empty(elements, dtype=at_least_float32(dtype)),
            list(due.values()),
            list(due),
            index=index,
            is_last=is_last,
            step=self._schedule.round(bucket.step),
            left_out=bucket.left_out,
        )

    def synchronization_bytes(self, bucket: GradBucket, size: int) -> int | None:
        if bucket.step == self.start_step:
            return self.mean_bytes(bucket, size)
        parameters = zip(bucket.names, parameters_of(bucket), strict=True)
        due = {n: p for n, p in parameters if self._schedule.is_due(n, bucket.step)}
        if not due:
            return 0
        part = self._outer_bucket(bucket, due, 0, is_last=True)
        return self.inner.wire_bytes(part, size)

    def sends(self, step: int) -> bool:
        return step <= self.start_step or self._schedule.is_any_due(step)

    def takes(self, step: int) -> bool:
        return step <= self.start_step or self._schedule.is_any_due(step - self.delay)

    def commit(self) -> None:
        super().commit()
        for key, (names, _) in list(self._sent.items()):
            if not self._pending.keys() & set(names):
                del self._sent[key]

    def recover(self) -> None:
        """Forget pending averages, and the anchors, which may have moved on some ranks only.

        If commits are followed, anchors return to the last commit instead.

        New anchors are made in the next step in which a fragment is due. Ranks notice a failure in
        the next step that sends at the latest; if one sent in an earlier step, others would answer
        in a later one.
        """
        for _, entries in self._sent.values():
            restore(entries)
        self._sent.clear()
        super().recover()
        self._has_recovered = True
        self._pending.clear()
        self._step = -1
        if not self._follows_commits:
            self.state = {}

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        for name, pending in self._pending.items():
            pending.exchange.result()  # on CUDA the stream waits for it
            state[name]["outer_gradient"] = pending.average.clone()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._step = -1
        self._pending = {}
        for name, entry in self.state.items():
            if (average := entry.pop("outer_gradient", None)) is not None:
                self._pending[name] = Pending(Exchange.finished(average), average)


Kept: TypeAlias = tuple[CommHook, str, dict[str, Tensor] | None]
"""A hook, a key of its state, and a copy of the entry, None if there was none."""


def kept(hook: CommHook, keys: Sequence[str]) -> list[Kept]:
    """Return copies of these entries of a hook's state, and of those of the hooks nested in it."""
    return [
        (each, key, {name: t.clone() for name, t in each.state[key].items()})
        if key in each.state
        else (each, key, None)
        for each in tree(hook)
        for key in keys
    ]


def restore(entries: Sequence[Kept]) -> None:
    """Undo what has happened to entries since :func:`kept` returned them."""
    for hook, key, entry in entries:
        # Another dict, as when a state is loaded: hooks drop what they have made from the former.
        hook.state = {k: e for k, e in hook.state.items() if k != key}
        if entry is not None:
            hook.state[key] = entry


def _disagreement(tensors: Sequence[list[Tensor]]) -> Sequence[Tensor]:
    """Return the outer gradients of this rank, anchors minus parameters, minus their averages."""
    anchors, parameters, averages = tensors
    own = torch._foreach_sub(anchors, parameters)  # noqa: SLF001
    torch._foreach_sub_(own, averages)
    return own


class Pending(NamedTuple):
    """The average of one parameter's outer gradient, which an exchange computes."""

    exchange: Exchange
    average: Tensor
    """A view of what the exchange returns."""


@dataclass
class FragmentSchedule:
    """The steps in which each of ``fragments`` parts of a model is due.

    Fragment f is due in steps t > ``start`` with t - start = ⌊f·period/fragments⌋ modulo period.
    """

    start: int
    period: int
    fragments: int
    _fragment_of: dict[str, int] = field(default_factory=dict)

    def assign(
        self, parameters: Mapping[str, Tensor], units: Sequence[Sequence[str]] | None = None
    ) -> None:
        """Divide the parameters, in the model's order, into fragments of about equal size.

        ``units``: names of parameters that share a bucket in each step, and so share a fragment.

        Raises:
            CommHookError: There are more fragments than units, or than parameters.
        """
        parts = [[name for name in unit if name in parameters] for unit in units or ()]
        parts = [part for part in parts if part] or [[name] for name in parameters]
        if self.fragments > len(parts):
            kind = "parameters" if units is None else "units of the sharded model"
            raise CommHookError(
                f"expected at most as many fragments as {kind}, {len(parts)}, found "
                f"fragments={self.fragments}"
            )
        sizes = [sum(parameters[name].numel() for name in part) for part in parts]
        runs = runs_of(sizes, self.fragments)
        self._fragment_of = {
            name: run for part, run in zip(parts, runs, strict=True) for name in part
        }

    @property
    def names(self) -> list[str]:
        """The names of all parameters."""
        return list(self._fragment_of)

    def is_due(self, name: str, step: int) -> bool:
        """Return whether the fragment of a parameter is due in a step."""
        return step > self.start and self.steps_since_due(name, step) == 0

    def is_any_due(self, step: int) -> bool:
        """Return whether any fragment is due in a step."""
        offsets = {fragment * self.period // self.fragments for fragment in range(self.fragments)}
        return step > self.start and (step - self.start) % self.period in offsets

    def steps_since_due(self, name: str, step: int) -> int:
        """Return the number of steps since the latest one in which the fragment could be due."""
        offset = self._fragment_of.get(name, 0) * self.period // self.fragments
        return (step - self.start - offset) % self.period

    def round(self, step: int) -> int:
        """Return the number of steps before this one in which each fragment was due."""
        return (step - self.start - 1) // self.period


def runs_of(sizes: Sequence[int], count: int) -> list[int]:
    """Divide items into runs of about equal size; return the run, 0 to count - 1, of each item.

    An item is in the run that contains its middle.
    """
    total = max(sum(sizes), 1)
    starts = itertools.accumulate(sizes, initial=0)
    return [
        min(count * (2 * start + size) // (2 * total), count - 1)
        for start, size in zip(starts, sizes, strict=False)
    ]
