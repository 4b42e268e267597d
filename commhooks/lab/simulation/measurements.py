"""Measure what a simulation needs to know of this machine, and of a model with each hook.

Gloo is measured with two ranks that send to each other, and hooks in processes that compute side by
side and send nothing. Measurements can be saved to a file, so that predictions for other networks
and sizes need no new ones, and a machine that has the hardware can measure for one that does not.
"""

import json
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from commhooks.adapters.handle import register
from commhooks.adapters.wrapper import wrap
from commhooks.cluster import Ranks
from commhooks.comm.communicator import Communicator
from commhooks.costs.backends import Gloo
from commhooks.costs.prediction import DryRuns, complete, dry_run_sizes
from commhooks.errors import CommHookError, reason_of
from commhooks.hook.base import CommHook, ModelInfo, prepare_all
from commhooks.hook.options import from_json
from commhooks.hook.registry import create
from commhooks.hook.roles import roles_of
from commhooks.hook.spec import HookLike, config_of, hook_spec
from commhooks.lab.machine import check_model, cores, describe_machine, free_memory
from commhooks.lab.models import ModelError, Workload
from commhooks.lab.simulation.dry_run import DryRunner, as_launched, check_kernels, fake_group
from commhooks.lab.simulation.profile import StepProfile, profile
from commhooks.lab.simulation.study import BASELINE
from reducer import GradBucket

_TIMEOUT_SECONDS = 1800.0  # for a large model on a small machine
_STAGES = 100
_ROUNDS = 2 * _STAGES  # of messages: an all-reduce of two ranks is a ring of two rounds
_LARGE_BYTES = 32 << 20
_REPEATS = 7


@dataclass(frozen=True)
class Job(Workload):
    """A workload and how it is launched."""

    ranks_per_node: int = 1
    ranks_per_machine: int = 1
    """Ranks that share the memory of this machine; as many processes measure at the same time."""
    bucket_cap_mb: float | None = None
    first_step: int = 1000
    """The first of the steps whose mean is predicted; the default is past all warm-ups."""


