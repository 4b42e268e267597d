"""Sparse and complex gradients on torch's own wrapper, and in the forms that use it."""

import json
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel

import commhooks
from commhooks import CommHookState, comm_hook
from commhooks.adapters.adapter import Adapter
from commhooks.adapters.torch_ddp import TorchDDPAdapter


@dataclass
class Recording(commhooks.CommHook):
    """The average; keeps what it was told of each bucket."""

    seen: list[commhooks.GradBucket] = field(
        default_factory=list, init=False, repr=False, compare=False
    )
    broken: bool = field(default=False, init=False, compare=False)

    async def reduce(self, bucket: commhooks.GradBucket, comm: commhooks.Communicator) -> Tensor:
        self.seen.append(bucket)
        average = await comm.all_reduce(bucket.buffer().div_(comm.size))
        if self.broken and comm.rank == 0:
            raise ValueError("broken")
        return average


class Net(nn.Module):
    """``order``: which parts it has. Torch's first buckets have the last ones."""

    def __init__(self, order: str, dtype: torch.dtype = torch.complex64) -> None:
        super().__init__()
        torch.manual_seed(0)
        for part in order:
            if part == "c":
                self.phases = nn.Parameter(torch.randn(3, 4, dtype=dtype))
                self.turned = nn.Parameter(torch.randn(4, 3, dtype=dtype).T)
            elif part == "e":
                self.words = nn.Embedding(10, 4, sparse=True, max_norm=2.0)
            elif part == "d":
                self.direct = nn.Embedding(6, 4, sparse=True)
            elif part == "b":
                self.bag = nn.EmbeddingBag(6, 4, sparse=True, mode="sum")
            else:
                self.head = nn.Linear(4, 4)
        self.uses_words = True

    def forward(self, words: Tensor, waves: Tensor) -> Tensor:
        hidden = waves.real.to(torch.float32)
        if hasattr(self, "words") and self.uses_words:
            hidden = hidden + self.words(words).mean(1)
        if hasattr(self, "direct"):  # the values of its gradient are what the words get as well
            hidden = hidden + self.direct(words[:, 0] % 6)
        if hasattr(self, "bag"):
            hidden = hidden + self.bag(words % 6)
        if hasattr(self, "head"):
            hidden = self.head(hidden)
        if hasattr(self, "phases"):
            hidden = hidden + (self.phases * waves * self.turned.conj()).abs().square().float()
        return hidden.square().sum()


