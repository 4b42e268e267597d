"""Notice models of ranks that are no longer equal."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import Work
from torch._compile import _disable_dynamo
from torch.distributed.algorithms.join import Joinable
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from commhooks.adapters.adapter import Adapter
from commhooks.adapters.dispatch import unwrap
from commhooks.adapters.handle import handle_of
from commhooks.errors import CommHookError, CommHookMismatchError
from commhooks.hook.base import CommHook, tree
from reducer.peers import collective
from reducer.wrapper import Wrapper

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class _ReplicaCheck:
    """Compares the model of this rank with the others' now and then: :func:`check_replicas`."""

    def __init__(self, adapter: Adapter, every: int) -> None:
        self._every = every
        self._equal_before: int | None = None  # this step, the last one that was compared
        self._next = adapter.steps
        self._pending: _Comparison | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_pending": None}  # a copy of the model has no process group

    @_disable_dynamo
    def __call__(self, model: nn.Module, *_: object) -> None:
        """Tell what the last comparison has found, and begin the next one if it is time."""
        handle = handle_of(model)
        is_step = model.training and torch.is_grad_enabled()
        if handle is None or not handle.is_registered or not is_step or _may_be_uneven(model):
            return
        adapter = handle.adapter
        pending, self._pending = self._pending, None
        if pending is not None and (problem := adapter.problem_of_any(self._problem(pending))):
            raise CommHookMismatchError(f"[rank {adapter.rank}] {problem}")
        if adapter.steps + self._every < self._next:  # the state of an earlier step was loaded
            self._next, self._equal_before = adapter.steps, None
        if adapter.steps >= self._next:
            self._next = adapter.steps + self._every
            if _agrees(adapter.hook, adapter.steps):
                self._pending = _Comparison(model, adapter.group, adapter.steps)

    def _problem(self, comparison: "_Comparison") -> str | None:
        if comparison.are_equal():
            self._equal_before = comparison.step
            return None
        name, ranks = comparison.find_difference()
        since = (
            "when they were first compared"
            if self._equal_before is None
            else f"and were equal before step {self._equal_before}"
        )
        return (
            f"the models of the ranks differ before step {comparison.step}, {since}. The first "
            f"parameter that differs is {name}: ranks {', '.join(map(str, ranks))} do not have "
            "what rank 0 has. Expected the same initial model, optimizer and learning rate on all "
            "ranks, and updates of averaged gradients only. Restart all ranks from a checkpoint"
        )


def check_replicas(model: nn.Module, *, every: int = 100) -> RemovableHandle:
    """Compare the parameters of all ranks every ``every`` steps, bit by bit.

    Before the forward of such a step, each rank adds up the words of each parameter, which is one
    pass over its memory, and sends 8 bytes. The sums are compared before the next forward, so
    nothing waits for other ranks in between; on CUDA, the host then waits for the device. Only
    forwards that train count, with a model in training mode and gradients enabled.

    Where hooks let the models differ on purpose (``consensus = False``), nothing is compared, other
    than in steps before which such a hook declares them equal, as ``local_sgd`` before its
    ``start_step``. Parameters that the wrapper was told to ignore, or that have a process group of
    their own (``key_process_groups``), may differ. Nothing is compared from the first
    ``model.join()`` on: ranks without inputs call no forward, and torch does not tell when the
    context has ended.

    Args:
        model: A model with a registered hook, in any form that :func:`register` accepts. What is
            compared is this rank's share of parameters that are sharded, over its replicas.
        every: The number of steps from one comparison to the next.

    Returns:
        RemovableHandle: ``remove()``, or leaving it as a context, ends the checks.

    Raises:
        CommHookError: The model has no hook, or ``every`` is no integer >= 1; or ranks come and go,
            under a manager of torchft.
        CommHookMismatchError: From a forward, on all ranks: the models differ. The message has the
            first parameter, the ranks that differ from rank 0, and the step before which all were
            equal.
    """
    handle = handle_of(model)
    if handle is None or not handle.is_registered:
        raise CommHookError(
            "check_replicas: expected a model with a hook; register one first, for example "
            "'allreduce'"
        )
    if not handle.adapter.has_fixed_ranks:
        raise CommHookError(
            "check_replicas: expected ranks that stay the same; under a manager that lets replicas "
            "come and go, those that come would not take part in a comparison that has begun"
        )
    if not isinstance(every, int) or every < 1:
        raise CommHookError(f"check_replicas: expected an integer every >= 1, found {every!r}")
    if not _averaged(unwrap(model)):
        raise CommHookError("check_replicas: expected a parameter that is averaged over all ranks")
    check = _ReplicaCheck(handle.adapter, every)
    # First, because that of FSDP2 gathers the parameters.
    return unwrap(model).register_forward_pre_hook(check, prepend=True)


