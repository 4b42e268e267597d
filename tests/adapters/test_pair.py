"""``CommHookState`` and ``comm_hook`` for ``register_comm_hook``, beside ``register``."""

import gc
import io
import pickle
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.states import of_rank
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel

import commhooks
from commhooks import CommHookState, comm_hook
from commhooks.integrations.lightning_parts import HookCallback

HOOKS: list[dict[str, Any]] = [
    {"name": "int8"},
    {"name": "powersgd", "rank": 1, "start_step": 0, "min_compression_rate": 1.0},
    {"name": "local_sgd", "period": 2},
]


def make_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4), nn.Linear(4, 3))


def make_model(net: nn.Module, state: CommHookState | None = None, **options: Any) -> Any:
    """Keep the buckets, so that hooks meet the same ones in a resumed run."""
    options = {"bucket_cap_mb": 1e-4, "find_unused_parameters": True} | options
    model = TorchDistributedDataParallel(net, **options)
    if state is not None:
        model.register_comm_hook(state, comm_hook)
    return model


def train(model: nn.Module, rank: int, steps: range) -> Tensor:
    """Train, and return all gradients and parameters."""
    gradients = []
    for step in steps:
        inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank))
        model.zero_grad()
        model(inputs).square().sum().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                gradients.append(parameter.grad.reshape(-1).clone())
                parameter -= 0.01 * parameter.grad
    parameters = [parameter.detach().reshape(-1) for parameter in model.parameters()]
    return torch.cat(gradients + parameters)


def compare_with_register(rank: int, size: int) -> None:
    for config in HOOKS:
        expected_model = make_model(make_net())
        expected_handle = commhooks.register(expected_model, config)
        expected = train(expected_model, rank, range(5))
        net = make_net()
        state = CommHookState(config, module=net)
        model = make_model(net, state)
        handle = commhooks.handle_of(model)
        assert handle is commhooks.handle_of(net) is state.handle
        assert state.handle.hook == commhooks.create(config)
        for method in (state.handle.stats, state.handle.state_dict, state.handle.remove):
            with pytest.raises(commhooks.CommHookError, match=r"in the first backward.*passed to"):
                method()
        assert torch.equal(train(model, rank, range(5)), expected), config
        assert commhooks.handle_of(model) is commhooks.handle_of(net) is state.handle is handle
        found, wanted = (h.state_dict() for h in (state.handle, expected_handle))
        torch.testing.assert_close(found["state"], wanted["state"], rtol=0, atol=0)
        assert found | {"state": {}} == wanted | {"state": {}}
        assert state.handle.stats().total.names == expected_handle.stats().total.names
        assert state.handle.stats().total.wire_bytes == expected_handle.stats().total.wire_bytes
        with pytest.raises(commhooks.CommHookError, match=r"from register_comm_hook\(\)"):
            commhooks.register(model, "int8")
        with pytest.raises(commhooks.CommHookError, match="in use on another model"):
            commhooks.register(make_model(make_net()), state.handle.hook)
        state.handle.replace("allreduce")
        expected_handle.replace("allreduce")
        assert torch.equal(
            train(model, rank, range(5, 6)), train(expected_model, rank, range(5, 6))
        )
        state.handle.remove()
        assert commhooks.handle_of(model) is None
        expected_handle.remove()
        assert torch.equal(
            train(model, rank, range(6, 7)), train(expected_model, rank, range(6, 7))
        )


def test_numbers_and_state_are_those_of_register(run_ranks: Any) -> None:
    run_ranks(compare_with_register, 2)


def use_on_other_wrappers(rank: int, size: int) -> None:
    expected_model = commhooks.DistributedDataParallel(make_net())
    commhooks.register(expected_model, "onebit")
    expected = train(expected_model, rank, range(3))
    model = commhooks.DistributedDataParallel(make_net())
    state = CommHookState("onebit", module=model)
    model.register_comm_hook(state, comm_hook)
    assert torch.equal(train(model, rank, range(3)), expected)
    assert commhooks.handle_of(model) is state.handle

    expected_model = TorchDistributedDataParallel(make_net())
    commhooks.register(expected_model, "onebit")
    expected = train(expected_model, rank, range(3))
    replicated = replicate(make_net())
    state = CommHookState("onebit", module=replicated)
    replicated.register_comm_hook(state, comm_hook)
    assert torch.equal(train(replicated, rank, range(3)), expected)
    assert "0.weight" in state.handle.stats().total.names


