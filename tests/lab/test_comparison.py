"""Comparisons: figures that are known beforehand, and their texts."""

import csv
import io
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from support import my_hooks
from support.compared import PARAMETERS, net, train
from support.comparisons import make_comparison
from support.links import needs_links
from support.my_hooks import Coarse, Unnamed
from support.small_models import partly
from torch import nn

from commhooks import CommHookError
from commhooks.cluster import LaunchedRanks
from commhooks.comm.wire import all_reduce_bytes
from commhooks.lab.comparison import (
    Comparison,
    ComparisonError,
    compare,
)
from commhooks.lab.comparison.entry import BARE, TORCH, Entry
from commhooks.lab.comparison.experiment import Setting, timing_tasks
from commhooks.lab.comparison.hosts import pairs_of_hosts
from commhooks.lab.comparison.rank_side import Block, StepTimes
from commhooks.lab.simulation import BreakEvenRates, Study

GRADIENT_BYTES = 4 * PARAMETERS


HOOKS = ["allreduce", "bf16", "powersgd:rank=2", "local_sgd:period=4"]


def small_net() -> torch.nn.Module:
    return net()


@pytest.fixture(scope="module")
def comparison() -> Comparison:
    return compare(
        "support.compared:net",
        HOOKS,
        train="support.compared:train",
        links=[1e9, 1e6],
        measure_links=False,
        steps=4,
        train_steps=25,
    )


def test_every_entry_has_a_row_on_every_link(comparison: Comparison) -> None:
    assert comparison.hooks == ["bare", "torch", *HOOKS]
    assert comparison.links == ["loopback", "1 Gbit/s", "1 Mbit/s"]
    assert len(comparison.rows) == 6 * 3


def test_bytes(comparison: Comparison) -> None:
    plain = all_reduce_bytes(GRADIENT_BYTES, 2)
    assert comparison.row("bare").wire_bytes == 0
    assert comparison.row("bare").ratio is None
    for name, ratio in (("torch", 1.0), ("allreduce", 1.0), ("bf16", 2.0)):
        row = comparison.row(name)
        assert row.gradient_bytes == GRADIENT_BYTES
        assert row.wire_bytes == plain / ratio
        assert row.ratio == ratio
    # One of the four steps averages the parameters.
    assert comparison.row("local_sgd:period=4").wire_bytes == plain / 4
    # It compresses, because it is late in training: rank-2 factors of both matrices, and biases.
    assert comparison.row("powersgd:rank=2").wire_bytes == 4 * (2 * 2 * (96 + 96) + 2 * 96)


def test_errors(comparison: Comparison) -> None:
    assert comparison.row("bare").error is None
    for name in ("torch", "allreduce"):
        error = comparison.row(name).error
        assert error is not None
        assert error < 1e-6
    lossy = comparison.row("bf16").error
    assert lossy is not None
    assert 1e-5 < lossy < 1e-2
    low_rank = comparison.row("powersgd:rank=2").error
    assert low_rank is not None
    assert 0.1 < low_rank < 1


def test_times_are_consistent(comparison: Comparison) -> None:
    for row in comparison.rows:
        torch = comparison.row("torch", row.link)
        assert row.step_seconds > 0
        assert row.to_torch == pytest.approx(row.step_seconds / torch.step_seconds)
        assert row.measured == (row.link == "loopback")
    slow = comparison.row("torch", "1 Mbit/s")
    assert slow.floor_seconds == pytest.approx(
        8 * GRADIENT_BYTES / 1e6 + comparison.row("bare").step_seconds
    )
    assert slow.step_seconds > 8 * GRADIENT_BYTES / 1e6
    # A link adds nothing to a model that sends nothing.
    bare = comparison.row("bare", "1 Mbit/s")
    assert bare.step_seconds == bare.predicted_seconds == comparison.row("bare").step_seconds
    assert comparison.row("bf16", "1 Mbit/s").to_torch == pytest.approx(0.5, abs=0.2)
    # Nothing is predicted over loopback, and no link is faster than loopback.
    for row in comparison.rows:
        loopback = comparison.row(row.hook)
        assert loopback.predicted_seconds is None
        assert row.predicted_seconds in (None, row.step_seconds)
        assert row.step_seconds >= loopback.step_seconds
        assert (row.break_even_bits_per_second is None) == (row.hook in ("bare", "torch"))


