"""Accelerate trains as the bare loop with the same hook, and resumes to the last bit."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DDPCommunicationHookType
from support import torchrun
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import commhooks
from commhooks.integrations.accelerate import CommHookKwargs, keep_hook_states, prepare

POWERSGD = {"name": "powersgd", "rank": 1, "start_step": 0, "min_compression_rate": 1.0}
HOOKS: list[dict[str, Any]] = [POWERSGD, {"name": "int8"}]
# Torch then keeps its first buckets, so that int8 has the same blocks in a resumed run.
SAME_BUCKETS = {"find_unused_parameters": True}


def make_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4))


def with_accelerator(test: Callable[..., None]) -> Callable[..., None]:
    """Run ``test`` as torchrun would, without what earlier tests left in Accelerate."""

    @functools.wraps(test)
    def run(rank: int, size: int, *args: Any) -> None:
        torchrun.set_environment(rank, size)
        try:
            test(rank, size, *args)
        finally:
            AcceleratorState._reset_state(True)

    return run


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank))
    loss: Tensor = model(inputs).square().mean()
    return loss


def train(model: nn.Module, rank: int, steps: range) -> Tensor:
    """The bare loop."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


def train_accelerated(accelerator: Accelerator, model: Any, rank: int, steps: range) -> Tensor:
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    for step in steps:
        optimizer.zero_grad()
        accelerator.backward(loss_of(model, rank, step))
        optimizer.step()
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


@with_accelerator
def compare_with_the_bare_loop(rank: int, size: int) -> None:
    for config in HOOKS:
        bare = DistributedDataParallel(make_net())
        commhooks.register(bare, config)
        expected = train(bare, rank, range(5))

        accelerator = Accelerator(cpu=True)
        model = prepare(accelerator, make_net(), config)
        assert torch.equal(train_accelerated(accelerator, model, rank, range(5)), expected)
        handle = commhooks.handle_of(model)
        assert handle is not None
        assert handle.hook == commhooks.create(config)
        assert isinstance(accelerator.unwrap_model(model), nn.Sequential)

        accelerator = Accelerator(cpu=True)
        model, _ = accelerator.prepare(make_net(), torch.optim.SGD(make_net().parameters()))
        assert prepare(accelerator, model, config) is model
        assert torch.equal(train_accelerated(accelerator, model, rank, range(5)), expected)

        options = {key: value for key, value in config.items() if key != "name"}
        kwargs = CommHookKwargs(config["name"], ddp_options={"bucket_cap_mb": 7}, **options)
        accelerator = Accelerator(cpu=True, kwargs_handlers=[kwargs])
        model = accelerator.prepare(make_net())
        assert model.bucket_bytes_cap == 7 * 2**20
        assert torch.equal(train_accelerated(accelerator, model, rank, range(5)), expected)


def test_trains_as_the_bare_loop(run_ranks: Any) -> None:
    run_ranks(compare_with_the_bare_loop, 2, timeout=240)


