"""DistributedDataParallel: a module wrapper that averages gradients over ranks during backward."""

import functools
import time
import warnings
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import BuiltinCommHookType
from torch._compile import _disable_dynamo
from torch.distributed.algorithms.join import Join, Joinable
from torch.distributed.device_mesh import DeviceMesh

from reducer.construction import (
    check_module,
    choose_devices,
    choose_process_group,
    make_reducer,
    prepare_tensor_parallel,
    sync_initial_state,
)
from reducer.errors import expect
from reducer.extension import ENGINE
from reducer.hook_registration import HookRegistration, check_annotations
from reducer.join import ShadowHook, StepPlan, UnevenInputs
from reducer.logging_data import StepSampler, logging_data, records_errors
from reducer.mixed_precision import ParameterCasts
from reducer.native import AverageHook, GradBucket, HostGroup
from reducer.nested_tensors import tensors_in, through_sink
from reducer.optim import overlap_optimizer, take_over_in_backward_optimizers
from reducer.options import GroupKeys, WrapperOptions, bucket_sizes, delayed_names
from reducer.peers import collective, wait
from reducer.trained_parameters import TrainedParameters
from reducer.wrapper import Wrapper

# Each process makes its own when a wrapper is loaded.
_NOT_PICKLED = (
    "process_group", "_join_config", "parameter_names", "reducer", "hook_registration",
    "gradient_observers", "step_sampler", "_casts", "_trained",
)  # fmt: skip

_WIRE_DTYPES = {
    BuiltinCommHookType.ALLREDUCE: None,
    BuiltinCommHookType.FP16_COMPRESS: torch.float16,
}

TorchHook = Callable[[Any, GradBucket], torch.futures.Future[Tensor]]


