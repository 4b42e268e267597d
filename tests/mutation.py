"""Mutate modules and run tests on each mutant, to find changes of the code that no test notices.

    python tests/mutation.py commhooks/hook --tests tests/hook --sample 60 --seed 0

A mutant swaps a comparison or an operator, negates a condition, changes a constant, drops a call
whose result is not used, or returns None. The tests run in copies of the working tree. A mutant
that survives is either equivalent to the original, or shows a rule that no test holds.
"""

import argparse
import ast
import copy
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

_SWAPPED: dict[type[ast.AST], type[ast.AST]] = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.And: ast.Or,
    ast.Or: ast.And,
}


class Mutant(NamedTuple):
    path: Path
    line: int
    before: str
    after: str
    number: int
    """Of the node, in the order of ``ast.walk``."""
    change: int

    def source(self) -> str:
        """Return the source of the module with this change."""
        tree = ast.parse(self.path.read_text())
        _mutate(list(ast.walk(tree))[self.number], self.change)
        return ast.unparse(ast.fix_missing_locations(tree))


def mutants(path: Path) -> Iterator[Mutant]:
    """Yield all mutants of a module."""
    for number, node in enumerate(ast.walk(ast.parse(path.read_text()))):
        for change in range(3):
            changed = copy.deepcopy(node)
            if _mutate(changed, change):
                line = getattr(node, "lineno", 0)
                yield Mutant(path, line, _text(node), _text(changed), number, change)


def _mutate(node: ast.AST, change: int) -> bool:
    """Apply one of a node's changes in place. Return whether there is such a change."""
    match node, change:
        case ast.Compare(ops=[operator]), 0:
            node.ops = [_SWAPPED[type(operator)]()]  # type: ignore[list-item]
        case ast.BoolOp() | ast.BinOp(), 0:
            if type(node.op) not in _SWAPPED:
                return False
            node.op = _SWAPPED[type(node.op)]()  # type: ignore[assignment]
        case ((ast.If() | ast.While() | ast.IfExp()), 1):
            node.test = ast.UnaryOp(ast.Not(), node.test)
        case ast.Constant(value=bool(value)), 0:
            node.value = not value
        case ast.Constant(value=int(value)), 0:
            node.value = value + 1
        case ast.Return(value=ast.expr() as value), 2:
            if isinstance(value, ast.Constant) and value.value is None:
                return False
            node.value = ast.Constant(None)
        case ast.Expr(value=ast.Call() | ast.Await()), 2:
            node.value = ast.Constant(None)
        case _:
            return False
    return True


def _text(node: ast.AST) -> str:
    return ast.unparse(node).splitlines()[0]


def passes(root: Path, tests: list[str], timeout: float) -> bool:
    """Return whether all tests pass in the copy ``root``, in time."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    try:
        run = subprocess.run(command, cwd=root, capture_output=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        return False
    return run.returncode == 0


def survives(mutant: Mutant, root: Path, tests: list[str], timeout: float) -> bool:
    """Return whether all tests pass with the mutant in the copy ``root``."""
    target = root / mutant.path
    original = target.read_text()
    target.write_text(mutant.source())
    try:
        return passes(root, tests, timeout)
    finally:
        target.write_text(original)


def _copy_tree(root: Path) -> Path:
    """Copy the files that git tracks, and the extensions."""
    tracked = subprocess.run(["git", "ls-files"], check=True, capture_output=True, text=True)
    built = [path for name in ("commhooks", "reducer") for path in Path(name).glob("*_*.[js]*o*")]
    for path in (*map(Path, tracked.stdout.splitlines()), *built):
        if path.exists():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, root / path)
    return root


def main() -> None:
    """Print the mutants that survive, and the share that was killed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("paths", nargs="+", type=Path, help="modules, or folders of modules")
    parser.add_argument("--tests", nargs="+", required=True, help="arguments of pytest")
    parser.add_argument("--sample", type=int, default=60, help="number of mutants to try")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sample")
    parser.add_argument("--workers", type=int, default=1, help="number of mutants at a time")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for each mutant")
    given = parser.parse_args()
    modules = [m for p in given.paths for m in (sorted(p.rglob("*.py")) if p.is_dir() else [p])]
    found = [mutant for module in modules for mutant in mutants(module)]
    sample = random.Random(given.seed).sample(found, min(given.sample, len(found)))
    survivors = 0
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(given.workers) as pool:
        roots = [_copy_tree(Path(folder, str(number))) for number in range(given.workers)]
        if not passes(roots[0], given.tests, given.timeout):
            sys.exit("expected tests that pass without a mutant, found some that fail or take long")
        free = SimpleQueue[Path]()
        for root in roots:
            free.put(root)

        def try_one(mutant: Mutant) -> bool:
            root = free.get()
            try:
                return survives(mutant, root, given.tests, given.timeout)
            finally:
                free.put(root)

        ordered = sorted(sample)
        for mutant, survived in zip(ordered, pool.map(try_one, ordered), strict=True):
            if survived:
                survivors += 1
                print(
                    f"{mutant.path}:{mutant.line}: {mutant.before}  ->  {mutant.after}", flush=True
                )
    print(f"{len(sample) - survivors} of {len(sample)} mutants killed, of {len(found)} possible")


if __name__ == "__main__":
    main()
