"""A table of the hook of each parameter, which may change between steps.

Note [Residuals]
~~~~~~~~~~~~~~~~
A hook with error feedback keeps what it has not sent in a field named "error", which is averageable
and has one number per element. It may keep the rest in fields that only this rank has: its
``keep_own`` adds their part of the mean over the ranks to the mean of the errors. So the residual
of this rank is its error plus ``size`` times that part.

The next gradient plus the residual is what the hook would send next. So a residual that is added to
the gradient makes up for a hook that is no longer used, whatever hook is used then. Momenta, which
are no residuals, are lost.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from commhooks.algorithms.host_copy import HostCopy
from commhooks.algorithms.wrappers.route import Routing
from commhooks.codecs.finite import all_finite
from commhooks.comm.communicator import Communicator
from commhooks.hook.base import CommHook, refuse, tree
from reducer import GradBucket

_ALL = slice(None)
_FIELD = "error"
_REFUSED = {
    "consensus": "does not return the same on all ranks",
    "changes_parameters": "changes parameters",
    "skips_steps": "skips steps of the training loop",
    "spreads_parameters": "keeps state of other parameters on other ranks",
    "has_exchanges": "goes on with exchanges between steps",
    "is_adaptive": "chooses hooks itself",
}
"""The flags that exclude a hook as a candidate, with reasons."""


class HookTable(Routing):
    """A table of parameters and hooks. Residuals follow a parameter to its next hook.

    A parameter *moves* in the first step in which a hook gets it while another one still has state
    of it. The residual is added to its gradient, and becomes zero on the device when the new hook
    has returned finite numbers; until then it stays where it was, so that no failure loses it. The
    host learns of it in the next step, or when it saves the state, and drops the state then. So
    nothing but the table and the states of the hooks needs to be saved. See Note [Residuals].
    """

    def __init__(self, hooks: Sequence[CommHook], table: Mapping[str, int]) -> None:
        super().__init__(hooks, table)
        self.moving: dict[str, list[int]] = {}
        """The hooks that still have state of a parameter which is another one's now."""
        self._sent: list[tuple[HostCopy, list[dict[str, Tensor]]]] = []
        """For each bucket of the last step in which parameters moved: whether their residuals have
        been sent, and the states of them that go then."""

    def begin_step(self) -> None:
        super().begin_step()
        self.drop_sent()

    def drop_sent(self) -> None:
        """Drop the states of residuals that have been sent. Call it before states are saved."""
        sent, self._sent = self._sent, []
        gone = {id(entry) for is_sent, entries in sent if is_sent.read() for entry in entries}
        if gone:
            for each in (nested for hook in self._hooks for nested in tree(hook)):
                # A new dict, so that the hook drops what it has made from the former one.
                each.state = {n: entry for n, entry in each.state.items() if id(entry) not in gone}
            self.refresh()

    def change(self, table: Mapping[str, int]) -> None:
        """Use another table from the next step on."""
        self.table = dict(table)
        self.refresh()

    def refresh(self) -> None:
        """Find the parameters that move, after the table or the states have changed."""
        self.moving = {}
        for i, hook in enumerate(self._hooks):
            for name in {key for each in tree(hook) for key in each.state}:
                if self.table.get(name, i) != i:
                    self.moving.setdefault(name, []).append(i)
        former = {i for hooks in self.moving.values() for i in hooks}
        for i, hook in enumerate(self._hooks) if self.table else ():
            if i not in former.union(self.table.values()):  # free what it keeps beside residuals
                for each in tree(hook):
                    each.state = {}

    def residual(
        self, size: int, parameter: str, gradient: Tensor, where: slice = _ALL
    ) -> Tensor | None:
        """Return the sum of :func:`residual_of` of all hooks that have state of a parameter."""
        hooks = [self._hooks[i] for i in (self.table[parameter], *self.moving.get(parameter, ()))]
        found = [residual_of(hook, parameter, gradient, size, where) for hook in hooks]
        known = [residual for residual in found if residual is not None]
        return sum(known[1:], known[0]) if known else None

    async def run(self, i: int, bucket: GradBucket, comm: Communicator) -> Tensor:
        """Return the average of hook ``i``, to which some of the parameters may move."""
        flat, entries = bucket.buffer(), list[dict[str, Tensor]]()
        every = zip(bucket.names, bucket.offsets, bucket.lengths, bucket.gradients(), strict=True)
        for name, offset, length, gradient in every if self.moving else ():
            for former in (self._hooks[j] for j in self.moving.get(name, ())):
                own = [each.state[name] for each in tree(former) if name in each.state]
                for entry in own:  # it may have been loaded and never used
                    entry.update({field: tensor.to(flat.device) for field, tensor in entry.items()})
                residual = residual_of(former, name, gradient, comm.size)
                if residual is not None:
                    flat[offset : offset + length] += residual
                entries += own
        average = await self._hooks[i].reduce(bucket, comm)
        if entries:
            is_sent = all_finite(average)
            for tensor in (tensor for entry in entries for tensor in entry.values()):
                tensor.masked_fill_(is_sent, 0)
            self._sent.append((HostCopy(is_sent), entries))
        return average


def check_candidate(hook: CommHook, where: str) -> None:
    """Raise CommHookOptionError unless parameters may move from and to the hook at any step.

    ``where``: what the user has set to this hook.
    """
    expected = "hooks that average gradients in the same step, such as int8 or powersgd"
    refuse(where, hook, expected, _REFUSED)


def residual_of(
    hook: CommHook, parameter: str, gradient: Tensor, size: int, where: slice = _ALL
) -> Tensor | None:
    """Return what this rank has yet to send of a parameter, flat as in memory; None if nothing.

    ``gradient`` has the shape and strides of those in ``bucket.gradients()``. ``size``: the number
    of ranks. ``where``: the elements that are wanted.
    """
    total = None
    for each in tree(hook):
        entry = each.state.get(parameter, {})
        fields = each.state_fields(gradient) if _FIELD in entry else ()
        shared = {field.name for field in fields or () if field.across_ranks == "averageable"}
        if _FIELD not in shared:
            continue
        residual = _flat(entry[_FIELD])[where].clone()
        own = {name: value for name, value in entry.items() if name not in shared}
        if own and type(each).keep_own is not CommHook.keep_own:
            of_mean = {name: torch.zeros_like(entry[name]) for name in shared if name in entry}
            each.keep_own(of_mean, own)
            residual.add_(_flat(of_mean[_FIELD])[where], alpha=size)
        total = residual if total is None else total.add_(residual)
    return total


def _flat(tensor: Tensor) -> Tensor:
    return tensor.as_strided((tensor.numel(),), (1,))
