"""Checks what DistributedDataParallel is constructed with."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from reducer.group_keys import NamedParameters

__all__: list[str] = []

MIB = 2**20
DEFAULT_BUCKET_MB = 25.0
FIRST_BUCKET_BYTES = MIB


def choose_process_group(
    process_group: dist.ProcessGroup | None, device_mesh: DeviceMesh | None
) -> dist.ProcessGroup:
    """The group that was given, that of a one-dimensional mesh, or the default one."""
    if process_group is not None and device_mesh is not None:
        raise RuntimeError("Cannot specify both process_group and device_mesh arguments.")
    if device_mesh is not None:
        if device_mesh.ndim != 1:
            raise RuntimeError(f"Only 1D device mesh is supported, but got {device_mesh}.")
        group: dist.ProcessGroup = device_mesh.get_group(mesh_dim=0)
        return group
    if process_group is not None:
        return process_group
    if not dist.is_initialized():
        raise ValueError(
            "No process group: call torch.distributed.init_process_group(...) on every rank before "
            "wrapping the module (torchrun sets the environment that it reads)."
        )
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def check_parameters(named_parameters: NamedParameters) -> None:
    """Raises unless gradients of these parameters can be averaged."""
    for name, parameter in named_parameters:
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise RuntimeError(
                "Modules with uninitialized parameters can't be used with "
                f'DistributedDataParallel: "{name}" is one. Run a dummy forward pass before '
                "wrapping the module, so that lazy modules know their shapes."
            )
    if not any(parameter.requires_grad for _, parameter in named_parameters):
        raise RuntimeError(
            "DistributedDataParallel is not needed when a module doesn't have any parameter that "
            "requires a gradient."
        )
    first_name, first = named_parameters[0]
    for name, parameter in named_parameters:
        if parameter.device.type != first.device.type:
            raise ValueError(
                "DistributedDataParallel's input module must be on the same type of devices, but "
                f'"{first_name}" is on {first.device}, "{name}" on {parameter.device}.'
            )


def choose_devices(
    named_parameters: NamedParameters,
    device_ids: Sequence[int | torch.device] | None,
    output_device: int | torch.device | None,
) -> tuple[list[int] | None, int | None]:
    """The one device that inputs are moved to, and that of outputs; None where nothing is moved."""
    if device_ids is not None and len(device_ids) > 1:
        raise ValueError(
            f"device_ids can only be None or contain a single element, found {device_ids}."
        )
    devices = {parameter.device for _, parameter in named_parameters}
    if not device_ids or len(devices) > 1 or next(iter(devices)).type == "cpu":
        if device_ids or output_device is not None:
            raise ValueError(
                "device_ids and output_device are for modules on one GPU; found device_ids="
                f"{device_ids}, output_device={output_device} and parameters on "
                f"{sorted(map(str, devices))}: leave them out, or move the module to a GPU first."
            )
        return None, None
    ids = [_device_index(device) for device in device_ids]
    return ids, ids[0] if output_device is None else _device_index(output_device)


def _device_index(device: int | torch.device) -> int:
    index = device if isinstance(device, int) else torch.device(device).index
    if index is None:
        raise ValueError(f"Expected a device with an index, as in cuda:0, found {device}.")
    return index


def bucket_sizes(
    bucket_cap_mb: float | None, bucket_cap_mb_list: Sequence[float] | None
) -> list[int]:
    """Bytes of the first bucket, the second, and so on; the last one is for all that follow.

    The first is small by default, so that communication starts early.
    """
    if bucket_cap_mb_list:
        megabytes = list(bucket_cap_mb_list)
    else:
        megabytes = [DEFAULT_BUCKET_MB if bucket_cap_mb is None else bucket_cap_mb]
    if any(size <= 0 for size in megabytes):
        raise ValueError(f"Bucket sizes must be positive, found {megabytes} MiB.")
    sizes = [int(size * MIB) for size in megabytes]
    if not bucket_cap_mb_list:
        sizes.insert(0, min(FIRST_BUCKET_BYTES, sizes[0]))
    return sizes


def sparse_parameters(module: nn.Module) -> set[Tensor]:
    """Parameters whose gradients autograd makes sparse."""
    return {
        layer.weight
        for layer in module.modules()
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.sparse
    }


def prepare_tensor_parallel(module: nn.Module, device_mesh: DeviceMesh) -> None:
    """For data parallelism over one dimension of a larger mesh, as torch's wrapper does."""
    if device_mesh._get_root_mesh() != device_mesh:  # noqa: SLF001
        from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform

        _pre_dp_module_transform(module)
