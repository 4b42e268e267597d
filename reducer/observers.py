"""Tell observers, during backward, which parameters have their averaged gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from torch import nn

from reducer._C import Reducer

__all__ = ["GradientObserver"]

GradientObserver = Callable[[Sequence[nn.Parameter]], None]


class GradientObservers:
    """Calls each observer with the parameters of a bucket as soon as they have their ``.grad``.

    ``parameter_names``: the names of the reducer's parameters, in the reducer's order.
    """

    def __init__(self, reducer: Reducer, parameter_names: Mapping[nn.Parameter, str]) -> None:
        self._reducer = reducer
        self.parameter_names = parameter_names
        self._observers: list[GradientObserver] = []

    def __iter__(self) -> Iterator[GradientObserver]:
        return iter(self._observers)

    def add(self, observer: GradientObserver) -> None:
        """Call ``observer`` from the next step on."""
        self._observers.append(observer)
        self._observe()

    def remove(self, observer: GradientObserver) -> None:
        """Stop calling ``observer``. Raises ValueError if it was not added."""
        self._observers.remove(observer)
        self._observe()

    def _observe(self) -> None:
        if not self._observers:
            self._reducer.set_observer(None)
            return
        # The function must not refer to self, which refers to the reducer: the garbage collector
        # cannot find a reference cycle that passes through C++.
        observers, parameters = self._observers, list(self.parameter_names)

        def observe(indices: Sequence[int]) -> None:
            ready = [parameters[index] for index in indices]
            for observer in observers:
                observer(ready)

        self._reducer.set_observer(observe)
