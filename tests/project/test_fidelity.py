"""The fidelity of each hook that the package shows agrees with the stored runs."""

import email
import functools
import json
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from bench import files
from bench.fidelity import training
from bench.fidelity.runs import PACKAGED, Record, Run
from bench.fidelity.tasks import ALL_TASKS, TASKS
from bench.fidelity.trained_hooks import REFERENCE, TrainedHook, trained_on
from bench.fidelity.training import train
from commhooks.hook.spec import hook_spec
from commhooks.lab.machine import describe_machine
from examples.gpt import GPTConfig
from examples.stdlib_text import load_corpus

ROOT = Path(__file__).parents[2]
STORED = max((ROOT / "bench" / "results").glob("*-fidelity.json"))
HOWTO = f"python -m bench.fidelity bench/results/{STORED.name} --publish"


def test_the_package_says_what_was_measured() -> None:
    """At the present defaults: a hook whose defaults have changed must be run again, or go."""
    assert json.loads(PACKAGED.read_text()) == Record(files.load(STORED)).figures(), HOWTO


def record_of(*runs: Run) -> Record:
    return Record({"about": {}, "runs": list(map(asdict, runs))})


def run_of(hook: str, task: str, seed: int, loss: float, **config: object) -> Run:
    made = TrainedHook(hook).create().to_config() | config
    return Run(task, hook, made, ALL_TASKS[task].usual, seed, loss, wire_bytes=10.0)


def test_each_seed_is_compared_with_plain_averaging_on_it() -> None:
    plain = [run_of(REFERENCE, task, seed, 1.0 + seed) for task in TASKS for seed in (0, 1)]
    tried = [run_of("bf16", task, seed, 1.1 * (1.0 + seed)) for task in TASKS for seed in (0, 1, 2)]
    record = record_of(*plain, *tried)
    (row,) = record.rows["digits"]
    assert row.changes == pytest.approx([0.1, 0.1])
    assert record.figures() == {"bf16": dict.fromkeys(TASKS, 10.0) | {"seeds": 2}}


def test_hooks_with_another_optimizer_are_also_compared_with_the_usual_one() -> None:
    reference = run_of(REFERENCE, "gpt", 0, 2.0)
    with_sgd = replace(reference, recipe="SGD with momentum", loss=4.0)
    demo = replace(run_of("demo", "gpt", 0, 3.0), recipe="SGD without momentum, 10 times the rate")
    (row,) = record_of(reference, with_sgd, demo).rows["gpt"]
    assert row.change == pytest.approx(-0.25)
    assert row.change_to_usual == pytest.approx(0.5)


def test_runs_with_other_options_do_not_count() -> None:
    plain = [run_of(REFERENCE, task, 0, 1.0) for task in TASKS]
    other = [run_of("int8", task, 0, 1.0, block_size=64) for task in TASKS]
    assert record_of(*plain, *other).figures() == {}


def test_runs_from_before_an_option_existed_count() -> None:
    runs = [run_of(hook, task, 0, 1.0) for task in TASKS for hook in (REFERENCE, "int8")]
    for run in runs:
        run.config.pop("block_size", None)
    assert record_of(*runs).figures().keys() == {"int8"}


def test_runs_with_other_options_are_kept_beside_each_other() -> None:
    plain = run_of(REFERENCE, "digits", 0, 1.0)
    losses = {32: 1.1, 64: 1.2}
    tried = [run_of("int8", "digits", 0, losses[size], block_size=size) for size in losses]
    record = record_of(plain, *tried)
    for size, loss in losses.items():
        row = record.row("digits", TrainedHook(f"int8:block_size={size}"))
        assert row is not None
        assert row.change == pytest.approx(loss - 1)
    assert record.row("digits", TrainedHook("int8")) is None


def test_tasks_on_which_a_hook_was_not_run_have_no_figures() -> None:
    runs = [run_of(hook, "digits", 0, 1.0) for hook in (REFERENCE, "bf16")]
    assert record_of(*runs).figures() == {"bf16": {"digits": 0.0, "seeds": 1}}


