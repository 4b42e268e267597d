"""Training over a slow link: ``python -m bench.slow_link RESULT.json``, as root.

Train with plain averaging for STEPS steps, then with every other hook until it reaches the lowest
validation loss of plain averaging, for at most twice as many steps. Each training is added to the
file when it ends. Hooks that the file has are not repeated, so the command may be interrupted at
any time.

The model is the demo's GPT, enlarged. It and its training are also for

    commhooks compare --model bench.slow_link:make_gpt --input bench.slow_link:make_batch \\
        --train bench.slow_link:train --link 100mbit --hooks ...
"""

import argparse
import itertools
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bench.fidelity.tasks import Text, adamw
from bench.files import Results
from commhooks.cluster import Ranks
from commhooks.cluster.links import shaped_link
from commhooks.costs.units import parse_rate
from commhooks.hook.options import from_json
from commhooks.lab.comparison import TrainingPoint
from commhooks.lab.comparison.entry import BARE, Entry
from commhooks.lab.comparison.remote import ComparedModel
from commhooks.lab.models import Workload
from examples.gpt import GPT, GPTConfig

PLAIN = "allreduce"
"""The hook that all others are compared with."""
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

MODEL = "bench.slow_link:make_gpt"
TRAINING = "bench.slow_link:train"
STRIDE = 10  # steps between validations
BARE_STEPS = 8

SHAPE = GPTConfig(layers=6, heads=6, width=384, block_size=64)
SEQUENCES = 2  # per rank and step: about 0.13 s of forward and backward on one core
VALIDATION_BATCHES = 8  # of all ranks together
TEXT = Text(SHAPE, SEQUENCES, VALIDATION_BATCHES)
PEAK_RATE = 2.5e-4  # of this, 5e-4, 1e-3 and 2e-3 the best for plain averaging
WARM_UP_STEPS = 20


@dataclass(frozen=True)
class Course:
    """The training with one hook, which :func:`commhooks.hook.spec.hook_spec` can read.

    ``bare_step_seconds``: time of a training step on each rank alone, just before and just after.
    It shows whether the machine was equally fast for all hooks. ``load``: its load average, at the
    same times.
    """

    hook: str
    points: list[TrainingPoint]
    bare_step_seconds: tuple[float, float]
    load: tuple[float, float]

    @property
    def lowest(self) -> TrainingPoint:
        """Return the point with the lowest validation loss."""
        return min(self.points, key=lambda point: point.validation_loss)

    @property
    def step_text(self) -> str:
        """Return the mean time of a step."""
        return f"{self.points[-1].seconds / self.points[-1].step:.2g} s"


class Race:
    """The trainings over one link, from a JSON document.

    ``about``: the model, the link and the machine. ``goal``: the point where plain averaging has
    its lowest loss. ``arrivals``: the points at which hooks reach that loss, the earliest first.
    ``courses``: by hook, first those of ``arrivals``, then the others by their last loss.
    """

    def __init__(self, document: Mapping[str, Any]) -> None:
        self.about: Mapping[str, Any] = document["about"]
        courses = [from_json(Course, entry) for entry in document["courses"]]
        courses.sort(key=lambda course: course.points[-1].validation_loss)
        self.goal = next(course.lowest for course in courses if course.hook == PLAIN)
        arrivals = {
            course.hook: point
            for course in courses
            for point in reversed(course.points)  # the first one stays
            if point.validation_loss <= self.goal.validation_loss
        }
        self.arrivals = dict(sorted(arrivals.items(), key=lambda item: item[1].seconds))
        by_hook = {course.hook: course for course in courses}
        self.courses = {hook: by_hook[hook] for hook in (*self.arrivals, *by_hook)}

    def speed_up(self, hook: str, other: str) -> float:
        """Return the time of another hook to that loss, divided by that of ``hook``."""
        return self.arrivals[other].seconds / self.arrivals[hook].seconds


def make_gpt() -> GPT:
    """Create the GPT, with 10.8 million parameters."""
    return GPT(SHAPE)


def make_batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first batch."""
    return TEXT.batch(seed=0, step=0, rank=0)


def train(model: nn.Module, rank: int, world_size: int) -> Iterator[Callable[[], float]]:
    """Train with the demo's AdamW, at a constant learning rate after a linear warm-up.

    The loss after a step therefore does not depend on the number of steps planned.
    """
    held_out = TEXT.validation(rank, world_size)
    module: nn.Module = getattr(model, "module", model)
    batches = (TEXT.batch(0, step, rank) for step in itertools.count())
    recipe = adamw(lr=PEAK_RATE, fused=True)
    for _ in recipe.train(model, batches, lambda step: min(1.0, (step + 1) / WARM_UP_STEPS)):
        yield lambda: module(*held_out).item()


def run(hook: str, size: int, rate: float, steps: int, goal: float) -> dict[str, Any]:
    """Train with one hook for some steps, or until the validation loss ``goal``: a Course."""
    with shaped_link(size, rate) as hosts, Ranks(size, hosts) as ranks:
        ranks.make(ComparedModel, Workload(MODEL))
        before = _bare_step_seconds(ranks), os.getloadavg()[0]
        ranks.do(ComparedModel.begin_training, Entry.of(hook), TRAINING)
        points: list[TrainingPoint] = []
        while not points or (points[-1].step < steps and points[-1].validation_loss > goal):
            for _ in range(STRIDE - 1):
                ranks.do(ComparedModel.train, False)
            points.append(ranks.do(ComparedModel.train, True)[0])
            print(f"\n  {points[-1]}", end="", flush=True)
        after = _bare_step_seconds(ranks), os.getloadavg()[0]
    return asdict(Course(hook, points, *zip(before, after, strict=True)))


def _bare_step_seconds(ranks: Ranks) -> float:
    """Return the median of a few training steps without communication."""
    ranks.do(ComparedModel.begin_training, BARE, TRAINING)
    seconds = []
    for _ in range(1 + BARE_STEPS):
        start = time.perf_counter()
        ranks.do(ComparedModel.train, False)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])


def main() -> None:
    """Train with each hook that the file lacks."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("result", type=Path, metavar="RESULT.json")
    parser.add_argument("--ranks", type=int, default=2, help="default: 2")
    parser.add_argument("--rate", default="100mbit", help="of each rank's link; default: 100mbit")
    parser.add_argument("--hook", action="append", help="may be repeated; default: eight and noop")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"of allreduce; default: {STEPS}")
    arguments = parser.parse_args()
    rate = parse_rate(arguments.rate)
    parameters = sum(parameter.numel() for parameter in make_gpt().parameters())
    about = {"parameters": parameters, "ranks": arguments.ranks, "bits_per_second": rate}
    results = Results(arguments.result, runs="courses", model=MODEL, **about)

    def train_once(hook: str, steps: int, goal: float) -> Course:
        measure = partial(run, hook, arguments.ranks, rate, steps, goal)
        return from_json(Course, results.once({"hook": hook}, measure))

    goal = train_once(PLAIN, arguments.steps, -math.inf).lowest.validation_loss
    for hook in arguments.hook or HOOKS:
        train_once(hook, 2 * arguments.steps, goal)


if __name__ == "__main__":
    main()
