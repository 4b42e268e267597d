"""The wrapper that makes a module data-parallel."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import BuiltinCommHookType, _broadcast_coalesced

from reducer._C import AverageHook, GradBucket, Reducer
from reducer.outputs import tensors_in
from reducer.verify import verify_parameters

__all__ = ["DistributedDataParallel", "set_hook_resolver"]

MIB = 1024 * 1024
# Small, so that communication starts early in backward.
FIRST_BUCKET_BYTES = 1 * MIB
DEFAULT_BUCKET_MB = 25.0
# Parameters and buffers are broadcast in chunks of this size.
BROADCAST_BYTES = 250 * MIB


class HookResolver(Protocol):
    """Turns the `hook` argument of the wrapper into a registered hook."""

    def __call__(
        self, model: DistributedDataParallel, hook: Any, options: Mapping[str, Any]
    ) -> object: ...


_resolve_hook: HookResolver | None = None


def set_hook_resolver(resolver: HookResolver) -> None:
    """Let `resolver` handle the `hook` argument of the wrapper; `commhooks` does when imported."""
    global _resolve_hook
    _resolve_hook = resolver


class DistributedDataParallel(nn.Module):
    """Trains `module` on all ranks of a process group, each with its own part of the data.

    A drop-in for :class:`torch.nn.parallel.DistributedDataParallel` with a reducer of its own. At
    construction all ranks take over rank 0's parameters and buffers; in every backward, gradients
    are handed bucket by bucket to a communication hook, which averages them while backward goes on.
    When ``backward()`` returns, ``.grad`` of every parameter holds the average.

    Args:
        module: the module to train; its parameters must not change afterwards.
        device_ids, output_device: as in torch; for CPU modules `None`.
        broadcast_buffers, forward_sync_buffers: broadcast rank 0's buffers before each synchronised
            forward. Both default to `True`; either switches it off.
        init_sync: check that all ranks hold the same parameters, and broadcast rank 0's values.
        process_group: the ranks that train together; default: all.
        bucket_cap_mb: size at which a bucket is closed, in MiB; default 25. The first is 1 MiB.
        find_unused_parameters: look for parameters that a forward did not use, every time. Those
            that no rank used keep their ``.grad`` as it is.
        gradient_as_bucket_view: make ``.grad`` views of the buckets, so that nothing is copied.
        static_graph: promise that every iteration uses the same parameters in the same way; allows
            parameters to be used several times, and activation checkpointing of any kind.
        check_reduction, dim: accepted for compatibility; without effect.
        hook, hook_options: a communication hook by name, as an object or as a config, and its
            options; needs ``import commhooks``. Default: the exact average by all-reduce.
        stable_buckets: keep the first assignment of parameters to buckets. Otherwise buckets are
            cut anew after the first step, in the order in which gradients arrived.
        group_key: maps (name, parameter) to a key; only parameters of one key share a bucket.

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
        broadcast_buffers: bool = True,
        init_sync: bool = True,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,  # noqa: ARG002  (torch ignores it as well)
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        *,
        forward_sync_buffers: bool = True,
        hook: Any = None,
        hook_options: Mapping[str, Any] | None = None,
        stable_buckets: bool = False,
        group_key: Callable[[str, nn.Parameter], Hashable] | None = None,
    ) -> None:
        super().__init__()
        self.process_group = _process_group(process_group)
        self.module = module
        self.dim = dim
        self.broadcast_buffers = broadcast_buffers and forward_sync_buffers
        self.find_unused_parameters = find_unused_parameters
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.static_graph = static_graph
        self.require_backward_grad_sync = True
        self.bucket_bytes_cap = _bucket_bytes(bucket_cap_mb)

        ignored: set[str] = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        named_parameters = [
            (name, parameter)
            for name, parameter in module.named_parameters()
            if parameter.requires_grad and name not in ignored
        ]
        if not named_parameters:
            raise RuntimeError(
                "DistributedDataParallel is not needed when a module doesn't have any parameters "
                "that require a gradient."
            )
        self.device = _single_device(named_parameters)
        self.device_ids, self.output_device = _check_devices(self.device, device_ids, output_device)
        self.modules_buffers = [
            buffer for name, buffer in module.named_buffers() if name not in ignored
        ]

        if init_sync:
            verify_parameters(named_parameters, self.process_group)
            state = [
                tensor.detach()
                for name, tensor in itertools.chain(
                    module.named_parameters(), module.named_buffers()
                )
                if name not in ignored
            ]
            self._broadcast(state)

        names = [name for name, _ in named_parameters]
        parameters = [parameter for _, parameter in named_parameters]
        self.reducer = Reducer(
            parameters,
            self.process_group,
            names=names,
            groups=_group_ids(named_parameters, group_key),
            first_bucket_bytes=min(FIRST_BUCKET_BYTES, self.bucket_bytes_cap),
            bucket_bytes=self.bucket_bytes_cap,
            find_unused_parameters=find_unused_parameters,
            static_graph=static_graph,
            gradient_as_bucket_view=gradient_as_bucket_view,
            stable_buckets=stable_buckets,
        )
        self._has_comm_hook = False
        if hook is not None:
            if _resolve_hook is None:
                raise RuntimeError(
                    "The `hook` argument is handled by commhooks: `import commhooks` first."
                )
            _resolve_hook(self, hook, hook_options or {})
        elif hook_options:
            raise ValueError(f"hook_options={dict(hook_options)} were given without a hook.")

    # ------------------------------------------------------------------------------- forward

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module; the next backward synchronises unless inside :meth:`no_sync`."""
        with torch.autograd.profiler.record_function("DistributedDataParallel.forward"):
            synchronises = torch.is_grad_enabled() and self.require_backward_grad_sync
            if synchronises:
                self.reducer.rebuild_buckets()
            if self.will_sync_module_buffers():
                self._sync_buffers()
            output = self.module(*inputs, **kwargs)
            if synchronises:
                watched = list(tensors_in(output)) if self.reducer.needs_outputs else []
                self.reducer.prepare_for_backward(watched)
            return output

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within this context, forwards prepare backwards that accumulate gradients locally.

        The first synchronised backward afterwards averages what was accumulated as well.
        """
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    # ------------------------------------------------------------------------------- buffers

    def will_sync_module_buffers(self) -> bool:
        """Whether the next forward broadcasts buffers."""
        return (
            self.broadcast_buffers
            and self.require_backward_grad_sync
            and len(self.modules_buffers) > 0
        )

    def _sync_buffers(self) -> None:
        # Modules may have put other tensors in place of their buffers.
        ignored: set[str] = set(getattr(self.module, "_ddp_params_and_buffers_to_ignore", ()))
        self.modules_buffers = [
            buffer for name, buffer in self.module.named_buffers() if name not in ignored
        ]
        with torch.no_grad():
            self._broadcast(self.modules_buffers)

    def _broadcast(self, tensors: Sequence[Tensor]) -> None:
        if tensors and self.process_group.size() > 1:
            _broadcast_coalesced(self.process_group, list(tensors), BROADCAST_BYTES, 0)

    # --------------------------------------------------------------------------------- hooks

    def register_comm_hook(
        self, state: object, hook: Callable[[Any, GradBucket], torch.futures.Future[Tensor]]
    ) -> None:
        """Torch's way of registering a hook: ``hook(state, bucket)``, once.

        The hook returns a future of one tensor shaped like ``bucket.buffer()``: the average. Names
        of arguments do not matter, and any callable will do. `commhooks.register` offers more.
        """
        if not callable(hook):
            raise TypeError(f"Communication hook must be callable, found {hook!r}.")
        self._claim_comm_hook()
        self.reducer.set_hook(lambda bucket: hook(state, bucket))

    def _register_builtin_comm_hook(self, comm_hook_type: BuiltinCommHookType) -> None:
        """Torch's built-in hooks, which are ours as well: ALLREDUCE and FP16_COMPRESS."""
        wire_dtypes = {
            BuiltinCommHookType.ALLREDUCE: None,
            BuiltinCommHookType.FP16_COMPRESS: torch.float16,
        }
        if comm_hook_type not in wire_dtypes:
            raise ValueError(
                f"Expected one of {[kind.name for kind in wire_dtypes]}, found {comm_hook_type}."
            )
        self._claim_comm_hook()
        self.reducer.set_hook(AverageHook(self.process_group, wire_dtypes[comm_hook_type]))

    def _claim_comm_hook(self) -> None:
        if self._has_comm_hook:
            raise RuntimeError(
                "register_comm_hook or register_builtin_comm_hook can only be called once. Use "
                "`commhooks.register`, whose handle can replace and remove hooks."
            )
        self._has_comm_hook = True


