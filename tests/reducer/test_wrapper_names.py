"""The names of torch's wrapper that its users need, underscored ones included."""

import dataclasses
import inspect
import pydoc
from typing import Any

import pytest
import torch
from support.torchs_wrapper import without_unknown
from torch import nn
from torch._C._distributed_c10d import BuiltinCommHookType
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import commhooks
from commhooks.testing import run_ranks
from reducer import DistributedDataParallel
from reducer.wrapper import INHERITED

# Public attributes of torch's objects that describe its implementation.
INTERNAL_ATTRIBUTES = {
    "bucket_bytes_cap_default",
    "device_type",
    "is_multi_device_module",
    "named_module_buffers",
    "use_side_stream_for_tensor_copies",
}


# What Python and ABCMeta put into every class, and torch's class pickles itself.
OF_PYTHON = {
    "__abstractmethods__", "__annotations__", "__annotations_cache__", "__doc__", "__firstlineno__",
    "__getstate__", "__init__", "__module__", "__parameters__", "__setstate__",
    "__static_attributes__", "_abc_impl",
}  # fmt: skip


def every_name(rank: int, world_size: int) -> None:
    """Each name of torch's class is the wrapper's own, inherited on purpose, or an error."""
    model = commhooks.DistributedDataParallel(make_net())
    kinds = type(model).mro()
    absent = set()
    for name in vars(TorchDDP).keys() - OF_PYTHON:
        owner = next(kind for kind in kinds if name in vars(kind))
        found = vars(owner)[name]
        if owner is TorchDDP:
            assert name in INHERITED, name
        elif isinstance(found, property) and found.fget is None:
            absent.add(name)
            with pytest.raises(AttributeError, match=name):
                getattr(model, name)
    assert {"_sync_buffers", "_pre_forward", "_lazy_init"} <= absent
    assert not absent & INHERITED


def test_each_name_of_torchs_class_works_or_raises() -> None:
    run_ranks(every_name, 1)


@pytest.mark.parametrize("wrapper", [DistributedDataParallel, commhooks.DistributedDataParallel])
def test_signature_has_torchs_arguments_first(wrapper: type) -> None:
    ours, theirs = (list(inspect.signature(it).parameters) for it in (wrapper, TorchDDP))
    assert ours[: len(theirs)] == theirs
    assert not {"args", "options", "kwargs"} & set(ours)
    assert ("hook" in ours) == (wrapper is commhooks.DistributedDataParallel)
    assert "bucket_cap_mb" in pydoc.plain(pydoc.render_doc(wrapper))


def attributes(rank: int, world_size: int, options: dict[str, Any]) -> None:
    net = make_net()
    theirs, ours = (wrapper(net, **options) for wrapper in (TorchDDP, DistributedDataParallel))
    names = {name for name in vars(theirs) if not name.startswith("_")} - vars(net).keys()
    for name in names - INTERNAL_ATTRIBUTES:
        value = getattr(ours, name)
        if isinstance(getattr(theirs, name), bool | int | str | list | torch.device | None):
            assert value == getattr(theirs, name), name


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "options",
    [
        {},
        {
            "dim": 1,
            "forward_sync_buffers": False,
            "bucket_cap_mb_list": [1, 3, 2],
            "find_unused_parameters": True,
            "skip_all_reduce_unused_params": True,
            "gradient_as_bucket_view": True,
        },
        {"broadcast_buffers": False, "static_graph": True},
    ],
)
def test_attributes_have_torchs_values(options: dict[str, Any]) -> None:
    run_ranks(attributes, 1, without_unknown(options))


def options_are_replaced(rank: int, world_size: int) -> None:
    model = DistributedDataParallel(make_net())
    before = model.options
    with pytest.raises(dataclasses.FrozenInstanceError):
        model.options.static_graph = True  # type: ignore[misc]
    with pytest.raises(AttributeError, match="static_graph"):
        model.static_graph = True
    model._set_static_graph()
    model.broadcast_buffers = False
    assert model.options == dataclasses.replace(
        before, static_graph=True, forward_sync_buffers=False
    )
    assert (before.static_graph, before.forward_sync_buffers) == (False, True)
    assert (model.static_graph, model.broadcast_buffers) == (True, False)


def test_options_are_replaced_and_not_modified() -> None:
    run_ranks(options_are_replaced, 1)


def make_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))


