"""The adapter of ``commhooks.DistributedDataParallel``."""

import functools
import weakref
from collections.abc import Callable, Hashable, Iterator
from contextlib import nullcontext
from typing import Any

import torch.distributed as dist
from torch import Tensor

from commhooks.adapters.adapter import IS_TAKEN, Adapter, TorchHook
from commhooks.adapters.training_loop import DiscardedGradients
from commhooks.comm.wire import all_gather_bytes, all_reduce_bytes
from commhooks.errors import CommHookError
from commhooks.hook.base import CommHook, tree
from commhooks.runtime.recording import Recording, Run, Span, Stage
from commhooks.runtime.runner import Runner
from commhooks.runtime.stats import HookStats, bucket_stats
from reducer import DistributedDataParallel
from reducer.native import NativeHook


class DDPAdapter(Adapter):
    """Puts hooks on our own reducer."""

    def __init__(self, model: DistributedDataParallel) -> None:
        self._reducer = model.reducer
        of_buckets = self._reducer.bucket_stats()
        reduced = {
            name for counts in of_buckets if counts["group"] == 0 for name in counts["names"]
        }
        names = model.parameter_names.items()
        parameters: dict[str, Tensor] = {name: p for p, name in names if name in reduced}
        all_names = list(model.parameter_names.values())
        super().__init__(model.module, model.device, parameters, all_names, model)
        self.sparse = [
            name for counts in of_buckets if counts["is_sparse"] for name in counts["names"]
        ]
        self._keys = [0] * len(self._names)
        self._has_own_keys = model.options.group_keys.are_given
        self.tensor_parallel = model.options.group_keys.sharded
        self._registration = model.hook_registration
        self._stands_in = False
        """Whether a hook in C++ runs in place of the runner."""
        self._sums: dict[str, tuple[tuple[int, int], tuple[int, int]]] = {}
        """By the key of a bucket, at the last switch: steps and packed bytes of C++, and of all."""
        self._first_step = self.steps
        self._switched_after = 0  # steps, the last time

    @property
    def group(self) -> dist.ProcessGroup:
        return self._reducer.process_group

    def check(self, hook: CommHook | TorchHook) -> None:
        if self._registration.is_taken:
            raise CommHookError(IS_TAKEN)
        super().check(hook)

    @property
    def steps(self) -> int:
        return self._reducer.steps

    @steps.setter
    def steps(self, steps: int) -> None:
        self._first_step += steps - self._reducer.steps
        self._reducer.steps = steps

    def _stand_in(self, hook: CommHook) -> NativeHook | None:
        return hook.native(self.group)

    def _use(self, hook: CommHook | TorchHook | None, target: Runner | NativeHook | None) -> None:
        if isinstance(hook, CommHook):
            assert target is not None
            self.regroup(hook.bucket_key)
            changes_parameters = any(each.changes_parameters for each in tree(hook))
            before_step = None
            if isinstance(target, Runner):
                discarded = None if changes_parameters else DiscardedGradients(self, hook.name)
                own = weakref.ref(self)  # in a cycle, the adapter would outlive the model
                before_step = functools.partial(_before_step, own, hook, target, discarded)
            self._registration.install(
                target,
                name=hook.name,
                averages_gradients=not changes_parameters,
                on_overwrite=functools.partial(_recover, hook, target),
                before_step=before_step,
            )
        else:
            self.regroup(lambda _: None)
            if hook is None:
                self._registration.reset()
            else:
                self._registration.install(hook)
        self._reducer.reset_stats()
        self._first_step = self.steps
        self._stands_in = False
        self._sums.clear()
        self._switched_after = 0

    def choose_path(self, hook: CommHook, runner: Runner) -> bool:
        """Let C++ run the hook in the next step in place of the runner, or the runner again."""
        native = hook.native(self.group, self.steps)
        if (native is not None) != self._stands_in:
            self._reducer.set_hook(runner if native is None else native)
            for counts in self._reducer.bucket_stats():
                of_all = counts["steps"], counts["packed_bytes"]
                self._sums[counts["key"]] = self._native_sums(counts), of_all
            self._stands_in = native is not None
            self._switched_after = self.steps - self._first_step
        return native is not None

    def regroup(self, key_of: Callable[[str], Hashable]) -> None:
        """Rebuild the buckets so that only parameters whose names have equal keys share one.

        A model that was given keys of its own keeps its buckets; hooks have to work with them.
        """
        numbers: dict[Hashable, int] = {}
        keys = [numbers.setdefault(key_of(name), len(numbers)) for name in self._names]
        if not self._has_own_keys and keys != self._keys:
            self._reducer.set_keys(keys)
            self._keys = keys

    def stats(self, last: int | None = None) -> HookStats:
        if last is not None and self._runner is not None and not self._stands_in:
            since_switch = self.steps - self._first_step - self._switched_after
            return super().stats(min(last, max(since_switch, 1)))
        size = self.group.size()
        of_buckets = self._reducer.bucket_stats()
        buckets = [
            bucket_stats(
                counts["ranks"],
                index=counts["index"],
                names=counts["names"],
                gradient_bytes=counts["gradient_bytes"],
                wire_bytes=self._wire_bytes(counts),
                hook_seconds=counts["hook_seconds"] / max(counts["steps"], 1),
                exposed_seconds=counts["exposed_seconds"] / max(counts["steps"], 1),
            )
            for counts in of_buckets
        ]
        steps = max((counts["steps"] for counts in of_buckets), default=0)
        all_steps = max(steps, self.steps - self._first_step)
        is_sent = self._is_native and any(counts["packed_bytes"] for counts in of_buckets)
        ways = {}
        if is_sent and (transport := self._reducer.transport) is not None:
            ways["transport"] = transport.name
        return HookStats.of(steps, buckets, size, left_out=all_steps - steps, **ways)

    def start_recording(self) -> None:
        super().start_recording()
        self._reducer.start_recording()

    def stop_recording(self) -> Recording:
        recording = super().stop_recording()
        recording.spans = [Span(**span) for span in self._reducer.stop_recording()]
        recording.runs += self._runs_in_cpp(recording)
        return recording

    @property
    def _is_native(self) -> bool:
        """Whether C++ runs the hook."""
        return self._stands_in or (
            self._runner is None and (self.hook is None or isinstance(self.hook, CommHook))
        )

    def _runs_in_cpp(self, recording: Recording) -> Iterator[Run]:
        """Yield the runs of native hooks, which are one collective from beginning to end."""
        of_buckets = {counts["key"]: counts for counts in self._reducer.bucket_stats()}
        for span in recording.spans:
            counts = of_buckets.get(span.key)
            if counts is None or not (self._is_native or counts["group"]) or recording.run_of(span):
                continue
            sent = self._native_wire_bytes(counts)
            operation = "all_gather" if counts["is_sparse"] else "all_reduce"
            stage = Stage(operation, (), span.start_ns, span.start_ns, span.end_ns, sent)
            yield Run(span.key, counts["index"], sent, span.start_ns, span.end_ns, (stage,))

    def _wire_bytes(self, counts: dict[str, Any]) -> float | None:
        """Return the mean per step, None for torch-style functions."""
        is_of_hook = counts["group"] == 0 and not counts["is_sparse"]
        if not is_of_hook or (self._is_native and self._runner is None):
            return self._native_wire_bytes(counts)
        if self._runner is None:
            return None
        steps: int = counts["steps"]
        native_steps, _ = self._native_sums(counts)
        # C++ leaves out the step before buckets were rebuilt, also of buckets that stay the same.
        sent = self._collector.wire_bytes(counts["key"], steps - native_steps)
        if native_steps == 0:
            return sent
        native_sent = native_steps * self._native_wire_bytes(counts)
        return (native_sent + (steps - native_steps) * (sent or 0.0)) / steps

    def _native_wire_bytes(self, counts: dict[str, Any]) -> int:
        """Return the mean per step in which C++ averaged the bucket, with one collective."""
        steps, packed = self._native_sums(counts)
        count = all_gather_bytes if counts["is_sparse"] else all_reduce_bytes
        return count(packed // max(steps, 1), counts["ranks"])

    def _native_sums(self, counts: dict[str, Any]) -> tuple[int, int]:
        """Return the steps in which C++ averaged a bucket, and the bytes it packed in them."""
        of_all = counts["steps"], counts["packed_bytes"]
        if self._runner is None or counts["group"] != 0 or counts["is_sparse"]:
            return of_all
        (steps, packed), before = self._sums.get(counts["key"], ((0, 0), (0, 0)))
        if self._stands_in:
            steps, packed = steps + of_all[0] - before[0], packed + of_all[1] - before[1]
        return steps, packed


def _recover(hook: CommHook, target: Runner | NativeHook) -> None:
    with nullcontext() if isinstance(target, NativeHook) else target.between_steps():
        hook.recover()


def _before_step(
    adapter: "weakref.ref[DDPAdapter]",
    hook: CommHook,
    runner: Runner,
    discarded: DiscardedGradients | None,
) -> None:
    own = adapter()
    if own is None or not own.choose_path(hook, runner):
        runner.is_captured(0 if own is None else own.steps)
    if discarded is not None and any(each.state for each in tree(hook)):
        discarded.before_step()
