"""Give all ranks the same parameters and buffers before the first step."""

from __future__ import annotations

from collections.abc import Iterable

import torch.distributed as dist
from torch import Tensor

from reducer.buffers import broadcast
from reducer.group_keys import GroupKeys, NamedParameters
from reducer.verify import verify_parameters

__all__: list[str] = []


def sync_initial_state(
    named_parameters: NamedParameters,
    buffers: Iterable[Tensor],
    group: dist.ProcessGroup,
    keys: GroupKeys,
) -> None:
    """Verify that ranks train the same parameters, then broadcast parameters and buffers.

    The root is rank 0 of ``group``; for parameters that are averaged over a process group of their
    own, it is the first rank of that group. Collective.
    """
    verify_parameters([(name, p) for name, p in named_parameters if p.requires_grad], group)
    owners = [(p, keys.process_group(name, p)) for name, p in named_parameters]
    broadcast(group, [*(p for p, own in owners if own is None), *buffers], 0)
    for each in {id(own): own for own in keys.process_groups.values()}.values():
        broadcast(each, [p for p, own in owners if own is each], 0)
