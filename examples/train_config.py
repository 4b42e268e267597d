"""The options of train_gpt.py: two dataclasses, and the command line derived from them."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, NoReturn

from gpt import GPTConfig


def positive_int(text: str) -> int:
    """Parse an integer of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected an integer of at least 1, found {text}")
    return value


def non_negative(text: str) -> float:
    """Parse a finite number of at least 0."""
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number of at least 0, found {text}")
    return value


def positive(text: str) -> float:
    """Parse a finite number above 0."""
    value = non_negative(text)
    if value == 0:
        raise argparse.ArgumentTypeError(f"expected a number above 0, found {text}")
    return value


def option(default: Any, parse: Callable[[str], Any], text: str) -> Any:
    """Declare a dataclass field that is also a command-line option."""
    return field(default=default, metadata={"parse": parse, "help": text})


@dataclass(frozen=True)
class TrainConfig:
    """Everything that determines the numbers of a run; it must be equal when a run resumes."""

    hook: dict[str, Any] = field(default_factory=lambda: {"name": "allreduce"})
    steps: int = option(500, positive_int, "optimizer steps")
    batch_size: int = option(8, positive_int, "sequences per rank and step")
    block_size: int = option(64, positive_int, "bytes per sequence")
    layers: int = option(4, positive_int, "transformer blocks")
    heads: int = option(4, positive_int, "attention heads")
    width: int = option(128, positive_int, "channels of the residual stream")
    dropout: float = option(0.0, non_negative, "dropout probability")
    learning_rate: float = option(4e-3, non_negative, "peak learning rate of AdamW")
    warmup_steps: int = option(60, positive_int, "steps of linear warm-up before the cosine decay")
    weight_decay: float = option(0.1, non_negative, "weight decay of matrices")
    clip_norm: float = option(1.0, non_negative, "largest norm of the averaged gradient")
    bucket_mb: float = option(25.0, positive, "size limit of a gradient bucket in MiB")
    seed: int = option(0, int, "seed of the weights and of the batches")

    @property
    def model(self) -> GPTConfig:
        """Return the configuration of the model."""
        return GPTConfig(self.layers, self.heads, self.width, self.block_size, self.dropout)

    def to_json(self) -> dict[str, Any]:
        """Return the config as JSON types."""
        config: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return config


@dataclass(frozen=True)
class RunConfig:
    """Where and how often a run writes its records; may change when it resumes."""

    evaluate_every: int = option(100, positive_int, "steps between validations")
    evaluate_batches: int = option(16, positive_int, "validation batches, over all ranks together")
    log_file: Path | None = field(
        default=None, metadata={"parse": Path, "help": "JSON-lines file, a line per step"}
    )
    checkpoint_dir: Path | None = field(
        default=None, metadata={"parse": Path, "help": "folder of checkpoints"}
    )
    checkpoint_every: int = option(200, positive_int, "steps between checkpoints")
    checkpoint_keep: int = option(2, positive_int, "newest checkpoints to keep")
    resume: bool = False


class Parser(argparse.ArgumentParser):
    """An argument parser that prints on rank 0 only."""

    def error(self, message: str) -> NoReturn:
        """Print the error once, and exit on every rank with status 2."""
        if int(os.environ.get("RANK", "0")) != 0:
            # The launcher stops all ranks when the first one exits. Let rank 0 exit first, so that
            # it can print.
            time.sleep(5)
            sys.exit(2)
        super().error(message)

    def print_help(self, file: Any = None) -> None:
        """Print the help text on rank 0."""
        if int(os.environ.get("RANK", "0")) == 0:
            super().print_help(file)


def make_parser() -> Parser:
    """Return the parser, with one option per field of the two dataclasses."""
    parser = Parser(
        usage="train_gpt.py [--hook NAME [--hook-option KEY=VALUE ...]] [options]; see --help",
        description="Train a small byte-level GPT on the source code of Python's standard library.",
        epilog="Run it on N ranks: torchrun --standalone --nproc-per-node N examples/train_gpt.py",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--hook", default="allreduce", metavar="NAME", help="communication hook")
    parser.add_argument(
        "--hook-option",
        action="append",
        default=[],
        type=hook_option,
        metavar="KEY=VALUE",
        help="an option of the hook; the value is JSON, or else a string; may be repeated",
    )
    parser.add_argument(
        "--resume", action="store_true", help="continue from the newest checkpoint, if there is one"
    )
    for spec in (*fields(TrainConfig), *fields(RunConfig)):
        if "parse" in spec.metadata:
            parser.add_argument(
                "--" + spec.name.replace("_", "-"),
                type=spec.metadata["parse"],
                default=spec.default,
                metavar=spec.name.rpartition("_")[2].upper(),
                help=spec.metadata["help"],
            )
    return parser


def parse_args(parser: Parser, argv: Sequence[str] | None = None) -> tuple[TrainConfig, RunConfig]:
    """Parse the command line; print a message and exit if it is wrong."""
    args = vars(parser.parse_args(argv))
    hook = {"name": args.pop("hook"), **dict(args.pop("hook_option"))}
    run = RunConfig(**{spec.name: args.pop(spec.name) for spec in fields(RunConfig)})
    config = TrainConfig(hook=hook, **args)
    try:
        _ = config.model
    except ValueError as error:
        parser.error(str(error))
    if run.resume and run.checkpoint_dir is None:
        parser.error("--resume needs --checkpoint-dir")
    return config, run


def hook_option(text: str) -> tuple[str, Any]:
    """Split ``key=value``; the value is JSON if it parses, and a string otherwise."""
    key, equals, value = text.partition("=")
    if not (equals and key.isidentifier()):
        raise argparse.ArgumentTypeError(f"expected KEY=VALUE, found {text!r}")
    try:
        return key, json.loads(value)
    except json.JSONDecodeError:
        return key, value
