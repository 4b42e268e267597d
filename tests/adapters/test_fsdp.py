"""Hooks between the replicas of models that ``fully_shard`` has sharded."""

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.of_ranks import same_on_all_ranks
from support.pages import blocks_of
from support.sharded import FEATURES, Net, build, mesh_of, train
from support.states import of_rank
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import commhooks
from commhooks.adapters.fsdp.units import _groups, units_of
from commhooks.algorithms.averaging.diloco import DiLoCo
from commhooks.algorithms.exact import AllReduce
from commhooks.hook.base import has_consensus
from commhooks.integrations import fsdp

SAMPLE = ["reduce in float16", "no all-reduce", "tied parameters", "reentrant checkpoints"]


@dataclass
class Exact(AllReduce):
    """``allreduce`` as any other hook, in buckets; keeps what it was told."""

    seen: list[tuple[int, int, bool, list[str]]] = field(
        default_factory=list, init=False, repr=False, compare=False
    )
    broken: bool = field(default=False, init=False, compare=False)

    async def reduce(self, bucket: commhooks.GradBucket, comm: commhooks.Communicator) -> Tensor:
        self.seen.append((comm.step, bucket.index(), bucket.is_last(), list(bucket.names)))
        average = await super().reduce(bucket, comm)
        if self.broken and bucket.index() == 1:
            raise ValueError("broken")
        return average


def same_numbers(rank: int, size: int, shards: int, names: list[str], hook: Any) -> None:
    replicas = size // shards
    mesh = mesh_of(replicas, shards)
    for name in names:
        feature = FEATURES[name]
        expected = train(build(mesh, feature), rank, 2, feature)
        for on_one_dimension in (False, True):
            if on_one_dimension:
                net = build(mesh["shard"], feature)
                fsdp.register(net, hook(), replicate_group=mesh.get_group("replicate"))
            else:
                net = build(mesh, feature)
                commhooks.register(net, hook())
            found = train(net, rank, 2, feature)
            for a, b in zip(found, expected, strict=True):
                assert torch.equal(a, b), (name, on_one_dimension)


def warn_of_unmanaged(rank: int, size: int) -> None:
    mesh = mesh_of(size, 1)

    def step(net: Any) -> None:
        net(torch.full((2, 7), rank + 1.0)).sum().backward()

    class Adapted(Net):
        def forward(self, hidden: Tensor) -> Tensor:
            return super().forward(hidden) + sum(p.sum() for p in self.adapters)

    def sharded(ignored: list[nn.Parameter]) -> Any:
        torch.manual_seed(0)
        net = Adapted(FEATURES[SAMPLE[0]])
        net.adapters = nn.ParameterList(ignored)
        for module in (*net.blocks, net):
            fully_shard(module, mesh=mesh, ignored_params=set(ignored))
        return net

    ignored = [nn.Parameter(torch.ones(2))]
    net = sharded(ignored)
    with pytest.warns(UserWarning, match=r"manages adapters.0: .*ignored_params"):
        commhooks.register(net, "int8", block_size=64)
    net = sharded(ignored)
    fsdp.register(net, "int8", block_size=64, ignored_params=ignored)
    step(net)
    net.adapters.append(nn.Parameter(torch.ones(2)))
    with pytest.warns(UserWarning, match=r"manages adapters.1: ") as caught:
        step(net)
    assert len(caught) == 1
    step(net)
    net.adapters.append(nn.Parameter(torch.ones(2)))
    with pytest.warns(UserWarning, match=r"manages adapters.2: "):
        step(net)


def test_parameters_without_a_unit_warn_once(run_ranks: Any) -> None:
    run_ranks(warn_of_unmanaged, 2)


@pytest.mark.exhaustive  # test_averages_are_native has four ranks
def test_allreduce_is_native_on_three_replicas(run_ranks: Any) -> None:
    run_ranks(same_numbers, 3, 1, SAMPLE, AllReduce)


def test_averages_are_native(run_ranks: Any) -> None:
    run_ranks(same_numbers, 4, 2, SAMPLE, Exact)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("size", "shards", "hook"),
    [(4, 2, AllReduce), (4, 2, Exact), (3, 1, AllReduce), (3, 3, AllReduce), (3, 3, Exact)],
)
def test_everything_that_people_set(run_ranks: Any, size: int, shards: int, hook: Any) -> None:
    run_ranks(same_numbers, size, shards, list(FEATURES), hook, timeout=240)


