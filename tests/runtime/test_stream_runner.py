"""The runner of backends that keep the order of collectives, tested on Gloo."""

import threading
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import commhooks
from commhooks.adapters import adapter
from commhooks.comm.stream_groups import options_like
from commhooks.runtime import side_stream
from commhooks.runtime.runner import make_runner
from commhooks.runtime.side_stream import SideStream
from commhooks.runtime.stream_runner import StreamRunner

# They multiply matrices, which autocast does in half precision.
MULTIPLYING: list[dict[str, Any]] = [
    {"name": "demo"},
    {"name": "powersgd", "num_iters_per_step": 2, "start_step": 0, "min_compression_rate": 1.0},
]


class Product(nn.Module):
    """Its own backward multiplies no matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32, 64))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x


def averages(rank: int, size: int, config: dict[str, Any], autocast: bool) -> list[Tensor]:
    adapter.make_runner = StreamRunner  # type: ignore[assignment]
    try:
        torch.manual_seed(0)
        model = commhooks.DistributedDataParallel(Product())
        commhooks.register(model, config)
        found = []
        for step in range(3):
            model.zero_grad()
            loss = model(torch.randn(32, 64, generator=torch.Generator().manual_seed(step))).sum()
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                (loss * (rank + 1)).backward()
            found += [parameter.grad.clone() for parameter in model.parameters()]
        return found
    finally:
        adapter.make_runner = make_runner


@pytest.mark.parametrize("config", MULTIPLYING, ids=lambda config: config["name"])
def test_hooks_do_not_see_the_autocast_of_backward(run_ranks: Any, config: dict[str, Any]) -> None:
    plain = run_ranks(averages, 2, config, False)
    cast = run_ranks(averages, 2, config, True)
    for expected, found in zip(plain, cast, strict=True):
        assert all(map(torch.equal, expected, found))


@dataclass
class Options:
    """Has the attributes of ProcessGroupNCCL.Options."""

    _timeout: float = 600.0
    is_high_priority_stream: bool = False
    split_from: Any = None
    split_color: int = 0
    group_name: str = ""


def test_options_of_new_groups_split_no_communicator() -> None:
    """After init_process_group(device_id=...), options of subgroups name a parent."""
    found = options_like(Options(30.0, True, object(), 3, "subgroup"))
    assert found == Options(30.0, True)


class FakeStream:
    """A stream that may be entered by one thread at a time, as torch's in 2.11."""

    def __init__(self, **kwargs: Any) -> None:
        self.stream_id, self.device_index, self.device_type = 7, 0, 1
        self.is_entered = False

    def __enter__(self) -> None:
        assert not self.is_entered
        self.is_entered = True

    def __exit__(self, *_: object) -> None:
        self.is_entered = False

    def record_event(self) -> "FakeStream":
        return self


def test_threads_enter_one_side_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side_stream, "torch", SimpleNamespace(Stream=FakeStream))
    stream = SideStream(torch.device("cuda", 0))
    failures: list[BaseException] = []

    def enter() -> None:
        try:
            with stream:
                pass
        except BaseException as error:
            failures.append(error)

    with stream:
        thread = threading.Thread(target=enter)
        thread.start()
        thread.join()
    assert not failures


def test_a_flush_waits_for_steps_and_exchanges(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a saved state would be copied while the exchange stream writes it."""
    awaited: list[FakeStream] = []
    current = SimpleNamespace(wait_event=awaited.append)
    fake = SimpleNamespace(
        Stream=FakeStream, accelerator=SimpleNamespace(current_stream=lambda _: current)
    )
    monkeypatch.setattr(side_stream, "torch", fake)
    runner = object.__new__(StreamRunner)
    runner._stream, runner._exchange_stream = (
        SideStream(torch.device("cuda", 0)) for _ in range(2)
    )
    runner.flush()
    assert awaited == [runner._stream._stream, runner._exchange_stream._stream]
