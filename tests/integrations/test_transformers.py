"""The Trainer trains as the bare loop with the same hook, and resumes to the last bit."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

import pytest
import torch
from accelerate.state import AcceleratorState
from support import torchrun
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
from transformers.trainer_utils import HPSearchBackend

import commhooks
from commhooks.integrations.transformers import CommHookCallback

POWERSGD = {"name": "powersgd", "rank": 1, "start_step": 0, "min_compression_rate": 1.0}


class Net(nn.Module):
    """Keeps the inputs that it has seen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4))
        self.seen: list[Tensor] = []

    def forward(self, inputs: Tensor) -> dict[str, Tensor]:
        self.seen.append(inputs)
        return {"loss": self.layers(inputs).square().mean()}


def make_gpt() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=32, n_positions=8, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
    )
    return GPT2LMHeadModel(config)


def numbers(count: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [{"inputs": torch.randn(6, generator=generator)} for _ in range(count)]


def tokens(count: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(32, (8,), generator=generator) for _ in range(count)]
    return [{"input_ids": row, "labels": row} for row in rows]


def make_trainer(model: nn.Module, data: Sequence[Any], folder: Path, **options: Any) -> Trainer:
    options = {"per_device_train_batch_size": 2, "learning_rate": 0.1, "seed": 1} | options
    args = TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        num_train_epochs=1,
        optim="sgd",
        lr_scheduler_type="constant",
        logging_steps=1,
        disable_tqdm=True,
        report_to="none",
        dataloader_pin_memory=False,
        **options,
    )
    return Trainer(model, args, train_dataset=data)


