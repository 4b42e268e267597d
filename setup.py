"""Builds ``reducer._C`` from ``csrc``; everything else stands in pyproject.toml."""

from pathlib import Path

from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CppExtension

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

setup(
    ext_modules=[
        CppExtension(
            name="reducer._C",
            sources=sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("csrc/**/*.cpp")),
            include_dirs=[str(ROOT / "csrc"), str(ROOT / "commhooks" / "kernels")],
            extra_compile_args={"cxx": CXX_FLAGS},
        )
    ],
    cmdclass={"build_ext": BuildExtension},
)
