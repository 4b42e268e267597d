"""The costs of messages, as a probe of the link shows them."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise, starmap
from statistics import fmean

import torch

from commhooks.algorithms.wrappers.timing import Clock, Moment
from commhooks.comm.communicator import Communicator
from commhooks.costs.backends import NCCL, Backend, Gloo
from commhooks.costs.network import Link, Network
from commhooks.costs.step_trace import Collective, Members

ALL = Members(1, spans_nodes=True)
"""All ranks, each on a node of its own."""
_ROUNDS, _MESSAGES = 6, 3
"""Small messages of a probe, and long ones. The first long one only fills the buffers."""
_MOST_ROUNDS = 1 / 8
"""The largest share of rounds in a long message: late threads must not make links seem faster."""
_LONG_BYTES, _MOST_BYTES, _LONG_SECONDS = 1 << 20, 1 << 24, 10e-3
"""A message of a probe has at least these bytes and takes this long: links have buffers, so that
after a pause some bytes pass faster than the rate, and small messages wait for late threads."""
_FIRST_SHARE = 1 / 8
"""The share of the model in each message of the first probe."""
_UNLIMITED = 1e15


@dataclass
class Probe:
    """The costs of messages: seconds of a round, of a byte, and of a core for a byte."""

    round_seconds: float
    byte_seconds: float
    byte_cpu_seconds: float

    def network(self, size: int) -> Network:
        """Return ``size`` nodes of one rank each, with these costs of a round and of a byte."""
        rate = min(8 / self.byte_seconds, _UNLIMITED) if self.byte_seconds > 0 else _UNLIMITED
        return Network(size, Link(rate, self.round_seconds, payload_share=1.0), Link(_UNLIMITED))

    def backend(self, name: str) -> Backend:
        """Return the costs of a backend. Those of a round are the network's."""
        return NCCL() if name == NCCL.name else Gloo(0.0, 0.0, self.byte_cpu_seconds)


UNKNOWN = Probe(math.inf, math.inf, math.inf)
"""Costs before the first probe."""


async def probe(
    elements: int, device: torch.device, comm: Communicator, clock: Clock, backend: str
) -> Callable[[], Probe]:
    """Average zeros, so that the link can be seen. All ranks begin with the first round.

    Returns what waits for the device, and returns the costs. ``backend``: its name.
    """
    zeros = torch.zeros(elements, device=device)
    moments = [clock.now()]
    for _ in range(_ROUNDS):
        await comm.all_reduce(torch.zeros(1, device=device))
        moments.append(clock.now())
    cpu = time.process_time()
    for _ in range(_MESSAGES):
        await comm.all_reduce(zeros)
        moments.append(clock.now())
    cpu = time.process_time() - cpu
    return partial(probe_of, clock, moments, cpu, zeros.nbytes, backend, comm.size)


def probe_of(
    clock: Clock, moments: Sequence[Moment], cpu: float, nbytes: int, backend: str, size: int
) -> Probe:
    """Return the costs of messages. Waits for the device."""
    took, rounds = list(starmap(clock.seconds, pairwise(moments))), Probe(1.0, 0.0, 0.0)
    one, long = (
        rounds.backend(backend).cost(
            Collective("all_reduce", float(each), ALL), rounds.network(size)
        )
        for each in (4, nbytes)
    )
    round_seconds = min(took[1:_ROUNDS]) / max(one.latency_seconds, 1.0)
    seconds = sum(took[_ROUNDS + 1 :]) / (_MESSAGES - 1)
    sending = max(seconds - round_seconds * long.latency_seconds, (1 - _MOST_ROUNDS) * seconds)
    sent = max(long.link_bytes, 1.0)
    return Probe(round_seconds, sending / sent, cpu / _MESSAGES / sent)


def link_of(probes: Sequence[Probe], before: Probe) -> Probe:
    """Return what the probes of all ranks say together.

    The mean rate counts, because a rank that begins late finds bytes that its peer has sent before.
    Late threads make rounds seem longer, and other work of the process makes the time of cores seem
    longer, so the least counts, also of earlier probes.
    """
    if not probes:
        return before
    every = [*probes, before]
    return Probe(
        min(each.round_seconds for each in every),
        fmean(each.byte_seconds for each in probes),
        min(each.byte_cpu_seconds for each in every),
    )


def probe_elements(before: Probe, model_bytes: int, size: int) -> int:
    """Return the elements of each long message of the next probe."""
    nbytes = model_bytes * _FIRST_SHARE
    if before != UNKNOWN:
        nbytes = _LONG_SECONDS / max(before.byte_seconds, 1e-15)
    sent = min(max(nbytes, _LONG_BYTES), _MOST_BYTES)
    return math.ceil(tensor_bytes("all_reduce", sent, size) / 4)


def tensor_bytes(operation: str, wire_bytes: float, size: int) -> float:
    """Return the size of the tensor of a collective by which a rank sends ``wire_bytes``."""
    whole = 1 << 20
    per_byte = Collective(operation, whole, ALL).wire_bytes(size) / whole
    return wire_bytes / per_byte if per_byte else 0.0
