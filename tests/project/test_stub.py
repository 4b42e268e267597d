"""The typed stub says what the compiled module has: no more, no less, with the same arguments."""

import ast
import re
from pathlib import Path
from typing import Any

import pytest
import torch  # noqa: F401

import reducer
from reducer import _C

STUB = ast.parse((Path(reducer.__file__).parent / "_C.pyi").read_text())
CLASSES = {node.name: node for node in STUB.body if isinstance(node, ast.ClassDef)}


def public(names: Any) -> set[str]:
    return {name for name in names if not name.startswith("_")}


def functions(node: ast.ClassDef) -> dict[str, ast.FunctionDef]:
    """By name; of a property, the getter."""
    found: dict[str, ast.FunctionDef] = {}
    for item in node.body:
        if isinstance(item, ast.FunctionDef):
            found.setdefault(item.name, item)
    return found


FUNCTIONS = {node.name: node for node in STUB.body if isinstance(node, ast.FunctionDef)}


def test_same_names() -> None:
    assert {*CLASSES, *FUNCTIONS} == public(vars(_C))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_same_function_arguments(name: str) -> None:
    arguments = [argument.arg for argument in FUNCTIONS[name].args.args]
    assert [argument for argument, _ in documented_arguments(getattr(_C, name))] == arguments


@pytest.mark.parametrize("name", CLASSES)
def test_same_members(name: str) -> None:
    assert public(functions(CLASSES[name])) == public(vars(getattr(_C, name)))


@pytest.mark.parametrize("name", CLASSES)
def test_same_bases(name: str) -> None:
    bases = [
        base.__name__
        for base in getattr(_C, name).__bases__
        if base.__module__ != "pybind11_builtins"
    ]
    assert [ast.unparse(base).split(".")[-1] for base in CLASSES[name].bases] == bases


def documented_arguments(function: Any) -> list[tuple[str, str | None]]:
    """(name, default) of each argument, from the signature that opens a pybind11 docstring."""
    signature = function.__doc__.splitlines()[0]
    inside = signature[signature.index("(") + 1 : signature.rindex(") ->")]
    # Commas inside brackets belong to types.
    parts = re.split(r",\s*(?![^\[]*\])", inside)
    arguments = []
    for part in parts:
        match = re.fullmatch(r"(\w+)(?::\s*(.*?))?(?:\s*=\s*(.*))?", part.strip())
        if match and match[1] not in {"self", "arg0"}:
            arguments.append((match[1], match[3]))
    return arguments


def stub_arguments(function: ast.FunctionDef) -> list[tuple[str, str | None]]:
    positional = function.args.args[1:]
    defaults: list[ast.expr | None] = [None] * (len(positional) - len(function.args.defaults))
    pairs = [
        *zip(positional, [*defaults, *function.args.defaults], strict=True),
        *zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True),
    ]
    return [(argument.arg, default and ast.unparse(default)) for argument, default in pairs]


@pytest.mark.parametrize(
    ("class_name", "name"),
    [(c, f) for c, node in CLASSES.items() for f in functions(node)],
)
def test_same_arguments(class_name: str, name: str) -> None:
    member = vars(getattr(_C, class_name))[name]
    if isinstance(member, property):
        assert "property" in ast.unparse(functions(CLASSES[class_name])[name].decorator_list[0])
    else:
        assert documented_arguments(member) == stub_arguments(functions(CLASSES[class_name])[name])
