"""Ranks in processes of their own, on this machine, for whoever has to start some.

Imports: errors.
"""

from commhooks.cluster.pool import RankError, RankPool, RankStartError
from commhooks.cluster.ranks import Ranks

__all__ = ["RankError", "RankPool", "RankStartError", "Ranks"]
