"""The examples: train_gpt.py on ranks, under torchrun and alone, and demo.py."""

import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import checkpoint
import pytest
import torch
import torch.distributed as dist
import train_config
import train_gpt
from demo import Result, draw, format_bytes, make_table, verdict
from rich.console import Console
from run_log import RunLog, read_log
from stdlib_text import load_corpus, train_batch, validation_batches
from train_config import TrainConfig, make_parser, parse_args

EXAMPLES = Path(__file__).parents[2] / "examples"
TINY = [
    "--layers",
    "1",
    "--heads",
    "2",
    "--width",
    "32",
    "--block-size",
    "32",
    "--batch-size",
    "2",
    "--evaluate-batches",
    "3",
]


def run(command, **kwargs):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=240, check=False, **kwargs
    )


def train_under_torchrun(*args, script=EXAMPLES / "train_gpt.py", options=()):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", *options]
    return run([*launcher, "--nproc-per-node", "2", str(script), *TINY, *map(str, args)])


def train(rank, world_size, args):
    """Do what train_gpt.py does once it has joined its process group."""
    config = parse_args(make_parser(), [*TINY, *map(str, args)])
    train_gpt.train(*config, torch.device("cpu"))


def assert_same(a, b, where=""):
    """Compare two nested structures; tensors to the last bit."""
    assert type(a) is type(b), where
    if isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            assert_same(a[key], b[key], f"{where}/{key}")
    elif isinstance(a, list):
        assert len(a) == len(b), where
        for index, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_same(x, y, f"{where}/{index}")
    elif isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype, where
        assert torch.equal(a, b), where
    else:
        assert a == b, where


@pytest.fixture
def single_rank_group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


# The text


@pytest.fixture(scope="module")
def corpus():
    return load_corpus(min_bytes=10_000)


def test_text_is_split_by_path_not_by_order(tmp_path):
    for index in range(200):
        (tmp_path / f"module_{index}.py").write_bytes(b"%03d" % index)
    before = load_corpus(tmp_path)
    (tmp_path / "a_new_file.py").write_bytes(b"new")
    after = load_corpus(tmp_path)
    assert len(before.train) + len(before.validation) == 600
    assert 0 < len(before.validation) < len(before.train)
    assert before.digest != after.digest
    for old, new in ((before.train, after.train), (before.validation, after.validation)):
        assert bytes(new).replace(b"new", b"") == bytes(old)


def test_too_little_text_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"at least 100 bytes.*found 0 and 0"):
        load_corpus(tmp_path, min_bytes=100)


def test_batches_depend_on_seed_step_and_rank_only(corpus):
    def batch(seed, step, rank):
        return train_batch(corpus.train, 4, 16, seed=seed, step=step, rank=rank)

    inputs, targets = batch(0, 5, 1)
    assert inputs.shape == targets.shape == (4, 16)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert torch.equal(inputs, batch(0, 5, 1)[0])
    for other in (batch(1, 5, 1), batch(0, 6, 1), batch(0, 5, 0)):
        assert not torch.equal(inputs, other[0])


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_ranks_share_the_same_validation_windows(corpus, world_size):
    def windows(rank, size):
        return validation_batches(corpus.validation, 4, 16, 5, rank=rank, world_size=size)

    alone = windows(0, 1)
    shared = [windows(rank, world_size) for rank in range(world_size)]
    assert sum(map(len, shared)) == 5
    for index, (inputs, _) in enumerate(alone):
        assert torch.equal(shared[index % world_size][index // world_size][0], inputs)


# The command line


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--steps", "0"], "argument --steps: expected an integer of at least 1, found 0"),
        (["--steps", "many"], "argument --steps: invalid positive_int value: 'many'"),
        (["--learning-rate", "-1"], "expected a number of at least 0, found -1"),
        (["--hook-option", "rank"], "expected KEY=VALUE, found 'rank'"),
        (["--width", "30"], "width must be a multiple of heads, found 30 and 4 heads"),
        (["--dropout", "1.5"], "dropout must be in [0, 1), found 1.5"),
        (["--resume"], "--resume needs --checkpoint-dir"),
        (["--color", "red"], "unrecognized arguments: --color red"),
    ],
)
def test_bad_option_is_explained(argv, message, capsys):
    with pytest.raises(SystemExit) as exit_info:
        parse_args(make_parser(), argv)
    assert exit_info.value.code == 2
    assert message in capsys.readouterr().err


