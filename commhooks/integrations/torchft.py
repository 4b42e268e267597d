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
Each quorum has a new process group, and the hook gets connections of its own for it. When it has
changed, every member calls ``recover()`` of its hook before the first bucket: the hook discards
what has to be the same on all ranks, such as the factors of ``powersgd``, which a new member does
not have. Errors belong to the rank that made them: those of members that have left are gone, and
the others keep theirs. A member that is still receiving the model takes part with zeros, and the
average is divided by the others only.

A step that is not committed has changed the errors of the hook nevertheless, as a step that fails
does elsewhere: what it has sent is lost like the gradients of that step.

Note [Members between boundaries]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
``local_sgd`` and ``diloco`` train in local steps, of which the manager knows nothing, up to a step
in which they send or take something::

    forward        manager.start_quorum()      if the hook sends in this step
                   recover(), connect          if that is a new quorum
    backward       the hook on each bucket
    its end        manager.should_commit()     if the hook has sent or taken: commit() or recover()

So these hooks need an optimizer that is not torchft's. A joining member receives the parameters
through the user's state_dict functions, and through ours the hook's state and the number of the
step, by which all members agree where the next boundary is. After an error nothing is sent before
the next quorum, and the local gradients are used. Why: docs/design/2026-11-26-elastic-diloco.md.
"""

import weakref
from collections.abc import Callable, Mapping
from functools import partial
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

from commhooks.adapters.adapter import Adapter
from commhooks.adapters.fsdp.gradients import FSDPAdapter
from commhooks.adapters.fsdp.units import Unit
from commhooks.adapters.handle import HookHandle, check_not_in_use, handle_of, keep
from commhooks.adapters.torch_ddp import TorchDDPAdapter
from commhooks.algorithms.averaging.local_sgd import LocalSteps
from commhooks.comm.exchange import completed
from commhooks.errors import CommHookError, CommHookStateError
from commhooks.hook.base import CommHook, ModelInfo, check_nesting, prepare_all, tree
from commhooks.hook.registry import hook_of
from commhooks.runtime.runner import Runner
from commhooks.runtime.stats import HookStats
from reducer import GradBucket
from reducer.construction import sparse_parameters


class DistributedDataParallel(nn.parallel.DistributedDataParallel):
    """Average the gradients of a replica over the replicas of a torchft Manager, by a hook.

    Use it like ``torchft.DistributedDataParallel``, with torchft's optimizer wrapper. With the
    hooks ``local_sgd`` and ``diloco``, which call the manager themselves, use the optimizer without
    that wrapper, and a manager with ``use_async_quorum=False``. Backward waits for each bucket.
    Buckets are never rebuilt, so that those of a new replica match.
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
        CommHookError: The hook leaves models different between ranks, and is neither ``local_sgd``
            nor ``diloco``; it needs nodes; gradients are sparse; or the manager forms quorums in
            the background, and the hook has to know the members before a step.
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
        made = hook_of(hook, options)
        _check(made, manager)
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
        _Averager(self).follow(manager, replicas, made, self)


def register(
    manager: Manager,
    replicas: ProcessGroupWrapper,
    model: nn.Module,
    hook: str | Mapping[str, Any] | CommHook,
    /,
    **options: Any,
) -> HookHandle:
    """Let ``local_sgd`` or ``diloco`` average a model that each replica has sharded by itself.

    Call it on every rank. Each rank has a manager, with its rank in the replica as ``rank``, whose
    process group connects the ranks that have the same shards in other replicas.

    Args:
        manager: The manager of this rank.
        replicas: The process group that the manager has.
        model: The root module, after ``fully_shard`` over a mesh of one dimension.
        hook: The name of the hook, a config, or a :class:`CommHook`.
        **options: The options of a named hook.

    Raises:
        CommHookError: The model is not sharded so, has a hook already, or it is another hook.
        UnknownHookError, CommHookOptionError: See :func:`create`.
    """
    made = hook_of(hook, options)
    _check(made, manager)
    if not isinstance(made, LocalSteps):
        raise CommHookError(
            f"hook {made!r} averages in every step, which is not supported here for sharded "
            "models; use `local_sgd` or `diloco`"
        )
    if (handle := handle_of(model)) is not None:
        raise CommHookError(f"the model has a hook already, {handle.hook!r}")
    return _ShardedAverager(model).follow(manager, replicas, made, model)


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


