"""The collectives of FSDP2 in few bits beside torch's, over a link of 1 Gbit/s per rank."""

import statistics
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from bench.copies import in_turn
from bench.fidelity.sharded import DIFFERENCES, quantize
from bench.models import ThreeLayers
from commhooks.adapters.fsdp.units import units_of
from commhooks.cluster import Ranks
from commhooks.cluster.links import shaped_link, unavailable
from commhooks.integrations.fsdp import quantize_reduce_scatter

NUMBERS = ["int8", "fp8", "int4", "bf16"]
ROUNDS = 5
TORCH = "torch"
"""The name of torch's reduce-scatter, in float32, beside those of numbers in few bits."""
ONCE = ", gathered once"
"""The end of the names of models that are not resharded after forward."""
BFLOAT16 = {
    "torch": ("", ""),
    "reduce-scatter": ("int8", ""),
    "all-gather": ("", "int8"),
    "both": ("int8", "int8"),
    f"torch{ONCE}": ("", ""),
    f"differences{ONCE}": ("", DIFFERENCES + "int4"),
    f"both{ONCE}": ("int8", DIFFERENCES + "int4"),
}
"""Numbers of the two collectives of models with bfloat16 parameters and float32 gradients."""
ELEMENTS = 16 * 2**20  # 64 MiB, about what a layer of a model with a billion parameters has


class ShardedModels:
    """The models of a rank, all with the same parameters, and the input of the collective."""

    def __init__(self, rank: int) -> None:
        self._models = {name: _model(MixedPrecisionPolicy()) for name in (TORCH, *NUMBERS)}
        self._quantized = {n: quantize_reduce_scatter(self._models[n], n) for n in NUMBERS}
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        for name, numbers in BFLOAT16.items():
            self._models[f"bf16 {name}"] = _model(policy, reshards=not name.endswith(ONCE))
            quantize(self._models[f"bf16 {name}"], *numbers)
        generator = torch.Generator().manual_seed(rank)
        self._input = torch.randn(ELEMENTS, generator=generator).mul_(1e-3)
        self._mean, _ = self._reduce(TORCH)
        torch.manual_seed(rank)
        self._batch = ThreeLayers.example_input()

    def quality(self, name: str) -> tuple[float, float]:
        """Return the norm of the error, relative to that of the exact means, and the ratio."""
        output, _ = self._reduce(name)
        quantized = self._quantized[name]
        error = float((output - self._mean).norm() / self._mean.norm())
        return error, quantized.plain_bytes / quantized.wire_bytes

    def gradient_error(self, name: str) -> float:
        """Return the error of a step's gradients, relative to those of bfloat16 parameters."""
        torchs, found = (self._gradients(each) for each in ("bf16 torch", name))
        return float((found - torchs).norm() / torchs.norm())

    def _gradients(self, name: str) -> torch.Tensor:
        model = self._models[name]
        model(self._batch).sum().backward()
        parts = [p.grad.to_local().float().reshape(-1) for p in model.parameters()]
        nn.Module.zero_grad(model)
        return torch.cat(parts)

    def collective(self, name: str) -> float:
        """Return the seconds of a reduce-scatter alone."""
        return self._reduce(name)[1]

    def step(self, name: str) -> float:
        """Return the seconds of a forward and a backward, which may each gather the parameters."""
        model = self._models[name]
        dist.barrier()
        start = time.perf_counter()
        model(self._batch).sum().backward()
        seconds = time.perf_counter() - start
        nn.Module.zero_grad(model)
        return seconds

    def _reduce(self, name: str) -> tuple[torch.Tensor, float]:
        """Return this rank's part of the means, and the seconds."""
        comm = units_of(self._models[name])[0].collective("reduce_scatter")
        output, given = torch.empty(ELEMENTS // dist.get_world_size()), self._input.clone()
        dist.barrier()
        start = time.perf_counter()
        comm(output, given, dist.group.WORLD, dist.ReduceOp.AVG)
        return output, time.perf_counter() - start


def _model(policy: MixedPrecisionPolicy, reshards: bool = True) -> Any:
    torch.manual_seed(0)
    model: Any = ThreeLayers()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=reshards)
    return model


@pytest.fixture(scope="module", params=[2, 4], ids=lambda size: f"{size} ranks")
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    """Return ranks on a link, with their models."""
    if reason := unavailable():
        pytest.skip(reason)
    with shaped_link(request.param, 1e9) as link, Ranks(request.param, link) as ranks:
        ranks.keep(ShardedModels)
        yield ranks


@pytest.mark.benchmark(group="sharded")
@pytest.mark.parametrize("numbers", NUMBERS)
def test_reduce_scatter(benchmark: Any, ranks: Ranks, numbers: str) -> None:
    """Measure the collective alone and the whole step, in turn with torch's."""
    error, ratio = max(ranks.call(ShardedModels.quality, numbers))
    assert error < 0.2
    timers = {
        f"{prefix}{work.__name__}": lambda work=work, name=name: max(ranks.call(work, name))
        for work in (ShardedModels.step, ShardedModels.collective)
        for prefix, name in (("torch ", TORCH), ("", numbers))
    }
    seconds = in_turn(benchmark, timers, ROUNDS)
    median = {name: statistics.median(found) for name, found in seconds.items()}
    benchmark.extra_info.update(
        error=error,
        ratio=ratio,
        seconds=median["collective"],
        torch_seconds=median["torch collective"],
        times_faster=median["torch collective"] / median["collective"],
        step_seconds=median["step"],
        torch_step_seconds=median["torch step"],
        aim="int8: 3.5 times fewer bytes, 2.5 times faster",
    )


@pytest.mark.benchmark(group="sharded, bfloat16 parameters")
def test_whole_step(benchmark: Any, ranks: Ranks) -> None:
    """Measure a forward and a backward with each of ``BFLOAT16``, in turn."""
    for name in BFLOAT16:
        assert max(ranks.call(ShardedModels.gradient_error, f"bf16 {name}")) < 0.2, name
    timers = {
        name: lambda name=name: max(ranks.call(ShardedModels.step, f"bf16 {name}"))
        for name in BFLOAT16
    }
    seconds = in_turn(benchmark, timers, ROUNDS)
    median = {name: statistics.median(found) for name, found in seconds.items()}
    benchmark.extra_info.update(
        {f"{name} seconds": found for name, found in median.items()},
        share_of_torch=median["both"] / median["torch"],
        aim="both: at most 0.6 of torch's step",
    )
