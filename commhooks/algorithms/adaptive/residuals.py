"""What a hook has yet to send of a parameter: the residual of error feedback.

Note [Residuals]
~~~~~~~~~~~~~~~~
A hook with error feedback keeps what it has not sent in a field named "error", which is averageable
and has one number per element. It may keep the rest in fields that only this rank has: its
:meth:`CommHook.keep_own` adds their part of the mean over the ranks to the mean of the errors. So
the residual of this rank is its error plus ``size`` times that part.

The next gradient plus the residual is what the hook would send next. So a residual that is added to
the gradient makes up for a hook that is no longer used, whatever hook is used then. Momenta, which
are no residuals, are lost.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from commhooks.hook.base import CommHook, tree

__all__ = ["forget", "known_parameters", "residual_of"]

_ALL = slice(None)

_FIELD = "error"


def residual_of(
    hook: CommHook, parameter: str, gradient: Tensor, size: int, where: slice = _ALL
) -> Tensor | None:
    """Return the residual of a parameter as it lies in memory, flat; None if there is none.

    ``gradient`` has the shape and strides of those in ``bucket.gradients()``. ``size``: the number
    of ranks. ``where``: the elements that are wanted.
    """
    total = None
    for each in tree(hook):
        entry = each.state.get(parameter, {})
        fields = each.state_fields(gradient) if _FIELD in entry else ()
        shared = {field.name for field in fields or () if field.across_ranks == "averageable"}
        if _FIELD in shared:
            residual = _flat(entry[_FIELD])[where].clone()
            if own := {name: value for name, value in entry.items() if name not in shared}:
                of_mean = {name: torch.zeros_like(entry[name]) for name in shared if name in entry}
                each.keep_own(of_mean, own)
                residual.add_(_flat(of_mean[_FIELD])[where], alpha=size)
            total = residual if total is None else total.add_(residual)
    return total


def known_parameters(hook: CommHook) -> set[str]:
    """Return the keys of the state of a hook, and of those nested in it."""
    return {key for each in tree(hook) for key in each.state}


def forget(hook: CommHook, parameters: Iterable[str]) -> None:
    """Drop the state of some parameters."""
    dropped = set(parameters)
    for each in tree(hook):
        # A new dict tells the hook's caches of buckets that the state has changed.
        each.state = {key: entry for key, entry in each.state.items() if key not in dropped}


def _flat(tensor: Tensor) -> Tensor:
    return tensor.as_strided((tensor.numel(),), (1,))
