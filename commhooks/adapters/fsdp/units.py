"""The units of a sharded model, and all private names of torch's FSDP2 that are used.

Note [FSDP's all-reduce]
~~~~~~~~~~~~~~~~~~~~~~~~
A call of ``fully_shard`` makes a unit: parameters that are gathered together, and whose gradients
are reduced together. If the unit's mesh info has a group of replicas, then FSDP, in backward,

    1. reduce-scatters the unit's gradients within the shard group, into one flat tensor;
    2. calls ``dist.all_reduce(flat, group=replicas, op=...)`` on a stream of its own;
    3. scales ``flat``, and makes it the gradients of the shards.

:meth:`Unit.attach` gives a unit a copy of its mesh info in which the group of replicas is an object
of ours, whose all-reduce calls back. Everything else stays torch's: when to reduce and when to
accumulate, dtypes, scaling, streams, and who holds memory until when. The same works for a unit
that has no replicas yet, and for one that is replicated and not sharded.

The ranks of a shard group must reduce-scatter the same parameters. Therefore those without a
gradient are filled with zeros: by torch with ``reduce_scatter_unused_params``, up to torch 2.12 by
:meth:`Unit._post_backward`. That also notes which had a gradient, because ``flat`` does not tell.

Note [Private names]
~~~~~~~~~~~~~~~~~~~~
FSDP2 has no public function that replaces the all-reduce between replicas, tells which parameters
lie where in a flat tensor, or calls back when a backward has ended. No other file uses these names.

| name | of | torch | what for |
|---|---|---|---|
| `DDPMeshInfo`, `FSDPMeshInfo` | module | all | whether a unit has replicas, or shards |
| `HSDPMeshInfo` | module | all | a unit that gets replicas from us |
| `_get_fsdp_state` | model | all | the state of a module, which has its units |
| `_is_root` | state | all | parts of a sharded model are refused |
| `_fsdp_param_groups` | state | from 2.12 | the units |
| `_fsdp_param_group` | state | all | the unit, in torch 2.11 |
| `_root_post_backward_final_callback` | state | all | extended: the end of backward |
| `wait_for_gradient_reduction` | state | from 2.15 | extended: called after backward instead |
| `_state_ctx` | state | all | has the next name |
| `post_backward_final_callback_queued` | context | all | whether FSDP notices the end of backward |
| `device`, `fsdp_params` | unit | all | where, and on which parameters, FSDP works |
| `_reduce_scatter_param_indices` | unit | from 2.15 | their order in the flat gradient |
| `mesh_info` | unit | all | replaced: has the group of replicas |
| `post_forward_mesh_info` | unit | all | replaced if equal; whether a unit is resharded |
| `post_backward` | unit | all | extended: notes gradients before they are reduced |
| `reduce_grads` | unit | all | whether this backward reduces |
| `reduce_scatter_unused_params` | unit | from 2.13 | set: zeros for parameters without a gradient |
| `gradient_divide_factor` | unit | all | the factor of PREMUL_SUM, which does not tell it |
| `_all_gather_comm`, `_reduce_scatter_comm` | unit | all | replaced by quantized collectives |
| `_module_info` | parameter | all | its name in its module |
| `_orig_size`, `fsdp_placement` | parameter | all | the whole shape, the sharded dimension |
| `_sharded_param_data`, `padded_sharded_param_size` | parameter | all | this rank's padded shard |
| `sharded_param`, `_unsharded_param` | parameter | all | the shard, the whole with gradients |
| `unsharded_accumulated_grad` | parameter | all | a gradient that FSDP has accumulated |
| `mesh` | mesh info | all | which dimensions are not those of tensor parallelism |
| `shard_process_group` | mesh info | all | the shard group |
| `replicate_process_group` | mesh info | all | replaced: the group of replicas |
| `replicate_mesh_size`, `replicate_mesh_rank` | mesh info | all | replaced: those of this group |
| `_version` | tensor | all | notices changes of parameters and gradients |
| `_current_graph_task_id` | torch._C | all | whether backward is running |
| `_execution_engine` | autograd | all | calls back at the end of backward |
"""

import functools
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import DDPMeshInfo, FSDPMeshInfo, HSDPMeshInfo
from torch.optim.optimizer import register_optimizer_step_post_hook

