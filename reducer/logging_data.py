"""Report on a wrapper: torch's dictionary of logging data, and a table of buckets."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Collection
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn

from reducer._C import Reducer
from reducer.hook_registration import HookRegistration
from reducer.options import WrapperOptions

__all__: list[str] = []

Method = TypeVar("Method", bound=Callable[..., Any])

_ENVIRONMENT = {
    "master_port": "MASTER_PORT",
    "master_addr": "MASTER_ADDR",
    "cuda_visible_devices": "CUDA_VISIBLE_DEVICES",
    "torch_distributed_debug": "TORCH_DISTRIBUTED_DEBUG",
}
_ENVIRONMENT_OF_BACKENDS = {
    "gloo": {
        "gloo_socket_ifname": "GLOO_SOCKET_IFNAME",
        "gloo_device_transport": "GLOO_DEVICE_TRANSPORT",
    },
    "nccl": {
        "nccl_socket_ifname": "NCCL_SOCKET_IFNAME",
        "nccl_blocking_wait": "TORCH_NCCL_BLOCKING_WAIT",
        "nccl_async_error_handling": "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        "nccl_debug": "NCCL_DEBUG",
        "nccl_nthreads": "NCCL_NTHREADS",
        "nccl_ib_timeout": "NCCL_IB_TIMEOUT",
    },
}
# torch reports the names of C++.
_NAMES_IN_CPP = {
    torch.float32: "float",
    torch.float64: "double",
    torch.float16: "c10::Half",
    torch.bfloat16: "c10::BFloat16",
    torch.complex64: "c10::complex<float>",
    torch.complex128: "c10::complex<double>",
}


def records_errors(method: Method) -> Method:
    """Decorate a method of the wrapper: keep the text of an exception for the logging data."""

    @functools.wraps(method)
    def recording(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except Exception as error:
            self.reducer.last_error = str(error)
            raise

    return cast("Method", recording)


def logging_data(
    module: nn.Module,
    parameters: Collection[nn.Parameter],
    reducer: Reducer,
    registration: HookRegistration,
    options: WrapperOptions,
) -> dict[str, Any]:
    """Return those of torch's keys that apply here; sizes are in bytes.

    ``parameters``: those that are averaged.
    """
    data: dict[str, Any] = {
        "module_name": type(module).__name__,
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
        "dtypes": ", ".join(sorted({_name_in_cpp(p.dtype) for p in parameters})),
    }
    if registration.name is not None:
        data["comm_hook"] = registration.name
    if reducer.last_error:
        data |= {"has_error": 1, "error": reducer.last_error}
    return data | _of_backend(reducer) | _of_buckets(reducer) | _of_use(list(parameters), reducer)


def _name_in_cpp(dtype: torch.dtype) -> str:
    return _NAMES_IN_CPP.get(dtype, str(dtype).removeprefix("torch."))


def _of_backend(reducer: Reducer) -> dict[str, Any]:
    """Return the keys about the process group and the environment."""
    group = reducer.process_group
    backend = dist.get_backend(group)
    data: dict[str, Any] = {"backend_name": backend}
    environment = _ENVIRONMENT | _ENVIRONMENT_OF_BACKENDS.get(backend, {})
    data |= {key: os.environ.get(name, "N/A") for key, name in environment.items()}
    if backend == "gloo":
        options = getattr(group._get_backend(torch.device("cpu")), "options", None)  # noqa: SLF001
        data["gloo_num_threads"] = getattr(options, "_threads", "N/A")
    return data


def _of_buckets(reducer: Reducer) -> dict[str, Any]:
    buckets = reducer.bucket_stats()
    sizes = ", ".join(str(bucket["gradient_bytes"]) for bucket in buckets)
    indices = ", ".join(" ".join(map(str, bucket["indices"])) for bucket in buckets)
    prefix = "rebuilt" if reducer.has_rebuilt_buckets else "initial"
    return {
        "bucket_sizes": sizes,
        "has_rebuilt_buckets": int(reducer.has_rebuilt_buckets),
        f"{prefix}_bucket_sizes": sizes,
        f"{prefix}_per_bucket_param_indices": indices,
        "num_buckets_reduced": reducer.skipped_buckets.count(False),
    }


def _of_use(parameters: list[nn.Parameter], reducer: Reducer) -> dict[str, Any]:
    """Return the keys about the gradients of the last step, on this rank."""
    use = reducer.last_use()
    return {
        "prev_iteration_grad_ready_order_indices": ", ".join(map(str, use["order"])),
        "unused_parameter_size": sum(parameters[index].nbytes for index in use["unused"]),
        "can_set_static_graph": use["is_constant"],
    }


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
