"""Rules for a hook inside other hooks."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import commhooks
from commhooks.comm.communicator import Communicator
from commhooks.hook.base import CommHook, tree
from commhooks.testing.compare import same_bits
from commhooks.testing.probe import Trainer, draw_gradients
from commhooks.testing.rules.context import RuleContext, as_coroutine, has_consensus, require
from reducer import GradBucket

__all__ = ["contribution", "nested"]

_STEPS = 3
# Relative to the largest contribution: enough for a sum in bfloat16, too little for a lie.
_TOLERANCE = 0.02


def nested(context: RuleContext) -> None:
    """Return the same bits inside another hook, whose state includes this hook's."""
    alone = as_coroutine(context.make_hook())
    wrapper = commhooks.create("schedule", stages=[(0, alone.to_config())])
    path, inside = next(iter(wrapper.nested().items()))
    require(inside == alone, f"expected {alone!r} inside the other hook, found {inside!r}")
    parameters = context.parameters()
    trainers = [Trainer(hook, parameters, stable_buckets=True) for hook in (alone, wrapper)]
    problems = []
    for step in range(_STEPS):
        gradients = draw_gradients(parameters, context.rank, step)
        if not same_bits(*(trainer.step(gradients) for trainer in trainers)):
            problems.append(f"expected the same numbers, found others in step {step}")
    own, of_wrapper = (trainer.state() for trainer in trainers)
    if not same_bits(of_wrapper.get(f".{path}", {}), own):
        problems.append("expected the same state, found another one")
    require(not problems, "; ".join(problems))


def contribution(context: RuleContext) -> None:
    """Set comm.contribution to what was sent, if tells_contribution = True.

    The average is the mean of the ranks' contributions, up to the rounding of sums on the wire.
    """
    hook = context.make_hook()
    recorder = _Recorder(hook)
    parameters = context.parameters()
    trainer = Trainer(recorder, parameters)
    for step in range(_STEPS):
        trainer.step(draw_gradients(parameters, context.rank, step))
    of_ranks: list[Any] = [None] * context.size
    dist.all_gather_object(of_ranks, recorder.contributions)
    if not hook.tells_contribution:
        require(
            all(told is None for told in recorder.contributions.values()),
            "expected tells_contribution = True for a hook that sets comm.contribution",
        )
    elif all(each.tells_contribution for each in tree(hook)) and has_consensus(hook):
        differences = [
            _difference([told[at] for told in of_ranks], average)
            for at, average in recorder.returned.items()
        ]
        require(not any(differences), "; ".join(filter(None, differences)))


@dataclass
class _Recorder(CommHook):
    """Record the contributions and the results of the inner hook, by step and bucket."""

    inner: CommHook

    contributions: dict[tuple[int, int], Tensor | None] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    returned: dict[tuple[int, int], Tensor] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    async def reduce(self, bucket: GradBucket, comm: Communicator) -> Tensor:
        within = comm.within(self.inner, wants_contribution=True)
        average = await self.inner.reduce(bucket, within)
        at = bucket.step, bucket.index()
        self.contributions[at] = (
            None if within.contribution is None else within.contribution.clone()
        )
        self.returned[at] = average.clone()
        return average


def _difference(contributions: Sequence[Tensor | None], average: Tensor) -> str | None:
    """Describe how the mean of the contributions differs from the average, if it does."""
    tensors = [tensor for tensor in contributions if tensor is not None]
    if len(tensors) < len(contributions):
        return "expected comm.contribution to be set, found None"
    if any(tensor.numel() != average.numel() for tensor in tensors):
        return f"expected {average.numel()} elements in comm.contribution, found another number"
    if average.numel() == 0:
        return None
    sent = torch.stack([tensor.double().view(-1) for tensor in tensors])
    error = (sent.mean(0) - average.double().view(-1)).abs().max().item()
    largest = sent.abs().max().item()
    if error <= _TOLERANCE * largest:
        return None
    return (
        f"expected the average to be the mean of the ranks' contributions, found a difference of "
        f"{error:.1e}, where the largest contribution is {largest:.1e}"
    )
