"""The hooks keep Note [Streams and lifetimes] in side_stream.py, on a simulated device."""

from typing import Any

import pytest
import torch
from emulation import emulated
from support.simulated_streams import simulated

import commhooks
from commhooks.adapters import adapter
from commhooks.runtime.runner import make_runner
from commhooks.runtime.stream_runner import StreamRunner
from commhooks.runtime.threaded_runner import ThreadedRunner
from commhooks.testing.rules import _as_coroutine
from commhooks.testing.probe import Trainer, draw_gradients, probe_parameters
from testing.test_conformance import OPTIONS, OWN_HOOKS


def life(
    rank: int, size: int, name: str, options: dict[str, Any], threaded: bool, ignored: str = ""
) -> tuple[list[str], set[str]]:
    """Use a hook in every way that touches what it keeps. Return problems and calls."""
    adapter.make_runner = ThreadedRunner if threaded else StreamRunner  # type: ignore[assignment]
    try:
        with emulated(), simulated(ignored) as simulation:
            def make() -> Any:
                return _as_coroutine(commhooks.create(name, **options))

            trainer = Trainer(make(), stable_buckets=True)
            parameters = probe_parameters()

            def train(first: int, last: int) -> None:
                for step in range(first, last):
                    found = trainer.step(draw_gradients(parameters, rank, step))
                    simulation.unpack()
                    for gradient, parameter in zip(found.values(), trainer.parameters.values()):
                        with torch.no_grad():
                            parameter.sub_(gradient)

            handle = trainer.handle
            train(0, 3)
            saved = copied(handle.state_dict())
            train(3, 4)
            handle.load_state_dict(saved)
            del saved
            train(4, 7)
            handle.adapter._registration.on_overwrite()
            train(7, 9)
            handle.stats()
            handle.replace(make())
            train(0, 3)
            handle.remove()
            del trainer, handle
        return list(simulation.problems), simulation.calls
    finally:
        adapter.make_runner = make_runner


def copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: copied(each) for key, each in value.items()}
    return value.clone() if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize("threaded", [False, True])
@pytest.mark.parametrize(
    ("name", "options"),
    [(name, options) for name in OWN_HOOKS for options in OPTIONS.get(name, [{}])[:1]],
)
def test_hooks_keep_the_rule(run_ranks, name, options, threaded):
    for problems, _ in run_ranks(life, 2, name, options, threaded, timeout=120):
        assert not problems, "\n".join(problems)
