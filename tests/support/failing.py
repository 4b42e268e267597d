"""A hook that fails in many ways, and a model whose factory registers it in every process."""

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

import commhooks
from support.compared import Net

NAME = "failing"


@dataclass
class Failing(commhooks.CommHook):
    """Fails on one rank, which the others wait for."""

    backends = ("gloo",)
    how: str = "raise"
    rank: int = 1

    def prepare(self, parameters: Mapping[str, Tensor], group: dist.ProcessGroup) -> None:
        if self.how == "refuse":
            raise commhooks.CommHookError("not this model")

    async def reduce(self, bucket: commhooks.GradBucket, comm: commhooks.Communicator) -> Tensor:
        if comm.rank == self.rank:
            match self.how:
                case "raise":
                    raise ValueError("no luck\nmore about it")
                case "leave":
                    raise SystemExit("enough")
                case "die":
                    print("farewell", flush=True)
                    os._exit(7)
                case "hang":
                    time.sleep(1000)
        elif self.how == "dry" and type(comm.group).__name__ == "_FakeGroup":
            raise ValueError("only among real ranks")
        average = await comm.all_reduce(bucket.buffer().div_(comm.size))
        return average.mul_({"nan": float("nan"), "explode": 1e30}.get(self.how, 1.0))


@dataclass
class Elsewhere(Failing):
    """Does not work on Gloo."""

    backends = ("mpi",)


def net() -> Net:
    commhooks.register_hook(NAME, override=True)(Failing)
    commhooks.register_hook("elsewhere", override=True)(Elsewhere)
    return Net()
