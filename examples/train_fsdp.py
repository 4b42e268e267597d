"""Train a small GPT, sharded within each site and replicated between sites, with a hook in between.

    torchrun --standalone --nproc-per-node 4 examples/train_fsdp.py \
        --replicas 2 --hook powersgd --hook-option rank=8 --checkpoint-dir checkpoints

`fully_shard` splits the parameters among the ranks of a site. The sites exchange gradients with
`commhooks.register(model, hook)`, and nothing else: that is the exchange over the slow link. With
`--quantize int8`, the ranks of a site send fewer bytes for gradients, and with
`--quantize-weights int8` for parameters. With `--resume`, an interrupted run continues as if it had
not been interrupted, because each rank saves the state of its hook.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from gpt import GPT, GPTConfig
from stdlib_text import load_corpus, train_batch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from train_config import hook_option, positive_int

import commhooks
from commhooks.integrations.fsdp import quantize_all_gather, quantize_reduce_scatter


class Trainer:
    """A training run: step, save, restore."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        shards = dist.get_world_size() // args.replicas
        mesh = init_device_mesh(
            self.device.type, (args.replicas, shards), mesh_dim_names=("replicate", "shard")
        )
        torch.manual_seed(0)
        config = GPTConfig(args.layers, args.heads, args.width, args.block_size)
        self.model: Any = GPT(config).to(self.device)
        for block in self.model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.hook = commhooks.register(self.model, args.hook, **dict(args.hook_option))
        if args.quantize:
            quantize_reduce_scatter(self.model, args.quantize)
        if args.quantize_weights:
            quantize_all_gather(self.model, args.quantize_weights)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.corpus = load_corpus(min_bytes=args.block_size + 1)
        self.batch_size, self.block_size = args.batch_size, args.block_size
        self.steps_done = 0

    def step(self) -> float:
        """Train on one batch. Return the mean loss of all ranks, in nats per byte."""
        batch = train_batch(
            self.corpus.train,
            self.batch_size,
            self.block_size,
            seed=0,
            step=self.steps_done,
            rank=dist.get_rank(),
        )
        loss = self.model(*(tensor.to(self.device) for tensor in batch))
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps_done += 1
        mean = loss.detach() / dist.get_world_size()
        dist.all_reduce(mean)
        return float(mean)

    def save(self, folder: Path) -> None:
        """Write a checkpoint, which gets its name when it is complete."""
        final, partial = folder / f"step-{self.steps_done:08d}", folder / "partial"
        if dist.get_rank() == 0:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        dist.barrier()
        model, optimizer = get_state_dict(self.model, self.optimizer)
        dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=partial)
        torch.save(self.hook.state_dict(), partial / f"hook-{dist.get_rank()}.pt")
        dist.barrier()
        if dist.get_rank() == 0:
            partial.rename(final)
        dist.barrier()

    def restore(self, folder: Path) -> None:
        """Continue from the newest checkpoint, or start if there is none."""
        found = sorted(folder.glob("step-*"))
        if not found:
            return
        model, optimizer = get_state_dict(self.model, self.optimizer)
        state = {"model": model, "optimizer": optimizer}
        dcp.load(state, checkpoint_id=found[-1])
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        path = found[-1] / f"hook-{dist.get_rank()}.pt"
        self.hook.load_state_dict(torch.load(path, map_location="cpu"))
        self.steps_done = int(found[-1].name.removeprefix("step-"))


def parse_args() -> argparse.Namespace:
    """Return the arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--replicas", type=positive_int, default=2, help="how many sites")
    parser.add_argument("--hook", default="int8", help="what exchanges gradients between sites")
    parser.add_argument("--hook-option", type=hook_option, action="append", default=[])
    parser.add_argument("--quantize", help="numbers of the reduce-scatter within a site")
    parser.add_argument("--quantize-weights", help="numbers of the all-gather within a site")
    for name, default in (("layers", 2), ("heads", 2), ("width", 64), ("block-size", 64)):
        parser.add_argument(f"--{name}", type=positive_int, default=default)
    parser.add_argument("--batch-size", type=positive_int, default=4, help="per rank")
    parser.add_argument("--steps", type=positive_int, default=20)
    parser.add_argument("--checkpoint-dir", type=Path)
    parser.add_argument("--checkpoint-every", type=positive_int, default=10)
    parser.add_argument("--resume", action="store_true")
    return parser.parse_args()


def main() -> None:
    """Train from the newest checkpoint, or from the start, to the last step."""
    args = parse_args()
    dist.init_process_group()
    trainer = Trainer(args)
    if args.checkpoint_dir:
        if args.resume:
            trainer.restore(args.checkpoint_dir)
        elif any(args.checkpoint_dir.glob("step-*")):
            sys.exit(f"{args.checkpoint_dir} holds another run; continue it with --resume")
    while trainer.steps_done < args.steps:
        loss = trainer.step()
        if dist.get_rank() == 0:
            print(f"step {trainer.steps_done}: loss {loss:.6f}", flush=True)
        if args.checkpoint_dir and trainer.steps_done % args.checkpoint_every == 0:
            trainer.save(args.checkpoint_dir)
    if dist.get_rank() == 0:
        print(trainer.hook.stats())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
