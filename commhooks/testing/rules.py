"""The rules that every hook must follow, one function per rule, in the order they are checked.

Each rule runs on every rank and yields the problems it finds there. It must continue after a
problem if a collective follows, because the other ranks wait for this one.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import commhooks
from commhooks.comm.communicator import Communicator
from commhooks.hook.base import CommHook, has_consensus, is_lossless, tree
from commhooks.hook.options import instances_in
from commhooks.testing.compare import (
    differences,
    disagreement,
    mean_over_ranks,
    same_bits,
    tensor_layout,
    through_file,
)
from commhooks.testing.probe import Trainer, draw_gradients, probe_parameters
from reducer import GradBucket
from reducer.backends import NCCL, family_of

Factory = Callable[[], CommHook]
Problems = Iterator[str]
"""Descriptions of what was expected and what was found."""

_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_STEPS = 3
# Relative to the largest contribution: enough for a sum in bfloat16, too little for a wrong one.
_TOLERANCE = 0.02


@dataclass(frozen=True)
class RuleContext:
    """The context of a check: one rank of ``size``, a factory of the hook, and a device."""

    rank: int
    size: int
    make_hook: Factory
    device: torch.device

    def parameters(self, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
        """Return :func:`probe_parameters` on the device."""
        return probe_parameters(dtype, self.device)

    def trainer(self, hook: CommHook | None = None, **options: Any) -> Trainer:
        """Return a trainer of :meth:`parameters`, with a new hook by default."""
        chosen = self.make_hook() if hook is None else hook
        return Trainer(chosen, self.parameters(), **options)

    def step(self, trainer: Trainer, *seeds: int) -> dict[str, Tensor]:
        """Return the results of a step on this rank's gradients for these seeds."""
        return trainer.step(draw_gradients(trainer.parameters, self.rank, *seeds))

    def train(self, trainer: Trainer, steps: int = _STEPS) -> None:
        """Run the first steps, whose results do not matter."""
        for step in range(steps):
            self.step(trainer, step)

    def inexact(self, trainer: Trainer, found: Mapping[str, Tensor], step: int) -> list[str]:
        """Describe where the results of a step differ from the mean over ranks."""
        like = trainer.parameters
        of_ranks = [draw_gradients(like, peer, step) for peer in range(self.size)]
        return differences(found, mean_over_ranks(of_ranks, like), self.size)

    def wrong_results(self, trainer: Trainer, steps: int = _STEPS) -> Problems:
        """Train, and describe what is wrong with the results."""
        hook = trainer.hook
        for step in range(steps):
            found = self.step(trainer, step)
            yield from _not_finite(found)
            if is_lossless(hook):
                yield from self.inexact(trainer, found, step)
            if has_consensus(hook):
                yield from disagreement(found)


RULES: dict[str, Callable[[RuleContext], Problems]] = {}
"""The docstring of a rule says what it requires."""


def _rule(check: Callable[[RuleContext], Problems]) -> Callable[[RuleContext], Problems]:
    RULES[check.__name__] = check
    return check


@_rule
def registered(context: RuleContext) -> Problems:
    """Be available by name: decorate the class with @register_hook("name")."""
    hook = context.make_hook()
    kind = type(hook)
    if kind.name not in commhooks.available():
        yield f"expected {kind.__name__} to be registered by name, found none"
    elif (found := type(commhooks.create(hook.to_config()))) is not kind:
        yield f"expected create({kind.name!r}) to make a {kind}, found {found}"


@_rule
def config(context: RuleContext) -> Problems:
    """Be rebuilt equal by create(hook.to_config()), also through JSON."""
    hook = context.make_hook()
    try:
        stored = json.loads(json.dumps(hook.to_config()))
    except TypeError as error:
        yield f"{hook.to_config()} cannot be written as JSON: {error}"
        return
    if (found := commhooks.create(stored)) != hook:
        yield f"expected {hook!r} from {stored}, found {found!r}"


@_rule
def representation(context: RuleContext) -> Problems:
    """Have a repr(hook) that is source code of an equal hook."""
    hook = context.make_hook()
    try:
        kinds = {type(each).__name__: type(each) for each in tree(hook)}
        found = eval(repr(hook), kinds | {"torch": torch})
    except Exception as error:
        yield f"{hook!r} is not valid source code: {error}"
        return
    if found != hook or found.to_config() != hook.to_config():
        yield f"expected the source {hook!r} to make that hook, found {found!r}"