def test_hook_options_are_json_or_text():
    argv = "--hook powersgd --hook-option rank=8 --hook-option warm=true --hook-option dtype=fp16"
    config, _ = parse_args(make_parser(), argv.split())
    assert config.hook == {"name": "powersgd", "rank": 8, "warm": True, "dtype": "fp16"}
    assert json.loads(json.dumps(config.to_json())) == config.to_json()


def test_defaults_of_the_command_line_are_those_of_the_config():
    config, _ = parse_args(make_parser(), [])
    assert config == TrainConfig()


# Checkpoints


def make_checkpoint(step):
    return checkpoint.Checkpoint(step, {"config": {"seed": 0}}, {"x": torch.ones(3) * step}, {})


def test_only_whole_checkpoints_are_found_and_old_ones_go(tmp_path, single_rank_group):
    (tmp_path / "partial-00000009").mkdir()  # of a run that was killed
    for step in (2, 10, 9):
        checkpoint.save(tmp_path, make_checkpoint(step), keep=2)
    assert [path.name for path in checkpoint.find_all(tmp_path)] == [
        "step-00000009",
        "step-00000010",
    ]
    assert not list(tmp_path.glob("partial-*"))
    loaded = checkpoint.load(checkpoint.find_all(tmp_path)[-1], {"config": {"seed": 0}})
    assert loaded.step == 10
    assert_same(loaded.shared, make_checkpoint(10).shared)


def test_checkpoint_of_another_run_is_refused(tmp_path, single_rank_group):
    checkpoint.save(tmp_path, make_checkpoint(3), keep=1)
    with pytest.raises(checkpoint.CheckpointError, match="written with seed = 0, this run has 1"):
        checkpoint.load(tmp_path / "step-00000003", {"config": {"seed": 1}})


@pytest.mark.parametrize("name", ["shared.pt", "rank-00000.pt", "about.json"])
def test_damaged_checkpoint_is_refused(tmp_path, single_rank_group, name):
    checkpoint.save(tmp_path, make_checkpoint(3), keep=1)
    path = tmp_path / "step-00000003" / name
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(checkpoint.CheckpointError, match="rank 0 cannot resume"):
        checkpoint.load(tmp_path / "step-00000003", {"config": {"seed": 0}})


def test_log_of_a_resumed_run_has_each_step_once(tmp_path):
    path = tmp_path / "log.jsonl"
    for first in (0, 2):
        with RunLog("test", 4, path, enabled=True) as log:
            log.start(first, {})
            for step in range(first + 1, 5):
                log.step({"step": step, "loss": 1.0, "tokens_per_second": 1.0})
        with path.open("a") as file:
            file.write('{"event": "step", "st')  # killed while writing
    lines = path.read_text().splitlines()[:-1]
    assert [json.loads(line)["step"] for line in lines if '"step",' in line] == [1, 2, 3, 4]


# Whole runs


def eight_steps(folder, checkpoint_every):
    return [
        *("--steps", "8", "--dropout", "0.1", "--evaluate-every", "4"),
        *("--hook", "powersgd", "--hook-option", "rank=2", "--hook-option", "start_step=2"),
        *("--log-file", folder / "log.jsonl"),
        *("--checkpoint-dir", folder / "checkpoints", "--checkpoint-every", checkpoint_every),
    ]


