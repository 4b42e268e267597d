"""Registers hooks on wrapped models; a handle controls the registered hook."""

import functools
import inspect
import json
import os
import warnings
import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

from torch import Tensor, nn
from torch.futures import Future

from commhooks.adapters.adapter import Adapter
from commhooks.adapters.dispatch import adapter_of, inner_module, unwrap
from commhooks.adapters.trace import trace
from commhooks.errors import CommHookError, CommHookOptionError, CommHookStateError
from commhooks.extensions import KERNELS
from commhooks.hook.base import (
    CommHook,
    ModelInfo,
    check_nesting,
    has_consensus,
    is_lossless,
    prepare_all,
    tree,
)
from commhooks.hook.registry import hook_of
from commhooks.runtime import replays
from commhooks.runtime.side_stream import record_on_current_stream
from commhooks.runtime.stats import HookStats
from commhooks.state.saved import load_state, saved_state
from reducer.backends import family_of

Function: TypeAlias = Callable[[Any, Any], Future[Tensor]]
AnyHook: TypeAlias = str | CommHook | Mapping[str, Any] | Function

_REMOVED = "this hook has been removed; commhooks.register() a new one"

_handles: "weakref.WeakKeyDictionary[nn.Module, HookHandle]" = weakref.WeakKeyDictionary()


def register(model: nn.Module, hook: AnyHook, /, **options: Any) -> "HookHandle":
    """Let ``hook`` average the gradients of ``model`` from the next step on. Collective.

    Args:
        model: A model wrapped in ``commhooks.DistributedDataParallel`` or in torch's own, also
            inside what ``torch.compile``, Fabric's ``setup`` or Accelerate's ``prepare`` returned;
            a module that torch's ``replicate`` was applied to; or one that ``fully_shard`` has
            sharded over a mesh of two dimensions, whose replicas average gradients.
        hook: The name of a hook, a config, a :class:`CommHook`, or a torch-style function
            ``fn(state, bucket)`` that returns a future of the average.
        **options: The options of a named hook. For a function only ``state``.

    Raises:
        CommHookError: ``model`` is not wrapped, cannot take hooks, or has a hook already.
        CommHookMismatchError: The ranks registered different hooks or options; on every rank.
        UnknownHookError, CommHookOptionError: See :func:`create`. The other ranks raise as well.
    """
    return register_with(adapter_of, model, hook, options)


def register_with(
    make_adapter: Callable[[nn.Module], Adapter],
    model: nn.Module,
    hook: AnyHook,
    options: Mapping[str, Any],
) -> "HookHandle":
    """Register a hook with the adapter that ``make_adapter(model)`` returns. Collective."""
    model = unwrap(model)
    if model in _handles:
        raise CommHookError(
            f"the model has a hook already, {_handles[model].hook!r}; use replace() of its handle, "
            "commhooks.handle_of(model), or remove() it first"
        )
    adapter = make_adapter(model)
    adapter.install(*_agreed(adapter, hook, options))
    handle = HookHandle(model, adapter)
    keep(model, handle)
    return handle


def keep(model: nn.Module, handle: "HookHandle") -> None:
    """Let :func:`handle_of` find the handle of ``model``, as long as the model is in use."""
    _handles[model] = handle


def handle_of(model: nn.Module) -> "HookHandle | None":
    """Return the handle of the hook that is registered on ``model``, or None.

    The forms of one model that :func:`register` accepts have the same handle, and so do the module
    inside the wrapper, which is what many libraries pass to callbacks, its parts, and a module that
    contains the model. A hook from torch's ``register_comm_hook`` has none, unless its state is a
    :class:`CommHookState`.

    Raises:
        CommHookError: ``model`` is no module, or belongs to several models with hooks.
    """
    wrapper, inner = unwrap(model), inner_module(model)
    if wrapper in _handles or wrapper is not inner:
        return _handles.get(wrapper) or _handles.get(inner)  # a CommHookState has the inner one
    # The newest wrapper of a module counts: a library that wraps it again may not free the old one.
    models = {inner_module(other): handle for other, handle in _handles.items()}
    if inner in models:
        return models[inner]
    found = [h for other, h in models.items() if _has(other, inner) or _has(inner, other)]
    if len(found) > 1:
        raise CommHookError(
            f"{type(inner).__name__} belongs to {len(found)} models with hooks: "
            f"{', '.join(repr(handle.hook) for handle in found)}; pass one of the models"
        )
    return found[0] if found else None


