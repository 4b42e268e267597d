"""Detect changes of a wrapped module whose gradients would not be averaged.

Note [Changed parameters]
~~~~~~~~~~~~~~~~~~~~~~~~~
The reducer listens to the parameter objects that the module had when it was wrapped. If one is
replaced or added, or its data gets another dtype, its gradients would stay on this rank, without an
error. So the module is compared before each forward that synchronizes:

1. In tens of microseconds, in C++: do the modules contain the same objects as before, does autograd
   still call the reducer for each, and do frozen parameters still require no gradient?
2. Only if not, by name: which parameters would not be averaged? If there are none, e.g. because a
   parameter has moved to another module, or data returned from another device, that is the new
   state.

Some changes are legitimate: of ``.data`` within dtype and device; of parameters that require no
gradient; tensors in place of parameters, for one forward (``torch.func.functional_call``) or, if
they are computed from them, for good (tensor parallelism); and with ``find_unused_parameters``, a
parameter that is removed.

A second call of a module's ``__init__`` is not seen, because it replaces the dictionaries that are
compared: the next step raises the error about parameters without gradients.
"""

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

from torch import Tensor, nn

from reducer import native  # not its functions, which are missing without extensions
from reducer.wrapper import Wrapper

_MAX_NAMES = 20


class TrainedParameters:
    """Contents of a wrapper's module at its last comparison."""

    _dicts: list[dict[str, Any]]  # of modules and parameters
    _values: list[Any]
    _frozen: list[Tensor]

    def __init__(self, model: Wrapper) -> None:
        self._kinds = {it: (it.dtype, it.device) for it in model.parameter_names}
        self._record(model, model.not_ignored_parameters())

    def check(self, model: Wrapper) -> None:
        """Raise RuntimeError if gradients of the module's parameters would not be averaged.

        Names these parameters. See Note [Changed parameters].
        """
        if (
            native.are_values(self._dicts, self._values)
            and not native.any_requires_grad(self._frozen)
            and model.reducer.is_attached
        ):
            return
        named = model.not_ignored_parameters()
        changes = [*self._added(model, named), *self._removed(model, named)]
        if changes:
            if len(changes) > _MAX_NAMES:
                changes[_MAX_NAMES:] = [f"and {len(changes) - _MAX_NAMES} more"]
            raise RuntimeError(
                f"[Rank {model.process_group.rank()}] The parameters of the module have changed "
                f"since it was wrapped, and would not be averaged: {'; '.join(changes)}. On all "
                "ranks, change the module before you wrap it; or wrap `model.module` again, "
                "register the hook again, and make a new optimizer."
            )
        model.reducer.reattach()
        if all(isinstance(it, nn.Parameter) for it in named.values()):
            self._record(model, named)

    def close(self) -> None:
        """Do not compare any longer."""
        self._dicts, self._values, self._frozen = [], [], []

    def _record(self, model: Wrapper, named: Mapping[str, nn.Parameter]) -> None:
        modules = list(model.modules())
        contents = chain((it._modules for it in modules), (it._parameters for it in modules))  # noqa: SLF001
        # Those of a ScriptModule are not dictionaries.
        self._dicts = [it for it in contents if isinstance(it, dict)]
        self._values = [value for it in self._dicts for value in it.values()]
        self._frozen = [
            it for it in named.values() if not it.requires_grad and it not in self._kinds
        ]

    def _added(self, model: Wrapper, named: Mapping[str, nn.Parameter]) -> Iterator[str]:
        """Describe the parameters that require a gradient, which the reducer cannot average."""
        names = set(model.parameter_names.values())
        frozen = set(self._frozen)
        for name, parameter in named.items():
            if not parameter.requires_grad or not isinstance(parameter, nn.Parameter):
                continue
            if parameter not in self._kinds:
                if parameter in frozen:
                    change = "required no gradient, and requires a gradient now"
                else:
                    change = "was replaced by another one" if name in names else "is new"
                yield f'"{name}" {change}'
                continue
            dtype, device = self._kinds[parameter]
            if parameter.dtype != dtype:
                yield f'"{name}" is {parameter.dtype} instead of {dtype}'
            elif parameter.device != device:
                yield f'"{name}" is on {parameter.device} instead of {device}'

    def _removed(self, model: Wrapper, named: Mapping[str, nn.Parameter]) -> Iterator[str]:
        """Describe the reducer's parameters that no forward can use any longer."""
        if model.options.find_unused_parameters:
            return
        present = set(named.values())
        for parameter, name in model.parameter_names.items():
            if parameter not in present and not _is_in_use(model.module, name, parameter):
                replaced = named.get(name)
                if replaced is None:
                    yield f'"{name}" was removed'
                elif isinstance(replaced, nn.Parameter) and not replaced.requires_grad:
                    yield f'"{name}" was replaced by one that requires no gradient'


def _is_in_use(module: nn.Module, name: str, parameter: nn.Parameter) -> bool:
    """Return whether what the module has by that name is computed from the parameter."""
    owner, _, last = name.rpartition(".")
    try:
        nodes = [getattr(module.get_submodule(owner), last).grad_fn]
    except AttributeError:
        return False
    seen = {None}
    while nodes:
        if (node := nodes.pop()) in seen:
            continue
        if getattr(node, "variable", None) is parameter:
            return True
        seen.add(node)
        nodes += [following for following, _ in node.next_functions]
    return False
