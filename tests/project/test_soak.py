"""The soak draws the same trial from the same seed, and its oracle notices what must not happen."""

import pytest
from soak.oracle import complaints
from soak.outcome import Outcome
from soak.ranks import End
from soak.training import LAST_STEP
from soak.trial import Fault, Trial, draw

OURS = "CommHookPeerError"


def trial(kind: str, place: str) -> Trial:
    fault = Fault(kind, 0, 1, place)
    return Trial(0, 2, "mlp", False, {}, {"name": "int8"}, 4, 1, fault, None, None, is_uneven=False)


def good(log: str = "", **changes: object) -> End:
    outcome = Outcome(**{"digests": {0: "a"}, "done": True, **changes})  # type: ignore[arg-type]
    return End(outcome, 0, 1.0, log)


def failed(kind: str, text: str = "", **changes: object) -> End:
    return good(errors=[(1, kind, text, 0.0)], failed_at=2.0, done=False, **changes)


ENDS = {
    "all is well": ("none", "loader", [good(), good()], ""),
    "a rank hangs": ("none", "loader", [good(), End()], "rank 1 hangs"),
    "a rank aborts": ("none", "loader", [good(), End(None, -6)], "signal 6"),
    "models differ": ("none", "loader", [good(), good(digests={0: "b"})], "models differ"),
    "a rank fails for no reason": ("slow", "in", [good(), failed(OURS)], "although nothing did"),
    "a death": ("kill", "in", [End(None, -9, 1.0), failed(OURS)], ""),
    "another error": ("kill", "in", [End(None, -9, 1.0), failed("RuntimeError")], "expected Comm"),
    "a death after the end": (
        "kill at any time", "in", [good(injected_at=1.0, log=LAST_STEP), good()], "",
    ),
    "a death in the last step": (
        "kill at any time", "in", [End(None, -9, 1.0, LAST_STEP), good()], "",
    ),
    "a death before it": (
        "kill at any time", "in", [End(None, -9, 1.0), good()], "did not notice",
    ),
    "no error": ("kill", "in", [End(None, -9, 1.0), good()], "did not notice"),
    "a late error": (
        "kill", "in", [End(None, -9, 1.0), good(errors=[(1, OURS, "", 0.0)], failed_at=60.0)],
        "59.0 s after the fault",
    ),
    "own error": (
        "ValueError", "loader",
        [failed("ValueError", "out of luck", injected_at=1.0), failed(OURS)], "",
    ),
    "no reason": (
        "ValueError", "in",
        [failed("CommHookError", "out of luck", injected_at=1.0), failed(OURS, "lost")],
        "expected the reason of rank 0",
    ),
    "training ends": (
        "SystemExit", "in",
        [failed("SystemExit", "out of luck", injected_at=1.0), failed(OURS, "out of luck")],
        "did not go on",
    ),
    "refused on one rank": (
        "none", "loader", [good(), good(refused="no")], "refused on some ranks only",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ENDS)
def test_the_oracle(name: str) -> None:
    kind, place, ends, expected = ENDS[name]
    found = " ".join(complaints(trial(kind, place), ends, None))
    assert (expected in found) if expected else not found


def test_other_numbers_than_without_a_fault() -> None:
    found = complaints(trial("slow", "in"), [good()] * 2, [good(digests={0: "b"})] * 2)
    assert "other numbers than without a fault from step 0" in " ".join(found)


def test_a_seed_gives_one_trial() -> None:
    assert [draw(seed) for seed in range(50)] == [draw(seed) for seed in range(50)]
    assert len({draw(seed).fault.kind for seed in range(200)}) == 11


def test_a_hook_that_does_not_fit_is_no_failure() -> None:
    refused = [End(Outcome(refused="no weight"), 0, 1.0)] * 2
    assert not list(complaints(trial("slow", "in"), refused, refused))
