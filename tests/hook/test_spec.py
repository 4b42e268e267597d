"""Hooks parsed from text, and from what Python users have."""

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support import my_hooks

import commhooks
from commhooks import CommHookError, CommHookOptionError, UnknownHookError
from commhooks.algorithms import Guard
from commhooks.hook.spec import HookLike, hook_spec, parse_hook_specs, split_hook_specs


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
    spec = hook_spec(text)
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


@pytest.mark.parametrize(
    ("text", "normal", "config"),
    [
        ("support.my_hooks:Coarse", None, {"name": "support.my_hooks:Coarse"}),
        ("support.my_hooks:Coarse:step=4", None, {"name": "support.my_hooks:Coarse", "step": 4}),
        ("coarse:step=4", None, {"name": "support.my_hooks:Coarse", "step": 4}),
        ("powersgd,rank=4", "powersgd:rank=4", {"name": "powersgd", "rank": 4}),
    ],
)
def test_classes_and_other_spellings(
    text: str, normal: str | None, config: dict[str, object]
) -> None:
    importlib.import_module("support.my_hooks")
    [split] = split_hook_specs(text)
    spec = hook_spec(split)
    assert str(spec) == (normal or text)
    assert spec.config.items() >= config.items()


def test_a_hook_of_a_script(tmp_path: Path) -> None:
    source = Path(my_hooks.__file__).read_text().replace('"coarse"', '"scripted"')
    script = tmp_path / "my_script.py"
    script.write_text(source)
    made = hook_spec(f"{script}:Coarse:step=2").create()
    assert getattr(made, "step", None) == 2
    assert hook_spec("scripted:step=2").config["name"] == "my_script:Coarse"
    with pytest.raises(UnknownHookError, match=r"'missing\.py' cannot be imported: FileNotFound"):
        hook_spec("missing.py:Coarse")
    other = tmp_path / "other" / "my_script.py"
    other.parent.mkdir()
    other.write_text(source)
    with pytest.raises(UnknownHookError, match="another module is named 'my_script'"):
        hook_spec(f"{other}:Coarse")


@pytest.mark.parametrize(
    "hook",
    [
        my_hooks.Coarse(step=4),
        {"name": "coarse", "step": 4},
        ("coarse", {"step": 4}),
        ("support.my_hooks:Coarse", {"step": 4}),
    ],
)
def test_python_objects(hook: HookLike) -> None:
    spec = hook_spec(hook)
    assert spec.text == "coarse:step=4"
    # A process that has not imported the module finds the class.
    assert spec.config == {"name": "support.my_hooks:Coarse", "step": 4}
    assert spec.create() == my_hooks.Coarse(step=4)


def test_nested_hooks_and_classes_without_a_name() -> None:
    outer = commhooks.create("cast", inner=my_hooks.Coarse(step=2), dtype="bfloat16")
    for hook in (outer, "cast:inner=(coarse:step=2),dtype=bfloat16"):
        inner = hook_spec(hook).config["inner"]
        assert inner == {"name": "support.my_hooks:Coarse", "step": 2}
    unnamed = my_hooks.Unnamed()
    assert hook_spec(unnamed).config == {"name": "support.my_hooks:Unnamed"}
    assert hook_spec(my_hooks.Unnamed).create() == unnamed == commhooks.create(unnamed.to_config())


def test_a_class_that_other_processes_cannot_find() -> None:
    class Local(my_hooks.Unnamed):
        pass

    with pytest.raises(CommHookError, match=r"has no .*<locals>"):
        hook_spec(Local())
    with pytest.raises(CommHookOptionError, match=r"expected a hook: a text .*found 3"):
        hook_spec(3)  # type: ignore[arg-type]
    with pytest.raises(CommHookOptionError, match="hook 'guard' needs the option 'inner'"):
        hook_spec(Guard)
    with pytest.raises(CommHookError, match="expected a subclass of CommHook"):
        hook_spec("support.my_hooks:dataclass")


def test_a_list_keeps_what_can_be_made() -> None:
    specs, reasons = parse_hook_specs(["int9", "bf16", "topk:density=9", "bf16", "route"])
    assert [spec.text for spec in specs] == ["bf16"]
    assert list(reasons) == ["int9", "topk:density=9", "route"]
    assert "did you mean 'int8'" in reasons["int9"]
    assert "it is not <= 1" in reasons["topk:density=9"]
    assert "needs the option 'rules'" in reasons["route"]


def test_a_name_with_dots_is_no_module() -> None:
    @commhooks.register_hook("test_acme.int4")
    @dataclass
    class Acme(commhooks.CommHook):
        async def reduce(self, bucket: Any, comm: Any) -> Any:
            return bucket.buffer()

    with pytest.raises(CommHookError, match="'fast' is not option=value"):
        parse_hook_specs(["test_acme.int4:fast"])
