"""Rank processes on this machine, and network namespaces with links of a given rate between them.

The test kit, the comparison and the simulation start their ranks here.
"""

from commhooks.cluster.call import RankError
from commhooks.cluster.pool import RankPool, RankStartError
from commhooks.cluster.ranks import Ranks

__all__ = ["RankError", "RankPool", "RankStartError", "Ranks"]