UnitReduction = Callable[[Tensor, Any], None]
"""Reduces a flat tensor over the replicas in place; the operation is AVG or SUM."""


EndOfBackward = Callable[[bool], None]
"""Called at the end of backward with whether it has succeeded. May raise."""


_COLLECTIVES = {"all_gather": "_all_gather_comm", "reduce_scatter": "_reduce_scatter_comm"}


class Unit:
    """Parameters that FSDP reduces together. Does not keep the model alive."""

    def __init__(self, state: Any, group: Any, names: list[str]) -> None:
        self._state = weakref.ref(state)
        self._group = weakref.ref(group)
        self._names = names
        info = group.mesh_info
        replicas = getattr(info, "replicate_process_group", None)
        self._original_info = replicas.original_info if isinstance(replicas, _Replicas) else info
        self._original_fill = getattr(group, "reduce_scatter_unused_params", None)
        self._fills = False  # here, because torch cannot
        self._with_gradient: set[str] = set()  # not yet reduced over the replicas
        self.is_reduced = False
        """Whether this reduction has averaged gradients over replicas. The adapter sets it."""
        self._marks: list[tuple[int, _Mark]] = []  # by position, after the last such reduction
        self._has_stepped = False  # an optimizer, since then

    @property
    def device(self) -> torch.device:
        """The device on which gradients are reduced."""
        device: torch.device = self._alive().device
        return device

    @property
    def replicas(self) -> dist.ProcessGroup | None:
        """The group of the unit's replicas, or None if it has none."""
        info = self._original_info
        return info.replicate_process_group if isinstance(info, DDPMeshInfo) else None

    @property
    def shards(self) -> dist.ProcessGroup | None:
        """The group that the unit is sharded over, or None if it is not sharded."""
        info = self._original_info
        return info.shard_process_group if isinstance(info, FSDPMeshInfo) else None

    @property
    def gradient_divide_factor(self) -> float | None:
        """The argument of ``set_gradient_divide_factor``."""
        factor: float | None = self._alive().gradient_divide_factor
        return factor

    @property
    def is_resharded_after_forward(self) -> bool:
        """Whether backward gathers the parameters again. Known from the first forward on."""
        return self._alive().post_forward_mesh_info is not None

    def parameters(self) -> dict[str, Tensor]:
        """Return this rank's shards of the trained parameters by name, as they lie in ``flat``.

        Each has the shape of the first rank's shard; rows that this rank does not have are zeros.
        They share memory with the parameters, until ``load_state_dict`` or ``to`` replaces these.
        """
        group = self._alive()
        in_order = list(zip(self._names, group.fsdp_params, strict=True))
        # In torch 2.15, by dtype; known after the first forward.
        if indices := getattr(group, "_reduce_scatter_param_indices", ()):
            in_order = [in_order[index] for index in indices]
        return {
            name: each._sharded_param_data.view(each.padded_sharded_param_size)  # noqa: SLF001
            for name, each in in_order
            if each.sharded_param.requires_grad
        }

    def full_shapes(self) -> dict[str, tuple[torch.Size, int]]:
        """Return the shape of each parameter, and the dimension that it is sharded in.

        The shape is that of the gradient: of a real view if the parameter is complex.
        """
        return {
            name: (_real_size(each), each.fsdp_placement.dim)
            for name, each in zip(self._names, self._alive().fsdp_params, strict=True)
        }

    def tensor_parallel(self) -> set[str]:
        """Return the names of the parameters sharded by tensor parallelism."""
        own = self._original_info.mesh.mesh_dim_names or ()
        found = set()
        for name, each in zip(self._names, self._alive().fsdp_params, strict=True):
            parameter = each.sharded_param
            dimensions = parameter.device_mesh.mesh_dim_names or ()
            if any(
                placement.is_shard() and dimension not in own
                for dimension, placement in zip(dimensions, parameter.placements, strict=False)
            ):
                found.add(name)
        return found

    def identities(self) -> set[int]:
        """Return the ids of the parameters, sharded and gathered."""
        return {
            id(parameter)
            for each in self._alive().fsdp_params
            for parameter in (each.sharded_param, getattr(each, "_unsharded_param", None))
        }

    def gather_layout(self) -> dict[str, tuple[torch.Size, int]]:
        """Return the shape of each parameter, and how many numbers each rank has of it.

        In the order in which they are gathered, with those that are padding.
        """
        return {
            name: (each._orig_size, each.padded_sharded_param_size.numel())  # noqa: SLF001
            for name, each in zip(self._names, self._alive().fsdp_params, strict=True)
        }

    def attach(self, replicas: dist.ProcessGroup, reduce: UnitReduction) -> None:
        """Call ``reduce`` instead of the all-reduce over ``replicas``."""
        old = self._original_info
        # Without __init__, which asks the mesh for the group: one of one dimension has none.
        kind = type(old) if isinstance(old, DDPMeshInfo) else HSDPMeshInfo
        info = kind.__new__(kind)
        vars(info).update(vars(old))
        info.replicate_process_group = _Replicas(replicas, reduce, old)
        info.replicate_mesh_size = replicas.size()
        info.replicate_mesh_rank = replicas.rank()
        group = self._alive()
        # FSDP compares them to see whether shards after forward are those of before.
        if group.post_forward_mesh_info == group.mesh_info:
            group.post_forward_mesh_info = info
        group.mesh_info = info
        group.post_backward = self._post_backward

    def fill_unused(self, fill: bool) -> None:
        """Reduce zeros for parameters without a gradient, or return to what was set before."""
        if self._original_fill is None:
            self._fills = fill
        else:
            self._alive().reduce_scatter_unused_params = fill or self._original_fill

    def take_gradients(self) -> set[str]:
        """Return which parameters have had a gradient on this rank since the last call."""
        names, self._with_gradient = self._with_gradient, set()
        return names

    def note_step(self, parameters: Collection[int]) -> None:
        """Note that an optimizer has stepped. ``parameters``: the ids of those that it has."""
        group = self._group()
        if group is not None:  # the model may be gone
            found = (id(each.sharded_param) in parameters for each in group.fsdp_params)
            self._has_stepped |= any(found)

    def has_moved_on(self) -> bool:
        """Return whether training has moved on since gradients of the unit were averaged.

        Then an optimizer has stepped, or parameters or gradients were changed or removed by other
        code than FSDP and hooks. Fused optimizers leave no other trace than their step.
        """
        parameters = self._alive().fsdp_params
        marks = [(_mark(parameters[position]), then) for position, then in self._marks]
        return self._has_stepped or any(now is None or now != then for now, then in marks)

    def ensure_end(self, end: EndOfBackward) -> None:
        """Call ``end`` at the end of this backward if FSDP will not notice it.

        FSDP skips its own callback when only submodules of a unit ran. A pipeline reduces after
        its backwards, and calls FSDP's callback itself.
        """
        state = self._state()
        assert state is not None
        if _is_in_backward() and not state._state_ctx.post_backward_final_callback_queued:  # noqa: SLF001
            Variable._execution_engine.queue_callback(functools.partial(end, True))  # noqa: SLF001

    def collective(self, name: str) -> Any:
        """Return the object that does the "reduce_scatter" or "all_gather" of the unit."""
        return getattr(self._alive(), _COLLECTIVES[name])

    def set_collective(self, name: str, comm: Any) -> None:
        """Let ``comm`` do it, as ``set_custom_reduce_scatter`` and ``set_custom_all_gather`` do."""
        # These methods refuse units with several meshes.
        setattr(self._alive(), _COLLECTIVES[name], comm)

    def _post_backward(self, *_: Any) -> None:
        """Note what has a gradient, let FSDP reduce, and mark what it has reduced."""
        group = self._alive()
        if group.reduce_grads:  # otherwise gradients stay where they are
            for name, each in zip(self._names, group.fsdp_params, strict=True):
                parameter = getattr(each, "_unsharded_param", None)  # set by the first forward
                if parameter is None or not parameter.requires_grad:
                    continue
                if parameter.grad is not None or each.unsharded_accumulated_grad is not None:
                    self._with_gradient.add(name)
                elif self._fills:
                    parameter.grad = torch.zeros_like(parameter)
        names = self._names if self.is_filled else self._with_gradient
        self.is_reduced = False
        type(group).post_backward(group)
        if self.is_reduced:
            self._has_stepped = False
            self._marks = [
                (position, _mark(each))
                for position, each in enumerate(group.fsdp_params)
                if each.sharded_param.requires_grad and self._names[position] in names
            ]

    @property
    def is_filled(self) -> bool:
        """Whether all trained parameters are reduced."""
        return self._fills or bool(getattr(self._alive(), "reduce_scatter_unused_params", False))

    def _alive(self) -> Any:
        group = self._group()
        assert group is not None
        return group


