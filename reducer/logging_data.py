"""Report on a wrapper: torch's dictionary of logging data, and a table of buckets."""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import Any

import torch.distributed as dist
from torch import nn

from reducer._C import Reducer
from reducer.options import WrapperOptions

__all__: list[str] = []

_SAMPLED_FIRST = 10
_ENVIRONMENT = {
    "master_port": "MASTER_PORT",
    "master_addr": "MASTER_ADDR",
    "cuda_visible_devices": "CUDA_VISIBLE_DEVICES",
    "gloo_socket_ifname": "GLOO_SOCKET_IFNAME",
    "gloo_device_transport": "GLOO_DEVICE_TRANSPORT",
    "nccl_socket_ifname": "NCCL_SOCKET_IFNAME",
    "nccl_blocking_wait": "TORCH_NCCL_BLOCKING_WAIT",
    "nccl_async_error_handling": "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "nccl_debug": "NCCL_DEBUG",
    "nccl_nthreads": "NCCL_NTHREADS",
    "nccl_ib_timeout": "NCCL_IB_TIMEOUT",
}


class StepSampler:
    """Samples the times of the first ten steps, then those of every ``rate``-th step.

    ``forward_seconds``: the duration of the current step's forward; set by the wrapper.
    """

    def __init__(self) -> None:
        self.forward_seconds = 0.0
        self._rate = 100
        self._last_step = 0
        self._sums: dict[str, float] = {}
        self._samples = 0
        self._last: dict[str, float] = {}

    def sample(self, step: int, times: dict[str, float]) -> None:
        """Take the times of a step, unless it is not to be sampled or was taken before.

        ``times``: ``Reducer.last_times()`` after ``step`` steps.
        """
        if step == self._last_step or not times["backward_start"]:
            return
        self._last_step = step
        if step > _SAMPLED_FIRST and step % self._rate:
            return
        backward = times["backward_end"] - times["backward_start"]
        start, end = times["communication_start"], times["communication_end"]
        self._last = {
            "forward_compute_time": self.forward_seconds,
            "backward_compute_time": backward,
            "backward_comm_time": end - start if start else 0.0,
            "backward_compute_comm_overlap_time": max(0.0, times["backward_end"] - start)
            if start
            else 0.0,
        }
        self._samples += 1
        for name, seconds in self._last.items():
            self._sums[name] = self._sums.get(name, 0.0) + seconds

    def set_rate(self, rate: int) -> None:
        """Sample every ``rate``-th step. Raises ValueError if ``rate`` is less than 1."""
        if rate < 1:
            raise ValueError(
                f"DDP runtime logging sample rate should be equal or greater than 1, found {rate}."
            )
        self._rate = rate

    def data(self) -> dict[str, int]:
        """Return the last sample, and averages over all samples, in nanoseconds as in torch."""
        averages = {f"avg_{name}": total / self._samples for name, total in self._sums.items()}
        seconds = self._last | averages
        return {name: int(value * 1e9) for name, value in seconds.items()}


def logging_data(
    module: nn.Module,
    parameters: Collection[nn.Parameter],
    reducer: Reducer,
    options: WrapperOptions,
) -> dict[str, Any]:
    """Return those of torch's keys that apply here; sizes are in bytes.

    ``parameters``: those that are averaged.
    """
    buckets = reducer.bucket_stats()
    sizes = ", ".join(str(bucket["gradient_bytes"]) for bucket in buckets)
    indices = ", ".join(" ".join(map(str, bucket["indices"])) for bucket in buckets)
    prefix = "rebuilt" if reducer.has_rebuilt_buckets else "initial"
    data: dict[str, Any] = {
        "module_name": type(module).__name__,
        "backend_name": dist.get_backend(reducer.process_group),
        "world_size": reducer.process_group.size(),
        "rank": reducer.process_group.rank(),
        "bucket_cap_bytes": options.bucket_bytes_cap,
        "find_unused_parameters": int(options.find_unused_parameters),
        "gradient_as_bucket_view": int(options.gradient_as_bucket_view),
        "static_graph": int(options.static_graph),
        "broadcast_buffers": int(options.forward_sync_buffers),
        "has_sync_bn": int(any(isinstance(m, nn.SyncBatchNorm) for m in module.modules())),
        "device_ids": ", ".join(map(str, options.device_ids or [])),
        "output_device": -1 if options.output_device is None else options.output_device,
        "is_multi_device_module": int(len({p.device for p in parameters}) > 1),
        "num_parameter_tensors": len(parameters),
        "total_parameter_size_bytes": sum(p.nbytes for p in parameters),
        "dtypes": ", ".join(sorted({str(p.dtype).removeprefix("torch.") for p in parameters})),
        "comm_hook": reducer.hook_name,
        "bucket_sizes": sizes,
        "torch_distributed_debug": os.environ.get("TORCH_DISTRIBUTED_DEBUG", "OFF"),
        "iteration": reducer.steps,
        "unused_parameter_size": 0,
        "has_rebuilt_buckets": int(reducer.has_rebuilt_buckets),
        f"{prefix}_bucket_sizes": sizes,
        f"{prefix}_per_bucket_param_indices": indices,
    }
    return data | {key: os.environ.get(name, "N/A") for key, name in _ENVIRONMENT.items()}


def bucket_table(reducer: Reducer) -> str:
    """Return a readable table of the parameters in each bucket."""
    lines = []
    for bucket in reducer.bucket_stats():
        kind = ", sparse" if bucket["is_sparse"] else ""
        lines.append(
            f"bucket {bucket['index']}: {bucket['gradient_bytes']:,} bytes over "
            f"{bucket['ranks']} ranks{kind}, {len(bucket['names'])} parameters"
        )
        lines += [f"    {name}" for name in bucket["names"]]
    return "\n".join(lines)
