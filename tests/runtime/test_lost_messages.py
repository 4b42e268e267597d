"""What a scheduler does when a peer has gone: Note [Messages that never end]."""

from typing import Any
from unittest import mock

import pytest

from commhooks import CommHookError
from commhooks.comm.stage_groups import StageGroups
from commhooks.runtime.exchange_scheduler import ExchangeScheduler
from commhooks.runtime.waiters import Waiters


@pytest.mark.parametrize("has_failed", [False, True])
def test_messages_of_a_failed_step_are_closed_and_then_aborted(has_failed: bool) -> None:
    """Also if the step has failed for another reason, before the loss was noticed."""
    execution: Any = mock.Mock(failure=CommHookError("another") if has_failed else None)
    later: Any = mock.Mock(failure=CommHookError("of the next epoch"))
    groups = mock.create_autospec(StageGroups, instance=True, epoch=int(has_failed))
    waiters = mock.create_autospec(Waiters, instance=True)
    scheduler = ExchangeScheduler(0, groups, waiters)
    scheduler.on_end = ended = mock.Mock()
    scheduler.unfinished.append(execution)
    scheduler._under_way |= {execution: (0, (), 1), later: (1, (), 1)}

    assert not scheduler.abort_without_peer(0)
    assert groups.publish.call_count == (not has_failed)
    assert execution.failure is not None
    groups.close_connections.assert_called_once_with()
    execution.abort.assert_not_called()

    groups.epoch = 1  # a step has failed as well
    assert scheduler.abort_without_peer(0)
    execution.abort.assert_called_once_with(execution.failure)
    ended.assert_called_once_with(execution)
    groups.drop_unused.assert_called_once()
    waiters.end_epoch.assert_called_once_with(0)
    later.abort.assert_not_called()
    assert list(scheduler._under_way) == [later]
    scheduler.complete((0, (), 1))  # the message has ended after all
    execution.end_collective.assert_not_called()