class _Comparison:
    """The parameters of one moment, whose sums are on their way to all ranks."""

    def __init__(self, model: nn.Module, group: dist.ProcessGroup, step: int) -> None:
        named = _averaged(model)
        self.step = step
        self._group = group
        self._names = list(named)
        self._sums = torch.stack([_sum_of_words(_local(p)) for p in named.values()])
        # Otherwise, parameters that were exchanged would have the same sum.
        places = torch.arange(1, 2 * len(self._sums), 2, device=self._sums.device)
        self._total = (self._sums * places).sum().view(1)
        self._totals, self._work = self._gather(self._total)

    def are_equal(self) -> bool:
        """Return whether all ranks have the same parameters."""
        self._wait(self._work)
        return len(set(self._totals.tolist())) == 1

    def find_difference(self) -> tuple[str, Sequence[int]]:
        """Return the first parameter that differs, and on which ranks. Collective."""
        sums, work = self._gather(self._sums)
        self._wait(work)
        differs = (sums.view(self._group.size(), -1) != sums[: len(self._names)]).cpu()
        first = int(differs.any(0).nonzero()[0])
        return self._names[first], differs[:, first].nonzero().view(-1).tolist()

    def _gather(self, own: Tensor) -> tuple[Tensor, Work]:
        gathered = own.new_empty(self._group.size() * len(own))
        work: Any = self._group._allgather_base(gathered, own)  # noqa: SLF001
        return gathered, work

    def _wait(self, work: Work) -> None:
        with collective(self._group, "the comparison of the ranks' models"):
            work.wait()


def _agrees(hook: object, step: int) -> bool:
    """Return whether all ranks must have the same model before this step."""
    return not isinstance(hook, CommHook) or all(each.models_agree(step) for each in tree(hook))


def _may_be_uneven(model: nn.Module) -> bool:
    """Return whether ranks may have run out of inputs, as from the first ``join()`` on."""
    return isinstance(model, Joinable) and model._join_config.enable  # noqa: SLF001


def _averaged(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters that are averaged over the process group of the model."""
    ignored = getattr(model, "parameters_to_ignore", ())
    keys = model.options.group_keys if isinstance(model, Wrapper) else None
    named = ((name.removeprefix("module."), p) for name, p in model.named_parameters())
    return {
        name: parameter
        for name, parameter in named
        if name not in ignored
        and (keys is None or keys.process_group(name, parameter) is None)
        and (isinstance(parameter, DTensor) or not isinstance(model, FSDPModule))
    }


def _local(parameter: Tensor) -> Tensor:
    tensor = parameter.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _sum_of_words(tensor: Tensor) -> Tensor:
    """Return the sum of the bits of ``tensor`` as integers, modulo 2^64; int64, on its device."""
    flat = tensor.contiguous().view(-1)
    per_word = max(8 // flat.itemsize, 1)
    if flat.storage_offset() % per_word != 0:
        flat = flat.clone()
    whole = flat.numel() // per_word * per_word
    rest = flat[whole:].view(_INTEGERS[min(flat.itemsize, 8)])
    return flat[:whole].view(torch.int64).sum() + rest.sum(dtype=torch.int64)
