"""Decides which collectives of a hook may be issued now, so that all ranks agree on the order.

Note [Order of collectives]
~~~~~~~~~~~~~~~~~~~~~~~~~~~
A hook with dependent collectives issues its second one when its first has completed. Completions
come in a different order on every rank. If a collective were issued at that moment, the second
collective of bucket 3 on one rank could meet that of bucket 4 on another: Gloo aborts ("Received
data size doesn't match") or mixes up numbers, and NCCL hangs. Therefore:

    Stage s of bucket b is issued after bucket b-1 has completed its stage s, or has finished with
    fewer stages. Each stage has a process group of its own, its stage group.

            stage group 0   b0 b1 b2 b3 ...
            stage group 1      b0 b1 b2 ...    columns: time; within a row: always bucket order
            stage group 2         b0 b1 ...

On each stage group the order is that of the buckets, which is the same on every rank as long as
each bucket awaits the same collectives on every rank. It does not depend on what completes when.
Between stage groups no order is needed, because they share no connection. Ranks cannot wait for
each other in a circle, either. Take the earliest bucket that has not finished on all ranks, and its
earliest stage that some rank has not issued. All stages before it have been issued by all ranks, so
they complete; and no earlier bucket is unfinished, so the stage is issued.

The order alone would allow b to issue its stage as soon as b-1 has issued its own. But a stage
group of Gloo must not have a second collective in its queue when one fails. If the one that fails
was receiving from a peer, its connection to that peer is never read again (torch 2.13), so the
second one, which waits for the same peer, does not see that the peer has left, and ends only with
the timeout. Gloo runs the collectives of a stage group one after the other in any case. Between two
ranks there is only one connection, and it is closed when a collective fails; so there, a collective
counts as completed when it is issued.

Collectives among some of the ranks are counted separately: Note [Subgroups] in stage_groups.py.
"""

from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import Any, Protocol, TypeVar


class Pending(Protocol):
    """A collective that a hook awaits and that has not been issued."""

    @property
    def members(self) -> Hashable:
        """The ranks that take part."""

    @property
    def is_vote(self) -> bool:
        """Whether it ends the step: see Note [All ranks or none] in runtime/step_scheduler.py."""


class Execution(Protocol):
    """A run of a hook on one bucket that has not finished."""

    @property
    def pending(self) -> Pending | None:
        """None while the hook computes or a collective is under way."""

    @property
    def issued(self) -> Mapping[Any, int]:
        """Number of collectives issued so far, by the ranks that take part."""

    @property
    def completed(self) -> Mapping[Any, int]:
        """Number of collectives that count as completed for the next bucket."""


ExecutionT = TypeVar("ExecutionT", bound=Execution)


def in_turn(unfinished: Iterable[ExecutionT]) -> Iterator[ExecutionT]:
    """Yield each execution whose pending collective may be issued now.

    The caller issues it, and updates ``pending`` and ``issued``, before it asks for the next one.
    Comparing with the nearest unfinished bucket suffices: no bucket has issued more than the one
    before it has completed.

    Args:
        unfinished: The executions of one hook, in bucket order.
    """
    previous: Mapping[Any, int] | None = None
    for execution in unfinished:
        pending = execution.pending
        if pending is not None and _has_turn(pending, execution.issued, previous):
            yield execution
        previous = execution.completed
        if not previous:
            return  # so no later bucket may issue anything


def _has_turn(
    pending: Pending, issued: Mapping[Any, int], completed: Mapping[Any, int] | None
) -> bool:
    """Compare with what the bucket before has ``completed``; None if all before have finished."""
    if completed is None:
        return True
    members = pending.members
    return not pending.is_vote and issued.get(members, 0) < completed.get(members, 0)
