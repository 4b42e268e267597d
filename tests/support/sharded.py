"""Sharded models: a small net in three units, and what people set on them."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint

FLOAT16 = MixedPrecisionPolicy(reduce_dtype=torch.float16)
BFLOAT16 = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Block(nn.Module):
    """Two layers of sizes that no number of shards divides."""

    def __init__(self, *, is_tied: bool = False) -> None:
        super().__init__()
        width = 7 if is_tied else 12
        self.up, self.down = nn.Linear(7, width), nn.Linear(width, 7, bias=False)
        self.spare = nn.Linear(7, 3)
        if is_tied:
            self.down.weight = self.up.weight

    def forward(self, hidden: Tensor, *, uses_spare: bool = True) -> Tensor:
        hidden = self.down(self.up(hidden).relu()) + hidden
        return hidden + self.spare(hidden).mean() if uses_spare else hidden


class Net(nn.Module):
    """Two blocks, each a unit, and an output layer that is in the root's unit."""

    def __init__(self, feature: "Feature") -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(is_tied=feature.is_tied) for _ in range(2))
        self.output = nn.Linear(7, 6)
        self.reentrant = feature.reentrant
        self.uses_spare = feature.uses_spare

    def forward(self, hidden: Tensor) -> Tensor:
        for block in self.blocks:
            if self.reentrant is None:
                hidden = block(hidden, uses_spare=self.uses_spare)
            else:
                hidden = checkpoint(block, hidden, use_reentrant=self.reentrant)
        return self.output(hidden)


@dataclass(frozen=True)
class Feature:
    """What is set on a model, and how it is trained."""

    prepare: Callable[[Any], None] = lambda _: None
    """Called with the sharded model."""
    options: dict[str, Any] = field(default_factory=dict)
    """Of ``fully_shard``."""
    accumulate: str = ""
    """The name of the method that is called with False before the first of two backward passes."""
    is_tied: bool = False
    reentrant: bool | None = None
    uses_spare: bool = True
    frozen: str = ""
    compiles: bool = False
    clips: bool = False


def _each(method: str, *arguments: Any) -> Callable[[Any], None]:
    def call(model: Any) -> None:
        for unit in (model, *model.blocks):
            getattr(unit, method)(*arguments)

    return call


def _sum_by(factor: float) -> Callable[[Any], None]:
    def call(model: Any) -> None:
        _each("set_force_sum_reduction_for_comms", True)(model)
        _each("set_gradient_divide_factor", factor)(model)

    return call


FEATURES = {
    "units": Feature(),
    "reduce in float16": Feature(options={"mp_policy": FLOAT16}),
    "reduce in bfloat16": Feature(options={"mp_policy": BFLOAT16}),
    "mixed precision": Feature(options={"mp_policy": MIXED}),
    "sums": Feature(_each("set_force_sum_reduction_for_comms", True)),
    "sums divided by a factor": Feature(_sum_by(5.0)),
    "float16 divided by a factor": Feature(
        _each("set_gradient_divide_factor", 5.0), {"mp_policy": FLOAT16}
    ),
    "no synchronization": Feature(accumulate="set_requires_gradient_sync"),
    "no all-reduce": Feature(accumulate="set_requires_all_reduce"),
    "no all-reduce, in bfloat16": Feature(
        options={"mp_policy": BFLOAT16}, accumulate="set_requires_all_reduce"
    ),
    "zeros for unused parameters": Feature(
        _each("set_reduce_scatter_unused_params", True), uses_spare=False
    ),
    "tied parameters": Feature(is_tied=True),
    "frozen parameters": Feature(frozen="up"),
    "checkpoints": Feature(reentrant=False),
    "reentrant checkpoints": Feature(reentrant=True),
    "compiled blocks": Feature(compiles=True),
    "clipping": Feature(clips=True),
    "unsharded after forward": Feature(options={"reshard_after_forward": False}),
    "second dimension": Feature(
        options={"shard_placement_fn": lambda p: Shard(1) if p.shape == (7, 12) else None}
    ),
}


if not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):  # before torch 2.13
    del FEATURES["zeros for unused parameters"]


def mesh_of(replicas: int, shards: int, device: str = "cpu") -> DeviceMesh:
    return init_device_mesh(device, (replicas, shards), mesh_dim_names=("replicate", "shard"))


def build(mesh: DeviceMesh, feature: Feature = FEATURES["units"]) -> Any:
    """The same net on all ranks, sharded."""
    torch.manual_seed(0)
    net = Net(feature)
    for name, parameter in net.named_parameters():
        if feature.frozen and feature.frozen in name:
            parameter.requires_grad_(False)
    for block in net.blocks:
        if feature.compiles:
            block.compile(backend="aot_eager")
        fully_shard(block, mesh=mesh, **feature.options)
    fully_shard(net, mesh=mesh, **feature.options)
    feature.prepare(net)
    return net


def train(net: Any, rank: int, steps: int, feature: Feature = FEATURES["units"]) -> list[Tensor]:
    """The gradients of each step, then the parameters; this rank's shards of them."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    seen = []
    if feature.compiles:
        warnings.filterwarnings("ignore", "The .grad attribute")  # of the compiler
    for step in range(steps):
        for is_last in (False, True) if feature.accumulate else (True,):
            if feature.accumulate:
                getattr(net, feature.accumulate)(is_last)
            draw = torch.Generator().manual_seed(100 * step + 10 * rank + is_last)
            inputs = torch.randn(4, 7, generator=draw).to(next(net.parameters()).device)
            inputs.requires_grad_(feature.reentrant is True)
            net(inputs).square().mean().backward()
        if feature.clips:
            norm: Any = nn.utils.clip_grad_norm_(net.parameters(), 0.5, foreach=True)
            seen.append(norm.full_tensor())
        grads = [p.grad for p in net.parameters() if p.grad is not None]
        seen += [grad.to_local().clone() for grad in grads]
        optimizer.step()
        optimizer.zero_grad()
    return seen + [parameter.to_local() for parameter in net.parameters()]
