"""Train a small GPT at sites that come and go: DiLoCo between them, under a torchft manager.

    torchft_lighthouse --min_replicas 1 --heartbeat_timeout_ms 1000 --bind "[::]:29510"
    python examples/train_elastic.py --site 0 --steps 200 --hook-option inner=int8
    python examples/train_elastic.py --site 1 --steps 200 --hook-option inner=int8

Start as many sites as you like, on any machines that reach the lighthouse and each other. Kill one,
and the others go on. Start it again, and it continues with the model of the others, at their step.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torchft
from gpt import GPT, GPTConfig
from stdlib_text import load_corpus, train_batch
from train_config import hook_option, positive_int

import commhooks
from commhooks.integrations.torchft import DistributedDataParallel


def connect(
    lighthouse: str,
    site: int,
    load: Callable[[dict[str, Any]], None],
    save: Callable[[], dict[str, Any]],
    timeout: float = 60.0,
) -> tuple[torchft.Manager, torchft.ProcessGroupGloo]:
    """Return the manager of a site of one rank, and the process group that it reconfigures.

    ``save`` returns what a site that comes gets from another one, and ``load`` takes it.
    ``timeout``: of collectives, in seconds.
    """
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    sites = torchft.ProcessGroupGloo(timeout=timedelta(seconds=timeout))
    manager = torchft.Manager(
        pg=sites,
        min_replica_size=1,
        use_async_quorum=False,
        timeout=timedelta(seconds=timeout),
        quorum_timeout=timedelta(minutes=30),  # longer than a period takes
        load_state_dict=load,
        state_dict=save,
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
        lighthouse_addr=lighthouse,
        replica_id=f"site{site}",
    )
    return manager, sites


class Trainer:
    """The training run of one site."""

    def __init__(self, args: argparse.Namespace) -> None:
        torch.manual_seed(0)
        self.net = GPT(GPTConfig(args.layers, args.heads, args.width, args.block_size))
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-3)
        self.steps_done = 0
        self.site, self.batch_size, self.block_size = args.site, args.batch_size, args.block_size
        self.corpus = load_corpus(min_bytes=args.block_size + 1)
        self.manager, sites = connect(args.lighthouse, args.site, self.load, self.save)
        options = {"period": 20, **dict(args.hook_option)}
        self.model = DistributedDataParallel(self.manager, sites, self.net, "diloco", **options)

    def save(self) -> dict[str, Any]:
        """Return what a site that comes gets from this one; the hook adds its own part."""
        return {
            "model": self.net.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "steps_done": self.steps_done,
        }

    def load(self, state: dict[str, Any]) -> None:
        """Continue where another site is."""
        self.net.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.steps_done = state["steps_done"]

    def step(self) -> float:
        """Train on one batch. Return the loss, in nats per byte."""
        batch = train_batch(
            self.corpus.train,
            self.batch_size,
            self.block_size,
            seed=0,
            step=self.steps_done,
            rank=self.site,
        )
        self.optimizer.zero_grad()
        loss: torch.Tensor = self.model(*batch)  # at the end of a period, waits for the other sites
        loss.backward()
        self.optimizer.step()
        self.steps_done += 1
        return loss.item()


def train(args: argparse.Namespace) -> None:
    """Train until ``args.steps``, which all sites reach together."""
    trainer = Trainer(args)
    while trainer.steps_done < args.steps:
        loss = trainer.step()
        if trainer.steps_done % args.print_every == 0:
            sites = trainer.manager.num_participants()
            print(f"step {trainer.steps_done}: {sites} sites, loss {loss:.3f}", flush=True)
    handle = commhooks.handle_of(trainer.model)
    assert handle is not None
    print(handle.stats())
    trainer.manager.shutdown(wait=False)


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--site", type=int, required=True, help="number of this site")
    parser.add_argument(
        "--lighthouse", default=os.environ.get("TORCHFT_LIGHTHOUSE", "http://localhost:29510")
    )
    parser.add_argument("--steps", type=positive_int, default=200)
    parser.add_argument("--print-every", type=positive_int, default=10)
    parser.add_argument(
        "--hook-option",
        type=hook_option,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an option of the hook `diloco`, such as period=50 or inner=int8",
    )
    parser.add_argument("--batch-size", type=positive_int, default=8)
    parser.add_argument("--layers", type=positive_int, default=2)
    parser.add_argument("--heads", type=positive_int, default=4)
    parser.add_argument("--width", type=positive_int, default=64)
    parser.add_argument("--block-size", type=positive_int, default=64)
    return parser


if __name__ == "__main__":
    train(make_parser().parse_args())
