"""Which of several hooks each parameter has, where that changes between steps."""

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor

from commhooks.algorithms.adaptive.residuals import forget, known_parameters, residual_of
from commhooks.algorithms.wrappers.route import Routing
from commhooks.codecs.finite import all_finite
from commhooks.comm.communicator import Communicator
from commhooks.hook.base import CommHook
from reducer import GradBucket

__all__ = ["Adopts", "HookTable"]

_ALL = slice(None)


@runtime_checkable
class Adopts(Protocol):
    """A hook that learns from the former hook of its parameters."""

    def adopt(self, former: CommHook, gradients: Mapping[str, Tensor]) -> None:
        """Take over what ``former``, which had these parameters, has learned of them.

        Called when this hook has no state of them yet. Errors are not meant: those named "error"
        are added to the gradients. ``gradients`` are as in :meth:`CommHook.state_fields`. All ranks
        must do the same.
        """


class HookTable(Routing):
    """A table of parameters and hooks. Residuals follow a parameter to its next hook.

    A parameter *moves* in the first step in which a hook gets it while another one still has state
    of it. The residual is added to its gradient, and dropped when the new hook has returned finite
    numbers; until then it stays where it was, so that no failure loses it. So nothing but the table
    and the states of the hooks needs to be saved. See Note [Residuals] in residuals.py.
    """

    def __init__(self, hooks: Sequence[CommHook], table: Mapping[str, int]) -> None:
        super().__init__(table)
        self._hooks = hooks
        self._moving: dict[str, list[int]] = {}
        """The hooks that still have state of a parameter which is another one's now."""

    def change(self, table: Mapping[str, int]) -> None:
        """Use another table from the next step on."""
        self.table = dict(table)
        self.refresh()

    def refresh(self) -> None:
        """Look which parameters move, after the table or the states have changed."""
        self._moving = {}
        for i, hook in enumerate(self._hooks):
            for name in known_parameters(hook):
                if self.table.get(name, i) != i:
                    self._moving.setdefault(name, []).append(i)

    def residual(
        self, size: int, parameter: str, gradient: Tensor, where: slice = _ALL
    ) -> Tensor | None:
        """Return what this rank has yet to send of a parameter, None if nothing.

        ``size``: the number of ranks. ``where``: the elements that are wanted, of the parameter as
        it lies in memory.
        """
        positions = [self.table[parameter], *self._moving.get(parameter, ())]
        found = [residual_of(self._hooks[i], parameter, gradient, size, where) for i in positions]
        known = [residual for residual in found if residual is not None]
        return sum(known[1:], known[0]) if known else None

    async def run(self, i: int, bucket: GradBucket, comm: Communicator) -> Tensor:
        """Return the average of hook ``i``, to which some of the parameters may move."""
        moving = {name: self._moving[name] for name in bucket.names if name in self._moving}
        if not moving:
            return await self._hooks[i].reduce(bucket, comm)
        self._hand_over(i, bucket, moving, comm.size)
        average = await self._hooks[i].reduce(bucket, comm)
        if bool(all_finite(average)):  # waits for the device, in this step only
            for j, hook in enumerate(self._hooks):
                if names := [name for name, former in moving.items() if j in former]:
                    forget(hook, names)
            for name in moving:
                self._moving.pop(name, None)
        return average

    def _hand_over(
        self, i: int, bucket: GradBucket, moving: Mapping[str, list[int]], size: int
    ) -> None:
        """Add residuals to the gradients, and let the hook learn what it can."""
        flat, gradients = bucket.buffer(), dict(zip(bucket.names, bucket.gradients(), strict=True))
        places = zip(bucket.names, bucket.offsets, bucket.lengths, strict=True)
        for name, offset, length in places:
            for j in moving.get(name, ()):
                residual = residual_of(self._hooks[j], name, gradients[name], size)
                if residual is not None:
                    flat[offset : offset + length] += residual.to(flat.device)
                new = self._hooks[i]
                if name not in new.state and isinstance(new, Adopts):
                    new.adopt(self._hooks[j], {name: gradients[name]})
