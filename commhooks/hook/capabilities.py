"""Flags of a hook, and contracts that few hooks have, beyond :class:`~commhooks.CommHook`.

A *flag* is a class attribute, or a property if it depends on options. A hook without the flag says
no. Each hook speaks for itself; :func:`any_declares` also asks those nested in it:

- ``capturable``: a CUDA graph may capture ``reduce``, which depends on nothing but the bucket: on
  no step, random number or state. :func:`all_declare` asks the nested hooks as well.
- ``changes_parameters``: ``reduce`` also changes the parameters.
- ``checks_finite``: ``reduce`` begins with ``bucket.all_finite()``, which packing then computes.
  Only the registered hook is asked. A wrapper that passes buckets on unchanged gives the answer of
  its nested hooks.
- ``gets_each_once``: it has to get each parameter once per step, as with a period or a momentum.
- ``has_exchanges``: it begins exchanges, which go on between steps. The state that they use must
  not be replaced in the meantime.
- ``is_candidate``: ``auto`` considers it, with its default options, unless the user names others.
  For hooks of other packages; those of this package are in algorithms/adaptive/choices.py. The
  class is asked, so a property does not count.
- ``skips_steps``: the training loop asks it, on every rank, which optimizer steps to skip.
- ``spreads_parameters``: nested hooks get other parameters, or parts of them, on other ranks. Then
  only the same ranks can load their states.
- ``tells_contribution``: ``reduce`` sets ``comm.contribution`` when ``comm.wants_contribution``.
- ``times_launches``: it uses the time of ``Communicator.launched``.

Optional methods are in :class:`~commhooks.CommHook`, with their defaults. A hook inherits from
:class:`KnowsModel` to know more of the model; it has all methods of :class:`Elastic`, or none.
"""

import inspect
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Literal, Protocol, TypeAlias, get_args, runtime_checkable

from torch import Tensor

from commhooks.errors import CommHookError

Flag: TypeAlias = Literal[
    "capturable",
    "changes_parameters",
    "checks_finite",
    "gets_each_once",
    "has_exchanges",
    "is_candidate",
    "skips_steps",
    "spreads_parameters",
    "tells_contribution",
    "times_launches",
]

Role: TypeAlias = Literal["embedding", "output"]
"""The role of a parameter in its model, see :func:`commhooks.hook.roles.roles_of`."""


@runtime_checkable
class Elastic(Protocol):
    """A hook under which ranks may come and go between the steps in which it sends.

    A joining rank receives another rank's parameters and :meth:`common_state`.
    """

    def sends(self, step: int) -> bool:
        """Return whether ranks send in this step, among members that must be known before it."""

    def takes(self, step: int) -> bool:
        """Return whether the results of an earlier step are used in this step."""

    def common_state(self) -> Mapping[str, Mapping[str, Tensor]]:
        """Return the part of ``state`` that a rank gets that comes."""

    def follow_commits(self) -> None:
        """From now on, undo in ``recover()`` what has changed since the last ``commit()``.

        Exchanges that are on their way are undone as well. Nested hooks recover as ever.
        """

    def commit(self) -> None:
        """Keep what steps have changed. Exchanges that are still on their way can be undone."""


class Hook(Protocol):
    """The part of :class:`~commhooks.CommHook`, which imports this module, that is used here."""

    def nested(self) -> Mapping[str, "Hook"]:
        """Return the hooks among the options by path."""


class KnowsModel:
    """Base of hooks that need to know more of the model than its parameters.

    Both attributes are set before :meth:`CommHook.prepare`.
    """

    roles: Mapping[str, Role] | None = None
    """The roles of the parameters that have one; None if they are unknown."""
    units: Sequence[Sequence[str]] | None = None
    """The parameters of each bucket, if they never change: the units of a model that is sharded
    with FSDP2, in its order. None on other models."""


_METHODS = (
    "bucket_fields",
    "bucket_key",
    "keep_own",
    "models_agree",
    "native",
    "nested_parameters",
    "notes",
)


def check_capabilities(cls: type) -> None:
    """Raise CommHookError if the class uses the name of a capability for something else."""
    types = inspect.get_annotations(cls)
    for name in get_args(Flag):
        value = cls.__dict__.get(name, False)
        is_bool = isinstance(value, bool | property | cached_property)
        if not is_bool or "bool" not in str(types.get(name, bool)):
            raise _misuse(cls, name, "True, False or a property")
    for name in _METHODS:
        if name in types or not callable(cls.__dict__.get(name, len)):
            raise _misuse(cls, name, "a method")


def _misuse(cls: type, name: str, expected: str) -> CommHookError:
    return CommHookError(
        f"{cls.__qualname__}.{name}: expected {expected}, because the name has a meaning for all "
        "hooks, see docs/writing-a-hook.md; found something else"
    )


def declares(hook: Hook, flag: Flag) -> bool:
    """Return whether a hook has the flag. Hooks nested in it do not count."""
    return bool(getattr(hook, flag, False))


def any_declares(hook: Hook, flag: Flag) -> bool:
    """Return whether a hook, or one nested in it, has the flag."""
    return declares(hook, flag) or any(any_declares(each, flag) for each in hook.nested().values())


def all_declare(hook: Hook, flag: Flag) -> bool:
    """Return whether a hook and all those nested in it have the flag."""
    return declares(hook, flag) and all(all_declare(each, flag) for each in hook.nested().values())
