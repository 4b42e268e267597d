"""The rules of order and of failure, on simulated connections and in random orders of events.

Each rule of Note [Order of collectives], Note [Subgroups], Note [All ranks or none] and
Note [Meeting before connecting] is needed here: without it a test fails within a second.
"""

from itertools import combinations
from typing import Any
from unittest import mock

import hypothesis
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.simulated_steps import ALL, Fault, Plan, Program, run_steps

from commhooks import CommHookError, CommHookPeerError
from commhooks.comm.issue_order import in_turn
from commhooks.comm.stage_groups import StageGroups
from commhooks.runtime.step_scheduler import Phase, StepScheduler, StepState

STEPS = 3
seeds = st.integers(0, 2**32)
# Failures are not shrunk: programs are small as they are, and a broken rule shows at once.
in_any_order = settings(max_examples=20, phases=(hypothesis.Phase.reuse, hypothesis.Phase.generate))


@st.composite
def programs(draw: Any, size: int) -> Program:
    """A program in which every rank sends something."""
    some = [ranks for n in range(2, size) for ranks in combinations(range(size), n)]
    bucket = st.lists(st.sampled_from([ALL, ALL, *some]), max_size=3)
    program: Program = draw(st.lists(bucket, min_size=1, max_size=4))
    senders = {rank for stages in program for ranks in stages for rank in ranks or range(size)}
    assume(len(senders) == size)
    return program


@st.composite
def faults(draw: Any, program: Program, rank: int, step: int) -> Fault:
    """A hook that raises at any of its stages, or a backward that ends after its first bucket."""
    bucket = draw(st.integers(0, len(program) - 1))
    stage = draw(st.integers(0, len(program[bucket])))
    ends_early = bucket > 0 and draw(st.booleans())
    return Fault(rank, step, bucket, None if ends_early else stage)


@in_any_order
@given(st.data(), st.integers(2, 4), seeds, st.booleans())
def test_ranks_agree_on_the_order(data: Any, size: int, seed: int, knows_last: bool) -> None:
    program = data.draw(programs(size))
    outcome = run_steps(size, program, STEPS, seed, knows_last=knows_last)
    assert outcome.errors == [[[]] * STEPS] * size
    assert outcome.recovered == [0] * size
    assert outcome.votes == STEPS


@in_any_order
@given(seeds)
def test_later_stages_of_many_buckets_do_not_mix(seed: int) -> None:
    """Also where a bucket has fewer stages than the one before it, or more."""
    outcome = run_steps(2, [[ALL] * 3, [ALL] * 3, [], [ALL], [ALL] * 2], STEPS, seed)
    assert outcome.errors == [[[]] * STEPS] * 2
    assert outcome.groups == 2 * 3  # one for each stage, kept from step to step


@in_any_order
@given(seeds)
def test_subgroups_count_their_own_stages(seed: int) -> None:
    """Rank 0 awaits more than the others, so its count of all collectives means nothing to them."""
    pair, leaders = (0, 1), (0, 2)
    program = [[pair, leaders, leaders, pair, ALL], [ALL], [pair, leaders, ALL], [leaders, pair]]
    outcome = run_steps(3, program, STEPS, seed)
    assert outcome.errors == [[[]] * STEPS] * 3
    # Connections per rank: two stages of the pair, two of the leaders, and one of all.
    assert outcome.groups == 2 * 2 + 2 * 2 + 3


@in_any_order
@given(st.data(), st.integers(2, 3), seeds, st.booleans())
def test_a_step_fails_on_all_ranks_or_on_none(
    data: Any, size: int, seed: int, knows_last: bool
) -> None:
    program = data.draw(programs(size))
    fault = data.draw(faults(program, data.draw(st.integers(0, size - 1)), step=1))
    outcome = run_steps(size, program, STEPS, seed, fault, knows_last=knows_last)
    assert outcome.recovered == [1] * size
    assert outcome.votes == STEPS - 1
    for rank, (before, failed, after) in enumerate(outcome.errors):
        assert before == after == []
        if fault.stage is None:
            reason = f"[rank {fault.rank}] the backward pass ended before its last bucket"
        else:
            reason = f"ValueError: {fault.text}"
        if rank != fault.rank:
            assert failed  # of any bucket
        for error in failed:
            assert isinstance(error, CommHookPeerError) == (rank != fault.rank)
            assert isinstance(error, CommHookError)
            assert reason in str(error)


