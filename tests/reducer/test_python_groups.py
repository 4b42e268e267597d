"""Process groups that are written in Python, as in torch's test_c10d_pypg."""

import contextvars
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import _create_work_from_future
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import commhooks
from commhooks.testing import run_ranks


class Answer(dist.Work):
    """A Work with exactly the methods that C++ calls."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self.future: Future[Any] = Future()
        self.future.set_result(result)

    def wait(self, timeout: timedelta) -> bool:  # type: ignore[override]
        return True

    def get_future(self) -> Future[Any]:
        return self.future


class Doubling(dist.ProcessGroup):
    """A group of one rank, with a peer that has the same gradients and is paid for: sums double."""

    def __init__(self, store: dist.Store | None, *, by_future: bool) -> None:
        super().__init__(0, 1)  # type: ignore[call-arg]
        self.store = store
        self.by_future = by_future
        self.states_in_backward: list[bool] = []  # whether a Work would keep backward's context

    def get_group_store(self) -> Any:
        return self.store

    def answer(self, result: Any) -> Any:
        work = Answer(result)
        return _create_work_from_future(work.future) if self.by_future else work

    def broadcast(self, tensors: Any, options: Any) -> Any:  # type: ignore[override]
        return self.answer(tensors)

    def allreduce(self, tensors: Any, options: Any) -> Any:  # type: ignore[override]
        if torch._C._current_graph_task_id() >= 0:
            self.states_in_backward.append(torch._C._is_key_in_tls("context"))
        for tensor in tensors:
            tensor.mul_(2)
        return self.answer(tensors)

    def allgather(self, outputs: Any, inputs: Any, options: Any) -> Any:  # type: ignore[override]
        for output, tensor in zip(outputs[0], inputs, strict=True):
            output.copy_(tensor)
        return self.answer(outputs)

    def size(self) -> int:
        return 1

    getSize = size  # noqa: N815

    def getBackendName(self) -> str:  # noqa: N802
        return "doubling"


@pytest.mark.parametrize("by_future", [False, True])
@pytest.mark.parametrize("has_store", [False, True])
@pytest.mark.parametrize("kind", [commhooks.DistributedDataParallel, TorchDDP])
@pytest.mark.parametrize("view", [False, True])
def test_groups_in_python_average(kind: Any, has_store: bool, by_future: bool, view: bool) -> None:
    group = Doubling(dist.HashStore() if has_store else None, by_future=by_future)
    model = kind(nn.Linear(2, 1), process_group=group, gradient_as_bucket_view=view)
    for _ in range(3):
        model.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        assert torch.equal(model.module.weight.grad, torch.full((1, 2), 2.0))
    assert model._get_ddp_logging_data()["backend_name"] == "doubling"
    with pytest.raises(
        commhooks.CommHookError, match=r"works on gloo, nccl; .* group uses 'doubling' for"
    ):
        commhooks.register(model, "int8")


@pytest.mark.parametrize("hook", [None, "torch's"])
def test_collectives_do_not_keep_the_context_of_backward(hook: str | None) -> None:
    """A thread of Gloo that drops it while the interpreter ends aborts the process."""
    group = Doubling(None, by_future=True)
    options: dict[str, Any] = {"process_group": group, "find_unused_parameters": True}
    model = commhooks.DistributedDataParallel(nn.Linear(2, 1), **options)
    if hook is not None:
        model.register_comm_hook(group, allreduce_hook)
    seen = []
    model.module.weight.register_hook(lambda _: seen.append(torch._C._is_key_in_tls("context")))
    sets_none = torch.__version__ < "2.12"  # then this test does
    for _ in range(3):
        loss = model(torch.ones(1, 2)).sum()
        if sets_none:
            torch._C._stash_obj_in_tls("context", contextvars.copy_context())
        loss.backward()
    if sets_none:
        torch._C._stash_obj_in_tls("context", None)
    assert seen == [True] * 3  # for others it is there
    assert len(group.states_in_backward) >= 3
    assert not any(group.states_in_backward)


class Failing(Doubling):
    fails = False

    def allreduce(self, tensors: Any, options: Any) -> Any:  # type: ignore[override]
        if self.fails:
            raise ValueError("no quorum")
        return super().allreduce(tensors, options)


def fail_in_a_collective(rank: int, world_size: int) -> None:
    group = Failing(None, by_future=True)
    model = commhooks.DistributedDataParallel(nn.Linear(2, 1), process_group=group)
    for step in range(5):
        group.fails = step % 2 == 1
        model.zero_grad()
        with pytest.raises(ValueError, match="no quorum") if group.fails else nullcontext():
            model(torch.ones(1, 2)).sum().backward()
    assert torch.equal(model.module.weight.grad, torch.full((1, 2), 2.0))


def test_errors_of_groups_in_python_reach_the_caller() -> None:
    """They ended the process."""
    run_ranks(fail_in_a_collective, 1)