class _Replicas(dist.ProcessGroup):
    """A group that only all-reduces, by calling ``reduce``."""

    def __init__(
        self, replicas: dist.ProcessGroup, reduce: UnitReduction, original_info: Any
    ) -> None:
        super().__init__(replicas.rank(), replicas.size())  # type: ignore[call-arg]
        self.original_info = original_info
        self._reduce = reduce

    def allreduce(self, tensors: list[Tensor], options: dist.AllreduceOptions) -> None:  # type: ignore[override]
        (flat,) = tensors
        self._reduce(flat, options.reduceOp)


def _real_size(parameter: Any) -> torch.Size:
    size: torch.Size = parameter._orig_size  # noqa: SLF001
    return torch.Size((*size, 2)) if parameter.sharded_param.is_complex() else size


def units_of(model: nn.Module) -> list[Unit]:
    """Return the units of ``model``, in its order."""
    prefix_of = {id(module): f"{name}." if name else "" for name, module in model.named_modules()}
    return [
        Unit(
            state,
            group,
            [
                prefix_of[id(each._module_info.module)] + each._module_info.param_name  # noqa: SLF001
                for each in group.fsdp_params
            ],
        )
        for state in _states(model)
        for group in _groups(state)
    ]


def is_root(model: nn.Module) -> bool:
    """Return whether ``model`` is not known to be a part of a larger sharded model."""
    return isinstance(model, FSDPModule) and model._get_fsdp_state()._is_root is not False  # noqa: SLF001


