"""Whole hooks on the path for CUDA tensors, emulated on CPU tensors, against the CPU path."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from emulation import emulated
from support.lockstep import lockstep, make_bucket
from support.no_waiting import waiting_is_an_error
from torch import Tensor

import commhooks
from commhooks import CommHookError, kernels
from commhooks.codecs.block import BlockCodec
from commhooks.codecs.formats import integers
from commhooks.kernels import loader
from commhooks.testing.compare import same_bits
from commhooks.testing.probe import Trainer, draw_gradients, probe_parameters

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

HOOKS: dict[str, dict[str, Any]] = {
    "int8": {"block_size": 32},
    "int4": {"stochastic": True, "error_feedback": False},
    "int2": {},
    "fp8": {"format": "e5m2"},
    "fp4": {},
    "qsgd": {"norm": "l2"},
    "terngrad": {"block_size": 32},
    "natural": {},
    "onebit": {"block_size": 64},
    "signsgd": {"error_feedback": False},
}


def train(rank: int, size: int, name: str, is_emulated: bool) -> tuple[list[Tensor], Any]:
    """Train a few steps, one with a non-finite gradient; return results and the hook's state."""
    parameters = probe_parameters()
    hook = commhooks.create(name, **HOOKS[name])
    trainer = Trainer(hook, parameters, bucket_cap_mb=25, stable_buckets=True)
    results = []
    with emulated() if is_emulated else nullcontext():
        for step in range(4):
            gradients = draw_gradients(parameters, rank, step)
            if step == 2 and rank == size - 1:
                next(g for g in gradients.values() if g.dim() == 1)[:1] = torch.inf
            averages = trainer.step(gradients)
            results += [averages[parameter].clone() for parameter in sorted(averages)]
    return results, hook.state_dict()


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", ["int8", "fp8", "onebit"])
def test_same_averages_and_states_on_several_ranks(run_ranks, name, size):
    expected = run_ranks(train, size, name, False)
    found = run_ranks(train, size, name, True)
    for (results, state), (others, other_state) in zip(found, expected, strict=True):
        assert any(tensor.isnan().any() for tensor in others)
        assert same_bits([t.nan_to_num(9.0) for t in results], [t.nan_to_num(9.0) for t in others])
        assert same_bits(state, other_state)


def lockstep_steps(name: str, device: str = "cpu") -> tuple[list[Tensor], list[Any]]:
    results, states = [], []
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        hooks = [commhooks.create(name, **HOOKS[name]) for _ in range(3)]
        for step in range(2):
            generators = [torch.Generator().manual_seed(10 * step + rank) for rank in range(3)]
            drawn = [torch.randn(700, generator=generator).to(dtype) for generator in generators]
            buckets = [make_bucket({"a": gradient.to(device)}, step) for gradient in drawn]
            with waiting_is_an_error() if device != "cpu" else nullcontext():
                results += lockstep(hooks, buckets)[0]
        states += [hook.state_dict() for hook in hooks]
    return results, states


@pytest.mark.parametrize("name", HOOKS)
def test_same_averages_and_states_of_every_hook(name):
    expected = lockstep_steps(name)
    with emulated():
        found = lockstep_steps(name)
    assert same_bits(found, expected)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("name", HOOKS)
def test_same_on_a_gpu_without_waiting(name):
    expected = lockstep_steps(name)
    results, states = lockstep_steps(name, "cuda")
    assert same_bits([result.cpu() for result in results], expected[0])
    on_cpu = [
        {key: {field: tensor.cpu() for field, tensor in entry.items()} for key, entry in s.items()}
        for s in states
    ]
    assert same_bits(on_cpu, expected[1])


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("index", range(max(1, torch.cuda.device_count())))
def test_kernels_run_on_the_current_stream_of_the_tensors_device_from_any_thread(index):
    """Earlier work on the stream is slow, and a new thread has no CUDA context yet."""
    device = torch.device("cuda", index)
    codec = BlockCodec(integers(8), 256)
    given = torch.randn(1 << 20)
    expected = torch.empty(1, codec.encoded_bytes(given.numel()), dtype=torch.uint8)
    codec.encode(given, expected, given.numel())
    source, values = given.to(device), torch.zeros_like(given, device=device)
    messages = expected.to(device).zero_()
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))

    def encode() -> None:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(100_000_000)
            values.copy_(source)
            codec.encode(values, messages, given.numel())

    with ThreadPoolExecutor(1) as threads:
        threads.submit(encode).result()
    stream.synchronize()
    assert torch.equal(messages.cpu(), expected)


def test_missing_cupy_is_named_when_a_hook_is_registered(monkeypatch):
    """Not only at the first step: torch without CUDA, no CuPy, or CuPy for another CUDA."""
    parameters = {"w": torch.empty(3, device="meta")}
    monkeypatch.setitem(kernels.BACKENDS, "meta", loader.CudaBackend())
    hook = commhooks.create("int8")
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(CommHookError, match=r"expected a torch for CUDA"):
        hook.prepare(parameters, None)
    monkeypatch.setattr(torch.version, "cuda", "13.0")

    def no_cupy() -> None:
        raise ImportError("No module named 'cupy'")

    monkeypatch.setattr(loader, "nvrtc", no_cupy)
    with pytest.raises(CommHookError, match=r"pip install 'commhooks\[cuda13\]'"):
        hook.prepare(parameters, None)

    older = SimpleNamespace(getVersion=lambda: (12, 9))
    monkeypatch.setattr(loader, "nvrtc", lambda: older)
    monkeypatch.setattr(loader, "packages_distributions", lambda: {"cupy": ["cupy-cuda12x"]})
    with pytest.raises(CommHookError, match=r"for CUDA 13, .*uninstall cupy-cuda12x.*\[cuda13\]"):
        hook.prepare(parameters, None)
