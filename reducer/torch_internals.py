"""Parts that only exist because torch's wrapper has them: names, logging data, torch.compile.

The engine needs none of it. Torch's own code, some libraries and many scripts read these names.
"""

from __future__ import annotations

import functools
import os
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from operator import attrgetter
from types import SimpleNamespace
from typing import Any, NoReturn, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import BuiltinCommHookType
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from reducer.backends import GLOO, NCCL, family_named
from reducer.buffers import BROADCAST_BYTES, broadcast
from reducer.hook_registration import HookRegistration, check_annotations
from reducer.host_memory import connect_host
from reducer.native import AverageHook, GradBucket, HostGroup, Reducer
from reducer.nested_tensors import map_tensors
from reducer.optim import GradientObservers, overlap_optimizer
from reducer.options import FIRST_BUCKET_BYTES, WrapperOptions
from reducer.wrapper_reducer import WrapperReducer

Function = TypeVar("Function", bound=Callable[..., Any])

# ------------------------------------------------------------------------------ torch.compile


def outside_graphs(function: Function, *, recursive: bool = False) -> Function:
    """Exclude the function itself from compilation, but not the functions that it calls."""
    disable: Any = torch._disable_dynamo  # type: ignore[attr-defined]  # noqa: SLF001
    return cast("Function", disable(function, recursive=recursive))


def not_compiled(function: Function) -> Function:
    """Exclude the function and all that it calls from compilation."""
    return outside_graphs(function, recursive=True)


@contextmanager
@outside_graphs
def split_graphs_at_buckets(bucket_bytes: int) -> Iterator[None]:
    """Let the compiler split graphs at the ends of buckets, as it does for torch's wrapper.

    The compiler accepts no buckets that are smaller than torch's first one.
    """
    before = TorchDDP._active_ddp_module  # noqa: SLF001
    # The part of torch's wrapper that the compiler reads.
    buckets: Any = SimpleNamespace(bucket_bytes_cap=max(bucket_bytes, FIRST_BUCKET_BYTES))
    TorchDDP._active_ddp_module = buckets  # noqa: SLF001
    try:
        yield
    finally:
        TorchDDP._active_ddp_module = before  # noqa: SLF001


# ------------------------------------------------------------------------------- logging data

_ENVIRONMENT = ("MASTER_PORT", "MASTER_ADDR", "CUDA_VISIBLE_DEVICES", "TORCH_DISTRIBUTED_DEBUG")
_ENVIRONMENT_OF_BACKENDS = {
    GLOO: ("GLOO_SOCKET_IFNAME", "GLOO_DEVICE_TRANSPORT"),
    NCCL: (
        "NCCL_SOCKET_IFNAME",
        "TORCH_NCCL_BLOCKING_WAIT",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        "NCCL_DEBUG",
        "NCCL_NTHREADS",
        "NCCL_IB_TIMEOUT",
    ),
}
# torch reports the names of C++.
_NAMES_IN_CPP = {
    torch.float32: "float",
    torch.float64: "double",
    torch.float16: "c10::Half",
    torch.bfloat16: "c10::BFloat16",
    torch.complex64: "c10::complex<float>",
    torch.complex128: "c10::complex<double>",
}
_SAMPLED_FIRST = 10


