"""Hooks in the Trainer of Transformers.

::

    from commhooks.integrations.transformers import CommHookCallback

    trainer = Trainer(model, args, train_dataset=data)
    trainer.add_callback(CommHookCallback(trainer, "powersgd", rank=4))
    trainer.train()
"""

import json
import os
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
        trainer: The Trainer that gets the callback; callbacks are passed the bare model only.
        hook: As in :func:`commhooks.register`.
        resume_from: The checkpoint that ``trainer.train(resume_from_checkpoint=...)`` resumes from,
            if it is not in ``output_dir``.
        **options: The options of a named hook.

    Raises:
        CommHookError: When training begins: see :func:`commhooks.register`.
        CommHookStateError: When training resumes: a rank lacks its state. On every rank.
    """

    def __init__(
        self,
        trainer: Trainer,
        hook: AnyHook,
        /,
        *,
        resume_from: str | os.PathLike[str] | None = None,
        **options: Any,
    ) -> None:
        self.handle: HookHandle | None = None
        """The handle of the hook, once training has begun."""
        self._trainer = trainer
        self._hook = hook
        self._options = options
        self._resume_from = resume_from

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, *_: Any, **__: Any
    ) -> None:
        """Register the hook, and load its state if training resumes."""
        if not dist.is_initialized():
            raise CommHookError(
                "the Trainer runs one process, which averages no gradients: start the script with "
                "torchrun, or leave out the CommHookCallback"
            )
        model = self._trainer.model_wrapped
        if self.handle is None or handle_of(model) is not self.handle:  # train() is called again
            self.handle = register(model, self._hook, **self._options)
        if state.global_step > 0:
            folder = Path(self._resume_from or _checkpoint(args, state))
            problem = None if self._resume_from else _difference(folder, state)
            load_states({"model": self.handle}, folder, problem)

    def on_save(self, args: TrainingArguments, state: TrainerState, *_: Any, **__: Any) -> None:
        """Write this rank's state into the checkpoint."""
        if self.handle is not None and not args.save_only_model:
            save_states({"model": self.handle}, _checkpoint(args, state))


def _checkpoint(args: TrainingArguments, state: TrainerState) -> Path:
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"


def _difference(folder: Path, state: TrainerState) -> str | None:
    """Return why ``folder``, a guess, is not the checkpoint that training resumes from."""
    file = folder / "trainer_state.json"
    advice = "pass CommHookCallback(..., resume_from=) the checkpoint that train() resumes from"
    if not file.exists():
        return f"there is no such checkpoint; {advice}"
    logged = TrainerState.load_from_json(str(file)).log_history
    if json.dumps(logged) != json.dumps(state.log_history):
        return f"training resumes from another checkpoint of that step; {advice}"
    return None
