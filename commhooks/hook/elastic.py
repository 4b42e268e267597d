"""What a hook does while ranks come and go."""

from abc import ABC, abstractmethod
from collections.abc import Mapping

from torch import Tensor


class Elastic(ABC):
    """The part of a hook that lets ranks come and go between the steps in which it sends.

    :meth:`CommHook.elastic` returns it. A joining rank receives another rank's parameters and
    :meth:`common_state`.
    """

    @abstractmethod
    def sends(self, step: int) -> bool:
        """Return whether ranks send in this step, among members that must be known before it."""

    def takes(self, step: int) -> bool:
        """Return whether results of an earlier step are used here; by default as it sends."""
        return self.sends(step)

    @abstractmethod
    def common_state(self) -> Mapping[str, Mapping[str, Tensor]]:
        """Return the part of ``state`` that a joining rank receives."""

    @abstractmethod
    def follow_commits(self) -> None:
        """From now on, undo in ``recover()`` what has changed since the last ``commit()``.

        Exchanges that are on their way are undone as well. Nested hooks recover as ever.
        """

    @abstractmethod
    def commit(self) -> None:
        """Keep what steps have changed. Exchanges remain undoable until their results are taken."""