# ------------------------------------------------------------------------------ hooks and handles


def handles(rank: int, size: int) -> None:
    mesh = mesh_of(2, 2)
    hook = Exact()
    net = build(mesh)
    handle = commhooks.register(net, hook)
    assert commhooks.handle_of(net) is handle
    train(net, rank, 2)
    names = [f"blocks.1.{name}" for name in ("up.weight", "up.bias", "down.weight")]
    names += ["blocks.1.spare.weight", "blocks.1.spare.bias"]
    assert hook.seen[0] == (0, 0, False, names)
    assert [seen[:3] for seen in hook.seen[3:]] == [(1, 0, False), (1, 1, False), (1, 2, False)]
    stats = handle.stats()
    assert stats.steps == 2
    assert [bucket.index for bucket in stats.buckets] == [0, 1, 2]
    assert stats.total.ratio == 1

    with pytest.raises(commhooks.CommHookError, match="has a hook already"):
        commhooks.register(net, "int8")
    with pytest.raises(commhooks.CommHookError, match="a torch-style function"):
        handle.replace(lambda state, bucket: None)
    with pytest.raises(commhooks.CommHookError, match="which steps to skip"):
        handle.replace("skip_nonfinite")
    with pytest.raises(commhooks.CommHookMismatchError, match="found on rank 0"):
        handle.replace(("int8", "int4")[rank % 2])  # the same in each column
    assert handle.hook is hook

    handle.replace("int8")
    train(net, rank, 1)
    assert handle.stats().steps == 1
    assert handle.stats().total.ratio > 1.5
    handle.remove()
    assert commhooks.handle_of(net) is None
    again = commhooks.register(net, "local_sgd", period=2)
    train(net, rank, 1)
    again.remove()  # averages the replicas
    net = build(mesh)
    commhooks.register(net, "allreduce").remove()
    sharded = build(mesh["shard"])
    group = mesh.get_group("replicate")
    for _ in range(2):  # a hook can be registered again
        handle = fsdp.register(sharded, "int8", replicate_group=group)
        found = [commhooks.handle_of(it) for it in (sharded.blocks[1], nn.ModuleList([sharded]))]
        assert found == [handle] * 2
        for again in (fsdp.register, commhooks.register):
            with pytest.raises(commhooks.CommHookError, match="has a hook already"):
                again(sharded, "int8")
        with pytest.raises(commhooks.CommHookError, match="has a hook already"):
            fsdp.register(sharded, "int8", replicate_group=group)
        train(sharded, rank, 1)
        assert handle.stats().steps == 1
        assert handle.state_dict()["step"] == 1
        handle.remove()
    for a, b in zip(train(net, rank, 2), train(build(mesh), rank, 2), strict=True):
        assert torch.equal(a, b)


def test_handles(run_ranks: Any) -> None:
    run_ranks(handles, 4)


def resume(rank: int, size: int, hooks: list[dict[str, Any]]) -> None:
    mesh = mesh_of(2, 2)
    for hook in hooks:
        nets, handles = [], []
        for _ in range(2):
            nets.append(build(mesh))
            handles.append(commhooks.register(nets[-1], hook))
        train(nets[0], rank, 2)
        nets[1].load_state_dict(nets[0].state_dict())
        saved = handles[0].state_dict()
        assert saved["state"].keys() == {f"rank {rank} of 2x2", f"shard {rank % 2} of 2x2"}
        assert saved["step"] == 2
        handles[1].load_state_dict(saved)
        for a, b in zip(train(nets[0], rank, 2), train(nets[1], rank, 2), strict=True):
            assert torch.equal(a, b), hook
        if hook["name"] == "int8":
            error = of_rank(saved)["blocks.0.spare.weight"]["error"]
            assert error.shape == (2, 7)  # of 3 rows, on both shards
        of_other_shard = {**saved, "state": {f"rank {rank ^ 1} of 2x2": of_rank(saved)}}
        with pytest.raises(
            commhooks.CommHookStateError, match="the states of all ranks that saved"
        ):
            handles[1].load_state_dict(of_other_shard if rank == 3 else saved)


