"""The private names of torch's FSDP2 that are used exist in this version of torch."""

from typing import Any

import torch
from support.sharded import build, mesh_of

from commhooks.adapters import fsdp_units

NAMES = {  # of fsdp_units.py, by what has them
    "state": ["_is_root", "_root_post_backward_final_callback", "_state_ctx"],
    "context": ["post_backward_final_callback_queued"],
    "unit": [
        "device",
        "fsdp_params",
        "gradient_divide_factor",
        "mesh_info",
        "post_backward",
        "post_forward_mesh_info",
        "reduce_grads",
        "_all_gather_comm",
        "_reduce_scatter_comm",
    ],
    "parameter": [
        "padded_sharded_param_size",
        "sharded_param",
        "_module_info",
        "_sharded_param_data",
        "_orig_size",
        "fsdp_placement",
        "unsharded_accumulated_grad",
        "_unsharded_param",
    ],
    "mesh info": [
        "replicate_mesh_rank",
        "replicate_mesh_size",
        "replicate_process_group",
        "shard_process_group",
    ],
}


def missing(rank: int, size: int) -> list[str]:
    net = build(mesh_of(1, 1))
    net(torch.ones(1, 7))
    state: Any = net._get_fsdp_state()
    unit = next(fsdp_units._groups(state))
    parameter = unit.fsdp_params[0]
    objects = {
        "state": state,
        "context": state._state_ctx,
        "unit": unit,
        "parameter": parameter,
        "mesh info": unit.mesh_info,
    }
    return [
        f"{name} of FSDP's {kind}"
        for kind, names in NAMES.items()
        for name in names
        if not hasattr(objects[kind], name)
    ]


def test_torch_has_the_names(run_ranks: Any) -> None:
    """Fails in a version of torch without one of the names, and tells which."""
    assert run_ranks(missing, 1) == [[]]
