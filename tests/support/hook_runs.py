"""Runs of sparse and low-rank hooks on a device, for comparison with runs on the CPU."""

import functools
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from commhooks import CommHook
from commhooks.algorithms import DGC, DeMo, PowerSGD, RandomK, SharedTopK, Threshold, TopK
from commhooks.testing.compare import same_bits
from commhooks.testing.probe import draw_gradients
from support.lockstep import lockstep, make_bucket

HOOKS: dict[str, Callable[[], CommHook]] = {
    "topk": functools.partial(TopK, density=0.1, warmup_steps=2),
    "topk without errors": functools.partial(
        TopK, density=0.3, warmup_steps=0, error_feedback=False
    ),
    "topk of chunks, in 2 bits": functools.partial(
        TopK, density=0.1, chunk=512, bits=2, warmup_steps=1
    ),
    "shared_topk": functools.partial(SharedTopK, density=0.1, warmup_steps=1),
    "threshold": functools.partial(Threshold, value=1.2),
    "randomk": functools.partial(RandomK, density=0.2),
    "randomk with errors": functools.partial(RandomK, density=0.2, error_feedback=True),
    "demo": functools.partial(DeMo, density=0.1, tile=16),
    "demo, signs": functools.partial(DeMo, density=0.1, tile=16, sign=True),
    "dgc": functools.partial(DGC, density=0.1, warmup_steps=2, clip=8.0),
    "powersgd": functools.partial(PowerSGD, rank=2, min_compression_rate=1.0, start_step=1),
    "powersgd, one side": functools.partial(
        PowerSGD, rank=2, min_compression_rate=1.0, start_step=0, two_sided=False
    ),
    "powersgd, cold": functools.partial(
        PowerSGD, rank=2, min_compression_rate=1.0, start_step=0, warm_start=False,
        num_iters_per_step=2,
    ),
}  # fmt: skip
ROUNDED = ("demo", "dgc", "powersgd")
"""Hooks whose results differ in rounding: products are summed in another order."""
SYNC_FREE = [name for name in HOOKS if name != "threshold"]
"""Hooks during which the host reads nothing from the device."""
DTYPES = [torch.float32, torch.float64, torch.float16]
SHAPES: dict[str, tuple[int, ...]] = {
    "scalar": (),
    "first": (23, 17),
    "empty": (0, 5),
    "second": (23, 17),
    "convolution": (9, 5, 3, 3),
    "large": (130, 70),
}


def gradients_of(rank: int, step: int, dtype: torch.dtype) -> dict[str, Tensor]:
    zeros = {name: torch.zeros(shape, dtype=dtype) for name, shape in SHAPES.items()}
    named = draw_gradients(zeros, 3, rank, step)
    if step == 2 and rank == 1:
        named["second"][3, 4] = math.inf
    return named


Run = tuple[list[list[Tensor]], list[dict[str, dict[str, Tensor]]]]


def run(
    make: Callable[[], CommHook],
    dtype: torch.dtype,
    *,
    device: str = "cpu",
    around: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> Run:
    """Run four steps on two ranks; return results and states, copied to the CPU.

    ``around`` makes the context of each step except the first.
    """
    hooks = [make() for _ in range(2)]
    results = []
    for step in range(4):
        buckets = [
            make_bucket({n: g.to(device) for n, g in gradients_of(rank, step, dtype).items()}, step)
            for rank in range(2)
        ]
        with around() if step else nullcontext():
            of_ranks, _ = lockstep(hooks, buckets)
        results.append([result.cpu() for result in of_ranks])
    states = [
        {key: {k: t.cpu() for k, t in entry.items()} for key, entry in hook.state.items()}
        for hook in hooks
    ]
    return results, states


def assert_like_the_cpu(name: str, dtype: torch.dtype, found: Run) -> None:
    results, states = run(HOOKS[name], dtype)
    if not name.startswith(ROUNDED):
        assert all(same_bits(*pair) for pair in zip(found[1], states, strict=True))
        assert all(map(torch.equal, found[0][3], results[3]))
    tolerance = 1e-4 if dtype == torch.float32 else 1e-10 if dtype == torch.float64 else 1e-2
    for step, (of_ranks, expected) in enumerate(zip(found[0], results, strict=True)):
        for result, other in zip(of_ranks, expected, strict=True):
            assert torch.equal(result, of_ranks[0]) or step == 2
            assert other.isnan().all() == (step == 2)
            torch.testing.assert_close(
                result, other, rtol=tolerance, atol=tolerance, equal_nan=True
            )
    for state, other in zip(found[1], states, strict=True):
        torch.testing.assert_close(state, other, rtol=tolerance, atol=tolerance)
