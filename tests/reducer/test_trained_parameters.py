"""Changes of a wrapped module, and gradients that are not averaged."""

import contextlib
import copy
import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.of_ranks import same_on_all_ranks
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.func import functional_call
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils.checkpoint import checkpoint

from commhooks.testing import run_ranks
from reducer import DistributedDataParallel
from reducer.mixed_precision import MixedPrecision


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.added = nn.ModuleList()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.frozen(self.first(x))
        for module in self.added:
            x = module(x)
        return self.second(x.to(self.second.weight.dtype))


def step(model: Any, rank: int) -> None:
    """Check that the gradients are averaged: the ranks have the same, from different inputs."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.fill_(torch.nan)  # shows if this memory becomes a gradient again
    model.zero_grad()
    x = torch.full((2, 4), float(rank + 1), dtype=next(model.parameters()).dtype)
    model(x).square().sum().backward()
    for parameter in [p for p in model.parameters() if p.requires_grad]:
        assert parameter.grad is not None
        assert same_on_all_ranks(parameter.grad)


# ------------------------------------------------------------------------ changes that are refused


def double(model: Any) -> None:
    model.double()


def bfloat16(model: Any) -> None:
    model.module.second.to(torch.bfloat16)


def new_objects_on_conversion(model: Any) -> None:
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        model.double()
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)


def assign(model: Any) -> None:
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)


def attribute(model: Any) -> None:
    model.module.second.weight = nn.Parameter(torch.ones(4, 4))


def written_directly(model: Any) -> None:
    model.module.second._parameters["weight"] = nn.Parameter(torch.ones(4, 4))


def registered(model: Any) -> None:
    model.module.second.register_parameter("extra", nn.Parameter(torch.ones(1)))


def submodule(model: Any) -> None:
    model.module.first.add_module("lora", nn.Linear(4, 2))


def appended(model: Any) -> None:
    model.module.added.append(nn.Linear(4, 4))


def another_module(model: Any) -> None:
    model.module.second = nn.Linear(4, 4)


def another_root(model: Any) -> None:
    model.module = Net()


def another_norm(model: Any) -> None:
    parametrizations.weight_norm(model.module.second)


def old_weight_norm(model: Any) -> None:
    nn.utils.weight_norm(model.module.second)


def tied(model: Any) -> None:
    model.module.second.weight = model.module.first.weight


def offloaded_to_meta(model: Any) -> None:
    """As accelerate's hooks do, which put new parameters in place of those on the meta device."""
    for module in model.module.modules():
        for name, parameter in list(module._parameters.items()):
            requires_grad = parameter.requires_grad
            module._parameters[name] = nn.Parameter(parameter.data, requires_grad=requires_grad)


def removed(model: Any) -> None:
    del model.module.second.bias
    model.module.second.bias = None


def replaced_by_frozen(model: Any) -> None:
    model.module.second.weight = nn.Parameter(torch.ones(4, 4), requires_grad=False)


def unfrozen(model: Any) -> None:
    model.module.frozen.requires_grad_(True)


CHANGES: dict[Callable[[Any], None], str] = {
    double: r'"first\.weight" is torch\.float64 instead of torch\.float32.*"second\.bias"',
    bfloat16: r'"second\.weight" is torch\.bfloat16 instead of torch\.float32',
    new_objects_on_conversion: r'"first\.weight" was replaced.*"second\.bias" was replaced',
    assign: r'"first\.weight" was replaced.*"second\.bias" was replaced',
    attribute: r'"second\.weight" was replaced',
    written_directly: r'"second\.weight" was replaced',
    registered: r'"second\.extra" is new',
    submodule: r'"first\.lora\.weight" is new.*"first\.lora\.bias" is new',
    appended: r'"added\.0\.weight" is new',
    another_module: r'"second\.weight" was replaced.*"second\.bias" was replaced',
    another_root: r'"first\.weight" was replaced',
    another_norm: r'"second\.parametrizations\.weight\.original0" is new.*"second\.weight" was rem',
    old_weight_norm: r'"second\.weight_g" is new.*"second\.weight_v" is new',
    tied: r'"second\.weight" was removed',
    offloaded_to_meta: r'"first\.weight" was replaced.*"second\.bias" was replaced',
    removed: r'"second\.bias" was removed',
    replaced_by_frozen: r'"second\.weight" was replaced by one that requires no gradient',
    unfrozen: r'"frozen\.weight" required no gradient, and requires a gradient now',
}


