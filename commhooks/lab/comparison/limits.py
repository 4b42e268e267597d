"""The limits of this machine: how many ranks and entries it can run."""

from pathlib import Path

from commhooks.lab.comparison.result import ComparisonError
from commhooks.lab.machine import cores

__all__ = ["check_limits"]

_RANKS_PER_CORE = 8
_PROCESS_BYTES = 400_000_000  # of a process that has imported torch
_COPIES = 4  # gradients, buckets, errors and temporaries, each as large as the parameters


def check_limits(world_size: int, entries: int, parameter_bytes: int) -> None:
    """Raise ComparisonError if this machine cannot run the ranks.

    The limits are 8 ranks per core, and memory for each rank of 0.4 GB, one copy of the parameters,
    and four more copies for each entry.
    """
    most = _RANKS_PER_CORE * cores()
    if world_size > most:
        raise ComparisonError(
            f"{world_size} ranks are more than the {most} that can run on {cores()} cores (at most "
            f"{_RANKS_PER_CORE} per core); `commhooks simulate` predicts larger world sizes"
        )
    needed = world_size * (_PROCESS_BYTES + parameter_bytes * (1 + _COPIES * entries))
    available = _available_bytes()
    if available is not None and needed > available:
        raise ComparisonError(
            f"{world_size} ranks with {entries} entries need about {needed / 1e9:.1f} GB "
            f"({parameter_bytes / 1e6:.0f} MB of parameters, and {_COPIES} times as much for each "
            f"entry), and {available / 1e9:.1f} GB are available; use fewer ranks, fewer hooks at "
            "a time or a smaller model"
        )


def _available_bytes() -> int | None:
    path = Path("/proc/meminfo")
    if not path.exists():
        return None
    fields = dict(line.split(":") for line in path.read_text().splitlines())
    return int(fields["MemAvailable"].split()[0]) * 1024