@with_accelerator
def accumulate(rank: int, size: int) -> None:
    results = []
    for accelerated in (False, True):
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        if accelerated:
            model: Any = prepare(accelerator, make_net(), POWERSGD)
        else:
            model = DistributedDataParallel(make_net())
            commhooks.register(model, POWERSGD)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if accelerated:
            optimizer = accelerator.prepare(optimizer)
        for step in range(6):
            if accelerated:
                with accelerator.accumulate(model):
                    accelerator.backward(loss_of(model, rank, step))
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 0.1)
                    optimizer.step()
                    optimizer.zero_grad()
            elif step % 2 == 0:
                with model.no_sync():
                    (loss_of(model, rank, step) / 2).backward()
            else:
                (loss_of(model, rank, step) / 2).backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                optimizer.zero_grad()
        results.append(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
        handle = commhooks.handle_of(model)
        assert handle is not None
        assert handle.state_dict()["step"] == 3
    assert torch.equal(*results)


def test_accumulation_and_clipping(run_ranks: Any) -> None:
    run_ranks(accumulate, 2, timeout=240)


def make_resumable(config: dict[str, Any]) -> tuple[Accelerator, nn.Module]:
    kwargs = CommHookKwargs(config, ddp_options=SAME_BUCKETS)
    accelerator = Accelerator(cpu=True, kwargs_handlers=[kwargs])
    keep_hook_states(accelerator)
    keep_hook_states(accelerator)  # once is enough, and twice does no harm
    return accelerator, accelerator.prepare(make_net())


@with_accelerator
def resume(rank: int, size: int, root: Path) -> None:
    for config in HOOKS:
        folder = root / config["name"]
        accelerator, model = make_resumable(config)
        expected = train_accelerated(accelerator, model, rank, range(6))

        accelerator, model = make_resumable(config)
        train_accelerated(accelerator, model, rank, range(3))
        accelerator.save_state(folder)
        accelerator.wait_for_everyone()
        accelerator, model = make_resumable(config)
        accelerator.prepare(torch.optim.SGD(model.parameters()))
        accelerator.load_state(folder)
        accelerator._optimizers.clear()
        assert torch.equal(train_accelerated(accelerator, model, rank, range(3, 6)), expected)
        files = {path.name for path in folder.glob("commhooks*")}
        assert files == {"commhooks_0.pt", "commhooks_1.pt"}

    file = folder / f"commhooks_{rank}.pt"
    accelerator.wait_for_everyone()
    content = file.read_bytes()
    cases: list[tuple[tuple[int, ...], bytes | None, str]] = [
        ((1,), None, r"rank 1.* there is no file .*commhooks_1.pt.*No rank has"),
        ((0,), content[:100], "rank 0.* cannot load .*commhooks_0.pt"),
        ((0, 1), content.replace(b"int8", b"int4"), "found that of 'int4'"),
    ]
    for ranks, written, message in cases:
        if rank in ranks:
            file.unlink()
            if written is not None:
                file.write_bytes(written)
        with pytest.raises(commhooks.CommHookStateError, match=message):
            accelerator.load_state(folder)
        file.write_bytes(content)
    accelerator.wait_for_everyone()
    file.unlink()
    accelerator.wait_for_everyone()
    with pytest.warns(UserWarning, match=r"no file .*pt, so .* begins without a state"):
        accelerator.load_state(folder)


def test_every_rank_resumes_its_state(run_ranks: Any, tmp_path: Path) -> None:
    run_ranks(resume, 2, tmp_path, timeout=240)


@with_accelerator
def misuse(rank: int, size: int) -> None:
    accelerator = Accelerator(cpu=True)
    net = make_net()
    with pytest.raises(commhooks.CommHookError, match=r"wrap it first. Accelerate.*prepare\(\)"):
        commhooks.register(net, "int8")
    model = prepare(accelerator, net, "int8")
    with pytest.raises(commhooks.CommHookError, match="has a hook already"):
        prepare(accelerator, model, "int8")
    with pytest.raises(commhooks.CommHookMismatchError, match="on all ranks"):
        prepare(accelerator, make_net(), "int8" if rank else "int4")
    with pytest.raises(commhooks.CommHookError, match="DistributedDataParallel around"):
        prepare(accelerator, commhooks.DistributedDataParallel(make_net()), "int8")
    with pytest.raises(commhooks.CommHookError, match="expected no comm_hook in ddp_options"):
        CommHookKwargs("int8", ddp_options={"comm_hook": DDPCommunicationHookType.FP16})
    with pytest.raises(ValueError, match="only pass one"):
        Accelerator(cpu=True, kwargs_handlers=[CommHookKwargs("int8"), CommHookKwargs("int8")])


def test_wrong_use_raises_on_all_ranks(run_ranks: Any) -> None:
    run_ranks(misuse, 2, timeout=240)


def use_one_process(rank: int, size: int) -> None:
    try:
        with pytest.raises(commhooks.CommHookError, match=r"one process.*accelerate launch"):
            prepare(Accelerator(cpu=True), make_net(), "int8")
    finally:
        AcceleratorState._reset_state(True)


def test_one_process_averages_nothing(run_ranks: Any) -> None:
    run_ranks(use_one_process, 1, timeout=240)