def test_variants_are_no_figures_of_their_hook() -> None:
    named = next(trained for trained in trained_on("gpt") if trained.name == "INTELLECT-1")
    config = named.create().to_config()
    variant = replace(run_of("diloco", "gpt", 0, 2.0), config=config)
    record = record_of(run_of(REFERENCE, "gpt", 0, 1.0), variant)
    assert [row.trained.title for row in record.rows["gpt"]] == ["INTELLECT-1"]
    assert record.figures() == {}


def test_every_diloco_stands_beside_the_same_training_on_one_rank() -> None:
    with_control = {trained.title for trained in trained_on("gpt") if trained.control}
    on_nodes = {t.title for t in trained_on("gpt") if "diloco:" in t.spec and "ranks_per" in t.spec}
    assert with_control == {t.title for t in trained_on("gpt") if t.hook == "diloco"} - on_nodes
    seeds = (0, 1)
    plain = [run_of(REFERENCE, "gpt", seed, 1.0 + seed) for seed in seeds]
    tried = [run_of("diloco", "gpt", seed, 1.0 + seed) for seed in seeds]
    control = [replace(run, loss=1.5 * run.loss, ranks=1) for run in tried]
    (row,) = record_of(*plain, *tried, *control).rows["gpt"]
    assert row.control_change == pytest.approx(0.5)


def test_a_control_needs_the_seeds_of_its_hook() -> None:
    runs = [run_of(hook, "gpt", 0, 1.0) for hook in (REFERENCE, "diloco")]
    elsewhere = replace(run_of("diloco", "gpt", 1, 2.0), ranks=1)
    (row,) = record_of(*runs, elsewhere).rows["gpt"]
    assert row.control_change is None
    assert row.cells["one rank alone"] == ""


def test_recipes_are_those_of_the_page_but_for_the_period() -> None:
    page = (ROOT / "docs" / "hooks" / "diloco.md").read_text()
    table = re.findall(r"^\| \[(.+?)\]\(.*?\) \| `(.*?)`", page, re.M)
    variants = {trained.title: hook_spec(trained.spec).config for trained in trained_on("gpt")}
    assert len(table) == 5
    for name, options in table:
        written = eval(f"dict({options})", {"F": 5})
        written.pop("period")
        found = variants["diloco" if name == "DiLoCo" else name]
        assert written == {key: found[key] for key in written}, name
    (block,) = re.findall(r"^```python\n(topk = .*?)```", page, re.M | re.S)
    exec(block, names := {})
    assert variants["SparseLoCo"]["inner"] == names["inner"]


def test_the_optimizers_of_each_recipe_train_every_parameter_once() -> None:
    task = TASKS["gpt"]
    model = task.make_data().model()
    assert sum(parameter.numel() for parameter in model.parameters()) == 1_032_576
    for recipe in task.recipes.values():
        groups = [g for o in recipe.optimizers(model) for g in o.param_groups]
        trained = [id(parameter) for group in groups for parameter in group["params"]]
        assert sorted(trained) == sorted(map(id, model.parameters()))


def train_briefly(
    rank: int, size: int, task: str, *hooks: TrainedHook, **changed: Any
) -> list[dict[str, Any]]:
    """Train a smaller GPT for four steps."""
    shape = GPTConfig(layers=1, width=64, heads=2, block_size=8)
    corpus = load_corpus(Path(email.__file__).parent)
    usual = ALL_TASKS[task]
    small = functools.partial(usual.make_data, shape=shape, corpus=lambda: corpus)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ALL_TASKS, task, replace(usual, steps=4, make_data=small, **changed))
        return [train(rank, size, task, hook, 0) for hook in hooks]


# In four steps this averages once.
PAIR = TrainedHook(REFERENCE), TrainedHook("diloco:period=2,delay=2,inner=int2", "Muon")


