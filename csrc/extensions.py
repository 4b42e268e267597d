"""The extensions ``reducer._C`` and ``commhooks._C``, for setup.py.

If torch is built for CUDA and nvcc has the same major version, ``csrc/packing/cuda`` is compiled
too; otherwise gradients on CUDA devices are packed by torch's operations. COMMHOOKS_WITH_CUDA=0 or
1 overrides this. TORCH_CUDA_ARCH_LIST names the architectures to compile for. It defaults to those
of the devices present, or to Ampere, Hopper and later ones if there is no device.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import torch
from setuptools import Extension
from torch.utils import cpp_extension
from torch.utils.cpp_extension import BuildExtension, CppExtension, CUDAExtension

ROOT = Path(__file__).parents[1]

STANDARD = "-std=c++20"  # torch before 2.13 defaults to an older one
# No -march: one binary runs on every x86-64 (and other) CPU; hot loops choose their instructions at
# run time (csrc/shared/instruction_sets.h). -fno-math-errno: square roots are instructions, not
# calls that set errno.
CXX_FLAGS = [
    STANDARD,
    "-O3",
    "-g0",  # Python's own flags may ask for debug symbols, which take 80 MB
    "-fvisibility=hidden",
    "-fno-math-errno",
    "-Wall",
    "-Wno-unknown-pragmas",
    "-Wno-maybe-uninitialized",
    "-Wno-psabi",
    "-DUSE_DISTRIBUTED",
]


def shared_cxx_library() -> list[str]:
    """Return the path of the C++ library that torch has loaded, empty if it has another one.

    Linked by its path, it is used even by a compiler that prefers libstdc++.a. A second copy of
    the library in one process has locales of its own: the first number written to a stream crashes.
    """
    maps = Path("/proc/self/maps")
    lines = maps.read_text().splitlines() if maps.exists() else []
    paths = {line.split(maxsplit=5)[-1] for line in lines if "/libstdc++.so" in line}
    return sorted(paths)[:1]


LINK_FLAGS = shared_cxx_library()
if sanitizers := os.environ.get("COMMHOOKS_SANITIZE"):  # see .ci/sanitize
    CXX_FLAGS += ["-O1", "-g1", "-fno-omit-frame-pointer"]
    CXX_FLAGS += [f"-fsanitize={sanitizers}", "-fno-sanitize=vptr"]
    LINK_FLAGS += [f"-fsanitize={sanitizers}"]
else:
    LINK_FLAGS += ["-Wl,--strip-all"]
NVCC_FLAGS = [STANDARD, "-O3", "-Werror", "all-warnings"]


def find_nvcc() -> str | None:
    """Return the path of nvcc: of a toolkit, or from the wheels of the extra ``nvcc``."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    wheels = Path(sysconfig.get_path("purelib")).glob("nvidia/cu*/bin")
    folders = (f"{home}/bin", os.environ.get("PATH", os.defpath), *map(str, wheels))
    return shutil.which("nvcc", path=os.pathsep.join(folders))


def ask_nvcc(*arguments: str) -> str:
    """Return the output of nvcc, or an empty string if there is none that works."""
    nvcc = find_nvcc()
    if nvcc is None:
        return ""
    run = subprocess.run([nvcc, *arguments], capture_output=True, text=True, check=False)
    if run.returncode != 0:
        print(f"{nvcc} does not work: {run.stdout}{run.stderr}", file=sys.stderr)
        return ""
    return run.stdout + run.stderr


def nvcc_version() -> int:
    """Return the major version of nvcc, 0 if there is none."""
    found = re.search(r"release (\d+)", ask_nvcc("--version"))
    return int(found.group(1)) if found else 0


def with_cuda() -> bool:
    wanted = os.environ.get("COMMHOOKS_WITH_CUDA")
    if wanted is not None:
        return wanted == "1"
    version = torch.version.cuda
    return version is not None and int(version.split(".")[0]) == nvcc_version()


def cuda_extension(**arguments: Any) -> CppExtension:
    """Return torch's CUDAExtension for the toolkit that nvcc reports.

    Torch takes the parent folder of nvcc for the toolkit, even if nvcc there is a script. A toolkit
    installed from wheels has a runtime library without the name that linkers look for.
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


def sources(*folders: str) -> list[str]:
    """Return the C++ and CUDA files directly in these folders of csrc."""
    files = [path for folder in folders for path in (ROOT / "csrc" / folder).iterdir()]
    return sorted(str(path.relative_to(ROOT)) for path in files if path.suffix in (".cpp", ".cu"))


def merged(name: str, *folders: str) -> str:
    """Write a file that includes all sources of these folders, and return its path.

    Parsing the headers of torch takes longer than compiling these sources, so it is done once.
    """
    path = ROOT / "build" / "merged" / f"{name}.cpp"
    includes = (source.removeprefix("csrc/") for source in sources(*folders))
    text = "".join(f'#include "{include}"\n' for include in includes)
    if not path.exists() or path.read_text() != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return str(path.relative_to(ROOT))


def engine() -> Extension:
    """Return ``reducer._C``: the reducer, packing and their bindings, and no other algorithm."""
    arguments: dict[str, Any] = {
        "name": "reducer._C",
        "sources": [
            merged("reducer", "host", "reducer"),
            merged("reducer_bindings", "bindings", "bindings/reducer"),
            *sources("packing", "shared"),
        ],
        "include_dirs": [str(ROOT / "csrc")],
        "extra_compile_args": {"cxx": CXX_FLAGS},
        "extra_link_args": LINK_FLAGS,
    }
    if not with_cuda():
        return CppExtension(**arguments)
    if not torch.cuda.is_available():
        os.environ.setdefault("TORCH_CUDA_ARCH_LIST", "8.0;9.0+PTX")
    arguments["sources"] += sources("packing/cuda")
    arguments["extra_compile_args"] = {
        "cxx": [*CXX_FLAGS, "-DCOMMHOOKS_WITH_CUDA"],
        "nvcc": NVCC_FLAGS,
    }
    return cuda_extension(**arguments)


def kernels() -> Extension:
    """Return ``commhooks._C``: the arithmetic of hooks and helpers for collectives, no engine."""
    return CppExtension(
        name="commhooks._C",
        sources=[
            merged("comm", "comm"),
            merged("commhooks_bindings", "bindings", "bindings/commhooks"),
            *sources("codecs", "lowrank", "shared", "sparse"),
        ],
        # Arithmetic that the CPU shares with the GPU is in commhooks/kernels/codecs.
        include_dirs=[str(ROOT / folder) for folder in ("csrc", "commhooks", "commhooks/kernels")],
        extra_compile_args={"cxx": CXX_FLAGS},
        extra_link_args=LINK_FLAGS,
    )


class Build(BuildExtension):
    """Write next to each extension what it was compiled for; see reducer/extension.py."""

    def build_extension(self, ext: Extension) -> None:
        shared = self.build_temp
        self.build_temp = str(Path(shared) / ext.name)  # files of csrc/shared are compiled twice
        try:
            super().build_extension(ext)
        finally:
            self.build_temp = shared

    def run(self) -> None:
        super().run()
        for extension in self.extensions:
            cuda = torch.version.cuda if extension.name == "reducer._C" and with_cuda() else None
            versions = {"torch": torch.__version__, "cuda": cuda}
            path = Path(self.get_ext_fullpath(extension.name)).with_name("built_with.json")
            path.write_text(json.dumps(versions) + "\n")