def change_module(rank: int, world_size: int, change: Callable[[Any], None], text: str) -> None:
    model = DistributedDataParallel(Net())
    before = copy.deepcopy(model.module)
    step(model, rank)
    change(model)
    x = torch.ones(2, 4, dtype=next(model.parameters()).dtype)
    for _ in range(2):  # not only once
        with pytest.raises(RuntimeError, match=rf"\[Rank {rank}\].*{text}.*wrap `model\.module`"):
            model(x)
    with model.no_sync(), contextlib.suppress(RuntimeError):  # of mixed dtypes
        model(x)
    with torch.no_grad(), contextlib.suppress(RuntimeError):
        model(x)
    wrapped = DistributedDataParallel(model.module if change is not removed else before)
    if change not in (bfloat16, registered, submodule):
        step(wrapped, rank)


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_changed_parameters_raise(change: Callable[[Any], None]) -> None:
    run_ranks(change_module, 2, change, CHANGES[change])


def untie(rank: int, world_size: int) -> None:
    net = Net()
    net.second.weight = net.first.weight
    model = DistributedDataParallel(net)
    step(model, rank)
    net.second.weight = nn.Parameter(net.first.weight.detach().clone())
    with pytest.raises(RuntimeError, match=r'"second\.weight" is new'):
        model(torch.ones(2, 4))
    net.second.weight = net.first.weight
    step(model, rank)


def test_untied_weights_raise() -> None:
    run_ranks(untie, 2)


def change_many(rank: int, world_size: int) -> str:
    net = nn.ParameterList(torch.ones(1) for _ in range(25))
    model = DistributedDataParallel(net)
    net.double()
    with pytest.raises(RuntimeError) as caught:
        model()
    return str(caught.value)


def test_the_error_names_20_changes() -> None:
    for text in run_ranks(change_many, 2):
        assert text.count("is torch.float64 instead of torch.float32") == 20
        assert '"19" is torch.float64 instead of torch.float32; and 5 more. On all ranks' in text


# ------------------------------------------------------------------------ changes that are allowed


def there_and_back(model: Any) -> None:
    model.double()
    model.float()


def there_and_back_while_frozen(model: Any) -> None:
    model.module.second.requires_grad_(False).double()
    with torch.no_grad():
        model(torch.ones(2, 4))
    model.module.second.float().requires_grad_(True)


def other_data(model: Any) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()


def swapped_data(model: Any) -> None:
    average = copy.deepcopy(model.module)
    for _ in range(2):
        for ours, theirs in zip(model.module.parameters(), average.parameters(), strict=True):
            ours.data, theirs.data = theirs.data, ours.data


def copied_state(model: Any) -> None:
    model.load_state_dict(copy.deepcopy(model.state_dict()))


def emptied(model: Any) -> None:
    state = copy.deepcopy(model.state_dict())
    model.to_empty(device="cpu")
    model.load_state_dict(state)


def back_again(model: Any) -> None:
    """The same object, with another order of names."""
    layer = model.module.second
    weight = layer._parameters.pop("weight")
    layer.weight = nn.Parameter(torch.ones(4, 4))
    del layer.weight
    layer.weight = weight


def parametrized(model: Any) -> None:
    parametrizations.spectral_norm(model.module.second)


def pruned(model: Any) -> None:
    prune.l1_unstructured(model.module.second, "weight", 2)


def normed_as_before(model: Any) -> None:
    nn.utils.spectral_norm(model.module.second)


def parametrized_for_a_while(model: Any) -> None:
    parametrizations.orthogonal(model.module.second)
    parametrize.remove_parametrizations(model.module.second, "weight")


def pruned_for_good(model: Any) -> None:
    pruned(model)
    prune.remove(model.module.second, "weight")


def offloaded(model: Any) -> None:
    """Memory that is given back between forwards, by the tensor and by the storage."""
    first, second = model.module.first, model.module.second
    first.away = first.weight.data
    first.weight.data = torch.empty(0)
    first.register_forward_pre_hook(lambda module, _: setattr(module.weight, "data", module.away))
    copied = second.weight.detach().clone()
    second.weight.untyped_storage().resize_(0)
    second.weight.untyped_storage().resize_(copied.nbytes)
    second.weight.data.copy_(copied)


def checkpointed(model: Any) -> None:
    apply_activation_checkpointing(model.module, check_fn=lambda it: isinstance(it, nn.Linear))


def another_frozen_one(model: Any) -> None:
    model.module.frozen = nn.Linear(4, 4).requires_grad_(False)
    for parameter in model.module.frozen.parameters():
        dist.broadcast(parameter, 0)


def frozen_in_another_type(model: Any) -> None:
    model.module.frozen.double().float()


def module_without_parameters(model: Any) -> None:
    model.module.added.append(nn.Tanh())


def compiled(model: Any) -> None:
    model.module.compile(backend="eager")


def compiled_around(model: Any) -> None:
    model.module = torch.compile(model.module, backend="eager")


ALLOWED = [
    there_and_back,
    there_and_back_while_frozen,
    other_data,
    swapped_data,
    copied_state,
    emptied,
    back_again,
    parametrized,
    pruned,
    normed_as_before,
    parametrized_for_a_while,
    pruned_for_good,
    offloaded,
    checkpointed,
    another_frozen_one,
    frozen_in_another_type,
    module_without_parameters,
    compiled,
    compiled_around,
]