def test_steps_that_send_unequal_bytes_count_by_their_mean() -> None:
    """A median would ignore the one step in which such a hook sends."""
    uniform, periodic, alone = (1.0, 1.0, 1.0, 5.0), (1.0, 1.0, 1.0, 9.0), (0.5, 0.5, 0.5, 4.5)
    setting = Setting("loopback")
    for name, seconds, is_uniform in (
        ("bare", alone, True),
        ("int8", uniform, True),
        ("local_sgd", periodic, False),
    ):
        times = tuple(StepTimes(each, each / 2) for each in seconds)
        setting.blocks[name] = [Block(times, 8.0, is_uniform)] * 2
    found = {name: setting.figures(name) for name in setting.blocks}
    assert found["int8"] is not None
    assert found["int8"].step_seconds == 1.0
    assert found["int8"].exposed_seconds == 0.5
    periodically = found["local_sgd"]
    assert periodically is not None
    assert periodically.step_seconds == 3.0
    assert periodically.backward_seconds == 1.5
    assert periodically.exposed_seconds == 2.5


def test_memory(comparison: Comparison) -> None:
    peak = comparison.row("torch").peak_bytes
    if peak is None:
        pytest.skip("this system does not tell its peak")
    assert peak >= GRADIENT_BYTES


def test_training(comparison: Comparison) -> None:
    row = comparison.row("allreduce")
    assert [point.step for point in row.training] == [*range(2, 25, 2), 25]
    assert row.training[-1].wire_bytes == 25 * all_reduce_bytes(GRADIENT_BYTES, 2)
    assert row.validation_loss == row.training[-1].validation_loss
    assert row.training[-1].validation_loss < row.training[0].validation_loss
    # The mean is the same, so the losses are the same except for rounding.
    for ours, torchs in zip(row.training, comparison.row("torch").training, strict=True):
        assert ours.validation_loss == pytest.approx(torchs.validation_loss, rel=1e-3)
    assert comparison.row("bare").training == ()
    predicted = comparison.row("allreduce", "1 Mbit/s")
    assert predicted.training[-1].seconds == pytest.approx(25 * predicted.step_seconds)


def test_as_json(comparison: Comparison) -> None:
    text = json.dumps(comparison.to_dict(), allow_nan=False)
    found = json.loads(text)
    assert found["model"] == "support.compared:net"
    assert found["machine"]["torch"]
    assert [row["hook"] for row in found["rows"][:2]] == ["bare", "torch"]
    assert len(found["rows"][1]["training"]) == 13


def test_as_csv(comparison: Comparison) -> None:
    rows = list(csv.DictReader(io.StringIO(comparison.to_csv())))
    assert len(rows) == len(comparison.rows)
    assert float(rows[1]["wire_bytes"]) == all_reduce_bytes(GRADIENT_BYTES, 2)
    assert "training" not in rows[0]


def test_python_objects_are_compared_and_bf16_always_is() -> None:
    """Rank processes import the function, and the modules of the hooks."""
    hooks = [Coarse(step=2), Unnamed, {"name": "int8"}, ("powersgd", {"rank": 2})]
    found = compare(small_net, hooks, train=train, steps=2, train_steps=2)
    assert found.model == f"{__name__}:small_net"
    names = ["bf16", "coarse:step=2", "support.my_hooks:Unnamed", "int8", "powersgd:rank=2"]
    assert found.hooks == ["bare", "torch", *names]
    assert found.failures == ()
    assert found.row("support.my_hooks:Unnamed").error == pytest.approx(0, abs=1e-6)
    assert found.row("coarse:step=2").validation_loss is not None


@pytest.mark.exhaustive  # a script takes seconds to start
def test_the_hook_and_the_model_of_the_script_that_runs(tmp_path: Path) -> None:
    source = Path(my_hooks.__file__).read_text()
    source += """
import support.compared
from commhooks.lab.comparison import compare


if __name__ == "__main__":
    print(compare(support.compared.net, [Coarse(step=3), "__main__:Unnamed"], steps=2))
"""
    script = tmp_path / "a_script.py"
    script.write_text(source)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    text = subprocess.check_output([sys.executable, script], env=environment, text=True)
    for name in ("coarse:step=3", "__main__:Unnamed"):
        assert re.search(rf"^ +{name} +[0-9.]+ ±", text, re.M)


def test_as_text(comparison: Comparison) -> None:
    text = str(comparison)
    for name in (*comparison.hooks, *comparison.links):
        assert re.search(rf"^ *{re.escape(name)}\b", text, re.M)
    lines = text.splitlines()
    heads = next(line for line in lines if line.startswith("hook "))
    assert heads.split()[1:4] == ["step", "of", "torch"]
    assert re.search(r"^1 Mbit/s: (Use|No).*Hooks can save", text, re.M)
    assert " ± " in text


