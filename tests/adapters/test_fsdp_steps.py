"""What a step is on sharded models, and what hooks get if a unit is reduced twice in one."""

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.sharded import mesh_of
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.checkpoint import checkpoint

import commhooks
from commhooks.adapters.fsdp.units import on_optimizer_step
from commhooks.algorithms.exact import AllReduce

HEAD = ["head.weight", "head.bias"]


@dataclass
class Seen(AllReduce):
    """``allreduce`` as any other hook; keeps the step, index and names of its buckets."""

    seen: list[tuple[int, int, list[str]]] = field(
        default_factory=list, init=False, repr=False, compare=False
    )
    broken: bool = field(default=False, init=False, compare=False)

    async def reduce(self, bucket: commhooks.GradBucket, comm: commhooks.Communicator) -> Tensor:
        self.seen.append((bucket.step, bucket.index(), list(bucket.names)))
        if self.broken:
            raise ValueError("broken")
        return await super().reduce(bucket, comm)


class Heads(nn.Module):
    """Two heads in one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(6, 4), nn.Linear(6, 4)

    def forward(self, x: Tensor, use: str) -> Any:
        return (self.left(x), self.right(x)) if use == "both" else getattr(self, use)(x)


class Decoder(nn.Module):
    """Its norm and head are one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 6)
        self.norm, self.head = nn.LayerNorm(6), nn.Linear(6, 10)
        self.heads = Heads()

    def forward(self, x: Tensor, use: str = "head") -> Any:
        hidden = self.body(x).tanh()
        if use in ("left", "right", "both"):
            return self.heads(hidden, use)
        hidden = self.norm(hidden)
        return hidden if use == "norm" else self.head(hidden)