@in_any_order
@given(st.data(), seeds)
def test_several_ranks_fail_at_once(data: Any, seed: int) -> None:
    """All ranks count the failure once, whoever is first, and meet again in the next step."""
    program = data.draw(programs(3))
    first, second, third = (data.draw(faults(program, rank, step=0)) for rank in range(3))
    outcome = run_steps(3, program, STEPS, seed, first, second, third)
    assert outcome.recovered == [1] * 3
    for _, *after in outcome.errors:
        assert after == [[], []]
    assert outcome.votes == STEPS - 1


@in_any_order
@given(st.data(), st.integers(0, 2), seeds)
def test_steps_fail_again_and_again(data: Any, rank: int, seed: int) -> None:
    program = data.draw(programs(3))
    both = [data.draw(faults(program, rank, step)) for step in range(2)]
    outcome = run_steps(3, program, STEPS, seed, *both)
    assert [errors[-1] for errors in outcome.errors] == [[]] * 3
    assert outcome.recovered == [2] * 3


@in_any_order
@given(seeds)
def test_a_bucket_that_fails_last_is_heard(seed: int) -> None:
    """The vote waits for buckets that have nothing to send any more."""
    outcome = run_steps(2, [[ALL] * 2, [ALL]], 2, seed, Fault(rank=0, step=0, bucket=0, stage=2))
    assert all(failed for failed, _ in outcome.errors)
    assert outcome.votes == 1


@in_any_order
@given(seeds)
def test_a_failure_far_from_where_two_ranks_meet(seed: int) -> None:
    """Ranks 0 and 1 both connect, or neither does, while rank 2 fails."""
    program = [[(1, 2), (0, 1)], [(0, 1), (0, 1), ALL]]
    outcome = run_steps(3, program, 2, seed, Fault(rank=2, step=0, bucket=0, stage=1))
    for rank, (failed, after) in enumerate(outcome.errors):
        assert failed
        assert after == []
        assert all(isinstance(error, CommHookPeerError) == (rank != 2) for error in failed)


@in_any_order
@given(seeds)
def test_a_backward_that_ends_before_anything_was_sent(seed: int) -> None:
    """Rank 0 has launched a bucket, so the others wait for it."""
    early = Fault(rank=0, step=1, bucket=1)
    outcome = run_steps(2, [[], [ALL]], STEPS, seed, early)
    assert outcome.errors[1][1]
    assert outcome.recovered == [1, 1]
    assert outcome.votes == STEPS - 1


def test_the_vote_needs_no_connection_of_its_own() -> None:
    assert run_steps(2, [[ALL], [ALL] * 2], 1, seed=0).groups == 2 * 2


def test_a_second_error_is_not_another_failure() -> None:
    """Peers count the failed step once, so this rank must as well."""
    groups = mock.create_autospec(StageGroups, instance=True)
    others = [mock.Mock() for _ in range(5)]
    scheduler = StepScheduler(mock.Mock(), mock.Mock(), groups, *others)
    scheduler.abort(CommHookError("first"))
    scheduler.abort(CommHookError("second"))
    groups.publish.assert_called_once_with("first")
    groups.abort.assert_called_once()
    assert others[-1].call.call_count == 1  # aborts the exchanges


@in_any_order
@given(seeds)
def test_a_step_without_collectives_has_no_vote(seed: int) -> None:
    outcome = run_steps(2, [[], []], 2, seed)
    assert outcome.errors == [[[], []]] * 2
    assert (outcome.groups, outcome.votes) == (0, 0)


