"""Damaged states are refused on all ranks, or loaded such that training goes on."""

from typing import Any

import pytest
import torch
from support.damaged_states import damaged

import commhooks
from commhooks.hook.base import has_consensus
from commhooks.testing.compare import disagreement, same_bits, through_file
from commhooks.testing.probe import Trainer, draw_gradients

CONFIGS: dict[str, dict[str, Any]] = {
    "allreduce": {"name": "allreduce"},
    "int8": {"name": "int8"},
    "int4": {"name": "int4", "stochastic": True},
    "onebit": {"name": "onebit"},
    "qsgd": {"name": "qsgd"},
    "topk": {"name": "topk", "density": 0.1},
    "threshold": {"name": "threshold", "value": 0.5},
    "randomk": {"name": "randomk", "density": 0.1},
    "demo": {"name": "demo", "density": 0.1},
    "dgc": {"name": "dgc", "density": 0.1},
    "powersgd": {"name": "powersgd", "rank": 2, "start_step": 0, "min_compression_rate": 1.0},
    "one-sided": {"name": "powersgd", "rank": 2, "start_step": 0, "two_sided": False},
    "batched": {"name": "batched_powersgd", "rank": 2, "start_step": 0},
    "gossip": {"name": "gossip"},
    "push_sum": {"name": "push_sum"},
    "diloco": {"name": "diloco", "period": 2, "delay": 2, "fragments": 2},
    "error_feedback": {"name": "error_feedback", "inner": "bf16"},
    "cast": {"name": "cast", "inner": "int8", "dtype": "float64"},
    "schedule": {"name": "schedule", "stages": [[0, "int8"], [4, {"name": "dgc"}]]},
    "cycle": {"name": "schedule", "stages": [[0, "int8"], [2, "fp16"]], "cycle": 4},
    "route": {
        "name": "route",
        "rules": [["v*", "allreduce"], ["m*", {"name": "powersgd", "rank": 2, "start_step": 0}]],
        "default": {"name": "topk", "density": 0.1},
    },
    "hierarchical": {"name": "hierarchical", "inner": "int8", "ranks_per_node": 2},
    "leaders": {
        "name": "hierarchical",
        "inner": {"name": "powersgd", "rank": 2, "start_step": 0},
        "ranks_per_node": 1,
    },
    "skip": {"name": "skip_nonfinite", "inner": "int8", "whole_steps": True},
    "nested": {
        "name": "skip_nonfinite",
        "inner": {
            "name": "error_feedback",
            "inner": {"name": "schedule", "stages": [[0, "fp16"], [9, "natural"]]},
        },
    },
    "deep": {
        "name": "schedule",
        "stages": [[0, {"name": "cast", "inner": {"name": "skip_nonfinite", "inner": "fp8"}}]],
    },
}
PER_HOOK = 20  # 500 in all


def load_damaged(rank: int, size: int, configs: list[str], seeds: list[int]) -> dict[str, int]:
    """Load damaged states on one rank or on both; return how many were refused."""
    counts = {"refused": 0, "loaded": 0}
    for name in configs:
        trainer = Trainer(commhooks.create(CONFIGS[name]))
        run = _Run(trainer, rank)
        run.take_steps(3)
        saved = through_file(trainer.handle.state_dict())
        for seed in seeds:
            what, state = damaged(saved, seed)
            culprits = ((0,), (1,), (0, 1))[seed % 3]
            case = f"{name}, seed {seed}, ranks {culprits}: {what}"
            before = trainer.handle.state_dict()
            try:
                trainer.handle.load_state_dict(state if rank in culprits else saved)
            except commhooks.CommHookStateError:
                assert same_bits(trainer.handle.state_dict(), before), case
                counts["refused"] += 1
                continue
            except Exception as error:
                raise AssertionError(f"{case}: {error!r}") from error
            counts["loaded"] += 1
            try:
                run.take_steps(5)
            except Exception as error:
                raise AssertionError(f"{case}: loaded, then {error!r}") from error
            trainer.handle.load_state_dict(saved)
    return counts


class _Run:
    """Takes steps, and checks that ranks agree."""

    def __init__(self, trainer: Trainer, rank: int) -> None:
        self.trainer, self.rank, self.steps = trainer, rank, 0

    def take_steps(self, count: int) -> None:
        found: dict[str, torch.Tensor] = {}
        for _ in range(count):
            found = self.trainer.step(
                draw_gradients(self.trainer.parameters, self.rank, self.steps)
            )
            self.steps += 1
        hook: Any = self.trainer.handle.hook
        assert not has_consensus(hook) or not disagreement(found)


def test_damaged_states(run_ranks: Any) -> None:
    first_rank, second_rank = run_ranks(load_damaged, 2, list(CONFIGS)[1::6], [0, 40, 80])
    assert first_rank == second_rank


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", CONFIGS)
def test_damaged_states_of_each_hook(run_ranks: Any, name: str) -> None:
    first = list(CONFIGS).index(name) * PER_HOOK
    first_rank, second_rank = run_ranks(
        load_damaged, 2, [name], list(range(first, first + PER_HOOK))
    )
    assert first_rank == second_rank
