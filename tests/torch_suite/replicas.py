"""Compare the parameters of replicas after each step, without a message between ranks.

Each rank appends a checksum to a file, so that tests whose ranks take different steps do not hang.
"""

from __future__ import annotations

import os
import weakref
import zlib
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import optimizer

_wrappers: list[weakref.ref[Any]] = []
_running: list[Any] = []  # optimizers, as some call another one


def watch(wrapper: nn.Module) -> None:
    """Record the parameters of a wrapper from now on."""
    _wrappers.append(weakref.ref(wrapper))


def record_steps(path: str) -> None:
    """Append the checksums of all wrappers to a file after each step, also in forked processes."""
    file = os.open(path, os.O_WRONLY | os.O_APPEND)
    steps: dict[int, int] = defaultdict(int)

    def after(*_: Any) -> None:
        _running.pop()
        for number, reference in enumerate(_wrappers):
            wrapper = reference()
            if wrapper is None or _running:
                continue
            steps[number] += 1
            line = f"{number} {steps[number]} {wrapper.process_group.rank()} {_checksum(wrapper)}"
            os.write(file, line.encode() + b"\n")

    optimizer.register_optimizer_step_pre_hook(lambda *_: _running.append(None))
    optimizer.register_optimizer_step_post_hook(after)


def _checksum(wrapper: nn.Module) -> int:
    checksum = 0
    for parameter in wrapper.parameters():
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        data = local.detach().contiguous().reshape(-1).view(torch.uint8)
        checksum = zlib.crc32(data.numpy(), checksum)
    return checksum


def first_difference(lines: Iterable[str]) -> str:
    """Name the first step of each wrapper after which its replicas differ, if there is one."""
    found: dict[tuple[str, int], set[str]] = defaultdict(set)
    for line in lines:
        wrapper, step, _, checksum = line.split()
        found[wrapper, int(step)].add(checksum)
    first: dict[str, int] = {}
    for (wrapper, step), checksums in sorted(found.items()):
        if len(checksums) > 1:
            first.setdefault(wrapper, step)
    return ", ".join(
        f"replicas of wrapper {wrapper} differ after step {step}" for wrapper, step in first.items()
    )
