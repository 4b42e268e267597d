"""Hooks parsed from text."""

import pytest

from commhooks import CommHookError, CommHookOptionError, UnknownHookError
from commhooks.hook.spec import parse_hook_spec, parse_hook_specs, split_hook_specs


@pytest.mark.parametrize(
    ("text", "config"),
    [
        ("bf16", {"name": "bf16"}),
        ("powersgd:rank=8,start_step=0", {"name": "powersgd", "rank": 8, "start_step": 0}),
        ("topk:density=0.001", {"name": "topk", "density": 0.001}),
        ("int8:stochastic=true", {"name": "int8", "stochastic": True}),
        ("cast:inner=bf16,dtype=bfloat16", {"name": "cast", "inner": "bf16", "dtype": "bfloat16"}),
        (
            "error_feedback:inner=(topk:density=0.1,error_feedback=false)",
            {
                "name": "error_feedback",
                "inner": {"name": "topk", "density": 0.1, "error_feedback": False},
            },
        ),
        (
            'schedule:stages=[[0,"allreduce"],[50,{"name":"powersgd"}]]',
            {
                "name": "schedule",
                "stages": [[0, "allreduce"], [50, {"name": "powersgd"}]],
            },
        ),
        ('{"name": "powersgd", "rank": 2}', {"name": "powersgd", "rank": 2}),
    ],
)
def test_all_forms(text: str, config: dict[str, object]) -> None:
    spec = parse_hook_spec(text)
    assert spec.config == config
    assert str(spec) == text
    assert spec.create().name == config["name"]


def test_commas_separate_hooks_and_options() -> None:
    texts = split_hook_specs('bf16,powersgd:rank=4,start_step=0,{"name": "topk"},int8')
    specs, reasons = parse_hook_specs(texts)
    assert reasons == {}
    assert [spec.text for spec in specs] == [
        "bf16",
        "powersgd:rank=4,start_step=0",
        '{"name": "topk"}',
        "int8",
    ]


@pytest.mark.parametrize(
    ("text", "kind", "says"),
    [
        ("powersg", UnknownHookError, "did you mean 'powersgd'"),
        ("powersgd:rank=x", CommHookOptionError, "expected int, >= 1; found 'x'"),
        ("powersgd:rnak=4", CommHookOptionError, "did you mean 'rank'"),
        ("powersgd:rank", CommHookOptionError, "'rank' is not option=value"),
        ("powersgd:", CommHookOptionError, "'' is not option=value"),
        ("powersgd:rank=4,rank=5", CommHookOptionError, "'rank' is given twice"),
        ("error_feedback:inner=(topk:density=9)", CommHookOptionError, "inner.density"),
        ("error_feedback:inner=(topk", CommHookOptionError, r"'\)' is missing"),
        ("topk)", CommHookOptionError, r"'\)' closes nothing"),
        ('schedule:stages=[[0,"bf16]]', CommHookOptionError, "'\"' is missing"),
        ('{"name"}', CommHookOptionError, "is not JSON"),
        ("", CommHookOptionError, "'' is not a name"),
        ("bf16,", CommHookOptionError, "'' is not a name"),
    ],
)
def test_errors_name_the_mistake(text: str, kind: type[CommHookError], says: str) -> None:
    with pytest.raises(kind, match=says) as caught:
        parse_hook_specs(split_hook_specs(text))
    assert str(caught.value).startswith("hook '")


def test_a_list_keeps_what_can_be_made() -> None:
    specs, reasons = parse_hook_specs(["int9", "bf16", "topk:density=9", "bf16", "route"])
    assert [spec.text for spec in specs] == ["bf16"]
    assert list(reasons) == ["int9", "topk:density=9", "route"]
    assert "did you mean 'int8'" in reasons["int9"]
    assert "it is not <= 1" in reasons["topk:density=9"]
    assert "needs the option 'rules'" in reasons["route"]
