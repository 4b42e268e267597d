"""Code during which the host must not wait for the device."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def waiting_is_an_error() -> Iterator[None]:
    """Torch raises at whatever makes the host wait."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that this is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
