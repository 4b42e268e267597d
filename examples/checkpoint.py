"""Checkpoints that are either complete or do not exist.

A checkpoint is a folder ``step-00000200`` with ``shared.pt`` (equal on all ranks),
``rank-00000.pt``, ``rank-00001.pt``, ... (different on each rank) and ``about.json``. It is written
under another name, and renamed when all ranks have flushed their files to disk. A run that is
killed meanwhile leaves the previous checkpoint intact. All ranks must see the same folder.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist


class CheckpointError(RuntimeError):
    """The checkpoint does not belong to this run, or cannot be read."""


@dataclass(frozen=True)
class Checkpoint:
    """The content of a checkpoint, for this rank.

    ``about`` is small, JSON-able and describes the run; the others are what ``torch.load`` with
    ``weights_only=True`` accepts.
    """

    step: int
    about: dict[str, Any]
    shared: dict[str, Any]
    own: dict[str, Any]


def save(folder: Path, checkpoint: Checkpoint, *, keep: int) -> None:
    """Write a checkpoint and remove all but the ``keep`` newest. Call it on every rank."""
    rank = dist.get_rank()
    final = folder / f"step-{checkpoint.step:08d}"
    partial = folder / f"partial-{checkpoint.step:08d}"
    if rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier()
    if rank == 0:
        _save_file(checkpoint.shared, partial / "shared.pt")
        about = {"step": checkpoint.step, "world_size": dist.get_world_size(), **checkpoint.about}
        with (partial / "about.json").open("w") as file:
            file.write(json.dumps(about, indent=2) + "\n")
            _flush(file)
    _save_file(checkpoint.own, partial / f"rank-{rank:05d}.pt")
    dist.barrier()
    if rank == 0:
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
        _flush_folder(folder)
        for old in find_all(folder)[:-keep]:
            shutil.rmtree(old)


def find_all(folder: Path) -> list[Path]:
    """Return the complete checkpoints in ``folder``, oldest first."""
    return sorted(path for path in folder.glob("step-*") if path.is_dir())


def load(path: Path, about: dict[str, Any]) -> Checkpoint:
    """Read this rank's part of the checkpoint at ``path``.

    Call it on every rank: a failure on one rank is raised on all.

    Raises:
        CheckpointError: another run wrote it (see ``about``), or another number of ranks, or it is
            damaged.

    """
    result = _load(path, {"world_size": dist.get_world_size(), **about})
    errors: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, result if isinstance(result, str) else None)
    for rank, error in enumerate(errors):
        if error is not None:
            raise CheckpointError(f"rank {rank} cannot resume from checkpoint {path}: {error}")
    assert isinstance(result, Checkpoint)
    return result


def _load(path: Path, expected: dict[str, Any]) -> Checkpoint | str:
    """Return the checkpoint, or what is wrong with it."""
    try:
        about = json.loads((path / "about.json").read_text())
        difference = _first_difference(expected, about)
        if difference is not None:
            return difference
        shared = torch.load(path / "shared.pt", map_location="cpu", weights_only=True)
        name = f"rank-{dist.get_rank():05d}.pt"
        own = torch.load(path / name, map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load raises many kinds for a damaged file
        return f"{type(error).__name__}: {error}"
    return Checkpoint(int(about["step"]), about, shared, own)


def _first_difference(expected: dict[str, Any], found: dict[str, Any]) -> str | None:
    for key, value in expected.items():
        other = found.get(key)
        if isinstance(value, dict) and isinstance(other, dict):
            difference = _first_difference(value, other)
            if difference is not None:
                return difference
        elif other != value:
            return (
                f"it was written with {key} = {other!r}, this run has {value!r}; "
                "use the same, or another --checkpoint-dir"
            )
    return None


def _save_file(content: dict[str, Any], path: Path) -> None:
    with path.open("wb") as file:
        torch.save(content, file)
        _flush(file)


def _flush(file: IO[Any]) -> None:
    file.flush()
    os.fsync(file.fileno())


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
