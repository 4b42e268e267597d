"""Hooks that each break one rule of the conformance kit."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import commhooks


@dataclass
class Average(commhooks.CommHook):
    """A correct hook, the base class of the broken ones."""

    async def reduce(self, bucket: commhooks.GradBucket, comm: Any) -> Tensor:
        return await comm.all_reduce(bucket.buffer().div_(comm.size))


class Unregistered(Average):
    pass


@commhooks.register_hook("broken_config")
@dataclass
class ChangesAnOption(Average):
    scale: float = 1.0

    def to_config(self) -> dict[str, Any]:
        return {"name": self.name, "scale": 1.0 + self.scale}


@commhooks.register_hook("broken_representation")
@dataclass
class HasNoSource(Average):
    def __repr__(self) -> str:
        return "<a hook>"


@commhooks.register_hook("broken_result")
@dataclass
class ReturnsHalf(Average):
    async def reduce(self, bucket: commhooks.GradBucket, comm: Any) -> Tensor:
        return (await super().reduce(bucket, comm)).half()


@commhooks.register_hook("broken_mean")
@dataclass
class ReturnsTheSum(Average):
    lossless = True

    async def reduce(self, bucket: commhooks.GradBucket, comm: Any) -> Tensor:
        return await comm.all_reduce(bucket.buffer())


@commhooks.register_hook("broken_order")
@dataclass
class IgnoresTheMemoryFormat(Average):
    """Write results row by row, as the views of torch's buckets suggest."""

    lossless = True

    async def reduce(self, bucket: commhooks.GradBucket, comm: Any) -> Tensor:
        rows = torch.cat([gradient.reshape(-1) for gradient in bucket.gradients()])
        return bucket.buffer().copy_(await comm.all_reduce(rows.div_(comm.size)))


@commhooks.register_hook("broken_alone")
@dataclass
class NeedsPeers(Average):
    lossless = True

    async def reduce(self, bucket: commhooks.GradBucket, comm: Any) -> Tensor:
        if comm.size == 1:
            return bucket.buffer().mul_(2)
        return await super().reduce(bucket, comm)


@commhooks.register_hook("broken_sizes")
@dataclass
class DividesByTheDeviation(Average):
    """Divide by the standard deviation, which one element does not have."""

    async def reduce(self, bucket: commhooks.GradBucket, comm: Any) -> Tensor:
        deviation = bucket.buffer().float().std() if bucket.buffer().numel() else torch.ones(())
        average = await super().reduce(bucket, comm)
        return average if deviation > 0 or (average == 0).all() else average.div_(deviation)


@commhooks.register_hook("broken_deterministic")
@dataclass
class DrawsFromTheGlobalGenerator(Average):
    async def reduce(self, bucket: commhooks.GradBucket, comm: Any) -> Tensor:
        average = await super().reduce(bucket, comm)
        return average.mul_(1 + torch.rand(()).item())


@commhooks.register_hook("broken_consensus")
@dataclass
class DisagreesWithItself(Average):
    async def reduce(self, bucket: commhooks.GradBucket, comm: Any) -> Tensor:
        return (await super().reduce(bucket, comm)).mul_(1 + comm.rank)


@commhooks.register_hook("broken_zeros")
@dataclass
class DividesByTheNorm(Average):
    async def reduce(self, bucket: commhooks.GradBucket, comm: Any) -> Tensor:
        average = await super().reduce(bucket, comm)
        return average.div_(average.abs().sum())


@commhooks.register_hook("broken_non_finite")
@dataclass
class RemembersInfinity(Average):
    async def reduce(self, bucket: commhooks.GradBucket, comm: Any) -> Tensor:
        average = await super().reduce(bucket, comm)
        for name, gradient in zip(bucket.names, bucket.gradients(), strict=True):
            self.state[name] = {"last": gradient.clone()}
        return average


@commhooks.register_hook("broken_non_finite_elsewhere")
@dataclass
class LooksAtItsOwnGradient(Average):
    """Change the state on all ranks except the one whose gradient is not finite."""

    async def reduce(self, bucket: commhooks.GradBucket, comm: Any) -> Tensor:
        own = bucket.buffer().clone()
        average = await super().reduce(bucket, comm)
        if own.numel() and own.isfinite().all():
            self.state.setdefault(bucket.names[0], {})["largest"] = own.max()
        return average


