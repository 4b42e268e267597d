"""Hooks in the Trainer of Transformers.

::

    from commhooks.integrations.transformers import CommHookCallback

    trainer = Trainer(model, args, train_dataset=data)
    trainer.add_callback(CommHookCallback(trainer, "powersgd", rank=4))
    trainer.train()
"""

from pathlib import Path
from typing import Any

try:
    from transformers import Trainer, TrainerCallback, TrainerState, TrainingArguments
except ImportError as error:
    raise ImportError(
        "commhooks.integrations.transformers needs the package transformers: "
        "pip install 'commhooks[integrations]'"
    ) from error

import torch.distributed as dist

from commhooks.adapters.handle import AnyHook, HookHandle, handle_of, register
from commhooks.errors import CommHookError
from commhooks.state.files import load_states, save_states


class CommHookCallback(TrainerCallback):
    """Registers a hook when training begins, and keeps its state in the Trainer's checkpoints.

    Every rank writes a file into each checkpoint, and reads it when training resumes.

    Args:
        trainer: The Trainer that gets the callback. It tells callbacks neither the wrapped model
            nor the checkpoint that it resumes from.
        hook: As in :func:`commhooks.register`.
        **options: The options of a named hook.

    Raises:
        CommHookError: When training begins: see :func:`commhooks.register`.
        CommHookStateError: When training resumes: a rank lacks its state. On every rank.
    """

    def __init__(self, trainer: Trainer, hook: AnyHook, /, **options: Any) -> None:
        self.handle: HookHandle | None = None
        """The handle of the hook, once training has begun."""
        self._trainer = trainer
        self._hook = hook
        self._options = options
        self._resumes_from: str | None = None
        load = trainer._load_optimizer_and_scheduler  # noqa: SLF001

        def load_from(checkpoint: str | None) -> None:
            self._resumes_from = checkpoint
            load(checkpoint)

        trainer._load_optimizer_and_scheduler = load_from  # noqa: SLF001

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Register the hook, and load its state if training resumes."""
        if not dist.is_initialized():
            raise CommHookError(
                "the Trainer runs one process, which averages no gradients: start the script with "
                "torchrun, or leave out the CommHookCallback"
            )
        model = self._trainer.model_wrapped
        if self.handle is None or handle_of(model) is not self.handle:  # train() is called again
            self.handle = register(model, self._hook, **self._options)
        folder, self._resumes_from = self._resumes_from, None
        if folder is not None:
            load_states({"model": self.handle}, folder)

    def on_save(self, args: TrainingArguments, state: TrainerState, *_: Any, **__: Any) -> None:
        """Write this rank's state into the checkpoint."""
        if self.handle is not None and not args.save_only_model:
            trial = getattr(self._trainer, "_trial", None)  # of a hyperparameter search
            run = self._trainer._get_output_dir(trial=trial)  # noqa: SLF001
            folder = Path(run) / f"checkpoint-{state.global_step}"
            save_states({"model": self.handle}, folder)
