"""The page of results, against the results that are stored."""

import json
from pathlib import Path

import pytest

from bench.results_page import page
from bench.results_page.kind import number


def test_the_page_is_up_to_date() -> None:
    """If not: ``make results``."""
    made = page.make_page()
    assert page.TARGET.read_text() == made.text
    stored = {path.name for path in page.TARGET.with_suffix("").glob("*.svg")}
    assert stored == set(made.plots)


def test_a_result_of_no_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "2026-01-01-odd.json").write_text(json.dumps({"odd": 1}))
    with pytest.raises(page.UnknownResultError, match=r"odd\.json: expected .* found \['odd'\]"):
        page.make_page(tmp_path)


def test_each_result_is_of_one_kind() -> None:
    for path in page.RESULTS.glob("*.json"):
        document = json.loads(path.read_text())
        assert sum(kind.recognises(document) for kind in page.KINDS) == 1, path


def test_a_comparison(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    row = {"hook": "bf16", "link": "1gbit", "measured": True, "step_seconds": 0.5, "to_torch": 0.6}
    document = {"model": "gpt2-small", "world_size": 2, "notes": ["a note"], "rows": [row]}
    (tmp_path / "2026-01-01-gpt2-small.json").write_text(json.dumps(document))
    made = page.make_page(tmp_path)
    assert "## Gpt2 small (2026-01-01)\n\ngpt2-small, 2 ranks.\n\n- a note\n" in made.text
    assert "| bf16 | 500 ms | 0.6 |" in made.text
    assert list(made.plots) == ["2026-01-01-gpt2-small-1gbit.svg"]
    made.plots["2026-01-01-gpt2-small-1gbit.svg"](tmp_path / "plot.svg")
    assert "step over torch's" in (tmp_path / "plot.svg").read_text()


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
    assert number(column, value) == text
