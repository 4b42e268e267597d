"""Low-precision computation with full-precision parameters and any hook, on the CPU too."""

import collections
import copy
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.of_ranks import same_on_all_ranks
from torch import nn
from torch.func import functional_call
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

import commhooks
from commhooks.testing import run_ranks
from reducer import DistributedDataParallel, MixedPrecision


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.again = nn.Linear(8, 8)
        self.head = nn.Linear(8, 3)
        self.checkpoints = False
        self.seen: list[torch.dtype] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = [x.dtype, self.first.weight.dtype, self.norm.running_mean.dtype]
        x = self.norm(self.first(x))
        for _ in range(2):
            x = (
                checkpoint(self.again, x, use_reentrant=False)
                if self.checkpoints
                else self.again(x)
            )
        return self.head(x)


def inputs_of(rank: int, step: int) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * rank + step))


def train(
    rank: int, world_size: int, view: bool, hook: str | None, checkpoints: bool, clear: bool
) -> None:
    dtypes = MixedPrecision(torch.bfloat16, buffer_dtype=torch.bfloat16)
    model = DistributedDataParallel(
        Net(), mixed_precision=dtypes, gradient_as_bucket_view=view, bucket_cap_mb=0.0001
    )
    model.module.checkpoints = checkpoints
    if hook is not None:
        commhooks.register(model, hook)
    for step in range(3):
        model.zero_grad(set_to_none=clear)
        output = model(inputs_of(rank, step))
        assert output.dtype == torch.bfloat16
        assert model.module.seen == [torch.bfloat16] * 3
        output.float().square().mean().backward()
        # The mean of the gradients of a low-precision model over all ranks.
        reference = Net().bfloat16()
        reference.checkpoints = checkpoints
        reference.load_state_dict(model.module.state_dict())
        reference.norm.running_mean, reference.norm.running_var = (
            model.module.norm.running_mean,
            model.module.norm.running_var,
        )
        means = []
        for peer in range(world_size):
            reference.zero_grad()
            reference(inputs_of(peer, step).bfloat16()).float().square().mean().backward()
            means.append([p.grad.float() for p in reference.parameters()])
        for (name, parameter), *grads in zip(model.module.named_parameters(), *means, strict=True):
            assert isinstance(parameter, nn.Parameter), name
            assert (parameter.dtype, parameter.grad.dtype) == (torch.float32, torch.float32)
            tolerance = 2e-2 if hook != "allreduce" else 1e-6
            torch.testing.assert_close(
                parameter.grad, torch.stack(grads).mean(0), rtol=tolerance, atol=tolerance / 10
            )


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("clear", [False, True])
@pytest.mark.parametrize("hook", [None, "allreduce", "bf16"])
def test_gradients_equal_those_of_a_low_precision_model(
    hook: str | None, view: bool, clear: bool
) -> None:
    run_ranks(train, 2, view, hook, False, clear)


def test_with_activation_checkpointing() -> None:
    run_ranks(train, 2, False, None, True, True)


def on_the_wire(rank: int, world_size: int) -> None:
    sizes = {}
    for name, dtypes in {
        "param": MixedPrecision(torch.float16),
        "reduce": MixedPrecision(torch.float16, reduce_dtype=torch.float32),
        "neither": MixedPrecision(buffer_dtype=torch.float64),
    }.items():
        model = DistributedDataParallel(nn.Linear(8, 8, bias=False), mixed_precision=dtypes)
        model(torch.ones(2, 8)).sum().backward()
        assert model.module.weight.grad.dtype == torch.float32
        sizes[name] = model.reducer.bucket_stats()[0]["packed_bytes"]
    assert sizes == {"param": 128, "reduce": 256, "neither": 256}


def test_reduce_dtype_is_the_dtype_on_the_wire() -> None:
    run_ranks(on_the_wire, 2)


def ignored(rank: int, world_size: int) -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    seen: list[torch.dtype] = []
    module[1].register_forward_pre_hook(
        lambda layer, args: (seen.append(layer.weight.dtype), (args[0].float(),))[1]
    )
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
        module, ["1.weight", "1.bias"]
    )
    model = DistributedDataParallel(module, mixed_precision=MixedPrecision(torch.bfloat16))
    model(torch.full((2, 4), float(rank))).sum().backward()
    assert seen == [torch.float32]
    of_ranks: list[Any] = [None] * world_size
    dist.all_gather_object(of_ranks, module[1].weight.grad.sum().item())
    assert of_ranks[0] != of_ranks[1]  # not averaged


def test_ignored_parameters_are_not_cast() -> None:
    run_ranks(ignored, 2)