@_rule
def result(context: RuleContext) -> Problems:
    """Return finite results with the dtype, shape, device and memory layout of the gradients."""
    for trainer, _, found in _steps_by_dtype(context):
        yield from _not_finite(found)
        for name, gradient in found.items():
            expected = tensor_layout(trainer.parameters[name])
            if tensor_layout(gradient) != expected:
                yield f"{name}: expected {expected}, found {tensor_layout(gradient)}"


@_rule
def mean(context: RuleContext) -> Problems:
    """Return the mean over ranks, up to rounding, if lossless = True."""
    for trainer, step, found in _steps_by_dtype(context):
        yield from context.inexact(trainer, found, step)


@_rule
def alone(context: RuleContext) -> Problems:
    """Send nothing on one rank, and leave gradients unchanged if lossless = True."""
    trainer = context.trainer()
    for step in range(_STEPS):
        gradients = draw_gradients(trainer.parameters, context.rank, step)
        found = trainer.step(gradients)
        yield from _not_finite(found)
        if is_lossless(trainer.hook) and not same_bits(found, gradients):
            yield "expected unchanged gradients, found other numbers"
    if sent := trainer.handle.stats().total.wire_bytes:
        yield f"expected no bytes sent, found {sent}"


@_rule
def deterministic(context: RuleContext) -> Problems:
    """Return the same bits for the same gradients."""
    trainers = [context.trainer() for _ in range(2)]
    runs = [[context.step(trainer, step) for step in range(_STEPS)] for trainer in trainers]
    if not same_bits(*runs):
        yield "expected two runs to agree bit for bit, found other numbers"


@_rule
def consensus(context: RuleContext) -> Problems:
    """Return the same bits on all ranks, unless consensus = False."""
    trainer = context.trainer()
    for step in range(4):
        yield from disagreement(context.step(trainer, step))


@_rule
def zeros(context: RuleContext) -> Problems:
    """Return zeros for zero gradients."""
    trainer = context.trainer()
    for step in range(_STEPS):
        for name, gradient in trainer.step(context.parameters()).items():
            if gradient.any():
                yield f"{name} in step {step}: expected zeros, found {gradient.abs().max()}"


@_rule
def sizes(context: RuleContext) -> Problems:
    """Reduce buckets of any size, including those of one element or none."""
    lengths = (129, 5, 1, 0, 64, 3, 2, 31)
    for dtype in (torch.float32, torch.float16):
        parameters = {
            name: torch.zeros(length, dtype=dtype, device=context.device)
            for name, length in zip(context.parameters(), lengths, strict=True)
        }
        trainer = Trainer(context.make_hook(), parameters, bucket_cap_mb=1e-6)  # one in each bucket
        yield from context.wrong_results(trainer)


@_rule
def non_finite(context: RuleContext) -> Problems:
    """Change no state if a gradient is not finite on any rank, and show it in the results.

    The results of its bucket are not finite, so that a gradient scaler notices, or the results for
    that gradient are zeros. Other buckets are not affected. With consensus = False, other ranks may
    not learn of it and continue, but the state must stay finite.
    """
    trainer = context.trainer(bucket_cap_mb=25)
    agrees = has_consensus(trainer.hook)
    context.train(trainer, 2)
    for culprit in range(context.size):
        before = through_file(trainer.state())
        gradients = draw_gradients(trainer.parameters, context.rank, 2, culprit)
        number = (torch.inf, -torch.inf, torch.nan)[culprit % 3]
        if context.rank == culprit:
            gradients["matrix"][3, 4] = number
        bad = trainer.step(gradients)
        state = trainer.state()
        if not agrees:
            if not all(tensor.isfinite().all() for _, tensor in instances_in(state, Tensor)):
                yield f"expected a finite state_dict() after a gradient of {number}"
        elif not same_bits(state, before):
            yield (
                f"expected state_dict() as it was before a gradient of {number} on rank {culprit}, "
                "found it changed"
            )
        if agrees and bad["matrix"].any() and not _not_finite(bad):
            yield (
                f"expected a result that is not finite, or zeros, after a gradient of {number} on "
                f"rank {culprit}; found neither"
            )
        for problem in _not_finite(context.step(trainer, 3, culprit)):
            yield f"in the step after a gradient of {number}: {problem}"


