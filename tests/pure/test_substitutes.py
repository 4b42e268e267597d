"""The modules in Python that are used without the extensions have their names and behavior."""

import ast
import ctypes
import inspect
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import commhooks.fallback
import reducer.fallback
from commhooks import native
from commhooks.extensions import ENGINE, EXTENSIONS, KERNELS
from commhooks.lab import doctor
from commhooks.lab.doctor import Health
from reducer.extension import REMEDY
from reducer.native import GradBucket

SUBSTITUTES = {KERNELS: commhooks.fallback, ENGINE: reducer.fallback}
NOT_IN_PYTHON = {
    KERNELS: {
        *("project_left", "project_right", "apply_factors", "join_works", "ring_gather"),
        *("instruction_sets", "use_instruction_set", "locks_taken_with_gil"),
    },
    ENGINE: {
        *("ReducerOptions", "any_requires_grad", "are_values", "pack", "unpack"),
        *("instruction_sets", "use_instruction_set", "locks_taken_with_gil"),
    },
}


def stub_of(extension: Any) -> list[ast.stmt]:
    return ast.parse((extension.folder / "_C.pyi").read_text()).body


@pytest.mark.parametrize("extension", EXTENSIONS, ids=lambda extension: extension.name)
def test_same_names_and_arguments(extension: Any) -> None:
    module: ModuleType = SUBSTITUTES[extension]
    stub = {
        node.name: node
        for node in stub_of(extension)
        if isinstance(node, ast.ClassDef | ast.FunctionDef)
    }
    assert set(module.__all__) == stub.keys() - NOT_IN_PYTHON[extension]
    for name in module.__all__:
        node, found = stub[name], getattr(module, name)
        if isinstance(node, ast.FunctionDef):
            assert arguments(node) == list(inspect.signature(found).parameters), name
        elif name not in ("Reducer", "HostGroup"):  # neither works without the extension
            for method in node.body:
                if isinstance(method, ast.FunctionDef) and not method.decorator_list:
                    expected = inspect.signature(getattr(found, method.name)).parameters
                    if method.name != "__init__" or name == "GradBucket":
                        assert arguments(method) == list(expected), (name, method.name)


def arguments(function: ast.FunctionDef) -> list[str]:
    given = function.args
    return [item.arg for item in (*given.posonlyargs, *given.args, *given.kwonlyargs)]


def odd_bucket(kind: Any) -> Any:
    parameters = [
        torch.zeros(2, 3),
        torch.zeros(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        torch.zeros(4, 6)[:, ::2],
        torch.zeros(()),
        torch.zeros(0, 3).T,
        torch.zeros(5, 3).T,
        torch.zeros(3, 1).expand(3, 2),
    ]
    numel = sum(parameter.numel() for parameter in parameters)
    names = [f"layer.{i}.gewicht\N{LATIN SMALL LETTER U WITH DIAERESIS}" for i in range(7)]
    buffer = torch.arange(1.0, numel + 2)[1:]
    return kind(buffer, parameters, names, index=2, is_last=False, step=5, left_out=["x"])


def test_buckets_are_alike() -> None:
    compiled, found = odd_bucket(GradBucket), odd_bucket(reducer.fallback.GradBucket)
    for name in ("names", "offsets", "lengths", "shapes", "key", "step", "left_out"):
        assert getattr(found, name) == getattr(compiled, name), name
    for method in ("index", "is_last"):
        assert getattr(found, method)() == getattr(compiled, method)(), method
    for one, other in zip(compiled.gradients(), found.gradients(), strict=True):
        assert one.stride() == other.stride()
        assert torch.equal(one, other)
    assert bool(found.all_finite()) is bool(compiled.all_finite()) is True
    found.buffer()[3] = torch.inf
    assert not found.all_finite()
    found.set_buffer(torch.zeros_like(found.buffer()))
    assert found.all_finite()


@pytest.mark.parametrize(("numel", "names"), [(5, ["weight"]), (6, [])])
def test_buckets_refuse_alike(numel: int, names: list[str]) -> None:
    messages = []
    for kind in (GradBucket, reducer.fallback.GradBucket):
        with pytest.raises(ValueError, match="Expected") as caught:
            kind(torch.zeros(numel), [torch.zeros(2, 3)], names)
        messages.append(str(caught.value).splitlines()[0])
    assert messages[0] == messages[1]


@pytest.mark.parametrize("module", [native, commhooks.fallback], ids=["in use", "fallback"])
def test_kernel_arguments(module: Any) -> None:
    tensor = torch.ones(3)
    given: tuple[Any, ...] = (tensor, 5, -1, 2**63 + 1, 2.5, None)
    kind, index, address = module.write_arguments(given)
    assert (kind, index) == ("cpu", 0)
    addresses = (ctypes.c_uint64 * len(given)).from_address(address)
    words = [ctypes.c_uint64.from_address(at).value for at in addresses]
    assert words[:4] == [tensor.data_ptr(), 5, 2**64 - 1, 2**63 + 1]
    assert ctypes.c_double.from_address(addresses[4]).value == 2.5
    assert words[5] == 0
    for wrong in ((5,), (tensor, torch.ones(4)[::2]), (tensor, torch.ones(1, device="meta"))):
        with pytest.raises(ValueError, match="expected"):
            module.write_arguments(wrong)


@pytest.mark.parametrize("numbers", [[], [1.0], [1.0, float("nan")], [float("-inf"), 0.0]])
def test_finite(numbers: list[float]) -> None:
    tensor: Tensor = torch.tensor(numbers)
    found = commhooks.fallback.all_finite(tensor)
    assert (found.shape, found.dtype) == ((), torch.bool)
    assert bool(found) == bool(tensor.isfinite().all())


def test_the_doctor_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMMHOOKS_NO_EXTENSION", "1")
    for extension in EXTENSIONS:
        health, found, remedy = doctor._checks()[extension.name]()  # type: ignore[misc]
        assert health is Health.ABSENT
        assert "COMMHOOKS_NO_EXTENSION=1" in found
        assert remedy == REMEDY