def on_end_of_backward(model: nn.Module, end: EndOfBackward) -> None:
    """Call ``end`` at the end of each backward, when FSDP has finished all units."""
    for state in _states(model):
        for name in ("_root_post_backward_final_callback", "wait_for_gradient_reduction"):
            if hasattr(state, name):  # torch 2.15 has both
                setattr(state, name, functools.partial(_finish, name, weakref.ref(state), end))


_watched: weakref.WeakKeyDictionary[Any, list[Unit]] = weakref.WeakKeyDictionary()


def on_optimizer_step(owner: Any, units: Iterable[Unit]) -> None:
    """Call :meth:`Unit.note_step` after each step of torch's optimizers, while ``owner`` lives."""
    _watch_optimizers()
    _watched[owner] = list(units)


@functools.cache
def _watch_optimizers() -> None:
    # One hook for the whole process: a finalizer that removes a hook could run while torch iterates
    # over the hooks of this and other code.
    register_optimizer_step_post_hook(_note_step)


def _note_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    parameters = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for units in list(_watched.values()):
        for unit in units:
            unit.note_step(parameters)


def _finish(name: str, state: Any, end: EndOfBackward, *args: Any) -> None:
    try:
        getattr(type(state()), name)(state(), *args)
    except BaseException:
        end(False)
        raise
    # In a backward, the callback waits itself, and what comes after that must not be skipped.
    if name != "wait_for_gradient_reduction" or not _is_in_backward():
        end(True)


def _is_in_backward() -> bool:
    return torch._C._current_graph_task_id() >= 0  # noqa: SLF001


_Mark: TypeAlias = tuple[int, int, int] | None


def _mark(each: Any) -> _Mark:
    """Return a value that changes with the parameter or its gradient; None without a gradient."""
    parameter = each.sharded_param
    gradient = parameter.grad
    return None if gradient is None else (parameter._version, id(gradient), gradient._version)  # noqa: SLF001


def _states(model: nn.Module) -> Iterable[Any]:
    """Return the states of FSDP in ``model``. Modules that were sharded together share one."""
    found = (module for module in model.modules() if isinstance(module, FSDPModule))
    return dict.fromkeys(module._get_fsdp_state() for module in found)  # noqa: SLF001


def _groups(state: Any) -> Iterator[Any]:
    if hasattr(state, "_fsdp_param_groups"):
        yield from state._fsdp_param_groups  # noqa: SLF001
    elif state._fsdp_param_group is not None:  # torch 2.11  # noqa: SLF001
        yield state._fsdp_param_group  # noqa: SLF001