@commhooks.register_hook("broken_keys")
@dataclass
class KeepsStateByBucket(Average):
    async def reduce(self, bucket: commhooks.GradBucket, comm: Any) -> Tensor:
        average = await super().reduce(bucket, comm)
        if average.isfinite().all():
            self.state[f"bucket {bucket.index()}"] = {"last": average.clone()}
        return average


@commhooks.register_hook("broken_resume")
@dataclass
class KeepsStateElsewhere(Average):
    def __post_init__(self) -> None:
        super().__post_init__()
        self.reduced = 0

    async def reduce(self, bucket: commhooks.GradBucket, comm: Any) -> Tensor:
        self.reduced += 1
        count = self.reduced  # of this bucket: others come while this one waits
        return (await super().reduce(bucket, comm)).div_(count)


@commhooks.register_hook("broken_wire")
@dataclass
class SendsOnItsOwn(Average):
    """Send without the communicator, which then neither counts nor orders it."""

    async def reduce(self, bucket: commhooks.GradBucket, comm: Any) -> Tensor:
        average = bucket.buffer().div_(comm.size)
        dist.all_reduce(average)
        return average


@commhooks.register_hook("broken_cost")
@dataclass
class StatesTooLittle(Average):
    """State only half of the bytes: not those that a rank forwards for others."""

    def wire_bytes(self, bucket: commhooks.GradBucket, size: int) -> int:
        return bucket.buffer().nbytes // 2


@commhooks.register_hook("broken_unused")
@dataclass
class NeedsEveryGradient(Average):
    async def reduce(self, bucket: commhooks.GradBucket, comm: Any) -> Tensor:
        zero = [not gradient.any() for gradient in bucket.gradients() if gradient.numel()]
        if any(zero) and not all(zero):
            raise ValueError("expected all gradients")
        return await super().reduce(bucket, comm)


@commhooks.register_hook("broken_failure")
@dataclass
class CountsBeforeItSends(Average):
    """Restore the count after a step that was not finite, but not after one that failed."""

    async def reduce(self, bucket: commhooks.GradBucket, comm: Any) -> Tensor:
        counts = [self.state.setdefault(name, {"n": torch.zeros(())})["n"] for name in bucket.names]
        for count in counts:
            count += 1
        average = await super().reduce(bucket, comm)
        if average.isfinite().all():
            return average.div_(counts[0])
        for count in counts:
            count -= 1
        return average


@commhooks.register_hook("broken_nested")
@dataclass
class IsSetUpByTheEngine(Average):
    """Rely on ``native``, which the engine does not call for hooks inside other hooks."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.divisor = 1

    def native(self, group: Any, step: int | None = None) -> None:
        self.divisor = group.size()

    async def reduce(self, bucket: commhooks.GradBucket, comm: Any) -> Tensor:
        return await comm.all_reduce(bucket.buffer().div_(self.divisor))


@commhooks.register_hook("broken_contribution")
@dataclass
class ClaimsToHaveSentAll(Average):
    tells_contribution = True

    async def reduce(self, bucket: commhooks.GradBucket, comm: Any) -> Tensor:
        comm.contribution = bucket.buffer().clone()
        bucket.buffer()[::2] *= 0.5
        return await super().reduce(bucket, comm)


@commhooks.register_hook("broken_contribution_told_unasked")
@dataclass
class TellsUnasked(Average):
    """Set the contribution without ``tells_contribution``, so that error_feedback rejects it."""

    async def reduce(self, bucket: commhooks.GradBucket, comm: Any) -> Tensor:
        comm.contribution = bucket.buffer().clone()
        return await super().reduce(bucket, comm)


@commhooks.register_hook("broken_torch_ddp")
@dataclass
class NeedsOneBucketForever(Average):
    """Fail when buckets are rebuilt: torch's first bucket has 1 MiB until after the first step."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.had_everything = False

    async def reduce(self, bucket: commhooks.GradBucket, comm: Any) -> Tensor:
        has_everything = len(bucket.names) == 8
        if self.had_everything and not has_everything:
            raise ValueError("expected everything in one bucket, as before")
        self.had_everything = has_everything
        return await super().reduce(bucket, comm)