@in_any_order
@given(seeds)
def test_a_step_that_ends_before_its_first_bucket_fails_on_all_ranks(seed: int) -> None:
    """Also if all ranks end it, and if it is the second one in a row."""
    outcome = run_steps(2, [[ALL], [ALL]], STEPS, seed, Fault(rank=0, step=1, bucket=0))
    assert outcome.errors[1][1]
    assert outcome.votes == STEPS - 1
    early = [Fault(rank, step, bucket=0) for rank in range(2) for step in range(STEPS - 1)]
    outcome = run_steps(2, [[ALL], [ALL]], STEPS, seed, *early)
    assert outcome.errors == [[[]] * STEPS] * 2
    assert outcome.votes == 1
    assert outcome.recovered == [STEPS - 1] * 2


# ------------------------------------------------------------------------ exchanges between steps


@st.composite
def plans(draw: Any, size: int) -> Plan:
    some = [ranks for n in range(2, size) for ranks in combinations(range(size), n)]
    stages = draw(st.lists(st.sampled_from([ALL, *some]), min_size=1, max_size=3))
    return Plan(stages, delay=draw(st.integers(1, 2)))


@in_any_order
@given(st.data(), st.integers(2, 3), seeds, st.booleans())
def test_exchanges_of_several_steps_do_not_mix(
    data: Any, size: int, seed: int, knows_last: bool
) -> None:
    """Neither with each other nor with the steps; also where a step itself sends nothing."""
    program = data.draw(st.sampled_from([[[], []], [[ALL], []], [[ALL] * 2, [ALL]]]))
    plan = data.draw(plans(size))
    outcome = run_steps(size, program, STEPS, seed, knows_last=knows_last, exchange=plan)
    assert outcome.errors == [[[]] * STEPS] * size
    assert outcome.taken == [2 * (STEPS - plan.delay)] * size
    assert outcome.votes == STEPS


@in_any_order
@given(st.data(), st.integers(2, 3), seeds)
def test_an_exchange_that_fails_fails_the_step_that_awaits_it(
    data: Any, size: int, seed: int
) -> None:
    """On all ranks, although it may succeed on some; and later exchanges begin anew."""
    stages, delay = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 2))
    plan = Plan([ALL] * stages, delay, once=data.draw(st.booleans()))
    rank, bucket = data.draw(st.integers(0, size - 1)), data.draw(st.integers(0, 1))
    fault = Fault(rank, 0, bucket, data.draw(st.integers(0, len(plan.stages))), in_exchange=True)
    program = data.draw(st.sampled_from([[[], []], [[ALL] * 2, [ALL]]]))
    steps = 2 + 2 * plan.delay
    outcome = run_steps(size, program, steps, seed, fault, exchange=plan)
    assert outcome.recovered == [1] * size
    for found, errors in enumerate(outcome.errors):
        failed = [step for step, of_step in enumerate(errors) if of_step]
        assert failed == [plan.delay]
        assert all(f"ValueError: {fault.text}" in str(error) for error in errors[plan.delay])
        if found != rank:  # which may hear from another one before it awaits its own
            assert all(isinstance(error, CommHookPeerError) for error in errors[plan.delay])
    if not plan.once:  # those that began before the failure were aborted
        assert outcome.taken[0] >= 2 * (steps - 1 - 2 * plan.delay)


@in_any_order
@given(st.data(), st.integers(2, 3), seeds)
def test_a_step_that_fails_aborts_the_exchanges_of_all_ranks(
    data: Any, size: int, seed: int
) -> None:
    program = [[ALL], [ALL]]
    fault = data.draw(faults(program, data.draw(st.integers(0, size - 1)), step=2))
    plan = data.draw(plans(size))
    outcome = run_steps(size, program, 6, seed, fault, exchange=plan)
    assert outcome.recovered == [1] * size
    for errors in outcome.errors:
        assert [bool(of_step) for of_step in errors[:2] + errors[3:]] == [False] * 5
    assert outcome.votes == 5


