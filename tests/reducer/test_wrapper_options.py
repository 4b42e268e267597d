"""Newer arguments of the wrapper, group keys, and process groups of parameters."""

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.of_ranks import same_on_all_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import commhooks
from commhooks.testing import run_ranks
from reducer import DistributedDataParallel

WRAPPERS = (DistributedDataParallel, TorchDDP)


def make_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(6, 6) for _ in range(5)])


def inputs_of(rank: int, step: int = 0) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * rank + step))


def bucket_names(model: DistributedDataParallel) -> list[list[str]]:
    return [bucket["names"] for bucket in model.reducer.bucket_stats()]


def assert_averaged(model: nn.Module, world_size: int, steps: int = 2) -> None:
    """Train some steps; assert that gradients equal the mean over ranks."""
    reference = make_net()
    for step in range(steps):
        model.zero_grad()
        model(inputs_of(dist.get_rank(), step)).square().mean().backward()
        reference.zero_grad()
        for peer in range(world_size):
            (reference(inputs_of(peer, step)).square().mean() / world_size).backward()
        for ours, theirs in zip(model.module.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad)


def cap_list(rank: int, world_size: int) -> None:
    layer = (36 + 6) * 4 / 2**20
    model = DistributedDataParallel(make_net(), bucket_cap_mb_list=[layer, 2 * layer])
    assert [len(names) for names in bucket_names(model)] == [2, 4, 4]
    assert_averaged(model, world_size)
    assert [len(names) for names in bucket_names(model)] == [2, 4, 4]
    assert model.bucket_bytes_cap == int(2 * layer * 2**20)


def test_bucket_cap_list() -> None:
    run_ranks(cap_list, 2)


def no_room(rank: int, world_size: int) -> None:
    model = DistributedDataParallel(make_net(), bucket_cap_mb=0)
    for _ in range(3):
        assert_averaged(model, world_size)
    assert [len(names) for names in bucket_names(model)] == [1] * len(list(model.parameters()))


def test_without_room_each_parameter_has_a_bucket() -> None:
    run_ranks(no_room, 2)


def delayed(rank: int, world_size: int, hook: str) -> None:
    net = make_net()
    late = [(name, p) for name, p in net.named_parameters() if name.startswith(("4.", "3."))]
    model = DistributedDataParallel(
        net, delay_all_reduce_named_params=late, param_to_hook_all_reduce=late[0][1]
    )
    handle = commhooks.register(model, hook)
    assert_averaged(model, world_size)
    assert sorted(bucket_names(model)[-1]) == ["3.bias", "3.weight", "4.bias", "4.weight"]
    assert len(bucket_names(model)) == 2
    assert len(handle.stats().buckets) == 2  # the hook averages all of them


@pytest.mark.parametrize("hook", ["allreduce", "powersgd"])
def test_delayed_parameters_are_averaged_last_by_the_hook(hook: str) -> None:
    run_ranks(delayed, 2, hook)


def lazy(rank: int, world_size: int, view: bool) -> None:
    model = DistributedDataParallel(
        make_net(), lazy_bucket_allocation=True, gradient_as_bucket_view=view
    )
    assert_averaged(model, world_size, steps=3)


@pytest.mark.parametrize("view", [False, True])
def test_lazy_bucket_allocation(view: bool) -> None:
    run_ranks(lazy, 2, view)


