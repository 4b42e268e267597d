"""The conformance kit: one line tells whether a hook keeps to the rules that all hooks keep to.

::

    def test_my_hook():
        commhooks.testing.check_hook(functools.partial(MyHook, bits=4))
"""

import inspect
import pickle

import torch

from commhooks.cluster import RankStartError
from commhooks.hook.base import CommHook
from commhooks.testing.ranks import run_ranks
from commhooks.testing.rules import (
    RULES,
    BrokenRuleError,
    Factory,
    RuleContext,
    has_consensus,
    is_lossless,
)

__all__ = ["ConformanceError", "check_hook"]


class ConformanceError(AssertionError):
    """A hook breaks a rule; the text names the rule, what it asks for, and what was found."""


def check_hook(
    factory: Factory,
    world_size: int = 2,
    *,
    timeout: float = 60.0,
    device: str = "cpu",
    backend: str = "gloo",
) -> None:
    """Trains on ``world_size`` ranks of this machine to see whether a hook is sound.

    ``factory`` makes the hook, on every rank, in other processes: a class, a function of a module,
    or a ``functools.partial`` of these, with options that put the hook to work from the first step.

    The rules are the functions of :mod:`commhooks.testing.rules`. Those about the exact mean are
    for hooks with ``lossless = True``, those about equal results on all ranks for hooks with
    ``consensus = True``. ``timeout`` is in seconds, per rule. All ranks share the ``device``; on
    "cuda", over NCCL, each has the one of its number.

    In a script, call it under ``if __name__ == "__main__":``, as the other processes import that.

    Raises:
        ConformanceError: for the first rule that is broken.
        TypeError: ``factory`` makes no hook, or cannot be sent to other processes.
        RankStartError: the processes cannot be started.
    """
    if not callable(factory):
        raise TypeError(
            f"check_hook: expected what makes a hook, such as its class, found {factory!r}"
        )
    try:
        pickle.dumps(factory)
    except Exception as error:
        raise TypeError(
            f"check_hook: {factory!r} is called in other processes, so it has to be a class, a "
            f"function of a module, or a functools.partial of these ({error})"
        ) from error
    hook = factory()
    if not isinstance(hook, CommHook):
        raise TypeError(f"check_hook: expected {factory!r} to make a CommHook, found {hook!r}")
    exempt = _exempt(hook)
    for name in RULES:
        if name not in exempt:
            size = 1 if name == "alone" else world_size
            try:
                run_ranks(_check, size, name, factory, device, timeout=timeout, backend=backend)
            except RankStartError:
                raise  # no fault of the hook's
            except Exception as error:
                raise ConformanceError(_explain(hook, name, error)) from error


def _check(rank: int, size: int, name: str, factory: Factory, device: str) -> None:
    place = torch.device(device)
    if place.type == "cuda" and place.index is None:
        place = torch.device("cuda", torch.cuda.current_device())
    RULES[name](RuleContext(rank, size, factory, place))


def _exempt(hook: CommHook) -> set[str]:
    """The rules that do not concern this hook."""
    exempt = set() if is_lossless(hook) else {"mean"}
    return exempt if has_consensus(hook) else exempt | {"consensus", "wire"}


def _explain(hook: CommHook, name: str, error: Exception) -> str:
    if isinstance(error, BrokenRuleError):
        found = str(error)
    elif isinstance(error, TimeoutError):
        found = f"it hangs: {error}"
    else:
        found = f"{type(error).__name__}: {error}"
    rule = inspect.getdoc(RULES[name])
    return f"{hook!r} breaks the rule {name!r}. {rule} But: {found}"
