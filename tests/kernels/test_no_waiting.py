"""No hook makes the host wait for the device: on a GPU, and on CPU tensors that stand for it."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from algorithms.adaptive.test_auto import FAST, Links
from emulation import emulated
from support.no_waiting import HostReads, waiting_is_an_error
from support.simulated_ranks import simulate
from torch import nn

import commhooks
from commhooks import algorithms
from commhooks.hook.base import prepare_all
from commhooks.lab.simulation.dry_run import fake_group
from commhooks.testing.probe import draw_gradients, probe_parameters
from reducer import GradBucket

LOW_RANK: dict[str, Any] = {"start_step": 2, "min_compression_rate": 1.0}
OPTIONS: dict[str, dict[str, Any]] = {
    "batched_powersgd": LOW_RANK,
    "cast": {"inner": "int8"},
    "dgc": {"warmup_steps": 2, "clip": 1.0},
    "diloco": {"period": 2},
    "error_feedback": {"inner": {"name": "topk", "error_feedback": False}},
    "gossip": {"average_every": 2},
    "guard": {"inner": {"name": "topk", "warmup_steps": 0}, "max_error": 10.0, "every": 1},
    "hierarchical": {"inner": "int8", "ranks_per_node": 1},
    "local_sgd": {"period": 2},
    "powersgd": LOW_RANK,
    "route": {"rules": [["*r*", "int8"]], "default": "powersgd"},
    "schedule": {"stages": [[0, "allreduce"], [2, "int8"]]},
    "skip_nonfinite": {"inner": "bf16"},
}
CONFIGS: dict[str, dict[str, Any]] = {
    name: {"name": name, **OPTIONS.get(name, {})}
    for name in sorted(algorithms.HOOKS.keys() - {"auto"})
} | {
    "diloco, fragments": {"name": "diloco", "period": 2, "fragments": 2},
    "diloco, delay": {"name": "diloco", "period": 2, "delay": 1, "inner": "int8"},
    "guard, switching": {  # in step 5
        "name": "guard", "inner": {"name": "powersgd", "rank": 1, **LOW_RANK}, "max_error": 1e-9,
        "every": 4,
    },
    "local_sgd, nodes": {"name": "local_sgd", "period": 2, "ranks_per_node": 2},
    "skip_nonfinite, whole steps": {
        "name": "skip_nonfinite", "inner": "int8", "whole_steps": True,
    },
}  # fmt: skip
WAITING = {"threshold", "skip_nonfinite, whole steps"}
DRAWS = {"randomk": 2, "gossip": 2}  # reads of the generator, which is on the host, per step

SIZE = 2


def bucket_of(rank: int, step: int, parameters: dict[str, nn.Parameter]) -> GradBucket:
    like = list(parameters.values())
    gradients = draw_gradients(parameters, rank, step)
    flat = torch.zeros(sum(parameter.numel() for parameter in like), device=like[0].device)
    bucket = GradBucket(flat, like, list(parameters), step=step)
    for view, gradient in zip(bucket.gradients(), gradients.values(), strict=True):
        view.copy_(gradient)
    return bucket


def take_steps(
    config: dict[str, Any],
    no_waiting: Callable[[], AbstractContextManager[object]],
    device: str = "cpu",
) -> None:
    """Take four steps to begin with, and four in the context ``no_waiting``."""
    hooks = [commhooks.create(config) for _ in range(SIZE)]
    models = [
        {name: nn.Parameter(p) for name, p in probe_parameters(device=device).items()}
        for _ in hooks
    ]
    for hook, parameters in zip(hooks, models, strict=True):
        prepare_all(hook, parameters, fake_group(SIZE))
    for step in range(8):
        buckets = [bucket_of(rank, step, model) for rank, model in enumerate(models)]
        with no_waiting() if step >= 4 else nullcontext():
            results, _ = simulate(hooks, buckets)
        for model, bucket, result in zip(models, buckets, results, strict=True):
            bucket.buffer().copy_(result.view(-1))
            with torch.no_grad():
                for parameter, gradient in zip(model.values(), bucket.gradients(), strict=True):
                    parameter.sub_(gradient, alpha=0.01)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_host_reads_nothing(name: str) -> None:
    refused = pytest.raises(AssertionError, match="makes the host wait")
    with emulated(), refused if name in WAITING else nullcontext():
        take_steps(CONFIGS[name], lambda: HostReads(DRAWS.get(name, 0) * SIZE))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", sorted(CONFIGS.keys() - WAITING))
def test_no_operation_of_torch_waits(name: str) -> None:
    take_steps(CONFIGS[name], waiting_is_an_error, "cuda")


class Group(dist.ProcessGroup):
    """What `auto` needs of a group whose collectives are simulated."""

    def _get_backend(self, device: torch.device) -> Any:
        return SimpleNamespace(name=lambda: "gloo")


def note_launches(hook: Any) -> None:
    """Do what runners do."""
    reduce = hook.reduce

    async def launched(bucket: GradBucket, comm: commhooks.Communicator) -> torch.Tensor:
        comm.launched = time.monotonic_ns()
        average: torch.Tensor = await reduce(bucket, comm)
        return average

    hook.reduce = launched


def test_auto_reads_in_a_later_step_what_it_measures() -> None:
    """It times, probes, tries, reports, plans, checks, and plans again."""
    parameters = {name: nn.Parameter(torch.zeros(64, 48)) for name in ("a", "b")}
    with ExitStack() as stack:
        stack.enter_context(emulated())
        links = Links(stack)
        candidates = ["int8:error_feedback=false", "topk:density=0.1,warmup_steps=0"]
        hooks: list[Any] = []
        for rank in range(SIZE):
            hooks.append(commhooks.create("auto", error=9.0, candidates=candidates))
            prepare_all(hooks[rank], parameters, Group(rank, SIZE))
            note_launches(hooks[rank])
        for step in range(40):
            if step == 24:
                assert set(hooks[1].plan.hook_of().values()) == {candidates[1]}
                links.probe = FAST
            buckets = [bucket_of(rank, step, parameters) for rank in range(SIZE)]
            with HostReads(0):
                simulate(hooks, buckets)
        assert [len(hook.history) for hook in hooks] == [2, 2]
        assert set(hooks[1].plan.hook_of().values()) == {"allreduce"}
