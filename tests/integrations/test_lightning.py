"""Lightning's Trainer and Fabric with hooks, held against the bare loop with the same hook."""

import contextlib
import functools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import torchrun
from support.pages import blocks_of
from support.states import hook_state
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel

import commhooks
from commhooks.hook import registry
from commhooks.hook.options import option_names
from commhooks.integrations.lightning_parts import _parameters
from commhooks.testing.compare import same_bits

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's own

STEPS = 3  # of an epoch
KEEPS_BUCKETS = {"find_unused_parameters": True}  # else torch rebuilds them after the first step
POWERSGD = {"rank": 1, "start_step": 1, "min_compression_rate": 1.0}


def network() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 24))


def loader(rank: int, count: int = STEPS) -> Any:
    generator = torch.Generator().manual_seed(rank)
    batches = [torch.randn(4, 8, generator=generator) for _ in range(count)]
    return torch.utils.data.DataLoader(batches, batch_size=None)  # type: ignore[arg-type]


def sgd(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


class Model(nn.Module):
    """Names its parameters as the LightningModule below, because hooks may draw numbers by name."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def forward(self, batch: Tensor) -> Tensor:
        return self.net(batch)


def bare_loop(
    rank: int,
    hook: str,
    /,
    *,
    epochs: int = 1,
    accumulate: int = 1,
    wrapper: Any = None,
    **options: Any,
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the weights and the hook's state of the loop that a user would write."""
    net = Model()
    model = wrapper(net) if wrapper else commhooks.DistributedDataParallel(net, stable_buckets=True)
    handle = commhooks.register(model, hook, **options)
    optimizer = sgd(net.parameters())
    for _ in range(epochs):
        for step, batch in enumerate(loader(rank, STEPS * accumulate)):
            model.require_backward_grad_sync = (step + 1) % accumulate == 0
            (model(batch).square().mean() / accumulate).backward()
            if model.require_backward_grad_sync:
                optimizer.step()
                optimizer.zero_grad()
    return dict(net.state_dict()), hook_state(handle)


def loop_of_two_optimizers(rank: int, hook: str) -> dict[str, Tensor]:
    net = Model()
    model = commhooks.DistributedDataParallel(
        net, stable_buckets=True, find_unused_parameters=True, hook=hook
    )
    parts = [net.net[0], net.net[2]]
    optimizers = [sgd(part.parameters()) for part in parts]
    for batch in loader(rank):
        for i in (0, 1):
            parts[1 - i].requires_grad_(False)
            model(batch).square().mean().backward()
            parts[1 - i].requires_grad_(True)
            optimizers[i].step()
            net.zero_grad()
    return dict(net.state_dict())


def make_module(package: Any = None, *, manual: bool = False, toggles: bool = False) -> Any:
    import lightning.pytorch

    class Module((package or lightning.pytorch).LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = network()
            self.automatic_optimization = not manual

        def training_step(self, batch: Tensor, index: int) -> Tensor | None:
            if self.automatic_optimization:
                return self.net(batch).square().mean()
            for optimizer in self.optimizers() if toggles else [self.optimizers()]:
                self.toggle_optimizer(optimizer)
                self.manual_backward(self.net(batch).square().mean())
                self.untoggle_optimizer(optimizer)
                optimizer.step()
                optimizer.zero_grad()
            return None

        def validation_step(self, batch: Tensor, index: int) -> None:
            self.log("loss", self.net(batch).square().mean(), sync_dist=True)

        def predict_step(self, batch: Tensor, index: int) -> Tensor:
            return self.net(batch)

        def configure_optimizers(self) -> Any:
            parts = [self.net[0], self.net[2]] if toggles else [self.net]
            return [sgd(part.parameters()) for part in parts]

    return Module()


def make_trainer(strategy: Any, folder: str, package: Any = None, **options: Any) -> Any:
    import lightning.pytorch

    settings = {
        "accelerator": "cpu",
        "devices": 2,
        "default_root_dir": folder,
        "enable_checkpointing": False,
        "enable_model_summary": False,
        "enable_progress_bar": False,
        "logger": False,
        "max_epochs": 1,
        "num_sanity_val_steps": 0,
        "use_distributed_sampler": False,
    }
    return (package or lightning.pytorch).Trainer(strategy=strategy, **(settings | options))


def trains_as_the_bare_loop(rank: int, size: int, folder: str) -> None:
    torchrun.set_environment(rank, size)
    from commhooks.integrations.lightning import CommHookCallback, CommHooksStrategy

    plain, _ = bare_loop(rank, "int4")
    for manual, options in ((False, {}), (True, {}), (True, {"static_graph": True})):
        module, strategy = make_module(manual=manual), CommHooksStrategy("int4", **options)
        trainer = make_trainer(strategy, folder)
        trainer.fit(module, loader(rank))
        assert same_bits(dict(module.state_dict()), plain)
        assert strategy.model is module
        assert trainer.validate(module, loader(rank), verbose=False)[0]["loss"] > 0
        assert len(trainer.predict(module, loader(rank))) == STEPS

    module = make_module(manual=True, toggles=True)
    make_trainer(CommHooksStrategy("int4", find_unused_parameters=True), folder).fit(
        module, loader(rank)
    )
    assert same_bits(dict(module.state_dict()), loop_of_two_optimizers(rank, "int4"))

    module = make_module()
    trainer = make_trainer(CommHooksStrategy("int4"), folder, accumulate_grad_batches=2)
    trainer.fit(module, loader(rank, 2 * STEPS))
    assert same_bits(dict(module.state_dict()), bare_loop(rank, "int4", accumulate=2)[0])

    for strategy, wrapper in (("commhooks", None), ("ddp", TorchDistributedDataParallel)):
        module, callback = make_module(), CommHookCallback("powersgd", **POWERSGD)
        trainer = make_trainer(strategy, folder, callbacks=[callback])
        trainer.fit(module, loader(rank))
        expected, state = bare_loop(rank, "powersgd", wrapper=wrapper, **POWERSGD)
        assert same_bits(dict(module.state_dict()), expected)
        assert same_bits(hook_state(callback.handle), state)
        total = callback.handle.stats().total
        assert trainer.callback_metrics["commhooks/wire_bytes"] == pytest.approx(total.wire_bytes)


def test_trainer(run_ranks: Any, tmp_path: Path) -> None:
    run_ranks(trains_as_the_bare_loop, 2, str(tmp_path), timeout=240)


def resumes(rank: int, size: int, folder: str) -> None:
    torchrun.set_environment(rank, size)
    from lightning.pytorch.callbacks import ModelCheckpoint

    from commhooks.integrations.lightning import CommHookCallback, CommHooksStrategy

    def run(epochs: int, *, by_callback: bool, path: str | None = None, **options: Any) -> Any:
        """Return weights and state of every rank after training."""
        callbacks = [CommHookCallback("int4")] if by_callback else []
        strategy = "commhooks" if by_callback else CommHooksStrategy("int4")
        trainer = make_trainer(strategy, folder, max_epochs=epochs, **options)
        trainer.callbacks.extend(callbacks)
        module = make_module()
        trainer.fit(module, loader(rank), ckpt_path=path)
        handle = callbacks[0].handle if callbacks else trainer.strategy.handle
        return trainer, (dict(module.state_dict()), hook_state(handle))

    unbroken = bare_loop(rank, "int4", epochs=2)
    checkpoints = ModelCheckpoint(folder, filename="strategy")
    run(1, by_callback=False, enable_checkpointing=True, callbacks=[checkpoints])
    trainer, _ = run(1, by_callback=True)
    trainer.save_checkpoint(f"{folder}/callback.ckpt")
    for source, by_callback in (("strategy", True), ("strategy", False), ("callback", True)):
        _, found = run(2, by_callback=by_callback, path=f"{folder}/{source}.ckpt")
        assert same_bits(found, unbroken), (source, by_callback)

    # What only evaluates a checkpoint leaves nothing to a training that begins after it.
    callback = CommHookCallback("int4")
    trainer = make_trainer("commhooks", folder, callbacks=[callback], max_epochs=1)
    trainer.validate(make_module(), loader(rank), ckpt_path=f"{folder}/callback.ckpt")
    trainer.fit(make_module(), loader(rank))
    assert callback.handle is not None
    assert callback.handle.state_dict()["step"] == STEPS


def function_keeps_its_state(rank: int, size: int, folder: str) -> None:
    """A checkpoint that nobody asked to have the state of a hook does not fail without one."""
    torchrun.set_environment(rank, size)
    from lightning.fabric import Fabric
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    from commhooks.integrations.lightning import (
        CommHookCallback,
        CommHooksStrategy,
        FabricCommHooksStrategy,
    )

    for by_callback in (False, True):
        path = None
        for epochs in (1, 2):
            strategy = "ddp" if by_callback else CommHooksStrategy(allreduce_hook)
            callbacks = [CommHookCallback(allreduce_hook, log_stats=False)] * by_callback
            trainer = make_trainer(strategy, folder, max_epochs=epochs, callbacks=callbacks)
            trainer.fit(make_module(), loader(rank), ckpt_path=path)
            path = f"{folder}/function.ckpt"
            trainer.save_checkpoint(path)

    fabric = Fabric(accelerator="cpu", devices=2, strategy=FabricCommHooksStrategy(allreduce_hook))
    fabric.launch()
    net = Model()
    model, optimizer = fabric.setup(net, sgd(net.parameters()))
    fabric.save(path, {"model": model, "optimizer": optimizer})
    fabric.load(path, {"model": model, "optimizer": optimizer})


def test_function_keeps_its_state(run_ranks: Any, tmp_path: Path) -> None:
    run_ranks(function_keeps_its_state, 2, str(tmp_path), timeout=240)


def sharded_model_resumes(rank: int, size: int, folder: str) -> None:
    """Replicas of a model that `configure_model` shards, with a callback."""
    torchrun.set_environment(rank, size)
    from lightning.pytorch.strategies import ModelParallelStrategy
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from commhooks.integrations.lightning import CommHookCallback

    def shard(net: nn.Module) -> None:
        names = ("replicate", "shard")
        fully_shard(net, mesh=init_device_mesh("cpu", (size, 1), mesh_dim_names=names))

    class Module(type(make_module())):  # type: ignore[misc]
        def configure_model(self) -> None:
            if not hasattr(self.net, "unshard"):
                shard(self.net)

    def run(epochs: int, path: str | None = None) -> Any:
        module, callback = Module(), CommHookCallback("int4")
        strategy = ModelParallelStrategy(data_parallel_size=size, tensor_parallel_size=1)
        trainer = make_trainer(strategy, folder, callbacks=[callback], max_epochs=epochs)
        trainer.fit(module, loader(rank), ckpt_path=path)
        assert commhooks.handle_of(module) is commhooks.handle_of(module.net) is callback.handle
        trainer.save_checkpoint(f"{folder}/{epochs}.ckpt")
        weights = {name: it.full_tensor() for name, it in module.net.state_dict().items()}
        return weights, hook_state(callback.handle)

    def bare() -> Any:
        net = network()
        shard(net)
        handle = commhooks.register(net, "int4")
        optimizer = sgd(net.parameters())
        for _ in range(2):
            for batch in loader(rank):
                net(batch).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        weights = {name: it.full_tensor() for name, it in net.state_dict().items()}
        return weights, hook_state(handle)

    run(1)
    resumed, unbroken, plain = run(2, f"{folder}/1.ckpt"), run(2), bare()
    assert same_bits(resumed, unbroken)
    assert same_bits(unbroken, plain)


def test_model_parallel(run_ranks: Any, tmp_path: Path) -> None:
    run_ranks(sharded_model_resumes, 2, str(tmp_path), timeout=240)


def test_resumed_runs_equal_an_unbroken_one(run_ranks: Any, tmp_path: Path) -> None:
    run_ranks(resumes, 2, str(tmp_path), timeout=240)


def fabric_trains(rank: int, size: int, folder: str) -> None:
    torchrun.set_environment(rank, size)
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import DDPStrategy

    from commhooks.integrations.lightning import FabricCommHooksStrategy
    from commhooks.state import GatheredState

    def run(epochs: int, *, is_ours: bool, names_it: bool = True, path: str | None = None) -> Any:
        strategy = FabricCommHooksStrategy("int4") if is_ours else DDPStrategy(**KEEPS_BUCKETS)
        fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
        fabric.launch()
        net = Model()
        model, optimizer = fabric.setup(net, sgd(net.parameters()))
        handle = fabric.strategy.handle if is_ours else commhooks.register(model, "int4")
        saved = handle if is_ours else GatheredState(handle)
        state = {"model": model, "optimizer": optimizer, "epoch": 0}
        if names_it:
            state["hook"] = saved
        if path is not None:
            assert fabric.load(path, state) == {}
        while state["epoch"] < epochs:
            for step, batch in enumerate(loader(rank, 2 * STEPS)):
                with fabric.no_backward_sync(model, enabled=step % 2 == 0):
                    fabric.backward(model(batch).square().mean() / 2)
                if step % 2 == 1:
                    optimizer.step()
                    optimizer.zero_grad()
            state["epoch"] += 1
        fabric.save(f"{folder}/{epochs}", state)
        assert state.get("hook", saved) is saved
        return dict(net.state_dict()), hook_state(handle)

    wrap = functools.partial(TorchDistributedDataParallel, **KEEPS_BUCKETS)
    for is_ours, names_it, wrapper in (
        (True, True, None),
        (True, False, None),
        (False, True, wrap),
    ):
        options = {"is_ours": is_ours, "names_it": names_it}
        run(1, **options)
        resumed = run(2, **options, path=f"{folder}/1")
        expected = bare_loop(rank, "int4", epochs=2, accumulate=2, wrapper=wrapper)
        assert same_bits(resumed, expected)


def test_fabric(run_ranks: Any, tmp_path: Path) -> None:
    run_ranks(fabric_trains, 2, str(tmp_path), timeout=240)


def wrong_use(rank: int, size: int, folder: str) -> None:
    torchrun.set_environment(rank, size)
    from lightning.fabric.strategies.ddp import DDPStrategy as FabricDDPStrategy
    from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

    from commhooks.integrations.lightning import CommHookCallback, CommHooksStrategy

    def fit(strategy: Any, *callbacks: Any, path: str | None = None, **options: Any) -> Any:
        epochs = 1 if path is None else 2
        trainer = make_trainer(
            strategy, folder, callbacks=list(callbacks), max_epochs=epochs, **options
        )
        trainer.fit(make_module(), loader(rank), ckpt_path=path)
        return trainer

    known = _parameters(DDPStrategy.__init__) | _parameters(FabricDDPStrategy.__init__)
    known |= _parameters(commhooks.DistributedDataParallel.__init__)
    for name in commhooks.available():
        assert known.isdisjoint(option_names(registry._find(name))), name

    error = commhooks.CommHookError
    with pytest.raises(error, match=r"options \['rank'\] without a hook"):
        CommHooksStrategy(rank=4)
    with pytest.raises(error, match="ddp_comm_hook, which is for torch's wrapper"):
        CommHooksStrategy("int8", ddp_comm_hook=print)
    with pytest.raises(commhooks.CommHookOptionError, match="'int8' has no option 'rank'"):
        fit(CommHooksStrategy("int8", rank=4))
    with pytest.raises(error, match="SingleDeviceStrategy does not wrap the model"):
        fit(SingleDeviceStrategy("cpu"), CommHookCallback("int8"), devices=1)
    with pytest.raises(error, match="has a hook already"):
        fit(CommHooksStrategy("int8"), CommHookCallback("int4"))
    with pytest.raises(commhooks.CommHookMismatchError, match="same hook"):
        fit("ddp", CommHookCallback(["int8", "int4"][rank]))
    trainer = fit("ddp", CommHookCallback("int8"))
    trainer.save_checkpoint(f"{folder}/int8.ckpt")
    with pytest.raises(commhooks.CommHookStateError, match="hook 'int4', found that of 'int8'"):
        fit("ddp", CommHookCallback("int4"), path=f"{folder}/int8.ckpt")


def test_wrong_use(run_ranks: Any, tmp_path: Path) -> None:
    run_ranks(wrong_use, 2, str(tmp_path), timeout=240)


def other_name(rank: int, size: int, folder: str) -> None:
    torchrun.set_environment(rank, size)
    import pytorch_lightning

    from commhooks.integrations.pytorch_lightning import CommHookCallback

    module = make_module(pytorch_lightning)
    callback = CommHookCallback("int4")
    trainer = make_trainer("commhooks", folder, pytorch_lightning, callbacks=[callback])
    trainer.fit(module, loader(rank))
    assert same_bits(dict(module.state_dict()), bare_loop(rank, "int4")[0])


def test_pytorch_lightning(run_ranks: Any, tmp_path: Path) -> None:
    run_ranks(other_name, 2, str(tmp_path), timeout=240)


def run_page(rank: int, size: int, page: str, folder: str) -> None:
    torchrun.set_environment(rank, size)
    with contextlib.chdir(folder):
        for block in blocks_of(page):
            exec(
                block,
                {"module": make_module(), "net": Model(), "data": loader(rank), "torch": torch},
            )


@pytest.mark.parametrize("page", ["lightning", "fabric"])
def test_page(run_ranks: Any, page: str, tmp_path: Path) -> None:
    run_ranks(run_page, 2, f"integrations/{page}.md", str(tmp_path), timeout=240)
