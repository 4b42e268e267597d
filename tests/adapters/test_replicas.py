"""``check_replicas`` notices models that are no longer equal."""

import copy
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from support.of_ranks import gathered
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel

import commhooks
from commhooks import (
    CommHookError,
    CommHookMismatchError,
    CommHookPeerError,
    DistributedDataParallel,
    check_replicas,
)
from commhooks.adapters import replicas
from commhooks.integrations import fsdp
from commhooks.testing import run_ranks
from reducer.peers import close_connections, gloo_of


def make_net(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Parameters of odd sizes, one that is not contiguous and one without elements."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3), nn.Linear(3, 7)).to(dtype)
    net[0].weight = nn.Parameter(net[0].weight.detach().T.contiguous().T)
    net.register_parameter("nothing", nn.Parameter(torch.zeros(0, 3, dtype=dtype)))
    net[2].bias.requires_grad_(False)
    return net


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: int) -> None:
    dtype = next(model.parameters()).dtype
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 5).to(dtype) + rank).sum().backward()
        optimizer.step()


def spoil(parameter: nn.Parameter) -> None:
    """Change the last bit of one number."""
    with torch.no_grad():
        last = parameter[(-1,) * parameter.dim()]
        last.copy_(torch.nextafter(last, torch.tensor(torch.inf, dtype=last.dtype)))


def find(
    rank: int, world_size: int, wrap: Any, bad: int, name: str, dtype: torch.dtype
) -> tuple[str, int]:
    """Return the error, and in which step after the fault it was raised."""
    net = make_net(dtype)
    options = {"find_unused_parameters": True}
    model = wrap(net, **options)
    commhooks.register(model, "int8")
    check_replicas(model, every=3)
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.01)
    train(model, optimizer, rank, 4)
    if rank == bad:
        spoil(dict(net.named_parameters())[name])
    for step in range(10):
        try:
            train(model, optimizer, rank, 1)
        except CommHookMismatchError as error:
            return str(error), step
    return "", -1


@pytest.mark.parametrize("wrap", [DistributedDataParallel, TorchDistributedDataParallel])
@pytest.mark.parametrize(("bad", "name"), [(2, "2.weight"), (0, "0.weight"), (1, "2.bias")])
def test_the_parameter_and_the_ranks_are_named(wrap: Any, bad: int, name: str) -> None:
    different = [1, 2] if bad == 0 else [bad]
    results = run_ranks(find, 3, wrap, bad, name, torch.float32)
    for rank, (text, step) in enumerate(results):
        assert text.startswith(f"[rank {rank}] the models of the ranks differ before step 6, ")
        assert "were equal before step 3. " in text
        assert f"is {name}: ranks {', '.join(map(str, different))} do not have" in text
        assert step == 3  # the forward after that of step 6


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes(dtype: torch.dtype) -> None:
    results = run_ranks(find, 2, DistributedDataParallel, 1, "2.weight", dtype)
    assert all("is 2.weight: ranks 1 do" in text for text, _ in results)


def exchange_two(rank: int, world_size: int) -> str:
    """Parameters with the same numbers, the other way round on one rank."""
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model = DistributedDataParallel(net)
    commhooks.register(model, "allreduce")
    if rank == 1:
        with torch.no_grad():
            first, second = net[0].weight.clone(), net[1].weight.clone()
            net[0].weight.copy_(second)
            net[1].weight.copy_(first)
    with check_replicas(model, every=1):
        model(torch.ones(2, 3))
        with pytest.raises(CommHookMismatchError) as raised:
            model(torch.ones(2, 3))
    model(torch.ones(2, 3))  # the check has ended
    return str(raised.value)


def test_exchanged_parameters() -> None:
    for text in run_ranks(exchange_two, 2):
        assert "before step 0, when they were first compared" in text
        assert "is 0.weight" in text


def equal_for_long(rank: int, world_size: int) -> list[int]:
    """Evaluation, and forwards without gradients, are no steps."""
    net = make_net()
    model = DistributedDataParallel(net, find_unused_parameters=True)
    commhooks.register(model, "powersgd", rank=1, start_step=0)
    check_replicas(model, every=4)
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.01)
    made = replicas._Comparison
    with patch.object(replicas, "_Comparison", side_effect=made) as compared:
        for _ in range(8):
            train(model, optimizer, rank, 1)
            with torch.no_grad():
                model(torch.ones(4, 5))
            if rank == 0:
                model.eval()
                model.module(torch.ones(4, 5))
                model.train()
    return [call.args[2] for call in compared.call_args_list]


