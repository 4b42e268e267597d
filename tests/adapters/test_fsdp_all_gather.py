"""The all-gather of FSDP2 in few bits: which numbers models compute with, and what is sent."""

import itertools
import statistics
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.dying_ranks import DyingRanks
from support.of_ranks import same_on_all_ranks
from support.sharded import mesh_of
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import commhooks
from commhooks.adapters.fsdp.units import units_of
from commhooks.integrations.fsdp import quantize_all_gather, quantize_reduce_scatter

WIDTH = 72
STOCHASTIC = {"name": "int8", "stochastic": True, "error_feedback": False}
ENCODED = 2636
"""Bytes of the int8 codes of one of 2 ranks: 2,592 numbers in 11 blocks of 256, 4 bytes each."""


class Net(nn.Sequential):
    """Two units with a large matrix, a small one, and biases, and a root without a large one."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        blocks = [
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4), nn.Tanh()) for _ in range(2)
        ]
        super().__init__(blocks[0], nn.Linear(4, WIDTH), blocks[1])


def shard(mesh: Any, **options: Any) -> Any:
    net = Net()
    for module in (net[0], net[2], net):
        fully_shard(module, mesh=mesh, **options)
    return net


def watch(net: Any) -> dict[str, list[Tensor]]:
    """Return the parameters that each forward and each backward computes with, by name."""
    seen: dict[str, list[Tensor]] = {}

    def note(module: nn.Module) -> None:
        for name, parameter in module.named_parameters():
            seen.setdefault(f"{names[module]}.{name}", []).append(parameter.detach().clone())

    def note_both(module: nn.Module, _: Any, output: Tensor) -> None:
        note(module)
        output.register_hook(lambda _: note(module))

    names = {module: name for name, module in net.named_modules() if isinstance(module, nn.Linear)}
    for module in names:
        module.register_forward_hook(note_both)
    return seen


def step(net: Any, rank: int) -> None:
    inputs = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(rank))
    net(inputs).float().square().mean().backward()


def compare_bits(rank: int, size: int, options: dict[str, Any]) -> None:
    net = shard(mesh_of(2, 2) if size == 4 else mesh_of(1, size)["shard"], **options)
    quantize_all_gather(net, STOCHASTIC)
    seen = watch(net)
    for _ in range(2):  # gradients are accumulated
        step(net, rank)
    exact = {name: parameter.full_tensor() for name, parameter in net.named_parameters()}
    assert seen.keys() == exact.keys()
    for name, found in seen.items():
        first, *others = found
        assert len(others) == 3
        assert all(other.equal(first) for other in others), name
        assert same_on_all_ranks(first), name
        is_coded = exact[name].shape == (WIDTH, WIDTH)
        assert first.equal(exact[name].to(first.dtype)) is not is_coded, name
        torch.testing.assert_close(first.float(), exact[name], atol=0.005, rtol=0)


BFLOAT16 = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}


@pytest.mark.parametrize(
    ("size", "options"),
    [(3, {"reshard_after_forward": True}), (2, {"reshard_after_forward": False}), (4, BFLOAT16)],
    ids=["sharded", "unsharded after forward", "replicas in bfloat16"],
)
def test_forward_and_backward_of_all_ranks_have_the_same_bits(
    run_ranks: Any, size: int, options: dict[str, Any]
) -> None:
    """Also with stochastic rounding. Large matrices are rounded, all others exact."""
    run_ranks(compare_bits, size, options)


def send_differences(rank: int, size: int, options: dict[str, Any]) -> None:
    mesh = mesh_of(2, 2) if size == 4 else mesh_of(1, size)["shard"]
    net = shard(mesh, reshard_after_forward=False, **options)
    quantized = quantize_all_gather(net, "int4", differences=True)
    seen, sent, mean_errors = watch(net), [0], []
    for _ in range(4):
        step(net, rank)
        sent.append(quantized.wire_bytes)
    matrices = [f"{index}.0.weight" for index in (0, 2)]
    for name, parameter in net.named_parameters():
        exact = parameter.full_tensor()
        for forward, backward in zip(seen[name][::2], seen[name][1::2], strict=True):
            assert forward.equal(backward), name
            assert same_on_all_ranks(forward), name
            if name not in matrices:
                assert forward.equal(exact.to(forward.dtype)), name
    first, *others = [after - before for before, after in itertools.pairwise(sent)]
    assert all(other == others[0] < first for other in others)

    shards = [parameter.detach().to_local() for parameter in net.parameters()]
    before = [shard.clone() for shard in shards]
    for lost in (torch.nan, torch.inf):
        for each in shards:
            each.fill_(lost)
        step(net, rank)
        assert not any(seen[name][-1].isfinite().any() for name in matrices)
    for each, values in zip(shards, before, strict=True):  # far from those of the last gather
        each.copy_(-values)
    exact = {name: net.get_parameter(name).full_tensor() for name in matrices}
    for _ in range(3):
        step(net, rank)
        mean_errors.append(
            statistics.fmean((seen[n][-1] - exact[n]).abs().mean().item() for n in matrices)
        )
    limit = 1e-4 if options else 0.0  # rounding of what is kept
    for before, after in itertools.pairwise(mean_errors):
        assert 0 < after < before / 5 + limit
    quantized.remove()
    so_far = quantized.wire_bytes
    step(net, rank)
    assert quantized.wire_bytes == so_far
    assert seen[matrices[0]][-1].equal(exact[matrices[0]].to(seen[matrices[0]][-1].dtype))


@pytest.mark.parametrize(
    ("size", "options"), [(3, {}), (4, {}), (2, BFLOAT16)], ids=["f32", "replicas", "bf16"]
)
def test_differences_come_closer_with_each_gather(
    run_ranks: Any, size: int, options: dict[str, Any]
) -> None:
    """What one gather rounds is in the next difference. All ranks have the same bits."""
    run_ranks(send_differences, size, options)


def refuse_differences(rank: int, size: int) -> None:
    net = shard(mesh_of(1, size)["shard"])
    quantize_all_gather(net, "int4", differences=True)
    with pytest.raises(commhooks.CommHookError, match=r"Found 0\.0\.weight.*, resharded after"):
        net(torch.ones(1, WIDTH))


def test_differences_of_resharded_parameters_are_refused(run_ranks: Any) -> None:
    run_ranks(refuse_differences, 2)


def reshard_to_two(rank: int, size: int) -> None:
    net = shard(mesh_of(1, 4)["shard"], reshard_after_forward=2)
    quantized = quantize_all_gather(net, "int4")
    seen = watch(net)
    net(torch.ones(3, WIDTH)).sum()
    forward_bytes = quantized.wire_bytes, quantized.plain_bytes
    assert forward_bytes[0] < forward_bytes[1]
    step(net, rank)
    for name, (_, forward, backward) in seen.items():
        assert forward.equal(backward), name
        assert same_on_all_ranks(backward), name


def test_resharding_to_fewer_ranks_keeps_the_bits_of_forward(run_ranks: Any) -> None:
    run_ranks(reshard_to_two, 4)


def keep_masters(rank: int, size: int) -> None:
    net = shard(mesh_of(1, size)["shard"])
    exact = [parameter.to_local().clone() for parameter in net.parameters()]
    quantize_all_gather(net, "int4")
    quantize_reduce_scatter(net, "int4")
    step(net, rank)
    for parameter, before in zip(net.parameters(), exact, strict=True):
        assert parameter.to_local().equal(before)
    for whole, saved in zip(
        Net().state_dict().values(), get_model_state_dict(net).values(), strict=True
    ):
        assert saved.full_tensor().equal(whole)


def test_shards_and_checkpoints_are_exact(run_ranks: Any) -> None:
    run_ranks(keep_masters, 2)


def count_bytes(rank: int, size: int, options: dict[str, Any], itemsize: int) -> None:
    net = shard(mesh_of(1, size)["shard"], **options)
    quantized = quantize_all_gather(net)
    sent = []
    for unit in units_of(net):
        comm = unit.collective("all_gather")
        torchs = comm._original
        comm._original = Spy(torchs, sent)
    step(net, rank)
    matrix, others = WIDTH * WIDTH // size, (WIDTH + 4 * WIDTH + 4) // size
    root = (4 * WIDTH + WIDTH) // size  # without a large matrix, and not sharded between
    assert quantized.plain_bytes == itemsize * (4 * (matrix + others) + root)
    assert quantized.wire_bytes == 4 * (ENCODED + itemsize * others) + itemsize * root
    assert sum(sent) == quantized.wire_bytes


class Spy:
    """Torch's all-gather, with the bytes that it is given."""

    def __init__(self, torchs: Any, sent: list[int]) -> None:
        self.allocate, self._original, self._sent = torchs.allocate, torchs, sent

    def __call__(self, output: Tensor, message: Tensor, *rest: Any) -> Any:
        self._sent.append(message.nbytes)
        return self._original(output, message, *rest)


