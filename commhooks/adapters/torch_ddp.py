"""The adapter of torch's own ``DistributedDataParallel``, and what runs hooks on its buckets."""

import time
import weakref
from collections.abc import Generator
from contextlib import suppress
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C import Future as AnyFuture  # the future of a collective is not a torch.futures.Future
from torch._C._distributed_c10d import GradBucket as TorchBucket
from torch.autograd import Variable
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel
from torch.utils.hooks import RemovableHandle

from commhooks.adapters.adapter import IS_TAKEN, Adapter, TorchHook
from commhooks.adapters.sparse_gradients import SparseGradients, average_rows
from commhooks.algorithms.bucket_parameters import real_view
from commhooks.algorithms.exact import AllReduce
from commhooks.comm.exchange import completed
from commhooks.errors import CommHookError, CommHookResultError
from commhooks.hook.base import CommHook, tree
from commhooks.runtime.recording import Recording, Run, Span, Stage
from commhooks.runtime.runner import Runner
from reducer import GradBucket
from reducer.peers import peer_error


class TorchAdapter(Adapter):
    """Runs hooks on the buckets that torch passes to :meth:`run`.

    Torch's reducer does not survive a hook that fails. Therefore it always gets a tensor to finish
    the step with, and the error is raised at the end of backward, after torch has finished:

        hook of a bucket -> queue A          autograd calls at the end of backward: A, finalize, B
        hook of the last bucket
        torch queues its `finalize`
        A queues B, which raises

    Any bucket may be the first, because torch may leave out others. A backward within a backward,
    as reentrant checkpoints run it, ends before the outer one. Therefore every bucket queues, and B
    does nothing until all buckets have come or torch has finalized. If the caller is to finalize
    after backward (``require_manual_backward_finalization``), B waits for the hooks itself. A step
    that is not seen to end, because torch left out its last bucket, ends when the next one begins.
    Torch's indices do not tell: all buckets of the first step of a static graph have index 0.

    A sparse gradient has a bucket of its own, wherever it comes among the others. It is averaged
    here, exactly, and hooks see only the other buckets.

    Args:
        model: The module inside the wrapper.
        group: The ranks to average over.
        device: Where the gradients are.
        parameters: The parameters of torch's buckets, by the names that hooks get.
        sparse: The gradients that are sparse.
        wrapper: See :class:`Adapter`.
    """

    def __init__(
        self,
        model: nn.Module,
        group: dist.ProcessGroup,
        device: torch.device,
        parameters: dict[str, Tensor],
        sparse: SparseGradients,
        wrapper: nn.Module | None = None,
    ) -> None:
        rows = set(sparse.parameters)
        dense = {name: each for name, each in parameters.items() if each not in rows}
        super().__init__(model, device, dense, list(parameters), wrapper)
        self.sparse = [name for name in parameters if name not in dense]
        self._sparse = sparse
        self._trained = list(parameters.values())
        self._group = group
        self._name_of = {id(parameter): name for name, parameter in parameters.items()}
        self.steps = 0
        self._running: Generator[Future[Tensor] | None, TorchBucket | None, None] | None = None
        self._reached: set[str] = set()  # parameters whose buckets of this step have come
        self._has_last = False  # the bucket that torch marks as the last of this step has come
        self._gradient_hooks: list[RemovableHandle] = []

    def _has_all_buckets(self) -> bool:
        """Return whether torch passes no further bucket of this step."""
        return self._has_last or len(self._reached) == len(self._name_of)

    def _use(self, hook: CommHook | TorchHook | None, target: Any) -> None:
        """Do nothing: :meth:`run` calls what is installed."""

    def start_recording(self) -> None:
        """Record gradients and hooks. Torch's reducer does not tell about the rest."""
        super().start_recording()
        self._gradient_hooks = [
            parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                lambda _, index=index: self._add_span("gradient", index, time.monotonic_ns())
            )
            for index, parameter in enumerate(self._trained)
        ]

    def stop_recording(self) -> Recording:
        while self._gradient_hooks:
            self._gradient_hooks.pop().remove()
        return super().stop_recording()

    def run(self, bucket: TorchBucket) -> Future[Tensor]:
        """Run the hook on ``bucket``. Torch's reducer calls this for each bucket."""
        names = {name for name in self._names_in(bucket) if name}
        if not self._reached.isdisjoint(names):
            self._end_step()
        self._reached |= names
        self._has_last = bucket.is_last()
        if self._running is None:
            self._running = self._run_step()
            next(self._running)
        future = cast("Future[Tensor]", self._running.send(bucket))
        if _is_in_backward():
            _queue_callback(lambda: _queue_callback(self._end_backward))
        elif bucket.is_last():
            # In model.join(), a rank without inputs runs the hook on all buckets of others' steps.
            self._end_step()
        return future

    def _end_backward(self) -> None:
        if self._running is not None and self._has_all_buckets():
            self._end_step()

    def _end_step(self) -> None:
        """End the step, if one is under way, and raise its error."""
        running, self._running, self._reached = self._running, None, set()
        if running is not None:
            with suppress(StopIteration):
                running.send(None)

    def _run_step(self) -> Generator[Future[Tensor] | None, TorchBucket | None, None]:
        """Run the hook on the buckets of a step, which are sent here until None ends the step.

        Yields the future of each, which gets no error: the first error is raised at the end.
        """
        launched = 0  # buckets that hooks got
        told_last = False  # by one that is marked as the last
        futures: list[Future[Tensor]] = []
        averages: list[tuple[GradBucket, int | None, int, int]] = []
        errors: list[BaseException] = []

        # Not with self: Gloo's thread that completes a future drops the callback some time later.
        # If it dropped the last reference to a process group, the destructor would wait for it.
        def take(gradients: Tensor, launch: tuple[Any, ...], future: Future[Tensor]) -> Tensor:
            averages.append((*launch, time.monotonic_ns()))
            try:
                return future.value()
            except BaseException as error:
                # The traceback has this frame, which holds the future, which holds the error.
                errors.append(error.with_traceback(None))
                return gradients

        future: Future[Tensor] | None = None
        while (bucket := (yield future)) is not None:
            gradients, start_ns, sent = bucket.buffer(), time.monotonic_ns(), None
            try:
                self._check_join()
                own = self._with_names(bucket, launched)
                if not gradients.is_sparse:
                    launched, told_last = launched + 1, bucket.is_last()
                if gradients.is_sparse and self._runner is not None:
                    future, sent = average_rows(gradients, self.group)
                else:
                    future = self._launch(bucket, own)
                future = future.then(partial(take, gradients, (own, sent, start_ns)))
            except BaseException as error:
                errors.append(error)
                future = completed(gradients)
            futures.append(future)
        for future in futures:
            future.wait()
        if self._runner is not None and launched > 0 and not told_last:
            try:
                self._vote(self._runner, launched)
            except BaseException as error:
                errors.append(error)
        self._sparse.end_step()
        if errors:
            first = errors[0]
            errors.clear()  # one may refer to this frame
            raise peer_error(self.group, f"the average at step {self.steps}", first)
        for average in averages:
            self._record(*average)
        if self.recording is not None:  # backward began with its first gradient
            spans = self.recording.spans
            last_end = max((s.end_ns for s in spans if s.activity == "backward"), default=0)
            start = min(s.start_ns for s in spans if s.start_ns > last_end)
            self._add_span("backward", self.steps, start)
        self.steps += 1

    def _check_join(self) -> None:
        """Raise CommHookError if the hook cannot run inside ``model.join()``."""
        wrapper: Any = None if self._wrapper is None else self._wrapper()
        if wrapper is None or not isinstance(self.hook, CommHook):
            return
        if not wrapper._join_config.enable:  # noqa: SLF001
            return
        if not wrapper._divide_by_initial_world_size:  # noqa: SLF001
            missing = "divide averages by the number of ranks with inputs"
        elif any(each.changes_parameters for each in tree(self.hook)):
            missing = "tell the hook that join() has overwritten the parameters"
        else:
            return
        raise CommHookError(
            f"hook {self.hook.name!r} inside join(): torch's DistributedDataParallel does not "
            f"{missing}; use commhooks.DistributedDataParallel"
        )

    def _launch(self, bucket: TorchBucket, own: GradBucket) -> Future[Tensor]:
        if self._runner is not None:
            return self._runner(own)
        hook = self._average if self.hook is None else cast("TorchHook", self.hook)
        future = hook(bucket)
        if not isinstance(future, AnyFuture):
            raise CommHookResultError(
                f"[rank {self.group.rank()}] the hook returned {type(future).__name__} for bucket "
                f"{bucket.index()}; expected a torch.futures.Future of the average"
            )
        return future

    def _vote(self, runner: Runner, buckets: int) -> None:
        """End the step of a runner that torch did not give its last bucket."""
        runner.end_step(buckets, self.steps).wait()

    def _record(self, bucket: GradBucket, sent: int | None, start_ns: int, end_ns: int) -> None:
        """Record the average of a bucket. ``sent``: the bytes of rows."""
        times = start_ns, end_ns
        if self._runner is None or sent is not None:
            stages = () if sent is None else (Stage("all_gather", (), start_ns, *times, sent),)
            run = Run(bucket.key, bucket.index(), sent, *times, stages)
            self._collector.record(run, bucket)
        if self.recording is not None:
            name = AllReduce.name if sent is not None else getattr(self.hook, "name", "")
            names = tuple(bucket.names)
            self.recording.spans.append(
                Span("hook", bucket.index(), *times, bucket.key, names, name)
            )

    def _with_names(self, bucket: TorchBucket, index: int) -> GradBucket:
        """Return our bucket for torch's. Complex parameters are real views, as gradients are.

        ``index``: counts the buckets that hooks get without gaps, even if torch leaves out some.
        """
        gradients, names = bucket.buffer(), self._names_in(bucket)
        if "" in names and self._runner is not None:
            raise CommHookError(
                "expected the parameters that required gradients when the hook was registered, "
                f"found others in bucket {bucket.index()} of torch's DistributedDataParallel; "
                "freeze or unfreeze parameters before wrapping the model and registering the hook"
            )
        if gradients.is_sparse:  # hooks do not get them
            gradients = torch.empty(gradients.numel(), dtype=gradients.dtype, device="meta")
            index = len(self.parameters) + self.sparse.index(names[0])
        return GradBucket(
            gradients,
            [real_view(parameter) for parameter in bucket.parameters()],
            names,
            index=index,
            is_last=bucket.is_last(),
            step=self.steps,
        )

    def _names_in(self, bucket: TorchBucket) -> list[str]:
        """Return the names of a bucket's parameters, empty ones for those that are not known."""
        if isinstance(bucket, GradBucket):  # of our own reducer: complex ones are real views
            return bucket.names
        return [self._name_of.get(id(parameter), "") for parameter in bucket.parameters()]

    def _average(self, bucket: TorchBucket) -> Future[Tensor]:
        if bucket.buffer().is_sparse:
            return average_rows(bucket.buffer(), self.group)[0]
        return allreduce_hook(self.group, cast("Any", bucket))


