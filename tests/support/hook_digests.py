"""Prints what hooks return on torch's wrapper, to compare installations bit by bit."""

import hashlib
import json
from typing import Any

import torch

import commhooks
from commhooks.testing import close_ranks, run_ranks
from commhooks.testing.probe import Trainer, draw_gradients, probe_parameters

HOOKS: dict[str, dict[str, Any]] = {
    "allreduce": {},
    "bf16": {},
    "int8": {"stochastic": True},
    "int4": {},
    "int2": {},
    "fp8": {"format": "e5m2"},
    "fp4": {},
    "qsgd": {},
    "terngrad": {},
    "natural": {},
    "onebit": {},
    "signsgd": {},
    "topk": {"density": 0.1, "warmup_steps": 0},
    "threshold": {"value": 0.5},
    "randomk": {"density": 0.2},
    "demo": {"density": 0.1, "tile": 8},
    "dgc": {"density": 0.1, "warmup_steps": 0},
    "gossip": {},
    "local_sgd": {"period": 2},
    "diloco": {"period": 1, "inner": "int8"},
    "hierarchical": {"inner": "int8", "ranks_per_node": 1},
}


def digests(rank: int, size: int) -> dict[str, str]:
    """The digest of three steps with each hook, in float32 and float64."""
    found = {}
    for name, options in HOOKS.items():
        digest = hashlib.sha256()
        for dtype in (torch.float32, torch.float64):
            parameters = probe_parameters(dtype)
            trainer = Trainer(commhooks.create(name, **options), parameters, torch_ddp=True)
            for step in range(3):
                for gradient in trainer.step(draw_gradients(parameters, rank, step)).values():
                    digest.update(gradient.contiguous().numpy().tobytes())
        found[name] = digest.hexdigest()
    return found


if __name__ == "__main__":
    print(json.dumps(run_ranks(digests, 2)))
    close_ranks()
