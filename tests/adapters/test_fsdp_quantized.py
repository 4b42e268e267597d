"""The reduce-scatter and the all-gather of FSDP2 in few bits."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from support.sharded import FEATURES, build, mesh_of, train
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.fsdp import fully_shard

import commhooks
from commhooks.integrations import fsdp

NUMBERS: list[tuple[str, dict[str, Any], float]] = [
    ("int8", {}, 0.02),
    ("int4", {}, 0.3),
    ("int4", {"rotate": True}, 0.3),
    ("fp8", {}, 0.06),
    ("bf16", {}, 0.005),
]
"""A hook, its options, and the largest relative error of the gradients of the first step."""
COLLECTIVES = {
    "reduce-scatter": fsdp.quantize_reduce_scatter,
    "all-gather": partial(fsdp.quantize_all_gather, exact_below=0),
}
collectives = pytest.mark.parametrize("name", COLLECTIVES)


def error(found: list[Tensor], expected: list[Tensor]) -> float:
    difference = sum((a - b).float().square().sum() for a, b in zip(found, expected, strict=True))
    return float((difference / sum(b.float().square().sum() for b in expected)).sqrt())


def near_native(
    rank: int, size: int, collective: str, features: list[str], device: str = "cpu"
) -> None:
    mesh = mesh_of(1, size, device)
    for name in features:
        feature = FEATURES[name]
        for numbers, options, worst in NUMBERS:
            expected = train(build(mesh["shard"], feature), rank, 1, feature)
            net = build(mesh["shard"], feature)
            quantized = COLLECTIVES[collective](net, numbers, **options)
            found = train(net, rank, 1, feature)
            gradients = len(expected) - len(list(net.parameters()))
            rounding = error(found[:gradients], expected[:gradients])
            # A gradient passes through the rounded parameters of several layers.
            slack = 2 if collective == "all-gather" else 1
            assert rounding < slack * worst, (name, numbers, rounding)
            assert rounding > 0 or numbers == "bf16"  # which gradients may be in
            assert quantized.wire_bytes > 0
            quantized.remove()
            native = train(net, rank, 1, feature)
            assert [a.shape for a in native] == [a.shape for a in expected]


@collectives
def test_gradients_are_near_those_of_torch(run_ranks: Any, name: str) -> None:
    features = ["units", "sums divided by a factor", "mixed precision"]
    run_ranks(near_native, 3, name, features, timeout=240)


@pytest.mark.exhaustive
@collectives
def test_everything_that_people_set(run_ranks: Any, name: str) -> None:
    names = [each for each in FEATURES if each != "zeros for unused parameters"]
    run_ranks(near_native, 3, name, names, timeout=240)


def same_everywhere(rank: int, size: int) -> None:
    """They compose with a hook; a factor alone, which Gloo refuses, works here."""
    mesh = mesh_of(2, 2)
    nets = [build(mesh, FEATURES["sums divided by a factor"]), build(mesh)]
    for unit in (nets[1], *nets[1].blocks):
        unit.set_gradient_divide_factor(5.0)
    for net in nets:
        for quantize in COLLECTIVES.values():
            quantize(net, {"name": "int8", "block_size": 32})
        commhooks.register(net, "int8")
    for a, b in zip(train(nets[0], rank, 3), train(nets[1], rank, 3), strict=True):
        torch.testing.assert_close(a, b)


def test_both_compose_with_a_hook(run_ranks: Any) -> None:
    run_ranks(same_everywhere, 4)


def refuse(rank: int, size: int, collective: str) -> None:
    quantize = COLLECTIVES[collective]
    net = build(mesh_of(1, 2)["shard"])
    with pytest.raises(commhooks.CommHookMismatchError, match=f"numbers of the {collective}"):
        quantize(net, "int8" if rank else "int4")
    with pytest.raises(commhooks.CommHookError, match="expected a hook that quantizes"):
        quantize(net, "topk", density=0.1)
    kind = commhooks.CommHookMismatchError if rank else commhooks.CommHookOptionError
    with pytest.raises(kind, match="block_size"):
        quantize(net, "int8", block_size=256 if rank else 100)
    with pytest.raises(commhooks.CommHookError, match="ranks are all replicas"):
        quantize(replicate(nn.Linear(2, 2)))
    with pytest.raises(commhooks.CommHookError, match="the root module"):
        quantize(torch.nn.Linear(1, 1))
    quantized = quantize(net)
    with pytest.raises(commhooks.CommHookError, match=f"the {collective} of the model is quan"):
        quantize(net)
    quantized.remove()
    another = quantize(net)
    quantized.remove()  # again, which does nothing
    train(net, rank, 1)
    assert another.wire_bytes > 0
    assert quantized.wire_bytes == 0


@collectives
def test_what_cannot_work_is_refused(run_ranks: Any, name: str) -> None:
    run_ranks(refuse, 2, name)


def send_nan(rank: int, size: int, collective: str) -> None:
    net = build(mesh_of(1, 2)["shard"])
    COLLECTIVES[collective](net)
    is_weight = collective == "all-gather"
    if is_weight and rank:
        with torch.no_grad():
            net.blocks[0].up.weight.to_local()[0, 0] = float("nan")
    net(torch.full((1, 7), float("nan") if rank and not is_weight else 1.0)).sum().backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in net.parameters()])
    assert norm.full_tensor().isnan()


@collectives
def test_nan_stays_visible(run_ranks: Any, name: str) -> None:
    run_ranks(send_nan, 2, name)


def train_complex(rank: int, size: int, collective: str) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(8, 8, dtype=torch.complex64)
    inputs = torch.randn(size, 5, 8, dtype=torch.complex64)
    expected = copy.deepcopy(linear)
    expected(inputs.view(-1, 8)).abs().square().sum().div(size).backward()
    net = fully_shard(linear, mesh=mesh_of(1, size)["shard"])
    COLLECTIVES[collective](net, "int8")
    net(inputs[rank]).abs().square().sum().backward()
    found = [p.grad.full_tensor() for p in net.parameters()]
    wanted = [p.grad for p in expected.parameters()]
    for a, b in zip(found, wanted, strict=True):
        assert (a - b).abs().square().sum().sqrt() < 0.02 * b.abs().square().sum().sqrt()


@collectives
def test_complex_parameters(run_ranks: Any, name: str) -> None:
    """Imaginary parts were lost."""
    run_ranks(train_complex, 2, name)