class TorchDDPAdapter(TorchAdapter):
    """Registers itself as the one hook that torch allows per model; what it calls can be replaced.

    ``replicated``: the module whose parameters the wrapper has, if it only has a list of them.
    """

    def __init__(
        self, model: TorchDistributedDataParallel, replicated: nn.Module | None = None
    ) -> None:
        named, ignored = model.module.named_parameters(), model.parameters_to_ignore
        averaged = {p for name, p in named if p.requires_grad and name not in ignored}
        module = replicated or model.module
        parameters = {name: each for name, each in module.named_parameters() if each in averaged}
        if not parameters:
            raise CommHookError("expected a model with parameters to average, found none")
        device = next(iter(parameters.values())).device
        fills = model.find_unused_parameters or model.static_graph
        sparse = SparseGradients(model.module, parameters.values(), module, fill_unused=fills)
        super().__init__(module, model.process_group, device, parameters, sparse, model)
        self._reducer = model.reducer
        if self.sparse and getattr(model, "skip_all_reduce_unused_params", False):
            raise CommHookError(
                f"the gradients of {', '.join(self.sparse)} are sparse, which hooks do not support "
                "with skip_all_reduce_unused_params; create their embeddings with sparse=False, or "
                "the wrapper without that option"
            )
        if model.mixed_precision is not None:
            raise CommHookError(
                "torch's DistributedDataParallel registers a hook of its own for mixed_precision, "
                "and takes no other; use commhooks.DistributedDataParallel(mixed_precision=...)"
            )
        try:
            model.register_comm_hook(_State(self), _run)
        except RuntimeError as error:
            raise CommHookError(IS_TAKEN) from error

    def _has_all_buckets(self) -> bool:
        if super()._has_all_buckets():
            return True
        try:  # torch may have left out the last one
            self._reducer._check_reducer_finalized()  # noqa: SLF001
        except RuntimeError:
            return False
        return True


class _State:
    """The state of the hook for torch, which keeps it in the wrapper: an adapter, held weakly.

    A copy of the wrapper, pickled or not, has none: torch does not register hooks on copies.
    """

    def __init__(self, adapter: TorchAdapter) -> None:
        self.adapter = weakref.proxy(adapter)

    def __reduce__(self) -> tuple[Any, ...]:
        return object, ()


def _run(state: _State, bucket: dist.GradBucket) -> Future[Tensor]:  # type: ignore[name-defined]
    future: Future[Tensor] = state.adapter.run(bucket)
    return future


def _is_in_backward() -> bool:
    return torch._C._current_graph_task_id() >= 0  # noqa: SLF001


def _queue_callback(callback: Any) -> None:
    Variable._execution_engine.queue_callback(callback)  # noqa: SLF001
