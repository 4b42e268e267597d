"""What one rank does in a trial: it trains, and runs into its fault."""

import hashlib
import os
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Generator
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import commhooks
from commhooks import CommHook
from soak.trial import IN_HOOK, Fault, Trial

__all__ = ["TIMEOUT", "Outcome", "train"]

TIMEOUT = 10.0
"""The timeout of the process group, in seconds."""


@dataclass
class Outcome:
    """What a rank reports."""

    digests: dict[int, str] = field(default_factory=dict)
    """Of all parameters after each step that did not fail."""
    finite: bool = True
    errors: list[tuple[int, str, str, float]] = field(default_factory=list)
    """Step, type, text, and the seconds since the step began."""
    refused: str = ""
    """Why the hook was not registered."""
    injected_at: float | None = None
    failed_at: float | None = None
    done: bool = False


_RAISED: dict[str, type[BaseException]] = {
    "ValueError": ValueError,
    "SystemExit": SystemExit,
    "KeyboardInterrupt": KeyboardInterrupt,
}


class Branches(nn.Module):
    """Uses one of two layers per call; which one differs between ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 24)
        self.either = nn.ModuleList([nn.Linear(24, 24), nn.Linear(24, 24)])
        self.last = nn.Linear(24, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = functional.relu(self.first(x))
        return self.last(self.either[int(x.sum() > 0)](hidden))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: nn.Sequential(
        nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 4)
    ),
    "conv": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 4, 4)),
        nn.Conv2d(1, 6, 3, padding=1),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(96, 4),
    ),
    "embedding": lambda: nn.Sequential(
        nn.Hardtanh(0.0, 49.0), _Rounded(), nn.Embedding(50, 8), nn.Flatten(), nn.Linear(128, 4)
    ),
    "branches": Branches,
}


class _Rounded(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x * 9).long().clamp(0, 49)


class Injector:
    """Makes the fault happen on this rank when training gets to its step and place."""

    def __init__(self, fault: Fault, rank: int, outcome: Outcome) -> None:
        self.fault = fault if fault.rank == rank else None
        self.outcome = outcome
        self.step = 0

    def reach(self, place: str) -> None:
        fault = self.fault
        if fault is None or (self.step, place) != (fault.step, fault.place):
            return
        kind = fault.kind
        if kind in ("nan", "none"):
            return
        self.outcome.injected_at = time.monotonic()
        if kind != "slow":
            self.fault = None
        if kind == "slow":
            time.sleep(0.3)
        elif kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif kind == "exit":
            os._exit(3)
        elif kind in ("stop", "long stop"):
            os.kill(os.getpid(), signal.SIGSTOP)
        elif kind == "kill at any time":
            delay = (self.step * 7919 + len(place)) % 50 / 1000
            threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
        elif kind in _RAISED:
            raise _RAISED[kind]("out of luck")

    def poison(self, model: nn.Module) -> None:
        """Write a NaN into one gradient, if that is the fault."""
        fault = self.fault
        if fault is not None and fault.kind == "nan" and self.step == fault.step:
            parameter = next(model.parameters())
            parameter.register_hook(self._with_nan)

    def _with_nan(self, gradient: Tensor) -> Tensor:
        if self.fault is None or self.step != self.fault.step:
            return gradient
        gradient = gradient.clone()
        gradient.view(-1)[0] = torch.nan
        return gradient

    def wrap(self, hook: object) -> None:
        """Reach the places "before", "in" and "after" in the hook's reduce."""
        if not isinstance(hook, CommHook):
            return
        reduce = hook.reduce

        async def with_places(bucket: Any, comm: Any) -> Tensor:
            self.reach("before")
            average = await _Driven(reduce(bucket, comm), self.reach)
            self.reach("after")
            return average

        hook.reduce = with_places  # type: ignore[method-assign]


class _Driven(Awaitable[Tensor]):
    """Awaits ``inner`` and calls ``reach("in")`` after its first collective."""

    def __init__(self, inner: Any, reach: Callable[[str], None]) -> None:
        self._inner, self._reach = inner, reach

    def __await__(self) -> Generator[Any, Any, Tensor]:
        steps = self._inner.__await__()
        answer = None
        count = 0
        while True:
            try:
                waited_for = steps.send(answer)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]
            try:
                answer = yield waited_for
                count += 1
                if count == 1:
                    self._reach("in")
            except BaseException as error:  # as an await in the hook itself would get it
                steps.throw(error)
                raise


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
            handle.replace(trial.replacement[1])
            injector.wrap(handle.hook)
        injector.step = step
        begin = time.monotonic()
        try:
            _step(trial, rank, step, model, module, optimizer, injector)
        except (commhooks.CommHookError, KeyboardInterrupt, SystemExit) as error:
            outcome.failed_at = time.monotonic()
            outcome.errors.append(
                (step, type(error).__name__, _text(error), time.monotonic() - begin)
            )
            if trial.fault.place not in IN_HOOK or trial.fault.kind not in _RAISED:
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
