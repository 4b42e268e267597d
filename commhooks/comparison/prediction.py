"""What follows from measured times over loopback, and bytes: links that are not there.

Letters: F forward, C the rest of a step over loopback, W time on the wire, n buckets.

A step after the forward is a pipeline of n buckets through two stages, computing (backward, codes,
copies: C) and sending (W). The slower stage sets the pace; of the other one only the first or the
last bucket shows:

    step = F + max(C + W/n, C/n + W)        W = bytes / bandwidth + n·latency

Copies to and from loopback are part of C, as they are on a real network; what a faster network
card does by itself is not taken off. Buckets count as equally large.
"""

import math

__all__ = ["LATENCY_SECONDS", "break_even_rate", "predict_step"]

LATENCY_SECONDS = 50e-6
"""Of one bucket's collectives, in a local network."""


def predict_step(
    *,
    forward_seconds: float,
    step_seconds: float,
    wire_bytes: float,
    buckets: int,
    bits_per_second: float,
    latency_seconds: float = LATENCY_SECONDS,
) -> float:
    """Seconds of a step over a link; ``forward_seconds`` and ``step_seconds`` over loopback."""
    computing = step_seconds - forward_seconds
    sending = 8 * wire_bytes / bits_per_second + buckets * latency_seconds if wire_bytes else 0.0
    slowest = max(computing + sending / buckets, computing / buckets + sending)
    return forward_seconds + slowest


def break_even_rate(
    *, step_seconds: float, wire_bytes: float, plain_seconds: float, plain_bytes: float
) -> float:
    """The rate, bits per second, below which a hook is faster than plain averaging.

    Over loopback it costs ``step_seconds - plain_seconds`` more; over a link it saves the time of
    the bytes that it does not send, 8·(plain_bytes - wire_bytes) / rate. At the break-even rate the
    two are equal. ``inf``: faster at any rate; 0: at none.
    """
    extra = step_seconds - plain_seconds
    saved = plain_bytes - wire_bytes
    if extra <= 0:
        return math.inf if saved >= 0 else 0.0
    return max(0.0, 8 * saved / extra)
