"""The page of results agrees with the stored results."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")  # extra `results`
from bench import figures, summary, tables
from bench import results_page as page
from bench.gpu import machine
from bench.gpu import page as gpu_page
from bench.language import HEADLINE, Courses
from commhooks.cli.plots import color_of


def test_the_page_is_up_to_date() -> None:
    """If not: ``make results``. Marks hide no text."""
    for path, text in page.make_pages().items():
        assert (page.ROOT / path).read_text() == text, path
        # What follows a comment at the start of a line is no Markdown.
        assert not re.search(r"^[-\s]*<!--=.*-->.", text, re.M), path
    stored = {path.name for path in (page.DOCS / "results").glob("*.svg")}
    assert stored == set(summary.plots(page.RESULTS))


def test_marks_are_filled_in() -> None:
    text = "It is <!--=ratio-->2<!--=--> times.\n\n<!--=table-->\nold\n<!--=-->\n"
    filled = "It is <!--=ratio-->3<!--=--> times.\n\n<!--=table-->\n\n| new |\n\n<!--=-->\n"
    assert summary.fill(text, {"ratio": "3", "table": "| new |"}) == filled
    assert summary.fill(filled, {"ratio": "3", "table": "| new |"}) == filled
    with pytest.raises(LookupError, match=r"found 'ratio'. Known are: table"):
        summary.fill(text, {"table": "| new |"})


def test_a_result_of_no_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "2026-01-01-odd.json").write_text(json.dumps({"odd": 1}))
    with pytest.raises(ValueError, match=r"odd\.json: expected .* found \['odd'\]"):
        page.make_tables(tmp_path)


def test_each_result_is_of_one_kind() -> None:
    for path in page.RESULTS.glob("*.json"):
        document = json.loads(path.read_text())
        assert sum(keys <= document.keys() for keys, _ in page.KINDS.values()) == 1, path


def test_a_comparison(tmp_path: Path) -> None:
    row = {"hook": "bf16", "link": "1gbit", "measured": True, "step_seconds": 0.5, "to_torch": 0.6}
    row["predicted_seconds"] = 0.45
    document = {"model": "gpt2-small", "world_size": 2, "notes": ["a note"], "rows": [row]}
    (tmp_path / "2026-01-01-gpt2-small.json").write_text(json.dumps(document))
    made = page.make_tables(tmp_path)
    assert "## Gpt2 small (2026-01-01)\n\ngpt2-small, 2 ranks.\n\n- a note\n" in made
    assert re.search(r"\| bf16 +\| 500 ms +\| 0.6 +\| 450 ms +\| -10% ", made)


def test_steps_over_links_are_those_of_comparisons_of_the_newest_date(tmp_path: Path) -> None:
    row = {"hook": "bf16", "bits_per_second": 1e9, "measured": True}
    row |= {"step_seconds": 0.5, "predicted_seconds": 0.4}
    others = [row | {"measured": False}, row | {"predicted_seconds": None}, row | {"hook": "torch"}]
    for size in (2, 4):
        document = {"model": "a", "world_size": size, "rows": [row, *others]}
        path = tmp_path / f"2026-01-02-a-machine-links-{size}-ranks.json"
        path.write_text(json.dumps(document))
    (tmp_path / "2026-01-01-a-machine-links-3-ranks.json").write_text(json.dumps({"rows": [{}]}))
    found = summary.cells(tmp_path)
    assert sorted(cell["ranks"] for cell in found) == [2, 4]
    assert {(cell["step_seconds"], cell["predicted_seconds"]) for cell in found} == {(0.5, 0.4)}


def test_the_pareto_front_is_what_nothing_beats() -> None:
    points = [(2.0, 1.0), (1.0, 3.0), (3.0, 1.0), (2.0, 2.0), (4.0, 0.5)]
    assert figures.pareto_front(points) == [(1.0, 3.0), (2.0, 1.0), (4.0, 0.5)]


def test_plots_are_drawn(tmp_path: Path) -> None:
    """With text as text, on a transparent background."""
    cells = [
        {"hook": hook, "ranks": ranks, "bits_per_second": 1e9}
        | {"step_seconds": 0.3 * ranks, "predicted_seconds": 0.25 * ranks}
        for hook in ("bf16", "int8:block_size=64")
        for ranks in (2, 4)
    ]
    figures.scaling(cells, tmp_path / "plot.svg")
    text = (tmp_path / "plot.svg").read_text()
    assert ">int8<" in text
    assert color_of("int8:block_size=64") == color_of("int8")
    assert color_of("int8") in text
    assert "fill: #ffffff" not in text


def names_in(plot: str) -> set[str]:
    return set(re.findall(r">([^<>]+)</text>", (page.DOCS / "results" / plot).read_text()))


def test_each_plot_names_what_it_shows() -> None:
    trained = Courses(page.RESULTS).over(HEADLINE)
    shown = {text.partition(" ")[0] for text in names_in("slow-link.svg")}
    assert {"allreduce", "noop", "bf16"} <= {course.name for course in trained} <= shown
    assert set(figures.LABELED) <= names_in("fidelity.svg")
    hooks = {figures.short(cell["hook"]) for cell in summary.cells(page.RESULTS)}
    assert hooks | {"measured", "predicted"} <= names_in("scaling.svg")
    assert {"int8", "onebit", "fp4 mxfp4", "a plain copy"} <= names_in("kernels.svg")


def test_a_gpu_check(tmp_path: Path) -> None:
    stage = {"name": "tests", "status": "failed", "seconds": 7.0}
    stage["last_line"] = "1 | 2 failed"
    shares = {"int8": 0.9, "int2": 0.5}
    rows = [
        {"group": "gpu: pack", "name": f"test_encode[{case}]"}
        | {"extra_info": {"aim": "a", "share_of_copy": share}}
        for case, share in shares.items()
    ]
    document: Any = {"machine": machine.describe(page.ROOT), "stages": [stage], "benchmarks": rows}
    path = tmp_path / "2026-01-01-a-device.json"
    path.write_text(json.dumps(document))
    rows = [re.sub(" +", " ", line) for line in "\n".join(page.section_of(path)).splitlines()]
    assert "| tests | failed | 7 s | 1 \\| 2 failed |" in rows
    assert "| int8 | 0.9 |" in rows
    (against,) = (row for row in rows if row.startswith("| encode"))
    assert against.endswith("| at least 0.8 | 0.5 to 0.9 | no: int2 0.5 |")
    document["machine"] |= {"devices": ["A device, 80 GiB"]}
    quoted = gpu_page.facts(document | {"date": "2026-01-01"})
    assert quoted["gpu"] == f"A device (commit {document['machine']['commit']})"
    assert quoted["gpu communicators"] == quoted["gpu host int8"] == "(not measured)"


@pytest.mark.parametrize(
    "changed",
    [
        "csrc/packing/cuda/element.cuh",
        "commhooks/kernels/codecs/formats.h",
        "commhooks/codecs/block.py",
    ],
)
def test_results_of_other_device_code_are_said_to_be_old(
    changed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (
        "csrc/packing/cuda/element.cuh",
        "commhooks/kernels/codecs/formats.h",
        "commhooks/codecs/block.py",
        "commhooks/native.py",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(
            "import commhooks.kernels" if name == "commhooks/codecs/block.py" else ""
        )
    monkeypatch.setattr(gpu_page, "ROOT", tmp_path)
    about = {"devices": ["A device, 80 GiB"], "cuda": "13", "nccl": "2", "commit": "abc"}
    about |= {"versions": {"torch": "2.11.0", "cupy": None}}
    about["device_code"] = machine.device_code(tmp_path)
    run = {"date": "2026-01-01", "machine": about, "benchmarks": []}
    (tmp_path / "commhooks/native.py").write_text("launches = 'nothing'")
    assert gpu_page.facts(run)["gpu"] == "A device (commit abc)"
    (tmp_path / changed).write_text("# changed, commhooks.kernels")
    assert gpu_page.facts(run)["gpu"] == "A device (not since commit abc)"


@pytest.mark.parametrize(
    ("column", "value", "text"),
    [
        ("seconds", 0.1234, "123 ms"),
        ("floor_seconds", 1.25, "1,250 ms"),
        ("wire_bytes", 1843200, "1.84 MB"),
        ("bandwidth", 2.5e9, "2.5 GB/s"),
        ("ratio", 82.0666, "82.07"),
        ("error", None, ""),
        ("seconds", {"ours": 0.002, "torch": 0.003}, "ours 2 ms, torch 3 ms"),
    ],
)
def test_numbers_have_the_units_of_their_column(column: str, value: object, text: str) -> None:
    assert tables.quantity(column, value) == text