def _process_group(process_group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    if process_group is not None:
        return process_group
    if not dist.is_initialized():
        raise ValueError(
            "No process group: call torch.distributed.init_process_group(...) on every rank before "
            "wrapping the module (torchrun sets the environment that it reads)."
        )
    group = dist.group.WORLD
    assert group is not None
    return group


def _single_device(named_parameters: Sequence[tuple[str, Tensor]]) -> torch.device:
    first_name, first = named_parameters[0]
    for name, parameter in named_parameters:
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise RuntimeError(
                f'Parameter "{name}" is uninitialized; run a dummy forward pass before wrapping '
                "the module, so that lazy modules know their shapes."
            )
        if parameter.device.type != first.device.type:
            raise ValueError(
                f'All parameters must be on the same type of device; "{first_name}" is on '
                f'{first.device}, "{name}" on {parameter.device}.'
            )
    return first.device


def _check_devices(
    device: torch.device,
    device_ids: Sequence[int | torch.device] | None,
    output_device: int | torch.device | None,
) -> tuple[list[int | torch.device] | None, int | torch.device | None]:
    if device.type == "cpu":
        if device_ids or output_device is not None:
            raise ValueError(
                "device_ids and output_device are for modules on one CUDA device; this module is "
                f"on the CPU. Found device_ids={device_ids}, output_device={output_device}: leave "
                "them out, or move the module to a CUDA device first."
            )
        return None, None
    ids = list(device_ids) if device_ids else None
    if ids is not None and len(ids) != 1:
        raise ValueError(f"device_ids can only be None or contain a single element, found {ids}.")
    return ids, output_device


def _bucket_bytes(bucket_cap_mb: float | None) -> int:
    megabytes = DEFAULT_BUCKET_MB if bucket_cap_mb is None else bucket_cap_mb
    if megabytes <= 0:
        raise ValueError(f"bucket_cap_mb must be positive, found {bucket_cap_mb}.")
    return int(megabytes * MIB)


def _group_ids(
    named_parameters: Sequence[tuple[str, nn.Parameter]],
    group_key: Callable[[str, nn.Parameter], Hashable] | None,
) -> list[int]:
    """Number the keys in the order of their first appearance, which is the same on all ranks."""
    if group_key is None:
        return [0] * len(named_parameters)
    ids: dict[Hashable, int] = {}
    return [
        ids.setdefault(group_key(name, parameter), len(ids)) for name, parameter in named_parameters
    ]
