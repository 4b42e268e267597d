"""Check an installed package: average with hooks on two ranks, and run the command line.

python smoke.py compiled|pure
"""

import importlib.metadata
import re
import subprocess
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commhooks

SIZE = 2
HOOKS = {"allreduce": {}, "bf16": {}, "int8": {}, "topk": {"density": 1.0}, "powersgd": {}}


def train(rank: int, port: int, wrappers: list[type[nn.Module]]) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=SIZE)
    for wrapper in wrappers:
        for name, options in HOOKS.items():
            torch.manual_seed(0)
            model = wrapper(nn.Linear(64, 64))
            handle = commhooks.register(model, name, **options)
            for _ in range(3):
                model.zero_grad()
                model(torch.full((4, 64), float(rank))).sum().backward()
            weight = model.module.weight.grad
            # The ranks' gradients are 0 and 4 everywhere.
            assert torch.allclose(weight, torch.full_like(weight, 2.0), rtol=0.02), (name, weight)
            assert handle.stats().total.wire_bytes
            print(f"rank {rank}: {wrapper.__module__.split('.')[0]} {name}: right", flush=True)
    dist.destroy_process_group()


def main(kind: str) -> None:
    requirements = importlib.metadata.requires("commhooks") or []
    (required,) = (line for line in requirements if re.match("torch[=<>]", line))
    print(f"commhooks {importlib.metadata.version('commhooks')} requires {required}")
    minor = ".".join(torch.__version__.split(".")[:2])
    assert (required == f"torch=={minor}.*") is (kind == "compiled"), required
    wrappers: list[type[nn.Module]] = [DistributedDataParallel]
    if kind == "compiled":
        wrappers.append(commhooks.DistributedDataParallel)
    else:
        try:
            commhooks.DistributedDataParallel(nn.Linear(1, 1))
        except commhooks.CommHookError as error:
            print(f"as expected: {error}")
        else:
            raise AssertionError("expected an error, found none")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    mp.spawn(train, args=(store.port, wrappers), nprocs=SIZE)
    for command in (["list"], ["describe", "int8"], ["doctor"]):
        subprocess.run([sys.executable, "-m", "commhooks", *command], check=True)


if __name__ == "__main__":
    main(sys.argv[1])
