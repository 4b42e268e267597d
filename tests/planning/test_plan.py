"""Plans as text and in files."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from support.planning_problems import group, problem_of, random_problem

from commhooks.costs.timeline import Timing
from commhooks.errors import CommHookOptionError, CommHookStateError
from commhooks.planning import GroupPlan, Plan, merged, solve
from commhooks.planning.plan import label_of


@pytest.fixture(scope="module")
def plan() -> Plan:
    return solve(random_problem(2, buckets=3, groups=2, hooks=4))


def test_a_saved_plan_is_loaded_as_it_was(plan: Plan, tmp_path: Path):
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded == plan
    assert loaded.hook_of() == {name: row.hook for row in plan.rows for name in row.names}


@pytest.mark.parametrize(
    ("damage", "found"),
    [
        (lambda data: [], "found \\[\\]"),
        (lambda data: data | {"format": 2}, "found format 2"),
        (lambda data: {key: data[key] for key in data if key != "rows"}, "missing .*'rows'"),
        (lambda data: data | {"error": "much"}, "error: found 'much'"),
        (lambda data: data | {"before": {}}, "missing .*'backward_seconds'"),
        (lambda data: data | {"rows": data["rows"] * 2}, "a parameter is in two rows"),
        (lambda data: data | {"rows": [data["rows"][0] | {"names": "weight"}]}, "names: found"),
        (lambda data: data | {"rows": [data["rows"][0] | {"hook": 3}]}, "hook: found 3"),
        (lambda data: data | {"rows": [data["rows"][0] | {"color": 3}]}, "KeyError: 'color'"),
        (lambda data: data | {"rows": [data["rows"][0] | {"elements": 1.5}]}, "elements: found 1"),
        (lambda data: data | {"limit": True}, "limit: found True"),
        (lambda data: data | {"color": 3}, "KeyError: 'color'"),
    ],
)
def test_a_damaged_plan_is_not_loaded(plan: Plan, tmp_path: Path, damage, found: str):
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(damage(plan.to_json())))
    with pytest.raises(CommHookStateError, match=f"plan.json: expected a plan.*{found}"):
        Plan.load(path)


@pytest.mark.parametrize("content", [None, b"", b"{", b"\xff\xfe"])
def test_a_file_that_is_no_plan_is_not_loaded(tmp_path: Path, content: bytes | None):
    path = tmp_path / "plan.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(CommHookStateError, match=r"plan\.json: expected a plan"):
        Plan.load(path)


def test_a_plan_prints_as_a_table(plan: Plan):
    lines = str(plan).splitlines()
    assert lines[0].split()[:3] == ["group", "params", "hook"]
    assert all(
        line.startswith(label_of(row.names))
        for line, row in zip(lines[1:], merged(plan.rows), strict=False)
    )
    assert plan.reason in lines


def test_numbers_that_do_not_belong_together_are_no_problem():
    one = group("one", 10)
    for groups, error, found in [
        ((one, one), 0.1, "parameter 'one' is in two groups"),
        ((one,), -0.1, "limit of at least 0, found -0.1"),
        ((one,), float("nan"), "found nan"),
        ((group("one", 10, less=one.choices["allreduce"]),), 0.1, "choices of allreduce, half"),
        ((replace(one, choices={}),), 0.1, "choices of allreduce, half, found \\[\\]"),
        ((group("one", 10, norm=float("inf")),), 0.1, "finite norm, found inf"),
    ]:
        with pytest.raises(CommHookOptionError, match=found):
            problem_of(*groups, error=error)


def test_equal_layers_are_one_row():
    def row(layer: int, part: str, hook: str, error: float) -> GroupPlan:
        name = f"h.{layer}.{part}"
        return GroupPlan((name,), layer, hook, 10, 5.0, 0.1, error, 2.0, f"saves {layer}%")

    rows = [row(i, "mlp", "int4", 0.3 if i else 0.4) for i in range(12)]
    rows += [row(3, "attention", "int4", 0.1), row(12, "mlp", "int8", 0.1)]
    rows += [replace(row(13, "mlp", "int4", 0.1), elements=11)]
    found = merged(rows)
    times = "\N{MULTIPLICATION SIGN}"
    assert [label_of(each.names) for each in found] == [
        f"h.*.mlp {times}12",
        *(label_of(each.names) for each in rows[12:]),
    ]
    assert found[1:] == rows[12:]
    together = found[0]
    assert (together.elements, together.wire_bytes, together.names[11]) == (120, 60.0, "h.11.mlp")
    assert together.seconds == pytest.approx(1.2)
    assert together.norm == pytest.approx(2 * 12**0.5)
    assert together.error == pytest.approx(((0.4**2 + 11 * 0.3**2) / 12) ** 0.5)
    timing = Timing(0.0, 0.0, 0.0, 0)
    lines = str(Plan(tuple(rows), timing, timing, 0.1, 0.2, "by hand")).splitlines()
    assert sum("int4" in line for line in lines) == 3


@pytest.mark.parametrize(
    ("names", "label"),
    [
        (("head",), "head"),
        (("h.0.w", "h.1.w"), "h.*.w x2"),
        (("h.0.w", "h.1.w", "h.0.v"), "h.*.w ... x3"),
    ],
)
def test_labels_have_what_names_have_in_common(names: tuple[str, ...], label: str):
    assert label_of(names) == label.replace("x", "\N{MULTIPLICATION SIGN}")
