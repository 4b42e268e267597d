"""Programs of other people: the loops, recipes and models of PEFT, TRL, LitGPT and timm.

With `allreduce` they train as they do without this package, and with `int8` almost so. Each test
also runs two hooks with a wrong average, which must leave the bound for `int8`. All use SGD,
because the scale of a gradient does not matter to Adam.
"""

import contextlib
import functools
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import torchrun
from support.pages import blocks_of
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel

import commhooks
from commhooks.testing.compare import same_bits

STEPS = 4
VOCABULARY = 64
LENGTH = 16
POWERSGD = {"name": "powersgd", "rank": 1, "start_step": 0, "min_compression_rate": 1.0}
WRAPPERS = (TorchDistributedDataParallel, commhooks.DistributedDataParallel)

Result = tuple[dict[str, Tensor], list[float]]  # the weights, and the loss of each step

pytestmark = pytest.mark.filterwarnings("ignore")  # those of the packages


def needs(package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(find_spec(package) is None, reason=f"{package} is not installed")


def half_the_average(_state: None, bucket: commhooks.GradBucket) -> Future[Tensor]:
    work = dist.all_reduce(bucket.buffer().div_(2 * dist.get_world_size()), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def check(train: Callable[[Any], Result], bound: float) -> None:
    """Hold ``train(hook)`` against ``train(None)``, which is the program without this package."""
    weights, losses = train(None)
    found, same_losses = train("allreduce")
    assert same_bits(found, weights)
    assert same_losses == losses

    def deviation(hook: Any) -> float:
        return max(abs(a - b) for a, b in zip(train(hook)[1], losses, strict=True))

    assert 0 < deviation("int8") < bound
    for wrong in ("noop", half_the_average):
        assert deviation(wrong) > bound


def run_page(block: int, **names: Any) -> dict[str, Any]:
    """Run one block of the page about these packages, and return what it has named."""
    exec(blocks_of("integrations/programs.md")[block], names)
    return names


def wrap(net: nn.Module, wrapper: Any, hook: Any) -> nn.Module:
    if hook is None:
        return TorchDistributedDataParallel(net)
    model: nn.Module = wrapper(net)
    commhooks.register(model, hook)
    return model


def copied(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
    )
    return LlamaForCausalLM(config)


def lora() -> Any:
    from peft import LoraConfig

    return LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


def train_lora(rank: int, wrapper: Any, hook: Any) -> Result:
    from peft import get_peft_model, get_peft_model_state_dict

    net = get_peft_model(llama(), lora())
    model = wrap(net, wrapper, hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    losses = []
    generator = torch.Generator().manual_seed(rank)
    for _ in range(STEPS):
        ids = torch.randint(VOCABULARY, (2, LENGTH), generator=generator)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return copied(get_peft_model_state_dict(net)), losses


def run_peft(rank: int, size: int) -> None:
    for wrapper in WRAPPERS:
        check(functools.partial(train_lora, rank, wrapper), 1.5e-4)
    model = run_page(0, net=llama())["model"]
    model(input_ids=torch.zeros(1, 2, dtype=torch.long)).logits.sum().backward()


@needs("peft")
def test_peft(run_ranks: Any) -> None:
    run_ranks(run_peft, 2, timeout=240)


def make_tokenizer(words: list[str]) -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: i for i, word in enumerate(["<pad>", "</s>", "<unk>", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    )


def texts_and_tokenizer() -> tuple[Any, Any]:
    from datasets import Dataset, disable_progress_bars

    disable_progress_bars()
    words = [f"word{i}" for i in range(VOCABULARY - 3)]
    texts = [" ".join(words[i * j % len(words)] for j in range(1, 14)) for i in range(4 * STEPS)]
    return Dataset.from_dict({"text": texts}), make_tokenizer(words)


def fine_tune(folder: Path, peft_config: Any, hook: Any) -> Result:
    """Run TRL's SFTTrainer with its defaults: checkpointing of activations and clipping too."""
    from accelerate.state import AcceleratorState
    from trl import SFTConfig, SFTTrainer

    from commhooks.integrations.transformers import CommHookCallback

    data, tokenizer = texts_and_tokenizer()
    args = SFTConfig(
        str(folder),
        use_cpu=True,
        max_steps=STEPS,
        per_device_train_batch_size=2,
        optim="sgd",
        learning_rate=0.5,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    try:
        trainer = SFTTrainer(
            llama(),
            args,
            train_dataset=data,
            processing_class=tokenizer,
            peft_config=peft_config,
        )
        if hook is not None:
            trainer.add_callback(CommHookCallback(trainer, hook))
        trainer.train()
    finally:
        AcceleratorState._reset_state(True)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return copied(trainer.model.state_dict()), losses


def run_trl(rank: int, size: int, folder: Path) -> None:
    torchrun.set_environment(rank, size)
    check(functools.partial(fine_tune, folder, None), 1.5e-3)
    if find_spec("peft") is not None:
        check(functools.partial(fine_tune, folder, lora()), 3e-4)
    data, tokenizer = texts_and_tokenizer()
    with contextlib.chdir(folder):
        trainer = run_page(1, net=llama(), data=data, tokenizer=tokenizer)["trainer"]
    assert commhooks.handle_of(trainer.model) is not None


@needs("trl")
def test_trl(run_ranks: Any, tmp_path: Path) -> None:
    run_ranks(run_trl, 2, tmp_path, timeout=240)


def litgpt_arguments() -> dict[str, Any]:
    from litgpt.args import EvalArgs, TrainArgs
    from litgpt.config import Config
    from litgpt.data import DataModule

    class Loader(torch.utils.data.DataLoader[Tensor]):
        """Can be saved, as the loaders that LitGPT's data modules return."""

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            pass

    class Tokens(DataModule):
        def connect(self, tokenizer: Any, batch_size: int, max_seq_length: int) -> None:
            self.batch_size = batch_size
            self.shape = (8, max_seq_length + 1)  # a resumed run begins with the first rows

        def train_dataloader(self) -> Any:
            rows = torch.randint(VOCABULARY, self.shape, generator=torch.Generator().manual_seed(0))
            return Loader(rows, batch_size=self.batch_size)

        val_dataloader = train_dataloader

    train = TrainArgs(
        save_interval=STEPS // 2,
        global_batch_size=8,
        micro_batch_size=2,
        max_tokens=8 * LENGTH * STEPS,
        max_norm=10.0,
        lr_warmup_steps=0,
    )
    config = Config(block_size=LENGTH, padded_vocab_size=VOCABULARY, n_layer=2, n_head=4, n_embd=32)
    evaluation = EvalArgs(max_iters=1, final_validation=False)
    return {"config": config, "data": Tokens(), "train": train, "eval": evaluation}


def pretrain(folder: Path, hook: Any, resume: Path | bool = False) -> Result:
    """Run what the command ``litgpt pretrain`` does, on a Fabric with another strategy."""
    import lightning
    from lightning.fabric.strategies import DDPStrategy
    from litgpt.pretrain import main

    from commhooks.integrations.lightning import FabricCommHooksStrategy

    strategy = DDPStrategy() if hook is None else FabricCommHooksStrategy(hook)
    fabric = lightning.Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    losses: list[float] = []
    fabric.log_dict = lambda metrics, step: losses.append(metrics["loss"])
    main(
        fabric=fabric,
        devices=2,
        seed=0,
        initial_checkpoint_dir=None,
        resume=resume,
        out_dir=folder,
        tokenizer_dir=None,
        tokenizer=None,
        optimizer={"class_path": "torch.optim.SGD", "init_args": {"lr": 0.5}},
        **litgpt_arguments(),
    )
    return torch.load(folder / "final/lit_model.pth")["model"], losses


def run_litgpt(rank: int, size: int, folder: Path) -> None:
    torchrun.set_environment(rank, size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["litgpt", "pretrain", "tiny"])  # saved with the checkpoint
        # Traced as usual, but compiling the kernels takes minutes.
        patch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
        check(functools.partial(pretrain, folder), 1e-3)

        unbroken, _ = pretrain(folder, POWERSGD)
        half = folder / f"step-{STEPS // 2:08}" / "lit_model.pth"
        resumed, _ = pretrain(folder, POWERSGD, resume=half)
        assert same_bits(resumed, unbroken)

        arguments = litgpt_arguments()
        with contextlib.chdir(folder):
            names = run_page(2, evaluation=arguments.pop("eval"), **arguments)
        assert names["strategy"].handle.stats().total.wire_bytes > 0


@needs("litgpt")
def test_litgpt(run_ranks: Any, tmp_path: Path) -> None:
    run_ranks(run_litgpt, 2, tmp_path, timeout=240)


def train_images(rank: int, wrapper: Any, hook: Any) -> Result:
    """Do what timm's training script does with the parts of the package."""
    from support.programs import model as make
    from timm.loss import LabelSmoothingCrossEntropy
    from timm.optim import create_optimizer_v2
    from timm.utils import ModelEmaV3, distribute_bn, reduce_tensor

    torch.manual_seed(0)
    net = make()
    model = wrap(net, wrapper, hook)
    optimizer = create_optimizer_v2(model, opt="momentum", lr=0.002)
    average = ModelEmaV3(net, decay=0.9)
    loss_of = LabelSmoothingCrossEntropy()
    losses = []
    generator = torch.Generator().manual_seed(rank)
    for step in range(STEPS):
        images = torch.randn(4, 3, 32, 32, generator=generator)
        labels = torch.randint(4, (4,), generator=generator)
        loss = loss_of(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        average.update(net, step=step)
        losses.append(reduce_tensor(loss.detach(), dist.get_world_size()).item())
    distribute_bn(model, dist.get_world_size(), reduce=True)
    return copied({**net.state_dict(), **average.state_dict(prefix="average.")}), losses


def run_timm(rank: int, size: int) -> None:
    for wrapper in WRAPPERS:
        check(functools.partial(train_images, rank, wrapper), 1e-3)
    run_page(3)["model"](run_page(4)["images"]()).sum().backward()


@needs("timm")
def test_timm(run_ranks: Any) -> None:
    run_ranks(run_timm, 2, timeout=240)


@needs("timm")
def test_compare_a_model_of_timm() -> None:
    from click.testing import CliRunner

    from commhooks.cli.commands import commands

    names = ["--model", "support.programs:model", "--input", "support.programs:images"]
    arguments = ["compare", *names, "--hooks", "int8,powersgd:rank=1", "--steps", "2"]
    result = CliRunner().invoke(commands, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert "powersgd:rank=1" in result.output
