"""What each hook launches for one bucket: the table in docs/gpu.md.

PYTHONPATH=.:tests:tests/kernels python tests/kernels/test_launch_counts.py    # prints its rows
"""

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from emulation import Emulation, emulated
from test_no_waiting import CONFIGS, SIZE, take_steps
from torch.utils._python_dispatch import TorchDispatchMode

from commhooks.comm.communicator import Communicator

PAGE = Path(__file__).parents[2] / "docs" / "gpu.md"
ROW = re.compile(r"^\| (`.+) \| (\d+) \| (\d+) \| (\d+) \|$", re.MULTILINE)
NAMES = [name for name in CONFIGS if "," not in name]
# Operations that launch nothing. Random numbers are drawn on the host.
HOST = {
    *("empty", "empty_like", "empty_strided", "new_empty", "_unsafe_view", "lift_fresh"),
    *("promote_types", "random_", "randint", "_local_scalar_dense"),
}


@dataclass
class Counts:
    """What all ranks have launched in one step."""

    kernels: int = 0
    operations: int = 0
    collectives: int = 0

    def of_rank(self) -> tuple[int, int, int]:
        counts = (self.kernels, self.operations, self.collectives)
        assert all(count % SIZE == 0 for count in counts), "ranks differ"
        return counts[0] // SIZE, counts[1] // SIZE, counts[2] // SIZE


class Operations(TorchDispatchMode):
    """Counts operations of torch that write memory of the device."""

    def __init__(self, counts: Counts) -> None:
        super().__init__()
        self.counts = counts

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = function.overloadpacket.__name__
        if function.namespace == "aten" and not function.is_view and name not in HOST:
            self.counts.operations += 1
        return function(*args, **(kwargs or {}))


@contextmanager
def counted(steps: list[Counts]) -> Iterator[None]:
    """Append the counts of a step."""
    counts = Counts()
    launch, pend = Emulation.launch, Communicator._pending

    def counted_launch(*arguments: Any, **options: Any) -> None:
        counts.kernels += 1
        launch(*arguments, **options)

    def counted_pending(*arguments: Any) -> Any:
        counts.collectives += 1
        return pend(*arguments)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(Emulation, "launch", counted_launch))
        stack.enter_context(mock.patch.object(Communicator, "_pending", counted_pending))
        stack.enter_context(Operations(counts))
        yield
    steps.append(counts)


def count(name: str) -> tuple[int, int, int]:
    """Return the counts of the step with most launches, after the first four."""
    steps: list[Counts] = []
    with emulated():
        take_steps(CONFIGS[name], lambda: counted(steps))
    return max((step.of_rank() for step in steps), key=sum)


def label(name: str) -> str:
    config = CONFIGS[name]
    inner = config.get("inner")
    around = inner["name"] if isinstance(inner, dict) else inner
    return f"`{name}`" + (f" around `{around}`" if around else "")


def rows() -> dict[str, tuple[int, ...]]:
    """Return the rows of the page by label; those with equal counts share a row there."""
    return {
        each: tuple(map(int, numbers))
        for labels, *numbers in ROW.findall(PAGE.read_text())
        for each in labels.split(", ")
    }


@pytest.mark.parametrize("name", NAMES)
def test_the_page_has_these_counts(name: str) -> None:
    assert rows()[label(name)] == count(name)


def test_the_page_has_no_other_rows() -> None:
    assert rows().keys() == {label(name) for name in NAMES}


if __name__ == "__main__":
    by_counts: dict[tuple[int, int, int], list[str]] = {}
    for each in NAMES:
        by_counts.setdefault(count(each), []).append(label(each))
    for counts, labels in sorted(by_counts.items(), key=lambda item: (sum(item[0]), item[1])):
        print(f"| {', '.join(labels)} | {' | '.join(map(str, counts))} |")
