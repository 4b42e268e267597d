"""Rank processes on this machine, and network namespaces with links of a given rate between them.

The test kit, the comparison and the simulation start their ranks here.
"""

from commhooks.cluster.device import CPU, Device, DeviceError
from commhooks.cluster.ranks import LaunchedRanks, RankCaller, RankPool, Ranks, RankStartError
from commhooks.cluster.worker import RankError

__all__ = [
    "CPU",
    "Device",
    "DeviceError",
    "LaunchedRanks",
    "RankCaller",
    "RankError",
    "RankPool",
    "RankStartError",
    "Ranks",
]
