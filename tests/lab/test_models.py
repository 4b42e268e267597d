"""Built-in models have the parameters of the published ones; anything else is an error."""

import sys
import types
from collections import UserDict

import pytest
import torch
from torch import Tensor, nn

from commhooks.lab.models import ModelError, Workload, built_in_models, load_model

# The published numbers of elements and of tensors.
SIZES = {
    "gpt2-small": (124_439_808, 148),
    "lstm": (28_949_319, 14),
    "resnet50": (25_557_032, 161),
    "transformer-151mb": (37_816_320, 120),
}


@pytest.mark.parametrize("name", built_in_models())
def test_parameters_are_those_of_the_published_model(name: str) -> None:
    with torch.device("meta"):
        parameters = list(load_model(name).parameters())
    assert (sum(p.numel() for p in parameters), len(parameters)) == SIZES[name]


def test_shapes_are_those_of_the_published_weights() -> None:
    with torch.device("meta"):
        gpt2 = dict(load_model("gpt2-small").named_parameters())
        resnet = dict(load_model("resnet50").named_parameters())
    assert gpt2["wte.weight"].shape == (50257, 768)
    assert gpt2["h.11.attn.c_attn.weight"].shape == (768, 2304)
    assert resnet["layer1.0.downsample.0.weight"].shape == (256, 64, 1, 1)
    assert resnet["layer4.2.conv2.weight"].shape == (512, 512, 3, 3)


@pytest.mark.parametrize("name", ["lstm", "transformer-151mb"])
def test_every_parameter_gets_a_gradient(name: str) -> None:
    torch.manual_seed(0)
    model = load_model(name)
    inputs = model.example_input()  # type: ignore[operator]
    output = model(*inputs) if isinstance(inputs, tuple) else model(inputs)
    output.square().mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.fixture
def factories(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("factories")
    module.good = lambda: nn.Linear(2, 2)  # type: ignore[attr-defined]
    module.constant = 5  # type: ignore[attr-defined]
    module.raises = lambda: 1 / 0  # type: ignore[attr-defined]
    module.returns_text = lambda: "model"  # type: ignore[attr-defined]
    module.empty = nn.ReLU  # type: ignore[attr-defined]
    module.frozen = lambda: nn.Linear(2, 2).requires_grad_(False)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "factories", module)


@pytest.mark.usefixtures("factories")
def test_a_factory() -> None:
    assert isinstance(load_model("factories:good"), nn.Linear)


@pytest.mark.usefixtures("factories")
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("gpt2-smal", "did you mean 'gpt2-small'"),
        ("nonsense", "Built in: gpt2-small, lstm"),
        ("no_such_module:make", "cannot be imported: ModuleNotFoundError"),
        ("factories:goood", "did you mean 'good'"),
        ("factories:", "expected package.module:name"),
        ("factories:constant", "expected a callable, found int"),
        ("factories:raises", "raised ZeroDivisionError"),
        ("factories:returns_text", "expected its factory to return a torch.nn.Module, found str"),
        ("factories:empty", "no parameters that need gradients"),
        ("factories:frozen", "no parameters that need gradients"),
    ],
)
def test_errors_say_why_it_is_not_a_model(name: str, says: str) -> None:
    with pytest.raises(ModelError, match=says):
        load_model(name)


@pytest.mark.usefixtures("factories")
def test_an_input_that_cannot_be_made() -> None:
    with pytest.raises(ModelError, match=r"input 'factories:raises': .* ZeroDivisionError"):
        Workload("lstm", "factories:raises").make_input(nn.Linear(2, 2), 0)
    module = nn.Linear(2, 2)
    module.example_input = lambda: 1 / 0  # type: ignore[assignment]
    with pytest.raises(ModelError, match=r"example_input\(\) of 'lstm': .* ZeroDivisionError"):
        Workload("lstm").make_input(module, 0)


class Output(UserDict[str, Tensor]):
    """As that of a model of Transformers."""

    loss: Tensor | None = None


class Summing(nn.Module):
    """Has a loss if it gets labels."""

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Output:
        output = Output(logits=2 * ids, states=ids)
        if labels is not None:
            output.loss = output["loss"] = (ids - labels).sum()
        return output


@pytest.mark.parametrize("kind", [dict, UserDict])
def test_a_batch_may_be_any_mapping(kind: type) -> None:
    """That of a tokenizer is a UserDict."""
    ids, labels = torch.full((3,), 5.0), torch.full((3,), 1.0)
    workload = Workload("lstm")
    assert workload.loss(Summing(), kind(ids=ids, labels=labels), 0).item() == 12.0
    assert workload.loss(Summing(), kind(ids=ids), 0).item() == 100.0  # the mean square of logits


def test_an_output_without_a_tensor_is_an_error() -> None:
    with pytest.raises(ModelError, match="an object with a loss; found NoneType"):
        Workload("lstm").loss(nn.Identity(), {"input": {"loss": None}}, 0)