@pytest.mark.parametrize(("options", "itemsize"), [({}, 4), (BFLOAT16, 2)], ids=["f32", "bf16"])
def test_bytes_are_those_that_are_sent(
    run_ranks: Any, options: dict[str, Any], itemsize: int
) -> None:
    run_ranks(count_bytes, 2, options, itemsize)


def choose_exact(rank: int, size: int) -> None:
    mesh = mesh_of(1, 2)["shard"]
    with pytest.raises(commhooks.CommHookMismatchError, match="exact_below"):
        quantize_all_gather(shard(mesh), exact_below=rank)
    for exact_below, coded in ((WIDTH * WIDTH + 1, 0), (WIDTH * WIDTH, 2), (0, 5)):
        net = shard(mesh)
        quantize_all_gather(net, exact_below=exact_below)
        seen = watch(net)
        step(net, rank)
        wholes = dict(Net().named_parameters())
        assert sum(not found[0].equal(wholes[name]) for name, found in seen.items()) == coded


def test_which_parameters_are_exact_is_chosen(run_ranks: Any) -> None:
    run_ranks(choose_exact, 2)


class Packed(Tensor):
    """A parameter that gathers a number beside its own."""

    @staticmethod
    def __new__(cls, numbers: Tensor) -> "Packed":
        return Tensor._make_wrapper_subclass(cls, numbers.size(), dtype=numbers.dtype)  # type: ignore[attr-defined]

    def __init__(self, numbers: Tensor) -> None:
        self.numbers = numbers

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        args, kwargs = torch.utils._pytree.tree_map_only(
            cls, lambda packed: packed.numbers, (args, kwargs or {})
        )
        found = function(*args, **kwargs)
        return torch.utils._pytree.tree_map_only(Tensor, cls, found)

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        return (self.numbers, torch.ones(1)), None

    def fsdp_post_all_gather(self, gathered: Any, metadata: Any, dtype: Any, *, out: Any = None):
        return None if out is not None else (gathered[0], (gathered[0],))


