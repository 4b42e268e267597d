"""Check that all ranks registered the same hook."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from commhooks.errors import CommHookMismatchError
from reducer import agreement


def check_agreement(group: dist.ProcessGroup, device: torch.device, what: str, value: str) -> int:
    """Raise CommHookMismatchError on every rank if ranks have different texts ``value``.

    Collective: 16 bytes from each rank, on ``device``; texts are sent only if they differ. Returns
    a random number, which is the same on all ranks.
    """

    def explain(values: Sequence[str]) -> CommHookMismatchError:
        other = next(rank for rank, text in enumerate(values) if text != values[0])
        return CommHookMismatchError(
            f"[rank {group.rank()}] expected the same {what} on all ranks, found on rank 0: "
            f"{values[0]}; on rank {other}: {values[other]}. Nothing was changed."
        )

    comparison = f"the comparison of the ranks' {what}, which all ranks have to set together,"
    return agreement.check_agreement(value, group, device, explain, comparison)
