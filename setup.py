"""Builds ``reducer._C`` from ``csrc``; everything else stands in pyproject.toml.

With a torch for CUDA and an nvcc of the same major version, ``csrc/cuda`` is part of it; without,
gradients on CUDA devices are packed by torch's own operations. COMMHOOKS_WITH_CUDA=0 or 1 decides
otherwise. TORCH_CUDA_ARCH_LIST names the devices to compile for: by default those that are present,
or else Ampere, Hopper and whatever comes later.
"""

import json
import os
import re
import subprocess
from pathlib import Path

import torch
from setuptools import setup
from torch.utils.cpp_extension import CUDA_HOME, BuildExtension, CppExtension, CUDAExtension

ROOT = Path(__file__).parent

# No -march: one binary serves every x86-64 (and other) CPU; hot loops choose their instructions at
# run time (csrc/cpu).
CXX_FLAGS = [
    "-O3",
    "-fvisibility=hidden",
    "-Wall",
    "-Wno-unknown-pragmas",
    "-Wno-maybe-uninitialized",
    "-Wno-psabi",
    "-DUSE_DISTRIBUTED",
]
NVCC_FLAGS = ["-O3", "-Werror", "all-warnings"]


def nvcc_version() -> int:
    """Its major version, 0 where there is none."""
    if CUDA_HOME is None or not (Path(CUDA_HOME) / "bin" / "nvcc").exists():
        return 0
    command = [str(Path(CUDA_HOME) / "bin" / "nvcc"), "--version"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"release (\d+)", text)
    return int(found.group(1)) if found else 0


def with_cuda() -> bool:
    wanted = os.environ.get("COMMHOOKS_WITH_CUDA")
    if wanted is not None:
        return wanted == "1"
    version = torch.version.cuda
    return version is not None and int(version.split(".")[0]) == nvcc_version()


def sources(*patterns: str) -> list[str]:
    return sorted(str(path.relative_to(ROOT)) for p in patterns for path in ROOT.glob(p))


def extension() -> CppExtension:
    cpp = [path for path in sources("csrc/**/*.cpp") if not path.startswith("csrc/cuda/")]
    include_dirs = [str(ROOT / "csrc"), str(ROOT / "commhooks" / "kernels")]
    if not with_cuda():
        return CppExtension(
            name="reducer._C",
            sources=cpp,
            include_dirs=include_dirs,
            extra_compile_args={"cxx": CXX_FLAGS},
        )
    if not torch.cuda.is_available():
        os.environ.setdefault("TORCH_CUDA_ARCH_LIST", "8.0;9.0+PTX")
    return CUDAExtension(
        name="reducer._C",
        sources=cpp + sources("csrc/cuda/*.cpp", "csrc/cuda/*.cu"),
        include_dirs=include_dirs,
        extra_compile_args={"cxx": [*CXX_FLAGS, "-DCOMMHOOKS_WITH_CUDA"], "nvcc": NVCC_FLAGS},
    )


class Build(BuildExtension):
    """Says next to the extension what it was compiled for; see reducer/extension.py."""

    def run(self) -> None:
        super().run()
        cuda = torch.version.cuda if with_cuda() else None
        versions = {"torch": torch.__version__, "cuda": cuda}
        path = Path(self.get_ext_fullpath("reducer._C")).with_name("built_with.json")
        path.write_text(json.dumps(versions) + "\n")


setup(ext_modules=[extension()], cmdclass={"build_ext": Build})
