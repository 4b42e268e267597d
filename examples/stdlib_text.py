"""Text that every machine with Python has: the source code of the standard library.

A file belongs to the training or the validation text by a hash of its relative path, so the split
is the same on every rank and in every run. Batches are a pure function of (seed, step, rank), so
the step number *is* the position in the data, and a resumed run continues where it stopped.
"""

from __future__ import annotations

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

VALIDATION_SHARE = 0.1

# Skip installed packages, generated tables, and test data in unusual encodings.
SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests"})
SKIPPED_FOLDERS |= {"idle_test", "encodings", "pydoc_data"}


@dataclass(frozen=True)
class Corpus:
    """Two texts as 1-D uint8 tensors, and a digest that identifies them."""

    train: Tensor
    validation: Tensor
    digest: str


def load_corpus(root: Path | None = None, min_bytes: int = 1) -> Corpus:
    """Read every ``*.py`` file under ``root`` (default: this Python's standard library).

    Raises:
        ValueError: either text is shorter than ``min_bytes``.

    """
    root = root or Path(sysconfig.get_path("stdlib"))
    texts: dict[bool, list[bytes]] = {True: [], False: []}
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if SKIPPED_FOLDERS.isdisjoint(relative.parts):
            texts[_is_validation(relative)].append(path.read_bytes())
    train, validation = b"".join(texts[False]), b"".join(texts[True])
    if min(len(train), len(validation)) < min_bytes:
        raise ValueError(
            f"expected at least {min_bytes} bytes of training and of validation text in the *.py "
            f"files of {root}, found {len(train)} and {len(validation)}"
        )
    digest = hashlib.sha256(train + validation).hexdigest()
    return Corpus(_as_tensor(train), _as_tensor(validation), digest)


def train_batch(
    text: Tensor, batch_size: int, block_size: int, *, seed: int, step: int, rank: int
) -> tuple[Tensor, Tensor]:
    """Return random windows of the text as inputs and targets, both int64 (batch, block)."""
    generator = np.random.default_rng((seed, step, rank))
    starts = generator.integers(0, len(text) - block_size, size=batch_size)
    return _windows(text, torch.from_numpy(starts), block_size)


def validation_batches(
    text: Tensor, batch_size: int, block_size: int, count: int, *, rank: int, world_size: int
) -> list[tuple[Tensor, Tensor]]:
    """Return this rank's share of ``count`` batches, the same windows for any number of ranks.

    The windows are spread evenly over the text. A rank may get an empty list.
    """
    starts = torch.linspace(0, len(text) - block_size - 1, count * batch_size).long()
    batches = starts.view(count, batch_size)[rank::world_size]
    return [_windows(text, batch, block_size) for batch in batches]


def _windows(text: Tensor, starts: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    window = text[starts[:, None] + torch.arange(block_size + 1)].long()
    return window[:, :-1], window[:, 1:]


def _is_validation(relative: Path) -> bool:
    digest = hashlib.sha256(relative.as_posix().encode()).digest()
    return int.from_bytes(digest[:4], "big") < VALIDATION_SHARE * 2**32


def _as_tensor(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)
