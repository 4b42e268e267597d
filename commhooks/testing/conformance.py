"""The conformance kit: check in one line that a hook follows the rules for all hooks.

::

    def test_my_hook():
        commhooks.testing.check_hook(functools.partial(MyHook, bits=4))
"""

import inspect
import os
import pickle
import re
from pathlib import Path

import torch

import commhooks
import reducer
from commhooks.cluster import RankStartError
from commhooks.hook.base import CommHook, has_consensus, is_lossless
from commhooks.testing.ranks import run_ranks
from commhooks.testing.rules import RULES, Factory, RuleContext

_HOOKS = str(Path("commhooks", "algorithms"))
_FRAMEWORK = tuple(each.__path__[0] + os.sep for each in (commhooks, reducer, torch))


class ConformanceError(AssertionError):
    """A hook breaks a rule. The text names the rule, what it requires, and what was found."""


def check_hook(
    factory: Factory,
    world_size: int = 2,
    *,
    timeout: float = 60.0,
    device: str = "cpu",
    backend: str = "gloo",
) -> None:
    """Check that a hook follows all rules, by training on ``world_size`` ranks of this machine.

    ``factory`` makes the hook on every rank, in other processes. It is a class, a function of a
    module, or a ``functools.partial`` of these, with options that make the hook active from the
    first step.

    The rules are the functions in :mod:`commhooks.testing.rules`. Rules about the exact mean apply
    to hooks with ``lossless = True``, and rules about equal results on all ranks to hooks with
    ``consensus = True``. ``timeout`` is in seconds per rule. All ranks share the ``device``; on
    "cuda" with the backend "nccl", rank r uses device r modulo the number of devices.

    In a script, call it under ``if __name__ == "__main__":``, because the other processes import
    the script.

    Raises:
        ConformanceError: the hook breaks a rule; later rules are not checked. The traceback of the
            rank is a note of its ``__context__``.
        TypeError: ``factory`` does not make a hook, or cannot be sent to other processes.
        ValueError: ``world_size`` is less than 1.
        RankStartError: the processes cannot be started.
    """
    __tracebackhide__ = True  # pytest shows the line that calls this
    if not callable(factory):
        raise TypeError(
            "check_hook: expected a function that makes a hook, such as its class, found "
            f"{factory!r}"
        )
    try:
        pickle.dumps(factory)
    except Exception as error:
        raise TypeError(
            f"check_hook: {factory!r} is called in other processes, so it must be a class, a "
            f"function of a module, or a functools.partial of these ({error})"
        ) from error
    if world_size < 1:
        raise ValueError(f"check_hook: expected a world_size of at least 1, found {world_size}")
    hook = factory()
    if not isinstance(hook, CommHook):
        raise TypeError(f"check_hook: expected {factory!r} to make a CommHook, found {hook!r}")
    exempt = set() if is_lossless(hook) else {"mean"}
    exempt |= set() if has_consensus(hook) else {"consensus", "wire"}
    exempt |= {"wire"} if world_size == 1 else set()
    for name in RULES:
        if name in exempt:
            continue
        size = 1 if name == "alone" else world_size
        try:
            of_ranks = run_ranks(
                _problems, size, name, factory, device, timeout=timeout, backend=backend
            )
        except RankStartError:
            raise  # not caused by the hook
        except TimeoutError as error:
            raise _broken(hook, name, f"a hang: {error}") from None
        except Exception as error:
            found = f"{type(error).__name__}: {error}{_place(error)}"
            raise _broken(hook, name, found) from None
        if problems := next(filter(None, of_ranks), None):
            first, *others = problems
            raise _broken(hook, name, f"{first}, and {len(others)} more" if others else first)


def _problems(rank: int, size: int, name: str, factory: Factory, device: str) -> list[str]:
    own_device = torch.device(device)
    if own_device.type == "cuda" and own_device.index is None:
        own_device = torch.device("cuda", torch.cuda.current_device())
    return list(RULES[name](RuleContext(rank, size, factory, own_device)))


def _broken(hook: CommHook, name: str, found: str) -> ConformanceError:
    rule = inspect.getdoc(RULES[name])
    return ConformanceError(f"{hook!r} breaks the rule {name!r}. {rule} Found: {found}")


def _place(error: Exception) -> str:
    """Return where the code of a hook has raised on the rank, if that is known."""
    frames = re.findall(
        r'File "(.+?)", line (\d+), in (\S+)', "".join(getattr(error, "__notes__", ()))
    )
    own = [frame for frame in frames if not frame[0].startswith(_FRAMEWORK) or _HOOKS in frame[0]]
    return ", at {}:{} in {}".format(*own[-1]) if own else ""
