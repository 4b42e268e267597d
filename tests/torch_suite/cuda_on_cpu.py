"""Let code that names CUDA devices run on the CPU, where streams and events do nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.overrides import TorchFunctionMode


class CudaOnCpu(TorchFunctionMode):
    """Replaces CUDA devices among the arguments of torch's functions and tensor methods."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = getattr(function, "__name__", "")
        if name == "cuda":
            return args[0]
        takes_index = name == "to"  # as in tensor.to(0)
        args = [on_cpu(argument, takes_index) for argument in args]
        kwargs = {key: on_cpu(value, key == "device") for key, value in (kwargs or {}).items()}
        return function(*args, **kwargs)


def on_cpu(argument: Any, takes_index: bool) -> Any:
    """Return the CPU for a CUDA device, and anything else unchanged."""
    is_index = takes_index and isinstance(argument, int) and not isinstance(argument, bool)
    if is_index or (isinstance(argument, str) and argument.startswith("cuda")):
        return "cpu"
    if isinstance(argument, torch.device) and argument.type == "cuda":
        return torch.device("cpu")
    return argument


class NoStream(contextlib.nullcontext[None]):
    """Stands for a stream, an event, and a context in which one is current."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def synchronize(self) -> None:
        """Do nothing, like all methods."""

    record_event = record = wait = wait_stream = wait_event = lambda self, *_: self


_module_to = nn.Module.to


def module_to(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
    """Stand for ``nn.Module.to``, whose arguments do not pass through the mode."""
    args = tuple(on_cpu(argument, takes_index=True) for argument in args)
    kwargs = {key: on_cpu(value, key == "device") for key, value in kwargs.items()}
    return _module_to(module, *args, **kwargs)


@contextlib.contextmanager
def cuda_on_cpu(devices: int) -> Iterator[None]:
    """Return a context in which as many CUDA devices seem to exist."""
    functions = ["set_device", "synchronize", "empty_cache", "_sleep", "manual_seed_all"]
    objects = ["device", "Stream", "stream", "Event", "current_stream", "default_stream"]
    with (
        mock.patch.multiple(
            torch.cuda,
            device_count=lambda: devices,
            current_device=lambda: 0,
            **{name: lambda *_, **__: None for name in functions},
            **dict.fromkeys(objects, NoStream),
        ),
        mock.patch.object(nn.Module, "to", module_to),
        CudaOnCpu(),
    ):
        yield