def parameters_of(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


def compare_with_the_bare_loop(rank: int, size: int, folder: Path) -> None:
    for config in (POWERSGD, {"name": "int8"}):
        for accumulation in (1, 2):
            net = Net()
            trainer = make_trainer(
                net,
                numbers(24),
                folder,
                max_grad_norm=0.1,
                gradient_accumulation_steps=accumulation,
                save_strategy="no",
            )
            callback = CommHookCallback(trainer, config)
            trainer.add_callback(callback)
            trainer.train()
            assert commhooks.handle_of(net) is callback.handle
            assert callback.handle is not None
            assert callback.handle.state_dict()["step"] == 6 // accumulation

            model = DistributedDataParallel(Net(), find_unused_parameters=True)  # as the Trainer
            commhooks.register(model, config)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for step, inputs in enumerate(net.seen):
                model.require_backward_grad_sync = (step + 1) % accumulation == 0
                (model(inputs)["loss"] / accumulation).backward()
                if model.require_backward_grad_sync:
                    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                    optimizer.step()
                    optimizer.zero_grad()
            assert torch.equal(parameters_of(net), parameters_of(model))


def resume(rank: int, size: int, root: Path) -> None:
    # Torch keeps its first buckets if it looks for unused parameters, so int8 has the same blocks.
    options = {"save_steps": 3, "ddp_find_unused_parameters": True}
    for config in (POWERSGD, {"name": "int8"}):
        folder = root / config["name"]
        trainer = make_trainer(make_gpt(), tokens(24), folder, **options)
        trainer.add_callback(CommHookCallback(trainer, config))
        trainer.train()
        expected = parameters_of(trainer.model)

        trainer = make_trainer(make_gpt(), tokens(24), folder, **options)
        trainer.add_callback(callback := CommHookCallback(trainer, config))
        trainer.train(resume_from_checkpoint=str(folder / "checkpoint-3"))
        assert torch.equal(parameters_of(trainer.model), expected)
        trainer.train()  # once more, with the wrapper and the hook that are there
        assert commhooks.handle_of(trainer.model) is callback.handle


def resume_from_elsewhere(rank: int, size: int, root: Path) -> None:
    folder, elsewhere = root / "powersgd", root / "elsewhere"
    trainer = make_trainer(make_gpt(), tokens(24), folder)
    trainer.accelerator.wait_for_everyone()
    if rank == 0:
        shutil.copytree(folder / "checkpoint-3", elsewhere / "checkpoint-3")
    trainer.accelerator.wait_for_everyone()
    expected = torch.load(elsewhere / "checkpoint-3" / f"commhooks_{rank}.pt")["model"]

    for output in ("new", "int8"):  # which has another checkpoint of that step
        trainer = make_trainer(make_gpt(), tokens(12), root / output, save_strategy="no")
        trainer.add_callback(callback := CommHookCallback(trainer, POWERSGD))
        trainer.train(resume_from_checkpoint=str(elsewhere / "checkpoint-3"))  # at its end already
        assert callback.handle is not None
        found = callback.handle.state_dict()
        assert found["step"] == expected["step"]
        torch.testing.assert_close(found["state"], expected["state"], rtol=0, atol=0)

    if rank == 1:
        (elsewhere / "checkpoint-3" / "commhooks_1.pt").unlink()
    trainer = make_trainer(make_gpt(), tokens(12), root / "new", save_strategy="no")
    trainer.add_callback(CommHookCallback(trainer, POWERSGD))
    with pytest.raises(commhooks.CommHookStateError, match=r"rank 1.* there is no file .*1.pt"):
        trainer.train(resume_from_checkpoint=str(elsewhere / "checkpoint-3"))


def misuse(rank: int, size: int, root: Path) -> None:
    trainer = make_trainer(Net(), numbers(4), root, save_strategy="no")
    with pytest.raises(commhooks.CommHookError, match="wrap it first"):
        commhooks.register(trainer.model_wrapped, "int8")
    for _ in range(2):
        trainer.add_callback(CommHookCallback(trainer, "int8"))
    with pytest.raises(commhooks.CommHookError, match="has a hook already"):
        trainer.train()
    trainer = make_trainer(Net(), numbers(4), root, save_strategy="no")
    trainer.add_callback(CommHookCallback(trainer, "int8" if rank else "int4"))
    with pytest.raises(commhooks.CommHookMismatchError, match="on all ranks"):
        trainer.train()


class Trial(dict[str, Any]):
    """One run of a hyperparameter search, as Optuna's."""

    number = 3
    params: ClassVar[dict[str, Any]] = {}


def search(rank: int, size: int, root: Path) -> None:
    trainer = make_trainer(Net(), numbers(8), root / "search", save_steps=1)
    trainer.hp_search_backend, trainer.hp_name = HPSearchBackend.OPTUNA, None
    trainer.hp_space = lambda _: {}
    trainer.add_callback(CommHookCallback(trainer, "int8"))
    # Without Optuna, Transformers takes the parameters of a run from a dict if it finds W&B.
    with patch("transformers.integrations.integration_utils.is_wandb_available", lambda: True):
        trainer.train(trial=Trial())
    folder = root / "search/run-3/checkpoint-1"
    assert (folder / "trainer_state.json").exists()
    assert (folder / f"commhooks_{rank}.pt").exists()
    assert not (root / "search/checkpoint-1").exists()


def run_all(rank: int, size: int, root: Path) -> None:
    """One after another: starting the processes and importing the packages takes longer."""
    torchrun.set_environment(rank, size)
    for test in (compare_with_the_bare_loop, resume, resume_from_elsewhere, misuse, search):
        try:
            test(rank, size, root)
        finally:
            AcceleratorState._reset_state(True)


def test_trainer(run_ranks: Any, tmp_path: Path) -> None:
    run_ranks(run_all, 2, tmp_path, timeout=240)


def test_one_process_averages_nothing(tmp_path: Path) -> None:
    trainer = make_trainer(Net(), numbers(4), tmp_path, save_strategy="no")
    trainer.add_callback(CommHookCallback(trainer, "int8"))
    with pytest.raises(commhooks.CommHookError, match=r"one process.*torchrun"):
        trainer.train()
