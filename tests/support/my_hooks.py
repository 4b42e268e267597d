"""Hooks as users have them in a module or a script of their own."""

from dataclasses import dataclass

from torch import Tensor

import commhooks


@commhooks.register_hook("coarse")
@dataclass
class Coarse(commhooks.CommHook):
    """Average in multiples of a step."""

    step: int = 1
    """Sixteenths."""

    async def reduce(self, bucket: commhooks.GradBucket, comm: commhooks.Communicator) -> Tensor:
        mean = await comm.all_reduce(bucket.buffer().div_(comm.size))
        return mean.mul_(16 / self.step).round_().mul_(self.step / 16)


@dataclass
class Unnamed(commhooks.CommHook):
    """Average exactly, without a registered name."""

    lossless = True

    async def reduce(self, bucket: commhooks.GradBucket, comm: commhooks.Communicator) -> Tensor:
        return await comm.all_reduce(bucket.buffer().div_(comm.size))


@dataclass
class Raising(commhooks.CommHook):
    """Fails in each step."""

    async def reduce(self, bucket: commhooks.GradBucket, comm: commhooks.Communicator) -> Tensor:
        raise RuntimeError("no luck")
