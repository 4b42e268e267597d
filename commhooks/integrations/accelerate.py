"""Hooks on models that Accelerate prepares.

::

    from commhooks.integrations.accelerate import prepare

    accelerator = Accelerator()
    model = prepare(accelerator, model, "powersgd", rank=4)
    optimizer, data = accelerator.prepare(optimizer, data)
"""

from collections.abc import Mapping
from typing import Any

try:
    from accelerate import Accelerator
    from accelerate.utils import DistributedDataParallelKwargs, DistributedType
except ImportError as error:
    raise ImportError(
        "commhooks.integrations.accelerate needs the package accelerate: "
        "pip install 'commhooks[integrations]'"
    ) from error

from torch import nn

from commhooks.adapters.handle import AnyHook, HookHandle, handle_of, register
from commhooks.errors import CommHookError
from commhooks.state.files import load_states, save_states


def prepare(
    accelerator: Accelerator, model: nn.Module, hook: AnyHook, /, **options: Any
) -> nn.Module:
    """Return ``accelerator.prepare(model)`` with a hook registered. Collective.

    ``commhooks.handle_of(model)`` is its handle. ``accelerator.save_state`` and ``load_state`` keep
    the hook's state, see :func:`keep_hook_states`. The model may have been prepared before, as it
    must be together with its optimizer under FSDP2.

    Arguments and errors are those of :func:`commhooks.register`.

    Raises:
        CommHookError: There is only one process, so that no gradients are averaged.
    """
    if accelerator.distributed_type == DistributedType.NO:
        raise CommHookError(
            "Accelerate runs one process, which averages no gradients: start the script with "
            "`accelerate launch --num_processes 2` or torchrun, or leave out the hook"
        )
    if not getattr(model, "_is_accelerate_prepared", False):
        model = accelerator.prepare(model)
    register(model, hook, **options)
    keep_hook_states(accelerator)
    return model


def keep_hook_states(accelerator: Accelerator) -> None:
    """Let ``save_state`` and ``load_state`` keep the states of hooks, in a file of each rank.

    :func:`prepare` does this. Call it on every rank if the hook was registered in another way.
    ``accelerator.register_for_checkpointing(handle)`` would keep the state of rank 0 only.
    """
    if not getattr(accelerator, "_keeps_hook_states", False):
        accelerator._keeps_hook_states = True  # noqa: SLF001
        accelerator.register_save_state_pre_hook(
            lambda models, weights, folder: save_states(_handles(accelerator), folder)  # noqa: ARG005
        )
        accelerator.register_load_state_pre_hook(
            lambda models, folder: load_states(_handles(accelerator), folder)  # noqa: ARG005
        )


def _handles(accelerator: Accelerator) -> Mapping[str, HookHandle]:
    """Return the handles by the models' numbers. Under FSDP, Accelerate passes no models on."""
    handles = enumerate(map(handle_of, accelerator._models))  # noqa: SLF001
    return {str(number): handle for number, handle in handles if handle is not None}


class CommHookKwargs(DistributedDataParallelKwargs):
    """Registers a hook on each model that is prepared for DDP.

    ::

        accelerator = Accelerator(kwargs_handlers=[CommHookKwargs("powersgd", rank=4)])
        keep_hook_states(accelerator)

    Args:
        hook: As in :func:`commhooks.register`.
        ddp_options: Arguments of ``DistributedDataParallelKwargs``, such as
            ``{"find_unused_parameters": True}``.
        **options: The options of a named hook.

    Raises:
        CommHookError: ``ddp_options`` name a hook of torch's.
    """

    def __init__(
        self, hook: AnyHook, /, *, ddp_options: Mapping[str, Any] | None = None, **options: Any
    ) -> None:
        if refused := sorted(name for name in ddp_options or () if name.startswith("comm_")):
            raise CommHookError(
                f"expected no {', '.join(refused)} in ddp_options, beside the hook {hook!r}"
            )
        super().__init__(**(ddp_options or {}))
        self._hook = hook
        self._options = options

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The base class: Accelerate looks handlers up by their class, and knows no subclasses."""
        kind: type = DistributedDataParallelKwargs
        return kind

    def to_dict(self, ignore_keys: tuple[str, ...] = ()) -> dict[str, Any]:
        """Return the arguments of torch's wrapper."""
        given = super().to_dict()
        return {key: given[key] for key in given if key not in ("_hook", "_options", *ignore_keys)}

    def register_comm_hook(self, model: nn.Module) -> None:
        """Register the hook on a wrapped model. Accelerate calls this."""
        register(model, self._hook, **self._options)
