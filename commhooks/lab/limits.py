"""What this machine must have for a run. What is missing is an error before anything starts."""

from dataclasses import replace
from typing import NamedTuple

import torch

from commhooks.cluster import CPU, Device
from commhooks.costs.units import format_bytes
from commhooks.errors import CommHookError
from commhooks.lab.machine import available_bytes, cores
from commhooks.lab.models import Workload

_RANKS_PER_CORE = 8
_PROCESS_BYTES = 400_000_000  # of a process that has imported torch
_CUDA_PROCESS_BYTES = 2_000_000_000  # with the libraries of CUDA
_CONTEXT_BYTES = 1_000_000_000  # of a process on a CUDA device, with NCCL's buffers
_COPIES = 8
"""What is as large as the gradients: they, buckets, errors and other state, temporary memory."""


class LimitError(CommHookError):
    """This machine cannot run the ranks."""


class ModelSize(NamedTuple):
    """The bytes of a model's parameters and of their gradients, and their relative precision."""

    parameter_bytes: int
    gradient_bytes: int
    precision: float


def check_model(workload: Workload, world_size: int) -> ModelSize:
    """Make the model and an input, and check that ``world_size`` ranks fit on this machine."""
    on_host = replace(workload, device=CPU)
    module = on_host.make_module()
    on_host.make_input(module, 0)
    parameters = [p for p in module.parameters() if p.requires_grad]
    size = ModelSize(
        sum(parameter.nbytes for parameter in module.parameters()),
        sum(parameter.nbytes for parameter in parameters),
        max(torch.finfo(parameter.dtype).eps for parameter in parameters),
    )
    check_limits(world_size, size, workload.device)
    return size


def check_limits(world_size: int, model: ModelSize, device: Device = CPU) -> None:
    """Raise LimitError if this machine cannot run the ranks.

    The limits are 8 ranks per core, and for each rank memory of 0.4 GB, the parameters, and eight
    times the gradients, however many entries take turns. Activations are not counted. On CUDA it is
    the device's memory, which ranks may share, with 1 GB in place of 0.4 GB; and 2 GB and the
    parameters of the machine's.
    """
    most = _RANKS_PER_CORE * cores()
    if world_size > most:
        raise LimitError(
            f"{world_size} ranks are more than the {most} that can run on {cores()} cores (at most "
            f"{_RANKS_PER_CORE} per core); `commhooks simulate` predicts larger world sizes"
        )
    free, sharing = device.free_bytes(), device.sharing(world_size)
    on_host = (_PROCESS_BYTES, _COPIES) if free is None else (_CUDA_PROCESS_BYTES, 0)
    where = " that share a device" if sharing > 1 else " with an own device"
    for ranks, place, available, own_bytes, copies in (
        (world_size, "", available_bytes(), *on_host),
        (sharing, where, free, _CONTEXT_BYTES, _COPIES),
    ):
        needed = ranks * (own_bytes + model.parameter_bytes + copies * model.gradient_bytes)
        if available is not None and needed > available:
            process, parameters, gradients = map(format_bytes, (own_bytes, *model[:2]))
            raise LimitError(
                f"{ranks} rank{'s' * (ranks > 1)}{place} need about {format_bytes(needed)}, and "
                f"{format_bytes(available)} are free: for each {process} of a process, "
                f"{parameters} of parameters and {copies} x {gradients} of gradients, buckets, "
                "errors and temporary memory; use fewer ranks or a smaller model"
            )