@in_any_order
@given(st.data(), st.integers(2, 3), seeds)
def test_nobody_waits_for_an_exchange_that_fails_and_is_not_awaited(
    data: Any, size: int, seed: int
) -> None:
    """As ``handle.state_dict()`` after the last step would."""
    stages = data.draw(st.integers(1, 3))
    fault = Fault(0, 1, data.draw(st.integers(0, 1)), data.draw(st.integers(0, stages)), True)
    outcome = run_steps(size, [[ALL], []], 2, seed, fault, exchange=Plan([ALL] * stages, delay=2))
    assert outcome.errors == [[[]] * 2] * size


def test_an_aborted_exchange_does_not_hold_up_later_ones() -> None:
    """In one of twenty orders, one is still pending when those that began after it get a turn."""
    fault = Fault(rank=0, step=2, bucket=1, stage=0)
    for seed in range(100):
        run_steps(2, [[ALL], [ALL]], 6, seed, fault, exchange=Plan([ALL] * 3, delay=2))


# -------------------------------------------------------------------------------- the parts alone


class Waiting:
    """An execution: how much it has issued, and whether something is pending or under way."""

    def __init__(
        self, issued: int, *, is_pending: bool = True, is_sent: bool = False, is_vote: bool = False
    ) -> None:
        self.issued = {ALL: issued} if issued else {}
        self.completed = {ALL: issued - is_sent} if issued - is_sent else {}
        self.pending = self if is_pending else None
        self.members = ALL
        self.is_vote = is_vote


@pytest.mark.parametrize(
    ("executions", "expected"),
    [
        ([], []),
        ([Waiting(0)], [0]),
        ([Waiting(5)], [0]),
        ([Waiting(1), Waiting(0)], [0, 1]),
        ([Waiting(1), Waiting(1)], [0]),
        ([Waiting(2, is_pending=False), Waiting(1), Waiting(1)], [1]),
        ([Waiting(0, is_pending=False), Waiting(0)], []),
        ([Waiting(1, is_pending=False, is_sent=True), Waiting(0)], []),
        ([Waiting(2, is_pending=False, is_sent=True), Waiting(0), Waiting(0)], [1]),
        ([Waiting(3), Waiting(1, is_vote=True)], [0]),
        ([Waiting(1, is_vote=True)], [0]),
        ([Waiting(0, is_vote=True)], [0]),
    ],
)
def test_who_has_the_turn(executions: list[Waiting], expected: list[int]) -> None:
    assert [executions.index(e) for e in in_turn(executions)] == expected


def test_a_turn_follows_from_what_has_completed_a_moment_ago() -> None:
    executions = [Waiting(0), Waiting(0), Waiting(0)]
    order = []
    for execution in in_turn(executions):
        execution.issued, execution.pending = {ALL: 1}, None
        execution.completed = execution.issued
        order.append(executions.index(execution))
    assert order == [0, 1, 2]


TRANSITIONS = {
    "begin": dict.fromkeys(Phase, Phase.OPEN),
    "send": {Phase.OPEN: Phase.SENDING, Phase.SENDING: Phase.SENDING},
    "finish": {Phase.OPEN: Phase.IDLE, Phase.SENDING: Phase.IDLE},
    "fail": {phase: Phase.FAILED for phase in Phase if phase is not Phase.FAILED},
}


@pytest.mark.parametrize("phase", Phase)
@pytest.mark.parametrize("event", TRANSITIONS)
def test_transitions_of_a_step(event: str, phase: Phase) -> None:
    state, error = StepState(), CommHookError("failed")
    state.phase = phase
    if phase is Phase.FAILED:
        state.failure = error
    arguments = [error] if event == "fail" else []
    if phase not in TRANSITIONS[event]:
        with pytest.raises(RuntimeError, match=f"cannot go from {phase.name} to"):
            getattr(state, event)(*arguments)
        assert state.phase is phase
        return
    result = getattr(state, event)(*arguments)
    assert state.phase is TRANSITIONS[event][phase]
    assert (state.failure is error) == (state.phase is Phase.FAILED)
    assert result == ((phase is Phase.FAILED) if event == "begin" else None)
