"""Rules for the state of a hook."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from commhooks.testing.compare import same_bits, through_file
from commhooks.testing.probe import Trainer, draw_gradients
from commhooks.testing.rules.context import RuleContext, has_consensus, not_finite, require

__all__ = ["keys", "non_finite", "resume"]


def non_finite(context: RuleContext) -> None:
    """Change no state if a gradient is not finite on any rank, and show it in the results.

    The results of its bucket are not finite, so that a gradient scaler notices, or the results for
    that gradient are zeros. Other buckets are not affected. With consensus = False, other ranks may
    not learn of it and continue, but the state must stay finite.
    """
    parameters = context.parameters()
    hook = context.make_hook()
    trainer = Trainer(hook, parameters, bucket_cap_mb=25)
    for step in range(2):
        trainer.step(draw_gradients(parameters, context.rank, step))
    problems = []
    for culprit in range(context.size):
        before = through_file(trainer.state())
        gradients = draw_gradients(parameters, context.rank, 2, culprit)
        number = (torch.inf, -torch.inf, torch.nan)[culprit % 3]
        if context.rank == culprit:
            gradients["matrix"][3, 4] = number
        bad = trainer.step(gradients)
        if not has_consensus(hook):
            if not _is_finite(trainer.state()):
                problems.append(f"expected a finite state_dict() after a gradient of {number}")
        elif not same_bits(trainer.state(), before):
            problems.append(
                f"expected state_dict() as it was before a gradient of {number} on rank {culprit}, "
                "found it changed"
            )
        is_zero = not bad["matrix"].any()
        if has_consensus(hook) and not is_zero and not not_finite(bad):
            problems.append(
                f"expected a result that is not finite, or zeros, after a gradient of {number} on "
                f"rank {culprit}; found neither"
            )
        after = trainer.step(draw_gradients(parameters, context.rank, 3, culprit))
        problems += [f"in the step after a gradient of {number}: {p}" for p in not_finite(after)]
    require(not problems, "; ".join(problems))


def _is_finite(state: Any) -> bool:
    """Return whether all tensors in the nested dicts of a state_dict() are finite."""
    if isinstance(state, Mapping):
        return all(map(_is_finite, state.values()))
    return not isinstance(state, Tensor) or bool(state.isfinite().all())


def keys(context: RuleContext) -> None:
    """Store state by parameter name, so that it does not depend on the buckets."""
    _, trainer = context.train(steps=3)
    saved = through_file(trainer.handle.state_dict())
    hook = context.make_hook()
    fresh = Trainer(hook, context.parameters())
    fresh.handle.load_state_dict(
        saved
    )  # raises if a key is neither a parameter name nor known to the hook
    require(
        same_bits(fresh.state(), trainer.state()),
        "expected state_dict() to return what load_state_dict() was given, found something else",
    )


def resume(context: RuleContext) -> None:
    """Continue from a saved state_dict() with the same bits."""
    parameters = context.parameters()
    trainer = Trainer(context.make_hook(), parameters, stable_buckets=True)
    for step in range(3):
        trainer.step(draw_gradients(parameters, context.rank, step))
    resumed = Trainer(context.make_hook(), parameters, stable_buckets=True)
    resumed.handle.load_state_dict(through_file(trainer.handle.state_dict()))
    changed = []
    for step in range(3, 6):
        gradients = draw_gradients(parameters, context.rank, step)
        if not same_bits(trainer.step(gradients), resumed.step(gradients)):
            changed.append(step)
    require(
        not changed,
        f"expected the same numbers with and without a restart, found others in steps {changed}; "
        "everything that later steps depend on must be in `state`",
    )
