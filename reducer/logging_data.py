"""The logging data of torch's wrapper, under torch's keys."""

import functools
import os
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import nn

from reducer.backends import GLOO
from reducer.wrapper import Wrapper

Function = TypeVar("Function", bound=Callable[..., Any])

_ENVIRONMENT = (
    "MASTER_PORT", "MASTER_ADDR", "CUDA_VISIBLE_DEVICES", "TORCH_DISTRIBUTED_DEBUG",
    "GLOO_SOCKET_IFNAME", "GLOO_DEVICE_TRANSPORT",
)  # fmt: skip
# torch reports the names of C++.
_NAMES_IN_CPP = {
    torch.float32: "float", torch.float64: "double",
    torch.float16: "c10::Half", torch.bfloat16: "c10::BFloat16",
    torch.complex64: "c10::complex<float>", torch.complex128: "c10::complex<double>",
}  # fmt: skip
_SAMPLED_FIRST = 10


def records_errors(method: Function) -> Function:
    """Decorate a method of the wrapper: keep the text of an exception for the logging data."""

    @functools.wraps(method)
    def recording(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except Exception as error:
            self.reducer.last_error = str(error)
            raise

    return cast("Function", recording)


def logging_data(model: Wrapper) -> dict[str, Any]:
    """Return those of torch's keys that apply here; sizes are in bytes."""
    reducer, options, parameters = model.reducer, model.options, list(model.parameter_names)
    group, buckets, use = reducer.process_group, reducer.bucket_stats(), reducer.last_use()
    dtypes = {_NAMES_IN_CPP.get(p.dtype, str(p.dtype).removeprefix("torch.")) for p in parameters}
    sizes = ", ".join(str(bucket["gradient_bytes"]) for bucket in buckets)
    indices = ", ".join(" ".join(map(str, bucket["indices"])) for bucket in buckets)
    prefix = "rebuilt" if reducer.has_rebuilt_buckets else "initial"
    data: dict[str, Any] = {
        "module_name": type(model.module).__name__,
        "backend_name": group.name(),
        "world_size": group.size(),
        "rank": group.rank(),
        "bucket_cap_bytes": options.bucket_bytes_cap,
        "find_unused_parameters": int(options.find_unused_parameters),
        "gradient_as_bucket_view": int(options.gradient_as_bucket_view),
        "static_graph": int(options.static_graph),
        "broadcast_buffers": int(options.forward_sync_buffers),
        "has_sync_bn": int(any(isinstance(m, nn.SyncBatchNorm) for m in model.module.modules())),
        "device_ids": ", ".join(map(str, options.device_ids or [])),
        "output_device": -1 if options.output_device is None else options.output_device,
        "is_multi_device_module": int(len({p.device for p in parameters}) > 1),
        "num_parameter_tensors": len(parameters),
        "total_parameter_size_bytes": sum(p.nbytes for p in parameters),
        "dtypes": ", ".join(sorted(dtypes)),
        "bucket_sizes": sizes,
        "has_rebuilt_buckets": int(reducer.has_rebuilt_buckets),
        f"{prefix}_bucket_sizes": sizes,
        f"{prefix}_per_bucket_param_indices": indices,
        "num_buckets_reduced": reducer.skipped_buckets.count(False),
        # Of the last step, on this rank.
        "prev_iteration_grad_ready_order_indices": ", ".join(map(str, use["order"])),
        "unused_parameter_size": sum(parameters[index].nbytes for index in use["unused"]),
        "can_set_static_graph": use["is_constant"],
    }
    data |= {name.lower(): os.environ.get(name, "N/A") for name in _ENVIRONMENT}
    if group.name() == GLOO:
        backend_options = getattr(group._get_backend(torch.device("cpu")), "options", None)  # noqa: SLF001
        data["gloo_num_threads"] = getattr(backend_options, "_threads", "N/A")
    if reducer.transport is not None:
        data["transport"] = reducer.transport.name
    if model.hook_registration.name is not None:
        data["comm_hook"] = model.hook_registration.name
    if reducer.last_error:
        data |= {"has_error": 1, "error": reducer.last_error}
    return data


class StepSampler:
    """Samples the times of the first ten steps, then those of every hundredth step.

    ``forward_start``, ``forward_seconds``: of the current step, by :func:`time.monotonic`; set by
    the wrapper.
    """

    def __init__(self) -> None:
        self.forward_start = 0.0
        self.forward_seconds = 0.0
        self._rate = 100
        self._last_step = 0
        self._samples = 0
        self._sums: Counter[str] = Counter()
        self._last: dict[str, int] = {"iteration": 0}

    def sample(self, step: int, times: dict[str, float]) -> None:
        """Take the times of a step, unless it is not to be sampled or was taken before.

        ``times``: ``Reducer.last_times()`` after ``step`` steps.
        """
        start, end = times["backward_start"], times["backward_end"]
        if step == self._last_step or not start:
            return
        self._last_step = step
        if step > _SAMPLED_FIRST and step % self._rate:
            return
        received = times["communication_end"]
        sent = times["communication_start"] or received
        durations = {
            "forward_compute_time": self.forward_seconds,
            "backward_compute_time": end - start,
            "backward_comm_time": received - sent,
            "backward_compute_comm_overlap_time": max(0.0, end - sent),
        }
        points = {
            "forward_compute_time_start": self.forward_start,
            "backward_compute_time_start": start,
            "backward_compute_time_end": end,
            "backward_comm_time_start": sent,
            "backward_comm_time_end": received,
        }
        nanoseconds = {name: int(seconds * 1e9) for name, seconds in durations.items()}
        self._sums.update(nanoseconds)
        self._samples += 1
        epoch = time.time() - time.monotonic()
        starts = {name: int((epoch + point) * 1e9) for name, point in points.items()}
        self._last = nanoseconds | starts | {"iteration": step}

    def set_rate(self, rate: int) -> None:
        """Sample every ``rate``-th step. Raises ValueError if ``rate`` is less than 1."""
        if rate < 1:
            raise ValueError(
                f"DDP runtime logging sample rate should be equal or greater than 1, found {rate}."
            )
        self._rate = rate

    def data(self) -> dict[str, int]:
        """Return the last sample, and averages over all samples, in nanoseconds as in torch.

        Points in time are of :func:`time.time_ns`; ``iteration`` is the step of the last sample.
        """
        averages = {f"avg_{name}": total // self._samples for name, total in self._sums.items()}
        return self._last | averages