def keep_training(rank: int, world_size: int, change: Callable[[Any], None]) -> None:
    for options in ({}, {"gradient_as_bucket_view": True}, {"static_graph": True}):
        model = DistributedDataParallel(Net(), **options)
        for _ in range(2):
            step(model, rank)
        change(model)
        for _ in range(2):
            step(model, rank)


@pytest.mark.parametrize("change", ALLOWED, ids=lambda change: change.__name__)
def test_gradients_are_averaged_after_other_changes(change: Callable[[Any], None]) -> None:
    run_ranks(keep_training, 2, change)


def functional(rank: int, world_size: int) -> None:
    """Tensors that replace parameters for one forward: gradients reach the parameters, averaged."""
    model = DistributedDataParallel(Net())
    step(model, rank)
    for _ in range(2):
        model.zero_grad()
        fast = {name: it * 2 for name, it in model.named_parameters() if it.requires_grad}
        functional_call(model, fast, (torch.full((2, 4), float(rank)),)).sum().backward()
        graph = weakref.ref(fast.popitem()[1])
        gc.collect()
        assert graph() is None
        assert torch.equal(model.module.second.bias.grad, torch.full((4,), 4.0))
        weight = model.module.second.weight.grad
        assert same_on_all_ranks(weight)
        step(model, rank)


def test_functional_calls() -> None:
    run_ranks(functional, 2)


def remove_unused(rank: int, world_size: int) -> None:
    model = DistributedDataParallel(Net(), find_unused_parameters=True)
    step(model, rank)
    model.module.first = nn.Identity()
    for _ in range(2):
        step(model, rank)


def test_parameters_may_be_removed_if_they_may_be_unused() -> None:
    run_ranks(remove_unused, 2)


def change_under_mixed_precision(rank: int, world_size: int) -> None:
    model = DistributedDataParallel(
        Net(), mixed_precision=MixedPrecision(param_dtype=torch.bfloat16)
    )
    model(torch.ones(2, 4))  # its casts stay, as no backward follows
    for backwards in (1, 2):
        model(torch.full((2, 4), float(rank))).sum().backward()
        assert torch.equal(model.module.second.bias.grad, torch.full((4,), 2.0 * backwards))
    attribute(model)
    with pytest.raises(RuntimeError, match=r'"second\.weight" was replaced'):
        model(torch.ones(2, 4))


def test_changes_under_mixed_precision() -> None:
    run_ranks(change_under_mixed_precision, 2)


def detach(rank: int, world_size: int) -> None:
    model = DistributedDataParallel(Net())
    model._remove_autograd_hooks()
    attribute(model)
    double(model)
    model(torch.ones(2, 4, dtype=torch.double)).sum().backward()


def test_nothing_is_compared_without_autograd_hooks() -> None:
    run_ranks(detach, 2)


# -------------------------------------------------------------------- gradients that are left out


def past_the_wrapper(model: Any, x: torch.Tensor) -> None:
    model.module(x).sum().backward()


def backward_twice(model: Any, x: torch.Tensor) -> None:
    loss = model(x).sum()
    loss.backward(retain_graph=True)
    loss.backward()


def backward_for_each_forward(model: Any, x: torch.Tensor) -> None:
    losses = [model(x).sum(), model(x).sum()]
    for loss in losses:
        loss.backward()


def generator_through_a_used_graph(model: Any, x: torch.Tensor) -> None:
    """The loss of the discriminator has taken the average that the generator's loss needs."""
    critic = DistributedDataParallel(nn.Linear(4, 1))
    fake = model(x)
    critic(fake).sum().backward(retain_graph=True)
    model.zero_grad()
    critic(fake).sum().backward()


def after_no_sync(model: Any, x: torch.Tensor) -> None:
    with model.no_sync():
        model(x).sum().backward()
    model(x).sum().backward()
    model.module(x).sum().backward()


LEFT_OUT = [
    past_the_wrapper,
    backward_twice,
    backward_for_each_forward,
    generator_through_a_used_graph,
    after_no_sync,
]


def leave_out(
    rank: int, world_size: int, train: Callable[[Any, torch.Tensor], None], options: dict[str, Any]
) -> None:
    model = DistributedDataParallel(Net(), **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            model.zero_grad()
            train(model, torch.full((2, 4), float(rank)))
    texts = [str(it.message) for it in caught if "not averaged" in str(it.message)]
    assert len(texts) == 1
    for part in (f"[Rank {rank}]", "parameter second.", "call `model(x)`", "no_sync()"):
        assert part in texts[0]


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"static_graph": True}])
@pytest.mark.parametrize("train", LEFT_OUT, ids=lambda train: train.__name__)
def test_gradients_that_are_not_averaged_warn_once(
    train: Callable[[Any, torch.Tensor], None], options: dict[str, Any]
) -> None:
    run_ranks(leave_out, 2, train, options)