def test_a_comparison_with_little_in_it_has_a_text() -> None:
    full = make_comparison()
    only = [row for row in full.rows if row.hook == "bf16" and row.bits_per_second == 1e9]
    bare = dict.fromkeys(("step_spread_seconds", "ratio", "error", "peak_bytes"), None)
    row = replace(only[0], break_even_bits_per_second=None, training=(), **bare)
    found = replace(full, rows=(row,), pairs=(), notes=())
    assert "bf16" in str(found)
    assert found.verdicts() == {}
    assert "nothing was measured" in str(replace(found, rows=()))


def test_a_hook_may_be_faster_above_a_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Study, "break_even", lambda *_: BreakEvenRates(3e7, math.inf))

    def fail(*_: object) -> NoReturn:
        raise CommHookError("no network")

    # On the CPU no network is measured, because Gloo's own costs predict.
    monkeypatch.setattr("commhooks.lab.comparison.experiment.measure_pairs", fail)
    found = compare("support.compared:net", ["bf16"], steps=2)
    row = found.row("bf16")
    assert row.break_even_bits_per_second == math.inf
    assert row.break_even_above_bits_per_second == 3e7
    assert re.search(r"^bf16 .* above 30 Mbit/s *$", str(found), re.M)
    assert not any("predicted" in note for note in found.notes)


def test_verdicts_are_by_link_and_say_what_knowing_them_costs() -> None:
    found = replace(make_comparison(), measuring_seconds=60.0)
    verdicts = found.verdicts()
    assert list(verdicts) == ["loopback", "1000 Mbit/s", "100 Mbit/s"]
    # 0.1 s alone; torch adds 16 ms over loopback, 0.8 s and 8 s over links, bf16 half of it.
    assert "1.2 times as fast as torch DDP" in verdicts["loopback"]
    # Its trained loss is that of torch: it is recommended although small trainings lost more.
    assert verdicts["100 Mbit/s"].startswith("Use powersgd:rank=4,start_step=0, 22.8 times as fast")
    assert "a validation loss of +0.0 % here" in verdicts["100 Mbit/s"]
    assert "at most 4 s of a step, so the 60 s of measuring" in verdicts["100 Mbit/s"]
    noisy = [replace(row, step_spread_seconds=0.1) for row in found.rows]
    text = replace(found, rows=tuple(noisy)).verdicts()["loopback"]
    assert text.startswith("No hook helps: keep torch DDP.")
    assert "which may be noise." in text
    assert "No other hook can save time here; measuring took 60 s." in text
    untrained = replace(found, rows=tuple(replace(row, training=()) for row in found.rows))
    assert "unknown effect on the loss: train with it" in untrained.verdicts()["100 Mbit/s"]
    # A negative time has its noise beside it.
    rows = [
        replace(row, exposed_seconds=-0.001) if row.hook == "bf16" else row for row in found.rows
    ]
    assert "-1.0 ± 14.1 ms" in str(replace(found, rows=tuple(rows)))


def test_verdicts_of_negative_losses() -> None:
    """Of densities, for example: -1 is worse than -2."""
    found = make_comparison()
    rows = []
    for row in found.rows:
        loss = -2.0 if row.hook == "torch" else -1.0
        training = tuple(replace(point, validation_loss=loss) for point in row.training)
        rows.append(replace(row, training=training))
    text = replace(found, rows=tuple(rows)).verdicts()["100 Mbit/s"]
    assert "No other hook helps: keep bf16" in text
    assert "a validation loss of +50.0 % here" in text


def test_a_missing_row_is_a_key_error(comparison: Comparison) -> None:
    with pytest.raises(KeyError, match="int8"):
        comparison.row("int8")


def compare_on_hosts(rank: int, size: int) -> Comparison:
    with LaunchedRanks() as ranks:
        return compare("support.compared:net", ["bf16"], steps=2, ranks=ranks)


def test_on_ranks_of_a_job(run_ranks: Any) -> None:
    """Every rank comes to the same result. Here each rank is taken for a host."""
    results = run_ranks(compare_on_hosts, 2)
    assert results[0] == results[1]
    found = results[0]
    assert found.links == ["network of these hosts"]
    assert found.hooks == ["bare", "torch", "bf16"]
    assert all(row.measured and row.break_even_bits_per_second is None for row in found.rows)
    [pair] = found.pairs
    assert pair.first.endswith("(rank 0)")
    assert pair.second.endswith("(rank 1)")
    assert pair.bits_per_second > 1e6
    assert 0 < pair.latency_seconds < 1
    assert not re.search(r"\bslow$", str(found), re.M)


