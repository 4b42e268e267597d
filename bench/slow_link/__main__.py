"""Training over a slow link: ``python -m bench.slow_link RESULT.json``, as root.

Train with plain averaging for STEPS steps, then with every other hook until it reaches the lowest
validation loss of plain averaging, for at most twice as many steps. Each training is added to the
file when it ends. Hooks that the file has are not repeated, so the command may be interrupted at
any time.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from bench.slow_link.race import MODEL, Limits, Setting, race
from bench.slow_link.record import PLAIN, Record
from commhooks.lab.comparison import TrainingPoint
from commhooks.lab.models import load_model
from commhooks.lab.units import parse_rate

STEPS = 150
"""Steps of plain averaging, which take about nine minutes with 2 ranks over 100 Mbit/s."""
HOOKS = (
    "noop",
    "bf16",
    "int8",
    "int4",
    "onebit",
    "topk:warmup_steps=0",
    "powersgd:rank=4,start_step=0",
    "powersgd:rank=8,start_step=0",
    "auto",
)
"""Eight hooks, chosen before they were measured, and ``noop``, which a hook has to beat."""


def main() -> None:
    """Train with each hook that the file lacks."""
    arguments = _parser().parse_args()
    record = Record(arguments.result)
    setting = Setting(arguments.ranks, parse_rate(arguments.rate))
    named = arguments.hook or (PLAIN, *HOOKS)
    for hook in named:
        if hook in record.courses and not arguments.again:
            continue
        print(hook, flush=True)
        course = race(hook, setting, _limits(hook, record, arguments), _report)
        record.add(course, _about(setting))


def _limits(hook: str, record: Record, arguments: argparse.Namespace) -> Limits:
    if hook == PLAIN:
        return Limits(arguments.steps)
    plain = record.courses.get(PLAIN)
    loss = plain.lowest.validation_loss if plain else -math.inf
    return Limits(2 * arguments.steps, arguments.seconds, loss)


def _about(setting: Setting) -> dict[str, object]:
    return {
        "model": MODEL,
        "parameters": sum(parameter.numel() for parameter in load_model(MODEL).parameters()),
        "ranks": setting.ranks,
        "bits_per_second": setting.bits_per_second,
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
    parser.add_argument("--ranks", type=int, default=2, help="default: 2")
    parser.add_argument("--rate", default="100mbit", help="of each rank's link; default: 100mbit")
    parser.add_argument("--hook", action="append", help="may be repeated; default: eight and noop")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"of allreduce; default: {STEPS}")
    parser.add_argument("--seconds", type=float, default=math.inf, help="at most, for each hook")
    parser.add_argument("--again", action="store_true", help="train also what is in the file")
    return parser


if __name__ == "__main__":
    main()