def go_back(rank: int, world_size: int) -> str:
    """Load the state of an early step, after which the models differ."""
    net = make_net()
    model = DistributedDataParallel(net, find_unused_parameters=True)
    handle = commhooks.register(model, "int8")
    check_replicas(model, every=10)
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.01)
    train(model, optimizer, rank, 3)
    saved = handle.state_dict()
    train(model, optimizer, rank, 60)
    handle.load_state_dict(saved)
    train(model, optimizer, rank, 1)
    if rank == 1:
        net[2].weight.data += 1.0  # more than rounding in later steps can take back
    with pytest.raises(CommHookMismatchError) as raised:
        train(model, optimizer, rank, 12)
    return str(raised.value)


def test_models_are_compared_after_the_state_of_an_earlier_step_was_loaded() -> None:
    for text in run_ranks(go_back, 2):
        assert "differ before step 13, and were equal before step 3. " in text


def copy_while_comparing(rank: int, world_size: int) -> list[int]:
    """A copy of the model knows nothing of the comparison that is under way."""
    model = DistributedDataParallel(make_net(), find_unused_parameters=True)
    commhooks.register(model, "allreduce")
    check_replicas(model, every=1)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
    train(model, optimizer, rank, 1)
    copied = copy.deepcopy(model)
    train(model, optimizer, rank, 3)
    return [len(copied._forward_pre_hooks), len(model._forward_pre_hooks)]


def test_copying_while_a_comparison_is_under_way() -> None:
    of_ranks = run_ranks(copy_while_comparing, 2)
    assert of_ranks[0] == of_ranks[1]


def test_equal_models_are_compared_now_and_then() -> None:
    assert run_ranks(equal_for_long, 2) == [[0, 4]] * 2


def local_steps(rank: int, world_size: int) -> tuple[int, str]:
    """Compare as long as gradients are averaged; the models may differ later."""
    net = nn.Linear(5, 3)
    model = DistributedDataParallel(net)
    commhooks.register(model, "local_sgd", period=5, start_step=4)
    check_replicas(model, every=1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    train(model, optimizer, rank, 12)
    with torch.no_grad():
        weights = gathered(net.weight)
    assert not torch.equal(weights[0], weights[1])
    return 0, ""


def test_hooks_without_consensus_are_left_alone() -> None:
    run_ranks(local_steps, 2)


def parts_before_local_steps(rank: int, world_size: int) -> str:
    net = nn.Linear(5, 3)
    model = DistributedDataParallel(net)
    commhooks.register(model, "local_sgd", period=5, start_step=4)
    check_replicas(model, every=1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    train(model, optimizer, rank, 1)
    if rank == 1:
        spoil(net.weight)
    with pytest.raises(CommHookMismatchError) as raised:
        train(model, optimizer, rank, 3)
    return str(raised.value)


def test_hooks_without_consensus_say_when_models_are_equal() -> None:
    assert all("is weight" in text for text in run_ranks(parts_before_local_steps, 2))


def hybrid_sharded(rank: int, world_size: int) -> str:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    net = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 4))
    for parameter in net.parameters():
        dist.broadcast(parameter.detach(), 0)
    fully_shard(net, mesh=mesh)
    commhooks.register(net, "bf16")
    check_replicas(net, every=1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    local = replicas._local
    with patch.object(replicas, "_local", side_effect=local) as compared:
        train(net, optimizer, rank, 2)
    # Shards, before FSDP gathers the parameters.
    assert {type(call.args[0]) for call in compared.call_args_list} == {DTensor}
    if rank == 3:
        with torch.no_grad():
            net[1].weight.to_local().add_(1)
    try:
        train(net, optimizer, rank, 2)
    except CommHookMismatchError as error:
        return str(error)
    return ""


def test_replicas_of_shards() -> None:
    """Also those that have other shards learn of it."""
    found = run_ranks(hybrid_sharded, 4, timeout=60)
    assert all("1.weight: ranks 1 do not" in text for text in found)


def ignore_own(rank: int, world_size: int, wrap: Any) -> None:
    net = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 3))
    net[1].own = nn.Parameter(torch.full((3,), float(rank)))
    wrap._set_params_and_buffers_to_ignore_for_model(net, ["1.own"])
    model = wrap(net)
    commhooks.register(model, "allreduce")
    check_replicas(model, every=1)
    trained = [p for name, p in net.named_parameters() if name != "1.own"]
    optimizer = torch.optim.SGD(trained, lr=0.01)
    train(model, optimizer, rank, 3)
    if rank == 1:
        spoil(net[1].bias)
    with pytest.raises(CommHookMismatchError, match=r"is 1\.bias"):
        train(model, optimizer, rank, 2)


