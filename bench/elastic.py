"""DiLoCo while groups die and come back: ``python -m bench.elastic RESULT.json``.

Two to four groups of one process each train the GPT of ``bytes`` (bench/fidelity/tasks.py) under a
torchft manager, with a real lighthouse. In half of the runs one of them is killed at a random step
and started again at once. Hooks here and torchft's own DiLoCo have the same seeds, model, data,
members, faults and outer optimizer. A run is added to the file when it ends, and not repeated.
Prints the means over seeds.
"""

import argparse
import itertools
import multiprocessing
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torchft.local_sgd
from torch import nn
from torchft.coordination import LighthouseServer

import commhooks
from bench.fidelity.tasks import TASKS
from bench.files import Results
from bench.tables import table
from commhooks.comm.wire import all_reduce_bytes
from commhooks.integrations.torchft import DistributedDataParallel

SEEDS = 10
STEPS = 151  # the last one ends a period
SEQUENCES = 2  # per group and step
PERIOD = 10
OUTER = {"outer_lr": 0.7, "outer_momentum": 0.9}
KILLED_IN = (15, 75)  # steps
BACK_AT = 95
"""The step in which the others wait until the killed group has started again, off the clock."""
CONTEXT = multiprocessing.get_context("forkserver")
TORCHFT = "torchft"
_DILOCO: dict[str, Any] = {"name": "diloco", "period": PERIOD, **OUTER}
METHODS: dict[str, dict[str, Any]] = {
    TORCHFT: {},
    "diloco": _DILOCO,
    "diloco, int4": _DILOCO | {"inner": {"name": "int4", "error_feedback": True}},
}


@dataclass(frozen=True)
class Run:
    """One training. ``killed_at``: the step in which the last group dies, -1 if nobody does."""

    method: str
    seed: int
    groups: int
    killed_at: int


def all_runs() -> Iterator[Run]:
    """Yield the runs: with and without a death, by every method, and one group alone."""
    for seed in range(SEEDS):
        deaths = [-1, random.Random(seed).randrange(*KILLED_IN)]
        for at, method in itertools.product(deaths, METHODS):
            yield Run(method, seed, 2 + seed % 3, at)
        yield Run("diloco", seed, 1, -1)


def train(run: Run, group: int, life: int, folder: Path, lighthouse: str) -> dict[str, Any]:
    """Train one group. Return its loss, the bytes it sent, and the median time of a step."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
    from examples.train_elastic import connect  # its neighbors are found by their names

    task = TASKS["bytes"]
    data = task.make_data(sequences=SEQUENCES)
    recipe = task.recipes[task.usual]
    torch.manual_seed(run.seed)
    net = data.model()
    (optimizer,) = recipe.optimizers(net)
    step = 0

    def load(state: dict[str, Any]) -> None:
        nonlocal step
        net.load_state_dict(state["net"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]

    def save() -> dict[str, Any]:
        return {"net": net.state_dict(), "optimizer": optimizer.state_dict(), "step": step}

    manager, replicas = connect(lighthouse, group, load, save, timeout=20.0)
    model: nn.Module = net
    if run.method == TORCHFT:
        sent_bytes = _use_torchft(manager, net, optimizer)
    else:
        model = DistributedDataParallel(manager, replicas, net, METHODS[run.method])
        sent_bytes = partial(_sent_by_hook, model)
    (folder / f"{group}.{life}.ready").touch()
    while life == 0 and len(list(folder.glob("*.0.ready"))) < run.groups:
        time.sleep(0.01)
    times = []
    while step < STEPS:
        if step == run.killed_at and group == run.groups - 1 and life == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        while step == BACK_AT and run.killed_at >= 0 and not list(folder.glob("*.1.ready")):
            time.sleep(0.01)
        start = time.monotonic()
        for settings in optimizer.param_groups:
            settings["lr"] = recipe.options["lr"] * min((step + 1) / 25, 1 - step / STEPS)
        optimizer.zero_grad()
        model(*data.batch(run.seed, step, group)).backward()
        nn.utils.clip_grad_norm_(net.parameters(), recipe.max_norm)
        optimizer.step()
        step += 1
        times.append(time.monotonic() - start)
    with torch.no_grad():
        loss = net(*data.validation(0, 1)).item()
    return {
        "loss": loss,
        "sent_bytes": sent_bytes(),
        "steps": len(times),
        "step_seconds": statistics.median(times),
        "mean_step_seconds": statistics.fmean(times),
        "participants": manager.num_participants(),
    }


def _sent_by_hook(model: nn.Module) -> float:
    handle = commhooks.handle_of(model)
    assert handle is not None
    stats = handle.stats()
    return (stats.total.wire_bytes or 0.0) * stats.steps


def _use_torchft(
    manager: Any, net: nn.Module, optimizer: torch.optim.Optimizer
) -> Callable[[], float]:
    """Train with torchft's DiLoCo. Return a function that returns the bytes sent so far."""
    sent = 0
    all_reduce = manager.allreduce

    def count(tensor: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        nonlocal sent
        sent += all_reduce_bytes(tensor.nbytes, manager.num_participants())
        return all_reduce(tensor, *arguments, **options)

    manager.allreduce = count
    lr, momentum = OUTER.values()
    outer = torch.optim.SGD(net.parameters(), lr, momentum, nesterov=True)
    torchft.local_sgd.DiLoCo(manager, [net], optimizer, outer, PERIOD).__enter__()
    return lambda: sent


def measure(run: Run) -> dict[str, Any]:
    """Train all groups, and the killed one again. Return the means over those that finish."""
    lighthouse = LighthouseServer(
        bind="[::]:0",
        min_replicas=1,
        join_timeout_ms=10_000,
        quorum_tick_ms=20,
        heartbeat_timeout_ms=1_000,
    )
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        stack.callback(lighthouse.shutdown)
        folder, told = Path(name), CONTEXT.SimpleQueue()

        def start(group: int, life: int) -> Any:
            arguments = told, run, group, life, folder, lighthouse.address()
            process = CONTEXT.Process(target=_train_and_tell, args=arguments, daemon=True)
            process.start()
            return process

        processes = [start(group, 0) for group in range(run.groups)]
        if run.killed_at >= 0:
            processes[-1].join(300)
            processes[-1] = start(run.groups - 1, 1)
        for process in processes:
            process.join(300)
            if process.exitcode != 0:
                raise RuntimeError(f"a group of {run} failed: {process.exitcode}")
        found = [told.get() for _ in processes]
    return {name: statistics.fmean(each[name] for each in found) for name in found[0]}


def _train_and_tell(told: Any, *arguments: Any) -> None:
    torch.set_num_threads(1)
    told.put(train(*arguments))
    os._exit(0)  # threads of the manager would wait for other groups


def means(records: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the means over seeds, by method and what happens in a run."""
    by_kind: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for record in records:
        live = "all live" if record["killed_at"] < 0 else "one dies"
        kind = live if record["groups"] > 1 else "alone"
        by_kind.setdefault((record["method"], kind), []).append(record)
    for (method, kind), those in by_kind.items():
        names = [name for name in those[0] if name not in Run.__annotations__]
        row = {name: statistics.fmean(record[name] for record in those) for name in names}
        yield {"method": method, "groups": kind, "runs": len(those)} | row


def main() -> None:
    """Measure what the file lacks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", type=Path)
    results = Results(parser.parse_args().path, "machine")
    CONTEXT.set_forkserver_preload(["bench.elastic"])
    for run in all_runs():
        results.once(asdict(run), partial(measure, run))
    print(table(means(results.runs)))


if __name__ == "__main__":
    main()