def refuse(rank: int, size: int) -> None:
    def refused(weight: Tensor, found: str, *, is_alone: bool = False) -> None:
        net, mesh = Net(), mesh_of(1, 2)["shard"]
        net[0][0].weight = nn.Parameter(weight, requires_grad=False)
        if is_alone:
            net[0][0].bias = None
            fully_shard(net[0][0], mesh=mesh)
        fully_shard(net, mesh=mesh)
        quantize_all_gather(net)
        with pytest.raises(commhooks.CommHookError, match=rf"0\.0\.weight.*; found {found}\. "):
            net(torch.ones(1, WIDTH))

    weight = torch.zeros(WIDTH, WIDTH)
    refused(weight.bfloat16(), r"\d+ of torch.uint8")
    if torch.__version__ >= "2.12":  # before, fully_shard cannot take integers
        refused(weight.char(), "2592 of torch.int8", is_alone=True)
        refused(weight.short(), "2592 of torch.int16", is_alone=True)
    refused(weight.to(torch.float8_e4m3fn), "2592 of torch.float8_e4m3fn", is_alone=True)
    refused(Packed(weight), "2593 of torch.float32", is_alone=True)


def test_what_is_gathered_in_another_form_is_refused_by_name(run_ranks: Any) -> None:
    run_ranks(refuse, 2)


def unshard(rank: int, size: int) -> None:
    inputs, outputs = torch.ones(1, WIDTH), []
    for by_hand in (False, True):
        net = shard(mesh_of(1, 2)["shard"])
        quantize_all_gather(net)
        for unit in (net, net[0], net[2]) if by_hand else ():
            unit.unshard(async_op=True)
        with torch.set_grad_enabled(by_hand), torch.inference_mode(not by_hand):
            outputs.append(net(inputs))
    assert outputs[0].equal(outputs[1])
    assert not outputs[0].equal(Net()(inputs))


def lose_a_peer(die: Callable[[], None], exact_below: int) -> None:
    net = shard(mesh_of(1, 2)["shard"])
    quantize_all_gather(net, exact_below=exact_below)
    die()
    net(torch.ones(1, WIDTH))


@pytest.mark.parametrize("exact_below", [0, 10**6])
def test_a_lost_peer_is_named(exact_below: int) -> None:
    with DyingRanks(2) as ranks:
        (raised,) = ranks.run(lose_a_peer, exact_below)
    assert raised.kind == "CommHookPeerError", raised.text
    assert "the all-gather of parameters" in raised.text


def test_inference_and_unshard_by_hand(run_ranks: Any) -> None:
    run_ranks(unshard, 2)
