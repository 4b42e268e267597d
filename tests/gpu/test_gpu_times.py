"""The times that `auto` uses on a device are those of its streams, not of the host."""

import time

import torch
from support.no_waiting import waiting_is_an_error

from commhooks.algorithms.wrappers.timing import DeviceClock, clock_of

DEVICE = torch.device("cuda")
CYCLES = 200_000_000
"""More than 0.05 s, at 4 GHz."""


def test_times_are_those_of_the_stream() -> None:
    clock = clock_of(DEVICE)
    assert isinstance(clock, DeviceClock)
    host = time.monotonic()
    with torch.cuda.stream(torch.cuda.Stream(DEVICE)), waiting_is_an_error():
        start = clock.now()
        torch.cuda._sleep(CYCLES)
        end = clock.now()
    assert 0.05 < clock.seconds(start, end) < 1.01 * (time.monotonic() - host)
