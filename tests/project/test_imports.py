"""Who may import whom in ``commhooks`` and ``reducer``."""

import ast
import functools
import graphlib
from collections.abc import Iterator
from pathlib import Path

import pytest

import commhooks

ROOT = Path(commhooks.__file__).parents[1]

FLOORS = """
    errors precision extensions _C fallback
    native
    comm
    hook
    kernels
    codecs
    costs
    planning
    algorithms
    algorithms.averaging algorithms.exact algorithms.lowrank algorithms.quantized \
        algorithms.sparse algorithms.wrappers
    algorithms.adaptive
    runtime
    state
    adapters
    integrations cluster
    commhooks
    testing lab
    lab.simulation
    lab.planning
    lab.comparison
    cli
    __main__
"""
"""Lowest first. A package that has no entry of its own belongs to the one that contains it.

Entries on one floor do not import each other. `commhooks` stands for ``import commhooks`` itself.
"""
FLOOR_OF = {
    name: floor for floor, line in enumerate(FLOORS.strip().splitlines()) for name in line.split()
}

MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for top in ("commhooks", "reducer")
    for path in sorted([*(ROOT / top).rglob("*.py"), ROOT / top / "_C.pyi"])
}


def imported(path: Path) -> Iterator[str]:
    """The modules that a file imports, at any depth of nesting, including those for types only."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            for alias in node.names:
                inside = f"{node.module}.{alias.name}"
                yield inside if inside in MODULES else str(node.module)


@functools.cache
def all_imported() -> dict[str, set[str]]:
    """The modules of the project that each one imports. Parsing takes a second."""
    return {
        module: {name for name in imported(path) if name.split(".")[0] in ("commhooks", "reducer")}
        for module, path in MODULES.items()
    }


def on_floors(module: str) -> str:
    """The entry of FLOORS that a module belongs to, or ``reducer``."""
    if module.split(".")[0] == "reducer":
        return "reducer"
    name = module.removeprefix("commhooks.")
    while name not in FLOOR_OF:
        assert "." in name, f"{module} is on no floor"
        name = name.rpartition(".")[0]
    return name


def imports_of(own: str, modules: list[str]) -> set[str]:
    """The entries of FLOORS, and ``reducer``, that some modules of the entry ``own`` import.

    What an ``__init__`` collects from inside its package does not count.
    """
    names = {
        on_floors(target)
        for module in modules
        for target in all_imported()[module]
        if not target.startswith(f"{module}.")
    }
    return names - {own}


@pytest.mark.parametrize("name", FLOOR_OF)
def test_imports_go_down(name: str) -> None:
    modules = [module for module in MODULES if module != "reducer" and on_floors(module) == name]
    for other in imports_of(name, modules) - {"reducer"}:
        assert FLOOR_OF[other] < FLOOR_OF[name], other


def test_the_engine_knows_no_hook() -> None:
    engine = [module for module in MODULES if on_floors(module) == "reducer"]
    assert imports_of("reducer", engine) == set()


def test_no_module_imports_in_a_circle() -> None:
    graph = {module: names - {module} for module, names in all_imported().items()}
    graphlib.TopologicalSorter(graph).prepare()


@pytest.mark.parametrize("extension", ["commhooks._C", "reducer._C"])
def test_one_module_chooses_between_an_extension_and_its_fallback(extension: str) -> None:
    importers = {module for module, names in all_imported().items() if extension in names}
    assert importers == {extension.replace("_C", "native")}


def test_few_modules_lie_beside_the_packages() -> None:
    assert len(list((ROOT / "commhooks").glob("*.py"))) <= 6
