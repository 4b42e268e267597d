"""Train a small byte-level GPT with any communication hook, on any number of ranks.

    torchrun --standalone --nproc-per-node 2 examples/train_gpt.py \
        --hook powersgd --hook-option rank=8 --log-file log.jsonl --checkpoint-dir checkpoints

Two lines differ from a script for torch's own DDP: the import of ``DistributedDataParallel`` and
``commhooks.register``. Where torch finds GPUs, each rank takes one. With ``--resume``, an
interrupted run continues exactly as if it had not been interrupted: the checkpoint has the weights,
the optimizer, the random numbers, the position in the data, and the state of the hook. ``torchrun
--max-restarts 2`` then continues by itself when a rank dies.
"""

from __future__ import annotations

import math
import os
import time
from dataclasses import asdict, dataclass
from typing import Any

import checkpoint
import torch
import torch.distributed as dist
from gpt import GPT
from run_log import RunLog
from stdlib_text import load_corpus, train_batch, validation_batches
from torch import nn
from train_config import RunConfig, TrainConfig, make_parser, parse_args

import commhooks


@dataclass
class Traffic:
    """Sums over the whole run on this rank; None if a hook's traffic is not known."""

    gradient_bytes: int = 0
    wire_bytes: int | None = 0
    exposed_seconds: float | None = 0.0

    def plus(self, stats: commhooks.HookStats) -> Traffic:
        """Add the steps that ``stats`` has seen."""
        total = stats.total
        return Traffic(
            self.gradient_bytes + round(total.gradient_bytes * stats.steps),
            None
            if self.wire_bytes is None or total.wire_bytes is None
            else self.wire_bytes + round(total.wire_bytes * stats.steps),
            None
            if self.exposed_seconds is None or total.exposed_seconds is None
            else self.exposed_seconds + total.exposed_seconds * stats.steps,
        )


class Trainer:
    """A training run: step, evaluate, save, restore."""

    def __init__(self, config: TrainConfig, run: RunConfig, device: torch.device) -> None:
        self.config = config
        self.device = device
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.corpus = load_corpus(min_bytes=config.block_size + 1)
        self.validation = validation_batches(
            self.corpus.validation,
            config.batch_size * 4,  # no gradients to keep, so larger batches fit
            config.block_size,
            run.evaluate_batches,
            rank=self.rank,
            world_size=self.world_size,
        )
        torch.manual_seed(config.seed)
        self.model = GPT(config.model).to(device)
        # Stable buckets: a resumed run has the same buckets from its first step on. It therefore
        # adds numbers in the same order, and gets the same bits.
        self.ddp = commhooks.DistributedDataParallel(
            self.model,
            bucket_cap_mb=config.bucket_mb,
            gradient_as_bucket_view=True,
            stable_buckets=True,
        )
        self.hook = commhooks.register(self.ddp, config.hook)
        self.optimizer = make_optimizer(self.model, config)
        self.steps_done = 0
        self.traffic_before = Traffic()  # in the runs that this one resumes
        torch.manual_seed(config.seed + 1 + self.rank)  # dropout differs between ranks

    def step(self) -> float:
        """Train on one batch. Return this rank's loss in nats per byte."""
        config = self.config
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(config, self.steps_done)
        inputs, targets = train_batch(
            self.corpus.train,
            config.batch_size,
            config.block_size,
            seed=config.seed,
            step=self.steps_done,
            rank=self.rank,
        )
        self.optimizer.zero_grad()
        loss = self.ddp(inputs.to(self.device), targets.to(self.device))
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), config.clip_norm)
        self.optimizer.step()
        self.steps_done += 1
        return float(loss.detach())

    @torch.no_grad()
    def evaluate(self) -> float:
        """Return the mean validation loss over all ranks, in nats per byte."""
        self.model.eval()
        losses = [
            float(self.model(inputs.to(self.device), targets.to(self.device)))
            for inputs, targets in self.validation
        ]
        self.model.train()
        total = torch.tensor(
            [math.fsum(losses), len(losses)], dtype=torch.float64, device=self.device
        )
        dist.all_reduce(total)
        return float(total[0] / total[1])

    def traffic(self) -> Traffic:
        """Return what was sent so far, including earlier parts of a resumed run."""
        return self.traffic_before.plus(self.hook.stats())

    def generator(self) -> torch.Generator:
        """Return the random numbers of the device, from which dropout takes its own."""
        if self.device.type == "cuda":
            return torch.cuda.default_generators[torch.cuda.current_device()]
        return torch.default_generator

    def about(self) -> dict[str, Any]:
        """Return what must be equal so that a run can continue another one."""
        return {"config": self.config.to_json(), "corpus": self.corpus.digest}

    def save(self, run: RunConfig) -> None:
        """Write a checkpoint."""
        assert run.checkpoint_dir is not None
        shared = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        own = {
            "hook": self.hook.state_dict(),  # each rank has its own error feedback
            "random": self.generator().get_state(),
            "traffic": asdict(self.traffic()),
        }
        saved = checkpoint.Checkpoint(self.steps_done, self.about(), shared, own)
        checkpoint.save(run.checkpoint_dir, saved, keep=run.checkpoint_keep)

    def restore(self, run: RunConfig) -> None:
        """Continue from the newest checkpoint, or start if there is none."""
        assert run.checkpoint_dir is not None
        found = checkpoint.find_all(run.checkpoint_dir)
        if found and not run.resume:
            raise checkpoint.CheckpointError(
                f"{run.checkpoint_dir} holds checkpoints of another run; continue it with --resume "
                "or choose another --checkpoint-dir"
            )
        if found:
            saved = checkpoint.load(found[-1], self.about())
            self.model.load_state_dict(saved.shared["model"])
            self.optimizer.load_state_dict(saved.shared["optimizer"])
            self.hook.load_state_dict(saved.own["hook"])
            self.traffic_before = Traffic(**saved.own["traffic"])
            self.steps_done = saved.step
            self.generator().set_state(saved.own["random"])


