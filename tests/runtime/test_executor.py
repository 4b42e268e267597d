"""What an executor does when a peer has gone: Note [Messages that never end]."""

from typing import Any
from unittest import mock

import pytest

from commhooks import CommHookError
from commhooks.comm.stage_groups import StageGroups
from commhooks.runtime.executor import Executor


@pytest.mark.parametrize("has_failed", [False, True])
def test_messages_of_a_failed_step_are_closed_and_then_given_up(has_failed: bool) -> None:
    """Also if the step has failed for another reason, before the loss was noticed."""
    execution: Any = mock.Mock(failure=CommHookError("another") if has_failed else None)
    groups = mock.create_autospec(StageGroups, instance=True, epoch=int(has_failed))
    owner = mock.Mock()
    owner.fail.side_effect = lambda error: setattr(execution, "failure", error)
    executor = Executor(0, groups, mock.Mock(), owner)
    executor._under_way[execution] = (0, (), 1)

    failed = executor.fail_without(0)
    assert failed == [execution]
    assert owner.fail.call_count == (not has_failed)
    groups.close_connections.assert_called_once_with()
    execution.fail.assert_not_called()

    assert executor.give_up(failed)
    execution.fail.assert_called_once_with(execution.failure)
    groups.drop_unused.assert_called_once()
    assert not executor.used
    assert not executor.give_up(failed)