class _QuorumMixin(Adapter):
    """The part of both adapters that follows the quorums of a manager.

    Call :meth:`follow` after the adapter's constructor.
    """

    has_fixed_ranks = False

    _manager: Manager
    _replicas: ProcessGroupWrapper
    _elastic: LocalSteps | None
    _token: int
    _followed: dist.ProcessGroup | None  # the members that the runner connects
    _begun: int  # the last step that has begun

    def follow(
        self, manager: Manager, replicas: ProcessGroupWrapper, hook: CommHook, model: nn.Module
    ) -> HookHandle:
        """Let ``hook`` average over the members of the manager's quorums. Return its handle."""
        check_not_in_use(hook, self)
        self._manager = manager
        self._replicas = replicas
        self.hook = hook
        self._elastic = hook if isinstance(hook, LocalSteps) else None
        self._followed = None
        self._begun = -1
        self._token = _models[replicas] = _models.get(replicas, 0) + 1
        if self._elastic is not None:
            self._elastic.follow_commits()
            manager.register_state_dict_fn(f"commhooks{self._token}", self._load, self._save)
            model.register_forward_pre_hook(self._begin_step, prepend=True)
        handle = _Handle(model, self)
        keep(model, handle)
        return handle

    @property
    def group(self) -> dist.ProcessGroup:
        try:
            parent: dist.ProcessGroup = self._replicas.parent
        except AssertionError as error:
            raise CommHookError("there is no quorum yet; train a step first") from error
        return parent

    def stats(self, last: int | None = None) -> HookStats:
        return self._collector.stats(1 if self._followed is None else self._followed.size(), last)

    def _report_errors_of(self, step: Callable[[], Any]) -> None:
        """Report an error to the manager. It raises nothing: the step is not committed."""
        if self._manager.errored():
            return
        try:
            step()
        except Exception as error:
            self._manager.report_error(error)
            if self._runner is not None:
                self._runner.abort()  # so that the other members do not wait

    def _follow_members(self) -> None:
        """Connect the members if they have changed: Note [Members that come and go]."""
        if self.group is self._followed:
            return
        hook = cast("CommHook", self.hook)
        if self._runner is None:
            info = ModelInfo(self.roles, self.units)
            prepare_all(hook, self.parameters, self.group, info)
        else:
            with self.between_steps():
                hook.recover()
        self.install(hook, self._token, self._collector)
        self._followed = self.group

    def _begin_step(self, *_: Any) -> None:
        """Form a quorum before the first forward of a step in which the hook sends."""
        assert self._elastic is not None
        if not torch.is_grad_enabled() or self._begun == self.steps:
            return
        if self._elastic.sends(self.steps):
            self._manager.start_quorum()
            self._report_errors_of(self._follow_members)
        self._begun = self.steps

    def _end_step_of_members(self, step: int) -> None:
        """Commit the step if ranks have sent or taken something in it, or undo it."""
        if self._elastic is None or not (self._elastic.sends(step) or self._elastic.takes(step)):
            return
        if self._manager.should_commit():
            self._elastic.commit()
        else:
            with self.between_steps():
                cast("CommHook", self.hook).recover()

    def _save(self) -> dict[str, Any]:
        assert self._elastic is not None
        # Copies, because a joining rank may fetch them while the next outer step changes these.
        return {"steps": self.steps, "state": _copied(self._elastic.common_state())}

    def _load(self, saved: dict[str, Any]) -> None:
        with self.between_steps():
            cast("CommHook", self.hook).state = _copied(saved["state"])
        self.steps = saved["steps"]


