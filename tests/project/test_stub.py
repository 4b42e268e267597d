"""The typed stubs list the names of the compiled modules and their arguments, no more, no less."""

import ast
import importlib
import re
from typing import Any

import pytest

from commhooks.extensions import EXTENSIONS

MODULES = {extension.name: importlib.import_module(extension.name) for extension in EXTENSIONS}
STUBS = {
    extension.name: ast.parse((extension.folder / "_C.pyi").read_text()) for extension in EXTENSIONS
}


NODES = [(name, node) for name, stub in STUBS.items() for node in stub.body]
CLASSES = {(module, node.name): node for module, node in NODES if isinstance(node, ast.ClassDef)}
FUNCTIONS = {
    (module, node.name): node for module, node in NODES if isinstance(node, ast.FunctionDef)
}


def compiled(where: tuple[str, str]) -> Any:
    module, name = where
    return getattr(MODULES[module], name)


def public(names: Any) -> set[str]:
    return {name for name in names if not name.startswith("_")}


def functions(node: ast.ClassDef) -> dict[str, ast.FunctionDef]:
    """By name; of a property, the getter."""
    found: dict[str, ast.FunctionDef] = {}
    for item in node.body:
        if isinstance(item, ast.FunctionDef):
            found.setdefault(item.name, item)
    return found


def attributes(node: ast.ClassDef) -> set[str]:
    return {ast.unparse(item.target) for item in node.body if isinstance(item, ast.AnnAssign)}


@pytest.mark.parametrize("module", MODULES)
def test_same_names(module: str) -> None:
    stubbed = {name for where, name in (*CLASSES, *FUNCTIONS) if where == module}
    assert stubbed == public(vars(MODULES[module]))


def test_each_type_is_in_one_module() -> None:
    """Two modules that register one C++ type with pybind11 do not load together."""
    names = [name for _, name in CLASSES]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("where", CLASSES, ids=".".join)
def test_same_members(where: tuple[str, str]) -> None:
    node = CLASSES[where]
    assert public(functions(node)) | attributes(node) == public(vars(compiled(where)))


@pytest.mark.parametrize("where", CLASSES, ids=".".join)
def test_same_bases(where: tuple[str, str]) -> None:
    bases = [
        base.__name__
        for base in compiled(where).__bases__
        if base.__module__ != "pybind11_builtins"
    ]
    assert [ast.unparse(base).split(".")[-1] for base in CLASSES[where].bases] == bases


def documented_arguments(function: Any) -> list[tuple[str, str | None]]:
    """(name, default) of each argument, from the signature that opens a pybind11 docstring."""
    signature = function.__doc__.splitlines()[0]
    inside = signature[signature.index("(") + 1 : signature.rindex(") ->")]
    # Commas inside brackets belong to types.
    parts = re.split(r",\s*(?![^\[]*\])", inside)
    arguments = []
    for part in parts:
        match = re.fullmatch(r"(\w+)(?::\s*(.*?))?(?:\s*=\s*(.*))?", part.strip())
        if match and match[1] != "self":
            arguments.append((match[1], match[3]))
    return arguments


def stub_arguments(function: ast.FunctionDef) -> list[tuple[str, str | None]]:
    """The same for a stub. Arguments that can only be positional have numbers in pybind11."""
    only_positional = [a for a in function.args.posonlyargs if a.arg != "self"]
    positional = [argument for argument in function.args.args if argument.arg != "self"]
    defaults: list[ast.expr | None] = [None] * (len(positional) - len(function.args.defaults))
    pairs = [
        *zip(positional, [*defaults, *function.args.defaults], strict=True),
        *zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True),
    ]
    named = [(argument.arg, default and ast.unparse(default)) for argument, default in pairs]
    return [(f"arg{i}", None) for i in range(len(only_positional))] + named


@pytest.mark.parametrize("where", FUNCTIONS, ids=".".join)
def test_same_arguments(where: tuple[str, str]) -> None:
    assert documented_arguments(compiled(where)) == stub_arguments(FUNCTIONS[where])


@pytest.mark.parametrize(
    ("where", "name"), [(where, f) for where, node in CLASSES.items() for f in functions(node)]
)
def test_same_arguments_of_methods(where: tuple[str, str], name: str) -> None:
    member = vars(compiled(where))[name]
    member = getattr(member, "__func__", member)  # of a static method
    stub = functions(CLASSES[where])[name]
    if isinstance(member, property):
        assert "property" in ast.unparse(stub.decorator_list[0])
    else:
        assert documented_arguments(member) == stub_arguments(stub)
