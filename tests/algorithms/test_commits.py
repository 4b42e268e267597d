"""Hooks that follow commits return to the last one, with whatever they have sent since then."""

import itertools
from typing import Any

import pytest
import torch
from test_gossip import loss_of, make_net
from torch import Tensor

import commhooks
from commhooks.hook.base import tree

INT8 = {"name": "int8", "error_feedback": True}
POWERSGD = {"name": "powersgd", "rank": 1, "start_step": 0, "min_compression_rate": 1.0}
HOOKS: list[dict[str, Any]] = [
    {"name": "local_sgd", "period": 3},
    {"name": "diloco", "period": 3, "inner": INT8},
    {"name": "diloco", "period": 6, "fragments": 2, "delay": 2, "merge": 0.5, "inner": INT8},
    {"name": "diloco", "period": 4, "fragments": 2, "delay": 3, "inner": POWERSGD},
]


def copies(model: torch.nn.Module, hook: commhooks.CommHook) -> list[dict[Any, Tensor]]:
    """Return copies of the parameters, and of the states of a hook and of those nested in it."""
    states = [
        {(key, name): t.clone() for key, entry in each.state.items() for name, t in entry.items()}
        for each in tree(hook)
    ]
    return [{name: p.detach().clone() for name, p in model.named_parameters()}, *states]


def lose_steps(rank: int, size: int, config: dict[str, Any], last_commit: int) -> None:
    model = commhooks.DistributedDataParallel(make_net().double())
    handle = commhooks.register(model, config)
    hook: Any = handle.hook
    hook.follow_commits()
    boundaries = 0
    before: list[dict[Any, Tensor]] = []
    found: list[dict[Any, Tensor]] = []
    for step in itertools.count():
        is_boundary = hook.sends(step) or hook.takes(step)
        loss = loss_of(model, rank, step)
        with handle.adapter.between_steps():
            before = before if found else copies(model, hook)
        loss.backward()
        with handle.adapter.between_steps():
            if is_boundary and boundaries != last_commit:
                hook.commit()
            elif is_boundary:
                after, lost = copies(model, hook), step
                hook.recover()
                found = copies(model, hook)
        boundaries += is_boundary
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.05 * parameter.grad
                parameter.grad = None
        if boundaries == last_commit + 4:  # training goes on
            break
    if config.get("inner") == INT8:
        assert hook.inner.state  # made again, after the first average was lost
    if last_commit and hook.takes(lost):
        assert not all(map(equal, before, after))
    # Where a delayed average is taken, errors return to before it was sent.
    compared = 3 if config.get("inner") == INT8 and not config.get("delay") else 2
    for was, now in zip(before[:compared], found[:compared], strict=True):
        assert equal(was, now), (lost, was, now)


def equal(a: dict[Any, Tensor], b: dict[Any, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


@pytest.mark.parametrize("last_commit", [0, 1, 4])
@pytest.mark.parametrize("config", HOOKS, ids=lambda config: f"{config['name']}")
def test_what_is_not_committed_is_undone(
    run_ranks: Any, config: dict[str, Any], last_commit: int
) -> None:
    run_ranks(lose_steps, 2, config, last_commit)
