"""What one rank does in a trial: it trains, and runs into its fault."""

import hashlib
import random
import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import commhooks
from soak.faults import RAISED, Injector
from soak.models import MODELS
from soak.outcome import Outcome
from soak.trial import IN_HOOK, Trial

__all__ = ["LAST_STEP", "TIMEOUT", "train"]

LAST_STEP = "This is the last step."
"""What a rank prints: the others may have all that they need from it soon, and go on without it."""

TIMEOUT = 10.0
"""The timeout of the process group, in seconds."""


def train(
    rank: int,
    trial: Trial,
    folder: Path,
    *,
    first: int = 0,
    report: Callable[[Outcome], None],
) -> None:
    """Train from step ``first``, from the checkpoint if it is not 0, and report the outcome."""
    outcome = Outcome()
    try:
        _train(rank, trial, folder, first, outcome)
    except BaseException as error:  # of any kind: the process ends here, as it would in a script
        outcome.failed_at = time.monotonic()
        outcome.errors.append((-1, type(error).__name__, str(error), 0.0))
    report(outcome)


def _train(rank: int, trial: Trial, folder: Path, first: int, outcome: Outcome) -> None:
    torch.manual_seed(trial.seed)
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store-{first}",
        rank=rank,
        world_size=trial.world_size,
        timeout=timedelta(seconds=TIMEOUT),
    )
    module = MODELS[trial.model]()
    if trial.torch_ddp:
        options = {name: x for name, x in trial.options.items() if name != "stable_buckets"}
        model: nn.Module = nn.parallel.DistributedDataParallel(module, **options)
    else:
        model = commhooks.DistributedDataParallel(module, **trial.options)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    replaced = trial.replacement is not None and first > trial.replacement[0]
    config = trial.replacement[1] if replaced and trial.replacement else trial.hook
    try:
        handle = commhooks.register(model, config)
    except commhooks.CommHookError as error:
        outcome.refused = f"{type(error).__name__}: {error}"
        return
    injector = Injector(trial.fault, rank, outcome)
    injector.wrap(handle.hook)
    path = folder / f"checkpoint-{rank}.pt"
    if first:
        saved = torch.load(path, weights_only=True)
        module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        handle.load_state_dict(saved["hook"])
    if trial.is_uneven:
        pauses = random.Random(f"{trial.seed} {rank}")
        for parameter in module.parameters():
            parameter.register_hook(lambda _: time.sleep(pauses.choice((0.0, 0.0, 0.05))))
    backward_hook = next(module.parameters()).register_hook(lambda _: injector.reach("backward"))
    for step in range(first, trial.steps):
        if step == trial.checkpoint and not first:
            saved = {
                "model": module.state_dict(),
                "optimizer": optimizer.state_dict(),
                "hook": handle.state_dict(),
            }
            torch.save(saved, path)
        if trial.replacement is not None and step == trial.replacement[0]:
            try:
                handle.replace(trial.replacement[1])
            except commhooks.CommHookPeerError:
                raise
            except commhooks.CommHookError as error:
                outcome.refused = f"{type(error).__name__}: {error}"
                return
            injector.wrap(handle.hook)
        injector.step = step
        if step == trial.steps - 1:
            print(LAST_STEP, flush=True)
        begin = time.monotonic()
        try:
            _step(trial, rank, step, model, module, optimizer, injector)
        except (commhooks.CommHookError, KeyboardInterrupt, SystemExit) as error:
            outcome.failed_at = time.monotonic()
            outcome.errors.append(
                (step, type(error).__name__, _text(error), time.monotonic() - begin)
            )
            if trial.fault.place not in IN_HOOK or trial.fault.kind not in RAISED:
                return
            optimizer.zero_grad()
            continue
        outcome.digests[step] = _digest(module)
        outcome.finite = all(bool(p.isfinite().all()) for p in module.parameters())
    backward_hook.remove()
    outcome.done = True


def _step(
    trial: Trial,
    rank: int,
    step: int,
    model: nn.Module,
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    injector: Injector,
) -> None:
    injector.reach("loader")
    injector.poison(module)
    optimizer.zero_grad()
    for part in range(trial.accumulate):
        generator = torch.Generator().manual_seed(hash((trial.seed, rank, step, part)) % 2**32)
        inputs = torch.randn(8, 16, generator=generator)
        last = part == trial.accumulate - 1
        with _synchronized(model, last):
            loss = model(inputs).square().mean()
            injector.reach("forward")
            loss.backward()
    injector.reach("optimizer")
    optimizer.step()


def _synchronized(model: Any, is_last: bool) -> Any:
    return nullcontext() if is_last else model.no_sync()


def _digest(module: nn.Module) -> str:
    """Return a digest of all parameters, in which all NaNs are the same."""
    digest = hashlib.sha256()
    for parameter in module.parameters():
        numbers = torch.where(parameter.isnan(), torch.nan, parameter.detach())
        digest.update(numbers.numpy().tobytes())
    return digest.hexdigest()[:16]


def _text(error: BaseException) -> str:
    """Return the messages of the error and of its causes."""
    texts = []
    cause: BaseException | None = error
    while cause is not None:
        texts.append(f"{type(cause).__name__}: {cause}")
        cause = cause.__cause__
    return " <- ".join(texts)
