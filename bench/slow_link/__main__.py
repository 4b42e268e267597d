"""Training over a slow link: ``python -m bench.slow_link RESULT.json``, as root.

Train with plain averaging for STEPS steps, then with every other hook until it reaches the lowest
validation loss of plain averaging, or for --seconds. Each training is added to the file when it
ends. Hooks that the file has are not repeated, so the command may be interrupted at any time.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from bench.slow_link.hooks import HOOKS, PLAIN
from bench.slow_link.race import BITS_PER_SECOND, MODEL, RANKS, Limits, race
from bench.slow_link.record import Record
from commhooks.lab.comparison import TrainingPoint
from commhooks.lab.models import load_model

STEPS = 150
"""Steps of plain averaging, which take about nine minutes."""


def main() -> None:
    """Train with each hook that the file lacks."""
    arguments = _parser().parse_args()
    record = Record(arguments.result)
    for hook in arguments.hook or [PLAIN, *HOOKS]:
        if hook in record.courses and not arguments.again:
            continue
        print(hook, flush=True)
        course = race(hook, _limits(hook, record, arguments.seconds), _report)
        record.add(course, _about())


def _limits(hook: str, record: Record, seconds: float) -> Limits:
    if hook == PLAIN:
        return Limits(STEPS, math.inf, -math.inf)
    plain = record.courses.get(PLAIN)
    return Limits(2 * STEPS, seconds, plain.lowest.validation_loss if plain else -math.inf)


def _about() -> dict[str, object]:
    return {
        "model": MODEL,
        "parameters": sum(parameter.numel() for parameter in load_model(MODEL).parameters()),
        "ranks": RANKS,
        "bits_per_second": BITS_PER_SECOND,
    }


def _report(point: TrainingPoint) -> None:
    print(
        f"  step {point.step}: {point.seconds:.1f} s, {point.wire_bytes / 1e6:.1f} MB, "
        f"validation loss {point.validation_loss:.4f}",
        flush=True,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("result", type=Path, metavar="RESULT.json")
    parser.add_argument("--hook", action="append", help="may be repeated; default: all")
    parser.add_argument("--seconds", type=float, default=60.0, help="default: 60")
    parser.add_argument("--again", action="store_true", help="train also what is in the file")
    return parser


if __name__ == "__main__":
    main()