def assert_same_runs(*folders):
    """Compare the last checkpoints and the losses of two runs of eight steps."""
    for part in ("shared.pt", "rank-00000.pt", "rank-00001.pt"):
        loaded = [torch.load(folder / "checkpoints/step-00000008" / part) for folder in folders]
        for content in loaded:
            content.get("traffic", {}).pop("exposed_seconds", None)
        assert_same(*loaded, where=part)
    hook_state = torch.load(folders[0] / "checkpoints/step-00000008/rank-00000.pt")["hook"]
    assert hook_state, "a hook with memory is what makes this test worth its time"

    logs = [read_log(folder / "log.jsonl") for folder in folders]
    for log in logs:
        steps = [record["step"] for record in log if record["event"] == "step"]
        assert steps == list(range(1, 9))
    losses = [[record["loss"] for record in log if record["event"] != "run"] for log in logs]
    assert losses[0] == losses[1]


@pytest.mark.exhaustive
def test_resumed_run_equals_an_uninterrupted_one_to_the_last_bit(tmp_path, run_ranks):
    """The first on ranks that exist already, the second under torchrun."""
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    run_ranks(train, 2, eight_steps(whole, 4))
    shutil.copytree(whole, resumed)
    shutil.rmtree(resumed / "checkpoints/step-00000008")
    result = train_under_torchrun(*eight_steps(resumed, 4), "--resume")
    assert result.returncode == 0, result.stderr
    assert "resumed after step 4" in result.stdout
    assert_same_runs(whole, resumed)


# Kills a rank in the first attempt while it computes gradients, and one in the second attempt while
# it writes a checkpoint.
MORTAL = """
import itertools, os, signal, sys
sys.path.insert(0, {examples!r})
import checkpoint, train_gpt

attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
ranks, moments = {ranks}, {moments}
passed = itertools.count()
make_optimizer, save_file = train_gpt.make_optimizer, checkpoint._save_file

def pass_moment(*_):
    if int(os.environ["RANK"]) == ranks[attempt] and next(passed) == moments[attempt]:
        open({killed!r} + str(attempt), "x").close()
        os.kill(os.getpid(), signal.SIGKILL)

def make_mortal(model, config):
    for parameter in model.parameters():
        parameter.register_hook(pass_moment)
    return make_optimizer(model, config)

def save_mortally(content, path):
    save_file(content, path)
    pass_moment()

if attempt == 0:
    train_gpt.make_optimizer = make_mortal
elif attempt == 1:
    checkpoint._save_file = save_mortally
train_gpt.main()
"""


@pytest.mark.exhaustive  # starts torchrun three times
def test_killed_run_restarts_and_equals_an_uninterrupted_one_to_the_last_bit(tmp_path, run_ranks):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    run_ranks(train, 2, eight_steps(whole, 2))
    ranks = [random.randrange(2), random.randrange(2)]
    shared = torch.load(whole / "checkpoints/step-00000008/shared.pt")
    gradients = len(shared["optimizer"]["state"])  # per step
    moments = [random.randrange(5 * gradients), random.randrange(2)]
    script = tmp_path / "mortal.py"
    note = str(tmp_path / "killed ")
    script.write_text(
        MORTAL.format(examples=str(EXAMPLES), ranks=ranks, moments=moments, killed=note)
    )
    arguments = [*eight_steps(killed, 2), "--resume"]
    result = train_under_torchrun(*arguments, script=script, options=["--max-restarts=2"])
    why = f"ranks {ranks} killed at {moments}: {result.stderr}"
    assert result.returncode == 0, why
    assert len(list(tmp_path.glob("killed ?"))) == 2, why
    assert_same_runs(whole, killed)


@pytest.mark.exhaustive  # as test_bad_hook_option_is_reported_by_rank_0, under torchrun
def test_unknown_hook_is_reported_once_and_without_traceback():
    result = train_under_torchrun("--hook", "powersdg")
    assert result.returncode != 0
    assert result.stderr.count("train_gpt.py: error:") == 1
    assert "powersdg" in result.stderr
    assert "powersgd" in result.stderr
    assert "[rank" not in result.stderr  # how torch marks the tracebacks of ranks