def test_other_wrappers_that_take_torchs_hooks(run_ranks: Any) -> None:
    run_ranks(use_on_other_wrappers, 2)


def log(rank: int, size: int) -> None:
    """Lightning's callback logs a hook while it is in use: not before the first backward."""
    net, logged = make_net(), list[dict[str, float]]()
    state = CommHookState("int8", module=net)
    model = make_model(net, state)
    trainer: Any = SimpleNamespace(strategy=SimpleNamespace(model=model))
    module: Any = SimpleNamespace(log_dict=logged.append)
    callback = HookCallback()
    callback.on_fit_start(trainer, module)
    counts = []
    for use in (lambda: None, lambda: train(model, rank, range(1)), state.handle.remove):
        use()
        callback.on_train_batch_end(trainer, module)
        counts.append(len(logged))
    assert counts == [0, 1, 1]
    assert logged[0]["commhooks/wire_bytes"] > 0


def test_a_callback_logs_a_hook_while_it_is_in_use(run_ranks: Any) -> None:
    run_ranks(log, 2)


def resume(rank: int, size: int) -> None:
    for config in HOOKS:
        net = make_net()
        expected = train(make_model(net, CommHookState(config, module=net)), rank, range(6))

        net = make_net()
        state = CommHookState(config, module=net)
        model = make_model(net, state)
        train(model, rank, range(3))
        file = io.BytesIO()
        torch.save({"net": net.state_dict(), "state": state, "hook": comm_hook}, file)
        file.seek(0)
        saved = torch.load(file, weights_only=False)
        again = io.BytesIO()
        torch.save(saved["state"], again)  # what has not been loaded yet is not lost
        again.seek(0)
        state = torch.load(again, weights_only=False)
        assert saved["hook"] is comm_hook

        net = make_net()
        with pytest.raises(commhooks.CommHookError, match="no module; call attach"):
            _ = state.handle
        with pytest.raises(commhooks.CommHookError, match="no module; call attach"):
            state.run(commhooks.GradBucket(torch.zeros(1), [torch.zeros(1)], [""]))
        state.attach(net)
        with pytest.raises(commhooks.CommHookError, match="has a module already"):
            state.attach(net)
        model = make_model(net, state)
        net.load_state_dict(saved["net"])  # not before: the wrapper broadcasts rank 0's parameters
        found = train(model, rank, range(3, 6))
        assert torch.equal(found, expected[-found.numel() :]), config


def test_a_pickled_state_resumes_to_the_last_bit(run_ranks: Any) -> None:
    run_ranks(resume, 2)


def pickle_what_is_in_use(rank: int, size: int) -> None:
    """A state is pickled as the hook that is in use, which may not be the first."""
    net = make_net()
    state = CommHookState("topk", module=net)
    train(make_model(net, state), rank, range(1))
    state.handle.replace("int8")
    train_on(pickled(state), "int8", rank)
    state.handle.remove()
    train_on(pickled(state), "allreduce", rank)


def pickled(state: CommHookState) -> CommHookState:
    found: CommHookState = pickle.loads(pickle.dumps(state))
    return found


def train_on(state: CommHookState, name: str, rank: int) -> None:
    net = make_net()
    state.attach(net)
    train(make_model(net, state), rank, range(1))
    assert isinstance(state.handle.hook, commhooks.CommHook)
    assert state.handle.hook.name == name


def test_a_state_is_pickled_as_the_hook_in_use(run_ranks: Any) -> None:
    run_ranks(pickle_what_is_in_use, 2)


@contextmanager
def raises_once(model: nn.Module, rank: int, kind: type[Exception], match: str) -> Iterator[None]:
    """The first step raises on this rank; the next one, after the block, succeeds."""
    with pytest.raises(kind, match=match):
        train(model, rank, range(1))
    yield
    train(model, rank, range(1))


