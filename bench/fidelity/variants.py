"""Hooks with settings of their own that are trained on the GPT: what their pages recommend."""

from __future__ import annotations

from typing import Any

from bench.fidelity.trained_hooks import REFERENCE, TrainedHook, trained_hooks

__all__ = ["trained_on"]

_CHUNKS: dict[str, Any] = {"chunk": 4096, "density": 1 / 64, "bits": 2, "warmup_steps": 0}
_SPARSE = {
    "name": "error_feedback",
    "decay": 0.95,
    "inner": {"name": "topk", **_CHUNKS, "error_feedback": False},
}
_E3M0 = {"name": "fp4", "format": "e3m0", "error_feedback": False}
_DELAYED = {"fragments": 5, "delay": 5, "merge": 0.5, "outer_lr": 0.4}


def _diloco(name: str, recipe: str | None = None, **options: Any) -> TrainedHook:
    return TrainedHook("diloco", options, recipe, name=name)


_VARIANTS = [
    # The recipes of docs/hooks/diloco.md, all with the same period: 1,000 steps are 33 of 30 steps.
    # DiLoCo itself is the hook's default.
    _diloco("INTELLECT-1", inner="int8"),
    _diloco("Streaming DiLoCo", inner=_E3M0, **_DELAYED),
    _diloco("Eager updates", inner="int4", eager=True, outer_lr=0.4),
    _diloco("MuLoCo", "Muon", inner="int2"),
    _diloco("SparseLoCo", outer_lr=1.0, outer_momentum=0.0, inner=_SPARSE),
    _diloco("diloco with int4", inner="int4"),
    _diloco("diloco with int4 and Muon", "Muon", outer_momentum=0.5, inner="int4"),
    # A thirtieth of the bytes. Of the options tried on seed 3 the best, see docs/hooks/diloco.md.
    _diloco("diloco with int4, period 4", period=4, outer_momentum=0.5, inner="int4"),
    TrainedHook(REFERENCE, recipe="Muon", name="plain averaging with Muon"),
    TrainedHook("demo", {"sign": True, "decay": 0.95}, "SGD for signs", name="demo with signs"),
    TrainedHook("topk", _CHUNKS, name="topk in chunks, 2 bits"),
    # About a thirtieth of the bytes, in every step.
    TrainedHook("topk", {**_CHUNKS, "density": 3 / 64, "bits": 4}, name="topk in chunks, 4 bits"),
    TrainedHook("powersgd", {"rank": 2}, name="powersgd, rank 2"),
]


def trained_on(task: str) -> list[TrainedHook]:
    """Return the hooks at their defaults, and on the GPT also the variants."""
    return [*trained_hooks(), *(_VARIANTS if task == "gpt" else [])]
