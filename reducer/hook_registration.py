"""The hook of a wrapper's reducer, and what the wrapper knows about it."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from reducer.native import AverageHook, GradBucket, HostGroup, NativeHook, Reducer

BoundHook = Callable[[GradBucket], torch.futures.Future[Tensor]]


def check_annotations(hook: Callable[..., Any]) -> None:
    """Raise ValueError if ``hook(state, bucket)`` is annotated as a function of something else."""
    try:
        signature = inspect.signature(hook, eval_str=True)
    except (NameError, TypeError, ValueError):  # no signature, or names that only type checkers see
        return
    bucket = next(iter([*signature.parameters.values()][1:]), None)
    kind = inspect.Parameter.empty if bucket is None else bucket.annotation
    if isinstance(kind, type) and not (
        issubclass(kind, dist.GradBucket)  # type: ignore[attr-defined]
        or kind in (inspect.Parameter.empty, object, Any)
    ):
        raise ValueError(
            "Communication hook: bucket annotation should be dist.GradBucket, found "
            f"{kind.__name__}."
        )
    returned = signature.return_annotation
    allowed = (inspect.Signature.empty, Any, torch.futures.Future, torch.futures.Future[Tensor])
    if returned not in allowed:
        raise ValueError(
            "Communication hook: return annotation should be torch.futures.Future[torch.Tensor], "
            f"found {returned!r}."
        )


class HookRegistration:
    """Sets the reducer's hook, and knows what the wrapper must know about it.

    Without a registered hook, the reducer computes the exact average, sent in ``wire_dtype``. All
    attributes are read-only.

    Attributes:
        is_taken: whether a hook was registered through a method of torch's wrapper.
        name: the name of the registered hook; None without one.
        averages_gradients: whether the hook averages gradients, rather than parameters.
        on_overwrite: called between two steps, after the parameters of all ranks were overwritten.
        before_step: called before each synchronized forward; it may set another hook.
    """

    def __init__(self, reducer: Reducer, wire_dtype: torch.dtype | None) -> None:
        self._reducer = reducer
        self._wire_dtype = wire_dtype
        self.reset()

    def install(
        self,
        hook: NativeHook | BoundHook,
        *,
        name: str | None = None,
        averages_gradients: bool = True,
        on_overwrite: Callable[[], None] | None = None,
        before_step: Callable[[], None] | None = None,
    ) -> None:
        """Use ``hook`` from the next step on, in place of the present one.

        ``name``: default: that of ``hook``. Raises RuntimeError while a backward is under way.
        """
        self._reducer.set_hook(hook)
        self._hook = hook
        self.is_taken = False
        self.name: str | None = name or self._reducer.hook_name
        self.averages_gradients = averages_gradients
        self.on_overwrite = on_overwrite or (lambda: None)
        self.before_step = before_step or (lambda: None)

    def connect(self, host: HostGroup | None) -> None:
        """Let the reducer use the memory of the host, and keep the hook. Between two steps."""
        self._reducer.set_process_group(self._reducer.process_group, host)  # drops the hook
        self._reducer.set_hook(self._hook)

    def reset(self) -> None:
        """Return to the default hook; another hook can then be registered."""
        self.install(AverageHook(self._reducer.process_group, self._wire_dtype))
        self.name = None

    def take(self, hook: NativeHook | BoundHook, name: str | None = None) -> None:
        """Install a hook that torch's wrapper would not let another one replace.

        Raises RuntimeError if there is one already.
        """
        if self.name is not None and not self.is_taken:
            raise RuntimeError(
                f"the model has the hook {self.name!r} already, from `commhooks.register`; use "
                "replace() of its handle, commhooks.handle_of(model), or remove() it first"
            )
        if self.is_taken:
            raise RuntimeError(
                "register_comm_hook or register_builtin_comm_hook can only be called once. Use "
                "`commhooks.register`, whose handle can replace and remove hooks."
            )
        self.install(hook, name=name)
        self.is_taken = True
