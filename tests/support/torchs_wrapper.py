"""What torch's own wrapper accepts, which depends on its version."""

import inspect
from typing import Any

from torch.nn.parallel import DistributedDataParallel as TorchDDP

__all__ = ["without_unknown"]

_KNOWN = frozenset(inspect.signature(TorchDDP.__init__).parameters)


def without_unknown(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options that torch's wrapper has."""
    return {name: value for name, value in options.items() if name in _KNOWN}