@pytest.mark.parametrize("wrap", [DistributedDataParallel, TorchDistributedDataParallel])
def test_ignored_parameters_may_differ(wrap: Any) -> None:
    """They were taken for replicas that part."""
    run_ranks(ignore_own, 2, wrap)


def ignore_own_of_shards(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 3))
    net[1].own = nn.Parameter(torch.full((3,), float(rank)))
    fully_shard(net, mesh=mesh, ignored_params={net[1].own})
    fsdp.register(net, "bf16", ignored_params=[net[1].own])
    check_replicas(net, every=1)
    trained = [p for p in net.parameters() if p is not net[1].own]
    train(net, torch.optim.SGD(trained, lr=0.01), rank, 3)


def test_parameters_that_fsdp_ignores_may_differ() -> None:
    run_ranks(ignore_own_of_shards, 2)


def join_unevenly(rank: int, world_size: int) -> None:
    net = make_net()
    model = DistributedDataParallel(net, find_unused_parameters=True)
    commhooks.register(model, "bf16")
    check_replicas(model, every=1)
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.01)
    train(model, optimizer, rank, 2)
    with model.join():
        train(model, optimizer, rank, 2 + 3 * rank)
    train(model, optimizer, rank, 1)


def test_uneven_inputs() -> None:
    """Ranks without inputs were waited for."""
    run_ranks(join_unevenly, 2)


def compile_wrapper(rank: int, world_size: int) -> None:
    model: Any = DistributedDataParallel(nn.Linear(5, 3))
    compiled: Any = torch.compile(model, backend="eager")
    commhooks.register(compiled, "bf16")
    check_replicas(compiled, every=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    train(compiled, optimizer, rank, 2)
    if rank == 1:
        spoil(model.module.bias)
    with pytest.raises(CommHookMismatchError, match="is bias"):
        train(compiled, optimizer, rank, 2)


@pytest.mark.filterwarnings("ignore")  # of the compiler
def test_a_compiled_wrapper() -> None:
    """The compiler refused the comparison."""
    run_ranks(compile_wrapper, 2)


def lose_rank(rank: int, world_size: int) -> None:
    model = DistributedDataParallel(nn.Linear(5, 3), process_group=dist.new_group([0, 1]))
    commhooks.register(model, "int8")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if rank == 0:  # alone
        check_replicas(model, every=1)
    train(model, optimizer, rank, 1)
    if rank == 1:
        close_connections(gloo_of(model.process_group))
        return
    with pytest.raises(CommHookPeerError, match=r"\[rank 0\] the comparison of the ranks' models"):
        train(model, optimizer, rank, 1)


def test_a_lost_rank() -> None:
    run_ranks(lose_rank, 2)


def misuse(rank: int, world_size: int) -> None:
    model = DistributedDataParallel(nn.Linear(2, 2))
    with pytest.raises(CommHookError, match="expected a model with a hook"):
        check_replicas(model)
    commhooks.register(model, "bf16")
    for every in (0, "3", 2.5):
        with pytest.raises(CommHookError, match=f"integer every >= 1, found {every!r}"):
            check_replicas(model, every=every)


def test_misuse() -> None:
    run_ranks(misuse, 1)


def own_experts(rank: int, world_size: int) -> None:
    """The rank's own expert differs from the others', and only the rest is compared."""
    groups = [dist.new_group([0]), dist.new_group([1])]

    def wrap(is_expert: Any) -> Any:
        net = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 3))
        key = {"group_key": is_expert, "key_process_groups": {True: groups[rank]}}
        return DistributedDataParallel(net, hook="allreduce", **key)

    model = wrap(lambda name, _: name.startswith("1."))
    check_replicas(model, every=1)
    with torch.no_grad():
        model.module[1].weight.fill_(float(rank))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    train(model, optimizer, rank, 4)
    if rank == 1:
        spoil(model.module[0].bias)
    with pytest.raises(CommHookMismatchError, match=r"is 0\.bias"):
        train(model, optimizer, rank, 2)
    with pytest.raises(CommHookError, match="expected a parameter that is averaged over all ranks"):
        check_replicas(wrap(lambda *_: True))


def test_parameters_with_a_process_group_of_their_own_may_differ() -> None:
    run_ranks(own_experts, 2)
