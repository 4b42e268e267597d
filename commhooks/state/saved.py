"""Save and load the state of a hook."""

import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from commhooks.errors import CommHookError, CommHookStateError
from commhooks.hook.base import CommHook, walk
from commhooks.state.entries import count, merge, parts_of, put
from commhooks.state.layout import DistributedModel, Layout, Source, layout_of, of_part
from commhooks.state.resharding import Key, Resharding
from reducer.agreement import values_of_ranks

VERSION = 2
_TYPES = {"version": int, "hook": str, "step": int, "state": Mapping, "tensors": Mapping}
_AFTER_A_FAILURE = (
    "If it was saved after a step that sends nothing had failed on some rank, as under diloco, "
    "begin without the state of the hook: the models are then averaged"
)
_MOST_STEPS = 2**62  # the reducer counts in 64 bits


def saved_state(hook: CommHook, model: DistributedModel) -> dict[str, Any]:
    """Return this rank's part of the state, in the form that ``commhooks.state`` documents."""
    here = layout_of(model)
    own = Source("rank", model.rank, here, model.part)
    same = Source("shard", model.rank % here.shards, here, model.part)
    state: dict[str, dict[Any, Any]] = {str(own): {}, str(same): {}}
    for part in parts_of(hook.state_dict(), hook, model.parameters):
        for key, entry in part.entries.items():
            if not isinstance(entry, Mapping) or not entry:
                put(state, (str(own), *part.path, key), entry)
                continue
            for name, value in entry.items():
                source = same if part.is_same(key, name) else own
                put(state, (str(source), *part.path, key, name), value)
    return {
        "version": VERSION,
        "hook": json.dumps(hook.to_config()),
        "step": model.steps,
        "state": state,
        "tensors": {source: count(entries) for source, entries in state.items()},
    }


class NoStateError(CommHookStateError):
    """There is no state to load, as in a checkpoint from before a hook was used."""

    def __init__(self, text: str = "the checkpoint has no state of a hook") -> None:
        super().__init__(text)


def load_state(
    saved: Mapping[str, Any] | CommHookStateError, hook: CommHook, model: DistributedModel
) -> None:
    """Load a state on all ranks, or on none. Collective.

    An error in its place says why this rank has none. If all have a :class:`NoStateError`, the hook
    begins without a state, with a warning.

    Raises:
        CommHookStateError: See :meth:`HookHandle.load_state_dict`.
    """
    here = layout_of(model)
    loading = _Loading(hook, model)
    outcome = loading.outcome
    outcome.is_missing = isinstance(saved, NoStateError)
    sources: list[Source] = []
    resharding: Resharding | None = None
    with loading.attempt():
        if isinstance(saved, CommHookStateError):
            raise saved
        _check_form(saved)
        _check_hook(saved, hook)
        outcome.step = saved["step"]
        outcome.layout, sources = _sources(saved, model)
        if outcome.layout not in (None, here):
            resharding = Resharding(hook, model, outcome.layout)
            resharding.add({source: saved["state"].get(str(source), {}) for source in sources})
            outcome.sums = resharding.described()
    of_ranks = loading.compare()
    if isinstance(saved, CommHookStateError):  # on all ranks
        warnings.warn(f"{saved}, so {hook!r} begins without a state, at step 0", stacklevel=3)
        load_state(saved_state(hook, model) | {"step": 0, "state": {}}, hook, model)
        return
    layout = next((each.layout for each in of_ranks if each.layout is not None), here)
    if layout != here:
        resharding = resharding or Resharding(
            hook, model, layout
        )  # this rank has no part of the state
        state = resharding.combine({key: it for each in of_ranks for key, it in each.sums.items()})
    before: dict[str, Any] | None = None
    with loading.attempt():
        if layout == here:
            state = _merged(saved, sources)
        parts = list(parts_of(state, hook, model.parameters))
        for part in parts:
            part.check()
        _check_count(saved, sources)
        before = hook.state_dict()
        hook.load_state_dict(state)
        outcome.same_fields = {part.path: part.same_fields() for part in parts if part.gradients}
    try:
        loading.compare()
    except CommHookError:
        if before is not None:
            hook.load_state_dict(before)
        raise
    model.steps = saved["step"]


