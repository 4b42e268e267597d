"""How ranks end when one of them dies over NCCL: ``python -m bench.gpu.deaths FILE``

Two ranks train on this GPU. In the second step rank 1 is killed, is stopped, or raises in its hook
and ends. Rank 0 waits on the host (``TORCH_NCCL_BLOCKING_WAIT=1``), or torch's watchdog watches it.
FILE, in the form of pytest-benchmark, gets each case as it ends. Exits with 1 if rank 0 did not
raise a CommHookPeerError where the host waits. Takes about 20 seconds for each case.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from support.dying_ranks import DyingRanks, Raised
from torch import Tensor, nn

import commhooks

NAME = "test_death"
TIMEOUT = 5.0
"""The time-out of the process group from the death on, in seconds."""
PATIENCE = 150.0
"""The most seconds for a case."""
WAYS = {"host waits": {"TORCH_NCCL_BLOCKING_WAIT": "1"}, "watchdog": {}}
HOWS = ("killed", "stopped", "raises")
CASES = [(way, how, "int8") for way in WAYS for how in HOWS]
CASES[3:3] = [("host waits", how, "allreduce") for how in HOWS[:2]]


@dataclass
class Raising(commhooks.CommHook):
    """Let ranks die between two collectives, if there is a way to."""

    die: Callable[[], None] | None = field(default=None, init=False, compare=False)

    async def reduce(self, bucket: commhooks.GradBucket, comm: commhooks.Communicator) -> Tensor:
        wire = await comm.all_reduce(bucket.buffer())
        if self.die is not None:
            self.die()
        return (await comm.all_reduce(wire)).div_(comm.size**2)


def train(die: Callable[[], None], name: str, in_hook: bool, device: str) -> None:
    """Train until the other rank is missed."""
    model = commhooks.DistributedDataParallel(nn.Linear(64, 64).to(device), stable_buckets=True)
    hook = Raising()
    commhooks.register(model, hook if in_hook else name)
    x = torch.ones(2, 64, device=device)
    model(x).sum().backward()
    x.sum().item()  # the host waits for the device
    if in_hook:
        hook.die = die
    else:
        die()
    model(x).sum().backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.sum().item()


def measure(
    ranks: DyingRanks,
    case: tuple[str, str, str],
    device: str = "cuda",
    backend: str = "nccl",
    timeout: float = TIMEOUT,
) -> dict[str, Any]:
    """Return what became of rank 0, as a row of pytest-benchmark."""
    way, how, name = case
    (raised,) = ranks.run(
        train,
        name,
        how == "raises",
        device,
        how=how,
        timeout=timeout,
        backend=backend,
        environment=WAYS[way],
        patience=PATIENCE,
    )
    return row_of(case, raised)


def row_of(case: tuple[str, str, str], raised: Raised) -> dict[str, Any]:
    """Return a row of pytest-benchmark."""
    way, how, name = case
    hook = "a hook of two collectives" if how == "raises" else name
    figures = {"rank 0": raised.kind, "after": f"{raised.seconds:.1f} s",
               "text": " ".join(raised.text.split())[:300]}  # fmt: skip
    name = f"{NAME}[{how}, {hook}, {way}]"
    return {"group": "gpu: deaths of a rank", "name": name, "extra_info": figures}


def main() -> int:
    """Measure all cases, and write the file after each."""
    rows: list[dict[str, Any]] = []
    with DyingRanks(2) as ranks:
        for case in CASES:
            rows.append(measure(ranks, case))
            Path(sys.argv[1]).write_text(json.dumps({"benchmarks": rows}, indent=1) + "\n")
            print(f"{len(rows)} of {len(CASES)} cases: {rows[-1]['extra_info']}", flush=True)
    waited = [row["extra_info"]["rank 0"] for row in rows if "host waits" in row["name"]]
    return int(set(waited) != {"CommHookPeerError"})


if __name__ == "__main__":
    sys.exit(main())
