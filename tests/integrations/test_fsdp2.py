"""FSDP2 under Accelerate and the Trainer: four ranks as two replicas of two shards.

Both shard models on devices only. The tests tell Accelerate that the ranks have some, because
``fully_shard`` itself works on the CPU.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator, ParallelismConfig, PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from support import torchrun
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import commhooks
from commhooks.integrations.accelerate import prepare
from commhooks.integrations.transformers import CommHookCallback

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch and Accelerate, about meshes
HOOKS: list[dict[str, Any]] = [
    {"name": "allreduce"},
    {"name": "int8"},
    {"name": "powersgd", "rank": 1, "start_step": 0, "min_compression_rate": 1.0},
]


def claim_devices() -> None:
    PartialState(cpu=True)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


@contextmanager
def with_devices(rank: int, size: int) -> Iterator[None]:
    torchrun.set_environment(rank, size)
    claim_devices()
    try:
        yield
    finally:
        AcceleratorState._reset_state(True)


def make_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def train(
    model: nn.Module, optimizer: Any, rank: int, steps: range, accelerator: Accelerator | None
) -> Tensor:
    for step in steps:
        inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank))
        loss = model(inputs).square().mean()
        if accelerator is None:
            loss.backward()
        else:
            accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return shards_of(model)


def shards_of(model: nn.Module) -> Tensor:
    shards: list[Any] = list(model.parameters())
    return torch.cat([shard.to_local().detach().reshape(-1) for shard in shards])


def make_prepared(config: dict[str, Any]) -> tuple[Accelerator, nn.Module, Any]:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, cpu_ram_efficient_loading=False)
    replicas_and_shards = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, parallelism_config=replicas_and_shards)
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(net, optimizer)
    return accelerator, prepare(accelerator, model, config), optimizer


def accelerate(rank: int, size: int, folder: Path) -> None:
    for config in HOOKS:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        bare: nn.Module = fully_shard(make_net(), mesh=mesh)
        commhooks.register(bare, config)
        expected = train(bare, torch.optim.SGD(bare.parameters(), lr=0.1), rank, range(6), None)

        with with_devices(rank, size):
            accelerator, model, optimizer = make_prepared(config)
            train(model, optimizer, rank, range(3), accelerator)
            accelerator.save_state(folder / config["name"])
            accelerator.wait_for_everyone()
            found = train(model, optimizer, rank, range(3, 6), accelerator)
            assert torch.equal(found, expected)
            accelerator, model, optimizer = make_prepared(config)
            accelerator.load_state(folder / config["name"])
            assert torch.equal(train(model, optimizer, rank, range(3, 6), accelerator), expected)
            assert commhooks.handle_of(model) is not None


def test_accelerate(run_ranks: Any, tmp_path: Path) -> None:
    run_ranks(accelerate, 4, tmp_path, timeout=240)


def make_gpt() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=32,
            n_positions=8,
            n_embd=8,
            n_layer=1,
            n_head=2,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=0,
            eos_token_id=0,
            tie_word_embeddings=False,
        )
    )


def make_trainer(folder: Path, config: dict[str, Any]) -> Trainer:
    rows = [torch.arange(8) + number % 8 for number in range(24)]
    args = TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        fsdp="full_shard",
        fsdp_config={"fsdp_version": 2, "cpu_ram_efficient_loading": False},
        parallelism_config=ParallelismConfig(dp_replicate_size=2, dp_shard_size=2),
        per_device_train_batch_size=1,
        num_train_epochs=1,
        learning_rate=0.01,
        optim="adamw_torch",  # which has a state: torch cannot load one without tensors
        lr_scheduler_type="constant",
        average_tokens_across_devices=False,  # which scales losses by a number of other ranks
        save_steps=3,
        logging_steps=1,
        disable_tqdm=True,
        report_to="none",
        dataloader_pin_memory=False,
    )
    claim_devices()  # again: the arguments begin by resetting what Accelerate knows
    data = [{"input_ids": row, "labels": row} for row in rows]
    trainer = Trainer(make_gpt(), args, train_dataset=data)  # type: ignore[arg-type]
    trainer.add_callback(CommHookCallback(trainer, config))
    return trainer


def copy_arguments(
    calls: list[dict[str, Any]], _: nn.Module, args: tuple[()], arguments: dict[str, Any]
) -> None:
    calls.append(arguments)


def train_again(calls: list[dict[str, Any]], trained: nn.Module, config: dict[str, Any]) -> Tensor:
    """The bare loop on the same batches, with the units that Accelerate has made."""
    units: dict[Any, list[str]] = {}
    for name, module in trained.named_modules():
        if isinstance(module, FSDPModule):
            units.setdefault(module._get_fsdp_state(), []).append(name)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    bare = make_gpt().train()
    for names in reversed(units.values()):
        fully_shard([bare.get_submodule(name) for name in names], mesh=mesh)
    commhooks.register(bare, config)
    optimizer = torch.optim.AdamW(bare.parameters(), lr=0.01, weight_decay=0.0)
    for arguments in calls:
        bare(**arguments).loss.backward()
        nn.utils.clip_grad_norm_(bare.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return shards_of(bare)


def use_trainer(rank: int, size: int, root: Path) -> None:
    for config in HOOKS[1:]:
        with with_devices(rank, size):
            trainer = make_trainer(root / config["name"], config)
            calls: list[dict[str, Any]] = []
            record = partial(copy_arguments, calls)
            trainer.model.register_forward_pre_hook(record, with_kwargs=True)
            trainer.train()
            expected = shards_of(trainer.model)
            handle = commhooks.handle_of(trainer.model)
            assert handle is not None
            assert handle.state_dict()["step"] == len(calls) == 6
        assert torch.equal(train_again(calls, trainer.model, config), expected)
        with with_devices(rank, size):
            trainer = make_trainer(root / config["name"], config)
            trainer.train(resume_from_checkpoint=str(root / config["name"] / "checkpoint-3"))
            assert torch.equal(shards_of(trainer.model), expected)


def test_trainer(run_ranks: Any, tmp_path: Path) -> None:
    run_ranks(use_trainer, 4, tmp_path, timeout=240)
