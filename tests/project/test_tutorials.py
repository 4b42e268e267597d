"""Every command of the tutorials works, and prints what they say."""

import os
from pathlib import Path

import pytest
from support.tutorial import follow

ROOT = Path(__file__).parents[2]
PAGES = [*sorted((ROOT / "docs/tutorials").glob("*.md")), ROOT / "docs/benchmarking.md"]


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_tutorial(page: Path, tmp_path: Path) -> None:
    installed = tmp_path / "installed"
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "examples").symlink_to(ROOT / "examples")
    environment = {
        "PYTHONPATH": os.pathsep.join([str(installed), str(ROOT)]),
        "OMP_NUM_THREADS": "1",
        # `pip install .` does not change this environment, and needs no network.
        "PIP_TARGET": str(installed),
        "PIP_NO_DEPS": "1",
        "PIP_NO_BUILD_ISOLATION": "0",  # which means: without isolation
        "PIP_NO_INDEX": "1",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "COLUMNS": "100",
        "PYTHONWARNINGS": "ignore",
    }
    assert follow(page, folder, environment) == page.read_text().count("\n$ ")


def test_there_are_tutorials() -> None:
    assert len(PAGES) == 7
