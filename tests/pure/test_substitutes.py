"""The modules in Python that are used without the extensions have their names and behavior."""

import ast
import ctypes
import inspect
import threading
from datetime import timedelta
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
    ENGINE: {"any_requires_grad", "last_change", "pack", "unpack"},
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


class Work(torch._C._distributed_c10d.Work):
    """Completes when the test says so. It has no future."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__()
        self.error = error
        self.is_awaited, self.may_end = threading.Event(), threading.Event()
        self.timeouts: list[timedelta | None] = []

    def wait(self, timeout: timedelta | None = None) -> bool:
        self.timeouts.append(timeout)
        self.is_awaited.set()
        if not timeout:  # C++ says 0 for none
            self.may_end.wait()
        if self.error is not None:
            raise self.error
        return True


@pytest.mark.parametrize("module", [commhooks.fallback, native])
def test_tokens_come_when_works_complete(module: Any) -> None:
    queue: Any = module.CompletionQueue()
    first, second, other = Work(), Work(RuntimeError("lost")), Work()
    queue.watch(first, 1, 0)
    queue.watch(second, 2, 0)
    queue.watch(other, 3, 1)
    assert queue.get(0.01) is None
    other.may_end.set()
    assert queue.get() == 3
    second.may_end.set()
    assert queue.get(0.01) is None  # works of one stage complete in order
    first.may_end.set()
    assert [queue.get(), queue.get()] == [1, 2]
    queue.put(7)
    assert queue.get() == 7


@pytest.mark.parametrize("module", [commhooks.fallback, native])
def test_works_behind_one_that_never_completes_get_another_thread(module: Any) -> None:
    queue: Any = module.CompletionQueue()
    never, later, last = Work(), Work(), Work()
    for token, work in enumerate([never, later]):
        queue.watch(work, token, 0)
    later.may_end.set()
    last.may_end.set()
    assert never.is_awaited.wait(60)  # otherwise another thread would wait for it
    assert queue.get(0.01) is None
    queue.forget()
    queue.watch(last, 2, 0)
    assert [queue.get(60), queue.get(60)] == [1, 2]
    never.may_end.set()
    assert queue.get(60) == 0


def test_the_threads_of_a_queue_end_with_it() -> None:
    before = set(threading.enumerate())
    queue: Any = commhooks.fallback.CompletionQueue()
    work = Work()
    queue.watch(work, 1, 0)
    (thread,) = set(threading.enumerate()) - before
    del queue
    work.may_end.set()
    thread.join(60)
    assert not thread.is_alive()


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
