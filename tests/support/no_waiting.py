"""Contexts in which the host must not wait for the device: on a GPU, and on tensors of the CPU."""

import warnings
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from commhooks.algorithms.host_copy import HostCopy

__all__ = ["HostReads", "waiting_is_an_error"]


class HostReads(TorchDispatchMode):
    """Refuse operations that read a number on the host, after ``allowed`` of them.

    On CPU tensors that stand for those of a device. A :class:`HostCopy` may be read in a context
    after that in which it was made.
    """

    OPERATIONS = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal")
    METHODS = ("tolist", "numpy", "cpu")  # of which no operation tells

    def __init__(self, allowed: int) -> None:
        super().__init__()
        self.left = allowed
        self._copies: weakref.WeakSet[HostCopy] = weakref.WeakSet()
        self._patches = ExitStack()

    def _note(self, what: object) -> None:
        self.left -= 1
        assert self.left >= 0, f"{what} makes the host wait for the device"

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function.overloadpacket.__name__ in self.OPERATIONS:
            self._note(function)
        return function(*args, **(kwargs or {}))

    def __enter__(self) -> "HostReads":
        make, read = HostCopy.__init__, HostCopy.read

        def noted_copy(copy: HostCopy, tensor: Tensor) -> None:
            make(copy, tensor)
            self._copies.add(copy)

        def checked_read(copy: HostCopy) -> Any:
            if copy in self._copies:
                self._note("reading a copy in the step that made it")
            with _disable_current_modes(), mock.patch.multiple(Tensor, **methods):
                return read(copy)

        methods = {name: getattr(Tensor, name) for name in self.METHODS}

        def refused(name: str) -> Any:
            def method(tensor: Tensor, *arguments: Any, **options: Any) -> Any:
                self._note(name)
                return methods[name](tensor, *arguments, **options)

            return method

        replaced = {name: refused(name) for name in self.METHODS}
        self._patches.enter_context(mock.patch.multiple(Tensor, **replaced))
        copies = mock.patch.multiple(HostCopy, __init__=noted_copy, read=checked_read)
        self._patches.enter_context(copies)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patches.close()


@contextmanager
def waiting_is_an_error() -> Iterator[None]:
    """Make torch raise at any operation that makes the host wait."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that this mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
