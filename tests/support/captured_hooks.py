"""The hooks that CUDA graphs can capture, and a training with them."""

import math
from typing import Any

import torch
from torch import Tensor, nn

import commhooks
from commhooks.testing.probe import Trainer, draw_gradients, probe_parameters

STEPS = 9
_LOW_RANK = {"rank": 2, "min_compression_rate": 0}
HOOKS: dict[str, dict[str, Any]] = {
    "allreduce": {"name": "cast", "inner": "allreduce"},
    "two shots": {"name": "cast", "inner": {"name": "bf16", "two_shot": True}},
    **{name: {"name": name} for name in ("int8", "int4", "int2", "fp8", "fp4")},
    **{name: {"name": name} for name in ("onebit", "signsgd")},
    "int8 without errors": {"name": "int8", "error_feedback": False},
    "int4, rotated": {"name": "int4", "rotate": True},
    "topk": {"name": "topk", "density": 0.1, "warmup_steps": 3},
    "topk in chunks": {"name": "topk", "chunk": 32, "density": 0.1, "bits": 4, "warmup_steps": 0},
    "dgc": {"name": "dgc", "density": 0.1, "clip": 1.0},
    "demo": {"name": "demo", "density": 0.1},
    "powersgd": {"name": "powersgd", "start_step": 2, **_LOW_RANK},
    "powersgd, one-sided": {
        "name": "powersgd",
        "start_step": 0,
        "two_sided": False,
        "num_iters_per_step": 2,
        **_LOW_RANK,
    },
    "batched_powersgd": {"name": "batched_powersgd", "rank": 2, "start_step": 0},
    "error feedback": {"name": "error_feedback", "inner": "bf16", "decay": 0.9},
    "routed": {"name": "route", "rules": [["*vector", "allreduce"]], "default": "int8"},
}


def train(
    config: dict[str, Any], rank: int, steps: range, state: Any = None, device: str = "cpu"
) -> tuple[list[dict[str, Tensor]], Any]:
    """Return the averages of the steps, and the state of the hook after them."""
    parameters = probe_parameters(device=device)
    trainer = Trainer(commhooks.create(config), parameters, stable_buckets=True)
    if state is not None:
        trainer.handle.load_state_dict(state)
    results = []
    for step in steps:
        gradients = draw_gradients(parameters, step, rank)
        # Signs of zeros are random, and those of a block of zeros have no error yet.
        late = gradients["convolution"]
        late.masked_fill_(late.abs() < (1 if step % STEPS > 5 else math.inf), 0.0)
        results.append(trainer.step(gradients))
    return results, trainer.handle.state_dict()


def whole_steps(rank: int, size: int, config: dict[str, Any], *, captured: bool) -> list[Tensor]:
    """Return the parameters after some steps, the last ones replays of one graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 7)).cuda()
        model = commhooks.DistributedDataParallel(net, bucket_cap_mb=0.001, stable_buckets=True)
        commhooks.register(model, config)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        x = torch.empty(16, 32, device="cuda")

        def step() -> None:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

        graph = None
        for number in range(2 * STEPS):
            drawn = torch.randn(x.shape, generator=torch.Generator().manual_seed(number))
            x.copy_(drawn + rank)
            if captured and number == STEPS:
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                    step()
            graph.replay() if graph is not None else step()
    torch.cuda.synchronize()
    return [parameter.detach().cpu() for parameter in model.parameters()]