def test_a_link_that_is_named_twice_has_one_row() -> None:
    found = compare(
        "support.compared:net", ["bf16"], links=[1e9, 1e9], measure_links=False, steps=2
    )
    rows = [(row.hook, row.link) for row in found.rows]
    assert len(rows) == len(set(rows))


def test_models_with_unused_parameters() -> None:
    options: dict[str, Any] = {"steps": 2, "train": train_partly}
    with pytest.raises(ComparisonError, match="find_unused_parameters"):
        compare(partly, ["int8"], **options)
    found = compare(
        partly, ["int8"], train_steps=3, wrapper={"find_unused_parameters": True}, **options
    )
    assert not found.failures
    assert found.row("int8").validation_loss is not None


def test_pairs_of_hosts_are_those_of_their_first_ranks() -> None:
    class FourRanks:
        world_size = 4

        def __call__(self, fn: object, /, *_: object) -> list[str]:
            return ["0", "0", "1", "2"]

    assert pairs_of_hosts(FourRanks()) == [(0, 2), (0, 3), (2, 3)]


def train_partly(model: nn.Module, rank: int, size: int) -> Iterator[Any]:
    while True:
        model(torch.ones(2, 64)).square().mean().backward()
        yield lambda: 1.0


def test_blocks_contain_all_steps_in_balanced_order() -> None:
    entries = [BARE, TORCH, Entry("a", {"name": "bf16"})]
    for steps in (1, 4, 11, 12, 25, 50, 99, 1000):
        tasks = timing_tasks(entries, steps)
        for entry in entries:
            own = [task for task in tasks if task.entry == entry]
            assert [task.done for task in own] == [
                sum(task.steps for task in own[:index]) for index in range(len(own))
            ]
            assert sum(task.steps for task in own) == steps
            assert all(min(steps, 12) <= task.steps <= 50 for task in own)
    for steps, turns in ((50, 1), (101, 2)):
        names = [task.entry.name for task in timing_tasks(entries, steps)]
        assert names == ["bare", "torch", "a", "a", "torch", "bare"] * turns


def test_progress_counts_steps_of_all_settings() -> None:
    told: list[tuple[str, float, float]] = []
    compare(
        "support.compared:net",
        ["bf16"],
        train="support.compared:train",
        steps=3,
        train_steps=4,
        progress=lambda *call: told.append(call),
    )
    # Three entries are verified and timed, and two are trained.
    assert [(what, done) for what, done, _ in told] == [
        ("loopback: preparing", 0),
        ("loopback: verifying bare", 0),
        ("loopback: verifying torch", 1),
        ("loopback: verifying bf16", 2),
        ("loopback: measuring bare", 3),
        ("loopback: measuring torch", 6),
        ("loopback: measuring bf16", 9),
        *(
            (f"loopback: training {name}", 12 + 4 * i + step)
            for i, name in enumerate(("torch", "bf16"))
            for step in range(4)
        ),
        ("loopback: running hooks dry", 20),
    ]
    assert {total for _, _, total in told} == {20}


@needs_links
@pytest.mark.parametrize(
    ("world_size", "links", "names"),
    [
        (2, [10e6], ["loopback", "10 Mbit/s"]),
        pytest.param(
            *(3, [100e6, 10e6], ["loopback", "100 Mbit/s", "10 Mbit/s"]),
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_over_links(world_size: int, links: list[float], names: list[str]) -> None:
    found = compare("support.compared:net", ["bf16"], links=links, steps=3, world_size=world_size)
    assert found.links == names
    assert all(row.measured for row in found.rows)
    slow = found.row("torch", "10 Mbit/s")
    assert slow.floor_seconds is not None
    assert slow.predicted_seconds is not None
    assert found.row("bare", "10 Mbit/s").wire_bytes == 0


def test_links_are_predicted_if_they_cannot_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("commhooks.cluster.links.unavailable", lambda: "shaped links need root")
    found = compare("support.compared:net", ["bf16"], links=[1e9], steps=2)
    assert not found.row("bf16", "1 Gbit/s").measured
    assert "links are predicted, not measured: shaped links need root" in found.notes


@pytest.mark.parametrize(
    "model",
    [
        "support.compared:Dropping",
        pytest.param("support.compared:Talking", marks=pytest.mark.exhaustive),
    ],
)
def test_models_of_other_kinds(model: str) -> None:
    error = compare(model, ["allreduce"], steps=2).row("allreduce").error
    assert error is not None
    assert error < 1e-6


def test_an_input_factory() -> None:
    found = compare(
        "support.compared:without_input", ["allreduce"], input="support.compared:batch", steps=2
    )
    assert found.row("allreduce").gradient_bytes == 4 * (96 * 96 + 96)
