"""The command line: what it prints, and how it fails."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch
from support.links import needs_links
from support.processes import wait_until

import commhooks
from commhooks.hook import registry

pytest.importorskip("click")
from click.testing import CliRunner
from support import my_hooks

from commhooks.cli.commands import commands


def run(*arguments: str, status: int = 0) -> str:
    result = CliRunner().invoke(commands, arguments, catch_exceptions=False)
    assert result.exit_code == status, result.output
    return result.output


def test_every_command_has_help() -> None:
    text = run("--help")
    for name in commands.list_commands(None):  # type: ignore[arg-type]
        assert name in text
        assert "Usage" in run(name, "--help")


def test_list_names_every_hook() -> None:
    text = run("list")
    for name in commhooks.available():
        assert name in text
    assert re.search(r"^ +int4 +lossy +7\.5x +\+0\.2 +\+0\.8 +\+0\.5 *$", text, re.M)
    assert re.search(r"^ +local_sgd +different +8\.0x ", text, re.M)
    assert re.search(r"^ +threshold +lossy +-0\.3 ", text, re.M)  # its bytes vary


def test_list_has_families_and_needs_within_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = run("list").splitlines()
    assert max(map(len, lines)) <= 80
    starts = [line.strip() for line in lines]
    assert starts.index("sparse") < next(i for i, s in enumerate(starts) if s.startswith("dgc"))
    text = " ".join(" ".join(lines).split())
    for needs in ("needs `rules`", "needs `stages`", "needs a launcher such as torchrun or"):
        assert needs in text


def test_list_goes_on_without_a_hook_that_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = {"broken": EntryPoint("broken", "no_such_module:Hook", registry.ENTRY_POINTS)}
    monkeypatch.setattr(registry, "_provided", lambda: broken)
    text = run("list")
    assert re.search(r"^ +int4 ", text, re.M)
    assert re.search(r"^Failed: broken: .*no_such_module", text, re.M)


def test_describe() -> None:
    text = run("describe", "powersgd")
    assert text == f"{commhooks.describe('powersgd')}\n"
    assert "  seed: int = 0\n      Seed of the random factors, which also depend on the" in text
    assert "all-reduces" in text


def test_an_unknown_hook_is_one_line() -> None:
    text = run("describe", "powersg", status=1)
    assert text.startswith("Error: no hook is named 'powersg'; did you mean 'powersgd'?")


def test_describe_takes_a_name_without_options() -> None:
    text = run("describe", "powersgd:rank=4", status=1)
    assert text == (
        "Error: expected a name without options, found 'powersgd:rank=4'; use 'powersgd'\n"
    )


def test_an_unknown_command_gets_a_suggestion() -> None:
    assert "Error: no command is named 'compar'; did you mean 'compare'?" in run("compar", status=2)
    assert "Error: no command is named 'x'; see --help" in run("x", status=2)


def test_as_a_module() -> None:
    text = subprocess.check_output([sys.executable, "-m", "commhooks", "--help"], text=True)
    assert text.startswith("Usage: commhooks")


@pytest.mark.parametrize(("module", "command"), [("click", "list"), ("psutil", "doctor")])
def test_without_the_extra(tmp_path: Path, module: str, command: str) -> None:
    text = f"raise ModuleNotFoundError('no {module}', name={module!r})"
    (tmp_path / f"{module}.py").write_text(text)
    result = subprocess.run(
        [sys.executable, "-m", "commhooks", command],
        env={"PYTHONPATH": f"{tmp_path}:{Path(commhooks.__file__).parents[1]}"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 1
    assert f"needs {module}" in result.stderr
    assert "pip install 'commhooks[cli]'" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_doctor_finds_this_machine_sound() -> None:
    text = run("doctor")
    assert "gloo" in text
    assert torch.__version__ in text


def test_doctor_fails_when_something_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "11.8")

    def require(_device: torch.device) -> None:
        raise commhooks.CommHookError(
            "CuPy 13.0 is for CUDA 12, torch for CUDA 11.8: "
            "pip uninstall cupy-cuda12x, then pip install 'commhooks[cuda11]'"
        )

    monkeypatch.setattr("commhooks.kernels.require", require)
    monkeypatch.setattr("commhooks.lab.doctor.find_spec", lambda _: True)
    monkeypatch.setenv("COLUMNS", "40")  # a narrow terminal does not split commands
    text = run("doctor", status=1)
    assert "CuPy 13.0 is for CUDA 12, torch for CUDA 11.8\n" in text
    assert "pip uninstall cupy-cuda12x, then pip install 'commhooks[cuda11]'\n" in text


def compare_small(*more: str, status: int = 0) -> str:
    return run(
        "compare", "--model", "support.compared:net", "--hooks", "bf16", *more, status=status
    )


def test_the_version() -> None:
    assert re.fullmatch(r"commhooks \d\S+\n", run("--version"))


def test_a_hook_and_a_model_of_a_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank processes, which the command starts, find them as well."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    source = Path(my_hooks.__file__).read_text().replace('"coarse"', '"from_script"')
    (tmp_path / "script_of_user.py").write_text(
        f"{source}\n\nfrom support.compared import net as make_model\n"
    )
    text = run(
        *("compare", "--model", "script_of_user.py:make_model", "--import", "script_of_user.py"),
        *("--hooks", "from_script:step=2,script_of_user:Unnamed", "--steps", "2"),
    )
    for name in ("from_script:step=2", "script_of_user:Unnamed", "bf16"):
        assert re.search(rf"^ +{name} +[0-9.]+ ±", text, re.M)
    assert re.search(r"^loopback: (Use|No)", text, re.M)
    assert "Average in multiples" in run("describe", "script_of_user.py:Coarse")
    assert "from_script" in run("list", "--import", "script_of_user.py")
    text = run("list", "--import", "no_such_module", status=1)
    assert text.startswith("Error: 'no_such_module' cannot be imported: ModuleNotFoundError")


def test_compare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    files = {kind: tmp_path / f"out.{kind}" for kind in ("json", "csv", "png")}
    text = compare_small(
        *("--steps", "3", "--link", "1gbit", "--predict"),
        *("--train", "support.compared:train", "--train-steps", "10"),
        *("--json", str(files["json"]), "--csv", str(files["csv"]), "--plot", str(files["png"])),
    )
    for name in (
        "bare",
        "torch",
        "bf16",
        "loopback, measured",
        "1 Gbit/s, predicted",
        "2.0x",
        "break-even",
        "loss",
    ):
        assert name in text
    assert max(map(len, text.splitlines())) <= 80
    assert json.loads(files["json"].read_text())["world_size"] == 2
    assert files["csv"].read_text().count("\n") == 1 + 3 * 2
    assert files["png"].read_bytes().startswith(b"\x89PNG")


def test_compare_goes_on_without_hooks_that_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    files = {kind: tmp_path / f"out.{kind}" for kind in ("json", "csv", "png", "html")}
    text = compare_small(
        *("--hooks", "powersgd:rank=96,int9", "--steps", "2"),
        *("--json", str(files["json"]), "--csv", str(files["csv"])),
        *("--plot", str(files["png"]), "--html", str(files["html"])),
        status=1,
    )
    assert "Traceback" not in text
    lines = text.splitlines()
    assert re.search(r"^ +bf16 +[0-9.]+ ±", text, re.M)
    for hook, why in {
        "powersgd:rank=96": "expected a rank of at most",
        "int9": "no hook is named",
    }.items():
        assert any(line.split() == [hook, "failed"] for line in lines)
        [line] = [line for line in lines if line.startswith(f"Failed: {hook}")]
        assert why in line
        for kind in ("json", "csv", "html"):
            assert hook in files[kind].read_text()
            assert why in files[kind].read_text()
    assert files["png"].read_bytes().startswith(b"\x89PNG")


def test_compare_writes_what_can_be_written(tmp_path: Path) -> None:
    """Also into a pipe that closes, and when a disk is full."""
    table = tmp_path / "out.csv"
    command = [sys.executable, "-m", "commhooks", "compare", "--model", "support.compared:net"]
    command += ["--hooks", "bf16", "--steps", "1", "--json", "/dev/full", "--csv", str(table)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as closed:
        result = subprocess.run(
            command, env=environment, stdout=closed, stderr=subprocess.PIPE, text=True, check=False
        )
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    assert table.read_text().count("\n") == 1 + 3


def test_compare_with_no_hook_that_can_be_made() -> None:
    text = run("compare", "--model", "support.compared:net", "--hooks", "int9", status=1)
    assert text.strip().startswith("Error: hook 'int9': no hook is named 'int9'")


@pytest.mark.exhaustive
def test_compare_on_the_ranks_of_torchrun() -> None:
    """They are the hosts of the job, and only rank 0 prints."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["-m", "commhooks", "compare", "--model", "support.compared:net"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "COLUMNS": "80"}
    text = subprocess.check_output(
        [*command, "--hooks", "bf16", "--steps", "2"], env=environment, text=True, timeout=240
    )
    assert text.count("support.compared:net, 2 ranks") == 1
    assert "network of these hosts, measured" in text
    assert re.search(r"^ *bf16 .*37\.2 kB +2\.0x", text, re.M)


