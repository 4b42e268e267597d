"""Who is told in backward that gradients have been averaged."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from torch import nn

from reducer._C import Reducer

__all__ = ["GradientObserver"]

GradientObserver = Callable[[Sequence[nn.Parameter]], None]


class GradientObservers:
    """Calls each observer with the parameters of a bucket, once they have their ``.grad``.

    ``parameters``: the reducer's, in its order.
    """

    def __init__(self, reducer: Reducer, parameters: Sequence[nn.Parameter]) -> None:
        self._reducer = reducer
        self._parameters = list(parameters)
        self._observers: list[GradientObserver] = []

    def __iter__(self) -> Iterator[GradientObserver]:
        return iter(self._observers)

    def add(self, observer: GradientObserver) -> None:
        """From the next step on."""
        self._observers.append(observer)
        self._observe()

    def remove(self, observer: GradientObserver) -> None:
        """Raises ValueError for one that was not added."""
        self._observers.remove(observer)
        self._observe()

    def _observe(self) -> None:
        if not self._observers:
            self._reducer.set_observer(None)
            return
        # Without self, which has the reducer: the garbage collector cannot see into that.
        observers, parameters = self._observers, self._parameters

        def observe(indices: Sequence[int]) -> None:
            ready = [parameters[index] for index in indices]
            for observer in observers:
                observer(ready)

        self._reducer.set_observer(observe)