def test_a_resumed_run_is_the_same_to_the_bit(run_ranks: Any) -> None:
    diloco = {"name": "diloco", "period": 1, "delay": 1, "fragments": 2, "inner": "int8"}
    powersgd = {"name": "powersgd", "rank": 1, "start_step": 1}
    run_ranks(resume, 4, [{"name": "int8"}, powersgd, diloco])


def train_as_nodes(rank: int, size: int) -> None:
    options = {"period": 2, "delay": 1, "merge": 0.5}
    net = build(mesh_of(2, 2))
    commhooks.register(net, "diloco", **options)
    train(net, rank, 6)
    torch.manual_seed(0)
    plain = commhooks.DistributedDataParallel(Net(FEATURES["units"]))
    commhooks.register(plain, "diloco", ranks_per_node=2, **options)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    for step in range(6):
        draw = torch.Generator().manual_seed(100 * step + 10 * rank + True)
        optimizer.zero_grad()
        plain(torch.randn(4, 7, generator=draw)).square().mean().backward()
        optimizer.step()
    expected = dict(plain.module.named_parameters())
    for name, parameter in net.named_parameters():
        torch.testing.assert_close(parameter.full_tensor(), expected[name])


def test_diloco_trains_replicas_as_it_trains_nodes(run_ranks: Any) -> None:
    """The shards of a replica average their gradients in each step, as the ranks of a node do."""
    run_ranks(train_as_nodes, 4)


def divide_into_fragments(rank: int, size: int) -> None:
    net = build(mesh_of(2, 2))
    units = {tuple(unit.parameters()) for unit in units_of(net)}
    with pytest.raises(commhooks.CommHookError, match="as units of the sharded model, 3, found"):
        commhooks.register(net, "diloco", fragments=4)
    inner = Exact()
    commhooks.register(net, DiLoCo(period=3, fragments=2, inner=inner))
    train(net, rank, 7)
    assert {tuple(names) for *_, names in inner.seen} == units
    assert len(inner.seen) == 2 * len(units)  # one exchange each in two periods


def test_fragments_are_units(run_ranks: Any) -> None:
    run_ranks(divide_into_fragments, 4)