@pytest.mark.parametrize("option", [("--link", "1gbit"), ("--world-size", "2")])
def test_compare_under_torchrun_has_the_ranks_and_the_network_of_the_job(
    option: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    assert "torchrun has started the ranks" in " ".join(compare_small(*option, status=2).split())


@pytest.mark.parametrize(
    ("more", "status", "says"),
    [
        (["--hooks", "topk)"], 2, "'--hooks' / '--hook': hook"),
        (["--timeout", "0"], 2, "Invalid value for '--timeout'"),
        (["--link", "1gb"], 2, "Invalid value for '--link': expected a rate"),
        (
            ["--model", "support.compared:nett"],
            1,
            "Error: 'support.compared:nett': 'support.compared' has no 'nett'",
        ),
        (["--world-size", "0"], 2, "0 is not in the range x>=2"),
        (["--steps", "0"], 2, "0 is not in the range x>=1"),
        (["--world-size", "4096"], 1, "Error: 4096 ranks are more than"),
        (["--json", "/nonexistent/file.json"], 2, "Invalid value for '--json'"),
        (["--plot", "out.xyz"], 2, "expected a name that ends with one of"),
    ],
)
def test_bad_input_of_compare(more: list[str], status: int, says: str) -> None:
    assert says in compare_small(*more, status=status)


def test_a_file_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may write anywhere, so the answer of the system is replaced."""
    asked = []
    monkeypatch.setattr(os, "access", lambda path, _: asked.append(path))
    text = compare_small("--json", str(tmp_path / "new.json"), status=2)
    assert "cannot write" in text
    assert asked == [tmp_path]


@pytest.fixture
def _not_ignoring_interrupts() -> Iterator[None]:
    """Restore the handler: in the background, shells and their children ignore interrupts."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_not_ignoring_interrupts")
