"""Compare hooks on GPT-2 small, two ranks on this GPU: ``python -m bench.gpu.links FILE``

Ranks use NCCL over sockets. Needs root for the links of 10 and 1 Gbit/s, and 25 if the sockets
reach it. Takes about three minutes; after an interrupt, the file has what was measured before.
Exits with 1 if a link cannot be made or a hook fails.
"""

import json
import sys
from pathlib import Path

from bench.measured_hooks import TORCHS
from commhooks.cluster import Device, Ranks
from commhooks.cluster.links import shaped_link
from commhooks.lab.comparison import ComparisonInterrupted, compare
from commhooks.lab.comparison.hosts import measure_pairs

RATES = (25e9, 10e9, 1e9)
ALWAYS = 10e9
STEPS = 2  # plain averaging over 1 Gbit/s takes four seconds each
HOOKS = (TORCHS["torch bf16"], TORCHS["torch powersgd"], "allreduce", "bf16", "int8", "int4",
         "powersgd:rank=4", "topk:density=0.01", "onebit")  # fmt: skip


def main() -> int:
    """Measure, print the tables, and write the file."""
    device = Device.choose("cuda")
    # Without links, compare would only predict: LinkError ends this first.
    with shaped_link(2, ALWAYS), Ranks(2, device=device) as ranks:
        pair = next(measure_pairs(ranks, [(0, 1)]))
    reached = [rate for rate in RATES if rate <= max(ALWAYS, pair.bits_per_second)]
    try:
        found = compare("gpt2-small", HOOKS, links=reached, steps=STEPS, device=device)
    except ComparisonInterrupted as interrupt:
        found = interrupt.comparison
    print(found)
    Path(sys.argv[1]).write_text(json.dumps(found.to_dict(), indent=1) + "\n")
    return int(bool(found.failures))


if __name__ == "__main__":
    sys.exit(main())
