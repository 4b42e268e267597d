"""The warning about speed."""

import functools
import warnings


@functools.cache
def warn_once() -> None:
    """Say what the compiled extension would gain, when CPU tensors are encoded or selected."""
    warnings.warn(
        "commhooks is installed without its compiled extensions: on CPU tensors, hooks compute the "
        "same bits in torch's operations, where quantizing and decoding take about 20 times as "
        "long, and selecting the largest elements 4 times (GPUs run the same kernels). To compile "
        "the extensions, you need a C++20 compiler: `pip install --no-build-isolation "
        "--force-reinstall --no-deps .` in the sources",
        stacklevel=3,
    )
