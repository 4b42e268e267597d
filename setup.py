"""Build ``reducer._C`` and ``commhooks._C`` from ``csrc``; the rest is in pyproject.toml.

Torch compiles them, and they only work with the minor release of torch that compiled them, so the
package then requires that release. Torch is not a build requirement in pyproject.toml: pip would
download one of its own into an isolated environment, gigabytes, before any code here runs.
COMMHOOKS_NO_EXTENSION=1 compiles nothing and needs no torch: see docs/installation.md.
"""

import os
import re
import sys
from pathlib import Path

from setuptools import setup

SUPPORTED = "torch>=2.11,<2.16"
REQUIREMENTS = ["numpy>=1.26"]
NEEDS_TORCH = """
commhooks is compiled against the torch that is installed, but there is no torch here.

  Install torch, then type this, without a build environment of pip's own:

      pip install ninja 'setuptools>=77' wheel numpy
      pip install --no-build-isolation .

  Or, without a compiler, for torch's own DistributedDataParallel only, and slower on CPU tensors:

      COMMHOOKS_NO_EXTENSION=1 pip install .
"""

UNSUPPORTED = f"""
commhooks works with {SUPPORTED}, but this is torch {{}}. Install another torch first.
"""

leaves_out_extensions = os.environ.get("COMMHOOKS_NO_EXTENSION") == "1"
# What these do is the same with and without torch, and building begins with egg_info.
needs_torch = not {"egg_info", "sdist"} & set(sys.argv)

if not leaves_out_extensions:
    try:
        import torch
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise  # there is a torch, which lacks something
        if needs_torch:
            sys.exit(NEEDS_TORCH)
        leaves_out_extensions = True

if leaves_out_extensions:
    setup(install_requires=[SUPPORTED, *REQUIREMENTS])
else:
    major, minor = map(int, torch.__version__.split(".")[:2])
    oldest, newest = re.findall(r"(\d+)\.(\d+)", SUPPORTED)
    if not tuple(map(int, oldest)) <= (major, minor) < tuple(map(int, newest)):
        sys.exit(UNSUPPORTED.format(torch.__version__))
    sys.path.insert(0, str(Path(__file__).parent / "csrc"))  # tools that build leave this out
    import extensions

    setup(
        install_requires=[f"torch=={major}.{minor}.*", *REQUIREMENTS],
        ext_modules=[extensions.engine(), extensions.kernels()],
        cmdclass={"build_ext": extensions.Build},
    )
