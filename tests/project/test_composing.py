"""What docs/composing.md says of clipping, optimizers and averages of weights, and other pages."""

import copy
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.of_ranks import gathered, same_on_all_ranks
from support.pages import run_page
from support.states import hook_state
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

import commhooks

HOOKS: list[dict[str, Any]] = [
    {"name": "int8"},
    {"name": "topk", "density": 0.1},
    {"name": "powersgd", "rank": 1, "start_step": 0, "min_compression_rate": 1.0},
]


def make_net(*, bias: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16, bias=bias), nn.ReLU(), nn.Linear(16, 4, bias=bias))


def inputs_of(rank: int, step: int) -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank))


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    loss: Tensor = model(inputs_of(rank, step)).square().sum()
    return loss


def flat(tensors: Any) -> Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def train(
    rank: int,
    hook: Any,
    make_optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
    before_step: Callable[[nn.Module], None] = lambda model: None,
    after_step: Callable[[nn.Module], None] = lambda model: None,
) -> Tensor:
    model = commhooks.DistributedDataParallel(make_net())
    commhooks.register(model, hook)
    optimizer = make_optimizer(model.parameters(), lr=0.01)
    for step in range(5):
        loss_of(model, rank, step).backward()
        before_step(model)
        optimizer.step()
        optimizer.zero_grad()
        after_step(model.module)
    return flat(model.parameters())


def clip(rank: int, size: int) -> None:
    def by_norm(model: nn.Module) -> None:
        norms.append(clip_grad_norm_(model.parameters(), 0.5))
        found = flat(parameter.grad for parameter in model.parameters()).norm()
        torch.testing.assert_close(found, torch.tensor(0.5))

    def by_value(model: nn.Module) -> None:
        clip_grad_value_(model.parameters(), 0.1)
        assert flat(parameter.grad for parameter in model.parameters()).abs().max() <= 0.1

    for hook in HOOKS:
        norms: list[Tensor] = []
        weights = train(rank, hook, before_step=by_norm)
        assert same_on_all_ranks(torch.stack(norms))
        assert same_on_all_ranks(weights)
        assert same_on_all_ranks(train(rank, hook, before_step=by_value))

    model = commhooks.DistributedDataParallel(make_net(), hook="allreduce")
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient.clamp(-1.0, 1.0))
    loss_of(model, rank, 0).backward()
    expected = torch.zeros(())
    for peer in range(size):
        net = make_net()
        loss_of(net, peer, 0).backward()
        expected = expected + flat(p.grad for p in net.parameters()).clamp(-1.0, 1.0) / size
    torch.testing.assert_close(flat(p.grad for p in model.parameters()), expected)


def shard_the_optimizer(rank: int, size: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, about torch.jit
        from torch.distributed.optim import ZeroRedundancyOptimizer

    def zero(parameters: Any, lr: float) -> torch.optim.Optimizer:
        return ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, lr=lr)

    for hook in HOOKS:
        assert torch.equal(train(rank, hook, zero), train(rank, hook, torch.optim.AdamW))


def average_weights(rank: int, size: int) -> None:
    averages: list[AveragedModel] = []
    seen: list[Tensor] = []

    def update(net: nn.Module) -> None:
        if not averages:
            averages.append(AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9)))
        averages[0].update_parameters(net)
        seen.append(flat(net.parameters()).clone())

    for hook in HOOKS:
        averages.clear()
        seen.clear()
        train(rank, hook, after_step=update)
        expected = seen[0]
        for weights in seen[1:]:
            expected = 0.9 * expected + 0.1 * weights
        found = flat(averages[0].module.parameters())
        torch.testing.assert_close(found, expected)
        assert same_on_all_ranks(found)

    net = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4))
    model = commhooks.DistributedDataParallel(net, hook="int8")
    loss_of(model, rank, 0).backward()
    swa = AveragedModel(net)
    swa.update_parameters(net)
    update_bn([torch.ones(4, 8) * step for step in range(3)], swa)
    assert same_on_all_ranks(flat(swa.module.buffers()).double())

    model = commhooks.DistributedDataParallel(make_net())
    handle = commhooks.register(model, "local_sgd", period=4)
    loss_of(model, rank, 0).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert not same_on_all_ranks(flat(model.parameters()))
    handle.remove()
    assert same_on_all_ranks(flat(model.parameters()))