@dataclass(frozen=True)
class Measurements:
    """The measurements of one job. ``dry_runs`` are by hook, see :func:`_hook_key`.

    ``reasons`` say why hooks are missing that cannot be simulated; they are not saved.
    """

    machine: Mapping[str, str | int]
    job: Job
    gloo: Gloo
    dry_runs: Mapping[str, DryRuns]
    reasons: Mapping[str, str] = field(default_factory=dict)

    def __contains__(self, hook: HookLike) -> bool:
        return _hook_key(hook) in self.dry_runs

    def reason(self, hook: HookLike, size: int) -> str | None:
        """Return why a hook cannot be simulated among ``size`` ranks, or None if it can."""
        if hook not in self:
            return self.reasons.get(_hook_key(hook))
        try:
            self.of(hook).at(size)
        except CommHookError as error:
            return reason_of(error)
        return None

    def of(self, hook: HookLike) -> DryRuns:
        """Return the dry runs of a measured hook."""
        return self.dry_runs[_hook_key(hook)]

    def save(self, path: Path) -> None:
        """Write the file that :meth:`load` reads."""
        data = asdict(replace(self, reasons={}))
        beside = path.with_name(f"{path.name}.part")  # so that no failure loses the former file
        beside.write_text(json.dumps(data, indent=1))
        beside.replace(path)

    @classmethod
    def load(cls, path: Path) -> "Measurements":
        """Read a file of :meth:`save`. Raises CommHookError if it is not such a file."""
        try:
            return from_json(cls, json.loads(path.read_text()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CommHookError(
                f"{path}: expected measurements that `commhooks simulate` has saved, found "
                f"something else ({type(error).__name__}: {error}); delete the file to measure "
                "again"
            ) from error


def _hook_key(hook: HookLike) -> str:
    """Return the hook's config in JSON, with sorted keys."""
    return json.dumps(config_of(hook), sort_keys=True)


def measure(
    job: Job,
    hooks: Sequence[HookLike],
    sizes: Sequence[int],
    ranks: Ranks | None = None,
) -> Measurements:
    """Measure Gloo, the model and the hooks on this machine, which takes seconds to minutes.

    ``sizes`` are the world sizes to predict. A hook that cannot be simulated is left out, with the
    reason. Uses ``ranks``, at least 2, if given, else starts processes of its own. If it raises,
    ``ranks`` cannot be used any more.

    Raises ModelError; LimitError and CommHookError if memory or kernels are missing, before
    anything starts; and the error of plain averaging if that cannot be simulated.
    """
    busy = min(job.ranks_per_machine, cores())
    if ranks is None:
        check_model(job, max(2, busy))
        check_kernels(map(hook_spec, hooks), job.device)
        with Ranks(max(2, busy), device=job.device, timeout=_TIMEOUT_SECONDS) as own:
            return measure(job, hooks, sizes, own)
    gloo: Gloo = ranks(measure_gloo)[0]
    ranks.keep(ProfiledModel, job, busy)
    dry_runs: dict[str, DryRuns] = {}
    reasons: dict[str, str] = {}
    for config in map(config_of, hooks):
        try:
            dry_runs[_hook_key(config)] = ranks.call(ProfiledModel.dry_run, config, list(sizes))[0]
        except Exception as error:
            if config == {"name": BASELINE} or isinstance(error, ModelError):
                raise
            reasons[_hook_key(config)] = reason_of(error)
            ranks.restart()
    return Measurements(describe_machine(job.device), job, gloo, dry_runs, reasons)


class ProfiledModel:
    """The model on this rank, and its last profile.

    The first ``busy`` ranks of the default group measure at the same time, each for itself, so that
    they share the memory's bandwidth as the ranks of a machine do. The other ranks are idle.
    """

    def __init__(self, rank: int, job: Job, busy: int) -> None:
        free_memory()  # of what the rank kept before
        self.job = job
        self._rank = rank
        self._together = dist.new_group(range(busy))
        alone = [dist.new_group([other]) for other in range(dist.get_world_size())][rank]
        assert isinstance(alone, dist.ProcessGroup)
        self.alone = alone
        self._is_busy = rank < busy
        self._model = job.make_module()
        self._batch = job.make_input(self._model, rank)
        self.parameters = {n: p for n, p in self._model.named_parameters() if p.requires_grad}
        self.roles = roles_of(self._model)
        self._profile: tuple[tuple[Any, ...], StepProfile] | None = None

    def profile(self, key_of: Callable[[str], Hashable]) -> StepProfile:
        """Return the profile that consecutive hooks with the same buckets share."""
        keys = tuple(map(key_of, self.parameters))
        if self._profile is None or self._profile[0] != keys:
            self._profile = None  # it may be as large as the model
            self.job.device.barrier(self._together)
            try:
                step = profile(
                    self._model,
                    lambda wrapped: self.job.loss(wrapped, self._batch, self._rank),
                    key_of,
                    self.alone,
                    device=self.job.device,
                    bucket_cap_mb=self.job.bucket_cap_mb,
                    **dict(self.job.wrapper),
                )
            except RuntimeError as error:
                raise ModelError(
                    f"model {self.job.model!r}: its steps fail: {reason_of(error)}"
                ) from error
            self._profile = keys, step
        return self._profile[1]

    def dry_run(self, config: Mapping[str, Any], sizes: Sequence[int]) -> DryRuns | None:
        """Return the work of a hook in worlds of ``sizes``; None on idle ranks."""
        if not self._is_busy:
            return None
        job = self.job
        hook = create(config)
        with as_launched(job.ranks_per_node):
            group = fake_group(min(sizes))
            prepare_all(hook, self.parameters, group, ModelInfo(self.roles))
        step = self.profile(hook.bucket_key)
        is_native = create(config).native(self.alone) is not None
        job.device.barrier(self._together)
        # The work of a native hook is the engine's, which the profile contains.
        runs = self.dry_runs(config, step.buckets, sizes, is_timed=not is_native)
        by_size = {
            size: [(share, step.with_hook(trace, is_native=is_native)) for share, trace in found]
            for size, found in runs.by_size.items()
        }
        return replace(runs, by_size=by_size)

    def dry_runs(
        self,
        config: Mapping[str, Any],
        buckets: Sequence[GradBucket],
        sizes: Sequence[int],
        *,
        is_timed: bool = True,
    ) -> DryRuns:
        """Trace a hook that averages some buckets in worlds of ``sizes``."""
        names = {name for bucket in buckets for name in bucket.names}
        parameters = {name: p for name, p in self.parameters.items() if name in names}
        per_node = self.job.ranks_per_node
        device = self.job.device if is_timed else None
        runner = DryRunner(
            config, buckets, parameters, self.roles, per_node, self.job.first_step, device
        )
        runs = DryRuns({n: runner.trace(n) for n in dry_run_sizes(sizes, per_node)}, per_node)
        return complete(runs, sizes, runner.stated_bytes, runner.trace)


@dataclass
class _Chain(CommHook):
    """Awaits small all-reduces one after the other, as a hook with many stages does."""

    async def reduce(self, bucket: GradBucket, comm: Communicator) -> Tensor:
        small = torch.zeros(16)
        for _ in range(_STAGES):
            await comm.all_reduce(small)
        return bucket.buffer()


def measure_gloo(rank: int) -> Gloo | None:
    """Measure between ranks 0 and 1, on their CPUs, while the others are idle."""
    pair = dist.new_group([0, 1], backend=Gloo.name)
    if rank > 1:
        return None
    model = wrap(nn.Linear(4, 1, bias=False), process_group=pair)
    register(model, _Chain())
    large = torch.zeros(_LARGE_BYTES // 4)

    def least(work: Callable[[], object]) -> tuple[float, float]:
        """Return seconds of the clock, and of all threads on cores, with the least other work."""
        wall, cpu = [], []
        for _ in range(_REPEATS):
            dist.barrier(pair)
            start = time.perf_counter(), time.process_time()
            work()
            wall.append(time.perf_counter() - start[0])
            cpu.append(time.process_time() - start[1])
        return min(wall[1:]), min(cpu[1:])  # the first run also opens the connections

    chain_wall, chain_cpu = least(lambda: model(torch.ones(1, 4)).sum().backward())
    _, transfer_cpu = least(lambda: dist.all_reduce(large, group=pair))
    return Gloo(
        round_seconds=chain_wall / _ROUNDS,
        message_cpu_seconds=chain_cpu / _ROUNDS,
        byte_cpu_seconds=transfer_cpu / _LARGE_BYTES,
    )