def inputs_of(rank: int, step: int, dtype: torch.dtype = torch.complex64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    words = torch.randint(10, (3, 4), generator=generator)
    return words, torch.randn(3, 4, dtype=dtype, generator=generator)


def check_gradients(
    net: Net, reference: Net, size: int, step: int, users: set[int], dtype: torch.dtype
) -> None:
    """Compare with the mean over the ranks; the words are used on ranks ``users`` only."""
    reference.load_state_dict(net.state_dict())
    reference.zero_grad()
    for peer in range(size):
        reference.uses_words = peer in users
        (reference(*inputs_of(peer, step, dtype)) / size).backward()
    for (name, found), expected in zip(net.named_parameters(), reference.parameters(), strict=True):
        if expected.grad is None:
            assert found.grad is None, name
            continue
        assert found.grad is not None, name
        assert (found.grad.layout, found.grad.dtype) == (expected.grad.layout, found.dtype), name
        torch.testing.assert_close(found.grad.to_dense(), expected.grad.to_dense(), msg=name)


def exact(rank: int, size: int, order: str, dtype: torch.dtype, mode: dict[str, bool]) -> None:
    net, reference = Net(order, dtype), Net(order, dtype)
    model = TorchDistributedDataParallel(net, bucket_cap_mb=1e-4, **mode)
    hook = Recording()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        handle = commhooks.register(model, hook)
    named = dict(net.named_parameters())
    sparse = [name for name in named if name.split(".")[0] in ("words", "direct", "bag")]
    for step in range(4):
        users = (
            {0, 1} if not mode.get("find_unused_parameters") else [{0, 1}, {1}, {0}, set()][step]
        )
        net.uses_words = rank in users
        hook.seen.clear()
        model.zero_grad()
        with torch.no_grad():
            for parameter in named.values():
                parameter.mul_(1.01)  # so that steps differ
        model(*inputs_of(rank, step, dtype)).backward()
        check_gradients(net, reference, size, step, users, dtype)
        assert [bucket.index() for bucket in hook.seen] == list(range(len(hook.seen)))
        assert {bucket.step for bucket in hook.seen} <= {step}
        assert sorted(name for bucket in hook.seen for name in bucket.names) == sorted(
            named.keys() - set(sparse)
        )
        for bucket in hook.seen:
            check_layout(bucket, named)
    stats = handle.stats()
    assert set(stats.total.names) == named.keys()
    assert stats.total.gradient_bytes == sum(p.numel() * p.itemsize for p in named.values())
    for bucket in stats.buckets:
        if bucket.names == ("bag.weight",):
            rows = [len((inputs_of(rank, step)[0] % 6).unique()) for step in range(4)]
            sent = sum(rows) / 4 if stats.steps == 4 else sum(rows[1:]) / 3
            assert bucket.wire_bytes == sent * (8 + 4 * 4)
    assert handle.state_dict()["step"] == 4


def check_layout(bucket: commhooks.GradBucket, named: dict[str, nn.Parameter]) -> None:
    end = 0
    for name, offset, length, shape, gradient, parameter in zip(
        bucket.names,
        bucket.offsets,
        bucket.lengths,
        bucket.shapes,
        bucket.gradients(),
        bucket.parameters(),
        strict=True,
    ):
        whole = named[name]
        real = torch.view_as_real(whole.detach()) if whole.is_complex() else whole
        assert offset == end
        assert length == real.numel()
        assert shape == gradient.shape == parameter.shape == real.shape
        assert gradient.dtype == real.dtype
        assert gradient.stride() == real.stride()
        end += length
    assert bucket.buffer().shape == (end,)


@pytest.mark.covering(2)
@pytest.mark.parametrize("order", ["ceh", "ech", "bhe", "ebd", "c", "heb"])
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
@pytest.mark.parametrize(
    "mode",
    [
        {},
        {"gradient_as_bucket_view": True},
        {"find_unused_parameters": True},
        {"static_graph": True},
    ],
)
def test_gradients_are_exact_and_hooks_get_real_views(
    run_ranks: Any, order: str, dtype: torch.dtype, mode: dict[str, bool]
) -> None:
    """Hooks raised at the first backward."""
    if not ("e" in order and "h" in order) and "find_unused_parameters" in mode:
        mode = {}
    run_ranks(exact, 2, order, dtype, mode)


def quiet(model: nn.Module, hook: Any, **options: Any) -> commhooks.HookHandle:
    """Register a hook without the warning about sparse gradients."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the gradients of")
        return commhooks.register(model, hook, **options)


def fail(rank: int, size: int, order: str) -> None:
    net, reference = Net(order), Net(order)
    # Without this option, torch rebuilds the buckets, and a dense one becomes the last.
    model = TorchDistributedDataParallel(net, bucket_cap_mb=1e-4, find_unused_parameters=True)
    hook = Recording()
    handle = quiet(model, hook)
    for step in range(2):
        model(*inputs_of(rank, step)).backward()
    hook.broken = True
    with pytest.raises(commhooks.CommHookError, match="ValueError: broken"):
        model(*inputs_of(rank, 2)).backward()
    hook.broken = False
    model.zero_grad()
    model(*inputs_of(rank, 3)).backward()
    check_gradients(net, reference, size, 3, {0, 1}, torch.complex64)
    assert handle.state_dict()["step"] == 3


@pytest.mark.parametrize("order", ["hce", "ehc", "eh"])
def test_a_hook_that_fails_beside_a_sparse_bucket(run_ranks: Any, order: str) -> None:
    run_ranks(fail, 2, order)


def warn(rank: int, size: int, torchs: bool) -> None:
    wrapper = TorchDistributedDataParallel if torchs else commhooks.DistributedDataParallel
    model = wrapper(Net("ehb"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        handle = commhooks.register(model, "int8")
        for step in range(2):
            model(*inputs_of(rank, step)).backward()
    (text,) = [str(each.message) for each in caught]
    assert "words.weight" in text
    assert "bag.weight" in text
    assert "head" not in text
    assert "'int8' does not get them" in text
    handle.replace("allreduce")  # no warning, as all others are errors
    with pytest.raises(UserWarning, match="sparse"):
        handle.replace("int4")
    assert handle.hook == commhooks.create("allreduce")


@pytest.mark.parametrize("torchs", [False, True])
def test_registration_warns_once(run_ranks: Any, torchs: bool) -> None:
    run_ranks(warn, 2, torchs)


def resume(rank: int, size: int, config: dict[str, Any]) -> None:
    def step(model: nn.Module, net: nn.Module, number: int) -> None:
        model.zero_grad()
        model(*inputs_of(rank, number)).backward()
        with torch.no_grad():
            for parameter in net.parameters():
                parameter -= 0.01 * parameter.grad

    options: dict[str, Any] = {"bucket_cap_mb": 1e-4, "find_unused_parameters": True}
    net = Net("ceh")
    model = TorchDistributedDataParallel(net, **options)
    handle = quiet(model, config)
    for number in range(3):
        step(model, net, number)
    saved, parameters = handle.state_dict(), {n: p.clone() for n, p in net.state_dict().items()}
    for number in range(3, 5):
        step(model, net, number)
    again = Net("ceh")
    model = TorchDistributedDataParallel(again, **options)
    again.load_state_dict(parameters)
    handle = quiet(model, config)
    handle.load_state_dict(saved)
    for number in range(3, 5):
        step(model, again, number)
    for found, expected in zip(again.parameters(), net.parameters(), strict=True):
        assert torch.equal(found, expected)
    text = str(saved["state"])
    assert "phases" in text
    assert "words" not in text
    with pytest.raises(commhooks.CommHookStateError, match="gone"):
        handle.load_state_dict({**saved, "state": _renamed(saved["state"])})


def _renamed(state: Any) -> Any:
    """Return a state whose complex parameter has another name."""
    if isinstance(state, dict):
        return {
            (key.replace("phases", "gone") if isinstance(key, str) else key): _renamed(value)
            for key, value in state.items()
        }
    return state


@pytest.mark.parametrize(
    "config",
    [
        {"name": "onebit"},
        {"name": "powersgd", "rank": 1, "start_step": 0, "min_compression_rate": 0.1},
    ],
)
def test_state_of_complex_parameters_is_saved_by_name(
    run_ranks: Any, config: dict[str, Any]
) -> None:
    run_ranks(resume, 2, config)


class Tied(nn.Module):
    """One weight with a sparse and a dense gradient; ``first`` is registered first."""

    def __init__(self, first: str) -> None:
        super().__init__()
        embedding, head = nn.Embedding(6, 3, sparse=True), nn.Linear(3, 6, bias=False)
        with torch.no_grad():
            embedding.weight.copy_(torch.arange(18.0).view(6, 3) / 10)
        head.weight = embedding.weight
        layers = {"embedding": embedding, "head": head}
        for name in (first, *layers.keys() - {first}):
            self.add_module(name, layers[name])

    def forward(self, words: Tensor, uses_head: bool) -> Tensor:
        hidden = self.embedding(words)
        return (self.head(hidden) if uses_head else hidden).square().sum()


def tie(rank: int, size: int, first: str, replicated: bool) -> None:
    net, reference = Tied(first), Tied(first)
    model = replicate(net) if replicated else TorchDistributedDataParallel(net)
    quiet(model, Recording())
    for uses_head in ((True, True), (True, False), (False, False)):
        model.zero_grad()
        model(torch.tensor([rank, 3]), uses_head[rank]).backward()
        reference.zero_grad()
        for peer in range(size):
            (reference(torch.tensor([peer, 3]), uses_head[peer]) / size).backward()
        (found,) = model.parameters()
        (expected,) = reference.parameters()
        assert found.grad.is_sparse == (first == "embedding" and not replicated)
        torch.testing.assert_close(found.grad.to_dense(), expected.grad.to_dense())


@pytest.mark.parametrize(
    ("first", "replicated"), [("embedding", False), ("head", False), ("embedding", True)]
)
def test_gradients_get_the_layout_that_torch_expects(
    run_ranks: Any, first: str, replicated: bool
) -> None:
    """Torch raises an error if the weight of a sparse embedding has a dense gradient."""
    run_ranks(tie, 2, first, replicated)


def use_pairs(rank: int, size: int, torchs: bool) -> None:
    mode = {"bucket_cap_mb": 1e-4, "find_unused_parameters": True}
    wrapper = TorchDistributedDataParallel if torchs else commhooks.DistributedDataParallel
    net, reference = Net("ehcb"), Net("ehcb")
    model = wrapper(net, **mode)
    state = CommHookState(Recording(), module=net)
    model.register_comm_hook(state, comm_hook)
    for step, users in enumerate([{1}, {0, 1}, set()]):
        net.uses_words = rank in users
        model.zero_grad()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "the gradients of")  # in the first backward
            model(*inputs_of(rank, step)).backward()
        check_gradients(net, reference, size, step, users, torch.complex64)
    dense = {
        name for name, _ in net.named_parameters() if name.split(".")[0] in "phases turned head"
    }
    assert dense <= set(state.handle.stats().total.names)
    assert state.handle.state_dict()["step"] == 3


@pytest.mark.parametrize("torchs", [True, False])
def test_pairs(run_ranks: Any, torchs: bool) -> None:
    run_ranks(use_pairs, 2, torchs)


def use_half(rank: int, size: int) -> None:
    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.narrow = nn.Embedding(8, 4, sparse=True, dtype=torch.float16)
            self.brain = nn.Embedding(8, 4, sparse=True, dtype=torch.bfloat16)

        def forward(self, words: Tensor) -> Tensor:
            return self.narrow(words).float().sum() + self.brain(words).float().sum()

    model = TorchDistributedDataParallel(Halves())
    commhooks.register(model, "allreduce")
    model(torch.tensor([rank, 2, 2])).backward()
    for parameter in model.parameters():
        assert parameter.grad.dtype == parameter.dtype
        assert parameter.grad.to_dense()[:, 0].tolist() == [0.5, 0.5, 2, 0, 0, 0, 0, 0]


def test_sparse_gradients_of_16_bits(run_ranks: Any) -> None:
    """Torch cannot add sparse tensors of float16 on the CPU."""
    run_ranks(use_half, 2)


def call_function(rank: int, size: int) -> None:
    net, reference = Net("ehc"), Net("ehc")
    model = TorchDistributedDataParallel(net, bucket_cap_mb=1e-4)
    layouts: set[Any] = set()

    def function(state: Any, bucket: Any) -> Any:
        layouts.add((bucket.buffer().layout, type(bucket) is commhooks.GradBucket))
        return allreduce_hook(state, bucket)

    handle = commhooks.register(model, function, state=None)
    model(*inputs_of(rank, 0)).backward()
    check_gradients(net, reference, size, 0, {0, 1}, torch.complex64)
    assert layouts == {(torch.strided, False), (torch.sparse_coo, False)}
    stats = handle.stats()
    assert set(stats.total.names) == {name for name, _ in net.named_parameters()}
    assert stats.total.wire_bytes is None


def test_functions_get_torchs_own_buckets(run_ranks: Any) -> None:
    run_ranks(call_function, 2)


def remove(rank: int, size: int) -> None:
    net, reference = Net("ed"), Net("ed")
    model = TorchDistributedDataParallel(net, bucket_cap_mb=1e-4)
    handle = quiet(model, "int8")
    model(*inputs_of(rank, 0)).backward()
    check_gradients(net, reference, size, 0, {0, 1}, torch.complex64)
    handle.remove()
    model.zero_grad()
    model(*inputs_of(rank, 0)).backward()
    check_gradients(net, reference, size, 0, {0, 1}, torch.complex64)


def test_the_plain_average_of_two_sparse_gradients(run_ranks: Any) -> None:
    """Torch divides one of them in place, and backward reads the same memory for the other one."""
    run_ranks(remove, 2)


def record(rank: int, size: int, path: Path) -> None:
    net = Net("hec")
    model = TorchDistributedDataParallel(net, bucket_cap_mb=1e-4)
    handle = quiet(model, "int8")
    model(*inputs_of(rank, 0)).backward()
    with handle.trace(path) as written:
        model(*inputs_of(rank, 1)).backward()
    events = json.loads(Path(written).read_text())["traceEvents"]
    rows = [e for e in events if e.get("args", {}).get("parameters") == ["words.weight"]]
    others = [e for e in events if "phases" in e.get("args", {}).get("parameters", [])]
    assert len(rows) == len(others) == 1
    assert rows[0]["tid"] != others[0]["tid"]
    assert {"words.weight", "phases", "head.bias"} <= {event["name"] for event in events}


def test_traces_show_sparse_buckets(run_ranks: Any, tmp_path: Path) -> None:
    run_ranks(record, 2, tmp_path / "step.json")


def refuse(rank: int, size: int) -> None:
    model = TorchDistributedDataParallel(Net("ehb"))

    class Backend:
        def name(self) -> str:
            return "nccl"

    class Group:
        def __init__(self, group: Any) -> None:
            self.size = group.size

        def _get_backend(self, _: torch.device) -> Backend:
            return Backend()

    adapter = TorchDDPAdapter(model)
    adapter._group = Group(adapter.group)
    with pytest.raises(commhooks.CommHookError, match=r"words.weight, bag.weight .*sparse=False"):
        Adapter.check(adapter, commhooks.create("int8"))
    mode = {"find_unused_parameters": True, "skip_all_reduce_unused_params": True}
    model = TorchDistributedDataParallel(Net("ehb"), **mode)
    with pytest.raises(commhooks.CommHookError, match=r"words.weight, bag.weight .*unused_params"):
        commhooks.register(model, "int8")


def test_what_cannot_average_rows_is_refused(run_ranks: Any) -> None:
    run_ranks(refuse, 2)
