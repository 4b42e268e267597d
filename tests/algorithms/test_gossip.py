"""Test how gossip mixes gradients and parameters, on many simulated ranks and on real ones."""

import copy
import math
import time
from typing import Any

import pytest
import torch
from support.mixing import can_be_built, mixing_matrix
from support.simulated_ranks import simulate
from torch import Tensor, nn

import commhooks
from commhooks.algorithms.averaging.gossip import Gossip
from commhooks.comm.topologies import round_at
from reducer import GradBucket

SIZES = [1, 2, 3, 4, 5, 7, 8, 16]
TOPOLOGIES = ["ring", "exponential", "hypercube", "dissemination", "random"]
CASES = [
    (topology, size) for topology in TOPOLOGIES for size in SIZES if can_be_built(topology, size)
]


def draw(rank: int, step: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    shapes: list[tuple[int, ...]] = [(), (5, 3), (0, 2), (4, 3, 2, 2)]
    tensors = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    tensors[-1] = tensors[-1].contiguous(memory_format=torch.channels_last)
    return [tensor.to(dtype) for tensor in tensors]


def make_bucket(gradients: list[Tensor], parameters: list[Tensor], step: int) -> GradBucket:
    names = [str(index) for index in range(len(parameters))]
    elements = sum(tensor.numel() for tensor in gradients)
    bucket = GradBucket(gradients[0].new_empty(elements), parameters, names, step=step)
    for view, gradient in zip(bucket.gradients(), gradients, strict=True):
        view.copy_(gradient)
    return bucket


def rows(tensors_of_ranks: list[list[Tensor]]) -> Tensor:
    """(ranks, elements)"""
    return torch.stack(
        [torch.cat([t.reshape(-1) for t in tensors]) for tensors in tensors_of_ranks]
    )


def take_step(
    hooks: list[Any], parameters: list[list[Tensor]], step: int
) -> tuple[Tensor, list[int]]:
    """Return the results for the gradients of :func:`draw`, by row, and the bytes of each rank."""
    dtype = parameters[0][0].dtype
    buckets = [
        make_bucket(draw(rank, step, dtype), of_rank, step)
        for rank, of_rank in enumerate(parameters)
    ]
    results, comms = simulate(hooks, buckets)
    for bucket, result in zip(buckets, results, strict=True):
        assert result.data_ptr() == bucket.buffer().data_ptr() or comms[0].size == 1
    return rows([bucket.gradients() for bucket in buckets]), [comm.wire_bytes for comm in comms]


# ------------------------------------------------------------------------- many ranks, one process


@pytest.mark.parametrize(("topology", "size"), CASES)
def test_gradients_are_mixed_by_the_topology(topology: str, size: int) -> None:
    hooks = [Gossip("gradients", topology) for _ in range(size)]
    parameters = [draw(rank, 99) for rank in range(size)]
    before = rows(parameters)
    for step in range(5):
        found, sent = take_step(hooks, parameters, step)
        gradients = rows([draw(rank, step) for rank in range(size)])
        A = mixing_matrix(round_at(topology, size, step))
        torch.testing.assert_close(found, A @ gradients)
        torch.testing.assert_close(found.mean(0), gradients.mean(0))
        assert sent == [gradients[0].numel() * 8 if size > 1 else 0] * size
    assert torch.equal(rows(parameters), before)
    assert hooks[0].metrics() == {}


@pytest.mark.parametrize(("topology", "size"), CASES)
def test_parameters_are_mixed_by_the_topology(topology: str, size: int) -> None:
    hooks = [Gossip("parameters", topology) for _ in range(size)]
    parameters = [draw(rank, 99) for rank in range(size)]
    for step in range(5):
        before = rows(parameters)
        found, sent = take_step(hooks, parameters, step)
        assert torch.equal(found, rows([draw(rank, step) for rank in range(size)]))
        A = mixing_matrix(round_at(topology, size, step))
        torch.testing.assert_close(rows(parameters), A @ before)
        assert sent == [before[0].numel() * 8 if size > 1 else 0] * size


@pytest.mark.parametrize("what", ["gradients", "parameters"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_one_rank_changes_no_bit(what: str, dtype: torch.dtype) -> None:
    parameters = [draw(0, 99, dtype)]
    for step in range(4):
        found, sent = take_step([Gossip(what, average_every=2)], parameters, step)
        assert torch.equal(found, rows([draw(0, step, dtype)]))
        assert torch.equal(rows(parameters), rows([draw(0, 99, dtype)]))
        assert sent == [0]


@pytest.mark.parametrize("what", ["gradients", "parameters"])
def test_all_ranks_average_their_parameters_in_every_third_step(what: str) -> None:
    size = 5
    hooks = [Gossip(what, average_every=3) for _ in range(size)]
    parameters = [draw(rank, 99) for rank in range(size)]
    mean = rows(parameters).mean(0)
    gradient_bytes = mean.numel() * 8
    plain_bytes = 2 * (size - 1) * math.ceil(gradient_bytes / size)
    for step in range(4):
        apart = (rows(parameters) - mean).norm(dim=1)
        _, sent = take_step(hooks, parameters, step)
        if step < 3:
            assert sent == [gradient_bytes] * size
            assert (rows(parameters) - mean).abs().max() > 0.01
    exchanged = gradient_bytes if what == "gradients" else 0
    assert sent == [exchanged + plain_bytes] * size
    torch.testing.assert_close(rows(parameters), mean.expand(size, -1))
    assert (rows(parameters) == rows(parameters)[0]).all()
    for hook, distance in zip(hooks, apart, strict=True):
        assert hook.metrics() == {"consensus_distance": pytest.approx(distance.item())}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_average_of_parameters_in_half_precision_is_rounded_once(dtype: torch.dtype) -> None:
    size = 3
    parameters = [draw(rank, 99, dtype) for rank in range(size)]
    mean = rows(parameters).float().mean(0).to(dtype)
    _, sent = take_step([Gossip(average_every=1) for _ in range(size)], parameters, 1)
    torch.testing.assert_close(
        rows(parameters), mean.expand(size, -1), rtol=torch.finfo(dtype).eps, atol=1e-6
    )
    assert (rows(parameters) == mean).float().mean() > 0.99  # sums in float32 are rounded, too
    assert sent == [2 * (size - 1) * math.ceil(4 * mean.numel() / size)] * size


def test_large_half_precision_gradients_do_not_overflow() -> None:
    parameters = [[torch.zeros(4, dtype=torch.float16)] for _ in range(2)]
    buckets = [make_bucket([torch.full((4,), 6e4).half()], p, 0) for p in parameters]
    for result in simulate([Gossip("gradients")] * 2, buckets)[0]:
        assert torch.equal(result, torch.full((4,), 6e4).half())


def test_consensus_distance_of_two_ranks_is_exact_and_of_more_unbiased() -> None:
    for size, steps in ((2, 1), (4, 600)):
        squares = []
        for step in range(steps):
            parameters = [draw(rank, 99) for rank in range(size)]
            hooks = [Gossip("parameters", "random") for _ in range(size)]
            apart = (rows(parameters) - rows(parameters).mean(0)).norm(dim=1)
            take_step(hooks, parameters, step)
            squares += [hook.metrics()["consensus_distance"] ** 2 for hook in hooks]
        if size == 2:
            assert squares == pytest.approx((apart**2).tolist())
        # 2400 draws with a standard deviation of about half their mean.
        assert sum(squares) / len(squares) == pytest.approx((apart**2).mean().item(), rel=0.05)


# ------------------------------------------------------------------------------------ real ranks


def make_net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))


def loss_of(net: nn.Module, rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    inputs = torch.randn(4, 6, generator=generator, dtype=torch.float64)
    return net(inputs).square().mean() + (inputs.sum(1) - net(inputs).sum(1)).square().mean()


def simulate_training(size: int, steps: int, what: str, average_every: int) -> list[Tensor]:
    """The definition, in one process: A applied to gradients or parameters of copies of the net."""
    nets = [make_net().double() for _ in range(size)]
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9) for net in nets]
    for step in range(steps):
        for rank, (net, optimizer) in enumerate(zip(nets, optimizers, strict=True)):
            optimizer.zero_grad()
            loss_of(net, rank, step).backward()
        A = mixing_matrix(round_at("dissemination", size, step))
        with torch.no_grad():
            for tensors in zip(*(net.parameters() for net in nets), strict=True):
                if what == "gradients":
                    mixed = torch.tensordot(A, torch.stack([t.grad for t in tensors]), 1)
                    for tensor, gradient in zip(tensors, mixed, strict=True):
                        tensor.grad.copy_(gradient)
                is_full = average_every and step > 0 and step % average_every == 0
                if what == "parameters" or is_full:
                    M = torch.full_like(A, 1 / size) if is_full else A
                    for tensor, value in zip(
                        tensors, torch.tensordot(M, torch.stack(tensors), 1), strict=True
                    ):
                        tensor.copy_(value)
        for optimizer in optimizers:
            optimizer.step()
    return [torch.cat([p.detach().reshape(-1) for p in net.parameters()]) for net in nets]


