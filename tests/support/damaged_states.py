"""Damages what ``handle.state_dict()`` returned, at random, as files and scripts may do."""

import copy
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

__all__ = ["damaged"]

Dict = dict[Any, Any]
_DTYPES = (torch.int8, torch.int64, torch.float16, torch.float64, torch.bool, torch.complex64)
_OTHERS = (None, 3, -1, 2.5, float("nan"), "x", [], {}, [1], True, torch.ones(2), 10**30)


def damaged(saved: Dict, seed: int) -> tuple[str, Dict]:
    """Return what was done, and a damaged copy of ``saved``."""
    draw = random.Random(seed)
    copied = copy.deepcopy(saved)
    where = draw.choices((_file, _config, _keys, _tensor), (2, 2, 2, 5))[0]
    return where(copied, draw), copied


def _file(saved: Dict, draw: random.Random) -> str:
    key = draw.choice(list(saved))
    change = draw.choice((_drop, _rename, _replace, _add, _shift))
    return f"file: {change(saved, key, draw)}"


def _config(saved: Dict, draw: random.Random) -> str:
    config = json.loads(saved["hook"])
    what = _change_config(config, draw)
    saved["hook"] = json.dumps(config, default=str)
    return what


def _change_config(config: Dict, draw: random.Random) -> str:
    found = [(parent, key) for parent, key in _items(config) if parent]
    parent, key = draw.choice(found)
    if isinstance(parent, list):
        action = draw.choice(("truncate", "replace", "shift"))
        if action == "truncate":
            del parent[-1]
            return "config: a list is truncated"
        return f"config: {(_replace if action == 'replace' else _shift)(parent, key, draw)}"
    change = draw.choice((_drop, _rename, _replace, _add, _shift))
    return f"config: {change(parent, key, draw)}"


def _keys(saved: Dict, draw: random.Random) -> str:
    """Change the entries of a state or their keys."""
    states = [
        saved["state"],
        *(each for part in saved["state"].values() for each in (part, *_states(part))),
    ]
    state = draw.choice([state for state in states if state] or states)
    if not state:
        return _add(state, "weight", draw)
    key = draw.choice(list(state))
    change = draw.choice((_drop, _rename, _replace, _add, _swap, _empty))
    return f"state: {change(state, key, draw)}"


def _tensor(saved: Dict, draw: random.Random) -> str:
    entries = [entry for part in saved["state"].values() for entry in _entries(part) if entry]
    if not entries:
        return _keys(saved, draw)
    entry = draw.choice(entries)
    name = draw.choice(list(entry))
    names: list[Callable[..., str]] = [_drop, _rename, _replace, _add]
    if draw.random() < 0.3:
        return f"field: {draw.choice(names)(entry, name, draw)}"
    change, entry[name] = draw.choice(list(_changed_tensors(entry[name], draw)))
    return f"field {name!r}: {change}"


def _changed_tensors(tensor: Tensor, draw: random.Random) -> Iterator[tuple[str, Any]]:
    for dtype in _DTYPES:
        yield f"{dtype}", tensor.to(dtype)
    yield "flat", tensor.reshape(-1)
    yield "one more dimension", tensor[None]
    yield "twice as long", torch.cat([tensor.reshape(-1)] * 2)
    yield "empty", tensor.new_empty(0)
    yield "a scalar", tensor.new_zeros(())
    yield "another shape", tensor.new_zeros(tuple(size + 1 for size in tensor.shape) or (2,))
    yield "transposed", tensor.mT.contiguous() if tensor.dim() > 1 else tensor
    yield "truncated", tensor[:-1] if tensor.dim() else tensor
    yield "on meta", tensor.to("meta")
    yield "expanded", torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)
    yield "not contiguous", torch.stack([tensor, tensor], -1)[..., 0]
    yield "negative", -tensor - 1
    if tensor.dtype.is_floating_point:
        yield "a parameter", torch.nn.Parameter(tensor)
        yield "sparse", tensor.to_sparse()
        yield "NaN", torch.full_like(tensor, torch.nan)
        number = draw.choice((torch.nan, torch.inf, -torch.inf))
        flat = tensor.flatten().clone()
        flat[:1] = number
        yield f"{number} in one place", flat.reshape(tensor.shape)
    else:
        yield "too large", tensor + 2**40


def _drop(parent: Dict, key: Any, draw: random.Random) -> str:
    del parent[key]
    return f"{key!r} is missing"


def _rename(parent: Dict, key: Any, draw: random.Random) -> str:
    new = draw.choice((f"{key}s", f".{key}", 3, "0123456789abcdef"))
    parent[new] = parent.pop(key)
    return f"{key!r} is renamed to {new!r}"


def _replace(parent: Any, key: Any, draw: random.Random) -> str:
    parent[key] = draw.choice(_OTHERS)
    return f"{key!r} is {parent[key]!r}"


def _add(parent: Dict, key: Any, draw: random.Random) -> str:
    new = draw.choice(("extra", ".inner", "0123456789abcdef", "vector"))
    parent.setdefault(new, copy.deepcopy(parent.get(key, {})))
    return f"{new!r} is new, or as before"


def _shift(parent: Any, key: Any, draw: random.Random) -> str:
    value = parent[key]
    if isinstance(value, bool):
        parent[key] = not value
    elif isinstance(value, int | float):
        parent[key] = value + draw.choice((1, -1, 10, -10))
    elif isinstance(value, str):
        parent[key] = draw.choice((value + "x", "int4", "allreduce", ""))
    else:
        return _replace(parent, key, draw)
    return f"{key!r} is {parent[key]!r}"


def _swap(state: Dict, key: Any, draw: random.Random) -> str:
    other = draw.choice(list(state))
    state[key], state[other] = state[other], state[key]
    return f"{key!r} and {other!r} are swapped"


def _empty(state: Dict, key: Any, draw: random.Random) -> str:
    state[key] = {}
    return f"{key!r} is empty"


def _states(state: Dict) -> Iterator[Dict]:
    """Yield the states of nested hooks."""
    for key, value in state.items():
        if key.startswith("."):
            yield value
            yield from _states(value)


def _entries(state: Dict) -> Iterator[Dict]:
    for each in (state, *_states(state)):
        yield from (entry for key, entry in each.items() if not key.startswith("."))


def _items(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield all dicts and lists in a config with each of their keys."""
    for key, item in list(value.items() if isinstance(value, dict) else enumerate(value)):
        yield value, key
        if isinstance(item, dict | list):
            yield from _items(item)
