"""Ranks in processes of their own, on this machine, for whoever has to start some."""

from commhooks.ranks.pool import RankError, RankPool, RankStartError
from commhooks.ranks.ranks import Ranks

__all__ = ["RankError", "RankPool", "RankStartError", "Ranks"]
