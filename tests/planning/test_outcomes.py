"""What hooks have done with samples says about groups."""

import pytest
from support.planning_problems import everyone

from commhooks.costs.step_trace import Collective
from commhooks.planning import Choice
from commhooks.planning.problem import overhead_of


def outcome(elements: int, seconds: float) -> Choice:
    sent = Collective("all_gather", 2.0 * elements, everyone)
    return Choice((seconds / 4, 3 * seconds / 4), (sent,), 0.1, elements)


@pytest.mark.parametrize(
    ("points", "overhead"),
    [
        ([(1000, 3e-3), (3000, 7e-3), (2000, 9.0)], 1e-3),  # on a line through both ends
        ([(1000, 1e-3), (3000, 7e-3)], 0.0),
        ([(1000, 3e-3), (3000, 2e-3)], 3e-3),
        ([(1000, 4e-3), (1500, 8e-3)], 2e-3),  # too near each other: half
        ([(1000, 4e-3)], 2e-3),
        ([], 0.0),
    ],
)
def test_the_time_of_a_run_on_nothing(points: list[tuple[int, float]], overhead: float) -> None:
    assert overhead_of(outcome(*point) for point in points) == pytest.approx(overhead)


def test_the_rest_grows_with_the_elements_and_bytes_as_the_formula_says() -> None:
    choice = outcome(1000, 4e-3).scaled(3000, 1e-3)
    assert choice.local_seconds == pytest.approx((9e-3 / 4, 3 * 9e-3 / 4))
    assert (choice.error, choice.collectives[0].tensor_bytes) == (0.1, 6000.0)
    other = outcome(1000, 4e-3).scaled(3000, 9.0, sent=0.5)
    assert other.local_seconds == (0.0, 0.0)
    assert other.collectives[0].tensor_bytes == 1000.0