def build(shards: int, size: int) -> Any:
    mesh = mesh_of(size // shards, shards)
    torch.manual_seed(0)
    net: Any = Decoder()
    fully_shard(net.body, mesh=mesh)
    fully_shard([net.norm, net.head], mesh=mesh, reshard_after_forward=False)
    fully_shard(net.heads, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def draw(rank: int, step: int) -> Tensor:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(100 * step + rank))


def whole(net: Any, rank: int, step: int) -> None:
    net(draw(rank, step)).square().mean().backward()


def chunked(net: Any, rank: int, step: int, *, syncs: bool = False) -> None:
    """The same as ``whole``: the head has a backward of its own for each chunk."""
    hidden = net(draw(rank, step), "norm")
    leaf = hidden.detach().requires_grad_()
    net.head.set_reshard_after_backward(False)  # torch 2.11 cannot do without
    for chunk, is_last in zip(leaf.chunk(2), (False, True), strict=True):
        net.head.set_requires_gradient_sync(is_last or syncs)
        (net.head(chunk).square().mean() / 2).backward()
    net.head.set_reshard_after_backward(True)
    hidden.backward(leaf.grad)


def two_losses(net: Any, rank: int, step: int) -> None:
    left, right = net(draw(rank, step), "both")
    left.square().mean().backward(retain_graph=True)
    right.square().mean().backward()


def two_forwards(net: Any, rank: int, step: int) -> None:
    x = draw(rank, step).requires_grad_()
    (net(x).square().mean() + net(-x).square().mean()).backward()


def two_checkpoints(net: Any, rank: int, step: int) -> None:
    x = draw(rank, step).requires_grad_()
    halves = [checkpoint(net, half, use_reentrant=True).square().mean() for half in x.chunk(2)]
    sum(halves).backward()


def two_backwards(net: Any, rank: int, step: int) -> None:
    for half in draw(rank, step).chunk(2):
        net(half).square().mean().backward()


def alternate(net: Any, rank: int, step: int) -> None:
    net(draw(rank, step), ("left", "right")[step % 2]).square().mean().backward()


def on_some_ranks(net: Any, rank: int, step: int) -> None:
    net(
        draw(rank, step), "left" if rank == step % dist.get_world_size() else "right"
    ).sum().backward()


Step = Callable[..., None]


def fit(net: Any, rank: int, take: Step, steps: int = 6, kind: Any = torch.optim.SGD) -> None:
    optimizer = kind(net.parameters(), lr=0.1)
    for step in range(steps):
        take(net, rank, step)
        optimizer.step()
        optimizer.zero_grad()


def spread(net: Any, other: Any) -> float:
    pairs = zip(net.parameters(), other.parameters(), strict=True)
    found = [(a.to_local() - b.to_local()).abs().flatten() for a, b in pairs]
    return float(torch.cat(found).detach().max())


# --------------------------------------------------------------------------- a part of a unit each


def chunked_is_whole(rank: int, size: int, shards: int, hooks: list[dict[str, Any]]) -> None:
    for hook in hooks:
        nets, stats, steps = [], [], []
        for take in (whole, chunked):
            nets.append(build(shards, size))
            handle = commhooks.register(nets[-1], hook)
            fit(nets[-1], rank, take)
            stats.append(handle.stats())
            steps.append(handle.state_dict()["step"])
        assert spread(*nets) < 1e-6, hook
        assert [each.steps for each in stats] == steps == [6, 6]
        assert [each.total.gradient_bytes for each in stats] == [stats[0].total.gradient_bytes] * 2
        assert len(stats[1].buckets) == len(stats[0].buckets)


LOCAL = [
    {"name": "diloco", "period": 5},
    {"name": "diloco", "period": 2, "delay": 1, "fragments": 2},
    {"name": "local_sgd", "period": 3},
    {"name": "gossip"},
    {"name": "push_sum"},
]
EXACT = [{"name": "allreduce"}, {"name": "dgc", "density": 1.0}]


@pytest.mark.parametrize(("size", "shards"), [(2, 1), (4, 2)])
def test_a_chunked_loss_trains_as_the_whole_one(run_ranks: Any, size: int, shards: int) -> None:
    run_ranks(chunked_is_whole, size, shards, [*EXACT, *LOCAL], timeout=240)


def watch(rank: int, size: int, take: Step) -> list[tuple[int, int, list[str]]]:
    net = build(size // 2, size)
    hook = Seen()
    handle = commhooks.register(net, hook)
    fit(net, rank, take, 2)
    assert handle.state_dict()["step"] == handle.stats().steps == 2
    return hook.seen


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    ("take", "expected"),
    [
        (chunked, [HEAD, ["norm.weight", "norm.bias"], "body"]),
        (two_losses, ["heads.left", "body", "heads.right"]),
        (two_forwards, [["norm.weight", "norm.bias", *HEAD], "body"]),
        (two_checkpoints, [["norm.weight", "norm.bias", *HEAD], "body"]),
        (two_backwards, [["norm.weight", "norm.bias", *HEAD], "body"]),
    ],
)
def test_a_hook_gets_each_parameter_once_per_step(
    run_ranks: Any, size: int, take: Step, expected: list[Any]
) -> None:
    """Only those that have a gradient, numbered without gaps; more of it is averaged exactly."""
    names = [[f"{e}.weight", f"{e}.bias"] if isinstance(e, str) else e for e in expected]
    steps = [(step, index, each) for step in range(2) for index, each in enumerate(names)]
    for seen in run_ranks(watch, size, take):
        assert seen == steps


def varies(rank: int, size: int, take: Step) -> None:
    """Gradients are the averages, whoever has them; nothing is exchanged of what nobody has."""
    net, plain = build(size // 2, size), build(size // 2, size)
    hook = Seen()
    commhooks.register(net, hook)
    for unit in (plain, plain.body, plain.norm, plain.heads):
        unit.set_reduce_scatter_unused_params(True)
    for other in (net, plain):
        fit(other, rank, take, 3)
    assert spread(net, plain) < 1e-6
    both = [f"heads.{it}" for it in ("left.weight", "left.bias", "right.weight", "right.bias")]
    assert [step for step, *_ in hook.seen] == [0, 0, 1, 1, 2, 2]
    heads = [names for *_, names in hook.seen if "body.bias" not in names]
    if take is alternate:
        assert heads == [both[:2], both[2:], both[:2]]
    else:
        assert heads == [both] * 3


@pytest.mark.skipif(torch.__version__ < "2.13", reason="torch cannot do it alone")
@pytest.mark.parametrize("take", [alternate, on_some_ranks])
def test_ranks_agree_on_what_has_a_gradient(run_ranks: Any, take: Step) -> None:
    run_ranks(varies, 4, take)


# ----------------------------------------------------------------------- the same parameter again


def again_exactly(rank: int, size: int) -> None:
    """What comes again is averaged exactly, also where the optimizer leaves no other trace."""
    for take in (two_losses, two_forwards, two_checkpoints, two_backwards):
        net, plain = build(size // 2, size), build(size // 2, size)
        handle = commhooks.register(net, Seen())
        take(net, rank, 0)
        take(plain, rank, 0)
        for a, b in zip(net.parameters(), plain.parameters(), strict=True):
            if b.grad is not None:
                torch.testing.assert_close(a.grad.to_local(), b.grad.to_local())
        sent = [bucket.wire_bytes for bucket in handle.stats().buckets]
        if take is two_losses:  # with two ranks, a rank sends what it has once
            assert sent == [4 * 56, 2 * 4 * 42]


def test_what_is_reduced_again_is_averaged_exactly(run_ranks: Any) -> None:
    run_ranks(again_exactly, 2)


def refuse(rank: int, size: int, hook: dict[str, Any]) -> None:
    for take in (two_losses, two_checkpoints, two_backwards):
        net = build(size // 2, size)
        handle = commhooks.register(net, hook)
        with pytest.raises(
            commhooks.CommHookError, match=r"another one of (head|body)\.bias,.*sync"
        ):
            take(net, rank, 0)
        net.zero_grad()
        handle.replace("allreduce")
        fit(net, rank, take, 1)


@pytest.mark.parametrize("name", ["diloco", "dgc", "demo", "nested"])
def test_hooks_with_periods_or_momentum_refuse_it(run_ranks: Any, name: str) -> None:
    nested = {"name": "schedule", "stages": [[0, "dgc"]]}
    run_ranks(refuse, 2, nested if name == "nested" else {"name": name})


# ------------------------------------------------------------------------------- when a step begins


def in_backward(net: Any) -> None:
    for parameter in net.parameters():
        one = torch.optim.SGD([parameter], lr=0.1)

        def step(_: Tensor, one: Any = one) -> None:
            one.step()
            one.zero_grad()

        parameter.register_post_accumulate_grad_hook(step)


def by_hand(net: Any) -> None:
    for parameter in net.parameters():
        if parameter.grad is not None:
            parameter.data.sub_(0.1 * parameter.grad)


def count(rank: int, size: int) -> None:
    kinds = {"fused": True}, {"foreach": True}, {"foreach": False}
    for to_none in (True, False):
        for options in (*kinds, None):
            net = build(size // 2, size)
            hook = Seen()
            commhooks.register(net, hook)
            optimizer = torch.optim.AdamW(net.parameters(), **(options or {}))
            for step in range(3):
                chunked(net, rank, step)
                if options is not None:
                    optimizer.step()
                elif step:  # the first is skipped, as a GradScaler does
                    by_hand(net)
                optimizer.zero_grad(set_to_none=to_none)
            assert [step for step, *_ in hook.seen] == [0, 0, 0, 1, 1, 1, 2, 2, 2], (
                options,
                to_none,
            )
    net = build(size // 2, size)
    hook = Seen()
    commhooks.register(net, hook)
    in_backward(net)
    for step in range(3):
        whole(net, rank, step)
    assert [step for step, *_ in hook.seen] == [0, 0, 1, 1, 2, 2]


def test_a_step_begins_when_an_optimizer_has_stepped(run_ranks: Any) -> None:
    run_ranks(count, 2)


def probe(rank: int, size: int) -> None:
    """FSDP does not notice it, but it ends, with the hook's error if there is one."""
    net = build(size // 2, size)
    whole(net, rank, 0)
    net.zero_grad()
    hook = Seen()
    handle = commhooks.register(net, hook)
    for broken in (False, True, False):
        hook.broken = broken and rank == 0
        loss = net.head(draw(rank, 0).requires_grad_()).sum()
        if broken:
            with pytest.raises(commhooks.CommHookError, match="broken"):
                loss.backward()
        else:
            loss.backward()
        net.zero_grad()
    assert handle.state_dict()["step"] == 2
    assert [step for step, *_ in hook.seen] == [0, 1, 1]


@pytest.mark.skipif(torch.__version__ < "2.13", reason="torch cannot run it twice")
def test_a_backward_of_a_part_of_a_unit_is_a_step(run_ranks: Any) -> None:
    run_ranks(probe, 2)


def test_a_model_may_die_in_an_optimizer_step() -> None:
    class Owner:
        pass

    owners = [Owner()]
    on_optimizer_step(owners[0], [])
    end = weakref.finalize(owners[0], str)
    first = register_optimizer_step_post_hook(lambda *_: owners.clear())
    second = register_optimizer_step_post_hook(lambda *_: None)
    try:
        torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1).step()
    finally:
        first.remove()
        second.remove()
    assert not end.alive
