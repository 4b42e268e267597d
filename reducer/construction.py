"""Check what DistributedDataParallel wraps, make ranks equal, and make its reducer."""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _get_device_index
from torch.distributed.device_mesh import DeviceMesh

from reducer import native  # not its classes, which are missing without extensions
from reducer.agreement import check_agreement
from reducer.errors import expect
from reducer.options import GroupKeys, NamedParameters, WrapperOptions
from reducer.peers import broadcast
from reducer.wrapper_reducer import WrapperReducer

# Name, shape, strides and dtype. Of tensors that are only broadcast, the strides do not matter.
Description = tuple[str, tuple[int, ...], tuple[int, ...], str]


def choose_process_group(
    process_group: dist.ProcessGroup | None, device_mesh: DeviceMesh | None
) -> dist.ProcessGroup:
    """Return the given group, the group of a one-dimensional mesh, or the default group.

    Raises RuntimeError for two groups or a mesh of more dimensions, and ValueError if there is no
    default group.
    """
    expect(dist.ProcessGroup | None, process_group=process_group)
    expect(DeviceMesh | None, device_mesh=device_mesh)
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
            "There is no process group: call torch.distributed.init_process_group(...) on every "
            "rank before wrapping the module (torchrun sets the environment that it reads)."
        )
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def check_module(module: nn.Module, named_parameters: NamedParameters) -> None:
    """Raise RuntimeError or ValueError unless the parameters' gradients can be averaged."""
    for name, parameter in named_parameters:
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise RuntimeError(
                "Modules with uninitialized parameters can't be used with "
                f'DistributedDataParallel: "{name}" is one. Run a dummy forward pass before '
                "wrapping the module, so that lazy modules know their shapes."
            )
        if type(parameter).__module__.startswith("torch.distributed.tensor"):
            raise ValueError(
                f'"{name}" is a DTensor, of which each rank has a part. Pass no process group, but '
                "device_mesh=mesh[...], the dimension of its mesh that gradients are averaged over"
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
    if first.device.type == "cpu" and any(
        isinstance(m, nn.SyncBatchNorm) for m in module.modules()
    ):
        raise ValueError("SyncBatchNorm layers only work with GPU modules")


def choose_devices(
    named_parameters: NamedParameters,
    device_ids: Sequence[int | torch.device] | None,
    output_device: int | torch.device | None,
) -> tuple[list[int] | None, int | None]:
    """Return the index of the GPU for inputs, in a list, and that of the GPU for outputs.

    Both are None if inputs are not moved. Raises ValueError for arguments that do not fit the
    devices of the parameters.
    """
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
                f"{sorted(map(str, devices))}: omit both arguments, or move the module to a GPU "
                "first."
            )
        return None, None
    ids = [_get_device_index(device) for device in device_ids]
    return ids, ids[0] if output_device is None else _get_device_index(output_device)


def prepare_tensor_parallel(module: nn.Module, device_mesh: DeviceMesh) -> frozenset[str]:
    """Prepare a module for data parallelism over one dimension of a larger mesh, as torch does.

    Return the names of the parameters of which each rank of the other dimensions has a part.
    """
    if device_mesh._get_root_mesh() == device_mesh:  # noqa: SLF001
        return frozenset()
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform

    sharded = frozenset(
        name
        for name, parameter in module.named_parameters()
        if isinstance(parameter, DTensor)
        and not all(it.is_replicate() for it in parameter.placements)
    )
    _pre_dp_module_transform(module)
    return sharded


def sync_initial_state(
    named_parameters: NamedParameters,
    buffers: Mapping[str, Tensor],
    group: dist.ProcessGroup,
    keys: GroupKeys,
) -> None:
    """Verify that ranks have the same parameters and buffers, then broadcast them.

    Raises RuntimeError on every rank unless all have equal names, shapes, strides and dtypes: Gloo
    would end the process, or broadcast to other places. The root is rank 0 of ``group``; for
    parameters that are averaged over a process group of their own, it is the first rank of that
    group. Collective.
    """
    owned = [(name, p, keys.process_group(name, p)) for name, p in named_parameters]
    descriptions = [
        (f'"{name}"', tuple(p.shape), p.stride(), str(p.dtype))
        for name, p, _ in owned
        if p.requires_grad
    ]
    common = [(name, p) for name, p, own in owned if own is None]
    others: dict[str, Tensor] = {f'frozen "{name}"': p for name, p in common if not p.requires_grad}
    others |= {f'buffer "{name}"': it for name, it in buffers.items()}
    descriptions += [(name, tuple(it.shape), (), str(it.dtype)) for name, it in others.items()]
    device = named_parameters[0][1].device
    what = "the comparison of the ranks' parameters"
    check_agreement(descriptions, group, device, _explain, what)
    broadcast(group, [*(p for _, p in common), *buffers.values()], 0)
    for each in {id(own): own for own in keys.process_groups.values()}.values():
        broadcast(each, [p for _, p, own in owned if own is each], 0)


def _explain(of_ranks: Sequence[Sequence[Description]]) -> RuntimeError:
    """Describe the first difference between rank 0 and another rank."""
    reference = of_ranks[0]
    rank = next(rank for rank, theirs in enumerate(of_ranks) if theirs != reference)
    theirs = of_ranks[rank]
    for index, (a, b) in enumerate(zip(reference, theirs, strict=False)):
        if a != b:
            difference = (
                f"entry {index} of the parameters and buffers is {_text(a)} on rank 0 but "
                f"{_text(b)} on rank {rank}"
            )
            break
    else:
        extra = max(reference, theirs, key=len)[min(len(reference), len(theirs))]
        difference = (
            f"{len(reference)} with the buffers on rank 0, {len(theirs)} on rank {rank}; the first "
            f"that only one of them has is {extra[0]}"
        )
    return RuntimeError(
        f"Ranks have different parameters: {difference}. Build the model in the same way on all "
        "ranks (same configuration, same order), or leave out those that no rank shares: "
        "_set_params_and_buffers_to_ignore_for_model."
    )


def _text(description: Description) -> str:
    name, shape, strides, dtype = description
    strides_text = f"strides {list(strides)}, " if strides else ""
    return f"{name} (shape {list(shape)}, {strides_text}{dtype})"


def make_reducer(
    module: nn.Module,
    named_parameters: NamedParameters,
    process_group: dist.ProcessGroup,
    options: WrapperOptions,
    host: native.HostGroup | None,
) -> WrapperReducer:
    """Return a reducer of those of the parameters that require a gradient."""
    trained = [(name, p) for name, p in named_parameters if p.requires_grad]
    sparse = sparse_parameters(module)
    settings = native.ReducerOptions()
    options.group_keys.number(named_parameters, settings)
    settings.names = [name for name, _ in trained]
    settings.sparse = [parameter in sparse for _, parameter in trained]
    settings.bucket_bytes = list(options.bucket_bytes)
    settings.find_unused_parameters = options.find_unused_parameters
    settings.static_graph = options.static_graph
    settings.gradient_as_bucket_view = options.gradient_as_bucket_view
    settings.stable_buckets = options.stable_buckets
    settings.skip_unused_buckets = options.skip_all_reduce_unused_params
    settings.release_buckets = options.lazy_bucket_allocation
    return WrapperReducer([p for _, p in trained], settings, process_group, host)


def sparse_parameters(module: nn.Module) -> set[Tensor]:
    """Return the parameters whose gradients are sparse tensors."""
    return {
        layer.weight
        for layer in module.modules()
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.sparse
    }
