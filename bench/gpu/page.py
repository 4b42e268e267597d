"""Results of a run of ``make gpu-check``, and the figures that other pages quote."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.gpu.machine import device_code
from bench.tables import case_of, groups, table

Run = Mapping[str, Any]

ROOT = Path(__file__).resolve().parents[2]

NOT_MEASURED = "(not measured)"
QUOTED = ("asyncOp", "one collective", "int8", "topk")
"""The host times that pages quote, which a run may lack."""


@dataclass(frozen=True)
class Aim:
    """A bound for a figure of some benchmarks, whose names begin with ``tests`` or one of them."""

    what: str
    tests: str | tuple[str, ...]
    figure: str
    limit: float
    is_least: bool = False
    part: str = ""
    """The key of the figure, if it has several."""
    unit: str = ""

    def row(self, benchmarks: Sequence[Mapping[str, Any]]) -> dict[str, str] | None:
        """Return a line of the table of aims; nothing if nothing was measured."""
        found: dict[str, float] = {}
        for row in benchmarks:
            figure = row["extra_info"].get(self.figure)
            if row["name"].startswith(self.tests) and figure is not None:
                found[case_of(row["name"])] = figure[self.part] if self.part else figure
        if not found:
            return None
        ends = [f"{end:.3g}" for end in (min(found.values()), max(found.values()))]
        missed = ", ".join(
            f"{case} {figure:.3g}"
            for case, figure in sorted(found.items())
            if (figure < self.limit if self.is_least else figure > self.limit)
        )
        return {
            "what": self.what,
            "aim": f"at {'least' if self.is_least else 'most'} {self.limit:.3g}{self.unit}",
            "measured": " to ".join(dict.fromkeys(ends)) + self.unit,
            "met": "yes" if not missed else f"no: {missed}" if len(found) > 1 else "no",
        }


_ONE_COLLECTIVE = "test_replay[one collective", "test_replay[fp16"
_REPLAYED = "test_replay[int8", "test_replay[topk", "test_replay[powersgd"
_COPY = "bandwidth, as a share of a plain copy"
AIMS = (
    Aim(f"pack, 1.5 GB in the shapes of GPT-2 small: {_COPY}", "test_large[pack",
        "share_of_copy", 0.85, is_least=True),
    Aim("unpack, the same", "test_large[unpack", "share_of_copy", 0.85, is_least=True),
    Aim("pack and unpack, 2000 parameters of 256 elements: time, as a share of torch's copies, "
        "one by one", "test_many_small", "ratio", 0.5, part="torch, one by one"),
    Aim(f"encode, each codec, 256 MB: {_COPY}", "test_encode", "share_of_copy", 0.8,
        is_least=True),
    Aim("decode, the same, of one message and of four", "test_decode", "share_of_copy", 0.8,
        is_least=True),
    Aim("top-k, 1 % of 256 MB: one read of the data, as a share of the time", "test_selection",
        "share_of_copy", 1 / 3, is_least=True),
    Aim("PowerSGD rank 4 on the shapes of GPT-2 small: what it adds to a backward, as a share of "
        "what torch's hook adds", "test_powersgd", "added_to_torch_added", 0.5),
    Aim("training step of GPT-2 small in bf16: time, as a share of that with torch's wrapper",
        "test_training_step", "ratio", 1.0, part="torch"),
    Aim("Python on the host, per bucket and hook", "test_host_time", "microseconds", 60.0,
        unit=" µs"),
    Aim("replay of a bucket, on the host, with one collective", _ONE_COLLECTIVE, "microseconds",
        40.0, unit=" µs"),
    Aim("the same, with more", _REPLAYED, "microseconds", 100.0, unit=" µs"),
)  # fmt: skip


def sections(run: Run) -> Iterator[str]:
    """Render a run: how its stages ended, and what they measured."""
    yield f"{_machine(run)}."
    yield table(
        {
            "stage": stage["name"],
            "ended": stage["status"],
            "seconds": f"{stage['seconds']:.0f} s",
            "last line": stage["last_line"],
        }
        for stage in run["stages"]
    )
    if against := _aims(run):
        yield "### Against the aims"
        yield against
    yield from groups(run["benchmarks"])


def has_aims(document: Run) -> bool:
    """Whether a file is of a run that has measured something with an aim: one part may not."""
    return {"stages", "machine"} <= document.keys() and bool(_aims(document))


def facts(run: Run) -> dict[str, str]:
    """Return the figures that other pages quote, by name."""
    machine = run["machine"]
    versions = machine["versions"]
    host = {
        case_of(row["name"]): f"{row['extra_info']['microseconds']:.0f}"
        for row in run["benchmarks"]
        if row["name"].startswith("test_host")
    }
    return {
        "gpu": f"{machine['devices'][0].partition(',')[0]} ({_commit(machine)})",
        "gpu run": f"{run['date']}, torch {versions['torch']}, CUDA {machine['cuda']}, NCCL "
        f"{machine['nccl']}, CuPy {versions['cupy']}",
        "gpu aims": _aims(run),
        "gpu communicators": _communicators(run),
        "gpu deaths": deaths(run["benchmarks"]),
        **{f"gpu host {case}": host.get(case, NOT_MEASURED) for case in QUOTED},
    }


def _commit(machine: Mapping[str, Any]) -> str:
    is_of_today = machine.get("device_code") == device_code(ROOT)
    return f"{'' if is_of_today else 'not since '}commit {machine['commit'] or 'unknown'}"


def _aims(run: Run) -> str:
    rows = [row for aim in AIMS if (row := aim.row(run["benchmarks"]))]
    return table(rows, aligned=False) if rows else ""


def deaths(benchmarks: Sequence[Mapping[str, Any]]) -> str:
    """Return a table of how a rank ended after another one had died."""
    rows = [row for row in benchmarks if row["name"].startswith("test_death")]
    cases = ({"rank 1, hook, with": case_of(row["name"])} | row["extra_info"] for row in rows)
    return table(cases, aligned=False) if rows else "Not yet measured."


def _communicators(run: Run) -> str:
    parts = []
    for row in run["benchmarks"]:
        if row["name"].startswith("test_connecting"):
            case, info = case_of(row["name"]), row["extra_info"]
            limit = "NCCL's own limit" if case == "None" else f"`max_ctas={case}`"
            mebibytes, milliseconds = info["memory_bytes"] / 2**20, info["milliseconds"]
            parts.append(f"{mebibytes:.0f} MiB and {milliseconds:.0f} ms with {limit}")
    return ", ".join(parts) or NOT_MEASURED


def _machine(run: Run) -> str:
    machine = run["machine"]
    named = {"driver": "driver", "CUDA": "cuda", "NCCL": "nccl", "Python": "python"}
    parts = [f"{name} {machine[key]}" for name, key in named.items() if machine[key]]
    parts += [f"{name} {found}" for name, found in machine["versions"].items() if found]
    parts += [f"commit {machine['commit']}"] if machine["commit"] else []
    return ", ".join([*machine["devices"], *parts])
