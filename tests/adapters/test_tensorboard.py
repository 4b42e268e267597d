"""Statistics in TensorBoard's event files, read back; and the error where it is missing."""

import builtins
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import commhooks

MODULE = "commhooks.integrations.tensorboard"


def log(rank: int, size: int, folder: str) -> dict[str, float]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TensorBoard's own
        from torch.utils.tensorboard import SummaryWriter

        from commhooks.integrations.tensorboard import log_stats
    model = commhooks.DistributedDataParallel(nn.Linear(10, 10, bias=False))
    handle = commhooks.register(model, "skip_nonfinite", inner="bf16")
    with SummaryWriter(f"{folder}/{rank}") as writer:
        for step in range(3):
            model(torch.ones(1, 10)).sum().backward()
            log_stats(writer, handle, step, per_bucket=True)
        config = {"name": "guard", "inner": "int4", "max_error": 1e-9, "every": 1}
        nested = {"name": "schedule", "stages": [[0, config]]}
        for prefix, hook in (("guard", config), ("nested", nested)):
            guarded = commhooks.DistributedDataParallel(nn.Linear(10, 10, bias=False))
            guard = commhooks.register(guarded, hook)
            for step in range(3):
                guarded(torch.arange(10.0) + rank).square().sum().backward()
                log_stats(writer, guard, step, prefix=prefix)
            guard.replace(hook)  # the new one will have as many notes
            for _ in range(3):
                guarded(torch.arange(10.0) + rank).square().sum().backward()
            log_stats(writer, guard, 5, prefix=prefix)
    total = handle.stats().total
    return {"hook_seconds": total.hook_seconds, "wire_bytes": total.wire_bytes or 0.0}


def test_written_and_read_back(run_ranks: Any, tmp_path: Path) -> None:
    expected = run_ranks(log, 2, str(tmp_path))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    for rank, values in enumerate(expected):
        events = EventAccumulator(str(tmp_path / str(rank)))
        events.Reload()
        tags = events.Tags()["scalars"]
        assert "commhooks/metrics/skipped_steps" in tags
        for where in ("commhooks", "commhooks/bucket 0"):
            assert [e.value for e in events.Scalars(f"{where}/gradient_bytes")] == [400.0] * 3
            for name, value in values.items():
                scalars = events.Scalars(f"{where}/{name}")
                assert [e.step for e in scalars] == [0, 1, 2]
                assert scalars[-1].value == pytest.approx(value)

        tags = [f"{prefix}/notes/text_summary" for prefix in ("guard", "nested")]
        assert sorted(events.Tags()["tensors"]) == tags
        for tag in tags:
            notes = events.Tensors(tag)
            assert [note.step for note in notes] == [1, 4]
            for note in notes:
                (text,) = note.tensor_proto.string_val
                assert b"exceeds 1e-09; use allreduce" in text


def test_notes_of_steps_that_are_repeated() -> None:
    """After an earlier state was loaded, a new note may have a smaller step than former ones."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from commhooks.integrations.tensorboard import _write_notes

    class Writer:
        def __init__(self) -> None:
            self.texts: list[str] = []

        def add_text(self, _tag: str, text: str, _step: int) -> None:
            self.texts.append(text)

    hook, writer = commhooks.create("guard", inner="int4", max_error=0.1), Writer()
    for notes in ([(3, "a"), (5, "b")], [(3, "a"), (5, "b"), (4, "c")]):
        hook._notes = notes  # type: ignore[attr-defined]
        _write_notes(writer, hook, "prefix")  # type: ignore[arg-type]
    assert writer.texts == ["a", "b", "c"]


def test_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def refuse(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith(("tensorboard", "torch.utils.tensorboard")):
            raise ModuleNotFoundError(f"No module named {name!r}")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    with pytest.raises(ImportError, match=r"pip install 'commhooks\[tensorboard\]'"):
        __import__(MODULE)