def make_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """Return AdamW with weight decay for matrices, but not for biases and norms."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=(0.9, 0.95))


def learning_rate(config: TrainConfig, step: int) -> float:
    """Return the learning rate: linear warm-up, then a cosine to a tenth of the peak."""
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    progress = (step - config.warmup_steps) / max(1, config.steps - config.warmup_steps)
    return config.learning_rate * (0.55 + 0.45 * math.cos(math.pi * progress))


def train(config: TrainConfig, run: RunConfig, device: torch.device) -> None:
    """Train from the newest checkpoint, or from the start, to the last step."""
    trainer = Trainer(config, run, device)
    if run.checkpoint_dir is not None:
        trainer.restore(run)
    tokens = config.batch_size * config.block_size * trainer.world_size  # per step, all ranks
    with RunLog(config.hook["name"], config.steps, run.log_file, enabled=trainer.rank == 0) as log:
        if trainer.steps_done:
            log.say(f"resumed after step {trainer.steps_done}")
        parameters = sum(p.numel() for p in trainer.model.parameters())
        about = {"world_size": trainer.world_size, "parameters": parameters, **trainer.about()}
        log.start(trainer.steps_done, about)
        while trainer.steps_done < config.steps:
            started = time.perf_counter()
            loss = trainer.step()
            seconds = time.perf_counter() - started
            step = trainer.steps_done
            traffic = asdict(trainer.traffic())
            log.step(
                {
                    "step": step,
                    "loss": loss,
                    "learning_rate": trainer.optimizer.param_groups[0]["lr"],
                    "seconds": seconds,
                    "tokens_per_second": tokens / seconds,
                    **traffic,
                }
            )
            last = step == config.steps
            if last or step % run.evaluate_every == 0:
                log.evaluation({"step": step, "loss": trainer.evaluate(), **traffic})
            if run.checkpoint_dir is not None and (last or step % run.checkpoint_every == 0):
                trainer.save(run)


def start_process_group() -> torch.device:
    """Join the ranks that torchrun started, or use one rank. Return this rank's device."""
    backend, device = "gloo", torch.device("cpu")
    if torch.cuda.is_available():
        backend, device = "nccl", torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if "RANK" in os.environ:
        # `torchrun --standalone` keeps the store when it starts the ranks again. Without a prefix,
        # Gloo finds the addresses of ranks that have died in it.
        store, rank, size = next(dist.rendezvous("env://"))
        store = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return device


def main() -> None:
    """Run from the command line."""
    parser = make_parser()
    config, run = parse_args(parser)
    try:
        commhooks.create(config.hook)  # fail early on an unknown name or a bad option
        device = start_process_group()
        try:
            train(config, run, device)
        finally:
            dist.destroy_process_group()
    except (commhooks.UnknownHookError, commhooks.CommHookOptionError) as error:
        parser.error(str(error))
    except checkpoint.CheckpointError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
