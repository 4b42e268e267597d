"""Comparisons: the rank's side, where entries take turns with one model."""

import gc
from dataclasses import dataclass
from typing import Any

import torch
from support.compared import PARAMETERS
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel

import commhooks
from commhooks.comm.wire import all_reduce_bytes
from commhooks.hook import registry
from commhooks.lab.comparison.entry import BARE, TORCH, Entry
from commhooks.lab.comparison.rank_side import Block, ComparedModel
from commhooks.lab.models import Workload

GRADIENT_BYTES = 4 * PARAMETERS


def time_blocks(rank: int, size: int) -> list[Block]:
    side = ComparedModel(rank, Workload("support.compared:net"))
    return [side.time_block(Entry.of(hook), 0, 4) for hook in ("int8", "local_sgd:period=2")]


def test_blocks_know_whether_their_steps_send_equal_bytes(run_ranks: Any) -> None:
    for steady, periodic in run_ranks(time_blocks, 2):
        assert steady.is_uniform
        assert not periodic.is_uniform
        assert periodic.wire_bytes == all_reduce_bytes(GRADIENT_BYTES, 2) / 2


@dataclass
class Shifting(commhooks.CommHook):
    """Changes the parameters in each step."""

    @property
    def changes_parameters(self) -> bool:
        return True

    async def reduce(self, bucket: commhooks.GradBucket, comm: commhooks.Communicator) -> Tensor:
        for parameter in bucket.parameters():
            parameter.detach().add_(1.0)
        return await comm.all_reduce(bucket.buffer().div_(comm.size))


def take_turns(rank: int, size: int) -> None:
    """Each entry has a turn; then no wrapper is left, and nothing has changed the parameters."""
    commhooks.register_hook("shifting")(Shifting)
    try:
        _take_turns(rank)
    finally:
        del registry._hooks["shifting"]


def _take_turns(rank: int) -> None:
    workload = Workload("support.compared:net")
    side = ComparedModel(rank, workload)
    before = [parameter.detach().clone() for parameter in side.module.parameters()]
    wrappers_before = _wrappers()

    def own_gradients() -> list[Tensor]:
        with side.entry_run(BARE, 0) as (run, _):
            run.step()
            return [gradient.clone() for gradient in run.gradients()]

    own = own_gradients()
    with side.entry_run(TORCH, 0) as (run, _):
        run.step()
    assert _wrappers() <= wrappers_before, run  # though the run is still known
    configs = [{"name": "bf16"}, {"name": "powersgd", "rank": 1}, {"name": "shifting"}]
    for entry in (TORCH, *(Entry(config["name"], config) for config in configs)):
        side.time_block(entry, 0, 2)
        side.verify(BARE)
        assert _wrappers() <= wrappers_before
        assert all(map(torch.equal, before, side.module.parameters()))
        # A wrapper that is still alive would average them.
        assert all(map(torch.equal, own, own_gradients()))


class Complex(nn.Module):
    """Its gradients have the same real parts on all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, dtype=torch.complex64))

    def forward(self, inputs: Tensor) -> Tensor:
        return (self.weight * inputs).real.sum()

    def example_input(self) -> Tensor:
        return torch.complex(torch.ones(3), torch.randn(3))


def verify_complex(rank: int, size: int) -> float | None:
    side = ComparedModel(rank, Workload("test_compared_models:Complex"))
    return side.verify(Entry.of("noop")).error


def test_the_error_of_complex_gradients_has_their_imaginary_parts(run_ranks: Any) -> None:
    assert all(error > 0.1 for error in run_ranks(verify_complex, 2))


def _wrappers() -> set[int]:
    """Return the ids of all wrappers in this process; earlier tests may have left some."""
    gc.collect()
    wrappers = TorchDistributedDataParallel, commhooks.DistributedDataParallel
    return {id(found) for found in gc.get_objects() if isinstance(found, wrappers)}


def test_a_turn_leaves_nothing_behind(run_ranks: Any) -> None:
    run_ranks(take_turns, 2)
