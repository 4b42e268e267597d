"""Names by which torch's own code and some libraries read the parts of torch's wrapper."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from reducer.buffers import BROADCAST_BYTES, ModuleBuffers, broadcast
from reducer.construction import sparse_parameters

__all__: list[str] = []


class TorchInternals(nn.Module):
    """Base class of TorchNames."""

    # Set by DistributedDataParallel.
    module: nn.Module
    process_group: dist.ProcessGroup
    module_buffers: ModuleBuffers
    parameter_names: dict[nn.Parameter, str]

    broadcast_bucket_size = BROADCAST_BYTES
    _get_data_parallel_params = staticmethod(TorchDDP._get_data_parallel_params)  # noqa: SLF001

    def _build_params_for_reducer(self) -> tuple[list[nn.Parameter], list[bool]]:
        """Return the parameters that are averaged, and whether each has a sparse gradient."""
        sparse = sparse_parameters(self.module)
        return list(self.parameter_names), [it in sparse for it in self.parameter_names]

    def _build_debug_param_to_name_mapping(
        self, parameters: Sequence[nn.Parameter]
    ) -> dict[int, str]:
        """Return the name of each of the parameters that are averaged, by its index.

        Raises ValueError unless ``parameters`` are those.
        """
        indices = {parameter: index for index, parameter in enumerate(parameters)}
        for parameter, name in self.parameter_names.items():
            if parameter not in indices:
                raise ValueError(
                    f"Param with name {name} found in module parameters, but not among the "
                    f"{len(parameters)} given ones."
                )
        if len(indices) != len(self.parameter_names):
            raise ValueError(
                "Expected param to name mapping to cover all parameters, but found "
                f"{len(indices)} parameters and {len(self.parameter_names)} names."
            )
        return {indices[parameter]: name for parameter, name in self.parameter_names.items()}

    def _default_broadcast_coalesced(
        self,
        bufs: Iterable[Tensor] | None = None,
        bucket_size: int | None = None,  # noqa: ARG002
        authoritative_rank: int = 0,
    ) -> None:
        """Overwrite buffers, by default all, with those of one rank; for use in buffer hooks."""
        buffers = self.module_buffers.by_name.values() if bufs is None else bufs
        broadcast(self.process_group, buffers, authoritative_rank)
