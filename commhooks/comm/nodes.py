"""The ranks that share a machine."""

import os
from collections.abc import Mapping

import torch.distributed as dist

from commhooks.errors import CommHookError


def check_nodes(
    ranks_per_node: int, group: dist.ProcessGroup, environment: Mapping[str, str] = os.environ
) -> int:
    """Return the number of ranks of each node: ``ranks_per_node``, or the launcher's if that is 0.

    Launchers such as torchrun set LOCAL_WORLD_SIZE and LOCAL_RANK. Node i has the i-th
    ``ranks_per_node`` ranks of ``group``.

    Raises:
        CommHookError: The launcher sets nothing or numbers the ranks differently, or the nodes have
            different numbers of ranks.
    """
    size, rank = group.size(), group.rank()
    if ranks_per_node == 0:
        ranks_per_node = _from_launcher(rank, environment)
    if size % ranks_per_node != 0:
        raise CommHookError(
            f"expected the same number of ranks on all nodes, found {size} ranks, {ranks_per_node} "
            "per node; give an option ranks_per_node that divides the number of ranks"
        )
    return ranks_per_node


def ranks_of_node(rank: int, ranks_per_node: int) -> range:
    """Return the ranks of the node of ``rank``, including ``rank``."""
    first = rank - rank % ranks_per_node
    return range(first, first + ranks_per_node)


def _from_launcher(rank: int, environment: Mapping[str, str]) -> int:
    try:
        local_size, local_rank = (int(environment[n]) for n in ("LOCAL_WORLD_SIZE", "LOCAL_RANK"))
    except (KeyError, ValueError):
        raise CommHookError(
            f"[rank {rank}] expected numbers in LOCAL_WORLD_SIZE and LOCAL_RANK, as torchrun sets "
            f"them, found {environment.get('LOCAL_WORLD_SIZE')!r} and "
            f"{environment.get('LOCAL_RANK')!r}; give the option ranks_per_node"
        ) from None
    if local_size < 1 or local_rank != rank % local_size:
        raise CommHookError(
            f"[rank {rank}] expected the ranks of each node to be numbered one after the other, "
            f"found local rank {local_rank} of {local_size}; give the option ranks_per_node, by "
            "which ranks 0 to ranks_per_node - 1 are the first node, and so on"
        )
    return local_size