def _copied(state: Mapping[str, Mapping[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
    return {
        name: {key: tensor.clone() for key, tensor in entry.items()}
        for name, entry in state.items()
    }


class _Averager(_QuorumMixin, TorchDDPAdapter):
    """Runs the hook on each bucket of torch's reducer."""

    def run(self, bucket: TorchBucket) -> Future[Tensor]:
        if self._elastic is None:
            if self._manager._quorum_future is None:  # noqa: SLF001
                # Reported to the manager, nobody would learn of it.
                raise CommHookError(
                    f"hook {self.hook!r} averages over the members of a quorum in each step, and "
                    "there is none; use torchft.Optimizer(manager, optimizer), whose zero_grad() "
                    "begins one, or call manager.start_quorum() before backward"
                )
            self._report_errors_of(self._manager.wait_quorum)
            self.steps = self._manager.current_step()
            self._report_errors_of(self._follow_members)
        return super().run(bucket)

    def _launch(self, bucket: TorchBucket, own: GradBucket) -> Future[Tensor]:
        if self._elastic is None:
            self._report_errors_of(lambda: self._average_participants(own))
        else:
            own_gradients = own.buffer().clone() if self._elastic.sends(self.steps) else None
            self._report_errors_of(lambda: self._run_hook(own))
            if own_gradients is not None and self._manager.errored():
                own.buffer().copy_(own_gradients)
        return completed(bucket.buffer())

    def _average_participants(self, bucket: GradBucket) -> None:
        flat = bucket.buffer()
        if not self._manager.is_participating():
            flat.zero_()
        self._run_hook(bucket)
        present = self._manager.num_participants()
        if present != self.group.size():
            flat.mul_(self.group.size() / present)

    def _run_hook(self, bucket: GradBucket) -> None:
        assert self._runner is not None
        average = self._runner(bucket).wait().view(-1)
        if average.data_ptr() != bucket.buffer().data_ptr():
            bucket.buffer().copy_(average)

    def _vote(self, runner: Runner, buckets: int) -> None:
        self._report_errors_of(partial(super()._vote, runner, buckets))

    def _end_step(self) -> None:
        step = self.steps
        super()._end_step()
        self._end_step_of_members(step)


class _ShardedAverager(_QuorumMixin, FSDPAdapter):
    """Runs the hook on the shards of a model that ``fully_shard`` has sharded in each replica.

    FSDP sees one replica, so local gradients are scaled as in a model that is only sharded.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model, ProcessGroupDummy(0, 1))
        self.install(None)

    def _use(self, hook: Any, target: Any) -> None:
        super()._use(hook, target)
        for unit in self._units:
            unit.fill_unused(True)

    def _reduce(self, unit: Unit, flat: Tensor, operation: Any) -> None:  # noqa: ARG002
        assert self._elastic is not None
        own_gradients = flat.clone() if self._elastic.sends(self.steps) else None
        super()._reduce(unit, flat, dist.ReduceOp.AVG)
        self._report_errors_of(self._raise_failure)
        if own_gradients is not None and self._manager.errored():
            flat.copy_(own_gradients)

    def _reduce_by_hook(self, runner: Runner, unit: Unit, *arguments: Any) -> None:
        if self._manager.errored():
            _, flat, shards, _ = arguments
            self._follow_step(unit, set(shards))
            self._bucket(flat, shards, set(shards))  # counts it
        else:
            super()._reduce_by_hook(runner, unit, *arguments)

    def _with_gradient(self, unit: Unit, names: list[str], own: set[str]) -> set[str]:  # noqa: ARG002
        return set(names)  # zeros without a gradient; replicas are not asked in local steps

    def _average(self, placed: Any, operation: Any) -> None:
        """Leave the gradients as they are: those of this replica."""

    def _end_step(self, runner: Runner) -> None:
        self._report_errors_of(lambda: runner.end_step(self._buckets, self._step).wait())
        self._report_errors_of(self._raise_failure)

    def _raise_failure(self) -> None:
        failure, self._error = self._error, None
        if failure is not None:
            raise failure

    def _end_backward(self, succeeded: bool) -> None:
        launched = self._launched
        super()._end_backward(succeeded)
        if launched and succeeded:
            self._end_step_of_members(self._step)


def _check(hook: CommHook, manager: Manager) -> None:
    """Raise CommHookError if the hook cannot work while replicas come and go."""
    check_nesting(hook)
    is_elastic = isinstance(hook, LocalSteps)
    for each in tree(hook):
        is_outer = is_elastic and each is hook
        if not is_outer and (not each.consensus or each.changes_parameters):
            raise CommHookError(
                f"hook {each!r} lets models differ between replicas, but a new replica gets the "
                "model of one of them; use a hook that averages gradients, `local_sgd` or `diloco`"
            )
        if hasattr(each, "ranks_per_node") and not (is_outer and each.ranks_per_node == 1):
            raise CommHookError(
                f"hook {each!r} needs equal nodes, and the number of replicas changes with each "
                "quorum"
            )
        if each.is_adaptive:
            raise CommHookError(
                f"hook {each!r} decides by what the replicas have measured, which a new one does "
                "not know; use the hook that it chooses, or `auto` with a plan"
            )
    if is_elastic and manager._use_async_quorum:  # noqa: SLF001
        raise CommHookError(
            f"hook {hook!r} needs to know the members before a step; create the manager with "
            "use_async_quorum=False"
        )


_models: weakref.WeakKeyDictionary[ProcessGroupWrapper, int] = weakref.WeakKeyDictionary()
"""The number of models that average over a process group."""
