"""Tests of torch that the project's wrapper does not pass, and why."""

from __future__ import annotations

REASONS = {
    "test_ddp_broadcast_buffers_deprecation_warning": (
        "torch deprecates its own argument; here broadcast_buffers stays and does not warn"
    ),
    "test_ddp_control_flow_different_across_ranks": (
        "reads reducer._get_local_used_map(), the memory of torch's reducer; "
        "tests/reducer/test_graphs.py has the errors that it checks"
    ),
    "test_ddp_control_flow_same_across_ranks": (
        "reads reducer._get_local_used_map(), the memory of torch's reducer; "
        "tests/reducer/test_graphs.py has the errors that it checks"
    ),
    "test_ddp_native_mixed_precision_ignored_params": (
        "reads parameter._mp_param, where torch keeps a cast; parameters keep their dtype here"
    ),
    "test_ddp_profiling_torch_profiler": (
        "counts the all-reduces of Gloo; here ranks of one host average in memory that they share, "
        "and tests/reducer/test_observation.py has the ranges that a profile shows"
    ),
    "test_detect_ddp_is_actually_static": (
        "reads reducer._ddp_graph_static(); the logging data has it as can_set_static_graph"
    ),
    "test_skip_all_reduce_unused_parameters": (
        "expects the sizes of torch's first buckets; here the same parameters are in one bucket, "
        "and tests/reducer/test_wrapper_options.py has the logged number of reduced buckets"
    ),
    "test_invalid_static_graph": (
        "expects that torch's reducer stays unfinished after the first error; here the next step "
        "starts clean, and tests/reducer/test_wrapper_errors.py has both errors"
    ),
}
# In the files of TORCH_TESTS, also with gradients that are views and at other debug levels.
REASONS |= dict.fromkeys(
    [
        "test_c10d_nccl.DistributedDataParallelTest.test_find_unused_parameters_kwarg_"
        f"{view}debug_{level}"
        for view in ("", "grad_is_view_")
        for level in ("info", "off")
    ],
    "compares the text of an error that here begins with the rank and names the parameter; "
    "tests/reducer/test_wrapper_errors.py has it",
)
REASONS["test_c10d_gloo.DistributedDataParallelTest.test_ddp_invalid_comm_hook_return_type"] = (
    "compares the text of an error; tests/reducer/test_reducer.py has it"
)
