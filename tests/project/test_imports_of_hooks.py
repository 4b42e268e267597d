"""Hooks are imported when they are first used."""

import ast
import subprocess
import sys
from pathlib import Path

from commhooks import algorithms

LOADED = """
import sys, commhooks
commhooks.create("int8")
names = [name for name in sys.modules if name.split(".")[0] in ("commhooks", "reducer")]
print(len(names), "commhooks.algorithms.averaging.diloco" in sys.modules)
"""


def test_a_hook_does_not_import_the_others() -> None:
    command = [sys.executable, "-c", LOADED]
    count, has_others = subprocess.check_output(command, text=True).split()
    assert int(count) <= 100
    assert has_others == "False"


def test_type_checkers_see_the_classes_of_all_hooks() -> None:
    assert algorithms.__file__ is not None
    tree = ast.parse(Path(algorithms.__file__).read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    package = f"{algorithms.__name__}."
    typed = {
        f"{node.module.removeprefix(package)}:{name.name}"
        for node in imports
        if node.module is not None and node.module.startswith(package)
        for name in node.names
    }
    assert typed == set(algorithms.HOOKS.values())


def test_each_class_bears_its_name() -> None:
    for name, place in algorithms.HOOKS.items():
        assert getattr(algorithms, place.partition(":")[2]).name == name