def _has(model: nn.Module, part: nn.Module) -> bool:
    return any(module is part for module in model.modules())


class HookHandle:
    """A registered hook. Use it between two steps.

    ``replace``, ``remove`` and ``load_state_dict`` must be called on every rank.
    """

    def __init__(
        self, model: nn.Module, adapter: Adapter | None = None, awaited: CommHook | None = None
    ) -> None:
        self._model = weakref.ref(model)
        self._adapter = adapter  # None before a hook is installed, and after it has been removed
        self._awaited = awaited  # the hook of a CommHookState, until it is installed

    @property
    def hook(self) -> CommHook | Function:
        """The hook in use. Raises CommHookError after it has been removed."""
        if self._awaited is not None:
            return self._awaited
        return _as_given(self._in_use().hook)

    @property
    def is_registered(self) -> bool:
        """Whether the hook is in use: not removed, and not one that awaits the first backward."""
        return self._adapter is not None

    @property
    def adapter(self) -> Adapter:
        """The adapter between hook and model. For integrations; it may change with any release."""
        return self._in_use()

    def start(self, adapter: Adapter, state: Mapping[str, Any] | None) -> None:
        """Install the awaited hook, with its saved state if any. Collective. For integrations."""
        assert self._awaited is not None
        self._adapter = adapter
        try:
            adapter.install(*_agreed(adapter, self._awaited, {}))
            if state is not None:
                self.load_state_dict(state)
        except BaseException:
            self._adapter = None
            raise
        self._awaited = None

    def replace(self, hook: AnyHook, /, **options: Any) -> None:
        """Use another hook from the next step on. Collective.

        Arguments and errors are those of :func:`register`. After an error the former hook stays in
        use. State is not carried over.

        If the models differ under the former hook (``consensus = False``), as with ``local_sgd``,
        the parameters of all ranks are averaged first. The states of the optimizers still differ:
        create new optimizers, or the models will differ slightly from the next step on.
        """
        adapter = self._in_use()
        adapter.drain()  # so that nothing is on its way when its connections close
        new, token = _agreed(adapter, hook, options)
        _restore_consensus(adapter)  # first, because it fails if a peer does
        adapter.install(new, token)

    def remove(self) -> None:
        """Return to the plain average; a hook can be registered again. Collective.

        Models that differ are averaged as in :meth:`replace`.
        """
        adapter = self._in_use()
        adapter.drain()
        _restore_consensus(adapter)
        adapter.install(None)
        self._adapter = None
        model = self._model()
        if model is not None:
            _handles.pop(model, None)

    def __repr__(self) -> str:
        model = type(inner_module(self._model() or nn.Identity())).__name__
        if self._adapter is None:
            state = "removed" if self._awaited is None else f"awaits {self._awaited!r}"
            return f"HookHandle({state})"
        return f"HookHandle({self.hook!r} on {model}, {self._adapter.steps} steps)"

    def stats(self, last: int | None = None) -> HookStats:
        """Return what the hook cost and saved on this rank since it was registered or replaced.

        With ``last=100``, the means are over the last 100 steps, at most 1000, without a warm-up
        that came before. Then ``exposed_seconds`` is not known. Hooks in C++, such as ``bf16`` or
        what ``auto`` has settled on, and torch-style functions have means over all steps in any
        case; ``steps`` says how many.
        """
        if last is not None and last < 1:
            raise CommHookError(f"stats(last): expected at least 1 step, found {last}")
        stats, hook = self._in_use().stats(last), self.hook
        return replace(stats, metrics=hook.metrics()) if isinstance(hook, CommHook) else stats

    def trace(self, path: str | os.PathLike[str]) -> AbstractContextManager[Path]:
        """Record the steps inside a ``with`` block on this rank, as a trace for Perfetto.

        ::

            with handle.trace("step.json") as written:
                loss = model(inputs).sum()
                loss.backward()

        Open the file at https://ui.perfetto.dev or chrome://tracing; docs/tracing.md explains its
        contents. Rank 0 writes ``path``, rank r ``step.rank<r>.json``; ``written`` is the path.
        Each rank may trace or not.

        On CUDA the times are those of the host, and nothing is synchronized. On torch's own wrapper
        only gradients, hooks and their collectives are visible. Use it for a few steps: records
        stay in memory, about a kilobyte per gradient and step. If the block raises, the trace so
        far is written.

        Raises:
            CommHookError: The directory does not exist, or another trace of the model is under way.
        """
        return trace(self._in_use(), path, {"hook": _identity(self.hook)})

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's part of what a resumed run needs. Each rank must save its own.

        ``torch.save`` and ``torch.load`` preserve it. For ``torch.distributed.checkpoint``, which
        other ranks can load as well, there is :class:`commhooks.state.HookState`, and for files
        that one rank writes :class:`commhooks.state.GatheredState`. :mod:`commhooks.state` says
        what is in the dict.
        """
        adapter = self._in_use()
        hook = self.stateful_hook()
        with adapter.between_steps():
            saved = saved_state(hook, adapter)
        record_on_current_stream(saved["state"])
        return saved

    def load_state_dict(self, state: Mapping[str, Any] | CommHookStateError) -> None:
        """Restore a state that :meth:`state_dict` returned on the same rank. Collective.

        A state of other ranks can be loaded if it has the parts of all: then the errors of each
        replica are the mean of what the replicas had. Integrations pass an error in place of a
        state that cannot be read.

        Raises:
            CommHookStateError: The state is damaged, or from another hook, rank or model, on this
                rank or on another one; or the hook cannot use the state of other ranks. Nothing has
                changed on any rank.
        """
        adapter = self._in_use()
        hook = self.stateful_hook()
        with adapter.between_steps():
            load_state(state, hook, adapter)

    def _in_use(self) -> Adapter:
        if self._adapter is None:
            raise CommHookError(
                _REMOVED
                if self._awaited is None
                else f"hook {self._awaited!r} is installed in the first backward: run one first, "
                "and check that its CommHookState was passed to register_comm_hook()"
            )
        return self._adapter

    def stateful_hook(self) -> CommHook:
        """Return the hook, whose state is to be saved or loaded. For integrations.

        Raises:
            CommHookStateError: The state cannot be saved.
        """
        if not isinstance(self.hook, CommHook):
            raise CommHookStateError(
                f"{self.hook!r} is a torch-style function, which keeps its own state: save it in "
                "your script"
            )
        return self.hook


class _FunctionHook:
    """A torch-style function with its state."""

    def __init__(self, function: Function, state: Any) -> None:
        self.function = function
        self.name = getattr(function, "__qualname__", type(function).__qualname__)
        self._state = state

    def __call__(self, bucket: Any) -> Future[Tensor]:
        return self.function(self._state, bucket)


def _as_given(hook: Any) -> CommHook | Function:
    """Return a hook in the form in which :func:`register` gets it."""
    given: CommHook | Function = hook.function if isinstance(hook, _FunctionHook) else hook
    return given


def _agreed(
    adapter: Adapter, hook: AnyHook, options: Mapping[str, Any]
) -> tuple[CommHook | _FunctionHook, int]:
    """Return the hook to install and its token, after all ranks have agreed on it. Collective."""
    failure: BaseException | None = None
    try:
        new = _resolve(hook, options)
        if isinstance(new, CommHook):
            _check(new, adapter)
        adapter.check(new)
        if isinstance(new, CommHook):
            _prepare(new, adapter)
        identity = _identity(_as_given(new))
        if not KERNELS.is_compiled:
            # Gloo's own collectives are used then: comm/point_to_point.py.
            identity += f", without {KERNELS.name}"
        if replays.MAX_CAPTURES > 0:
            # Steps end with one more collective then: Note [Replays].
            identity += f", with {replays.SWITCH}=1"
    except BaseException as error:
        # Whatever it is: other ranks may have no such error, and would wait.
        failure, identity = error, f"{type(error).__name__}: {error}"
    try:
        token = adapter.agree("hook and options", identity)
    except CommHookError:
        if failure is None:
            raise
    if failure is not None:
        raise failure
    if isinstance(new, CommHook):
        _note_use(new, adapter)
    return new, token


def _resolve(hook: AnyHook, options: Mapping[str, Any]) -> CommHook | _FunctionHook:
    if isinstance(hook, str | Mapping | CommHook):
        return hook_of(hook, options)
    if isinstance(hook, type) or not callable(hook):
        raise CommHookError(
            f"expected the name of a hook, a config, a CommHook or a function fn(state, bucket), "
            f"found {hook!r}"
        )
    _check_arity(hook)
    if unknown := sorted(options.keys() - {"state"}):
        raise CommHookOptionError(
            f"a torch-style function has one option, state=; found {', '.join(unknown)}"
        )
    return _FunctionHook(hook, options.get("state"))


def _check_arity(function: Function) -> None:
    try:
        signature = inspect.signature(function)
    except ValueError:
        return  # compiled functions may have none
    try:
        signature.bind("state", "bucket")
    except TypeError as error:
        raise CommHookError(
            f"expected a function of two arguments, fn(state, bucket), under any names; found "
            f"{function!r} with {signature}"
        ) from error


def _identity(hook: CommHook | Function) -> str:
    if isinstance(hook, CommHook):
        return json.dumps(hook.to_config(), sort_keys=True)
    while isinstance(hook, functools.partial):
        hook = hook.func
    named = hook if hasattr(hook, "__qualname__") else type(hook)
    return f"function {named.__module__}.{named.__qualname__}"


def _restore_consensus(adapter: Adapter) -> None:
    """Average the models if they differ: averaging only gradients would keep them apart.

    What exchanges would bring later is not waited for: each model contains its own part of it.
    """
    if isinstance(adapter.hook, CommHook) and not has_consensus(adapter.hook):
        adapter.average_parameters()


def _check(hook: CommHook, adapter: Adapter) -> None:
    """Raise CommHookError unless ``hook`` can be used on the model's backend."""
    check_nesting(hook)
    check_not_in_use(hook, adapter)
    backend = family_of(adapter.group, adapter.device)
    for each in tree(hook):
        if backend not in each.backends:
            raise CommHookError(
                f"hook {each!r} works on {', '.join(each.backends)}; the model's process group "
                f"uses {backend!r} for tensors on {adapter.device.type!r}. A subclass of the hook "
                "may name other backends in `backends`"
            )


