"""The engine's front: a module wrapper that averages gradients over ranks during backward."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import BuiltinCommHookType
from torch.distributed.algorithms.join import Join, Joinable
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.nn.parallel.distributed import _BufferCommHookLocation
from torch.nn.parallel.scatter_gather import gather, scatter_kwargs

from reducer._C import Reducer
from reducer.arguments import (
    bucket_sizes,
    check_parameters,
    choose_devices,
    choose_process_group,
    prepare_tensor_parallel,
    sparse_parameters,
)
from reducer.buffers import BufferHook, ModuleBuffers, broadcast, refuse_sync_batch_norm
from reducer.compilation import cut_at_buckets, not_compiled, outside_graphs
from reducer.group_keys import GroupKeys
from reducer.hook_registration import HookRegistration, TorchHook
from reducer.join import Plans, ShadowHook
from reducer.logging_data import StepSampler, bucket_table, logging_data
from reducer.mixed_precision import casts_of
from reducer.observers import GradientObserver, GradientObservers
from reducer.optim import overlap_optimizer, take_over_in_backward_optimizers
from reducer.outputs import map_tensors, tensors_in
from reducer.sink import through_sink
from reducer.start import start_alike

__all__ = ["DistributedDataParallel", "GradientObserver", "set_hook_resolver"]

HookResolver = Callable[["DistributedDataParallel", Any, Mapping[str, Any]], object]

_resolve_hook: HookResolver | None = None

# What a pickled wrapper makes anew, on the ranks that load it.
_OF_THIS_PROCESS = (
    "process_group",
    "parameter_names",
    "reducer",
    "hook_registration",
    "gradient_observers",
    "step_sampler",
    "_casts",
)


def set_hook_resolver(resolver: HookResolver) -> None:
    """Let ``resolver(model, hook, hook_options)`` handle the ``hook`` argument of the wrapper."""
    global _resolve_hook
    _resolve_hook = resolver


class DistributedDataParallel(nn.Module, Joinable):
    """Wrap ``module`` so that ``loss.backward()`` averages its gradients over the ranks.

    Takes the place of ``torch.nn.parallel.DistributedDataParallel``. All ranks construct it with
    the same arguments; it verifies that their parameters agree in name, shape, strides and dtype,
    and broadcasts parameters and buffers from rank 0 (``init_sync``).

    Args:
        module: the module to train. Parameters that require no gradient are left alone.
        device_ids, output_device: the one GPU that inputs are moved to; None for modules on the CPU
            or on several devices.
        broadcast_buffers, forward_sync_buffers: broadcast buffers from rank 0 before each forward.
            Without the first, they are not broadcast at the start either.
        process_group, device_mesh: the ranks to average over; default: all.
        bucket_cap_mb: size of a bucket in MiB (default 25); the first one is 1 MiB at most.
            bucket_cap_mb_list: of the first bucket, the second and so on; the last for all others.
        find_unused_parameters: look through the graph of every forward for parameters that this
            rank does not use, so that the others need not wait for them. Parameters that no rank
            used keep their ``.grad`` untouched.
        skip_all_reduce_unused_params: do not average buckets whose parameters are all unused; they
            must be the same ones on every rank.
        gradient_as_bucket_view: let ``.grad`` be a view of the bucket: saves memory and copies.
        static_graph: promise that every iteration uses the same parameters equally often. Allows
            parameters to be used several times, and activation checkpointing of any kind.
        delay_all_reduce_named_params: average these (name, parameter) after all others.
            param_to_hook_all_reduce is accepted with it, and not needed.
        mixed_precision: dtypes for computation, communication and buffers; see
            :class:`reducer.mixed_precision.MixedPrecision`. Works together with any hook.
        lazy_bucket_allocation: give the memory of buckets back between steps.
        check_reduction, dim, batched_grad_copy: accepted for compatibility. Gradients are always
            copied together.
        hook, hook_options: a communication hook by name, as an object or as a config, and its
            options; needs ``import commhooks``. Default: the exact average by all-reduce.
        stable_buckets: keep the first assignment of parameters to buckets. Otherwise buckets are
            cut anew after the first step, in the order in which gradients arrived.
        group_key: maps (name, parameter) to a key; only parameters of one key share a bucket.
        key_process_groups: for some of these keys, other ranks to average over, e.g. those that
            hold the same experts. Their gradients are averaged plainly, whatever the hook.

    Raises:
        RuntimeError: ranks hold different parameters; no parameter requires a gradient; or, from
            the forward after it, a backward left parameters without gradients (they are named).
            Exceptions of hooks come out of ``backward()``; the next iteration starts clean.
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: Sequence[tuple[str, nn.Parameter]] | None = None,
        param_to_hook_all_reduce: nn.Parameter | None = None,
        mixed_precision: Any = None,
        device_mesh: DeviceMesh | None = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: Sequence[float] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        lazy_bucket_allocation: bool = False,
        *,
        hook: Any = None,
        hook_options: Mapping[str, Any] | None = None,
        stable_buckets: bool = False,
        group_key: Callable[[str, nn.Parameter], Hashable] | None = None,
        key_process_groups: Mapping[Hashable, dist.ProcessGroup] | None = None,
    ) -> None:
        nn.Module.__init__(self)
        Joinable.__init__(self)
        if check_reduction:
            warnings.warn(
                "The `check_reduction` argument is deprecated and has no effect.",
                FutureWarning,
                stacklevel=2,
            )
        if (delay_all_reduce_named_params is None) != (param_to_hook_all_reduce is None):
            raise ValueError(
                "delay_all_reduce_named_params and param_to_hook_all_reduce need to be set at the "
                "same time."
            )
        self.process_group = choose_process_group(process_group, device_mesh)
        if device_mesh is not None:
            self.device_mesh = device_mesh
            prepare_tensor_parallel(module, device_mesh)
        self.module = module
        self.dim = dim
        self.parameters_to_ignore: set[str] = set(
            getattr(module, "_ddp_params_and_buffers_to_ignore", ())
        )
        named_parameters = self._named_parameters()
        check_parameters(named_parameters)
        self.device = named_parameters[0][1].device
        self.device_ids, self.output_device = choose_devices(
            named_parameters, device_ids, output_device
        )
        refuse_sync_batch_norm(module, self.device)

        self.forward_sync_buffers = broadcast_buffers is not False
        if forward_sync_buffers is not None:
            self.forward_sync_buffers = forward_sync_buffers
        self.find_unused_parameters = find_unused_parameters
        self.skip_all_reduce_unused_params = skip_all_reduce_unused_params
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.batched_grad_copy = batched_grad_copy
        self.lazy_bucket_allocation = lazy_bucket_allocation
        self.static_graph = static_graph
        self.stable_buckets = stable_buckets
        self.require_backward_grad_sync = True
        self.require_forward_param_sync = True
        self.require_manual_backward_finalization = False
        self.divide_by_initial_world_size = True
        self._sink_clones = True
        self._bucket_sizes = bucket_sizes(bucket_cap_mb, bucket_cap_mb_list)
        self.bucket_bytes_cap = self._bucket_sizes[-1]
        self.group_keys = GroupKeys(group_key, key_process_groups, delay_all_reduce_named_params)
        self.module_buffers = ModuleBuffers(module, self.parameters_to_ignore)
        if init_sync:
            broadcasts_buffers = forward_sync_buffers is not None or broadcast_buffers is not False
            buffers = self.modules_buffers if broadcasts_buffers else []
            start_alike(named_parameters, buffers, self.process_group, self.group_keys)
        self.mixed_precision = mixed_precision
        self._set_up()
        if hook is not None:
            if _resolve_hook is None:
                raise RuntimeError(
                    "The `hook` argument is handled by commhooks: `import commhooks` first."
                )
            _resolve_hook(self, hook, hook_options or {})
        elif hook_options:
            raise ValueError(f"hook_options={dict(hook_options)} were given without a hook.")

    def _named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        return [
            (name, parameter)
            for name, parameter in self.module.named_parameters()
            if name not in self.parameters_to_ignore
        ]

    def _set_up(self) -> None:
        """Makes what is of this process."""
        self._casts = casts_of(self.module, self.mixed_precision, self.parameters_to_ignore)
        self.parameter_names = {p: name for name, p in self._named_parameters() if p.requires_grad}
        self.reducer = self._make_reducer()
        self.hook_registration = HookRegistration(self.reducer, self._casts.wire_dtype)
        self.gradient_observers = GradientObservers(self.reducer, list(self.parameter_names))
        self.step_sampler = StepSampler()
        self._has_run_forward = False

    def _make_reducer(self) -> Reducer:
        parameters, names = list(self.parameter_names), list(self.parameter_names.values())
        numbered = self.group_keys.number(list(zip(names, parameters, strict=True)))
        sparse = sparse_parameters(self.module)
        return Reducer(
            parameters,
            self.process_group,
            names=names,
            keys=numbered.keys,
            sparse=[parameter in sparse for parameter in parameters],
            key_groups=numbered.process_groups,
            late_key=numbered.late,
            bucket_bytes=self._bucket_sizes,
            small_last_bucket=os.environ.get("DDP_SET_LAST_BUCKET_CAP") == "1",
            find_unused_parameters=self.find_unused_parameters,
            static_graph=self.static_graph,
            gradient_as_bucket_view=self.gradient_as_bucket_view,
            stable_buckets=self.stable_buckets,
            skip_unused_buckets=self.skip_all_reduce_unused_params,
            release_buckets=self.lazy_bucket_allocation,
            frozen={name: p for name, p in self._named_parameters() if not p.requires_grad},
        )

    @property
    def broadcast_buffers(self) -> bool:
        """The former name of ``forward_sync_buffers``."""
        return self.forward_sync_buffers

    @broadcast_buffers.setter
    def broadcast_buffers(self, value: bool) -> None:
        self.forward_sync_buffers = value

    @property
    def logger(self) -> DistributedDataParallel:
        """Torch keeps its logging data in another object; here the wrapper itself has them."""
        return self

    # ------------------------------------------------------------------------------- forward

    @outside_graphs
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module; the next backward synchronizes unless inside :meth:`no_sync`."""
        with torch.autograd.profiler.record_function("DistributedDataParallel.forward"):
            synchronizes = torch.is_grad_enabled() and self.require_backward_grad_sync
            plans = self._before_forward(synchronizes)
            inputs, kwargs = self._move_inputs(inputs, kwargs)
            start = time.perf_counter()
            with self._casts.casting() as keep_casts, cut_at_buckets(self.bucket_bytes_cap):
                output = self.module(*inputs, **kwargs)
                keep_casts(output)
            return self._after_forward(output, plans, synchronizes, time.perf_counter() - start)

    @not_compiled
    def _before_forward(self, synchronizes: bool) -> Plans | None:
        if not self._has_run_forward:
            take_over_in_backward_optimizers(self)
            self._has_run_forward = True
        if synchronizes:
            self.reducer.set_manual_finalization(self.require_manual_backward_finalization)
            self.step_sampler.sample(self.reducer.steps, self.reducer.last_times())
        if work := Join.notify_join_context(self):
            work.wait()
        plans = None
        if self._join_config.enable:
            plans = Plans.exchange(
                self.process_group,
                self.device,
                is_active=True,
                synchronizes=synchronizes,
                syncs_buffers=self.will_sync_module_buffers(),
            )
        if synchronizes:
            self.reducer.rebuild_buckets()
        if self._syncs_buffers(_BufferCommHookLocation.PRE_FORWARD):
            self.sync_buffers(0 if plans is None else plans.root)
        return plans

    @not_compiled
    def _after_forward(
        self, output: Any, plans: Plans | None, synchronizes: bool, seconds: float
    ) -> Any:
        if self._syncs_buffers(_BufferCommHookLocation.POST_FORWARD):
            self.sync_buffers(0 if plans is None else plans.root)
        self.require_forward_param_sync = synchronizes
        if synchronizes:
            self.step_sampler.forward_seconds = seconds
            watched: list[Tensor] = []
            if self.reducer.needs_outputs:
                output = through_sink(output, clones=self._sink_clones)
                watched = list(tensors_in(output))
            self.reducer.prepare_for_backward(watched, self._gradient_scale(plans))
            if plans is not None:
                plans.share_skipped(self)
        return output

    @not_compiled
    def _move_inputs(
        self, inputs: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self.device_ids:
            moved, moved_kwargs = self.to_kwargs(inputs, kwargs, self.device_ids[0])
            inputs, kwargs = moved[0], moved_kwargs[0]
        inputs, kwargs = self._casts.cast_inputs((inputs, kwargs))
        return inputs, kwargs

    def _gradient_scale(self, plans: Plans | None) -> float:
        if plans is None or self.divide_by_initial_world_size:
            return 1.0
        return plans.gradient_scale(self.process_group)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within this context, forwards prepare backwards that accumulate gradients locally.

        The first synchronized backward afterwards averages what was accumulated as well.
        """
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    @property
    def should_finalize_after_backward(self) -> bool:
        """Whether :meth:`finalize_backward` is to be called, after backward has returned."""
        return self.require_manual_backward_finalization

    def finalize_backward(self) -> None:
        """Ends a backward under ``require_manual_backward_finalization``: waits for all buckets.

        Raises RuntimeError where there is nothing to finalize.
        """
        before = self.reducer.steps
        self.reducer.finalize_backward()
        if self.reducer.steps == before:
            raise RuntimeError(
                "Expected a synchronized backward that waits to be finalized: call "
                "finalize_backward() once after each, with require_manual_backward_finalization "
                f"set before its forward (it is {self.require_manual_backward_finalization})."
            )

    def scatter(self, inputs: Any, kwargs: Any, device_ids: Sequence[int | torch.device]) -> Any:
        """As in torch, for code that overrides it."""
        return scatter_kwargs(inputs, kwargs, device_ids, dim=self.dim)

    def gather(self, outputs: Any, output_device: int | torch.device) -> Any:
        """As in torch, for code that overrides it."""
        return gather(outputs, output_device, dim=self.dim)

    def to_kwargs(self, inputs: Any, kwargs: Any, device_id: int | torch.device) -> Any:
        """Inputs and keyword arguments on the device, as tuples of one element each."""
        device = (
            torch.device(self.device.type, device_id) if isinstance(device_id, int) else device_id
        )

        def move(tensor: Tensor) -> Tensor:
            return tensor.to(device, non_blocking=True)

        return (map_tensors(move, inputs),), (map_tensors(move, kwargs),)

    def train(self, mode: bool = True) -> DistributedDataParallel:
        """As :meth:`torch.nn.Module.train`."""
        super().train(mode)
        return self

    # ------------------------------------------------------------------------------- buffers

    @property
    def modules_buffers(self) -> list[Tensor]:
        """Those that are synchronized."""
        return list(self.module_buffers.by_name.values())

    def will_sync_module_buffers(self) -> bool:
        """Whether the next forward synchronizes buffers: the first after one that synchronized."""
        return (
            self.require_forward_param_sync
            and self.forward_sync_buffers
            and len(self.module_buffers.by_name) > 0
        )

    def _syncs_buffers(self, location: _BufferCommHookLocation) -> bool:
        return self.module_buffers.location == location and self.will_sync_module_buffers()

    def sync_buffers(self, root: int) -> None:
        """Make buffers the same on all ranks: those of ``root``, or what the buffer hook says."""
        futures = self.module_buffers.sync(self.process_group, root)
        if futures:
            self.reducer.await_after_backward(futures)

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

    # ---------------------------------------------------------------------------------- join

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join:
        """For loops with uneven inputs: ranks that run out shadow the others until all have.

        ``divide_by_initial_world_size``: whether ranks without inputs count in the average.
        ``throw_on_early_termination``: raise RuntimeError on all ranks as soon as one runs out.
        See Note [Uneven inputs].
        """
        return Join(
            [self],
            enable,
            throw_on_early_termination,
            divide_by_initial_world_size=divide_by_initial_world_size,
        )

    def join_hook(self, **kwargs: Any) -> ShadowHook:
        """For :class:`torch.distributed.algorithms.Join` over several objects."""
        return ShadowHook(self, **kwargs)

    @property
    def join_device(self) -> torch.device:
        """Where the communication of Join takes place."""
        return self.device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """The ranks that join."""
        return self.process_group

    def broadcast_state(self, root: int) -> None:
        """Overwrite the parameters and buffers of all ranks with those of one."""
        self.module_buffers.collect()
        buffers = self.modules_buffers if self.forward_sync_buffers else []
        broadcast(self.process_group, [p for _, p in self._named_parameters()] + buffers, root)
        if self.hook_registration.on_overwrite is not None:
            self.hook_registration.on_overwrite()

    # --------------------------------------------------------------------------------- hooks

    def register_comm_hook(self, state: object, hook: TorchHook) -> None:
        """Torch's way of registering a hook: ``hook(state, bucket)``, once.

        The hook returns a future of one tensor shaped like ``bucket.buffer()``: the average. Names
        of arguments do not matter, and any callable will do. `commhooks.register` offers more.
        """
        self.hook_registration.register(state, hook)

    _register_comm_hook = register_comm_hook

    def _register_builtin_comm_hook(self, comm_hook_type: BuiltinCommHookType) -> None:
        """Torch's built-in hooks, which are ours as well: ALLREDUCE and FP16_COMPRESS."""
        self.hook_registration.register_builtin(comm_hook_type)

    @property
    def comm_hook_name(self) -> str:
        """Of the hook in use, for people."""
        return self.reducer.hook_name

    # ----------------------------------------------------------------- optimizers in backward

    def add_gradient_observer(self, observer: GradientObserver) -> None:
        """Call ``observer(parameters)`` in backward as soon as these have their averaged ``.grad``.

        Bucket by bucket, on the thread that runs backward. An exception ends the backward.
        """
        self.gradient_observers.add(observer)

    def remove_gradient_observer(self, observer: GradientObserver) -> None:
        """Undo :meth:`add_gradient_observer`."""
        self.gradient_observers.remove(observer)

    def _register_fused_optim(
        self,
        optim: type[torch.optim.Optimizer],
        *args: Any,
        optim_params: Sequence[nn.Parameter] | None = None,
        **kwargs: Any,
    ) -> None:
        """Torch's name for :func:`reducer.overlap_optimizer`; gradients are not cleared."""
        overlap_optimizer(self, optim, optim_params, *args, clear_gradients=False, **kwargs)

    # -------------------------------------------------------------------------- observation

    def bucket_plan(self) -> str:
        """Which parameter is in which bucket, as a table for people."""
        return bucket_table(self.reducer)

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        return logging_data(self)

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        self.step_sampler.set_rate(sample_rate)

    # ---------------------------------------------------------------------------- life cycle

    def _set_static_graph(self) -> None:
        if self.static_graph:
            warnings.warn(
                "You've set static_graph to be True, no need to set it again.", stacklevel=2
            )
            return
        self.reducer.set_static_graph()
        self.static_graph = True
        if self.find_unused_parameters:
            warnings.warn(
                "You passed find_unused_parameters=true to DistributedDataParallel, "
                "`_set_static_graph` will detect unused parameters automatically, so you do not "
                "need to set it, as long as the same parameters are unused in every iteration.",
                stacklevel=2,
            )

    def _update_process_group(self, new_process_group: dist.ProcessGroup) -> None:
        """Average over other ranks from the next step on, without a communication hook.

        Buckets are cut anew after the next step. A hook has to be registered again.
        """
        if dist.distributed_c10d._rank_not_in_group(new_process_group):  # noqa: SLF001
            return
        self.process_group = new_process_group
        self.hook_registration.move(new_process_group)

    def _remove_autograd_hooks(self) -> None:
        self.reducer.remove_autograd_hooks()

    def _check_reducer_finalized(self) -> None:
        self.reducer.check_finalized()

    def _set_ddp_sink_clone(self, val: bool) -> None:
        """Whether outputs are cloned where a sink is needed, so as to be modified in place."""
        self._sink_clones = val

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(
        module: nn.Module, params_and_buffers_to_ignore: Sequence[str]
    ) -> None:
        ignore: Any = TorchDDP._set_params_and_buffers_to_ignore_for_model  # noqa: SLF001
        ignore(module, params_and_buffers_to_ignore)

    def __getstate__(self) -> dict[str, Any]:
        if not dist.is_initialized() or self.process_group is not dist.group.WORLD:
            raise RuntimeError(
                "DDP Pickling/Unpickling are only supported when using DDP with the default "
                "process group. That is, when you have called init_process_group and have not "
                "passed process_group argument to DDP constructor."
            )
        self._casts.restore()
        return {name: it for name, it in self.__dict__.items() if name not in _OF_THIS_PROCESS}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.process_group = choose_process_group(None, None)
        self.module_buffers.collect()
        self._set_up()