def names(rank: int, world_size: int) -> None:
    with pytest.warns(FutureWarning, match="check_reduction"):
        DistributedDataParallel(make_net(), check_reduction=True)

    model = DistributedDataParallel(make_net())
    x = torch.full((2, 4), float(rank))
    (inputs,), (kwargs,) = model.to_kwargs((x, [x]), {"key": x}, 0)
    assert all(it.equal(x) for it in (inputs[0], inputs[1][0], kwargs["key"]))
    assert model.logger is model
    assert model.device == torch.device("cpu")
    assert (model.device_ids, model.output_device) == (None, None)
    assert model.join_device == model.device
    assert model.join_process_group is model.process_group
    model.broadcast_buffers = False
    assert model.forward_sync_buffers is False

    model.module.forward = model.module[0].forward
    model(x).sum().backward()
    with pytest.raises(RuntimeError, match=r"finished reduction(.|\n)*1\.weight"):
        model._check_reducer_finalized()
    del model.module.forward
    model(x).sum().backward()
    model._check_reducer_finalized()

    model = DistributedDataParallel(make_net(), find_unused_parameters=True)
    with pytest.warns(UserWarning, match="detect unused parameters automatically"):
        model._set_static_graph()
    with pytest.warns(UserWarning, match="no need to set it again"):
        model._set_static_graph()
    for _ in range(3):
        model.zero_grad()
        hidden = model.module[0](x)
        model.module.forward = lambda x: model.module[1](model.module[1].bias.sum() + x[:, :4])
        model(hidden).sum().backward()
    late = DistributedDataParallel(make_net())
    late(x).sum().backward()
    with pytest.raises(RuntimeError, match="before training loop starts, but 1 steps"):
        late._set_static_graph()

    model = DistributedDataParallel(make_net(), find_unused_parameters=True)
    for clones in (True, False):
        model._set_ddp_sink_clone(clones)
        model(x).sum().backward()

    halves = DistributedDataParallel(make_net())
    with pytest.raises(ValueError, match=r"one of \['ALLREDUCE', 'FP16_COMPRESS'\], found 3"):
        halves._register_builtin_comm_hook(3)
    halves._register_builtin_comm_hook(BuiltinCommHookType.FP16_COMPRESS)
    assert halves.comm_hook_name == "average"
    with pytest.raises(RuntimeError, match="can only be called once"):
        halves._register_comm_hook(None, lambda state, bucket: torch.futures.Future())


@pytest.mark.filterwarnings("ignore:Grad strides")
def test_names_behave_as_in_torch() -> None:
    run_ranks(names, 2)


def internals(rank: int, world_size: int) -> None:
    """What torch's own code and libraries read."""
    net = make_net()
    net[0].bias.requires_grad_(False)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ["1.bias"])
    model = DistributedDataParallel(net, bucket_cap_mb_list=[1, 2])
    assert model.bucket_bytes_cap_list == [2**20, 2**21]
    assert DistributedDataParallel(make_net()).bucket_bytes_cap_list == []
    assert model.broadcast_bucket_size == TorchDDP(make_net()).broadcast_bucket_size
    ignored = net[1].bias
    assert all(it is not ignored for it in DistributedDataParallel._get_data_parallel_params(net))

    parameters, sparse = model._build_params_for_reducer()
    assert (parameters, sparse) == ([net[0].weight, net[1].weight], [False, False])
    assert list(model._get_parameters(net)) == list(net.parameters())
    assert model._distributed_rank == rank
    assert model._get_active_ddp_module() is None
    assert model._check_default_group() is None
    mapping = model._build_debug_param_to_name_mapping
    assert mapping(parameters) == {0: "0.weight", 1: "1.weight"}
    with pytest.raises(ValueError, match=r"Param with name 1\.weight found in module parameters"):
        mapping(parameters[:1])
    with pytest.raises(ValueError, match=r"Expected param to name mapping.*: 3 vs 2"):
        mapping([*parameters, ignored])

    buffer = torch.full((2,), float(rank))
    model._default_broadcast_coalesced([buffer], authoritative_rank=1)
    assert buffer.tolist() == [1.0, 1.0]
    net.register_buffer("mean", torch.full((2,), float(rank)))
    model._assign_modules_buffers()
    model._default_broadcast_coalesced()
    assert net.mean.tolist() == [0.0, 0.0]


def test_names_that_libraries_read() -> None:
    run_ranks(internals, 2)


def positional(rank: int, world_size: int) -> Any:
    """Pass arguments in the order of torch's signature."""
    model = DistributedDataParallel(
        make_net(), None, None, 1, False, False, None, 10, True, False, True, False
    )
    return (
        model.dim,
        model.broadcast_buffers,
        model.bucket_bytes_cap,
        model.find_unused_parameters,
        model.gradient_as_bucket_view,
        model.static_graph,
    )


def test_positional_arguments() -> None:
    assert run_ranks(positional, 1) == [(1, False, 10 * 2**20, True, True, False)]


def scattered(rank: int, world_size: int) -> None:
    """Tensors need GPUs; on the CPU torch copies other inputs, and gathers nothing."""
    for wrapper in (DistributedDataParallel, TorchDDP):
        model = wrapper(make_net())
        assert model.scatter((3, [4]), {"key": 5}, [0, 1]) == (
            ((3, [4]), (3, [4])),
            ({"key": 5}, {"key": 5}),
        )
        with pytest.raises(AssertionError, match="not implemented for CPU"):
            model.gather([torch.ones(1), torch.ones(1)], 0)


def test_scatter_and_gather_are_torchs() -> None:
    run_ranks(scattered, 1)


def ignored(rank: int, world_size: int) -> None:
    for wrapper in (DistributedDataParallel, TorchDDP):
        net = make_net()
        net.register_buffer("mean", torch.zeros(2))
        net.register_buffer("count", torch.zeros(1))
        wrapper._set_params_and_buffers_to_ignore_for_model(net, ["1.bias", "count"])
        model = wrapper(net)
        assert model.parameters_to_ignore == {"1.bias", "count"}
        assert len(model.modules_buffers) == 1
        assert model.modules_buffers[0] is net.mean


def test_ignored_parameters_and_buffers_are_torchs() -> None:
    run_ranks(ignored, 1)


def static_graph_after_a_forward(rank: int, world_size: int) -> None:
    model = DistributedDataParallel(make_net())
    model(torch.ones(1, 4))
    with pytest.raises(RuntimeError, match=r"but 0 steps .* a forward has announced a backward"):
        model._set_static_graph()


def test_a_static_graph_is_set_before_the_first_forward() -> None:
    run_ranks(static_graph_after_a_forward, 1)
