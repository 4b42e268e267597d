"""Device-dependent behavior of ranks: backend, clock, memory, and how ranks take a device."""

import os
import socket
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map

from commhooks.errors import CommHookError
from reducer.backends import GLOO, NCCL

_TYPES = ("cpu", "cuda")
_DEFAULT = "COMMHOOKS_DEVICE"
"""The environment variable with the device of whoever names none."""


class DeviceError(CommHookError, ValueError):
    """The device does not exist, or cannot run the ranks."""


@dataclass(frozen=True)
class Device:
    """The CPU, with Gloo, or the CUDA devices of this machine, with NCCL; rank r has one of them.

    Times are differences between moments: of the host on a CPU, of the current stream on CUDA.
    """

    type: str = "cpu"

    @classmethod
    def choose(cls, found: "Device | torch.device | str | None") -> "Device":
        """Return the device of this name.

        For None, that of the environment variable COMMHOOKS_DEVICE; without it, "cuda" where torch
        finds a device, else "cpu". Raises DeviceError.
        """
        if isinstance(found, Device):
            return found
        found = str(found) if isinstance(found, torch.device) else found
        has_cuda = torch.cuda.is_available()
        default = os.environ.get(_DEFAULT) if found is None else None
        where = f" in {_DEFAULT}" if default else ""
        if found is None:
            found = default or ("cuda" if has_cuda else "cpu")
        if found not in _TYPES:
            hint = "; CUDA_VISIBLE_DEVICES chooses among CUDA devices" if ":" in found else ""
            raise DeviceError(f"expected the device 'cpu' or 'cuda'{where}, found {found!r}{hint}")
        if found == "cuda" and not has_cuda:
            version = torch.__version__
            raise DeviceError(
                f"expected a CUDA device{where}, and torch {version} finds none; use 'cpu'"
            )
        return cls(found)

    def __str__(self) -> str:
        """Return "CPU", or the number and the name of the CUDA devices."""
        if self.type == "cpu":
            return "CPU"
        return f"{self.count()} x {torch.cuda.get_device_name(0)}"

    @property
    def backend(self) -> str:
        """The backend of process groups."""
        return GLOO if self.type == "cpu" else NCCL

    def count(self) -> int | None:
        """Return the number of devices that ranks take in turn; None if they only share cores."""
        return None if self.type == "cpu" else torch.cuda.device_count()

    def sharing(self, ranks: int) -> int:
        """Return how many of ``ranks`` on this machine share a device; 1 if none does."""
        return -(-ranks // (self.count() or ranks))

    def free_bytes(self) -> int | None:
        """Return the free memory of the device that has least; None if ranks need no device."""
        count = self.count()
        return None if count is None else min(torch.cuda.mem_get_info(i)[0] for i in range(count))

    def put(self, value: Any) -> Any:
        """Return a module, a tensor, or tuples, lists and dicts of tensors on the device."""
        if self.type == "cpu":
            return value
        return tree_map(lambda each: each.to(self.type) if hasattr(each, "to") else each, value)

    def barrier(self, group: dist.ProcessGroup | None = None) -> None:
        """Wait on the host until all ranks of the group are here and their devices are idle."""
        own = None if self.backend == GLOO else [torch.cuda.current_device()]
        dist.barrier(group, device_ids=own)
        self.synchronize()

    def synchronize(self) -> None:
        """Wait on the host for all work on the device."""
        if self.type != "cpu":
            torch.cuda.synchronize()

    def now(self) -> float:
        """Return seconds of the host's clock at which all work on the device has ended."""
        self.synchronize()
        return time.perf_counter()

    def mark(self) -> Any:
        """Return the moment that the current stream has come to."""
        if self.type == "cpu":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def seconds(self, first: Any, last: Any) -> float:
        """Return the seconds between two marks, after :meth:`synchronize`."""
        return float(last - first) if self.type == "cpu" else first.elapsed_time(last) / 1e3


CPU = Device()


def take_device(rank: int, world_size: int, host: str | None = None) -> None:
    """Use CUDA device ``rank`` modulo their number in this process. Call it before NCCL is used.

    NCCL refuses two ranks of one host on the same device, so with fewer devices than ranks each
    rank says that it is a host of its own, in variables that are set unless they are already. Ranks
    that share a device show that results and order are right, and no times of NVLink: they take
    turns, and a small collective takes 5 ms with 2 ranks, 27 ms with 4 (H200). Sets LOCAL_RANK.

    Args:
        rank: on this machine.
        world_size: number of ranks on this machine.
        host: the name of the network namespace that stands for a host; NCCL would go around its
            link, inside the machine or over InfiniBand.

    Raises:
        DeviceError: there is no device.
    """
    count = torch.cuda.device_count()
    if count == 0:
        raise DeviceError(
            f"[rank {rank}] NCCL needs a CUDA device, and torch {torch.__version__} finds none; "
            "use the backend 'gloo'"
        )
    is_shared = world_size > count
    if is_shared or host:
        name = f"{host or socket.gethostname()}, rank {rank}" if is_shared else str(host)
        os.environ.setdefault("NCCL_HOSTID", name)
        os.environ.setdefault("NCCL_MNNVL_ENABLE", "0")
    if host:
        os.environ.setdefault("NCCL_NET", "Socket")
    # From torch 2.15 on, the device of "nccl" is LOCAL_RANK modulo the number of devices.
    os.environ["LOCAL_RANK"] = str(rank)
    torch.cuda.set_device(rank % count)
