"""The place in a wrapped model that takes a hook: what our wrapper and torch's have in common."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from commhooks.comm.wire import all_gather_bytes, all_reduce_bytes
from commhooks.errors import CommHookError
from commhooks.hook.base import CommHook
from commhooks.precision import at_least_float32
from commhooks.runtime.recording import HookRun, Recording, Span, Stage
from commhooks.runtime.stats import HookStats, StatsCollector, bucket_stats
from commhooks.runtime.stream_runner import StreamRunner
from commhooks.runtime.threaded_runner import ThreadedRunner
from reducer import DistributedDataParallel

__all__ = ["Adapter", "AnyRunner", "DDPAdapter", "TorchHook", "make_runner"]

AnyRunner = ThreadedRunner | StreamRunner
TorchHook = Callable[[Any], Future[Tensor]]
"""A torch-style hook with its state bound."""


class Adapter(ABC):
    """Holds what it needs of a model, but not the model, which may go away.

    ``parameters``: the trained ones by name, as :class:`CommHook` knows them.
    """

    device: torch.device
    parameters: dict[str, Tensor]
    recording: Recording | None = None
    """Being made, while a step is traced."""

    @property
    @abstractmethod
    def group(self) -> dist.ProcessGroup:
        """The ranks that gradients are averaged over."""

    @property
    @abstractmethod
    def steps(self) -> int:
        """The synchronized backward passes so far; can be set by a resumed run."""

    @steps.setter
    @abstractmethod
    def steps(self, steps: int) -> None: ...

    @abstractmethod
    def install(self, hook: CommHook, token: int) -> None:
        """Uses a hook from the next step on. ``token``: as for ThreadedRunner."""

    @abstractmethod
    def install_function(self, hook: TorchHook) -> None:
        """Uses a torch-style function from the next step on."""

    @abstractmethod
    def clear(self) -> None:
        """Goes back to the plain average."""

    @abstractmethod
    def stats(self) -> HookStats:
        """Of the hook that is installed, since it was."""

    @abstractmethod
    def start_recording(self) -> None:
        """Notes when what happens, until :meth:`stop_recording`."""

    @abstractmethod
    def stop_recording(self) -> Recording:
        """What has happened since :meth:`start_recording`."""

    @torch.no_grad()
    def average_parameters(self) -> None:
        """Makes the models of all ranks one, between two steps. Collective."""
        for parameter in self.parameters.values():
            dtype = at_least_float32(parameter.dtype)
            mean = parameter.reshape(-1).to(dtype) / self.group.size()
            dist.all_reduce(mean, group=self.group)
            parameter.copy_(mean.view(parameter.shape))

    def listen(self, collector: StatsCollector) -> None:
        """Lets the recording, if there is one, know of the runs that come to ``collector``."""
        collector.listener = None if self.recording is None else self.recording.add_run


class DDPAdapter(Adapter):
    """Of our own wrapper."""

    def __init__(self, model: DistributedDataParallel) -> None:
        if model.hook_registration.is_taken:
            raise CommHookError(
                "the model has a hook already, from register_comm_hook(), which can neither be "
                "replaced nor removed; use commhooks.register() instead"
            )
        self.device = model.device
        self._reducer = model.reducer
        rows = self._reducer.bucket_stats()
        reduced = {name for row in rows if row["lane"] == 0 for name in row["names"]}
        self.parameters = {name: p for p, name in model.parameter_names.items() if name in reduced}
        self._names = list(model.parameter_names.values())
        self._keys = [0] * len(self._names)
        self._has_own_keys = model.group_keys.are_given
        self._place = model.hook_registration
        self._runner: AnyRunner | None = None
        self._is_native = False

    @property
    def group(self) -> dist.ProcessGroup:
        return self._reducer.process_group

    @property
    def steps(self) -> int:
        return self._reducer.steps

    @steps.setter
    def steps(self, steps: int) -> None:
        self._reducer.steps = steps

    def install(self, hook: CommHook, token: int) -> None:
        native = hook.native(self.group)
        runner = make_runner(hook, self.group, self.device, token) if native is None else None
        self.regroup(hook.bucket_key)
        self._set(native if runner is None else runner, runner, is_native=native is not None)
        self._place.averages_gradients = not hook.changes_parameters
        self._place.on_overwrite = hook.recover

    def install_function(self, hook: TorchHook) -> None:
        self.regroup(_no_key)
        self._set(hook, None, is_native=False)

    def clear(self) -> None:
        self.regroup(_no_key)
        self._set(self._place.default(), None, is_native=True)

    def regroup(self, key_of: Callable[[str], Hashable]) -> None:
        """Cuts the buckets so that only parameters of equal keys, by their names, share one.

        Leaves them as they are in a model that has keys of its own, which hooks have to cope with.
        """
        numbers: dict[Hashable, int] = {}
        keys = [numbers.setdefault(key_of(name), len(numbers)) for name in self._names]
        if not self._has_own_keys and keys != self._keys:
            self._reducer.set_keys(keys)
            self._keys = keys

    def stats(self) -> HookStats:
        size = self.group.size()
        rows = self._reducer.bucket_stats()
        buckets = [
            bucket_stats(
                row["ranks"],
                index=row["index"],
                names=row["names"],
                gradient_bytes=row["gradient_bytes"],
                wire_bytes=self._wire_bytes(row),
                hook_seconds=row["hook_seconds"] / max(row["steps"], 1),
                exposed_seconds=row["exposed_seconds"] / max(row["steps"], 1),
            )
            for row in rows
        ]
        return HookStats.of(max((row["steps"] for row in rows), default=0), buckets, size)

    def start_recording(self) -> None:
        self.recording = Recording(self._names)
        if self._runner is not None:
            self.listen(self._runner.collector)
        self._reducer.start_recording()

    def stop_recording(self) -> Recording:
        recording, self.recording = self.recording, None
        assert recording is not None
        if self._runner is not None:
            self.listen(self._runner.collector)
        recording.spans = [Span(**span) for span in self._reducer.stop_recording()]
        recording.runs += self._runs_in_cpp(recording)
        return recording

    def _set(self, target: Any, runner: AnyRunner | None, *, is_native: bool) -> None:
        self._reducer.set_hook(target)  # raises while a backward is under way
        self._reducer.reset_stats()
        self._place.on_overwrite = None
        if self._runner is not None:
            self._runner.close()
        if runner is not None:
            self.listen(runner.collector)
        self._runner = runner
        self._is_native = is_native
        self._place.averages_gradients = True

    def _runs_in_cpp(self, recording: Recording) -> Iterator[HookRun]:
        """Those of native hooks: one collective from beginning to end."""
        rows = {row["key"]: row for row in self._reducer.bucket_stats()}
        for span in recording.spans:
            row = rows.get(span.key)
            if row is None or not (self._is_native or row["lane"]) or recording.run_of(span):
                continue
            sent = self._wire_bytes(row)
            operation = "all_gather" if row["is_sparse"] else "all_reduce"
            stage = Stage(operation, (), span.start_ns, span.start_ns, span.end_ns, int(sent or 0))
            yield HookRun(span.key, sent, span.start_ns, span.end_ns, (stage,))

    def _wire_bytes(self, row: dict[str, Any]) -> float | None:
        packed = row["packed_bytes"] // max(row["steps"], 1)
        if row["is_sparse"]:  # ranks send their rows to all others
            return all_gather_bytes(packed, row["ranks"])
        if row["lane"] != 0:
            return all_reduce_bytes(packed, row["ranks"])
        if self._runner is not None:
            return self._runner.collector.wire_bytes(row["key"])
        if self._is_native:  # one all-reduce of what was packed, or nothing was packed
            return all_reduce_bytes(packed, row["ranks"])
        return None


def _no_key(name: str) -> None:
    """All parameters may share buckets."""


def make_runner(
    hook: CommHook, group: dist.ProcessGroup, device: torch.device, token: int
) -> AnyRunner:
    """What runs the hook's coroutines, as the backend of ``group`` for ``device`` needs it."""
    backend = group._get_backend(device).name()  # noqa: SLF001
    if backend == "gloo" and group.size() > 1:
        return ThreadedRunner(hook, group, device, token)
    return StreamRunner(hook, group, device, token)
