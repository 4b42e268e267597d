"""The extensions are linked as they have to be, and packages hold all files."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from setuptools import Extension

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


@pytest.mark.parametrize(
    ("wanted", "nvcc", "cuda", "expected"),
    [
        (None, "release 13.0, V13.0.48", "13.2", True),
        (None, "release 12.8, V12.8.93", "13.2", False),
        (None, "", "13.2", False),
        (None, "release 13.0, V13.0.48", None, False),
        (None, "", None, False),
        ("0", "release 13.0, V13.0.48", "13.2", False),
        ("1", "release 12.8, V12.8.93", "13.2", True),
    ],
)
def test_kernels_are_compiled_if_nvcc_matches_torch_or_as_told(
    wanted: str | None,
    nvcc: str,
    cuda: str | None,
    expected: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(CSRC)
    import extensions

    monkeypatch.setattr(extensions, "ask_nvcc", lambda *_: nvcc)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(extensions, "cuda_extension", lambda **of: Extension(**of))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with patch.dict(os.environ):
        for name in ("COMMHOOKS_WITH_CUDA", "TORCH_CUDA_ARCH_LIST"):
            os.environ.pop(name, None)
        if wanted is not None:
            os.environ["COMMHOOKS_WITH_CUDA"] = wanted
        found = extensions.engine()
        architectures = os.environ.get("TORCH_CUDA_ARCH_LIST")
    assert any("packing/cuda" in source for source in found.sources) == expected
    assert ("-DCOMMHOOKS_WITH_CUDA" in found.extra_compile_args["cxx"]) == expected
    assert architectures == ("8.0;9.0+PTX" if expected else None)


@pytest.mark.parametrize(("has_device", "named"), [(True, None), (False, "7.5")])
def test_devices_and_the_environment_choose_the_architectures(
    has_device: bool, named: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(CSRC)
    import extensions

    monkeypatch.setattr(extensions, "cuda_extension", lambda **of: of)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_device)
    given = {} if named is None else {"TORCH_CUDA_ARCH_LIST": named}
    with patch.dict(os.environ, {"COMMHOOKS_WITH_CUDA": "1"}):
        os.environ.pop("TORCH_CUDA_ARCH_LIST", None)
        os.environ.update(given)
        extensions.engine()
        assert os.environ.get("TORCH_CUDA_ARCH_LIST") == named


def test_an_nvcc_that_does_not_work_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(CSRC)
    import extensions

    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text("#!/bin/sh\necho no licence >&2\nexit 3\n")
    nvcc.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert extensions.nvcc_version() == 0
    assert "no licence" in capsys.readouterr().err