def fail(rank: int, size: int, shards: int) -> None:
    net = build(mesh_of(size // shards, shards))
    hook = Exact()
    handle = commhooks.register(net, hook)
    train(net, rank, 1)
    hook.broken = rank == 0
    with pytest.raises(commhooks.CommHookError, match="ValueError: broken") as raised:
        train(net, rank, 1)
    assert isinstance(raised.value, commhooks.CommHookPeerError) == (rank != 0)
    hook.broken = False
    net.zero_grad()
    train(net, rank, 1)
    assert handle.state_dict()["step"] == 2


@pytest.mark.parametrize(("size", "shards"), [(4, 2), (3, 3)])
def test_a_hook_that_fails_on_one_rank_ends_the_step_on_all(
    run_ranks: Any, size: int, shards: int
) -> None:
    run_ranks(fail, size, shards)


def differ(rank: int, size: int, is_old: bool) -> None:
    """Parameters that only one replica uses get the average on both, instead of an abort."""
    mesh = mesh_of(2, 1)
    net = build(mesh)
    if is_old:  # as torch 2.12
        for module in (net, *net.blocks):
            for group in _groups(module._get_fsdp_state()):
                vars(group).pop("reduce_scatter_unused_params", None)
    commhooks.register(net, "int8")
    for _ in range(2):
        net.uses_spare = rank == 0
        net(torch.ones(2, 7)).sum().backward()
        grads = [block.spare.weight.grad.to_local() for block in net.blocks]
        others = [torch.empty_like(grad) for grad in grads]
        for grad, other in zip(grads, others, strict=True):
            dist.all_reduce(other.copy_(grad), dist.ReduceOp.MAX)
            assert torch.equal(grad, other)
            assert grad.abs().sum() > 0
        net.zero_grad()


@pytest.mark.parametrize(
    "is_old",
    [
        False,
        pytest.param(
            True,
            marks=pytest.mark.skipif(
                torch.__version__ >= "2.14", reason="this torch cannot do without its own zeros"
            ),
        ),
    ],
)
def test_replicas_may_use_different_parameters(run_ranks: Any, is_old: bool) -> None:
    run_ranks(differ, 2, is_old)


def refuse(rank: int, size: int) -> None:
    mesh = mesh_of(2, 1)
    flat = build(mesh["shard"])
    with pytest.raises(commhooks.CommHookError, match="no replicas to average over"):
        commhooks.register(flat, "int8")
    with pytest.raises(commhooks.CommHookError, match="without replicate_group"):
        fsdp.register(build(mesh), "int8", replicate_group=mesh.get_group("replicate"))
    net = build(mesh)
    net(torch.ones(1, 7))
    with pytest.raises(commhooks.CommHookError, match="the root module"):
        commhooks.register(net.blocks[0], "int8")
    net = build(mesh)
    if rank == 1:
        net.output.bias.requires_grad_(False)
    with pytest.raises(
        commhooks.CommHookMismatchError,
        match=rf"\[rank {rank}\] .* 0: 'output.bias' of .* rank 1: 'blocks.0.up.*freeze",
    ):
        commhooks.register(net, "int8")


def test_what_cannot_work_is_refused(run_ranks: Any) -> None:
    run_ranks(refuse, 2)


def refuse_two_groups(rank: int, size: int) -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for layer, mesh in zip(net, (mesh_of(2, 2), mesh_of(4, 1)), strict=True):
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh_of(2, 2))
    pair = re.escape(str([rank % 2, rank % 2 + 2]))
    message = rf"one group of replicas .* the ranks {pair}, \[0, 1, 2, 3\]; a hook"
    dist.barrier()  # a rank that ends may close connections while others still make theirs
    with pytest.raises(commhooks.CommHookError, match=message):
        commhooks.register(net, "int8")


def test_one_model_has_one_group_of_replicas(run_ranks: Any) -> None:
    run_ranks(refuse_two_groups, 4)


def train_each(rank: int, size: int, hooks: list[dict[str, Any]]) -> None:
    mesh = mesh_of(2, 2)
    replicas = mesh.get_group("replicate")
    for hook in hooks:
        net = build(mesh)
        handle = commhooks.register(net, hook)
        train(net, rank, 3)
        assert handle.stats().steps == 3, hook
        for parameter in net.parameters():
            assert parameter.to_local().isfinite().all(), hook
            if has_consensus(handle.hook):
                ours = parameter.to_local()
                assert same_on_all_ranks(ours, replicas), hook


NEEDS: dict[str, Any] = {
    "guard": {"inner": "int8", "max_error": 0.01, "every": 1},
    "hierarchical": {"ranks_per_node": 2},
    "route": {"rules": [["*.bias", "bf16"]], "default": "int8"},
    "schedule": {"stages": [[0, "allreduce"], [1, "int4"]]},
}


@pytest.mark.exhaustive
def test_every_hook_trains(run_ranks: Any) -> None:
    names = sorted(commhooks.algorithms.HOOKS.keys() - {"skip_nonfinite"})
    hooks = [{"name": name, **NEEDS.get(name, {})} for name in names]
    run_ranks(train_each, 4, hooks, timeout=240)


def trace_and_return(rank: int, size: int, folder: Path) -> None:
    mesh = mesh_of(2, 2)
    net = build(mesh["shard"])
    handle = fsdp.register(net, "int8", replicate_group=mesh.get_group("replicate"))
    with handle.trace(folder / "step.json") as written:
        train(net, rank, 2)
    events = json.loads(written.read_text())["traceEvents"]
    names = [event["name"] for event in events]
    assert names.count("int8") == 2 * 3
    assert names.count("all_to_all") == 2 * 3
    assert "backward, step 1" in names
    handle.remove()
    again = fsdp.register(net, Exact(), replicate_group=mesh.get_group("replicate"))
    train(net, rank, 1)
    assert again.stats().steps == 1


def test_traces_and_a_second_registration(run_ranks: Any, tmp_path: Path) -> None:
    run_ranks(trace_and_return, 4, tmp_path)
    assert len(list(tmp_path.iterdir())) == 4


def follow_page(rank: int, size: int, blocks: list[str]) -> None:
    names: dict[str, Any] = {}
    for block in blocks:
        if "fully_shard" in block:
            torch.manual_seed(0)
            names["model"] = Net(FEATURES["units"])
        exec(block, names)
        train(names["model"], rank, 1)
    assert names["handle"].stats().total.ratio > 1.5


def test_the_page_works(run_ranks: Any) -> None:
    blocks = blocks_of("integrations/fsdp.md")
    assert len(blocks) == 3
    run_ranks(follow_page, 4, blocks)


def replicate_twice(rank: int, size: int) -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("replicate",))
    seen = []
    for hook in (None, AllReduce(), Exact()):
        torch.manual_seed(0)
        net = Net(FEATURES["units"])
        for block in net.blocks:
            replicate(block, mesh=mesh)
        replicate(net, mesh=mesh)
        if hook is not None:
            commhooks.register(net, hook)
        seen.append(train(net, rank, 2))
    for native, *others in zip(*seen, strict=True):
        assert all(torch.equal(native, other) for other in others)


