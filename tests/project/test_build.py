"""The extensions are linked as they have to be, and packages hold all files."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import commhooks

ROOT = Path(commhooks.__file__).parents[1]
CSRC = ROOT / "csrc"
SOURCE = """
#include <sstream>

extern "C" size_t digits(double number) {
  std::ostringstream text;
  text << number;
  return text.str().size();
}
"""
USE = "import ctypes, sys, torch; print(ctypes.CDLL(sys.argv[1]).digits(ctypes.c_double(1.5)))"


@pytest.mark.skipif(
    not sys.platform.startswith("linux") or not shutil.which("g++"), reason="no g++ on Linux"
)
def test_torchs_copy_of_the_cxx_library_is_linked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even by a compiler that would link the static library."""
    monkeypatch.syspath_prepend(CSRC)
    import extensions

    source, library = tmp_path / "numbers.cpp", tmp_path / "numbers.so"
    source.write_text(SOURCE)
    compiler = ["g++", "-static-libstdc++", "-shared", "-fPIC"]
    subprocess.run([*compiler, source, "-o", library, *extensions.LINK_FLAGS], check=True)
    assert b"libstdc++.so.6" in library.read_bytes()
    used = subprocess.run([sys.executable, "-c", USE, library], capture_output=True, text=True)
    assert used.stdout.strip() == "3", used.stderr


BUILD = """
import sys, setuptools.build_meta as build
folder = sys.argv[1]  # which setuptools changes
print(build.build_sdist(folder), build.build_wheel(folder))
"""


def test_packages_hold_all_files(tmp_path: Path) -> None:
    """The sources have what is compiled, and a wheel without extensions all kernels and stubs."""
    listed = ["git", "ls-files", "commhooks", "reducer", "csrc", "*.py", "*.toml", "README.md"]
    tracked = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    copy = tmp_path / "copy"
    for name in [*tracked.splitlines(), "LICENSE", "MANIFEST.in"]:
        if name.count("/") == 0 or name.startswith(("commhooks/", "reducer/", "csrc/")):
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, copy / name)
    files = {str(path.relative_to(copy)) for path in copy.rglob("*") if path.is_file()}
    environment = os.environ | {"COMMHOOKS_NO_EXTENSION": "1"}
    command = [sys.executable, "-c", BUILD, tmp_path]
    run = subprocess.run(
        command, cwd=copy, env=environment, check=True, capture_output=True, text=True
    )
    sdist, wheel = run.stdout.splitlines()[-1].split()
    with tarfile.open(tmp_path / sdist) as sources:
        in_sdist = {name.partition("/")[2] for name in sources.getnames()}
    assert sorted(files - in_sdist) == []
    in_wheel = set(zipfile.ZipFile(tmp_path / wheel).namelist())
    installed = {name for name in files if name.startswith(("commhooks/", "reducer/"))}
    assert sorted(installed - in_wheel) == []


@pytest.mark.parametrize(
    ("torch", "says"),
    [
        ("__version__ = '2.10.1'", "works with torch>=2.11,<2.16, but this is torch 2.10.1"),
        ("__version__ = '2.16.0+cu132'", "this is torch 2.16.0"),
        ("raise ImportError('libcusparse.so.12 is missing')", "libcusparse.so.12 is missing"),
        ("import no_such_module", "No module named 'no_such_module'"),
    ],
)
def test_a_torch_that_cannot_be_compiled_against(tmp_path: Path, torch: str, says: str) -> None:
    (tmp_path / "torch.py").write_text(torch)
    command = [sys.executable, "setup.py", "build_ext", "--inplace"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    run = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode != 0
    assert says in run.stderr