@pytest.mark.parametrize("command", ["list", "compare"])
def test_an_interrupt_before_anything_is_measured_ends_with_130(
    command: str, tmp_path: Path
) -> None:
    script = tmp_path / "interrupted_script.py"
    script.write_text("import signal\nsignal.raise_signal(signal.SIGINT)\n")
    options = {"list": ["--import", str(script)]}.get(
        command, ["--model", f"{script}:net", "--hooks", "bf16"]
    )
    assert "Aborted!" in run(command, *options, status=130)


@pytest.mark.exhaustive  # tests/cluster has links after an interrupt, and ranks of a killed parent
@needs_links
@pytest.mark.usefixtures("_not_ignoring_interrupts")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_comparison_leaves_nothing(tmp_path: Path, number: int) -> None:
    command = [sys.executable, "-m", "commhooks", "compare", "--model", "support.compared:net"]
    command += ["--hooks", "bf16", "--link", "10mbit", "--steps", "20", "--world-size", "2"]
    # Its temporary files go here, and its processes are found by it. Torch's own cache stays.
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    environment = os.environ | {
        "TMPDIR": str(temporary),
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    deadline = time.monotonic() + 120
    with subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL) as process:
        while not has_hosts(process.pid):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.5)  # looking takes much of a core
        assert len(processes_with(temporary)) > 1
        process.send_signal(number)
        assert process.wait(60) != 0
    wait_until(lambda: not processes_with(temporary))
    assert list(temporary.iterdir()) == []
    assert not has_hosts(process.pid)


def has_hosts(pid: int) -> bool:
    return re.search(rf"\bch{pid}[a-z]", hosts_and_interfaces()) is not None


def hosts_and_interfaces() -> str:
    commands = (["ip", "-brief", "link"], ["ip", "netns", "list"])
    return "".join(subprocess.check_output(command, text=True) for command in commands)


def processes_with(folder: Path) -> list[str]:
    """Processes whose temporary files would go to ``folder``."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if f"TMPDIR={folder}".encode() in path.read_bytes().split(b"\0"):
                found.append(path.parent.name)
    return found
