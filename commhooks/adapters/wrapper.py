"""Wrappers of modules whose gradients hooks average."""

import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel

import reducer
from commhooks.adapters.handle import AnyHook, register
from commhooks.extensions import ENGINE
from reducer.errors import expect


class DistributedDataParallel(reducer.DistributedDataParallel):
    """Wrap ``module`` so that ``loss.backward()`` averages its gradients over the ranks.

    A drop-in replacement for ``torch.nn.parallel.DistributedDataParallel`` that takes a hook. It
    has all arguments, attributes and methods of :class:`reducer.DistributedDataParallel`.

    Args:
        module: The module to train.
        *args: The other arguments of :class:`reducer.DistributedDataParallel`, by position.
        hook: A hook as :func:`commhooks.register` takes it. Default: the exact average.
        hook_options: The options of a hook that is given by name.
        **options: Those arguments by name.

    Raises:
        ValueError: There are ``hook_options`` without a hook.
        CommHookError: See :func:`commhooks.register`.
    """

    def __init__(
        self,
        module: nn.Module,
        *args: Any,
        hook: AnyHook | None = None,
        hook_options: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        expect(Mapping | None, hook_options=hook_options)
        super().__init__(module, *args, **options)
        if hook is not None:
            register(self, hook, **(hook_options or {}))
        elif hook_options:
            raise ValueError(f"hook_options={dict(hook_options)} were given without a hook.")


def _signature() -> inspect.Signature:
    """Return the arguments of the engine's wrapper, then ``hook`` and ``hook_options``."""
    own = inspect.signature(DistributedDataParallel.__init__).parameters
    all_of = inspect.signature(reducer.DistributedDataParallel.__init__)
    added = [own["hook"], own["hook_options"]]
    return all_of.replace(parameters=[*all_of.parameters.values(), *added])


DistributedDataParallel.__init__.__signature__ = _signature()  # type: ignore[attr-defined]


def wrap(module: nn.Module, **options: Any) -> nn.Module:
    """Wrap the module in our wrapper, or in torch's if ours is not compiled."""
    if ENGINE.is_compiled:
        return DistributedDataParallel(module, **options)
    if options.pop("stable_buckets", False):
        options["find_unused_parameters"] = True  # with it, torch keeps the first buckets
    options.pop("host_memory", None)
    return TorchDistributedDataParallel(module, **options)