class FailsOnce(commhooks.CommHook):
    has_failed = False

    async def reduce(self, bucket: Any, comm: Any) -> Tensor:
        if comm.rank == 1 and not self.has_failed:
            self.has_failed = True
            raise ValueError("broken")
        return await comm.all_reduce(bucket.buffer().div_(comm.size))  # type: ignore[no-any-return]


def fail(rank: int, size: int) -> None:
    net = make_net()
    with pytest.raises(commhooks.CommHookOptionError, match="block_size"):
        CommHookState("int8", module=net, block_size=100)
    state = CommHookState("int8" if rank else "int4", module=net)
    model = make_model(net, state)
    with raises_once(model, rank, commhooks.CommHookMismatchError, "on all ranks.*int4.*int8"):
        assert not state.handle.is_registered
        state.handle._awaited = commhooks.create("int8")

    net = make_net()
    state = CommHookState(FailsOnce(), module=net)
    with raises_once(make_model(net, state), rank, commhooks.CommHookError, "ValueError: broken"):
        pass

    net = make_net()
    state = CommHookState("onebit", module=net)
    train(make_model(net, state), rank, range(2))
    saved = state.__getstate__()
    saved["saved"]["state"] = {"rank 0 of 2x1": of_rank(saved["saved"])}
    state = CommHookState.__new__(CommHookState)
    state.__setstate__(saved)
    state.attach(net)
    with raises_once(make_model(net, state), rank, commhooks.CommHookStateError, "rank 1 of 2"):
        state._saved = None

    for wrong in ((0, 1), (1,)):
        net = make_net()
        state = CommHookState("int8", module=make_net() if rank in wrong else net)
        message = f"on rank {wrong[0]} lacks parameters of bucket 0; pass it the module"
        for _ in range(2):
            with pytest.raises(commhooks.CommHookError, match=message):
                train(make_model(net, state), rank, range(1))

    net = make_net()  # of which torch's first bucket has the last layer
    part = nn.ModuleDict({"2": net[2]}) if rank == 1 else net
    state = CommHookState("int8", module=part)
    with pytest.raises(commhooks.CommHookError, match="rank 1"):
        train(make_model(net, state), rank, range(1))


def test_what_goes_wrong_raises_on_all_ranks_after_the_step(run_ranks: Any) -> None:
    run_ranks(fail, 2)


class Later(nn.Module):
    """The gradients of the first layer, which are not used, would come last."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = make_net()

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self.layers[1:](inputs)
        return result


def leave_out(rank: int, size: int) -> None:
    """Torch leaves out the bucket that would be the last one of each step."""
    hook = FailsOnce()
    hook.has_failed = True
    model = make_model(Later(), None, skip_all_reduce_unused_params=True)
    state = CommHookState(hook, module=model)
    model.register_comm_hook(state, comm_hook)
    for _ in range(3):
        model(torch.ones(1, 5)).sum().backward()
    assert state.handle.state_dict()["step"] == 2  # the third one has not been seen to end
    hook.has_failed = False
    model(torch.ones(1, 5)).sum().backward()
    with pytest.raises(commhooks.CommHookError, match="ValueError: broken"):
        model(torch.ones(1, 5)).sum().backward()


def test_a_step_whose_last_bucket_is_left_out_ends_with_the_next_one(run_ranks: Any) -> None:
    run_ranks(leave_out, 2)


def drop(rank: int, size: int) -> None:
    net = make_net()
    state = CommHookState("int8", module=net)
    model = make_model(net, state)
    train(model, rank, range(1))
    alive = [weakref.ref(each) for each in (net, model, state.handle)]
    del net, state, model
    gc.collect()
    assert [each() for each in alive] == [None] * 3


def test_dropped_models_are_freed(run_ranks: Any) -> None:
    run_ranks(drop, 2)


def test_options_beside_a_hook_are_an_error() -> None:
    with pytest.raises(commhooks.CommHookError, match=r"options already.*\['block_size'\]"):
        CommHookState(commhooks.create("int8"), module=make_net(), block_size=64)