def accumulate(model: Any, x: torch.Tensor) -> None:
    with model.no_sync():
        model(x).sum().backward()
        model(x).sum().backward(retain_graph=True)
    model(x).sum().backward()


def accumulate_past_the_wrapper(model: Any, x: torch.Tensor) -> None:
    with model.no_sync():
        model.module(x).sum().backward()
    model(x).sum().backward()


def no_synchronization(model: Any, x: torch.Tensor) -> None:
    model.require_backward_grad_sync = False
    model(x).sum().backward()
    model.require_backward_grad_sync = True


def evaluate(model: Any, x: torch.Tensor) -> None:
    model(x).sum().backward()
    model.eval()
    with torch.no_grad():
        model(x)
        model.module(x)
    model.module(x)
    model.train()


def derivatives(model: Any, x: torch.Tensor) -> None:
    x.requires_grad_(True)
    loss = model(x).square().sum()
    parameters = [p for p in model.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(loss, [x, *parameters], create_graph=True)
    torch.autograd.grad(gradients[1].sum(), parameters, retain_graph=True, allow_unused=True)
    torch.autograd.grad(model.module(x).sum(), parameters)
    (loss + gradients[0].square().sum()).backward()


def adversaries(model: Any, x: torch.Tensor) -> None:
    """The discriminator passes the generator's gradient on, frozen and not."""
    critic = DistributedDataParallel(nn.Linear(4, 1))
    (critic(x).sum() - critic(model(x).detach()).sum()).backward()
    critic(model(x)).sum().backward()
    critic.requires_grad_(False)
    critic(model(x)).sum().backward()
    critic.module(model(x)).sum().backward()
    critic.requires_grad_(True)
    critic(x).sum().backward()


def checkpoints(model: Any, x: torch.Tensor) -> None:
    net = model.module
    for reentrant in (False, True):
        net.forward = lambda x, reentrant=reentrant: net.second(
            checkpoint(net.first, x, use_reentrant=reentrant)
        )
        model(x.requires_grad_(True)).sum().backward()
    del net.forward


def several_forwards(model: Any, x: torch.Tensor) -> None:
    (model(x).sum() + model(x).sum()).backward()


def finalized_by_hand(model: Any, x: torch.Tensor) -> None:
    model.require_manual_backward_finalization = True
    model(x).sum().backward()
    model.finalize_backward()
    model.require_manual_backward_finalization = False


def uneven_inputs(model: Any, x: torch.Tensor) -> None:
    with model.join():
        for _ in range(1 + dist.get_rank()):
            model(x).sum().backward()


def after_an_exception(model: Any, x: torch.Tensor) -> None:
    def fail(_gradient: torch.Tensor) -> None:
        raise ValueError

    y = model.module.first(x)
    y.register_hook(fail)
    model(x)
    with pytest.raises(ValueError):  # noqa: PT011
        model.module.second(y).sum().backward()


def aborted(model: Any, x: torch.Tensor) -> None:
    y = model.module.first(x)
    y.register_hook(lambda _gradient: model.reducer.abort())
    model(x)
    model.module.second(y).sum().backward()


def shared_by_two_wrappers(model: Any, x: torch.Tensor) -> None:
    other = DistributedDataParallel(nn.Sequential(model.module, nn.Linear(4, 1)))
    other(x).sum().backward()
    model(x).sum().backward()


def detached(model: Any, x: torch.Tensor) -> None:
    model._remove_autograd_hooks()
    model(x).sum().backward()
    model.module(x).sum().backward()


EXPLAINED = [
    accumulate,
    accumulate_past_the_wrapper,
    no_synchronization,
    evaluate,
    derivatives,
    adversaries,
    checkpoints,
    several_forwards,
    finalized_by_hand,
    uneven_inputs,
    after_an_exception,
    aborted,
    shared_by_two_wrappers,
    detached,
]


def explain(rank: int, world_size: int, train: Callable[[Any, torch.Tensor], None]) -> None:
    model = DistributedDataParallel(Net())
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=r".*not averaged")
        for _ in range(2):
            model.zero_grad()
            train(model, torch.full((2, 4), float(rank)))


@pytest.mark.parametrize("train", EXPLAINED, ids=lambda train: train.__name__)
def test_other_gradients_do_not_warn(train: Callable[[Any, torch.Tensor], None]) -> None:
    run_ranks(explain, 2, train)


def one_rank(rank: int, world_size: int) -> None:
    past_the_wrapper(DistributedDataParallel(Net()), torch.ones(2, 4))


def test_one_rank_has_nothing_to_average() -> None:
    run_ranks(one_rank, 1)
