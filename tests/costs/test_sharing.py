import pytest

from commhooks.costs.sharing import Clock, Resource


def test_users_share_a_resource_equally_until_others_leave():
    clock, link = Clock(), Resource(capacity=10.0)
    ends = {}
    clock.use(link, 10.0, lambda: ends.setdefault("short", clock.now))
    clock.use(link, 30.0, lambda: ends.setdefault("long", clock.now))
    # Both at 5 per second until the short one ends; the long one then has 20 left, at 10.
    assert clock.run() == pytest.approx(4.0)
    assert ends == pytest.approx({"short": 2.0, "long": 4.0})


def test_one_user_gets_no_more_than_the_limit():
    clock = Clock()
    clock.use(Resource(capacity=8.0, limit=1.0), 3.0, lambda: None)
    assert clock.run() == pytest.approx(3.0)


def test_crowded_users_lose_some_of_the_capacity():
    clock, core = Clock(), Resource(capacity=1.0, limit=1.0, crowded=0.8)
    ends = []
    clock.use(core, 2.0, lambda: ends.append(clock.now))
    clock.use(core, 3.0, lambda: ends.append(clock.now))
    # Two at 0.4 per second, then one at 1.
    clock.run()
    assert ends == pytest.approx([5.0, 6.0])


def test_a_later_use_shares_from_its_start():
    clock, core = Clock(), Resource(capacity=1.0)
    ends = []
    clock.use(core, 2.0, lambda: ends.append(clock.now))
    clock.wait(1.0, lambda: clock.use(core, 2.0, lambda: ends.append(clock.now)))
    clock.run()
    assert ends == pytest.approx([3.0, 4.0])


def test_a_burst_is_granted_at_once_and_saved_up_again_while_idle():
    clock, link = Clock(), Resource(capacity=10.0, burst=20.0)
    ends = []

    def again() -> None:
        ends.append(clock.now)
        clock.wait(1.0, lambda: clock.use(link, 20.0, lambda: ends.append(clock.now)))

    clock.use(link, 30.0, again)
    clock.run()
    # 20 at once and 10 in one second. The pause saves up 10, so 10 take another second.
    assert ends == pytest.approx([1.0, 3.0])


def test_nothing_to_do_takes_no_time():
    clock = Clock()
    done = []
    clock.use(Resource(capacity=1.0), 0.0, lambda: done.append(True))
    assert clock.run() == 0.0
    assert done == [True]
