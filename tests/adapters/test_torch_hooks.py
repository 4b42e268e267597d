"""The hooks that torch has, beside those of the same arithmetic; and the page about them."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.pages import run_page
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    debugging_hooks,
    default_hooks,
    powerSGD_hook,
)
from torch.nn.parallel import DistributedDataParallel

import commhooks

Gradients = dict[str, Tensor]
SHAPES = {"matrix": (12, 10), "vector": (7,)}


class Net(nn.Module):
    """Its gradients are its input."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterDict({name: torch.zeros(s) for name, s in SHAPES.items()})

    def forward(self, gradients: Gradients) -> Tensor:
        return torch.stack([(self.weights[n] * g).sum() for n, g in gradients.items()]).sum()


def results(state: Any, hook: Any, steps: list[Gradients]) -> list[Tensor]:
    """What the optimizer gets in each step."""
    net = Net()
    if isinstance(state, str | dict):
        state = commhooks.CommHookState(state, module=net)
    model = DistributedDataParallel(net)
    model.register_comm_hook(state, hook)
    found = []
    for gradients in steps:
        model.zero_grad()
        model(gradients).backward()
        averages = [weight.grad for weight in net.weights.values()]
        found.append(torch.cat([average.reshape(-1) for average in averages]))
    return found


def random_gradients(rank: int, count: int) -> list[Gradients]:
    generator = torch.Generator().manual_seed(rank)
    return [
        {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
        for _ in range(count)
    ]


def mean_of(gradients: Gradients) -> Tensor:
    flat = torch.cat([gradient.reshape(-1).double() for gradient in gradients.values()])
    dist.all_reduce(flat)
    return flat / dist.get_world_size()


def compare(rank: int, size: int) -> None:
    """Torch refuses its bf16 hook by name where there is no NCCL."""
    ours: Any = commhooks.comm_hook
    steps = random_gradients(rank, 3)
    pairs: list[tuple[str, Any]] = [
        ("allreduce", default_hooks.allreduce_hook),
        ("noop", debugging_hooks.noop_hook),
        ("fp16", default_hooks.fp16_compress_hook),
        ("bf16", lambda state, bucket: default_hooks.bf16_compress_hook(state, bucket)),
    ]
    for name, hook in pairs:
        found, torchs = results(name, ours, steps), results(None, hook, steps)
        if size == 2 or name in ("allreduce", "noop"):
            assert all(map(torch.equal, found, torchs)), name
        else:
            exact = torch.stack([mean_of(step) for step in steps])
            ours_off, torchs_off = ((torch.stack(r) - exact).norm() for r in (found, torchs))
            assert ours_off < torchs_off, name

    large = [{name: torch.full(s, 1e5 if rank == 1 else 0.0) for name, s in SHAPES.items()}]
    assert results("fp16", ours, large)[0].isfinite().all()
    assert results(None, default_hooks.fp16_compress_hook, large)[0].isinf().all()


@pytest.mark.parametrize("size", [2, 3])
def test_casts_equal_torchs_or_round_once_less(run_ranks: Any, size: int) -> None:
    run_ranks(compare, size)


def compare_powersgd(rank: int, size: int) -> None:
    """Both are exact before they start, and for gradients of a rank that is not higher."""
    torchs = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=2, start_powerSGD_iter=2, min_compression_rate=1
    )
    config = {"name": "powersgd", "rank": 2, "start_step": 2, "min_compression_rate": 1.0}
    steps = random_gradients(rank, 2)
    generator = torch.Generator().manual_seed(10 + rank)
    for _ in range(3):  # the mean over two ranks has rank 2
        factors = torch.randn(12, 1, generator=generator), torch.randn(1, 10, generator=generator)
        steps.append({"matrix": factors[0] @ factors[1], "vector": torch.ones(7)})
    zeros = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    found = results(config, commhooks.comm_hook, [*steps, zeros])
    theirs = results(torchs, powerSGD_hook.powerSGD_hook, steps)
    for number, step in enumerate(steps):
        mean = mean_of(step).float()
        if number < 2:
            assert torch.equal(found[number], theirs[number])
        torch.testing.assert_close(found[number], mean, rtol=1e-4, atol=1e-4)
        if number < 3:  # torch's errors then have what the average took from them
            torch.testing.assert_close(theirs[number], mean, rtol=1e-4, atol=1e-4)
    assert found[-1].isfinite().all()


def test_powersgd_is_exact_where_torchs_is(run_ranks: Any) -> None:
    run_ranks(compare_powersgd, 2)


def follow(rank: int, size: int, folder: Path) -> None:
    torch.manual_seed(rank)
    namespace = {
        "commhooks": commhooks,
        "torch": torch,
        "net": nn.Linear(40, 40),
        "data": [torch.randn(2, 40) for _ in range(12)],
        "rank": rank,
    }
    assert run_page("integrations/torch-hooks.md", folder, namespace) == 2
    state = namespace["state"]
    assert isinstance(state, commhooks.CommHookState)
    assert state._saved is not None
    assert state._saved["step"] == 12


def test_page(run_ranks: Any, tmp_path: Path) -> None:
    run_ranks(follow, 2, tmp_path)
