"""Compare the two forms of ``hierarchical``: ``python -m bench.node_shards RESULT.json``

2 nodes of 2 ranks. Each rank has a link of its own to the other node, of the given rate, and sends
to its neighbor at the speed of memory. Blocks of both forms alternate, so that other load on the
machine affects both. Batches are small, because four ranks on a small machine would otherwise
measure its cores.
"""

from __future__ import annotations

import argparse
import os
import statistics
from pathlib import Path
from typing import Any

import torch

from bench import files
from bench.measured_hooks import EXACT, backwards, entry_of
from bench.models import ThreeLayers
from commhooks.cluster import Ranks
from commhooks.cluster.links import shaped_link
from commhooks.lab.comparison import remote
from commhooks.lab.comparison.entry import BARE, Entry
from commhooks.lab.models import Workload
from commhooks.lab.units import format_rate, parse_rate

RANKS, PER_NODE = 4, 2
MODEL, BUCKET_MB = "bench.models:ThreeLayers", 8.0
INNER = ("allreduce", "int8", "int4", '{"name":"powersgd","rank":4,"start_step":0}')
BATCH = 8
BLOCK = 3


def small_batch() -> torch.Tensor:
    """Return the inputs."""
    return ThreeLayers.example_input()[:BATCH]


def main() -> None:
    """Measure at each rate, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("result", type=Path, metavar="RESULT.json")
    parser.add_argument("--rate", action="append", help="default: 100mbit and 1gbit")
    parser.add_argument("--rounds", type=int, default=12)
    arguments = parser.parse_args()
    about = {"ranks": RANKS, "ranks_per_node": PER_NODE, "model": MODEL, "bucket_mb": BUCKET_MB}
    about["batch"] = BATCH
    about |= {"torch": torch.__version__, "cores": os.cpu_count()}
    rows = []
    for rate in map(parse_rate, arguments.rate or ["100mbit", "1gbit"]):
        link = shaped_link(RANKS, rate, hosts_per_node=PER_NODE)
        with link as hosts, Ranks(RANKS, hosts) as ranks:
            wrapper = (("bucket_cap_mb", BUCKET_MB),)
            ranks(remote.prepare, Workload(MODEL, "bench.node_shards:small_batch", wrapper))
            for inner in INNER:
                rows.append(_compare(ranks, rate, inner, arguments.rounds))
                files.save(arguments.result, {"about": about, "rows": rows})


def _compare(ranks: Ranks, rate: float, inner: str, rounds: int) -> dict[str, Any]:
    """Return the seconds of a backward on the slowest rank in both forms, pair by pair."""
    forms = [_form(inner, sharded=False), _form(inner, sharded=True)]
    if inner == "allreduce":
        for form in forms:
            assert max(first.error for first in ranks(remote.verify, form)) < EXACT
    load = [os.getloadavg()[0]]
    seconds: list[list[float]] = [[], []]
    sent: list[list[float]] = [[], []]
    for done in range(0, rounds, BLOCK):
        for index in (0, 1) if done % 2 else (1, 0):
            times, sent[index] = backwards(ranks, forms[index], done, BLOCK)
            seconds[index] += times
    bare, _ = backwards(ranks, BARE, 0, BLOCK)
    load.append(os.getloadavg()[0])
    leader, sharded = seconds
    ratios = [a / b for a, b in zip(sharded, leader, strict=True)]
    row = {
        "rate": format_rate(rate),
        "inner": inner,
        "leader_seconds": leader,
        "sharded_seconds": sharded,
        "ratio": statistics.median(ratios),
        "bare_seconds": statistics.median(bare),
        "leader_bytes": sent[0],
        "sharded_bytes": sent[1],
        "load": load,
    }
    print(
        f"{row['rate']} {inner}: {statistics.median(leader):.3f} s by leaders, "
        f"{statistics.median(sharded):.3f} s sharded, pairs {min(ratios):.2f} to "
        f"{max(ratios):.2f}, median {row['ratio']:.2f}; load {load}",
        flush=True,
    )
    return row


def _form(inner: str, *, sharded: bool) -> Entry:
    options = f"inner={inner},ranks_per_node={PER_NODE},sharded={str(sharded).lower()}"
    return entry_of(f"hierarchical:{options}")


if __name__ == "__main__":
    main()
