"""The base class of the wrapper: torch's class, and what the parts of the wrapper know of it."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from operator import attrgetter
from types import SimpleNamespace
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch._compile import _disable_dynamo
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from reducer.hook_registration import HookRegistration
from reducer.host_memory import connect_host
from reducer.mixed_precision import ParameterCasts
from reducer.native import HostGroup
from reducer.options import FIRST_BUCKET_BYTES, WrapperOptions
from reducer.peers import BROADCAST_BYTES, collective
from reducer.wrapper_reducer import WrapperReducer

INHERITED = frozenset({
    "_active_ddp_module", "_assign_modules_buffers", "_build_debug_param_to_name_mapping",
    "_build_params_for_reducer", "_check_comm_hook", "_check_default_group",
    "_check_sync_bufs_post_fwd", "_check_sync_bufs_pre_fwd", "_default_broadcast_coalesced",
    "_distributed_broadcast_coalesced", "_distributed_rank", "_find_common_rank",
    "_get_active_ddp_module", "_get_data_parallel_params", "_get_parameters",
    "_register_buffer_comm_hook",
    "_set_ddp_sink_clone", "_set_params_and_buffers_to_ignore_for_model", "_sync_module_buffers",
    "gather", "join_device", "join_process_group", "scatter", "to_kwargs", "train",
    "will_sync_module_buffers",
})  # fmt: skip
"""Names of torch's class that need no more than attributes that the wrapper has.

Note [Names of torch's class]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
The wrapper is a subclass of torch's, because pipelines, checkpoints, compilers and libraries ask
``isinstance``. It overrides what works on torch's reducer. What it neither overrides nor inherits
on purpose, also names of a later torch, raises AttributeError rather than fail inside torch.
"""

GradientObserver = Callable[[Sequence[nn.Parameter]], None]

_REFUSED = {it for it in vars(TorchDDP) if not it.startswith("__")} - INHERITED - {"_abc_impl"}
_OPTIONS = {*WrapperOptions.__dataclass_fields__, "bucket_bytes_cap"}


class Wrapper(TorchDDP):
    """Torch's class without its reducer. See Note [Names of torch's class].

    Attributes named after a field of :class:`WrapperOptions` read that field.
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
    _casts: ParameterCasts
    gradient_observers: list[GradientObserver]
    _is_connected: bool

    locals().update({name: property() for name in _REFUSED})  # without a getter
    locals().update({name: property(attrgetter(f"options.{name}")) for name in _OPTIONS})

    require_backward_grad_sync = True
    require_forward_param_sync = True
    require_manual_backward_finalization = False
    divide_by_initial_world_size = True
    broadcast_bucket_size = BROADCAST_BYTES
    use_side_stream_for_tensor_copies = True
    _ddp_sink_clone = True
    _has_rebuilt_buckets = property(attrgetter("reducer.has_rebuilt_buckets"))
    device_type = property(attrgetter("device.type"))
    should_finalize_after_backward = property(attrgetter("require_manual_backward_finalization"))

    def _set_forward_sync_buffers(self, value: bool) -> None:
        self.options = replace(self.options, forward_sync_buffers=value)

    forward_sync_buffers = broadcast_buffers = property(
        attrgetter("options.forward_sync_buffers"), _set_forward_sync_buffers
    )

    @property
    def logger(self) -> "Wrapper":  # type: ignore[override]
        """The wrapper itself; torch keeps its logging data in another object."""
        return self

    def _log_and_throw(self, err_type: type[Exception], err_msg: str) -> NoReturn:
        self.reducer.last_error = err_msg
        raise err_type(err_msg)

    def not_ignored_parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters of the module by name, except the ignored ones."""
        named = self.module.named_parameters()
        return {name: it for name, it in named if name not in self.parameters_to_ignore}

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

    @contextmanager
    @_disable_dynamo(recursive=False)
    def _inside_ddp_forward(self) -> Iterator[None]:
        """Let the compiler split graphs at the ends of buckets, as it does for torch's wrapper.

        The compiler accepts no buckets that are smaller than torch's first one.
        """
        # The part of torch's wrapper that the compiler reads.
        size = max(self.bucket_bytes_cap, FIRST_BUCKET_BYTES)
        TorchDDP._active_ddp_module = SimpleNamespace(bucket_bytes_cap=size)  # type: ignore[assignment]  # noqa: SLF001
        try:
            yield
        finally:
            TorchDDP._active_ddp_module = None  # noqa: SLF001

    def prepare_step(self) -> None:
        """Prepare the hook and the buckets for a synchronized step, on all ranks."""
        if not self._is_connected:
            host = self._connect_host("the first step of a copied model, which all ranks train,")
            self.hook_registration.connect(host)
        self.hook_registration.before_step()
        self.reducer.rebuild_buckets()

    def sync_buffers(self, root: int) -> None:
        """Copy the buffers of rank ``root`` to all ranks, or call the user's hook. Collective.

        The next backward ends after the futures that the hook returns. The versions that autograd
        checks do not change: a graph that was recorded with the old values stays valid.
        """
        # Modules may have replaced theirs.
        self._assign_modules_buffers()  # type: ignore[no-untyped-call]
        what = f"the broadcast of {len(self.modules_buffers)} tensors of rank {root}"
        with (
            torch.no_grad(),
            _unsafe_preserve_version_counter(tuple(self.modules_buffers)),
            collective(self.process_group, what),
        ):
            self._sync_module_buffers(root)  # type: ignore[no-untyped-call]

    def add_gradient_observer(self, observer: GradientObserver) -> None:
        """Call ``observer(parameters)`` in backward when these have their averaged ``.grad``.

        It is called for one bucket at a time, on the thread that runs backward. The first exception
        is raised when all averages are written; no observer is called in between.
        """
        self.gradient_observers.append(observer)
        self._observe()

    def remove_gradient_observer(self, observer: GradientObserver) -> None:
        """Stop calling ``observer``. Raises ValueError if it was not added."""
        self.gradient_observers.remove(observer)
        self._observe()

    def _observe(self) -> None:
        # The function must not refer to self, which refers to the reducer: the garbage collector
        # cannot find a reference cycle that passes through C++.
        observers, parameters = self.gradient_observers, list(self.parameter_names)

        def observe(indices: Sequence[int]) -> None:
            ready = [parameters[index] for index in indices]
            for observer in observers:
                observer(ready)

        self.reducer.set_observer(observe if observers else None)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients locally in the backwards of forwards that run in this context.

        The next synchronized backward averages the accumulated gradients as well.
        """
        self.reducer.expect_local_gradients()
        with super().no_sync():
            yield
