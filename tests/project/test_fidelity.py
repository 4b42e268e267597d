"""The fidelity of each hook that the package shows agrees with the stored runs."""

import json
from pathlib import Path

import pytest

pytest.importorskip("sklearn")

from bench.fidelity.published import PACKAGED, figures
from bench.fidelity.record import Record, Run
from bench.fidelity.rows import row_of, rows
from bench.fidelity.tasks import ALL_TASKS, TASKS
from bench.fidelity.trained_hooks import REFERENCE, TrainedHook

STORED = max((Path(__file__).parents[2] / "bench" / "results").glob("*-fidelity.json"))
HOWTO = f"python -m bench.fidelity bench/results/{STORED.name} --publish"


def test_the_package_says_what_was_measured() -> None:
    """At the present defaults: a hook whose defaults have changed must be run again, or go."""
    assert json.loads(PACKAGED.read_text()) == figures(Record.load(STORED)), HOWTO


def record_of(*runs: Run) -> Record:
    record = Record({"about": {}, "runs": []})
    for run in runs:
        record.add(run)
    return record


def run_of(hook: str, task: str, seed: int, loss: float, **config: object) -> Run:
    made = TrainedHook(hook).create().to_config() | config
    return Run(task, hook, made, ALL_TASKS[task].usual, seed, loss, accuracy=None, wire_bytes=10.0)


def test_each_seed_is_compared_with_plain_averaging_on_it() -> None:
    plain = [run_of(REFERENCE, task, seed, 1.0 + seed) for task in TASKS for seed in (0, 1)]
    tried = [run_of("bf16", task, seed, 1.1 * (1.0 + seed)) for task in TASKS for seed in (0, 1, 2)]
    record = record_of(*plain, *tried)
    (row,) = rows(record, "digits")
    assert row.changes == pytest.approx([0.1, 0.1])
    assert not row.is_within
    assert figures(record) == {"bf16": {"digits": 10.0, "bytes": 10.0, "seeds": 2}}


def test_runs_with_other_options_do_not_count() -> None:
    plain = [run_of(REFERENCE, task, 0, 1.0) for task in TASKS]
    other = [run_of("int8", task, 0, 1.0, block_size=64) for task in TASKS]
    assert figures(record_of(*plain, *other)) == {}


def test_runs_from_before_an_option_existed_count(tmp_path: Path) -> None:
    runs = [run_of(hook, task, 0, 1.0) for task in TASKS for hook in (REFERENCE, "int8")]
    for run in runs:
        run.config.pop("block_size", None)
    path = tmp_path / "runs.json"
    record_of(*runs).save(path)
    assert figures(Record.load(path)).keys() == {"int8"}


def test_runs_with_other_options_are_kept_beside_each_other() -> None:
    plain = run_of(REFERENCE, "clusters", 0, 1.0)
    losses = {32: 1.1, 64: 1.2}
    tried = [run_of("int8", "clusters", 0, losses[size], block_size=size) for size in losses]
    record = record_of(plain, *tried)
    for size, loss in losses.items():
        row = row_of(record, "clusters", TrainedHook("int8", {"block_size": size}))
        assert row is not None
        assert row.change == pytest.approx(loss - 1)
    assert row_of(record, "clusters", TrainedHook("int8")) is None


def test_a_hook_that_was_run_on_one_task_only_has_no_figures() -> None:
    runs = [run_of(hook, "digits", 0, 1.0) for hook in (REFERENCE, "bf16")]
    assert figures(record_of(*runs)) == {}


def test_a_record_is_continued(tmp_path: Path) -> None:
    path = tmp_path / "runs.json"
    record_of(run_of("bf16", "digits", 0, 1.0)).save(path)
    record = Record.load(path)
    record.add(run_of("bf16", "digits", 1, 2.0))
    record.save(path)
    config = TrainedHook("bf16").create().to_config()
    losses = [
        run.loss for run in Record.load(path).runs("digits", "bf16", config, TASKS["digits"].usual)
    ]
    assert losses == [1.0, 2.0]
