"""Builds ``reducer._C`` from ``csrc``; everything else stands in pyproject.toml.

With a torch for CUDA and an nvcc of the same major version, ``csrc/cuda`` is part of it; without,
gradients on CUDA devices are packed by torch's own operations. COMMHOOKS_WITH_CUDA=0 or 1 decides
otherwise. TORCH_CUDA_ARCH_LIST names the devices to compile for: by default those that are present,
or else Ampere, Hopper and whatever comes later.
"""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import torch
from setuptools import setup
from torch.utils import cpp_extension
from torch.utils.cpp_extension import BuildExtension, CppExtension, CUDAExtension

ROOT = Path(__file__).parent

STANDARD = "-std=c++20"  # torch before 2.13 would take an older one
# No -march: one binary serves every x86-64 (and other) CPU; hot loops choose their instructions at
# run time (csrc/cpu). Nobody reads errno, for the sake of which roots would be calls.
CXX_FLAGS = [
    STANDARD,
    "-O3",
    "-fvisibility=hidden",
    "-fno-math-errno",
    "-Wall",
    "-Wno-unknown-pragmas",
    "-Wno-maybe-uninitialized",
    "-Wno-psabi",
    "-DUSE_DISTRIBUTED",
]
NVCC_FLAGS = [STANDARD, "-O3", "-Werror", "all-warnings"]


def ask_nvcc(*arguments: str) -> str:
    """What it answers; nothing where there is none."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    nvcc = shutil.which("nvcc", path=f"{home}/bin") or shutil.which("nvcc")
    if nvcc is None:
        return ""
    run = subprocess.run([nvcc, *arguments], capture_output=True, text=True, check=True)
    return run.stdout + run.stderr


def nvcc_version() -> int:
    """Its major version, 0 where there is none."""
    found = re.search(r"release (\d+)", ask_nvcc("--version"))
    return int(found.group(1)) if found else 0


def with_cuda() -> bool:
    wanted = os.environ.get("COMMHOOKS_WITH_CUDA")
    if wanted is not None:
        return wanted == "1"
    version = torch.version.cuda
    return version is not None and int(version.split(".")[0]) == nvcc_version()


def cuda_extension(**arguments: Any) -> CppExtension:
    """As torch makes it, in the toolkit that nvcc says it belongs to.

    Torch takes the folder above nvcc's for it, wherever a script of that name stands. A toolkit
    from wheels has a runtime library without the name that linkers look for.
    """
    found = re.search(r"TOP=(.+)", ask_nvcc("--dryrun", "-x", "cu", "-c", os.devnull))
    if found:
        cpp_extension.CUDA_HOME = str(Path(found.group(1)).resolve())
    extension = CUDAExtension(**arguments)
    folders = [Path(folder) for folder in extension.library_dirs]
    if not any((folder / "libcudart.so").exists() for folder in folders):
        versioned = [path for folder in folders for path in folder.glob("libcudart.so.*")]
        if versioned:
            extension.libraries.remove("cudart")
            extension.extra_link_args = [*(extension.extra_link_args or ()), str(versioned[0])]
    return extension


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
    return cuda_extension(
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