def test_a_training_on_ranks(run_ranks: Any) -> None:
    (plain, delayed), (other, _) = run_ranks(train_briefly, 2, "gpt", *PAIR)
    assert "curve" not in plain
    assert 4 < plain["loss"] < 6
    assert 4 < other["loss"] < 6
    assert 0 < delayed["wire_bytes"] < plain["wire_bytes"] / 10


def test_a_training_on_one_rank_sends_nothing(run_ranks: Any) -> None:
    ((plain, delayed),) = run_ranks(train_briefly, 1, "gpt", *PAIR)
    assert 4 < plain["loss"] < 6
    assert 4 < delayed["loss"] < 6
    assert plain["wire_bytes"] == delayed["wire_bytes"] == 0


def test_the_language_task_has_the_loss_over_steps(run_ranks: Any) -> None:
    """Validation changes nothing in a training."""
    hooks = TrainedHook(REFERENCE), TrainedHook("noop")
    often, seldom = (
        run_ranks(train_briefly, 2, "language", *hooks, stride=stride) for stride in (1, 3)
    )
    for (plain, alone), (same, _) in zip(often, seldom, strict=True):
        for found in (plain, alone):
            steps, seconds, losses = zip(*found["curve"], strict=True)
            assert steps == (1, 2, 3, 4)
            assert 0 < seconds[0] < seconds[1] < seconds[2] < seconds[3] == found["seconds"]
            assert losses[0] > losses[1] > losses[2] > losses[3] == found["loss"]
        assert [(step, loss) for step, _, loss in same["curve"]] == [
            (step, loss) for step, _, loss in plain["curve"][2:]
        ]
        assert alone["wire_bytes"] == 0 < plain["wire_bytes"]


def test_runs_over_a_link_are_kept_apart() -> None:
    loopback, over_link = (
        replace(run_of(REFERENCE, "language", 0, loss), bits_per_second=rate)
        for loss, rate in ((1.0, None), (2.0, 1e8))
    )
    record = record_of(over_link, loopback)
    assert record.runs("language", TrainedHook(REFERENCE)) == [loopback]
    assert record.runs("language", TrainedHook(REFERENCE), 1e8) == [over_link]


def test_an_interrupted_run_is_continued(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every run is in the file as it ends, and is not repeated."""
    path, trained = tmp_path / "runs.json", []

    def fake(fn: object, size: int, task: str, hook: TrainedHook, seed: int, **_: object) -> Any:
        trained.append(hook.title)
        if len(trained) == 2:
            raise KeyboardInterrupt
        return [{"loss": 1.0, "wire_bytes": 2.0}] * size

    monkeypatch.setattr(training, "run_ranks", fake)
    chosen = [TrainedHook("int4"), TrainedHook("diloco", name="a variant")]
    with pytest.raises(KeyboardInterrupt):
        training.run_missing("gpt", chosen, 0, files.Results(path))
    training.run_missing("gpt", chosen, 0, files.Results(path))
    training.run_missing("gpt", chosen, 0, files.Results(path))
    assert trained == [REFERENCE, "int4", "int4", "a variant", "a variant"]  # the last on one rank


def test_a_file_of_runs_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file names each machine that measured a run, once."""
    path = tmp_path / "runs.json"
    for seed, cpu in enumerate(("Xeon", "EPYC", "EPYC")):
        machine = describe_machine() | {"cpu": cpu}
        monkeypatch.setattr(files, "describe_machine", lambda machine=machine: machine)
        run = vars(run_of("bf16", "digits", seed, 1.0 + seed))
        results = files.Results(path, ranks=4)
        results.once({"seed": seed}, lambda run=run: run)
        assert results.once({"seed": seed}, lambda: pytest.fail("measured again")) == run
    record = Record(files.load(path))
    assert [run.loss for run in record.runs("digits", TrainedHook("bf16"))] == [1.0, 2.0, 3.0]
    assert record.about["cpu"] == "EPYC and Xeon"
    assert record.about["ranks"] == 4
