"""The timeline: what overlaps, what waits, and how uses share resources."""

from dataclasses import dataclass

import pytest

from commhooks.costs.backends import Cost
from commhooks.costs.network import Link, Network
from commhooks.costs.step_trace import BucketTrace, Collective, Members, StepTrace
from commhooks.costs.timeline import (
    EventClock,
    Gate,
    Interval,
    Process,
    Resource,
    Timing,
    Use,
    replay,
)

ALL = Members(1, spans_nodes=True)
LINK = Link(800.0, payload_share=1.0)


@dataclass(frozen=True)
class Plain:
    """A backend whose collectives cost a latency, bytes on the link and CPU time, as given."""

    latency: float = 0.0
    cpu: float = 0.0
    name: str = "plain"
    concurrent: int = 1
    has_stage_groups: bool = False

    def cost(self, collective: Collective, network: Network) -> Cost:
        return Cost(self.latency, collective.tensor_bytes, 0.0, self.cpu)


def bucket(backward: float, *sends: float, local: float = 0.0, unpack: float = 0.0) -> BucketTrace:
    collectives = tuple(Collective("all_reduce", nbytes, ALL) for nbytes in sends)
    seconds = (local,) * (len(sends) + 1)
    return BucketTrace(1000, backward, unpack, seconds, collectives)


def replayed(
    *buckets: BucketTrace,
    native: bool = False,
    cores: float = 9.0,
    backend: Plain = Plain(),  # frozen
) -> Timing:
    trace = StepTrace(buckets, forward_seconds=0.5, is_native=native)
    return replay(trace, Network(2, LINK, LINK), backend, cores)


def test_a_single_bucket_overlaps_with_nothing():
    timing = replayed(bucket(1.0, 300.0, local=0.25, unpack=0.5))
    assert timing.backward_seconds == pytest.approx(1.0 + 0.25 + 3.0 + 0.25 + 0.5)
    assert timing.exposed_seconds == pytest.approx(3.5)
    assert timing.step_seconds == pytest.approx(0.5 + 5.0)


def test_communication_during_backward_is_not_exposed():
    timing = replayed(bucket(1.0, 300.0), bucket(3.0, 0.0))
    assert timing.backward_seconds == pytest.approx(4.0)
    assert timing.exposed_seconds == pytest.approx(0.0)


def test_only_communication_after_backward_is_exposed():
    timing = replayed(bucket(1.0, 300.0), bucket(1.0, 100.0))
    assert timing.backward_seconds == pytest.approx(1.0 + 3.0 + 1.0)


def test_stage_groups_share_the_link():
    two_stages = Plain(has_stage_groups=True)
    timing = replayed(bucket(0.0, 100.0, 100.0), bucket(0.0, 100.0), backend=two_stages)
    # The first stage of bucket 1 and the second stage of bucket 0 share it.
    assert timing.backward_seconds == pytest.approx(3.0)


def test_a_group_executes_a_limited_number_of_collectives_at_once():
    slow = Plain(latency=1.0)
    assert replayed(bucket(0.0, 0.0), bucket(0.0, 0.0), backend=slow).backward_seconds == 2.0
    wide = Plain(latency=1.0, concurrent=2)
    assert replayed(bucket(0.0, 0.0), bucket(0.0, 0.0), backend=wide).backward_seconds == 1.0


def test_a_stage_group_executes_one_collective_at_a_time():
    # Only the process group itself executes as many as the backend can.
    slow = Plain(latency=1.0, concurrent=2, has_stage_groups=True)
    # Two collectives one after the other, then the vote.
    assert replayed(bucket(0.0, 0.0), bucket(0.0, 0.0), backend=slow).backward_seconds == 3.0
    native = replayed(bucket(0.0, 0.0), bucket(0.0, 0.0), native=True, backend=slow)
    assert native.backward_seconds == 1.0


def test_each_stage_has_a_group_of_its_own():
    slow = Plain(latency=1.0, has_stage_groups=True)
    # Bucket 0's second stage and bucket 1's first one overlap; then the vote.
    timing = replayed(bucket(0.0, 0.0, 0.0), bucket(0.0, 0.0), backend=slow)
    assert timing.backward_seconds == 3.0


def test_a_faster_machine_shortens_all_work_but_no_communication():
    trace = StepTrace((bucket(1.0, 300.0, local=0.25, unpack=0.5),), 0.5, is_native=False)
    network = Network(2, LINK, LINK)
    timing = replay(trace.faster(10.0), network, Plain(), 9.0)
    assert timing.step_seconds == pytest.approx((0.5 + 1.0 + 2 * 0.25 + 0.5) / 10 + 3.0)


def test_stages_of_later_buckets_wait_for_those_of_earlier_ones():
    slow = Plain(latency=1.0, has_stage_groups=True)
    # Bucket 1 reaches its first collective at once; bucket 0 only after 5 s of local work.
    first = BucketTrace(1, 0.0, 0.0, (5.0, 0.0), bucket(0, 0).collectives)
    timing = replayed(first, bucket(0.0, 0.0), native=False, backend=slow)
    # 5 s of work, then bucket 0, then bucket 1 in the same stage group, then the vote.
    assert timing.backward_seconds == pytest.approx(5.0 + 1.0 + 1.0 + 1.0)


def test_the_thread_of_hooks_does_one_thing_at_a_time():
    timing = replayed(bucket(0.0, local=1.0), bucket(0.0, local=1.0), bucket(0.0, local=1.0))
    assert timing.backward_seconds == pytest.approx(3.0)


def test_native_hooks_do_not_share_a_thread():
    timing = replayed(bucket(0.0, local=1.0), bucket(0.0, local=1.0), native=True)
    assert timing.backward_seconds == pytest.approx(1.0)


