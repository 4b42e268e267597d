"""The limits of this machine: how many ranks and entries it can run."""

from pathlib import Path

from commhooks.lab.comparison.result import ComparisonError
from commhooks.lab.machine import cores

__all__ = ["check_limits"]

_RANKS_PER_CORE = 8
_PROCESS_BYTES = 400_000_000  # of a process that has imported torch
_COPIES = 9  # the parameters, and what is as large: gradients, buckets, state, temporaries


def check_limits(world_size: int, parameter_bytes: int) -> None:
    """Raise ComparisonError if this machine cannot run the ranks.

    The limits are 8 ranks per core, and for each rank memory of 0.4 GB and of nine copies of the
    parameters, however many entries take turns.
    """
    most = _RANKS_PER_CORE * cores()
    if world_size > most:
        raise ComparisonError(
            f"{world_size} ranks are more than the {most} that can run on {cores()} cores (at most "
            f"{_RANKS_PER_CORE} per core); `commhooks simulate` predicts larger world sizes"
        )
    needed = world_size * (_PROCESS_BYTES + parameter_bytes * _COPIES)
    available = _available_bytes()
    if available is not None and needed > available:
        raise ComparisonError(
            f"{world_size} ranks need about {needed / 1e9:.1f} GB ({_COPIES} copies of "
            f"{parameter_bytes / 1e6:.0f} MB of parameters each), and {available / 1e9:.1f} GB are "
            "available; use fewer ranks or a smaller model"
        )


def _available_bytes() -> int | None:
    path = Path("/proc/meminfo")
    if not path.exists():
        return None
    fields = dict(line.split(":") for line in path.read_text().splitlines())
    return int(fields["MemAvailable"].split()[0]) * 1024
