"""Say which hook to use, from the seconds of a step with each, and what measuring them costs."""

from collections.abc import Callable, Mapping

from commhooks.costs.units import format_duration
from commhooks.hook.fidelity import fidelity_of

FALLBACK = "bf16"
"""The hook to keep if no other one helps, unless it does not help either."""
_NEVER = {"bare", "torch", "allreduce", "noop"}
_WORTH_IT = 1.1
"""The speed-up of a step that justifies a loss of accuracy."""
_TOLERATED = 2.0
"""The largest change of the loss, in percent, with which a hook is recommended."""

Noise = Callable[[str, str], float]
"""The seconds by which the steps with two hooks may differ by chance."""


def fallback_hook(
    seconds: Mapping[str, float], baseline: str, noise: Noise = lambda *_: 0.0
) -> str:
    """Return the choice if no hook helps: plain averaging, or bf16 where that is faster."""
    is_faster = FALLBACK in seconds and _gain(seconds, FALLBACK, baseline, noise) >= _WORTH_IT
    return FALLBACK if is_faster else baseline


def verdict(
    seconds: Mapping[str, float],
    baseline: str,
    losses: Mapping[str, float] | None = None,
    noise: Noise = lambda *_: 0.0,
) -> str:
    """Return sentences: the hook to use, its speed, and its effect on the loss if that is known.

    ``losses`` are changes of the loss in percent; where they lack a hook, those of small trainings
    count, see :mod:`commhooks.hook.fidelity`.
    """
    keep = fallback_hook(seconds, baseline, noise)
    others = sorted(seconds.keys() - _NEVER - {keep, FALLBACK}, key=lambda hook: seconds[hook])
    faster = {hook: _gain(seconds, hook, keep, noise) for hook in others}
    faster = {hook: gain for hook, gain in faster.items() if gain >= _WORTH_IT}
    changes = {hook: (losses or {}).get(hook, _change(hook)) for hook in faster}

    def described(hook: str) -> str:
        text = f"{hook}, {faster[hook]:.1f} times as fast as {_shown(keep)}"
        if (change := changes[hook]) is None:
            return f"{text}, with an unknown effect on the loss: train with it"
        where = "here" if losses and hook in losses else "at most, in small trainings"
        return f"{text}, with a validation loss of {change:+.1f} % {where}"

    known = {hook: change for hook, change in changes.items() if change is not None}
    good = next((hook for hook, change in known.items() if change <= _TOLERATED), None)
    good = good or next((hook for hook in faster if hook not in known), None)
    if good is not None:
        text = f"Use {described(good)}."
    else:
        text = f"No hook helps: keep {_shown(keep)}."
        if keep == FALLBACK:
            gain = seconds[baseline] / seconds[keep]
            text = f"No other hook helps: keep {keep}, {gain:.1f} times as fast as "
            text += f"{_shown(baseline)}."
        if others and not faster:
            share = seconds[others[0]] / seconds[keep]
            text += f" With {others[0]} a step takes {share:.2f} times as long"
            text += ", which may be noise." if share * _WORTH_IT < 1 else "."
    rest = [hook for hook in faster if good is None or seconds[hook] < seconds[good]]
    return f"{text} Faster: {described(rest[0])}." if rest else text


def _shown(baseline: str) -> str:
    return "torch DDP" if baseline == "torch" else baseline


def cost_of_measuring(seconds: float, saved_seconds: float, noise: float = 0.0) -> str:
    """Return a sentence that compares the time of a measurement with the time it can save.

    ``saved_seconds``: the most that any hook can save of a step.
    """
    if saved_seconds <= noise:
        return f"No other hook can save time here; measuring took {seconds:.0f} s."
    saved, steps = format_duration(saved_seconds), float(f"{seconds / saved_seconds:.2g}")
    return (
        f"Hooks can save at most {saved} of a step, so the {seconds:.0f} s of measuring are worth "
        f"it if you train for more than {steps:,.0f} steps."
    )


def fidelity_text(hook: str) -> str:
    """Return the change of the loss for a table; "" if it is not known with these options."""
    change = _change(hook)
    return "" if change is None else f"{change:+.1f} %"


def _change(hook: str) -> float | None:
    found = fidelity_of(hook)
    return found.worst if found else None


def _gain(seconds: Mapping[str, float], hook: str, other: str, noise: Noise) -> float:
    """Return the speed-up, 1 if it may be noise."""
    saved = seconds[other] - seconds[hook]
    return seconds[other] / seconds[hook] if saved > noise(hook, other) else 1.0
