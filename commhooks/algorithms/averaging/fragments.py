"""Parts of a model that are synchronized in different steps, as Streaming DiLoCo has them."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from commhooks.errors import CommHookError

__all__ = ["Turns", "runs_of"]


@dataclass
class Turns:
    """The steps in which each of ``fragments`` parts of a model is due.

    Fragment f is due in steps t > ``start`` with t - start = ⌊f·period/fragments⌋ modulo period.
    """

    start: int
    period: int
    fragments: int
    _fragment_of: dict[str, int] = field(default_factory=dict)

    def divide(
        self, parameters: Mapping[str, Tensor], units: Sequence[Sequence[str]] | None = None
    ) -> None:
        """Divide the parameters, in the model's order, into fragments of about equal size.

        ``units``: names of parameters that share a bucket in each step, and so share a fragment.

        Raises:
            CommHookError: There are more fragments than units, or than parameters.
        """
        parts = [[name for name in unit if name in parameters] for unit in units or ()]
        parts = [part for part in parts if part] or [[name] for name in parameters]
        if self.fragments > len(parts):
            kind = "parameters" if units is None else "units of the sharded model"
            raise CommHookError(
                f"expected at most as many fragments as {kind}, {len(parts)}, found "
                f"fragments={self.fragments}"
            )
        sizes = [sum(parameters[name].numel() for name in part) for part in parts]
        runs = runs_of(sizes, self.fragments)
        self._fragment_of = {
            name: run for part, run in zip(parts, runs, strict=True) for name in part
        }

    @property
    def names(self) -> list[str]:
        """The names of all parameters."""
        return list(self._fragment_of)

    def is_due(self, name: str, step: int) -> bool:
        """Return whether the fragment of a parameter is due in a step."""
        return step > self.start and self.since(name, step) == 0

    def is_any_due(self, step: int) -> bool:
        """Return whether any fragment is due in a step."""
        offsets = {fragment * self.period // self.fragments for fragment in range(self.fragments)}
        return step > self.start and (step - self.start) % self.period in offsets

    def since(self, name: str, step: int) -> int:
        """Return how many steps ago the fragment of a parameter was due, or could have been."""
        offset = self._fragment_of.get(name, 0) * self.period // self.fragments
        return (step - self.start - offset) % self.period

    def round(self, step: int) -> int:
        """Return how often each fragment was due before a step in which it is due."""
        return (step - self.start - 1) // self.period


def runs_of(sizes: Sequence[int], count: int) -> list[int]:
    """Divide items into runs of about equal size; return the run, 0 to count - 1, of each item.

    An item is in the run that contains its middle.
    """
    total = max(sum(sizes), 1)
    starts = itertools.accumulate(sizes, initial=0)
    return [
        min(count * (2 * start + size) // (2 * total), count - 1)
        for start, size in zip(starts, sizes, strict=False)
    ]