class DistributedDataParallel(Wrapper):
    """Wrap ``module`` so that ``loss.backward()`` averages its gradients over the ranks.

    A subclass of ``torch.nn.parallel.DistributedDataParallel``, and a drop-in replacement for it;
    see docs/compatibility.md. All ranks construct it with the same arguments. The constructor
    verifies that their parameters agree in name, shape, strides and dtype, and broadcasts
    parameters and buffers from rank 0 (``init_sync``).

    Args:
        module: the module to train. Parameters that require no gradient are not averaged.
        device_ids: the one GPU that inputs are moved to, in a list; None for modules on the CPU or
            on several devices.
        output_device: the same GPU.
        broadcast_buffers: broadcast buffers from rank 0 at the start and before each forward.
        forward_sync_buffers: the same for forwards only; default: as ``broadcast_buffers``.
        process_group: the ranks to average over; default: all.
        device_mesh: the same as a mesh of one dimension.
        bucket_cap_mb: the size of a bucket in MiB (default 25; 0: a bucket for each parameter);
            the first one is at most 1 MiB.
        bucket_cap_mb_list: the sizes of the first bucket, the second and so on; the last size
            applies to all further buckets.
        find_unused_parameters: search the graph of every forward for parameters that this rank does
            not use, so that the others need not wait for them. The ``.grad`` of a parameter that no
            rank used is not changed.
        skip_all_reduce_unused_params: do not average buckets whose parameters are all unused; the
            same parameters must be unused on every rank.
        gradient_as_bucket_view: let ``.grad`` be a view of the bucket, which saves memory and
            copies.
        static_graph: promise that every iteration uses the same parameters equally often. Allows
            parameters to be used several times, and activation checkpointing of any kind.
        delay_all_reduce_named_params: average these (name, parameter) pairs after all others.
            ``param_to_hook_all_reduce`` must be given with it, and has no effect.
        mixed_precision: dtypes for computation, communication and buffers; see
            :class:`reducer.mixed_precision.MixedPrecision`. Works together with any hook.
        lazy_bucket_allocation: release the memory of buckets between steps.
        check_reduction: accepted for compatibility.
        dim: used by ``scatter`` and ``gather`` only.
        batched_grad_copy: accepted for compatibility; gradients are always copied together.
        stable_buckets: keep the first assignment of parameters to buckets. Otherwise buckets are
            rebuilt after the first step, in the order in which gradients arrived.
        group_key: maps (name, parameter) to a key; only parameters with the same key share a
            bucket.
        key_process_groups: for some of these keys, other ranks to average over, e.g. those that
            have the same experts. Their gradients are averaged exactly, whatever the hook.
        host_memory: let ranks of one host share the memory of their buckets: ``allreduce``,
            ``fp16`` and ``bf16`` use it if all ranks share a host, ``hierarchical`` inside each
            host. On the CPU with Gloo, on Linux. See docs/performance.md.

    Attributes:
        options: the checked options; read-only, except through the methods that change one.
        reducer: the compiled :class:`reducer.Reducer`.
        require_backward_grad_sync: whether the next forward prepares a backward that averages
            gradients; see :meth:`no_sync`.
        require_forward_param_sync: whether the next forward may synchronize buffers.
        require_manual_backward_finalization: whether :meth:`finalize_backward` ends each
            synchronized backward. To be set before the forward.
        divide_by_initial_world_size: whether ranks without inputs count in the average; see
            :meth:`join`.

    Raises:
        RuntimeError: ranks have different parameters; no parameter requires a gradient; or, from
            the next forward, a backward left parameters without gradients (they are named).
            Exceptions of hooks are raised by ``backward()``; the next iteration works again.
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
        stable_buckets: bool = False,
        group_key: Callable[[str, nn.Parameter], Hashable] | None = None,
        key_process_groups: Mapping[Hashable, dist.ProcessGroup] | None = None,
        host_memory: bool = True,
    ) -> None:
        ENGINE.require("commhooks.DistributedDataParallel")
        expect(nn.Module, module=module)
        nn.Module.__init__(self)
        Joinable.__init__(self)
        # torch.fx traces through all modules but those of torch.nn, and would leave averaging out.
        self.__module__ = nn.parallel.DistributedDataParallel.__module__
        if check_reduction:
            warnings.warn(
                "The `check_reduction` argument is deprecated and has no effect.",
                FutureWarning,
                stacklevel=2,
            )
        delayed = delayed_names(delay_all_reduce_named_params, param_to_hook_all_reduce)
        self.process_group = choose_process_group(process_group, device_mesh)
        sharded: frozenset[str] = frozenset()
        if device_mesh is not None:
            self.device_mesh = device_mesh
            sharded = prepare_tensor_parallel(module, device_mesh)
        self.module = module
        self.parameters_to_ignore = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        named = list(self.not_ignored_parameters().items())
        check_module(module, named)
        self.device = named[0][1].device
        input_devices, output_device = choose_devices(named, device_ids, output_device)
        broadcasts_buffers = forward_sync_buffers is not None or broadcast_buffers is not False
        if forward_sync_buffers is None:
            forward_sync_buffers = broadcasts_buffers
        bucket_bytes = bucket_sizes(bucket_cap_mb, bucket_cap_mb_list)
        self.options = WrapperOptions(
            dim=dim,
            device_ids=input_devices,
            output_device=output_device,
            forward_sync_buffers=forward_sync_buffers,
            bucket_bytes=bucket_bytes,
            bucket_bytes_cap_list=list(bucket_bytes) if bucket_cap_mb_list else [],
            group_keys=GroupKeys(group_key, key_process_groups, delayed, sharded),
            mixed_precision=mixed_precision,
            find_unused_parameters=find_unused_parameters,
            skip_all_reduce_unused_params=skip_all_reduce_unused_params,
            gradient_as_bucket_view=gradient_as_bucket_view,
            static_graph=static_graph,
            stable_buckets=stable_buckets,
            batched_grad_copy=batched_grad_copy,
            lazy_bucket_allocation=lazy_bucket_allocation,
            host_memory=host_memory,
        )
        self._assign_modules_buffers()  # type: ignore[no-untyped-call]
        if init_sync:
            buffers = self.named_module_buffers if broadcasts_buffers else {}
            sync_initial_state(named, buffers, self.process_group, self.options.group_keys)
        self._set_up(self._connect_host())

    def _set_up(self, host: HostGroup | None) -> None:
        """Make the parts that belong to this process and are not pickled."""
        named = list(self.not_ignored_parameters().items())
        self._casts = ParameterCasts(self.module, self.mixed_precision, self.parameters_to_ignore)
        self.parameter_names = {p: name for name, p in named if p.requires_grad}
        self.reducer = make_reducer(self.module, named, self.process_group, self.options, host)
        self.reducer.wrapper = weakref.ref(self)
        self.hook_registration = HookRegistration(self.reducer, self._casts.wire_dtype)
        self._trained = TrainedParameters(self)
        self.gradient_observers = []
        self.step_sampler = StepSampler()
        self._has_run_forward = False

    def check_parameters(self) -> None:
        """Raise RuntimeError if gradients of the module's parameters would not be averaged."""
        self._trained.check(self)

    def __getstate__(self) -> dict[str, Any]:
        self._check_default_group()  # type: ignore[no-untyped-call]
        if self.options.group_keys.process_groups:
            raise RuntimeError(
                "A wrapper with key_process_groups cannot be pickled or copied: only the default "
                "process group is known where it is loaded."
            )
        self._casts.restore()
        return {name: it for name, it in self.__dict__.items() if name not in _NOT_PICKLED}

    def __setstate__(self, state: dict[str, Any]) -> None:
        nn.Module.__setstate__(self, state)  # type: ignore[no-untyped-call]
        Joinable.__init__(self)  # the copy is in no join() that the original is in
        self.process_group = choose_process_group(None, None)
        self._assign_modules_buffers()  # type: ignore[no-untyped-call]
        self._set_up(None)
        # Other ranks may have no copy, so it needs them from its first synchronized step on only.
        self._is_connected = self.require_forward_param_sync = False

    # ------------------------------------------------------------------------------- forward

    @_disable_dynamo(recursive=False)
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module; the next backward synchronizes unless inside :meth:`no_sync`."""
        with torch.autograd.profiler.record_function("DistributedDataParallel.forward"):
            synchronizes = torch.is_grad_enabled() and self.require_backward_grad_sync
            plan, inputs, kwargs = self._before_forward(synchronizes, inputs, kwargs)
            start = time.monotonic()
            with self._casts.casting() as keep_casts, self._inside_ddp_forward():
                output = self.module(*inputs, **kwargs)
                keep_casts(output)
            return self._after_forward(output, plan, synchronizes, start)

    @_disable_dynamo
    @records_errors
    def _before_forward(
        self, synchronizes: bool, inputs: Any, kwargs: Any
    ) -> tuple[StepPlan | None, Any, Any]:
        if not self._has_run_forward:
            take_over_in_backward_optimizers(self)
            self._has_run_forward = True
        if synchronizes:
            self.check_parameters()
            self.require_forward_param_sync |= not self._is_connected
            self.reducer.set_manual_finalization(self.require_manual_backward_finalization)
            self.step_sampler.sample(self.reducer.steps, self.reducer.last_times())
        elif torch.is_grad_enabled():
            self.reducer.expect_local_gradients()
            if not self.reducer.is_attached:  # or uses of parameters here would not be noted
                self.reducer.reattach()
        with collective(self.process_group, "the report of a rank that has inputs to join()"):
            if work := Join.notify_join_context(self):
                wait(work)
        plan = None
        if self._join_config.enable:
            plan = StepPlan.agree(
                self,
                is_active=True,
                synchronizes=synchronizes,
                syncs_buffers=self.will_sync_module_buffers(),  # type: ignore[no-untyped-call]
            )
        if synchronizes:
            self.prepare_step()
        if self._check_sync_bufs_pre_fwd():  # type: ignore[no-untyped-call]
            self.sync_buffers(0 if plan is None else plan.root)
        if self.device_ids and (inputs or kwargs):
            (inputs,), (kwargs,) = self.to_kwargs(inputs, kwargs, self.device_ids[0])  # type: ignore[no-untyped-call]
        return plan, *self._casts.cast_inputs((inputs, kwargs))

    @_disable_dynamo
    @records_errors
    def _after_forward(
        self, output: Any, plan: StepPlan | None, synchronizes: bool, start: float
    ) -> Any:
        end = time.monotonic()
        if self._check_sync_bufs_post_fwd():  # type: ignore[no-untyped-call]
            self.sync_buffers(0 if plan is None else plan.root)
        self.require_forward_param_sync = synchronizes
        if synchronizes:
            self.step_sampler.forward_start = start
            self.step_sampler.forward_seconds = end - start
            if self.reducer.needs_outputs:
                output = through_sink(output, clones=self._ddp_sink_clone)
            scale = 1.0 if plan is None else plan.gradient_scale(self)
            self.reducer.begin_step(list(tensors_in(output)), scale)
            if plan is not None:
                plan.share_skipped(self)
        return output

    @records_errors
    def finalize_backward(self) -> None:
        """End a backward under ``require_manual_backward_finalization``: wait for all buckets.

        Raises RuntimeError if no backward waits to be finalized.
        """
        before = self.reducer.steps
        self.reducer.finalize_backward()
        if self.reducer.steps == before:
            raise RuntimeError(
                "Expected a synchronized backward that waits to be finalized: call "
                "finalize_backward() once after each, with require_manual_backward_finalization "
                f"set before its forward (it is {self.require_manual_backward_finalization})."
            )

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

    @records_errors
    def _check_reducer_finalized(self) -> None:
        self.reducer.check_finalized()

    def _update_process_group(self, new_process_group: dist.ProcessGroup) -> None:
        """Average over other ranks from the next step on, without a communication hook.

        Call it between steps: a backward that a forward has announced is not averaged. Buckets are
        rebuilt after the next step. A hook is not used again until `replace()` of its handle is
        called, or `remove()`, after which one can be registered.
        """
        if dist.distributed_c10d._rank_not_in_group(new_process_group):  # noqa: SLF001
            return
        self.process_group = new_process_group
        self.require_forward_param_sync |= not self._is_connected
        self.reducer.set_process_group(new_process_group, self._connect_host())
        self.hook_registration.reset()

    def _check_manual_backward_finalization_supported(self) -> None:
        """Do nothing; torch raises RuntimeError for configurations that the wrapper supports."""

    # --------------------------------------------------------------------------------- hooks

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

    # ---------------------------------------------------------------------------------- join

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join:
        """Return a context for a training loop whose ranks have different numbers of inputs.

        A rank that has no inputs left takes part in the steps of the others, until all ranks have
        finished; see Note [Uneven inputs].

        Args:
            divide_by_initial_world_size: whether ranks without inputs count in the average.
            enable: whether the context has any effect.
            throw_on_early_termination: raise RuntimeError on all ranks as soon as one has no inputs
                left.
        """
        return UnevenInputs(
            [self],
            enable,
            throw_on_early_termination,
            divide_by_initial_world_size=divide_by_initial_world_size,
        )

    def join_hook(self, **kwargs: Any) -> ShadowHook:
        """Return what :class:`torch.distributed.algorithms.Join` calls on ranks without inputs."""
        return ShadowHook(self, **kwargs)

    # ----------------------------------------------------------------- optimizers in backward

    def _register_fused_optim(
        self,
        optim: type[torch.optim.Optimizer],
        *args: Any,
        optim_params: Sequence[nn.Parameter] | None = None,
        **kwargs: Any,
    ) -> None:
        """Call :func:`reducer.overlap_optimizer` such that gradients are not cleared."""
        overlap_optimizer(self, optim, optim_params, *args, clear_gradients=False, **kwargs)

    def _remove_autograd_hooks(self) -> None:
        self.reducer.remove_autograd_hooks()
        self._trained.close()

    # -------------------------------------------------------------------------- observation

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        return logging_data(self) | self.step_sampler.data()

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        self.step_sampler.set_rate(sample_rate)

    def bucket_plan(self) -> str:
        """Return a readable table of the parameters in each bucket."""
        lines = []
        for bucket in self.reducer.bucket_stats():
            kind = ", sparse" if bucket["is_sparse"] else ""
            lines.append(
                f"bucket {bucket['index']}: {bucket['gradient_bytes']:,} bytes over "
                f"{bucket['ranks']} ranks{kind}, {len(bucket['names'])} parameters"
            )
            lines += [f"    {name}" for name in bucket["names"]]
        return "\n".join(lines)

    comm_hook_name = property(attrgetter("reducer.hook_name"), doc="The name of the hook in use.")