def holders_between_steps(rank: int, world_size: int, lazy: bool, view: bool) -> int:
    """Return how many others hold the memory of a bucket after a step."""
    net = nn.Linear(3, 2)
    model = DistributedDataParallel(net, lazy_bucket_allocation=lazy, gradient_as_bucket_view=view)
    kept: list[torch.UntypedStorage] = []

    def hook(_: None, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        kept.append(bucket.buffer().untyped_storage())
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    model.register_comm_hook(None, hook)
    model(torch.ones(1, 3)).sum().backward()
    return torch._C._storage_Use_Count(kept[0]._cdata) - 1


def test_lazy_bucket_allocation_frees_memory_between_steps() -> None:
    assert run_ranks(holders_between_steps, 1, True, False) == [0]
    assert run_ranks(holders_between_steps, 1, False, False) > [0]
    assert run_ranks(holders_between_steps, 1, True, True) > [0]  # gradients are views of it


def skip_unused(rank: int, world_size: int, skip: bool) -> list[int]:
    model = DistributedDataParallel(
        make_net(),
        find_unused_parameters=True,
        skip_all_reduce_unused_params=skip,
        bucket_cap_mb=0.0001,
    )
    calls: list[tuple[int, bool]] = []

    def hook(group: dist.ProcessGroup, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        calls.append((bucket.index(), bucket.is_last()))
        buffer = bucket.buffer().div_(world_size)
        work = dist.all_reduce(buffer, group=group, async_op=True)
        return work.get_future().then(lambda f: f.value()[0])

    model.register_comm_hook(dist.group.WORLD, hook)
    model.module.forward = lambda x: model.module[4](model.module[0](x))
    model(inputs_of(rank)).sum().backward()
    assert model.module[2].weight.grad is None
    assert [last for _, last in calls] == [False] * (len(calls) - 1) + [True]
    assert model._get_ddp_logging_data()["num_buckets_reduced"] == len(calls)
    return [index for index, _ in calls]


def test_unused_buckets_are_skipped_on_request() -> None:
    assert run_ranks(skip_unused, 2, True) == [[0, 1]] * 2
    assert run_ranks(skip_unused, 2, False) == [list(range(5))] * 2


def rebuild_under_find_unused(rank: int, world_size: int) -> None:
    class Backwards(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = make_net()
            self.spare = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in reversed(self.layers):
                x = layer(x)
            return x

    model = DistributedDataParallel(Backwards(), find_unused_parameters=True, bucket_cap_mb=0.0001)
    plans = []
    for step in range(4):
        model.zero_grad()
        model(inputs_of(rank, step)).sum().backward()
        plans.append(bucket_names(model))
    assert plans[0] == plans[1]
    assert plans[1] != plans[2]
    assert plans[2] == plans[3]
    used = [name for names in plans[3] for name in names if "spare" not in name]
    assert [name.split(".")[1] for name in used] == [str(i // 2) for i in range(10)]
    assert model.reducer.has_rebuilt_buckets


def test_buckets_are_rebuilt_under_find_unused_when_the_order_is_stable() -> None:
    run_ranks(rebuild_under_find_unused, 2)


def different_use(rank: int, world_size: int) -> None:
    """Gradients arrive in the same order on both ranks, but rank 1 has fewer."""
    net = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False))
    model = DistributedDataParallel(net, find_unused_parameters=True)
    if rank == 1:
        net.forward = net[0].forward
    for step in range(5):
        model(inputs_of(rank, step)).sum().backward()
    assert not model.reducer.has_rebuilt_buckets


def test_buckets_are_not_rebuilt_if_ranks_use_different_parameters() -> None:
    run_ranks(different_use, 2)


def keys(rank: int, world_size: int) -> None:
    model = DistributedDataParallel(make_net(), group_key=lambda name, _: name.endswith("bias"))
    assert_averaged(model, world_size)
    kinds = [{name.split(".")[1] for name in names} for names in bucket_names(model)]
    assert sorted(kinds, key=str) == [{"bias"}, {"weight"}]
    model.reducer.set_keys([index // 4 for index in range(10)])  # between two steps
    assert len(bucket_names(model)) == 3
    assert_averaged(model, world_size)
    with pytest.raises(ValueError, match="one key for each of the 10 parameters, found 3"):
        model.reducer.set_keys([1, 2, 3])


def test_keys_can_be_changed() -> None:
    run_ranks(keys, 2)


def experts(rank: int, world_size: int, hook: str) -> None:
    """Layer 2 is an expert: ranks 0 and 2 have the same one, ranks 1 and 3 another one."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    torch.manual_seed(0)
    net = make_net()
    expert = net[2].weight.detach() + rank % 2
    with torch.no_grad():
        net[2].weight.add_(rank)
    model = DistributedDataParallel(
        net,
        group_key=lambda name, _: "expert" if name.startswith("2.") else "shared",
        key_process_groups={"expert": groups[rank % 2]},
        bucket_cap_mb=0.0001,
    )
    handle = commhooks.register(model, hook)
    assert torch.equal(net[2].weight, expert)  # broadcast among the ranks that have it
    for step in range(2):
        model.zero_grad()
        model(inputs_of(rank, step)).square().mean().backward()
    of_ranks: list[Any] = [None] * world_size
    dist.all_gather_object(of_ranks, [p.grad.clone() for p in net.parameters()])
    for other in range(world_size):
        for (name, _), a, b in zip(
            net.named_parameters(), of_ranks[rank], of_ranks[other], strict=True
        ):
            is_shared = not name.startswith("2.") or (rank - other) % 2 == 0
            assert torch.equal(a, b) == is_shared, (name, rank, other)
    assert handle.stats().total.wire_bytes > 0
    assert "over 2 ranks" in model.bucket_plan()
    assert "over 4 ranks" in model.bucket_plan()


@pytest.mark.parametrize("hook", ["allreduce", "powersgd"])
def test_experts_with_their_own_process_group(hook: str) -> None:
    run_ranks(experts, 4, hook)


def expert_that_only_one_group_uses(rank: int, world_size: int) -> None:
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    net = make_net()
    model = DistributedDataParallel(
        net,
        find_unused_parameters=True,
        group_key=lambda name, _: name.startswith("2."),
        key_process_groups={True: groups[rank % 2]},
    )
    if rank != 0:
        net.forward = lambda x: net[0](x)
    model(inputs_of(rank)).sum().backward()
    assert (net[2].weight.grad is None) == (rank % 2 == 1)
    assert net[4].weight.grad is not None


def test_unused_experts_do_not_change() -> None:
    run_ranks(expert_that_only_one_group_uses, 4)


def mesh(rank: int, world_size: int) -> None:
    flat = init_device_mesh("cpu", (world_size,))
    assert_averaged(DistributedDataParallel(make_net(), device_mesh=flat), world_size)
    with pytest.raises(RuntimeError, match="Only 1D device mesh is supported"):
        DistributedDataParallel(make_net(), device_mesh=init_device_mesh("cpu", (2, 1)))
    with pytest.raises(RuntimeError, match="Cannot specify both process_group and device_mesh"):
        DistributedDataParallel(make_net(), device_mesh=flat, process_group=dist.group.WORLD)


def test_device_mesh() -> None:
    run_ranks(mesh, 2)


def no_init_sync(rank: int, world_size: int) -> None:
    net = make_net()
    with torch.no_grad():
        net[0].weight.add_(rank)
    DistributedDataParallel(net, init_sync=False)
    assert not same_on_all_ranks(net[0].weight)


def test_init_sync_can_be_disabled() -> None:
    run_ranks(no_init_sync, 2)


def manual(rank: int, world_size: int, delay: bool) -> None:
    net = make_net()
    options: dict[str, Any] = {}
    if delay:  # torch has no reducer then, and raises
        options["delay_all_reduce_named_params"] = list(net.named_parameters())
        options["param_to_hook_all_reduce"] = net[0].weight
    model = DistributedDataParallel(net, **options)
    assert model.require_manual_backward_finalization is False
    model._check_manual_backward_finalization_supported()
    model.require_manual_backward_finalization = True
    reference = DistributedDataParallel(make_net())
    for step in range(3):
        for m in (model, reference):
            m.zero_grad()
            m(inputs_of(rank, step)).sum().backward()
        model.finalize_backward()
        assert torch.equal(model.module[0].weight.grad, reference.module[0].weight.grad)
    with pytest.raises(RuntimeError, match="waits to be finalized"):
        model.finalize_backward()
    assert model.should_finalize_after_backward
    assert not reference.should_finalize_after_backward
    assert reference._has_rebuilt_buckets
    model(inputs_of(rank)).sum().backward()
    with pytest.raises(RuntimeError, match=r"call finalize_backward\(\)"):
        model(inputs_of(rank))
    model.finalize_backward()


@pytest.mark.parametrize("delay", [False, True])
def test_manual_finalization(delay: bool) -> None:
    run_ranks(manual, 2, delay)


def update_group(rank: int, world_size: int) -> None:
    group = dist.new_group([0, 1])
    model = DistributedDataParallel(make_net())
    assert_averaged(model, world_size)
    model._update_process_group(group)
    if rank < 2:
        assert_averaged(model, 2, steps=3)
    else:
        assert model.process_group is dist.group.WORLD


def test_update_process_group() -> None:
    run_ranks(update_group, 3)


def torch_hook_before_and_after(rank: int, world_size: int) -> None:
    calls: list[str] = []

    def hook(state: str, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        calls.append(state)
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    model = DistributedDataParallel(make_net())
    model.register_comm_hook("before", hook)
    model.hook_registration.install(
        functools.partial(hook, "between"),
        averages_gradients=False,
        on_overwrite=lambda: calls.append("overwrite"),
    )
    model._update_process_group(dist.new_group([0]))
    assert model.hook_registration.averages_gradients
    model.join_hook().post_hook(is_last_joiner=True)
    model(inputs_of(0)).sum().backward()
    model.register_comm_hook("after", hook)
    model(inputs_of(0)).sum().backward()
    assert calls == ["after"]


def test_a_change_of_the_process_group_removes_the_hook() -> None:
    run_ranks(torch_hook_before_and_after, 1)


def update_group_under_a_hook(rank: int, world_size: int) -> None:
    """Without the hook, gradients are averaged over the new group."""
    groups = [dist.new_group([0, 1]), dist.new_group([2])]
    model = DistributedDataParallel(make_net())
    handle = commhooks.register(model, "bf16")
    model._update_process_group(groups[rank // 2])
    handle.remove()
    (model(inputs_of(0)) * rank).sum().backward()
    rows = len(inputs_of(0))
    assert model.module[4].bias.grad.unique().item() == rows * (2.0 if rank == 2 else 0.5)


def replace_after_a_change(rank: int, world_size: int) -> None:
    groups = [dist.new_group([0, 1]), dist.new_group([2])]
    model = DistributedDataParallel(make_net())
    handle = commhooks.register(model, "int8")
    model._update_process_group(groups[rank // 2])
    with pytest.raises(commhooks.CommHookError, match=r"use replace\(\) of its handle"):
        commhooks.register(model, "noop")
    handle.replace("noop")
    for _ in range(3):
        model.zero_grad()
        (model(inputs_of(0)) * rank).sum().backward()
        assert model.module[4].bias.grad.unique().item() == len(inputs_of(0)) * rank


def test_replacing_a_hook_after_a_change_of_the_process_group() -> None:
    run_ranks(replace_after_a_change, 3)


def test_removing_a_hook_after_a_change_of_the_process_group() -> None:
    run_ranks(update_group_under_a_hook, 3)


def without_hooks(rank: int, world_size: int) -> None:
    model = DistributedDataParallel(make_net())
    assert_averaged(model, world_size)
    model._remove_autograd_hooks()
    model.zero_grad()
    model(inputs_of(rank)).sum().backward()
    assert not same_on_all_ranks(model.module[0].weight.grad)


def test_remove_autograd_hooks() -> None:
    run_ranks(without_hooks, 2)


def delayed_expert(rank: int, world_size: int, init_sync: bool) -> None:
    groups = [dist.new_group([0]), dist.new_group([1])]
    net = make_net()
    with torch.no_grad():
        net[2].weight.fill_(float(rank))
    late = [("2.weight", net[2].weight)]
    with pytest.raises(ValueError, match=r'"2\.weight" has a process group of its own.*\'expert\''):
        DistributedDataParallel(
            net,
            group_key=lambda name, _: "expert" if name.startswith("2.") else "shared",
            key_process_groups={"expert": groups[rank]},
            delay_all_reduce_named_params=late,
            param_to_hook_all_reduce=net[2].weight,
            init_sync=init_sync,
        )
    assert torch.equal(net[2].weight, torch.full_like(net[2].weight, float(rank)))


@pytest.mark.parametrize("init_sync", [True, False])
def test_delayed_parameters_have_no_process_group_of_their_own(init_sync: bool) -> None:
    """They lost it without an error."""
    run_ranks(delayed_expert, 2, init_sync)


def frozen_experts(rank: int, world_size: int) -> None:
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    net = make_net()
    net[2].requires_grad_(False)
    with torch.no_grad():
        net[2].weight.fill_(float(rank))
    model = DistributedDataParallel(
        net,
        group_key=lambda name, _: "expert" if name.startswith("2.") else "shared",
        key_process_groups={"expert": groups[rank % 2]},
    )
    for step in range(3):
        model.zero_grad()
        model(inputs_of(rank, step)).square().mean().backward()
    assert torch.equal(net[2].weight, torch.full_like(net[2].weight, float(rank % 2)))
    assert all(same_on_all_ranks(p.grad) for p in net.parameters() if p.requires_grad)


def test_frozen_experts_are_those_of_their_process_group() -> None:
    run_ranks(frozen_experts, 4)
