"""Models that ``fully_shard`` has sharded: hooks between replicas, few bits between shards."""

from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from torch import nn

from commhooks.adapters.fsdp.gradients import FSDPAdapter
from commhooks.adapters.fsdp.quantized import QuantizedCollective
from commhooks.adapters.fsdp.quantized_gradients import quantize_reduce_scatter
from commhooks.adapters.fsdp.quantized_weights import quantize_all_gather
from commhooks.adapters.handle import AnyHook, HookHandle, register_with
from commhooks.adapters.handle import register as register_any

__all__ = ["QuantizedCollective", "quantize_all_gather", "quantize_reduce_scatter", "register"]


def register(
    model: nn.Module,
    hook: AnyHook,
    /,
    *,
    replicate_group: dist.ProcessGroup | None = None,
    ignored_params: Iterable[nn.Parameter] = (),
    **options: Any,
) -> HookHandle:
    """Let ``hook`` average the gradients of replicas of a sharded model. Collective.

    Without ``replicate_group``, the same as :func:`commhooks.register`, for a model that is sharded
    over a mesh of two dimensions. With it, ``model`` is sharded over meshes of one dimension, and
    the group has this rank and those with the same shards in the other replicas. FSDP then averages
    as if the model had been sharded over both: what ``set_requires_all_reduce`` and the other
    settings mean for HSDP, they mean here.

    ::

        mesh = init_device_mesh("cuda", (2, 8), mesh_dim_names=("replicate", "shard"))
        fully_shard(model, mesh=mesh["shard"])
        handle = register(model, "int8", replicate_group=mesh.get_group("replicate"))

    A trained parameter that no unit manages, such as one that was added after ``fully_shard``, is
    not averaged, which a warning tells, except for ``ignored_params``: those of ``fully_shard``.
    Arguments and errors are otherwise those of :func:`commhooks.register`.
    """
    ignored = list(ignored_params)
    if replicate_group is None and not ignored:
        return register_any(model, hook, **options)

    def make_adapter(root: nn.Module) -> FSDPAdapter:
        return FSDPAdapter(root, replicate_group, ignored)

    return register_with(make_adapter, model, hook, options)