def accumulate(rank: int, size: int) -> None:
    for hook in HOOKS:
        results = []
        for accumulates in (True, False):
            model = commhooks.DistributedDataParallel(make_net())
            handle = commhooks.register(model, hook)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            for step in range(0, 12, 4):
                for number in range(4 if accumulates else 0):
                    model.require_backward_grad_sync = number == 3
                    (loss_of(model, rank, step + number) / 4).backward()
                if not accumulates:
                    inputs = torch.cat([inputs_of(rank, step + number) for number in range(4)])
                    (model(inputs).square().sum() / 4).backward()
                optimizer.step()
                optimizer.zero_grad()
            assert handle.state_dict()["step"] == 3
            results.append(flat(model.parameters()))
        torch.testing.assert_close(*results, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("test", [clip, shard_the_optimizer, average_weights, accumulate])
def test_composing(run_ranks: Any, test: Callable[[int, int], None]) -> None:
    run_ranks(test, 2)


def tensor_parallel(
    rank: int, hook: str, options: dict[str, Any]
) -> tuple[nn.Module, commhooks.HookHandle, torch.optim.Optimizer]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    net = parallelize_module(make_net(bias=False), mesh["tensor"], plan)
    with pytest.raises(ValueError, match=r'"0.weight" is a DTensor.*device_mesh=mesh\[...\]'):
        commhooks.DistributedDataParallel(copy.deepcopy(net), process_group=mesh.get_group("data"))
    model = commhooks.DistributedDataParallel(net, device_mesh=mesh["data"], bucket_cap_mb=1e-6)
    handle = commhooks.register(model, hook, **options)
    return model, handle, torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)


