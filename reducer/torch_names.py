"""Names of torch's wrapper that code written for it uses, underscored ones included."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import BuiltinCommHookType
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.nn.parallel.distributed import _BufferCommHookLocation
from torch.nn.parallel.scatter_gather import gather, scatter_kwargs

from reducer._C import Reducer
from reducer.buffers import BufferHook
from reducer.hook_registration import HookRegistration, TorchHook
from reducer.logging_data import logging_data, records_errors
from reducer.nested_tensors import map_tensors
from reducer.observers import GradientObservers
from reducer.optim import overlap_optimizer
from reducer.options import WrapperOptions
from reducer.step_sampler import StepSampler
from reducer.torch_internals import TorchInternals
from reducer.trained_parameters import TrainedParameters

__all__: list[str] = []


class TorchNames(TorchInternals):
    """Base class of DistributedDataParallel: torch's names, by means of the wrapper's own parts."""

    # Set by DistributedDataParallel.
    device: torch.device
    options: WrapperOptions
    reducer: Reducer
    hook_registration: HookRegistration
    gradient_observers: GradientObservers
    step_sampler: StepSampler
    _trained: TrainedParameters

    _clones_outputs = True

    # --------------------------------------------------------------------------- attributes

    dim = property(attrgetter("options.dim"))
    device_ids = property(attrgetter("options.device_ids"))
    output_device = property(attrgetter("options.output_device"))
    mixed_precision = property(attrgetter("options.mixed_precision"))
    bucket_bytes_cap = property(attrgetter("options.bucket_bytes_cap"))
    bucket_bytes_cap_list = property(attrgetter("options.bucket_bytes_cap_list"))
    find_unused_parameters = property(attrgetter("options.find_unused_parameters"))
    skip_all_reduce_unused_params = property(attrgetter("options.skip_all_reduce_unused_params"))
    gradient_as_bucket_view = property(attrgetter("options.gradient_as_bucket_view"))
    static_graph = property(attrgetter("options.static_graph"))
    batched_grad_copy = property(attrgetter("options.batched_grad_copy"))
    lazy_bucket_allocation = property(attrgetter("options.lazy_bucket_allocation"))

    @property
    def forward_sync_buffers(self) -> bool:
        """Whether buffers are broadcast before each forward; may be set."""
        return self.options.forward_sync_buffers

    @forward_sync_buffers.setter
    def forward_sync_buffers(self, value: bool) -> None:
        self.options = replace(self.options, forward_sync_buffers=value)

    broadcast_buffers = forward_sync_buffers

    @property
    def modules_buffers(self) -> list[Tensor]:
        """The buffers that are synchronized."""
        return list(self.module_buffers.by_name.values())

    @property
    def logger(self) -> TorchNames:
        """The wrapper itself; torch keeps its logging data in another object."""
        return self

    # ------------------------------------------------------------------------------- inputs

    def scatter(self, inputs: Any, kwargs: Any, device_ids: Sequence[int | torch.device]) -> Any:
        """Distribute inputs over devices; not called by the wrapper."""
        return scatter_kwargs(inputs, kwargs, device_ids, dim=self.dim)

    def gather(self, outputs: Any, output_device: int | torch.device) -> Any:
        """Collect outputs from devices; not called by the wrapper."""
        return gather(outputs, output_device, dim=self.dim)

    def to_kwargs(self, inputs: Any, kwargs: Any, device_id: int | torch.device) -> Any:
        """Move inputs and keyword arguments to a device; return tuples of one element each."""
        device = (
            torch.device(self.device.type, device_id) if isinstance(device_id, int) else device_id
        )

        def move(tensor: Tensor) -> Tensor:
            return tensor.to(device, non_blocking=True)

        return (map_tensors(move, inputs),), (map_tensors(move, kwargs),)

    def _set_ddp_sink_clone(self, val: bool) -> None:
        """Set whether outputs that pass through a sink are cloned. See Note [Sink]."""
        self._clones_outputs = val

    # -------------------------------------------------------------------------------- hooks

    @records_errors
    def register_comm_hook(self, state: object, hook: TorchHook) -> None:
        """Register a torch-style hook, ``hook(state, bucket)``, once.

        The hook returns a future of one tensor shaped like ``bucket.buffer()``: the average. Names
        of arguments do not matter, and any callable is accepted. `commhooks.register` offers more.
        """
        self.hook_registration.register(state, hook)

    _register_comm_hook = register_comm_hook

    @records_errors
    def _register_builtin_comm_hook(self, comm_hook_type: BuiltinCommHookType) -> None:
        """Register one of torch's built-in hooks: ALLREDUCE or FP16_COMPRESS."""
        self.hook_registration.register_builtin(comm_hook_type)

    @records_errors
    def _register_buffer_comm_hook(
        self,
        state: object,
        hook: Callable[..., Any],
        comm_hook_location: _BufferCommHookLocation = _BufferCommHookLocation.POST_FORWARD,
    ) -> None:
        """Let ``hook(state, buffers by name)`` synchronize buffers, before or after forward.

        It may return a list of futures, which are waited for at the end of backward.
        """
        if not callable(hook):
            raise TypeError(f"Buffer hook must be callable, found {hook!r}.")
        self.module_buffers.hook = BufferHook(hook, state, comm_hook_location)

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
        data = logging_data(
            self.module, self.parameter_names, self.reducer, self.hook_registration, self.options
        )
        return data | self.step_sampler.data()

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

    def _update_process_group(self, new_process_group: dist.ProcessGroup) -> None:
        """Average over other ranks from the next step on, without a communication hook.

        Buckets are rebuilt after the next step. A hook has to be registered again.
        """
        if dist.distributed_c10d._rank_not_in_group(new_process_group):  # noqa: SLF001
            return
        self.process_group = new_process_group
        self.hook_registration.move(new_process_group)

    def _check_manual_backward_finalization_supported(self) -> None:
        """Do nothing; torch raises RuntimeError for configurations that the wrapper supports."""

    @records_errors
    def _check_reducer_finalized(self) -> None:
        self.reducer.check_finalized()

    def _remove_autograd_hooks(self) -> None:
        self.reducer.remove_autograd_hooks()
        self._trained.stop()

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(
        module: nn.Module, params_and_buffers_to_ignore: Sequence[str]
    ) -> None:
        ignore: Any = TorchDDP._set_params_and_buffers_to_ignore_for_model  # noqa: SLF001
        ignore(module, params_and_buffers_to_ignore)
