"""What several ranks do together on a device: plain averages, hooks, and what surrounds them.

tests/gpu/test_gpu_several_ranks.py runs it over NCCL, where ranks may share a device, and
tests/runtime/test_several_ranks.py on CPUs over Gloo.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from adapters.test_fsdp_quantized import COLLECTIVES, near_native
from algorithms.adaptive.test_auto import adapt
from runtime.test_several_models import train as train_models
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import commhooks
from commhooks import Communicator
from commhooks.hook.base import has_consensus
from commhooks.testing import run_ranks
from commhooks.testing.compare import (
    differences,
    disagreement,
    mean_over_ranks,
    same_bits,
    through_file,
)
from commhooks.testing.probe import Trainer, draw_gradients, probe_parameters
from support.conforming_hooks import CASES as HOOKS
from support.conforming_hooks import POWERSGD
from support.of_ranks import same_on_all_ranks
from support.sharded import build, mesh_of, train

PATIENCE = 3600.0
"""Seconds: no test has a limit of its own, because ranks that share a device take turns."""
NEAR = 0.02
"""A relative distance that differences in rounding stay below, and a wrong collective does not."""


@dataclass(frozen=True)
class Case:
    """A function ``(rank, size, device, *arguments)``, for some numbers of ranks.

    What it returns, tensors on the CPU, is near to what the ranks return over Gloo.
    """

    name: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...] = ()
    sizes: tuple[int, ...] = (2, 4)

    def run(self, size: int, device: str, backend: str) -> list[Any]:
        """Return the results by rank."""
        arguments = (device, *self.arguments)
        return run_ranks(self.function, size, *arguments, backend=backend, timeout=PATIENCE)


def distance(found: list[Tensor], expected: list[Tensor]) -> float:
    """Return the relative L2 distance."""
    pairs = [
        (a.detach().double(), b.detach().double()) for a, b in zip(found, expected, strict=True)
    ]
    square = sum(float((a - b).square().sum()) for a, b in pairs)
    return float((square / max(sum(float(b.square().sum()) for _, b in pairs), 1e-30)) ** 0.5)


def assert_same_on_all_ranks(tensors: list[Tensor], group: Any = None) -> None:
    for tensor in tensors:
        assert same_on_all_ranks(tensor, group)


# ----------------------------------------------------------------------------------- collectives

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int32, torch.int64,
          torch.uint8, torch.int8, torch.bool]  # fmt: skip


def every_collective(rank: int, size: int, device: str, dtype: torch.dtype) -> None:
    group = dist.group.WORLD
    assert group is not None
    for length in (0, 1, 1000):
        rows = torch.stack([(torch.arange(length * size) + peer) % 2 for peer in range(size)])
        own = rows[rank].to(device, dtype)
        comm = Communicator(group, step=0, key="key")
        ring = (rank + 1) % size, (rank - 1) % size
        to_first = list(range(size)) if rank == 0 else []
        for name, pending, wanted in [
            ("sum", comm.all_reduce(own.clone()), rows.sum(0)),
            ("min", comm.all_reduce(own.clone(), "min"), rows.amin(0)),
            ("max", comm.all_reduce(own.clone(), "max"), rows.amax(0)),
            ("product", comm.all_reduce(own.clone(), "product"), rows.prod(0)),
            ("all_gather", comm.all_gather(own), rows),
            ("all_to_all", comm.all_to_all(own), rows.view(size, size, -1)[:, rank].flatten()),
            ("reduce_scatter", comm.reduce_scatter(own), rows.sum(0).view(size, -1)[rank]),
            ("broadcast", comm.broadcast(own.clone(), size - 1), rows[-1]),
            ("sendrecv", comm.sendrecv(own, *ring), rows[rank - 1]),
            ("push", comm.push(own, 0, to_first), rows[to_first]),
        ]:
            pending.is_awaited = True
            pending.run(group)
            assert pending.result is not None
            assert torch.equal(pending.result.cpu(), wanted.to(dtype)), (name, length)


# -------------------------------------------------------------------------------- plain averages


class Mixed(nn.Module):
    """Odd sizes, channels last, a transposed parameter, and one without dimensions."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
        self.linear = nn.Linear(8 * 36, 13)
        self.transposed = nn.Parameter(torch.randn(13, 5).T.contiguous().T)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Compute (batch, 5) from ``x``, (batch, 3, 8, 8)."""
        return self.linear(self.convolution(x).flatten(1)) @ self.transposed * self.scale


WAYS: dict[str, dict[str, Any]] = {
    "copies": {},
    "views": {"gradient_as_bucket_view": True},
    "unused": {"find_unused_parameters": True},
    "static": {"static_graph": True},
    "accumulation": {},
    "autocast": {},
    "scaler": {},
}
"""How models are trained, and the options of the wrappers."""


def numbers(
    wrap: Callable[[nn.Module], nn.Module], rank: int, device: str, dtype: torch.dtype, way: str
) -> list[Tensor]:
    """Return gradients and parameters after some steps, in which buckets have been rebuilt."""
    torch.manual_seed(0)
    model: Any = wrap(Mixed(dtype).to(device))
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.01)
    scaler = torch.amp.GradScaler(device, enabled=way == "scaler", init_scale=256.0)
    generator = torch.Generator().manual_seed(rank)
    for step in range(4):
        optimizer.zero_grad()
        for is_last in (False, True) if way == "accumulation" else (True,):
            x = torch.randn(4, 3, 8, 8, generator=generator).to(device, dtype)
            if way == "scaler" and (rank, step) == (0, 2):
                x[0, 0, 0, 0] = torch.inf
            with nullcontext() if is_last else model.no_sync():
                with torch.autocast(device, torch.bfloat16, enabled=way == "autocast"):
                    loss = model(x).float().square().mean()
                scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(parameters, 1.0)
        scaler.step(optimizer)
        scaler.update()
    if way == "scaler":
        assert scaler.get_scale() == 128.0  # one step was skipped
    return [p.grad for p in parameters] + parameters


def equals_torchs(rank: int, size: int, device: str, dtype: torch.dtype, way: str) -> None:
    torch.backends.cudnn.deterministic = True
    options = {"bucket_cap_mb": 0.001, **WAYS[way]}

    def ours(module: nn.Module) -> nn.Module:
        return commhooks.DistributedDataParallel(module, host_memory=False, **options)

    found = numbers(ours, rank, device, dtype, way)
    expected = numbers(lambda module: TorchDDP(module, **options), rank, device, dtype, way)
    assert [tensor.stride() for tensor in found] == [tensor.stride() for tensor in expected]
    # Sums of more than two numbers depend on their order, which follows the position in a bucket.
    assert size > 2 or all(map(torch.equal, found, expected))
    assert distance(found, expected) < 10 * torch.finfo(dtype).eps


# ----------------------------------------------------------------------------------------- hooks


def steps_of(rank: int, size: int, device: str, name: str, options: dict[str, Any]) -> list[Tensor]:
    """Return the results of some steps, which are the same on all ranks if they are to be."""
    parameters = probe_parameters(device=device)
    trainer = Trainer(commhooks.create(name, **options), parameters, stable_buckets=True)
    found: list[Tensor] = []
    for step in range(4):
        results = trainer.step(draw_gradients(parameters, rank, step))
        assert not has_consensus(trainer.hook) or not disagreement(results)
        found += [tensor.cpu() for tensor in results.values()]
    return found


def net_of(device: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 6)).to(device)


def parameters_of(rank: int, size: int, device: str, config: dict[str, Any]) -> list[Tensor]:
    """Return the parameters of a net after training."""
    net = net_of(device)
    model = commhooks.DistributedDataParallel(net, bucket_cap_mb=0.0005, hook=config)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(8):
        generator = torch.Generator().manual_seed(10 * step + rank)
        optimizer.zero_grad()
        model(torch.randn(4, 12, generator=generator).to(device)).square().mean().backward()
        optimizer.step()
    return [parameter.detach().cpu() for parameter in net.parameters()]


def saved_replaced_and_removed(rank: int, size: int, device: str, name: str) -> None:
    parameters = probe_parameters(device=device)

    def drawn(step: int) -> dict[str, Tensor]:
        return draw_gradients(parameters, rank, step)

    config = {"name": name} if name != "powersgd" else POWERSGD
    first, second = (
        Trainer(commhooks.create(config), parameters, stable_buckets=True) for _ in range(2)
    )
    for step in range(3):
        first.step(drawn(step))
    second.handle.load_state_dict(through_file(first.handle.state_dict()))
    assert same_bits(first.step(drawn(3)), second.step(drawn(3)))
    first.handle.replace("onebit")
    assert not disagreement(first.step(drawn(4)))
    mean = mean_over_ranks([draw_gradients(parameters, r, 5) for r in range(size)], parameters)
    first.handle.replace("allreduce")
    assert not differences(first.step(drawn(5)), mean, size)
    first.handle.remove()
    assert not differences(first.step(drawn(5)), mean, size)


class Branches(nn.Module):
    """Buffers, and parameters that some ranks use, or none."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.branches = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.spare = nn.Linear(6, 6)

    def forward(self, x: Tensor, branch: int) -> Tensor:
        return self.branches[branch](self.norm(x))