def records_errors(method: Function) -> Function:
    """Decorate a method of the wrapper: keep the text of an exception for the logging data."""

    @functools.wraps(method)
    def recording(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except Exception as error:
            self.reducer.last_error = str(error)
            raise

    return cast("Function", recording)


def _logging_data(model: TorchNames) -> dict[str, Any]:
    """Return those of torch's keys that apply here; sizes are in bytes."""
    reducer, options, parameters = model.reducer, model.options, list(model.parameter_names)
    data: dict[str, Any] = {
        "module_name": type(model.module).__name__,
        "world_size": reducer.process_group.size(),
        "rank": reducer.process_group.rank(),
        "bucket_cap_bytes": options.bucket_bytes_cap,
        "find_unused_parameters": int(options.find_unused_parameters),
        "gradient_as_bucket_view": int(options.gradient_as_bucket_view),
        "static_graph": int(options.static_graph),
        "broadcast_buffers": int(options.forward_sync_buffers),
        "has_sync_bn": int(any(isinstance(m, nn.SyncBatchNorm) for m in model.module.modules())),
        "device_ids": ", ".join(map(str, options.device_ids or [])),
        "output_device": -1 if options.output_device is None else options.output_device,
        "is_multi_device_module": int(len({p.device for p in parameters}) > 1),
        "num_parameter_tensors": len(parameters),
        "total_parameter_size_bytes": sum(p.nbytes for p in parameters),
        "dtypes": ", ".join(sorted({_name_in_cpp(p.dtype) for p in parameters})),
    }
    if reducer.transport is not None:
        data["transport"] = reducer.transport.name
    if model.hook_registration.name is not None:
        data["comm_hook"] = model.hook_registration.name
    if reducer.last_error:
        data |= {"has_error": 1, "error": reducer.last_error}
    return data | _of_backend(reducer) | _of_buckets(reducer) | _of_use(parameters, reducer)


def _name_in_cpp(dtype: torch.dtype) -> str:
    return _NAMES_IN_CPP.get(dtype, str(dtype).removeprefix("torch."))


def _of_backend(reducer: Reducer) -> dict[str, Any]:
    """Return the keys about the process group and the environment."""
    group = reducer.process_group
    backend = group.name()
    data: dict[str, Any] = {"backend_name": backend}
    for name in (*_ENVIRONMENT, *_ENVIRONMENT_OF_BACKENDS.get(family_named(backend), ())):
        data[name.replace("TORCH_NCCL", "NCCL").lower()] = os.environ.get(name, "N/A")
    if backend == GLOO:
        options = getattr(group._get_backend(torch.device("cpu")), "options", None)  # noqa: SLF001
        data["gloo_num_threads"] = getattr(options, "_threads", "N/A")
    return data


def _of_buckets(reducer: Reducer) -> dict[str, Any]:
    buckets = reducer.bucket_stats()
    sizes = ", ".join(str(bucket["gradient_bytes"]) for bucket in buckets)
    indices = ", ".join(" ".join(map(str, bucket["indices"])) for bucket in buckets)
    prefix = "rebuilt" if reducer.has_rebuilt_buckets else "initial"
    return {
        "bucket_sizes": sizes,
        "has_rebuilt_buckets": int(reducer.has_rebuilt_buckets),
        f"{prefix}_bucket_sizes": sizes,
        f"{prefix}_per_bucket_param_indices": indices,
        "num_buckets_reduced": reducer.skipped_buckets.count(False),
    }


def _of_use(parameters: list[nn.Parameter], reducer: Reducer) -> dict[str, Any]:
    """Return the keys about the gradients of the last step, on this rank."""
    use = reducer.last_use()
    return {
        "prev_iteration_grad_ready_order_indices": ", ".join(map(str, use["order"])),
        "unused_parameter_size": sum(parameters[index].nbytes for index in use["unused"]),
        "can_set_static_graph": use["is_constant"],
    }


class StepSampler:
    """Samples the times of the first ten steps, then those of every ``rate``-th step.

    ``forward_start``, ``forward_seconds``: of the current step, by :func:`time.monotonic`; set by
    the wrapper.
    """

    def __init__(self) -> None:
        self.forward_start = 0.0
        self.forward_seconds = 0.0
        self._rate = 100
        self._last_step = 0
        self._samples = 0
        self._sums: Counter[str] = Counter()
        self._last: dict[str, int] = {"iteration": 0}

    def sample(self, step: int, times: dict[str, float]) -> None:
        """Take the times of a step, unless it is not to be sampled or was taken before.

        ``times``: ``Reducer.last_times()`` after ``step`` steps.
        """
        start, end = times["backward_start"], times["backward_end"]
        if step == self._last_step or not start:
            return
        self._last_step = step
        if step > _SAMPLED_FIRST and step % self._rate:
            return
        sent, received = times["communication_start"], times["communication_end"]
        durations = {
            "forward_compute_time": self.forward_seconds,
            "backward_compute_time": end - start,
            "backward_comm_time": received - sent if sent else 0.0,
            "backward_compute_comm_overlap_time": max(0.0, end - sent) if sent else 0.0,
        }
        points = {
            "forward_compute_time_start": self.forward_start,
            "backward_compute_time_start": start,
            "backward_compute_time_end": end,
        }
        if sent:
            points |= {"backward_comm_time_start": sent, "backward_comm_time_end": received}
        nanoseconds = {name: int(seconds * 1e9) for name, seconds in durations.items()}
        self._sums.update(nanoseconds)
        self._samples += 1
        epoch = time.time() - time.monotonic()
        starts = {name: int((epoch + point) * 1e9) for name, point in points.items()}
        self._last = nanoseconds | starts | {"iteration": step}

    def set_rate(self, rate: int) -> None:
        """Sample every ``rate``-th step. Raises ValueError if ``rate`` is less than 1."""
        if rate < 1:
            raise ValueError(
                f"DDP runtime logging sample rate should be equal or greater than 1, found {rate}."
            )
        self._rate = rate

    def data(self) -> dict[str, int]:
        """Return the last sample, and averages over all samples, in nanoseconds as in torch.

        Points in time are of :func:`time.time_ns`; ``iteration`` is the step of the last sample.
        """
        averages = {f"avg_{name}": total // self._samples for name, total in self._sums.items()}
        return self._last | averages


# -------------------------------------------------------------------------------------- names

TorchHook = Callable[[Any, GradBucket], torch.futures.Future[Tensor]]

_WIRE_DTYPES = {
    BuiltinCommHookType.ALLREDUCE: None,
    BuiltinCommHookType.FP16_COMPRESS: torch.float16,
}


INHERITED = frozenset({
    "_active_ddp_module", "_assign_modules_buffers", "_build_debug_param_to_name_mapping",
    "_build_params_for_reducer", "_check_comm_hook", "_check_default_group",
    "_check_sync_bufs_post_fwd", "_check_sync_bufs_pre_fwd", "_default_broadcast_coalesced",
    "_distributed_broadcast_coalesced", "_distributed_rank", "_get_active_ddp_module",
    "_get_data_parallel_params", "_get_parameters", "_register_buffer_comm_hook",
    "_set_ddp_sink_clone", "_set_params_and_buffers_to_ignore_for_model", "gather",
    "join_device", "join_process_group", "scatter", "train", "will_sync_module_buffers",
})  # fmt: skip
"""Names of torch's class that need no more than attributes that the wrapper has.

Note [Names of torch's class]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
The wrapper is a subclass of torch's, because pipelines, checkpoints, compilers and libraries ask
``isinstance``. It overrides what works on torch's reducer. What it neither overrides nor inherits
on purpose, also names of a later torch, raises AttributeError rather than fail inside torch.
"""

_REFUSED = {it for it in vars(TorchDDP) if not it.startswith("__")} - INHERITED - {"_abc_impl"}
_OPTIONS = {*WrapperOptions.__dataclass_fields__, "bucket_bytes_cap"}


class TorchNames(TorchDDP):
    """Base class of DistributedDataParallel: torch's names, by means of the wrapper's own parts.

    Parts that need the wrapper know it by this class. Attributes named after a field of
    :class:`WrapperOptions` read that field. See Note [Names of torch's class] for the others.
    """

    # Set by DistributedDataParallel.
    module: nn.Module
    device: torch.device
    process_group: dist.ProcessGroup
    parameters_to_ignore: set[str]
    parameter_names: dict[nn.Parameter, str]
    options: WrapperOptions
    reducer: WrapperReducer  # type: ignore[assignment]
    hook_registration: HookRegistration
    gradient_observers: GradientObservers
    step_sampler: StepSampler
    divide_by_initial_world_size: bool
    require_forward_param_sync: bool
    _is_connected: bool

    locals().update({name: property() for name in _REFUSED})  # without a getter
    locals().update({name: property(attrgetter(f"options.{name}")) for name in _OPTIONS})

    _ddp_sink_clone = True
    broadcast_bucket_size = BROADCAST_BYTES

    # --------------------------------------------------------------------------- attributes

    should_finalize_after_backward = property(attrgetter("require_manual_backward_finalization"))
    _has_rebuilt_buckets = property(attrgetter("reducer.has_rebuilt_buckets"))

    @property
    def forward_sync_buffers(self) -> bool:
        """Whether buffers are broadcast before each forward; may be set."""
        return self.options.forward_sync_buffers

    @forward_sync_buffers.setter
    def forward_sync_buffers(self, value: bool) -> None:
        self.options = replace(self.options, forward_sync_buffers=value)

    broadcast_buffers = forward_sync_buffers

    @property
    def logger(self) -> TorchNames:  # type: ignore[override]
        """The wrapper itself; torch keeps its logging data in another object."""
        return self

    def not_ignored_parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters of the module by name, except the ignored ones."""
        named = self.module.named_parameters()
        return {name: it for name, it in named if name not in self.parameters_to_ignore}

    # ------------------------------------------------------------------------------- inputs

    def to_kwargs(self, inputs: Any, kwargs: Any, device_id: int | torch.device) -> Any:
        """Move inputs and keyword arguments to a device; return tuples of one element each."""
        device = (
            torch.device(self.device.type, device_id) if isinstance(device_id, int) else device_id
        )

        def move(tensor: Tensor) -> Tensor:
            return tensor.to(device, non_blocking=True)

        return (map_tensors(move, inputs),), (map_tensors(move, kwargs),)

    def sync_buffers(self, root: int) -> None:
        """Copy the buffers of rank ``root`` to all ranks, or call the user's hook. Collective.

        The next backward ends after the futures that the hook returns. The versions that autograd
        checks do not change: a graph that was recorded with the old values stays valid.
        """
        # Modules may have replaced theirs.
        self._assign_modules_buffers()  # type: ignore[no-untyped-call]
        hook = getattr(self, "buffer_hook", None)
        with torch.no_grad(), _unsafe_preserve_version_counter(tuple(self.modules_buffers)):
            if hook is None:
                broadcast(self.process_group, self.modules_buffers, root)
                return
            state = hook.buffer_comm_hook_state
            if futures := hook.buffer_comm_hook(state, self.named_module_buffers):
                self.reducer.await_after_backward(list(futures))

    # -------------------------------------------------------------------------------- hooks

    @records_errors
    def register_comm_hook(self, state: object, hook: TorchHook) -> None:
        """Register a torch-style hook, ``hook(state, bucket)``, once.

        The hook returns a future of one tensor shaped like ``bucket.buffer()``: the average. Names
        of arguments do not matter, and any callable is accepted. `commhooks.register` offers more.
        """
        if not callable(hook):
            raise TypeError(f"Communication hook must be callable, found {hook!r}.")
        check_annotations(hook)
        bound = functools.partial(hook, state)
        # In errors and profiles:
        bound.name = getattr(hook, "__qualname__", type(hook).__qualname__)  # type: ignore[attr-defined]
        self.hook_registration.take(bound)

    _register_comm_hook = register_comm_hook

    @records_errors
    def _register_builtin_comm_hook(self, comm_hook_type: BuiltinCommHookType) -> None:
        """Register one of torch's built-in hooks: ALLREDUCE or FP16_COMPRESS."""
        if comm_hook_type not in _WIRE_DTYPES:
            known = [kind.name for kind in _WIRE_DTYPES]
            raise ValueError(f"Expected one of {known}, found {comm_hook_type}.")
        average = AverageHook(self.reducer.process_group, _WIRE_DTYPES[comm_hook_type])
        self.hook_registration.take(average, name=str(comm_hook_type))

    def _register_fused_optim(
        self,
        optim: type[torch.optim.Optimizer],
        *args: Any,
        optim_params: Sequence[nn.Parameter] | None = None,
        **kwargs: Any,
    ) -> None:
        """Call :func:`reducer.overlap_optimizer` such that gradients are not cleared."""
        overlap_optimizer(self, optim, optim_params, *args, clear_gradients=False, **kwargs)

    # -------------------------------------------------------------------------- observation

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        return _logging_data(self) | self.step_sampler.data()

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        self.step_sampler.set_rate(sample_rate)

    # --------------------------------------------------------------------------- life cycle

    @records_errors
    def _set_static_graph(self) -> None:
        if self.static_graph:
            warnings.warn(
                "You've set static_graph to be True, no need to set it again.", stacklevel=2
            )
            return
        self.reducer.set_static_graph()
        self.options = replace(self.options, static_graph=True)
        if self.find_unused_parameters:
            warnings.warn(
                "You passed find_unused_parameters=true to DistributedDataParallel, "
                "`_set_static_graph` will detect unused parameters automatically, so you do not "
                "need to set it, as long as the same parameters are unused in every iteration.",
                stacklevel=2,
            )

    def _connect_host(self, *what: str) -> HostGroup | None:
        """Share memory with the other ranks of this host, if that is wanted. Collective."""
        host = None
        if self.options.host_memory:
            gradient_bytes = sum(
                p.nbytes for p in self.not_ignored_parameters().values() if p.requires_grad
            )
            host = connect_host(self.process_group, self.device, gradient_bytes, *what)
        self._is_connected = True
        return host

    def prepare_step(self) -> None:
        """Prepare the hook and the buckets for a synchronized step, on all ranks."""
        if not self._is_connected:
            host = self._connect_host("the first step of a copied model, which all ranks train,")
            self.hook_registration.connect(host)
        self.hook_registration.before_step()
        self.reducer.rebuild_buckets()

    def _update_process_group(self, new_process_group: dist.ProcessGroup) -> None:
        """Average over other ranks from the next step on, without a communication hook.

        Buckets are rebuilt after the next step. A hook has to be registered again.
        """
        if dist.distributed_c10d._rank_not_in_group(new_process_group):  # noqa: SLF001
            return
        self.process_group = new_process_group
        self.require_forward_param_sync |= not self._is_connected
        self.reducer.set_process_group(new_process_group, self._connect_host())
        self.hook_registration.reset()

    def _check_manual_backward_finalization_supported(self) -> None:
        """Do nothing; torch raises RuntimeError for configurations that the wrapper supports."""

    @records_errors
    def _check_reducer_finalized(self) -> None:
        self.reducer.check_finalized()

    def _log_and_throw(self, err_type: type[Exception], err_msg: str) -> NoReturn:
        self.reducer.last_error = err_msg
        raise err_type(err_msg)
