"""Run kernels on CPU tensors: the same sources and launches as on a GPU, compiled by g++.

    with emulated():
        codec.encode(values, message)     # runs as for CUDA tensors

cuda_emulation.h describes what is checked.
"""

import ctypes
import hashlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from unittest import mock

import torch

from commhooks import kernels
from commhooks.kernels.source import DIRECTORY, Source

HERE = Path(__file__).parent
BUILD = HERE.parents[1] / "build" / "emulation"
FLAGS = ("-std=gnu++20", "-O1", "-shared", "-fPIC", "-fvisibility=hidden", "-fno-gnu-unique",
         "-ffp-contract=off", "-Wall", "-Wno-unused-function")  # fmt: skip


@dataclass(frozen=True, eq=False)
class LocalSource(Source):
    """A source in this folder instead of the package."""

    @property
    def path(self) -> Path:
        return HERE / self.file


class EmulationError(RuntimeError):
    """A kernel did something that is undefined on a GPU."""


@dataclass(frozen=True)
class Emulation:
    """A backend for CPU tensors. With ``is_backward``, the last block and thread run first."""

    is_backward: bool = False
    flags: tuple[str, ...] = ()

    def require(self, device: torch.device) -> None:
        """Do nothing: tests always have a C++ compiler."""

    def launch(
        self,
        source: Source,
        kernel: str,
        grid: tuple[int, int, int],
        block: int,
        parameters: int,
        count: int,
        device_index: int,
    ) -> None:
        library = ctypes.CDLL(str(compiled(source, self.flags)))
        run = library[f"launch_{source.kernels.index(kernel)}"]
        dimensions = ctypes.c_uint * 3
        error = ctypes.create_string_buffer(1000)
        if run(count, dimensions(*grid), dimensions(block, 1, 1), int(self.is_backward),
               ctypes.c_void_p(parameters), error, ctypes.c_size_t(len(error))):  # fmt: skip
            raise EmulationError(f"{source.file}, {kernel}: {error.value.decode()}")


@contextmanager
def emulated(is_backward: bool = False, flags: tuple[str, ...] = ()) -> Iterator[None]:
    """Treat CPU tensors as tensors of a GPU."""
    with mock.patch.dict(kernels.BACKENDS, cpu=Emulation(is_backward, flags)):
        yield


@cache
def compiled(source: Source, flags: tuple[str, ...] = ()) -> Path:
    """Compile a source to a library, cached in ``build/`` until anything it depends on changes."""
    text = translation_unit(source)
    parts = (source.digest, text, (HERE / "cuda_emulation.h").read_text(), FLAGS, flags)
    digest = hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
    library = BUILD / f"{source.path.stem}-{digest}.so"
    if not library.exists():
        BUILD.mkdir(parents=True, exist_ok=True)
        part = library.with_suffix(f".{os.getpid()}")
        compiler = os.environ.get("CXX", "g++")
        assert shutil.which(compiler), f"no C++ compiler {compiler!r}"
        command = [compiler, *FLAGS, *flags, f"-I{HERE}", f"-I{DIRECTORY}", "-x", "c++", "-",
                   "-o", str(part)]  # fmt: skip
        run = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
        assert run.returncode == 0, f"{source.file}:\n{run.stderr}"
        part.replace(library)
    return library


def translation_unit(source: Source) -> str:
    """Return the text of the file, followed by a C function for each of its kernels."""
    text = source.path.read_text()
    lines = ['#include "cuda_emulation.h"', f'#line 1 "{source.file}"', text, '#line 1 "launches"']
    lines += [
        f"""extern "C" __attribute__((visibility("default"))) int launch_{number}(
                int count, const unsigned* grid, const unsigned* block,
                int is_backward, void** arguments, char* error, size_t room) {{
              return emulation::launch({kernel}, count, grid, block, is_backward,
                                       arguments, error, room);
            }}"""
        for number, kernel in enumerate(source.kernels)
    ]
    return "\n".join(lines)