@dataclass
class _Outcome:
    """The state that one rank has loaded, to be compared with the other ranks."""

    rank: int
    failure: str = ""
    """Why it has loaded nothing."""
    is_missing: bool = False
    """Whether that is because there is nothing to load."""
    step: int = 0
    layout: Layout | None = None
    """The layout of the ranks that saved the state; None: there is no state."""
    sums: Mapping[Key, tuple[torch.Size, torch.dtype]] = field(default_factory=dict)
    same_fields: Mapping[tuple[str, ...], Sequence[tuple[str, str, str]]] = field(
        default_factory=dict
    )
    """The :meth:`HookPart.same_fields` by the path of the hook."""


class _Loading:
    """The loading of a state: it succeeds on all ranks, or fails on all."""

    def __init__(self, hook: CommHook, model: DistributedModel) -> None:
        self.outcome = _Outcome(model.rank)
        self._hook = hook
        self._model = model
        self._cause: Exception | None = None

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Keep an error of this rank for :meth:`compare`."""
        try:
            yield
        except CommHookStateError as error:
            self._cause, self.outcome.failure = error, str(error)
        except Exception as error:  # hooks of other packages may raise anything
            self._cause = error
            self.outcome.failure = f"hook {self._hook!r} cannot use the saved state: {error}"

    def compare(self) -> list[_Outcome]:
        """Return the outcomes of all ranks. Raises on all if one has failed, or they do not fit."""
        model, what = self._model, "the loading of a saved state"
        found = {
            it.rank: it for it in values_of_ranks(self.outcome, model.group, model.device, what)
        }
        for group in model.shard_groups:
            for others in values_of_ranks(found, group, model.device, what):
                found |= others
        of_ranks = [found[rank] for rank in sorted(found)]
        if all(each.is_missing for each in of_ranks):
            return of_ranks
        if problem := self.outcome.failure or _mismatch(of_ranks, layout_of(model).shards):
            raise CommHookStateError(
                f"[rank {model.rank}] {problem}. No rank has loaded its state"
            ) from self._cause
        return of_ranks


def _mismatch(of_ranks: Sequence[_Outcome], shards: int) -> str | None:
    first = of_ranks[0]
    same_fields: dict[Any, tuple[int, Any]] = {}  # of the first rank that has the hook
    layout = next((each for each in of_ranks if each.layout is not None), first)
    for each in of_ranks:
        if each.failure:
            return f"rank {each.rank} cannot load its state: {each.failure}"
    for each in of_ranks:
        if each.step != first.step:
            return (
                f"expected states of the same step on all ranks, found step {first.step} on rank "
                f"{first.rank} and {each.step} on rank {each.rank}. {_AFTER_A_FAILURE}"
            )
        if each.layout not in (None, layout.layout):
            return (
                f"expected states that were saved together, found one of {layout.layout} ranks on "
                f"rank {layout.rank} and of {each.layout} on rank {each.rank}"
            )
        for path, fields in each.same_fields.items():
            key = (each.rank % shards, path)
            rank, expected = same_fields.setdefault(key, (each.rank, fields))
            if fields != expected:
                entry, name, value = min(set(fields) ^ set(expected))
                return (
                    f"the states of ranks {rank} and {each.rank} do not match: only one of them "
                    f"has {name!r} of {entry!r} as {value:.60}. {_AFTER_A_FAILURE}"
                )
    return None


def _check_form(saved: Any) -> None:
    if not isinstance(saved, Mapping):
        raise CommHookStateError(
            f"expected what state_dict() returned, found {type(saved).__name__}"
        )
    version = saved.get("version")
    if isinstance(version, int) and version != VERSION:
        raise CommHookStateError(
            f"expected a state of version {VERSION}, found {version}: it was saved by "
            f"{'an earlier' if version < VERSION else 'a later'} version of commhooks, whose form "
            "is another one. Load it with that version, or begin without the state of the hook"
        )
    for name, kind in _TYPES.items():
        if not isinstance(saved.get(name), kind):
            raise CommHookStateError(
                f"expected {name!r} of type {kind.__name__} in the saved state, found "
                f"{saved.get(name)!r}; pass what state_dict() of a handle has returned"
            )
    if not 0 <= saved["step"] < _MOST_STEPS:
        raise CommHookStateError(f"expected a step of at least 0, found {saved['step']}")


def _sources(
    saved: Mapping[str, Any], model: DistributedModel
) -> tuple[Layout | None, list[Source]]:
    """Return the layout of the ranks that saved the state, and the parts that this rank needs."""
    here, rank = layout_of(model), model.rank
    found = {key: Source.of(key) for key in saved["state"]}
    if unknown := [key for key, source in found.items() if source is None]:
        raise CommHookStateError(
            f"expected keys such as 'rank {rank} of {here}' in the state, found {unknown[0]!r}"
        )
    own = of_part([source for source in found.values() if source is not None], model)
    layouts = {source.layout for source in own}
    if not layouts:
        return None, []
    if len(layouts) > 1:
        raise CommHookStateError(
            f"expected a state of one set of ranks, found those of {', '.join(map(str, layouts))}"
        )
    (layout,) = layouts
    sources = layout.sources(here, rank, own[0].part)
    missing = [it for it in sources if it.kind == "rank" and str(it) not in found]
    if missing:
        if not any(saved["tensors"].values()) and not count(saved["state"]):
            return None, []  # nothing in it depends on the ranks
        raise CommHookStateError(
            f"expected the states of all ranks that saved, also of {missing[0]}, found that of "
            f"{', '.join(found) or 'none'}; what has not been sent yet differs by rank, so every "
            "rank saves and loads its own state. For another number of ranks, each needs the "
            "states of all: save commhooks.state.HookState(handle) with "
            "torch.distributed.checkpoint, or GatheredState(handle)"
        )
    return layout, sources


def _merged(saved: Mapping[str, Any], sources: Sequence[Source]) -> dict[Any, Any]:
    state: dict[Any, Any] = {}
    for source in sources:
        part = saved["state"].get(str(source), {})
        if not isinstance(part, Mapping):
            raise CommHookStateError(f"{source}: expected a dict, found {type(part).__name__}")
        state = merge(state, part)
    return state


def _check_count(saved: Mapping[str, Any], sources: Sequence[Source]) -> None:
    """Raise CommHookStateError if tensors are missing, as when only some keys were read."""
    for source in sources:
        expected, found = saved["tensors"].get(str(source)), count(saved["state"].get(str(source)))
        if expected != found:
            raise CommHookStateError(
                f"expected {expected} tensors in the state of {source}, found {found}. "
                "torch.distributed.checkpoint.load() fills only what state_dict() returned: give "
                "it commhooks.state.HookState(handle, checkpoint)"
            )


def _check_hook(saved: Mapping[str, Any], hook: CommHook) -> None:
    here = json.loads(json.dumps(hook.to_config()))
    try:
        there = json.loads(saved["hook"])
    except ValueError as error:
        raise CommHookStateError(f"the config of the saved hook is damaged: {error}") from error
    if not isinstance(there, dict) or there.get("name") != here["name"]:
        raise CommHookStateError(
            f"expected the state of hook {here['name']!r}, found that of "
            f"{there.get('name') if isinstance(there, dict) else there!r}"
        )
    if not count(saved["state"]):
        return  # without state, other options are harmless
    hooks = dict(walk(hook, "", ()))
    for path, (wanted, found) in _differences(here, there):
        owner, _, option = path.rpartition(".")
        if owner in hooks and option in hooks[owner].free_options:
            continue
        raise CommHookStateError(
            f"hook {here['name']!r} has {path}={wanted!r}, but its state was saved with "
            f"{path}={found!r}"
        )


def _differences(here: Any, there: Any, path: str = "") -> Iterator[tuple[str, tuple[Any, Any]]]:
    """Yield where two configs differ, e.g. "rank" or "inner.density", with both values."""
    if isinstance(here, dict) and isinstance(there, dict):
        for name in sorted(here.keys() | there.keys(), key=str):
            inner = f"{path}.{name}" if path else name
            yield from _differences(here.get(name), there.get(name), inner)
    elif isinstance(here, list) and isinstance(there, list) and len(here) == len(there):
        for i, (wanted, found) in enumerate(zip(here, there, strict=True)):
            yield from _differences(wanted, found, f"{path}.{i}")
    elif here != there:
        yield path, (here, there)