def train(
    rank: int, size: int, hook: Any, steps: range, stock: bool, state: Any = None
) -> tuple[Tensor, Any, float, dict[str, float]]:
    wrapper: Any = (
        nn.parallel.DistributedDataParallel if stock else commhooks.DistributedDataParallel
    )
    model = wrapper(make_net().double(), bucket_cap_mb=0.0003)
    handle = commhooks.register(model, hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if state is not None:
        net_state, optimizer_state, hook_state = state[rank]
        model.module.load_state_dict(net_state)
        optimizer.load_state_dict(optimizer_state)
        handle.load_state_dict(hook_state)
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()
    saved = model.module.state_dict(), optimizer.state_dict(), handle.state_dict()
    flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    stats = handle.stats()
    return flat, copy.deepcopy(saved), stats.total.wire_bytes, dict(stats.metrics)


@pytest.mark.covering(1)
@pytest.mark.parametrize("what", ["gradients", "parameters"])
@pytest.mark.parametrize(("size", "stock"), [(1, False), (2, True), (3, False), (4, False)])
def test_training_is_what_the_definition_says(
    run_ranks: Any, what: str, size: int, stock: bool
) -> None:
    hook = Gossip(what, average_every=4)
    results = run_ranks(train, size, hook, range(6), stock)
    expected = simulate_training(size, 6, what, average_every=4)
    for (found, *_), of_rank in zip(results, expected, strict=True):
        torch.testing.assert_close(found, of_rank, rtol=1e-12, atol=1e-14)
    if size > 2 or (size == 2 and what == "parameters"):
        assert not torch.equal(results[0][0], results[1][0])
        assert results[0][3]["consensus_distance"] > 0


def test_resumes_bitwise(run_ranks: Any) -> None:
    hook = Gossip("parameters", "random", average_every=4)
    whole = run_ranks(train, 3, hook, range(7), False)
    half = run_ranks(train, 3, hook, range(3), False)
    resumed = run_ranks(train, 3, hook, range(3, 7), False, [saved for _, saved, *_ in half])
    for (found, *_), (expected, *_) in zip(resumed, whole, strict=True):
        assert torch.equal(found, expected)


def register_hypercube(rank: int, size: int) -> None:
    model = commhooks.DistributedDataParallel(nn.Linear(2, 2))
    with pytest.raises(commhooks.CommHookError, match=r"hypercube.*found 3 ranks; 'exponential'"):
        commhooks.register(model, "gossip", topology="hypercube")
    commhooks.register(model, "gossip", topology="exponential")


def test_a_hypercube_of_three_is_refused_at_registration(run_ranks: Any) -> None:
    run_ranks(register_hypercube, 3)


class DetachedUse(nn.Module):
    """Uses its weight once more behind autograd's back, in a node that runs late in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.last = nn.ParameterList([torch.ones(4)])  # its bucket is reduced first

    def forward(self, inputs: Tensor) -> Tensor:
        weight = self.last[0]
        version = weight._version
        product = self.first(inputs).exp() * weight.detach()
        product.register_hook(lambda _: self._wait(version))
        return (product + weight).sum()

    def _wait(self, version: int) -> None:
        """Until the weight has been mixed."""
        deadline = time.monotonic() + 20
        while self.last[0]._version == version and time.monotonic() < deadline:
            time.sleep(0.01)


def use_detached(rank: int, size: int) -> None:
    model = commhooks.DistributedDataParallel(DetachedUse(), bucket_cap_mb=1e-5)
    commhooks.register(model, Gossip("parameters"))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        model(torch.ones(1, 4)).backward()


def test_a_detached_use_of_a_parameter_is_autograds_error(run_ranks: Any) -> None:
    """See Note [Parameters change in backward]: no wrong numbers."""
    run_ranks(use_detached, 2)


@pytest.mark.parametrize("name", ["gossip", "push_sum"])
def test_one_rank_sends_nothing(name: str) -> None:
    parameter = torch.nn.Parameter(torch.ones(4))
    bucket = commhooks.GradBucket(torch.ones(4), [parameter], ["weight"])
    assert commhooks.create(name).wire_bytes(bucket, 1) == 0
