"""What each trial must show. Every sentence that :func:`complaints` returns is a failure."""

from collections.abc import Iterator, Sequence

from soak.faults import RAISED
from soak.outcome import Outcome
from soak.ranks import End
from soak.training import LAST_STEP, TIMEOUT
from soak.trial import ABRUPT, DELAYS, IN_HOOK, Trial

__all__ = ["complaints", "needs_reference"]

_MARGIN = 10.0  # seconds, for a machine that is busy


def needs_reference(trial: Trial) -> bool:
    """Return whether the same training without a fault must give the same numbers."""
    return trial.checkpoint is not None or trial.fault.kind in DELAYS


def complaints(trial: Trial, ends: Sequence[End], reference: Sequence[End] | None) -> Iterator[str]:
    """Yield what contradicts the promises of docs/reliability.md.

    Args:
        trial: the trial.
        ends: how its ranks ended.
        reference: of the same training without a fault or a break, where it must be the same.
    """
    for rank, end in enumerate(ends):
        if end.code is None:
            yield f"rank {rank} hangs; its threads were here:\n{end.log[-6000:]}"
        elif end.code < 0 and not (rank == trial.fault.rank and trial.fault.kind in ABRUPT):
            yield f"rank {rank} was ended by signal {-end.code}:\n{end.log[-4000:]}"
    outcomes = [end.outcome for end in ends]
    refusals = {outcome.refused for outcome in outcomes if outcome is not None}
    if any(refusals):  # a hook that does not fit the model
        if "" in refusals:
            yield f"a hook was refused on some ranks only: {refusals}"
        return
    if reference is not None and not all(end.outcome and end.outcome.done for end in reference):
        yield f"the training without a fault failed: {[end.outcome for end in reference]}"
        return
    yield from _errors(trial, ends)
    yield from _models(trial, outcomes)
    if reference is not None:
        for rank, (outcome, end) in enumerate(zip(outcomes, reference, strict=True)):
            expected = end.outcome.digests if end.outcome is not None else {}
            found = outcome.digests if outcome is not None else {}
            different = [step for step in found if found[step] != expected.get(step)]
            if different:
                yield f"rank {rank}: other numbers than without a fault from step {different[0]} on"


def _errors(trial: Trial, ends: Sequence[End]) -> Iterator[str]:
    fault, victim = trial.fault, ends[trial.fault.rank].outcome
    if fault.kind == "kill at any time" and LAST_STEP in ends[fault.rank].log:
        return  # the others may have ended without it
    injected = victim.injected_at if victim else None
    happened = injected is not None or (fault.kind in ABRUPT and ends[fault.rank].code != 0)
    soft = fault.kind in RAISED and fault.place in IN_HOOK
    if not happened or fault.kind in (*DELAYS, "nan", "none"):
        for rank, end in enumerate(ends):
            if end.outcome is not None and not end.outcome.done:
                yield f"rank {rank} failed although nothing did: {end.outcome.errors}"
        return
    began = injected if injected is not None else ends[fault.rank].at
    for rank, end in enumerate(ends):
        outcome = end.outcome
        if outcome is None:
            if rank != fault.rank:
                yield f"rank {rank} did not report, exit code {end.code}:\n{end.log[-3000:]}"
            continue
        if not outcome.errors:
            if trial.agrees or rank == fault.rank:
                yield f"rank {rank} did not notice the fault"
            continue
        step, kind, text, _ = outcome.errors[0]
        if rank == fault.rank and fault.kind in RAISED:
            expected = fault.kind
            if soft and fault.kind == "ValueError":
                expected = "CommHookError"
            if kind != expected or "out of luck" not in text:
                yield f"rank {rank}: expected its own {expected}, found {kind}: {text}"
        elif kind != "CommHookPeerError" and not (trial.torch_ddp and kind == "RuntimeError"):
            # Collectives of torch's own wrapper raise what the backend raises.
            yield f"rank {rank}: expected CommHookPeerError, found {kind} in step {step}: {text}"
        elif soft and "out of luck" not in text:
            yield f"rank {rank}: expected the reason of rank {fault.rank}, found: {text}"
        if outcome.failed_at is not None and not soft:
            waited = outcome.failed_at - began
            if waited > TIMEOUT * (2 if fault.kind == "long stop" else 1) + _MARGIN:
                yield f"rank {rank}: failed {waited:.1f} s after the fault"
        if soft and not (outcome.done and len(outcome.errors) == 1):
            yield f"rank {rank} did not go on after the step that failed: {outcome.errors}"


def _models(trial: Trial, outcomes: Sequence[Outcome | None]) -> Iterator[str]:
    if not trial.agrees:
        return
    found: dict[int, set[str]] = {}
    for outcome in outcomes:
        for step, digest in outcome.digests.items() if outcome is not None else ():
            found.setdefault(step, set()).add(digest)
    different = [step for step, digests in sorted(found.items()) if len(digests) > 1]
    if different:
        yield f"models differ after step {different[0]}"
    skips = trial.hook["name"] == "skip_nonfinite" and trial.replacement is None
    if trial.fault.kind == "nan" and skips:
        for rank, outcome in enumerate(outcomes):
            if outcome is not None and not outcome.finite:
                yield f"rank {rank}: parameters are not finite although such steps are skipped"
