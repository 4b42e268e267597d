"""A comparison with made-up figures, for tests of what shows it."""

from dataclasses import replace

from commhooks.lab.comparison import Comparison, HostPair, Row, TrainingPoint

HOOKS = {"bare": 0.0, "torch": 100e6, "bf16": 50e6, "powersgd:rank=4,start_step=0": 1e6}


def make_comparison() -> Comparison:
    rows = []
    for rate in (None, 1e9, 1e8):
        for name, wire_bytes in HOOKS.items():
            seconds = 0.1 + wire_bytes * 8 / (rate or 50e9)
            point = TrainingPoint(5, 5 * seconds, 5 * wire_bytes, 0.7)
            rows.append(
                Row(
                    hook=name,
                    link="loopback" if rate is None else f"{rate / 1e6:g} Mbit/s",
                    bits_per_second=rate,
                    measured=rate is None,
                    step_seconds=seconds,
                    step_spread_seconds=0.01,
                    to_torch=seconds / (0.1 + 100e6 * 8 / (rate or 50e9)),
                    exposed_seconds=seconds - 0.1,
                    floor_seconds=None,
                    predicted_seconds=None,
                    gradient_bytes=100_000_000,
                    wire_bytes=wire_bytes,
                    ratio=100e6 / wire_bytes if wire_bytes else None,
                    error=0.01,
                    peak_bytes=10**8,
                    break_even_bits_per_second=None if name in ("bare", "torch") else 7e9,
                    training=(point, replace(point, step=10, seconds=10 * seconds)),
                )
            )
    pairs = (HostPair("a", "b", 9.4e8, 1e-4), HostPair("a", "<c>", 9.5e7, 2e-4))
    machine = {"cpu": "made up", "cores": 2}
    return Comparison("a:model", 2, 50, machine, ("a note & more",), tuple(rows), pairs)