_last_used: dict[int, tuple[weakref.ref[CommHook], weakref.ref[Adapter]]] = {}
"""The adapter in which each hook was used last, by the id of the hook: copies were not."""


def _note_use(hook: CommHook, adapter: Adapter) -> None:
    for each in tree(hook):
        key = id(each)
        forget = functools.partial(_forget, key)
        _last_used[key] = weakref.ref(each, forget), weakref.ref(adapter)


def _forget(key: int, _: object) -> None:
    _last_used.pop(key, None)


def _has_state_of_another(hook: CommHook, adapter: Adapter) -> bool:
    _, former = _last_used.get(id(hook), (None, None))
    return former is not None and former() is not adapter and bool(hook.state or hook.extra_state)


def check_not_in_use(hook: CommHook, adapter: Adapter) -> None:
    """Raise CommHookError if ``hook`` is in use on another model than that of ``adapter``.

    Or was: its state would go on with parameters of the same names.
    """
    others = [handle.hook for handle in _handles.values() if handle._adapter is not adapter]  # noqa: SLF001
    hooks = [other for other in others if isinstance(other, CommHook)]
    in_use = {id(each) for other in hooks for each in tree(other)}
    for each in tree(hook):
        if id(each) in in_use or _has_state_of_another(each, adapter):
            raise CommHookError(
                f"{each!r} is or was in use on another model, and its state belongs to the "
                "parameters there; create another one, e.g. commhooks.create(hook.to_config())"
            )


def _prepare(hook: CommHook, adapter: Adapter) -> None:
    try:
        sharded = adapter.tensor_parallel
        replicated = adapter.parameters.keys() - sharded if sharded else ()
        info = ModelInfo(adapter.roles, adapter.units, replicated)
        prepare_all(hook, adapter.parameters, adapter.group, info)
    except CommHookError:
        raise
    except Exception as error:
        raise CommHookError(
            f"prepare() of hook {hook!r} failed: {type(error).__name__}: {error}"
        ) from error
    if adapter.sparse and not is_lossless(hook):
        warnings.warn(
            f"the gradients of {', '.join(adapter.sparse)} are sparse: they are averaged exactly, "
            f"as rows, and hook {hook.name!r} does not get them. If it should, create their "
            "embeddings with sparse=False",
            stacklevel=4,
        )
