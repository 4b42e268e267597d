"""How many ranks this machine can bear."""

from pathlib import Path

from commhooks.lab.machine import cores

__all__ = ["check_means"]

_RANKS_PER_CORE = 8
_PROCESS_BYTES = 400_000_000  # of a process that has imported torch
_COPIES = 4  # gradients, buckets, errors and temporaries, each as large as the parameters


def check_means(world_size: int, contenders: int, parameter_bytes: int) -> str | None:
    """Why the ranks are more than this machine can run, None if they are not.

    The rule: at most 8 ranks per core, and memory for each rank of 0.4 GB, one copy of the
    parameters, and four more for each contender.
    """
    most = _RANKS_PER_CORE * cores()
    if world_size > most:
        return (
            f"{world_size} ranks are more than the {most} that are run on {cores()} cores (at most "
            f"{_RANKS_PER_CORE} per core); `commhooks simulate` predicts larger world sizes"
        )
    needed = world_size * (_PROCESS_BYTES + parameter_bytes * (1 + _COPIES * contenders))
    available = _available_bytes()
    if available is not None and needed > available:
        return (
            f"{world_size} ranks with {contenders} contenders need about {needed / 1e9:.1f} GB "
            f"({parameter_bytes / 1e6:.0f} MB of parameters, {_COPIES} more of that for each "
            f"contender), of which {available / 1e9:.1f} GB are available; take fewer ranks, fewer "
            "hooks at a time or a smaller model"
        )
    return None


def _available_bytes() -> int | None:
    path = Path("/proc/meminfo")
    if not path.exists():
        return None
    fields = dict(line.split(":") for line in path.read_text().splitlines())
    return int(fields["MemAvailable"].split()[0]) * 1024
