"""The times that `auto` uses on a device are those of its streams, not of the host."""

import time

import torch

from commhooks.algorithms.adaptive.timing import DeviceClock, clock_of

DEVICE = torch.device("cuda")
CYCLES = 200_000_000
"""More than 0.05 s, at 4 GHz, and less than 1 s."""


def test_times_are_those_of_the_stream() -> None:
    times, found = times_of(DEVICE), list[int]()
    assert isinstance(times, StreamTimes)
    with torch.cuda.stream(torch.cuda.Stream(DEVICE)):
        host = time.monotonic()
        start = times.now()
        torch.cuda._sleep(CYCLES)
        times.when_known((start, times.now()), lambda a, b: found.append(b - a))
        times.settle(wait=False)
        launched = time.monotonic() - host
    assert found == []
    times.settle(wait=True)
    assert launched < 0.05 < found[0] * 1e-9 < 1
