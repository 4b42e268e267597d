"""Hooks that average over a torchft Manager, while replica groups die and come back.

::

    manager = Manager(pg=pg, ...)
    model = commhooks.integrations.torchft.DistributedDataParallel(manager, pg, net, "int8")
    optimizer = torchft.Optimizer(manager, torch.optim.AdamW(net.parameters()))

What torchft's own wrapper sends with an all-reduce goes through a hook here. The rest is torchft's:
a collective that fails is reported to the manager, which does not commit the step on any replica,
and forms a new quorum for the next one.

Note [Members that come and go]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Each quorum has a new process group. When it has changed, every member calls ``recover()`` of its
hook before the first bucket: the hook discards what has to be the same on all ranks, such as the
factors of ``powersgd``, which a new member does not have. Errors belong to the rank that made them:
those of members that have left are gone, and the others keep theirs. A member that is still
receiving the model takes part with zeros, and the average is divided by the others only.

A step that is not committed has changed the errors of the hook nevertheless, as a step that fails
does elsewhere: what it has sent is lost like the gradients of that step.
"""

from collections.abc import Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket as TorchBucket
from torch.futures import Future

try:
    from torchft import Manager
    from torchft.process_group import ProcessGroupDummy, ProcessGroupWrapper
except ImportError as error:
    raise ImportError(
        "commhooks.integrations.torchft needs the package torchft: pip install torchft-nightly"
    ) from error

from commhooks.adapters.torch_ddp import with_names
from commhooks.errors import CommHookError
from commhooks.hook.base import CommHook, Role, tree
from commhooks.hook.nesting import check_nesting
from commhooks.hook.registry import create
from commhooks.hook.roles import prepare, roles_of
from commhooks.runtime.execution import new_future
from commhooks.runtime.stats import HookStats
from commhooks.runtime.stream_runner import StreamRunner
from reducer import GradBucket
from reducer.construction import sparse_parameters

__all__ = ["DistributedDataParallel"]


class DistributedDataParallel(nn.parallel.DistributedDataParallel):
    """Average the gradients of a replica over the replicas of a torchft Manager, by a hook.

    Use it like ``torchft.DistributedDataParallel``, with torchft's optimizer wrapper. The hook runs
    on the thread of backward. Buckets are never rebuilt, so that those of a new replica match.

    Args:
        manager: The manager of this replica.
        replicas: The process group that the manager has, a ``torchft.ProcessGroupGloo``, for
            example.
        module: The module to wrap.
        hook: The name of a hook, a config, or a :class:`CommHook`.
        wrapper_options: Options of torch's wrapper.
        **options: The options of a named hook.

    Raises:
        CommHookError: The hook leaves models different between ranks, or needs nodes, or gradients
            are sparse.
        UnknownHookError, CommHookOptionError: See :func:`create`.
    """

    def __init__(
        self,
        manager: Manager,
        replicas: ProcessGroupWrapper,
        module: nn.Module,
        hook: str | Mapping[str, Any] | CommHook,
        /,
        *,
        wrapper_options: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        made = hook if isinstance(hook, CommHook) else create(hook, **options)
        _check(made)
        super().__init__(
            module,
            process_group=ProcessGroupDummy(0, 1),
            find_unused_parameters=True,  # otherwise buckets are rebuilt after the first step
            **(wrapper_options or {}),
        )
        self.hook = made
        """The hook in use."""
        trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        sparse = sparse_parameters(module)
        if names := [name for name, p in trained.items() if p in sparse]:
            raise CommHookError(
                f"the gradients of {', '.join(names)} are sparse, which is not supported here; "
                "create their embeddings with sparse=False"
            )
        self._averager = _Averager(manager, replicas, made, trained, roles_of(module))
        self.register_comm_hook(self._averager, _run)

    def hook_stats(self) -> HookStats:
        """Return what the hook has cost since it was registered."""
        return self._averager.stats()


class _Replicas:
    """The present process group of a manager, as hooks and their runner see it."""

    def __init__(self, group: ProcessGroupWrapper) -> None:
        self._group = group

    @property
    def parent(self) -> dist.ProcessGroup:
        parent: dist.ProcessGroup = self._group.parent
        return parent

    def rank(self) -> int:
        return self.parent.rank()

    def size(self) -> int:
        return self.parent.size()

    def _get_backend(self, _: torch.device) -> "_Replicas":
        return self

    def name(self) -> str:
        return "torchft"

    def __getattr__(self, name: str) -> Any:
        return getattr(self.parent, name)


class _Averager:
    """Runs the hook on each bucket of torch's reducer."""

    def __init__(
        self,
        manager: Manager,
        replicas: ProcessGroupWrapper,
        hook: CommHook,
        parameters: Mapping[str, Tensor],
        roles: Mapping[str, Role],
    ) -> None:
        self._manager = manager
        self._replicas = _Replicas(replicas)
        self._hook = hook
        self._parameters = parameters
        self._roles = roles
        self._name_of = {id(parameter): name for name, parameter in parameters.items()}
        self._runner: StreamRunner | None = None
        self._members: dist.ProcessGroup | None = None  # of the last step

    def run(self, bucket: TorchBucket) -> Future[Tensor]:
        flat = bucket.buffer()
        if not self._manager.errored():
            try:
                self._manager.wait_quorum()
                if not self._manager.is_participating():
                    flat.zero_()
                self._average(bucket, flat)
            except Exception as error:
                self._manager.report_error(error)  # which raises nothing: the step is not committed
        done = new_future(flat.device)
        done.set_result(flat)
        return done

    def stats(self) -> HookStats:
        if self._runner is None:
            raise CommHookError("expected at least one step before the statistics of the hook")
        return self._runner.collector.stats(self._replicas.size())

    def _average(self, bucket: TorchBucket, flat: Tensor) -> None:
        names = [self._name_of[id(parameter)] for parameter in bucket.parameters()]
        own = with_names(bucket, names, bucket.index(), self._manager.current_step())
        runner = self._follow_members(own)
        average = runner(own).wait().view(-1)
        if average is not flat:
            flat.copy_(average)
        present = self._manager.num_participants()
        if present != self._replicas.size():
            flat.mul_(self._replicas.size() / present)

    def _follow_members(self, bucket: GradBucket) -> StreamRunner:
        """Recover if the members have changed: Note [Members that come and go]."""
        group = cast("dist.ProcessGroup", self._replicas)
        if self._runner is None:
            prepare(self._hook, self._parameters, group, self._roles)
            self._runner = StreamRunner(self._hook, group, bucket.buffer().device, token=0)
        elif self._members is not self._replicas.parent:
            self._hook.recover()
        self._members = self._replicas.parent
        return self._runner


def _run(averager: _Averager, bucket: dist.GradBucket) -> Future[Tensor]:  # type: ignore[name-defined]
    return averager.run(bucket)


def _check(hook: CommHook) -> None:
    """Raise CommHookError if the hook cannot work while replicas come and go."""
    check_nesting(hook)
    for each in tree(hook):
        if not each.consensus or each.changes_parameters:
            raise CommHookError(
                f"hook {each!r} lets models differ between replicas, but a new replica gets the "
                "model of one of them; use a hook that averages gradients"
            )
        if hasattr(each, "ranks_per_node"):
            raise CommHookError(
                f"hook {each!r} needs equal nodes, and the number of replicas changes with each "
                "quorum"
            )