def train_in_parallel(rank: int, size: int, hook: str, options: dict[str, Any]) -> Tensor:
    """Train on 2 x 2 ranks, load the state after three steps of five; return the difference."""
    data, part = divmod(rank, 2)
    model, handle, optimizer = tensor_parallel(rank, hook, options)
    shards = optimizer.param_groups[0]["params"]
    saved: tuple[Any, ...] = ()
    for step in range(8):  # the last three again, with the state
        if step == 3:
            saved = copy.deepcopy((shards, handle.state_dict(), optimizer.state_dict()))
        if step == 5:
            before = flat(shards).clone()
            model, handle, optimizer = tensor_parallel(rank, hook, options)
            shards = optimizer.param_groups[0]["params"]
            with torch.no_grad():
                torch._foreach_copy_(shards, saved[0])
            handle.load_state_dict(saved[1])
            optimizer.load_state_dict(saved[2])
        loss_of(model, data, step - 2 * (step >= 5)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 6:
            assert torch.equal(flat(shards), before)
    assert list(model.parameters()) == []  # torch has taken them out
    assert set(hook_state(handle)) <= {"0.weight", "2.weight"}
    ours = flat(shards)
    replicas = gathered(ours)
    assert torch.equal(replicas[part], replicas[2 + part])
    whole = make_net(bias=False)
    optimizer = torch.optim.SGD(whole.parameters(), 0.01, momentum=0.9)
    for step in range(6):
        for peer in range(2):
            (loss_of(whole, peer, step) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return ours - flat(p.chunk(2, dim)[part] for dim, p in enumerate(whole.parameters()))


@pytest.mark.parametrize(
    ("hook", "options", "limit"),
    [
        ("allreduce", {}, 1e-6),
        ("powersgd", {"rank": 8, "start_step": 0, "min_compression_rate": 0.0}, 1e-3),
        ("int8", {}, 1e-2),
    ],
)
def test_tensor_parallelism(
    run_ranks: Any, hook: str, options: dict[str, Any], limit: float
) -> None:
    """Each rank's shards go through the hook, over the ranks that have the same ones."""
    for difference in run_ranks(train_in_parallel, 4, hook, options):
        assert difference.abs().max() < limit


class Replicated:
    """A model with parameters that all ranks of a tensor group have whole."""

    def __init__(self, *, fsdp: bool) -> None:
        mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("data", "shard", "tensor"))
        net = nn.Sequential(make_net(), nn.Linear(4, 4))
        parallelize_module(net[0], mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        self.model: Any = (
            fully_shard(net, mesh=mesh["data", "shard"])
            if fsdp
            else commhooks.DistributedDataParallel(net, device_mesh=mesh["data"])
        )
        named = dict(net.named_parameters())
        self.whole = [named["0.2.bias"], named["1.weight"]]
        """A DTensor, where they are still some, and one that was a plain tensor."""
        self.group = mesh.get_group("tensor")
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.01)

    def train(self, rank: int, steps: int) -> Iterator[bool]:
        """Yield after each step whether the ranks of a tensor group have the same."""
        for step in range(steps):
            loss_of(self.model, rank // 2, step).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            yield all(torch.equal(*self.of_group(whole)) for whole in self.whole)

    def of_group(self, tensor: Any) -> list[Tensor]:
        ours = tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()
        return gathered(ours, self.group)


def replicate_in_parallel(rank: int, size: int, *, fsdp: bool) -> None:
    replicated = Replicated(fsdp=fsdp)
    for name, options in (("int4", {}), ("topk", {"density": 0.2, "warmup_steps": 0})):
        handle = commhooks.register(replicated.model, name, **options)
        assert all(replicated.train(rank, 4)), name
        handle.remove()


def decide_in_parallel(rank: int, size: int, *, fsdp: bool) -> None:
    """The errors that `guard` finds differ between groups, and its bound is between two of them."""
    bound = 10.0
    for metric in ("last_error", "is_fallback"):
        replicated = Replicated(fsdp=fsdp)
        handle = commhooks.register(
            replicated.model, "guard", inner="int4", max_error=bound, every=1
        )
        found = []
        for is_same in replicated.train(rank, 6):
            assert is_same
            found.append(replicated.of_group(torch.tensor(handle.stats().metrics[metric])))
        bound = float(sum(next(pair for pair in found if pair[0] != pair[1]))) / 2
    handle.replace("auto", exact=[])
    names = {"0.0.weight": False, "0.2.weight": False, "0.2.bias": True, "1.weight": True}
    assert {name: handle.hook.bucket_key(name) for name in names} == names
    with pytest.raises(commhooks.CommHookError, match="would skip other steps"):
        handle.replace("skip_nonfinite")


@pytest.mark.parametrize("fsdp", [False, True])
@pytest.mark.parametrize("train", [replicate_in_parallel, decide_in_parallel])
def test_tensor_parallelism_keeps_whole_parameters_equal(
    run_ranks: Any, train: Callable[..., None], fsdp: bool
) -> None:
    run_ranks(train, 4, fsdp=fsdp)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(64, 64)])

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self.experts[0](inputs)
        return result


def make_net_of_experts() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 64), Experts(), nn.Linear(64, 64))


def follow(rank: int, size: int, folder: Path) -> None:
    def namespace() -> dict[str, Any]:
        model = commhooks.DistributedDataParallel(make_net_of_experts())
        return {
            "commhooks": commhooks,
            "torch": torch,
            "rank": rank,
            "net": make_net_of_experts(),
            "model": model,
            "handle": commhooks.register(model, "int8"),
            "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
            "data": [(torch.randn(2, 64), torch.randn(2, 64)) for _ in range(4)],
            "loss_function": nn.functional.mse_loss,
            "ranks_with_the_same_experts": dist.group.WORLD,
        }

    namespaces = [namespace() for _ in range(14)]
    assert run_page("composing.md", folder, *namespaces) == len(namespaces)
    coming = [namespace() for _ in range(8)]
    for each in coming:
        each["handle"].remove()
    assert run_page("integrations/coming-from.md", folder, *coming) == len(coming)
    for each, name in zip(coming, COMING_FROM, strict=True):
        handle = commhooks.handle_of(each["model"])
        assert handle is not None
        assert handle.hook.name == name
        each["model"](torch.randn(2, 64)).sum().backward()


COMING_FROM = ["int4", "schedule", "int4", "fp16", "topk", "gossip", "diloco", "bf16"]
"""The hooks that the blocks of the page leave on their models."""


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, about torch.jit
def test_page(run_ranks: Any, tmp_path: Path) -> None:
    run_ranks(follow, 4, tmp_path)