@_rule
def keys(context: RuleContext) -> Problems:
    """Store state by parameter name, so that it does not depend on the buckets."""
    trainer = context.trainer()
    context.train(trainer)
    saved = through_file(trainer.handle.state_dict())
    fresh = context.trainer()
    # Raises if a key is neither a parameter name nor known to the hook.
    fresh.handle.load_state_dict(saved)
    if not same_bits(fresh.state(), trainer.state()):
        yield "expected state_dict() to return what load_state_dict() was given, found another one"


@_rule
def resume(context: RuleContext) -> Problems:
    """Continue from a saved state_dict() with the same bits."""
    trainer, resumed = (context.trainer(stable_buckets=True) for _ in range(2))
    context.train(trainer)
    resumed.handle.load_state_dict(through_file(trainer.handle.state_dict()))
    for step in range(_STEPS, 2 * _STEPS):
        if not same_bits(context.step(trainer, step), context.step(resumed, step)):
            yield (
                "expected the same numbers with and without a restart, found others in step "
                f"{step}; everything that later steps depend on must be in `state`"
            )


@_rule
def wire(context: RuleContext) -> Problems:
    """Send through the communicator, on every rank."""
    trainer = context.trainer()
    context.train(trainer, 2)
    if not trainer.handle.stats().total.wire_bytes:
        yield f"expected bytes sent by every rank, found none sent by rank {context.rank}"


@_rule
def cost(context: RuleContext) -> Problems:
    """Send the bytes that wire_bytes() returns, unless it returns None."""
    hook = _as_coroutine(context.make_hook())
    reduce = hook.reduce
    expected: dict[tuple[str, ...], list[int | None]] = {}

    async def note(bucket: GradBucket, comm: Communicator) -> Tensor:
        expected.setdefault(tuple(bucket.names), []).append(hook.wire_bytes(bucket, comm.size))
        average: Tensor = await reduce(bucket, comm)
        return average

    hook.reduce = note
    trainer = context.trainer(hook, stable_buckets=True)
    context.train(trainer)
    trainer.handle.adapter.drain()  # exchanges send as well
    for bucket in trainer.handle.stats().buckets:
        of_steps = expected[bucket.names]
        if None in of_steps or bucket.wire_bytes is None:
            continue
        sent = round(bucket.wire_bytes * _STEPS)
        if sent != sum(filter(None, of_steps)):
            yield (
                f"{bucket.names}: wire_bytes() returned {of_steps} in {_STEPS} steps, but {sent} "
                "bytes were sent"
            )


@_rule
def unused(context: RuleContext) -> Problems:
    """Accept parameters that some or all ranks do not use, and backwards under no_sync()."""
    trainer = context.trainer(find_unused_parameters=True)
    hook = trainer.hook
    used = {name: tensor for name, tensor in trainer.parameters.items() if name != "spare"}
    used_by_first = {name: tensor for name, tensor in used.items() if name != "vector"}
    found: dict[str, Tensor] = {}
    for step in range(_STEPS):
        accumulated, last = (
            [
                draw_gradients(used_by_first if r == 0 < context.size - 1 else used, r, step, i)
                for r in range(context.size)
            ]
            for i in range(2)
        )
        found = trainer.step(last[context.rank], before=[accumulated[context.rank]])
        yield from _not_finite(found)
        if "spare" in found:
            yield "expected no gradient for a parameter that no rank used, found one"
        if is_lossless(hook):
            sums = [
                {name: one[name] + two[name] for name in one}
                for one, two in zip(accumulated, last, strict=True)
            ]
            yield from differences(found, mean_over_ranks(sums, used), 2 * context.size)
    if has_consensus(hook):
        yield from disagreement(found)


@_rule
def failure(context: RuleContext) -> Problems:
    """Let no rank hang if the hook raises on one, and take the next step correctly on all.

    Not on NCCL, where the failure of one rank ends the job.
    """
    world = dist.group.WORLD
    assert world is not None
    if context.size > 1 and family_of(world, context.device) == NCCL:
        return
    hook = _as_coroutine(context.make_hook())
    trainer = context.trainer(hook)
    context.step(trainer, 0)

    async def fail(*_: object) -> Tensor:
        raise ValueError("raised by the conformance kit")

    reduce = hook.reduce
    hook.reduce = fail if context.rank == 0 else reduce
    raised = False
    try:
        context.step(trainer, 1)
    except Exception:
        raised = True
    hook.reduce = reduce
    if context.rank == 0 and not raised:
        yield "expected backward() to raise the error of the hook, found that it did not"
    found = context.step(trainer, 2)
    for problem in [*_not_finite(found), *(disagreement(found) if has_consensus(hook) else ())]:
        yield f"in the step after a failure: {problem}"


