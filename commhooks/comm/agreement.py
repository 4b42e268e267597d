"""All ranks say the same, or all raise."""

import hashlib
import secrets

import torch
import torch.distributed as dist

from commhooks.errors import CommHookMismatchError

__all__ = ["check_agreement"]


def check_agreement(group: dist.ProcessGroup, device: torch.device, what: str, value: str) -> int:
    """Raises CommHookMismatchError on every rank unless all have the same text ``value``.

    Collective: 16 bytes from each rank, on ``device``; texts travel only if they differ. Returns a
    random number, the same on all ranks.
    """
    digest = hashlib.blake2b(value.encode(), digest_size=7).digest()  # 7 bytes fit into int64
    own = torch.tensor(
        [int.from_bytes(digest, "little"), secrets.randbits(62)], dtype=torch.int64, device=device
    )
    gathered = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(gathered, own, group=group)
    digests, numbers = torch.stack(gathered).T.tolist()
    if len(set(digests)) > 1:
        other = next(rank for rank, digest in enumerate(digests) if digest != digests[0])
        values: list[str] = [""] * group.size()
        dist.all_gather_object(values, value, group=group)
        raise CommHookMismatchError(
            f"[rank {group.rank()}] expected the same {what} on all ranks, found on rank 0: "
            f"{values[0]}; on rank {other}: {values[other]}. Nothing was changed."
        )
    return int(numbers[0])