@pytest.mark.parametrize("rank", ["0", "1"])
def test_bad_hook_option_is_reported_by_rank_0(monkeypatch, capsys, rank):
    arguments = ["--hook", "powersgd", "--hook-option", "rank=-3"]
    monkeypatch.setattr(sys, "argv", ["train_gpt.py", *arguments])
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr(train_config.time, "sleep", lambda _: None)
    with pytest.raises(SystemExit) as exit_info:
        train_gpt.main()
    assert exit_info.value.code == 2
    reported = capsys.readouterr().err
    assert ("train_gpt.py: error:" in reported) == (rank == "0")
    assert ("rank" in reported and "-3" in reported) == (rank == "0")


def test_one_rank_without_a_launcher(tmp_path, monkeypatch):
    log_file = tmp_path / "log.jsonl"
    arguments = [*TINY, "--steps", "3", "--log-file", str(log_file)]
    monkeypatch.setattr(sys, "argv", ["train_gpt.py", *arguments])
    monkeypatch.delenv("RANK", raising=False)
    train_gpt.main()
    assert not dist.is_initialized()
    events = [record["event"] for record in read_log(log_file)]
    assert events == ["run", "step", "step", "step", "evaluation"]
    assert read_log(log_file)[-1]["wire_bytes"] == 0


def test_table_verdict_and_plot_of_the_demo(tmp_path):
    def result(hook, sent, seconds):
        evaluations = [{"step": 5 * n, "wire_bytes": n * sent, "loss": 3.0 / n} for n in (1, 2)]
        return Result(hook, evaluations, seconds)

    results = [
        result("allreduce", 4e6, 0.1),
        result("bf16", 2e6, 0.2),
        result("powersgd", 1e6, 0.3),
    ]
    predicted = {"1 Gbit/s": [0.2, 0.185, 0.3], "100 Mbit/s": [1.0, 0.6, 0.4]}
    console = Console(width=80)
    with console.capture() as capture:
        console.print(make_table(results, predicted))
    row = next(line for line in capture.get().splitlines() if "powersgd" in line)
    for cell in ("1.500", "2 MB", "4.0x", "3.0 s", "4.0 s"):
        assert cell in row
    assert verdict(results, predicted).splitlines() == [
        "Over this machine's loopback, keep allreduce: no hook here saves a tenth of the time.",
        "Over 1 Gbit/s, keep allreduce: no hook here saves a tenth of the time.",
        "Over 100 Mbit/s, powersgd takes 40% of the time of allreduce.",
    ]
    draw(results, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 10_000


@pytest.mark.exhaustive
def test_demo_trains_predicts_and_draws(tmp_path):
    script = [sys.executable, str(EXAMPLES / "demo.py"), "--folder", str(tmp_path)]
    result = run([*script, *TINY, "--steps", "30", "--evaluate-every", "10"])
    assert result.returncode == 0, result.stderr
    for word in ("powersgd", "2.0x", "100 Mbit/s", "Over 1 Gbit/s"):
        assert word in result.stdout
    assert (tmp_path / "loss_vs_bytes.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (999_600, "1 MB"), (3_337_216, "3.34 MB"), (5e15, "5e+03 TB")],
)
def test_format_bytes(count, text):
    assert format_bytes(count) == text


@pytest.mark.exhaustive
def test_a_sharded_run_continues_to_the_last_digit(tmp_path):
    def losses(*arguments):
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        script = [str(EXAMPLES / "train_fsdp.py"), "--steps", "4", "--checkpoint-every", "2"]
        options = ["--quantize", "int8", "--quantize-weights", "int8"]
        options += ["--checkpoint-dir", str(tmp_path / "checkpoints")]
        result = run([*launcher, "--nproc-per-node", "4", *script, *options, *arguments])
        assert result.returncode == 0, result.stderr
        return [line for line in result.stdout.splitlines() if line.startswith("step ")]

    unbroken = losses()
    assert len(unbroken) == 4
    shutil.rmtree(tmp_path / "checkpoints" / "step-00000004")
    assert losses("--resume") == unbroken[2:]