@_rule
def nested(context: RuleContext) -> Problems:
    """Return the same bits inside another hook, whose state includes this hook's."""
    alone = _as_coroutine(context.make_hook())
    wrapper = commhooks.create("schedule", stages=[(0, alone.to_config())])
    path, inside = next(iter(wrapper.nested().items()))
    if inside != alone:
        yield f"expected {alone!r} inside the other hook, found {inside!r}"
        return
    trainers = [context.trainer(hook, stable_buckets=True) for hook in (alone, wrapper)]
    for step in range(_STEPS):
        if not same_bits(*(context.step(trainer, step) for trainer in trainers)):
            yield f"expected the same numbers, found others in step {step}"
    own, of_wrapper = (trainer.state() for trainer in trainers)
    if not same_bits(of_wrapper.get(f".{path}", {}), own):
        yield "expected the same state, found another one"


@_rule
def contribution(context: RuleContext) -> Problems:
    """Set comm.contribution to what was sent, if tells_contribution = True.

    The average is the mean of the ranks' contributions, up to the rounding of sums on the wire.
    """
    hook = context.make_hook()
    recorder = _Recorder(hook)
    trainer = context.trainer(recorder)
    context.train(trainer)
    of_ranks: list[Any] = [None] * context.size
    dist.all_gather_object(of_ranks, recorder.contributions)
    if not hook.tells_contribution:
        if any(told is not None for told in recorder.contributions.values()):
            yield "expected tells_contribution = True for a hook that sets comm.contribution"
    elif all(each.tells_contribution for each in tree(hook)) and has_consensus(hook):
        for at, average in recorder.returned.items():
            yield from _not_the_mean([told[at] for told in of_ranks], average)


@_rule
def torch_ddp(context: RuleContext) -> Problems:
    """Work on torch.nn.parallel.DistributedDataParallel."""
    yield from context.wrong_results(context.trainer(torch_ddp=True))


@dataclass
class _Recorder(CommHook):
    """Record the contributions and the results of the inner hook, by step and bucket."""

    inner: CommHook

    def __post_init__(self) -> None:
        super().__post_init__()
        self.contributions: dict[tuple[int, int], Tensor | None] = {}
        self.returned: dict[tuple[int, int], Tensor] = {}

    async def reduce(self, bucket: GradBucket, comm: Communicator) -> Tensor:
        within = comm.within(self.inner, wants_contribution=True)
        average = await self.inner.reduce(bucket, within)
        at = bucket.step, bucket.index()
        sent = within.contribution
        self.contributions[at] = None if sent is None else sent.clone()
        self.returned[at] = average.clone()
        return average


def _not_the_mean(contributions: Sequence[Tensor | None], average: Tensor) -> Problems:
    """Describe how the mean of the contributions differs from the average, if it does."""
    tensors = [tensor for tensor in contributions if tensor is not None]
    if len(tensors) < len(contributions):
        yield "expected comm.contribution to be set, found None"
    elif any(tensor.numel() != average.numel() for tensor in tensors):
        yield f"expected {average.numel()} elements in comm.contribution, found another number"
    elif average.numel():
        sent = torch.stack([tensor.double().view(-1) for tensor in tensors])
        error = (sent.mean(0) - average.double().view(-1)).abs().max().item()
        largest = sent.abs().max().item()
        if not error <= _TOLERANCE * largest:
            yield (
                "expected the average to be the mean of the ranks' contributions, found a "
                f"difference of {error:.1e}, where the largest contribution is {largest:.1e}"
            )


def _steps_by_dtype(context: RuleContext) -> Iterator[tuple[Trainer, int, dict[str, Tensor]]]:
    """Yield the trainer, the number and the results of some steps, for each dtype."""
    for dtype in _DTYPES:
        trainer = Trainer(context.make_hook(), context.parameters(dtype))
        for step in range(_STEPS):
            yield trainer, step, context.step(trainer, step)


def _as_coroutine(hook: CommHook) -> Any:
    """Make the engine call ``reduce`` of the hook, even if there is a version in C++."""
    changed: Any = hook
    if type(hook).native is not CommHook.native:
        native = hook.native
        changed.native = lambda group, step=None: native(group, step) and None
    return changed


def _not_finite(found: Mapping[str, Tensor]) -> list[str]:
    return [f"{name} is not finite" for name, g in found.items() if not g.isfinite().all()]
