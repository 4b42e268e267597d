"""torch.compile of the module inside the wrapper, and of the wrapper."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import commhooks
from commhooks.testing import close_ranks, run_ranks
from reducer import DistributedDataParallel

pytestmark = pytest.mark.filterwarnings("ignore")


class Net(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.width = width
        self.layers = nn.Sequential(*[nn.Linear(width, width) for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x


def inputs_of(rank: int, step: int, width: int = 8) -> torch.Tensor:
    return torch.randn(4, width, generator=torch.Generator().manual_seed(100 * rank + step))


class Outer(nn.Module):
    """A module with a wrapper inside."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + 1


def traced(rank: int, world_size: int, wrapper: Any, hook: str | None) -> list[torch.Tensor]:
    model = wrapper(Net())
    if hook is not None:
        commhooks.register(model, hook)
    graph = torch.fx.symbolic_trace(Outer(model))
    before = [parameter.detach().clone() for parameter in graph.parameters()]
    optimizer = torch.optim.SGD(graph.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        graph(inputs_of(rank, step)).square().mean().backward()
        optimizer.step()
    after = [parameter.detach() for parameter in graph.parameters()]
    assert all((new - old).abs().max() > 1e-3 for new, old in zip(after, before, strict=True))
    return after


def test_symbolic_trace_keeps_the_wrapper() -> None:
    expected = run_ranks(traced, 2, TorchDDP, None)[0]
    for found in run_ranks(traced, 2, DistributedDataParallel, None):
        torch.testing.assert_close(found, expected)
    first, second = run_ranks(traced, 2, commhooks.DistributedDataParallel, "int8")
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    torch.testing.assert_close(first, expected, rtol=0.01, atol=2e-4)


@contextlib.contextmanager
def counted_graphs() -> Iterator[list[int]]:
    """Collect the sizes of the graphs that a backend gets to compile."""
    torch._dynamo.reset()
    graphs: list[int] = []
    yield graphs


def compile_with(module: nn.Module, graphs: list[int], backend: str) -> Any:
    def count(graph: torch.fx.GraphModule, example_inputs: Any) -> Any:
        graphs.append(len(graph.graph.nodes))
        return torch._dynamo.lookup_backend(backend)(graph, example_inputs)

    return torch.compile(module, backend=count)


def train(
    rank: int, world_size: int, where: str, hook: str | None, width: int, options: dict[str, Any]
) -> list[int]:
    reference = Net(width)
    counts = []
    for wrapper in (DistributedDataParallel, TorchDDP):
        with counted_graphs() as graphs:
            module: Any = Net(width)
            if where == "module":
                model = wrapper(compile_with(module, graphs, "aot_eager"), **options)
                run = model
            else:
                model = wrapper(module, **options)
                run = compile_with(model, graphs, "aot_eager")
            if hook is not None and wrapper is DistributedDataParallel:
                assert commhooks.register(run, hook) is commhooks.handle_of(model)
            for step in range(3):
                model.zero_grad()
                reference.zero_grad()
                run(inputs_of(rank, step, width)).square().mean().backward()
                for peer in range(world_size):
                    (
                        reference(inputs_of(peer, step, width)).square().mean() / world_size
                    ).backward()
                tolerance = 2e-2 if hook == "bf16" else 1e-5
                for ours, theirs in zip(module.parameters(), reference.parameters(), strict=True):
                    torch.testing.assert_close(
                        ours.grad, theirs.grad, rtol=tolerance, atol=tolerance / 10
                    )
            counts.append(len(graphs))
    return counts


@pytest.mark.parametrize(
    ("where", "hook"),
    [
        ("module", None),
        *(
            pytest.param(*case, marks=pytest.mark.exhaustive)
            for case in [("module", "bf16"), ("module", "powersgd"), ("wrapper", None),
                         ("wrapper", "bf16"), ("wrapper", "powersgd")]
        ),
    ],
)  # fmt: skip
def test_gradients_are_averaged_with_no_more_graphs_than_torch(
    where: str, hook: str | None
) -> None:
    for ours, theirs in run_ranks(train, 2, where, hook, 8, {}, timeout=240):
        assert 0 < ours <= theirs


def test_graphs_are_split_at_the_ends_of_buckets() -> None:
    """Otherwise communication could not overlap with a compiled backward."""
    options = {"bucket_cap_mb": 1}
    for ours, theirs in run_ranks(train, 2, "wrapper", "bf16", 512, options, timeout=240):
        assert 1 < ours <= theirs


def small_buckets(rank: int, world_size: int) -> None:
    module = Net()
    model: Any = DistributedDataParallel(module, bucket_cap_mb=0.0001)
    torch._dynamo.reset()
    torch.compile(model, backend="eager")(inputs_of(rank, 0)).sum().backward()
    compiled = [p.grad.clone() for p in module.parameters()]
    model.zero_grad()
    model(inputs_of(rank, 0)).sum().backward()
    for found, parameter in zip(compiled, module.parameters(), strict=True):
        torch.testing.assert_close(found, parameter.grad)


def test_buckets_may_be_smaller_than_the_compiler_accepts() -> None:
    run_ranks(small_buckets, 2, timeout=240)


def compiled_autograd(rank: int, world_size: int) -> None:
    model = DistributedDataParallel(Net())
    with torch._dynamo.config.patch(compiled_autograd=True):
        torch._dynamo.reset()
        run = torch.compile(lambda x: model(x).square().mean().backward(), backend="eager")
        with pytest.raises(Exception, match="does not work with compiled autograd"):
            run(inputs_of(rank, 0))
    torch._dynamo.reset()
    model.reducer.abort()
    model.zero_grad()
    model(inputs_of(rank, 0)).sum().backward()
    assert model.module.layers[0].weight.grad is not None


def test_compiled_autograd_raises() -> None:
    run_ranks(compiled_autograd, 2, timeout=240)


class Products(nn.Module):
    """Needs no kernels of its own, which would take a minute to compile."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = (nn.Linear(8, 8, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def train_with_cache(
    rank: int, world_size: int, wrapper: Any, artifacts: bytes | None
) -> tuple[list[torch.Tensor], bytes, int]:
    torch._dynamo.reset()
    counters.clear()
    with fresh_cache():
        if artifacts is not None:
            assert torch.compiler.load_cache_artifacts(artifacts) is not None
        model = wrapper(Products())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run = torch.compile(model)
        for step in range(3):
            optimizer.zero_grad()
            run(inputs_of(rank, step)).square().mean().backward()
            optimizer.step()
        saved = torch.compiler.save_cache_artifacts()
    assert saved is not None
    hits = counters["aot_autograd"]["autograd_cache_hit"]
    return [p.detach() for p in model.parameters()], saved[0], hits


@pytest.mark.exhaustive
def test_saved_compile_caches_are_used_by_other_processes() -> None:
    results = []
    for wrapper in (DistributedDataParallel, TorchDDP):
        first = run_ranks(train_with_cache, 2, wrapper, None, timeout=240)
        close_ranks()  # so that nothing else is left of the compiled code
        again = run_ranks(train_with_cache, 2, wrapper, first[0][1], timeout=240)
        assert [hits for *_, hits in first + again] == [0, 0, 1, 1]
        results += [parameters for parameters, *_ in first + again]
    assert all(torch.equal(*pair) for it in results for pair in zip(it, results[0], strict=True))


def overlapping(rank: int, world_size: int) -> None:
    first, second = (DistributedDataParallel(Net())._inside_ddp_forward() for _ in range(2))
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    second.__exit__(None, None, None)
    assert TorchDDP._active_ddp_module is None


def test_after_forwards_in_two_threads_no_graphs_are_split() -> None:
    run_ranks(overlapping, 1)
