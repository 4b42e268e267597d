"""Emulate kernels under AddressSanitizer, which finds accesses outside of tensors.

The sanitizer must be loaded before Python, and ends the process at the first error. So the kernels
run in another process.
"""

import importlib
import os
import subprocess
import sys
from collections.abc import Callable

from emulation import emulated

FLAGS = ("-fsanitize=address", "-g1")


def run_sanitized(function: Callable[[], None]) -> str:
    """Run a module-level function that launches kernels; return the sanitizer's report, or ""."""
    compiler = os.environ.get("CXX", "g++")
    runtime = subprocess.run(
        [compiler, "-print-file-name=libasan.so"], capture_output=True, text=True, check=True
    ).stdout.strip()
    environment = os.environ | {
        "LD_PRELOAD": runtime,
        "ASAN_OPTIONS": "detect_leaks=0",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    command = [sys.executable, "-m", __name__, function.__module__, function.__name__]
    run = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=800
    )
    return "" if run.returncode == 0 else run.stderr or f"exit status {run.returncode}"


if __name__ == "__main__":
    with emulated(flags=FLAGS):
        getattr(importlib.import_module(sys.argv[1]), sys.argv[2])()