def recurrent(rank: int, world_size: int) -> None:
    model = DistributedDataParallel(nn.LSTM(4, 4), mixed_precision=MixedPrecision(torch.bfloat16))
    output, (hidden, _) = model(torch.ones(3, 2, 4))
    assert hidden.dtype == torch.bfloat16
    output.sum().backward()
    assert model.module.weight_hh_l0.grad.dtype == torch.float32
    assert model.module._flat_weights[0] is model.module.weight_ih_l0
    with torch.no_grad():
        packed = nn.utils.rnn.pack_padded_sequence(torch.ones(3, 2, 4), [3, 2])
        output, _ = model(packed)
        assert output.data.dtype == torch.bfloat16
    assert isinstance(model.module.weight_ih_l0, nn.Parameter)


def normalized(rank: int, world_size: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # use the parametrization instead
        net = nn.utils.weight_norm(nn.LSTM(4, 4), "weight_hh_l0")
    model = DistributedDataParallel(net, mixed_precision=MixedPrecision(torch.bfloat16))
    for _ in range(3):
        output, _ = model(torch.ones(3, 2, 4))
        assert output.dtype == torch.bfloat16
        output.sum().backward()
        assert model.module.weight_hh_l0_g.grad.dtype == torch.float32


def test_recurrent_layers_whose_weights_are_computed_from_parameters() -> None:
    """Their parameters are not in the layer's list of weights."""
    run_ranks(normalized, 2)


class Named(nn.Linear):
    def forward(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        assert inputs["another"] == []
        assert inputs["x"].dtype == torch.bfloat16
        return super().forward(inputs["x"])


def of_defaults(rank: int, world_size: int) -> None:
    model = DistributedDataParallel(Named(3, 3), mixed_precision=MixedPrecision(torch.bfloat16))
    inputs = collections.defaultdict(list, x=torch.ones(1, 3))
    model(inputs).sum().backward()
    assert set(inputs) == {"x"}
    assert inputs["x"].dtype == torch.float32


def test_inputs_in_a_mapping_that_no_mapping_makes() -> None:
    run_ranks(of_defaults, 2)


def test_recurrent_layers_use_casts_and_get_their_parameters_back() -> None:
    run_ranks(recurrent, 2)


def saved_without_backward(rank: int, world_size: int) -> None:
    model = DistributedDataParallel(nn.Linear(3, 3), mixed_precision=MixedPrecision(torch.bfloat16))
    before = model.module.weight.detach().clone()
    for save in (
        model.state_dict,
        model.module.state_dict,
        lambda: copy.deepcopy(model).state_dict(),
    ):
        model(torch.ones(1, 3))  # without a backward
        for tensor in save().values():
            assert tensor.dtype == torch.float32
        assert torch.equal(model.module.weight, before)
    model(torch.ones(1, 3)).sum().backward()
    assert model.module.weight.grad.dtype == torch.float32


def test_checkpoints_never_contain_casts() -> None:
    """A forward without a backward leaves casts in place; saving must restore parameters."""
    run_ranks(saved_without_backward, 2)


def failing(rank: int, world_size: int) -> None:
    class Fails(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ValueError("out of luck")

    model = DistributedDataParallel(Fails(3, 3), mixed_precision=MixedPrecision(torch.bfloat16))
    with pytest.raises(ValueError, match="out of luck"):
        model(torch.ones(1, 3))
    assert isinstance(model.module.weight, nn.Parameter)


def test_a_forward_that_raises_restores_parameters() -> None:
    run_ranks(failing, 1)


def scaled(rank: int, world_size: int) -> None:
    """AMP: autocast, a gradient scaler, a hook, and an overflow on one rank only."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(4, 2))
    commhooks.register(model, "powersgd", rank=1, start_step=0, min_compression_rate=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=100)
    for step in range(4):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            output = model(torch.full((3, 4), float(rank + step + 1)))
        loss = output.float().square().mean()
        if step == 1 and rank == 1:
            loss = loss * torch.inf
        before = model.module.weight.detach().clone()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(before, model.module.weight) == (step == 1)
        assert scaler.get_scale() == (1024.0 if step < 1 else 512.0)


def test_a_gradient_scaler_skips_the_step_on_all_ranks() -> None:
    run_ranks(scaled, 2)


def complex_numbers(rank: int, world_size: int, view: bool, hook: str | None) -> None:
    class Phases(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.phases = nn.Parameter(torch.ones(3, 5, dtype=torch.complex64))
            self.turned = nn.Parameter(torch.ones(5, 3, dtype=torch.complex64).T)
            self.real = nn.Parameter(torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return ((self.phases * x + self.turned.conj() * x).abs().square().sum()) + (
                self.real.sum() * x.real.sum()
            )

    model = DistributedDataParallel(Phases(), gradient_as_bucket_view=view)
    if hook is not None:
        commhooks.register(model, hook)
    reference = Phases()
    for step in range(3):
        x = [
            torch.randn(3, 5, dtype=torch.complex64, generator=torch.Generator().manual_seed(s))
            for s in (step, 50 + step)
        ]
        model.zero_grad()
        reference.zero_grad()
        model(x[rank]).backward()
        for peer in range(world_size):
            (reference(x[peer]) / world_size).backward()
        for ours, theirs in zip(model.module.parameters(), reference.parameters(), strict=True):
            assert ours.grad.dtype == ours.dtype
            torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("hook", [None, "allreduce"])
def test_complex_parameters(view: bool, hook: str | None) -> None:
    run_ranks(complex_numbers, 2, view, hook)


def substituted(rank: int, world_size: int, kind: type[nn.Module]) -> None:
    """Meta-learning: fast weights in one forward, with gradients, then an evaluation."""
    net = kind(2, 2)
    model = DistributedDataParallel(net, mixed_precision=MixedPrecision(torch.bfloat16))
    name, weight = next(iter(net.named_parameters()))
    x = torch.ones(1, 1, 2) if kind is nn.LSTM else torch.ones(1, 2)
    for _ in range(3):
        fast = {f"module.{name}": torch.full_like(weight, 5.0) + 0 * weight}
        output = functional_call(model, fast, (x,))
        first = output[0] if kind is nn.LSTM else output
        first.float().sum().backward()
        assert weight.grad is not None
        assert dict(net.named_parameters())[name] is weight
        if kind is nn.LSTM:
            assert net._flat_weights[0] is weight


@pytest.mark.parametrize("kind", [nn.Linear, nn.LSTM])
def test_tensors_stand_in_for_parameters_in_one_forward_only(kind: type[nn.Module]) -> None:
    """They stayed in the module after backward."""
    run_ranks(substituted, 2, kind)


def changed_after_wrapping(rank: int, world_size: int, change: str) -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    model = DistributedDataParallel(net, mixed_precision=MixedPrecision(torch.bfloat16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(6):
        if step == 1 and change == "prune":
            prune.l1_unstructured(net[0], "weight", 0.5)
        elif step == 1:
            nn.utils.parametrize.register_parametrization(net[0], "weight", nn.Softsign())
        if step == 3 and change == "prune":
            prune.remove(net[0], "weight")
        with torch.no_grad():
            assert model(torch.ones(1, 4)).dtype == torch.bfloat16
        output = model(torch.full((3, 4), 1.0 + rank + step))
        assert output.dtype == torch.bfloat16
        optimizer.zero_grad()
        output.float().square().sum().backward()
        for parameter in net.parameters():
            assert isinstance(parameter, nn.Parameter)
            assert parameter.dtype == torch.float32
        optimizer.step()
    assert same_on_all_ranks(nn.utils.parameters_to_vector(net.parameters()).detach())


@pytest.mark.parametrize("change", ["prune", "parametrize"])
def test_modules_that_are_pruned_or_parametrized_after_wrapping(change: str) -> None:
    run_ranks(changed_after_wrapping, 2, change)


def joined(rank: int, world_size: int) -> None:
    model = DistributedDataParallel(nn.Linear(3, 3), mixed_precision=MixedPrecision(torch.bfloat16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.join():
        for step in range(3 + rank):
            optimizer.zero_grad()
            model(torch.full((2, 3), 1.0 + rank + step)).sum().backward()
            optimizer.step()
        if rank == 1:
            with model.no_sync():
                model(torch.ones(2, 3))  # without a backward
    weight = model.module.weight
    assert isinstance(weight, nn.Parameter)
    assert same_on_all_ranks(weight.detach())


def test_the_model_that_is_copied_after_uneven_inputs_contains_no_casts() -> None:
    run_ranks(joined, 2)


class Tied(nn.Module):
    """One parameter by two names."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = self.decoder = nn.Parameter(torch.ones(3, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.encoder @ self.decoder


def tied(rank: int, world_size: int) -> None:
    model = DistributedDataParallel(Tied(), mixed_precision=MixedPrecision(torch.bfloat16))
    for step in range(3):
        model.zero_grad()
        model(torch.full((1, 3), float(rank + step))).sum().backward()
        assert same_on_all_ranks(model.module.encoder.grad)
        assert model.module.encoder is model.module.decoder


def test_parameters_with_two_names_in_a_module() -> None:
    """The second name kept full precision."""
    run_ranks(tied, 2)
