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

from collections.abc import Callable, Mapping
from typing import Any, NoReturn, cast

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

from commhooks.adapters.handle import HookHandle, check_unused, keep
from commhooks.adapters.torch_ddp import TorchDDPAdapter, completed
from commhooks.errors import CommHookError, CommHookStateError
from commhooks.hook.base import CommHook, check_nesting, tree
from commhooks.hook.capabilities import declares
from commhooks.hook.registry import create
from commhooks.hook.roles import prepare
from commhooks.runtime.runner import Runner
from commhooks.runtime.stats import HookStats
from reducer import GradBucket
from reducer.construction import sparse_parameters


class DistributedDataParallel(nn.parallel.DistributedDataParallel):
    """Average the gradients of a replica over the replicas of a torchft Manager, by a hook.

    Use it like ``torchft.DistributedDataParallel``, with torchft's optimizer wrapper. The hook runs
    on the thread of backward. Buckets are never rebuilt, so that those of a new replica match.
    ``commhooks.handle_of(model)`` has ``hook``, ``stats()`` and ``trace()``; its other methods
    raise an error that says why.

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
        sparse = sparse_parameters(module)
        if names := [name for name, p in module.named_parameters() if p in sparse]:
            raise CommHookError(
                f"the gradients of {', '.join(names)} are sparse, which is not supported here; "
                "create their embeddings with sparse=False"
            )
        averager = _Averager(manager, replicas, made, self)
        check_unused(made, averager)
        keep(self, _Handle(self, averager))


class _Handle(HookHandle):
    """Only observes: replicas cannot agree on a change, because some may be away."""

    def replace(self, *_: Any, **__: Any) -> NoReturn:
        raise CommHookError(
            f"hook {self.hook!r} cannot be replaced under torchft: a replica that comes back "
            "begins with the hook that its script creates. Create the wrapper with the hook "
            "`schedule`, whose stages follow the steps of the manager"
        )

    def remove(self) -> NoReturn:
        raise CommHookError(
            f"hook {self.hook!r} cannot be removed under torchft: a replica that comes back "
            "begins with the hook that its script creates. Create the wrapper with the hook "
            "`allreduce`"
        )

    def stateful_hook(self) -> NoReturn:
        raise CommHookStateError(
            f"the state of hook {self.hook!r} is not saved under torchft: it belongs to this "
            "replica, and what has to be the same everywhere is discarded when replicas come or "
            "go. Leave it out of checkpoints; the hook begins without it"
        )


class _Replicas:
    """The present process group of a manager, as hooks and their runner see it."""

    def __init__(self, group: ProcessGroupWrapper) -> None:
        self._group = group

    @property
    def parent(self) -> dist.ProcessGroup:
        try:
            parent: dist.ProcessGroup = self._group.parent
        except AssertionError as error:
            raise CommHookError("there has been no quorum; train a step first") from error
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


class _Averager(TorchDDPAdapter):
    """Runs the hook on each bucket of torch's reducer."""

    def __init__(
        self,
        manager: Manager,
        replicas: ProcessGroupWrapper,
        hook: CommHook,
        model: nn.parallel.DistributedDataParallel,
    ) -> None:
        super().__init__(model)
        self._manager = manager
        self._replicas = _Replicas(replicas)
        self._group = cast("dist.ProcessGroup", self._replicas)
        self.hook: CommHook = hook
        self._members: dist.ProcessGroup | None = None  # of the last step

    def run(self, bucket: TorchBucket) -> Future[Tensor]:
        self._reports(self._manager.wait_quorum)
        self.steps = self._manager.current_step()
        return super().run(bucket)

    def stats(self) -> HookStats:
        return self._collector.stats(1 if self._members is None else self._replicas.size())

    def _launch(self, bucket: TorchBucket, own: GradBucket) -> Future[Tensor]:
        self._reports(lambda: self._run_hook(own))
        return completed(bucket.buffer())

    def _reports(self, step: Callable[[], None]) -> None:
        """Report an error to the manager. It raises nothing: the step is not committed."""
        if not self._manager.errored():
            try:
                step()
            except Exception as error:
                self._manager.report_error(error)

    def _run_hook(self, bucket: GradBucket) -> None:
        flat = bucket.buffer()
        if not self._manager.is_participating():
            flat.zero_()
        average = self._follow_members()(bucket).wait().view(-1)
        if average is not flat:
            flat.copy_(average)
        present = self._manager.num_participants()
        if present != self._replicas.size():
            flat.mul_(self._replicas.size() / present)

    def _follow_members(self) -> Runner:
        """Recover if the members have changed: Note [Members that come and go]."""
        if self._runner is None:
            prepare(self.hook, self.parameters, self.group, self.roles)
            self.install(self.hook)
        elif self._members is not self._replicas.parent:
            with self.between_steps():
                self.hook.recover()
        self._members = self._replicas.parent
        assert self._runner is not None
        return self._runner


def _check(hook: CommHook) -> None:
    """Raise CommHookError if the hook cannot work while replicas come and go."""
    check_nesting(hook)
    for each in tree(hook):
        if not each.consensus or declares(each, "changes_parameters"):
            raise CommHookError(
                f"hook {each!r} lets models differ between replicas, but a new replica gets the "
                "model of one of them; use a hook that averages gradients"
            )
        if hasattr(each, "ranks_per_node"):
            raise CommHookError(
                f"hook {each!r} needs equal nodes, and the number of replicas changes with each "
                "quorum"
            )
