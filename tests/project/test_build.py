"""How the extensions are linked, on machines whose compiler has other habits."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import commhooks

CSRC = Path(commhooks.__file__).parents[1] / "csrc"
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