def test_replicate_of_fsdp2(run_ranks: Any) -> None:
    run_ranks(replicate_twice, 2)


# ------------------------------------------------------------------ complex and sparse gradients


class Phases(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.phases = nn.Parameter(torch.randn(3, 4, dtype=dtype))
        self.bias = nn.Parameter(torch.randn(4, dtype=dtype))

    def forward(self, waves: Tensor) -> Tensor:
        return (self.phases * waves + self.bias).abs().square().sum()


def train_complex(net: nn.Module, rank: int, dtype: torch.dtype, steps: range) -> list[Tensor]:
    gradients = []
    for step in steps:
        net.zero_grad()
        seed = torch.Generator().manual_seed(100 * step + rank)
        net(torch.randn(3, 4, dtype=dtype, generator=seed)).backward()
        gradients += [parameter.grad.full_tensor() for parameter in net.parameters()]
    return gradients


def use_complex(rank: int, size: int, shards: int, dtype: torch.dtype) -> None:
    mesh = mesh_of(size // shards, shards)

    def make(hook: Any) -> tuple[nn.Module, commhooks.HookHandle]:
        net = fully_shard(Phases(dtype), mesh=mesh)
        return net, commhooks.register(net, hook)

    expected = train_complex(fully_shard(Phases(dtype), mesh=mesh), rank, dtype, range(2))
    for hook in (AllReduce(), Exact()):
        net, handle = make(hook)
        found = train_complex(net, rank, dtype, range(2))
        torch.testing.assert_close(found, expected)
        shard = sum(p.to_local().numel() for p in net.parameters()) * dtype.itemsize
        padded = (2 if shards == 2 else 3) * 4 + (2 if shards == 2 else 4)
        assert shard <= handle.stats().total.gradient_bytes == padded * dtype.itemsize
    net, handle = make("onebit")
    train_complex(net, rank, dtype, range(2))
    saved = handle.state_dict()
    again, other = make("onebit")
    other.load_state_dict(saved)
    resumed = [train_complex(each, rank, dtype, range(2, 4)) for each in (net, again)]
    assert all(torch.equal(a, b) for a, b in zip(*resumed, strict=True))


@pytest.mark.covering(2)
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
@pytest.mark.parametrize(("size", "shards"), [(2, 1), (4, 2)])
def test_complex_parameters(run_ranks: Any, size: int, shards: int, dtype: torch.dtype) -> None:
    """Hooks raised at the first backward."""
    run_ranks(use_complex, size, shards, dtype)


def refuse_sparse(rank: int, size: int) -> None:
    class Words(nn.Module):
        def __init__(self, sparse: bool) -> None:
            super().__init__()
            self.frozen = nn.Embedding(4, 2, sparse=True).requires_grad_(False)
            self.words = nn.Embedding(4, 2, sparse=sparse)

        def forward(self, words: Tensor) -> Tensor:
            return (self.words(words) + self.frozen(words)).sum()

    net = fully_shard(Words(sparse=True), mesh=mesh_of(size, 1))
    with pytest.raises(commhooks.CommHookError, match=r"gradients of words.weight are .*=False"):
        commhooks.register(net, "int8")
    net = fully_shard(Words(sparse=False), mesh=mesh_of(size, 1))
    commhooks.register(net, "int8")
    net(torch.tensor([rank])).backward()


def test_sparse_gradients_are_refused(run_ranks: Any) -> None:
    """FSDP fails in the first backward."""
    run_ranks(refuse_sparse, 2)
