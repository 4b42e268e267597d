"""The private names of torch's FSDP2: the table lists them, torch has them, one file uses them."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from support.sharded import build, mesh_of
from torch.distributed.fsdp._fully_shard import _fsdp_common

import commhooks
from commhooks.adapters.fsdp import units

ROWS = re.findall(r"^\| (`.+`) \| ([\w. ]+) \| ([\w. ]+) \| .+ \|$", units.__doc__ or "", re.M)
KIND_OF = {name: kind for names, kind, _ in ROWS for name in re.findall(r"`(\w+)`", names)}
VERSIONS_OF = {name: torch for names, _, torch in ROWS for name in re.findall(r"`(\w+)`", names)}


def version(text: str) -> tuple[int, int]:
    major, minor = text.split(".")[:2]
    return int(major), int(minor)


def is_expected(versions: str) -> bool:
    """Whether a row is about the installed torch."""
    first = re.fullmatch(r"all|from (\d\.\d+)", versions)
    assert first, versions
    return first[1] is None or version(torch.__version__) >= version(first[1])


def find_names(rank: int, size: int) -> dict[str, bool]:
    net = build(mesh_of(1, 1))
    net(torch.ones(1, 7))
    state: Any = net._get_fsdp_state()
    unit = next(units._groups(state))
    objects = {
        "module": _fsdp_common,
        "model": net,
        "state": state,
        "context": state._state_ctx,
        "unit": unit,
        "parameter": unit.fsdp_params[0],
        "mesh info": unit.mesh_info,
        "tensor": torch.Tensor,
        "torch._C": torch._C,
        "autograd": torch.autograd.Variable,
    }
    return {name: hasattr(objects[kind], name) for name, kind in KIND_OF.items()}


def test_this_torch_has_the_names_of_its_version(run_ranks: Any) -> None:
    (found,) = run_ranks(find_names, 1)
    assert found == {name: is_expected(versions) for name, versions in VERSIONS_OF.items()}
    assert sum(found.values()) > 30


def names_in(path: Path) -> Iterator[str]:
    """The names of attributes and imports, and texts, which may be arguments of ``getattr``."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute):
            is_own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            yield from [] if is_own else [node.attr]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
            yield from (alias.name for alias in node.names)


def test_the_table_lists_what_the_file_uses() -> None:
    used = set(names_in(Path(units.__file__)))
    private = {name for name in used if re.fullmatch("_[a-z]\\w+", name)}
    assert private <= KIND_OF.keys()
    assert KIND_OF.keys() <= used


def test_no_other_file_uses_them() -> None:
    of_torch = ("tensor", "torch._C", "autograd")
    private = {n for n, kind in KIND_OF.items() if n.startswith("_") and kind not in of_torch}
    used = {
        (path.name, name)
        for path in sorted(Path(commhooks.__file__).parent.rglob("*.py"))
        if not path.samefile(units.__file__)
        for name in names_in(path)
    }
    assert len(used) > 10_000
    assert {
        pair
        for pair in used
        if pair[1] in private or pair[1].startswith("torch.distributed.fsdp._")
    } == set()