def test_threads_share_the_cores_of_a_rank():
    # The hook's second of work on bucket 0 overlaps with 2 s of backward on one core, which loses
    # a tenth while it has two threads: 1 s alone, 1/0.45 s together, and a last second alone.
    timing = replayed(bucket(1.0, local=1.0), bucket(2.0), cores=1.0)
    assert timing.backward_seconds == pytest.approx(1.0 + 1 / 0.45 + 1.0)
    assert replayed(bucket(1.0, local=1.0), bucket(2.0), cores=2.0).backward_seconds == 3.0


def test_work_takes_longer_on_less_than_a_core():
    timing = replayed(bucket(1.0), cores=0.5)
    assert timing.backward_seconds == pytest.approx(1.0 / 0.45)
    assert timing.forward_seconds == pytest.approx(0.5 / 0.45)
    assert timing.exposed_seconds == pytest.approx(0.0)


def test_a_collective_takes_the_longer_of_link_and_cores():
    assert replayed(bucket(0.0, 100.0), backend=Plain(cpu=3.0)).backward_seconds == 3.0
    assert replayed(bucket(0.0, 500.0), backend=Plain(cpu=3.0)).backward_seconds == 5.0


def test_averages_are_unpacked_in_bucket_order():
    timing = replayed(bucket(0.0, 100.0, unpack=1.0), bucket(0.0, 100.0, unpack=1.0))
    # The first is unpacked while the second one travels.
    assert timing.backward_seconds == pytest.approx(3.0)


def test_a_step_that_sends_nothing_has_no_vote():
    slow = Plain(latency=1.0, has_stage_groups=True)
    assert replayed(bucket(1.0), bucket(1.0), backend=slow).backward_seconds == 2.0


@pytest.mark.parametrize("buckets", [1, 10, 100])
def test_the_number_of_events_grows_with_buckets_only(buckets):
    sizes = [1e3, 1e9]
    events = {
        replayed(
            *[bucket(0.1, nbytes, nbytes)] * buckets, backend=Plain(has_stage_groups=True)
        ).events
        for nbytes in sizes
    }
    assert max(events) <= 12 * buckets + 3


def test_spans_are_what_happened_when():
    intervals: list[Interval] = []
    two = (bucket(1.0, 300.0, local=0.25), bucket(1.0, 100.0, unpack=0.5))
    trace = StepTrace(two, forward_seconds=0.5, is_native=False)
    timing = replay(trace, Network(2, LINK, LINK), Plain(), 9.0, intervals)
    assert intervals == [
        Interval("backward", 0, 0.0, 1.0),
        Interval("hook", 0, 1.0, 1.25),
        Interval("backward", 1, 1.0, 2.0),
        Interval("all_reduce", 0, 1.25, 4.25),
        Interval("hook", 0, 4.25, 4.5),
        Interval("all_reduce", 1, 4.25, 5.25),
        Interval("unpack", 1, 5.25, 5.75),
    ]
    assert timing == replay(trace, Network(2, LINK, LINK), Plain(), 9.0)


def use(clock: EventClock, resource: Resource, amount: float, ends: list[float]) -> Process:
    """Note the time at which ``amount`` units of ``resource`` have been used."""
    yield [Use(resource, amount)]
    ends.append(clock.now)


def run(clock: EventClock, *processes: Process) -> float:
    for process in processes:
        clock.go_on(process)
    return clock.run()


def test_users_share_a_resource_equally_until_others_leave():
    clock, link, short, long = EventClock(), Resource(capacity=10.0), [], []
    # Both at 5 per second until the short one ends; the long one then has 20 left, at 10.
    assert run(clock, use(clock, link, 10.0, short), use(clock, link, 30.0, long)) == 4.0
    assert (short, long) == ([2.0], [4.0])


def test_one_user_gets_no_more_than_the_limit():
    clock = EventClock()
    assert run(clock, use(clock, Resource(capacity=8.0, limit=1.0), 3.0, [])) == 3.0


def test_crowded_users_lose_some_of_the_capacity():
    clock, core, ends = EventClock(), Resource(capacity=1.0, limit=1.0, crowded=0.8), []
    run(clock, use(clock, core, 2.0, ends), use(clock, core, 3.0, ends))
    assert ends == pytest.approx([5.0, 6.0])  # two at 0.4 per second, then one at 1


def test_a_later_use_shares_from_its_start():
    clock, core, ends = EventClock(), Resource(capacity=1.0), []

    def later() -> Process:
        yield clock.delay(1.0)
        yield from use(clock, core, 2.0, ends)

    run(clock, use(clock, core, 2.0, ends), later())
    assert ends == [3.0, 4.0]


def test_several_uses_end_with_the_last_one():
    clock, ends = EventClock(), []

    def both() -> Process:
        yield [Use(Resource(capacity=1.0), 1.0), Use(Resource(capacity=1.0), 3.0)]
        ends.append(clock.now)

    run(clock, both())
    assert ends == [3.0]


def test_a_gate_lets_processes_pass_in_the_order_in_which_they_come():
    clock, gate, passed = EventClock(), Gate(1), []

    def through(name: str) -> Process:
        yield gate
        passed.append((name, clock.now))
        yield clock.delay(2.0)
        clock.open(gate)

    run(clock, *map(through, "abc"))
    assert passed == [("a", 0.0), ("b", 2.0), ("c", 4.0)]


def test_nothing_to_do_takes_no_time():
    clock, ends = EventClock(), []
    assert run(clock, use(clock, Resource(capacity=1.0), 0.0, ends)) == 0.0
    assert ends == [0.0]