def buffers_and_unused_parameters(rank: int, size: int, device: str, name: str) -> None:
    """Broadcasts of buffers, and maps of unused parameters, come between a hook's collectives."""
    net = Branches().to(device)
    model = commhooks.DistributedDataParallel(
        net, find_unused_parameters=True, bucket_cap_mb=0.0001
    )
    commhooks.register(model, name)
    for step in range(4):
        model.zero_grad()
        x = torch.randn(8, 6, device=device) + rank
        model(x, (rank + step) % 2).square().mean().backward()
        assert all(p.grad is None for p in net.spare.parameters())
        assert_same_on_all_ranks([p.grad for p in net.parameters() if p.grad is not None])
    model(torch.zeros(8, 6, device=device), 0)
    assert_same_on_all_ranks([net.norm.running_mean, net.norm.running_var])


# ---------------------------------------------------------------------------------- whole models


def replicas_of_shards(rank: int, size: int, device: str, name: str) -> None:
    mesh = mesh_of(2, size // 2, device)
    net = build(mesh)
    commhooks.register(net, name)
    found = train(net, rank, 3)
    assert_same_on_all_ranks(found, mesh.get_group("replicate"))
    if name == "allreduce":
        assert all(map(torch.equal, found, train(build(mesh), rank, 3)))


def few_bits(rank: int, size: int, device: str, collective: str) -> None:
    near_native(rank, size, collective, ["units", "mixed precision"], device)


def several_models(
    rank: int, size: int, device: str, wrapper: str, hook: str, way: str, count: int, groups: bool
) -> None:
    train_models(rank, size, wrapper, hook, way, count, 1, groups, device)


def compiled(rank: int, size: int, device: str, where: str, hook: str | None) -> None:
    """Compiled or not, the gradients of the last step are the same up to rounding."""
    found: list[list[Tensor]] = []
    for compiles in (False, True):
        net = net_of(device)
        at = where if compiles else ""
        module: Any = torch.compile(net, backend="aot_eager") if at == "module" else net
        model = commhooks.DistributedDataParallel(module)
        if hook is not None:
            commhooks.register(model, hook)
        run: Any = torch.compile(model, backend="aot_eager") if at == "wrapper" else model
        for step in range(3):
            generator = torch.Generator().manual_seed(10 * step + rank)
            model.zero_grad()
            run(torch.randn(4, 12, generator=generator).to(device)).square().mean().backward()
        found.append([p.grad.clone() for p in net.parameters()])
    assert_same_on_all_ranks(found[1])
    assert distance(*found) < (NEAR if hook else 1e-6)


def auto_changes_hooks(rank: int, size: int, device: str, torch_ddp: bool) -> None:
    adapt(rank, size, torch_ddp, device)


NODES: dict[str, dict[str, Any]] = {
    "hierarchical": {"inner": "int8"},
    "hierarchical, leaders": {"inner": "int8", "sharded": False},
    "local_sgd": {"period": 2},
    "diloco": {"period": 2, "inner": "int8"},
    "diloco, delay": {"period": 4, "delay": 1},
    "diloco, fragments": {"period": 4, "delay": 1, "fragments": 2},
}
SOME = ("allreduce", "bf16", "fp8", "int8", "int4", "onebit", "topk", "shared_topk", "demo", "dgc",
        "powersgd", "randomk", "skip_nonfinite", "route")  # fmt: skip

CASES = [
    *(Case(f"collectives, {dtype}", every_collective, (dtype,)) for dtype in DTYPES),
    *(Case(f"as torch, {way}", equals_torchs, (torch.float32, way)) for way in WAYS),
    *(
        Case(f"as torch, {dtype}", equals_torchs, (dtype, "copies"))
        for dtype in (torch.bfloat16, torch.float64)
    ),
    *(
        Case(f"{name} {options}", steps_of, (name, options), (2, 4) if name in SOME else (2,))
        for name, options in HOOKS
    ),
    *(
        Case(
            f"nodes, {name}",
            parameters_of,
            ({"name": name.partition(",")[0], "ranks_per_node": 2, **options},),
            (4,),
        )
        for name, options in NODES.items()
    ),
    *(
        Case(f"save, load, replace, {name}", saved_replaced_and_removed, (name,))
        for name in ("int8", "topk", "powersgd", "onebit")
    ),
    *(
        Case(f"buffers and unused, {name}", buffers_and_unused_parameters, (name,))
        for name in ("allreduce", "int8", "topk")
    ),
    *(
        Case(f"HSDP, {name}", replicas_of_shards, (name,), (4,))
        for name in ("allreduce", "bf16", "int8", "topk", "onebit")
    ),
    *(Case(f"FSDP in few bits, {name}", few_bits, (name,), (2,)) for name in COLLECTIVES),
    *(
        Case(f"{count} models, {wrapper}, {hook}, {way}{', own groups' * groups}", several_models,
             (wrapper, hook, way, count, groups))
        for wrapper, hook, way, count, groups in [
            ("own", "int8", "sum", 2, False),
            ("own", "topk", "chain", 3, False),
            ("own", "powersgd", "sum", 3, True),
            ("torch", "int8", "sum", 3, False),
            ("fsdp", "onebit", "sum", 2, False),
        ]
    ),
    *(
        Case(f"compile, {where}, {hook}", compiled, (where, hook), (2,))
        for where in ("module", "wrapper")
        for hook in (None, "bf16")
    ),
    *(
        Case(f"auto, {wrapper}", auto_changes_hooks, (wrapper == "torch",), (2,))
        for wrapper in ("own", "torch")
    ),
]  # fmt: skip
RUNS = {f"{case.name}, {size} ranks": (case, size) for case in CASES for size in case.sizes}


def check(name: str, device: str, backend: str) -> None:
    """Run one of ``RUNS``, and compare what it returns with that over Gloo on the same device."""
    case, size = RUNS[name]
    found = case.run(size, device, backend)
    if found[0] is not None:
        for own, other in zip(found, case.run(size, device, "gloo"), strict=True):
            assert distance(own, other) < NEAR
