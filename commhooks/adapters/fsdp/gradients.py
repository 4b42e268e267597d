"""Gradients between the replicas of a sharded model: the adapter of FSDP2 and HSDP."""

import functools
import itertools
import time
import warnings
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from commhooks.adapters.adapter import Adapter, TorchHook, check_same
from commhooks.adapters.fsdp.units import (
    Unit,
    is_root,
    on_end_of_backward,
    on_optimizer_step,
    units_of,
)
from commhooks.algorithms.bucket_parameters import real_view, store
from commhooks.algorithms.exact import AllReduce
from commhooks.comm.wire import all_reduce_bytes
from commhooks.errors import CommHookError, CommHookMismatchError, CommHookPeerError
from commhooks.hook.base import CommHook, tree
from commhooks.runtime.recording import Run
from commhooks.runtime.runner import Runner
from reducer import GradBucket
from reducer.agreement import check_agreement
from reducer.backends import GLOO, family_of
from reducer.construction import sparse_parameters
from reducer.peers import collective


class FSDPAdapter(Adapter):
    """Runs hooks in place of the all-reduce between the replicas of a sharded model.

    A bucket is what a unit of FSDP reduces at once: this rank's shards of its trained parameters
    that have a gradient on some rank. Those that tensor parallelism divides as well are a bucket of
    their own: its ranks must compute the same averages of the others. How many come in a step is
    not known in advance, so none is marked as the last.

    Note [Replicas and shards]
    ~~~~~~~~~~~~~~~~~~~~~~~~~~
    Ranks are arranged as replicas times shards. A hook averages over the replicas of this rank's
    shards, its *replica group*, whose ranks its communicator has. FSDP itself reduces over the
    shards of this rank's replica, its *shard group*. A hook that fails does so in its whole replica
    group, while the others know nothing and go on. If the failed ranks raised at once, their shard
    groups would wait for them. Therefore an error is kept until the end of backward. There, after
    the vote in the replica groups, all ranks of a shard group compare their errors, and all ranks
    raise. The same comparison follows everything else that a replica group agrees on. (Not in steps
    on NCCL, where the host does not wait.)

    Note [Several reductions in a step]
    ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
    A unit is reduced several times between two steps of the optimizer if its modules have backward
    passes of their own, or run several times in one. FSDP fills in zeros for parameters without a
    gradient. A hook that got them would average them, or let momenta fade, once more. Therefore

    1. a hook gets only parameters that have a gradient on some rank. A rank on which all have one
       knows that without asking: it sends a flag per parameter to both groups, and goes on. Only a
       rank that lacks a gradient waits for the flags of the others.
    2. a step begins when an optimizer has stepped, or gradients were removed, since the last
       reduction: :meth:`Unit.has_moved_on`. All ranks find the same, because all run the same
       program.
    3. a parameter that is reduced again in the same step is averaged exactly, or refused if the
       hook says ``gets_each_once = True``. FSDP adds the average to the gradient that is there.

    Args:
        model: The root module.
        replicas: The group to average over, if the model is sharded over 1-D meshes.
        ignored: Parameters that no unit manages, on purpose.
    """

    def __init__(
        self,
        model: nn.Module,
        replicas: dist.ProcessGroup | None = None,
        ignored: Iterable[Tensor] = (),
    ) -> None:
        if not is_root(model):
            raise CommHookError(
                "the module is part of a model that was sharded with fully_shard; register the "
                "hook on the root module, which the training loop calls"
            )
        units = units_of(model)
        _check_dense(model, units)
        self._units = _replicated(units, replicas)
        found = replicas or self._units[0].replicas
        assert found is not None
        self._group = found
        self.tensor_parallel = {name for unit in self._units for name in unit.tensor_parallel()}
        self.shard_groups = _distinct([unit.shards for unit in self._units])
        parameters = self._present_parameters()
        super().__init__(model, self._units[0].device, parameters, list(parameters))
        self.steps = 0
        self._step = 0  # the number of the step under way
        self._buckets = 0  # in this step
        self._reduced: set[str] = set()  # parameters, in this step
        self._last: Unit | None = None  # the unit that was reduced last; None: a step begins
        self._launched = 0  # buckets, in this backward
        self._error: BaseException | None = None  # of the runner, in this backward
        self._strict: CommHook | None = None  # which gets each parameter once per step
        self._is_attached = False
        self._host_waits = all(family_of(group, self.device) == GLOO for group in self.shard_groups)
        self._model = weakref.ref(model)
        self._ignored = {id(parameter) for parameter in ignored}
        self._warn_of_unmanaged()
        on_end_of_backward(model, self._end_backward)
        on_optimizer_step(self, self._units)

    @property
    def units(self) -> list[list[str]]:
        return [part for unit in self._units for part in self._parts(unit.parameters())]

    def _parts(self, names: Iterable[str]) -> list[list[str]]:
        """Divide the parameters of a unit among buckets."""
        by_kind: dict[bool, list[str]] = {}
        for name in names:
            by_kind.setdefault(name in self.tensor_parallel, []).append(name)
        return [by_kind[kind] for kind in sorted(by_kind)]

    def whole(self, name: str) -> tuple[torch.Size, int] | None:
        return next(unit.full_shapes()[name] for unit in self._units if name in unit.full_shapes())

    def agree(self, what: str, value: str) -> int:
        """Check the replica group, then the shard groups: Note [Replicas and shards]."""
        try:
            token, failure = super().agree(what, value), None
            comparison = "the comparison of the replicas' trained parameters"
            check_agreement(self._layout(), self.group, self.device, self._mismatch, comparison)
        except CommHookError as error:
            token, failure = 0, error
        for group in self.shard_groups:
            try:
                check_same(group, self.device, what, str(failure or value))
            except CommHookError as error:
                failure = failure or error
        if failure is not None:
            raise failure
        return token

    def check(self, hook: CommHook | TorchHook) -> None:
        """Raise CommHookError if ``hook`` cannot work between replicas of shards."""
        if not isinstance(hook, CommHook):
            raise CommHookError(
                f"{hook!r} is a torch-style function. Most of them average over the default "
                "process group, whose ranks hold different shards here. Register a hook by name, "
                "or a CommHook"
            )
        super().check(hook)

    def average_parameters(self) -> None:
        self.parameters = self._present_parameters()
        super().average_parameters()

    def _stand_in(self, hook: CommHook) -> CommHook | None:
        # The plain average is torch's own all-reduce: with 3 replicas, 3 * average is not the sum.
        return hook if type(hook) is AllReduce else None

    def _use(self, hook: CommHook | TorchHook | None, target: Any) -> None:
        self.parameters = self._present_parameters()
        hooks = tree(hook) if isinstance(hook, CommHook) else ()
        self._strict = next((each for each in hooks if each.gets_each_once), None)
        self._last = None
        for unit in self._units:
            if not self._is_attached:
                unit.attach(self._group, functools.partial(self._reduce, unit))
            unit.fill_unused(target is not None and target is not hook)
        self._is_attached = True

    def _reduce(self, unit: Unit, flat: Tensor, operation: Any) -> None:
        """Average or sum ``flat`` over the replicas. Complex numbers come as pairs of real ones."""
        flat = flat.view(-1)
        unit.ensure_end(self._end_backward)
        own, shards = unit.take_gradients(), unit.parameters()
        if not unit.is_filled:
            shards = {name: shard for name, shard in shards.items() if name in own}
        if self._runner is None:
            self._follow_step(unit, set(shards))
            self._average(self._bucket(flat, shards, set(shards)), operation)
            return
        try:
            self._reduce_by_hook(self._runner, unit, own, flat, shards, operation)
        except BaseException as error:  # see Note [Replicas and shards]
            self._launched += 1
            self._error = self._error or error.with_traceback(None)  # which has this frame

    def _reduce_by_hook(
        self,
        runner: Runner,
        unit: Unit,
        own: set[str],
        flat: Tensor,
        shards: dict[str, Tensor],
        operation: Any,
    ) -> None:
        """See Note [Several reductions in a step].

        ``shards``: those in ``flat``, in its order. ``own``: those with a gradient on this rank.
        """
        names = self._with_gradient(unit, list(shards), own)
        if not names:
            return  # zeros on all ranks
        again = self._follow_step(unit, names)
        if again and self._strict is not None:
            raise _refusal(self.rank, again, self._strict)
        for part in self._parts(names - again):
            self._run(runner, self._bucket(flat, shards, set(part)), operation)
        if again:
            self._average(self._bucket(flat, shards, again), operation)

    def _with_gradient(self, unit: Unit, names: list[str], own: set[str]) -> set[str]:
        """Return which parameters have a gradient on some rank."""
        found = [name in own for name in names]
        for group in (unit.shards, self.group):
            if group is None or group.size() == 1:
                continue
            if all(found):  # a copy from the host would wait for the stream, which the shards use
                flags = torch.ones(len(found), dtype=torch.uint8, device=self.device)
            else:
                flags = torch.tensor(found, dtype=torch.uint8, device=self.device)
            with collective(group, "the comparison of which parameters have a gradient"):
                work = dist.all_reduce(flags, dist.ReduceOp.MAX, group=group, async_op=True)
                if not all(found):
                    assert work is not None
                    work.wait()
                    found = flags.bool().tolist()
        return set(itertools.compress(names, found))

    def _follow_step(self, unit: Unit, names: set[str]) -> set[str]:
        """Begin a step if it is time; return which ``names`` were reduced in it before."""
        again = self._reduced & names
        last = None if self._launched else self._last  # no optimizer steps within a backward
        if (
            self._last is None
            or (last is not None and last.has_moved_on())
            or (again and unit.has_moved_on())
        ):
            self._step, self._buckets = self.steps, 0
            self._reduced, again = set(), set()
            self._collector.begin_step()
        self._last = unit
        self._reduced |= names
        unit.is_reduced = True
        return again

    def _bucket(self, flat: Tensor, shards: dict[str, Tensor], names: set[str]) -> "_Placed":
        """Return the gradients of ``names`` as the next bucket. ``shards``: all those in ``flat``.

        The bucket shares the memory of ``flat`` if they are all.
        """
        reals = {name: real_view(shard) for name, shard in shards.items()}
        chosen = {name: real for name, real in reals.items() if name in names}
        places = [flat]
        if len(chosen) < len(reals):
            parts = torch.split(flat, [real.numel() for real in reals.values()])
            places = [part for name, part in zip(reals, parts, strict=True) if name in names]
        bucket = GradBucket(
            flat if len(chosen) == len(reals) else torch.cat(places),
            list(chosen.values()),
            list(chosen),
            index=self._buckets,
            is_last=False,
            step=self._step,
        )
        self._buckets += 1
        self._launched += 1
        return _Placed(bucket, places)

    def _run(self, runner: Runner, placed: "_Placed", operation: Any) -> None:
        """Run the hook on a bucket."""
        start_ns, bucket = time.monotonic_ns(), placed.bucket
        average = runner(bucket).wait().view(-1)
        if operation == dist.ReduceOp.SUM:
            average = average * self.group.size()
        placed.store(average)
        self._add_span("hook", bucket.index(), start_ns, bucket, runner.name)

    def _average(self, placed: "_Placed", operation: Any) -> None:
        """Average or sum a bucket exactly."""
        start_ns, bucket = time.monotonic_ns(), placed.bucket
        with collective(self.group, f"the average between replicas at step {self._step}"):
            dist.all_reduce(bucket.buffer(), operation, group=self.group)
        placed.store(bucket.buffer())
        sent = all_reduce_bytes(bucket.buffer().nbytes, self.group.size())
        times = start_ns, time.monotonic_ns()
        self._collector.record(Run(bucket.key, bucket.index(), sent, *times), bucket)
        self._add_span("hook", bucket.index(), start_ns, bucket, AllReduce.name)

    def _end_backward(self, succeeded: bool) -> None:
        launched, self._launched = self._launched, 0
        self._warn_of_unmanaged()
        if not launched:
            return
        if not succeeded:
            self._error = self._last = None
            if self._runner is not None:
                self._runner.abort()
            return
        if self._runner is not None:
            self._end_step(self._runner)
        if self.recording is not None:
            first = self.recording.spans[-launched]
            self._add_span("backward", self._step, first.start_ns)
        self.steps = self._step + 1

    def _end_step(self, runner: Runner) -> None:
        """Raise on all ranks if the hook has failed on any."""
        try:
            runner.end_step(self._buckets, self._step).wait()
        except BaseException as error:
            self._error = self._error or error.with_traceback(None)
        failure, self._error = self._error, None
        if self._host_waits:
            failure = self._failure_of_any(failure)
        if failure is not None:
            self._last = None
            raise failure

    def _failure_of_any(self, failure: BaseException | None) -> BaseException | None:
        """Return ``failure``, or that of a rank in another replica group."""
        try:
            problem = self.problem_of_any(None if failure is None else str(failure))
        except CommHookError as error:
            return failure or error
        if problem and failure is None:
            return CommHookPeerError(f"[rank {self.rank}] another rank failed: {problem}")
        return failure

    def _warn_of_unmanaged(self) -> None:
        """Warn of trained parameters that no unit manages, of each one once."""
        model = self._model()
        if model is None:
            return
        # By name too: units learn of parameters that were loaded or moved in the next forward.
        names = {name for unit in self._units for name in unit.full_shapes()}
        known = self._ignored.union(*(unit.identities() for unit in self._units))
        found = {
            name: id(parameter)
            for name, parameter in model.named_parameters()
            if parameter.requires_grad and name not in names and id(parameter) not in known
        }
        self._ignored.update(found.values())
        if found:
            warnings.warn(
                f"no unit of fully_shard manages {', '.join(found)}: their gradients are "
                "not averaged, so replicas diverge. Add parameters before fully_shard and register "
                "the hook afterwards. If they are meant to stay, as its ignored_params, pass them "
                "to commhooks.integrations.fsdp.register(..., ignored_params=...)",
                stacklevel=2,
            )

    def _present_parameters(self) -> dict[str, Tensor]:
        return {name: shard for unit in self._units for name, shard in unit.parameters().items()}

    def _layout(self) -> list[str]:
        """Return texts that are the same on ranks whose buckets match."""
        units = [{n: list(s.shape) for n, s in u.parameters().items()} for u in self._units]
        return [
            f"{n!r} of shape {s} in unit {i}" for i, u in enumerate(units) for n, s in u.items()
        ]

    def _mismatch(self, layouts: Sequence[list[str]]) -> CommHookMismatchError:
        rank = next(rank for rank, layout in enumerate(layouts) if layout != layouts[0])
        pairs = itertools.zip_longest(layouts[0], layouts[rank], fillvalue="no more")
        expected, found = next(pair for pair in pairs if pair[0] != pair[1])
        return CommHookMismatchError(
            f"[rank {self.group.rank()}] expected the same trained parameters on all replicas, "
            f"found on rank 0: {expected}; on rank {rank}: {found}. Nothing was changed. Build the "
            "model, freeze parameters and call fully_shard in the same way on all ranks"
        )


class _Placed(NamedTuple):
    """A bucket, and the places of its gradients in the flat tensor of a unit."""

    bucket: GradBucket
    places: Sequence[Tensor]

    def store(self, values: Tensor) -> None:
        """Write the result to these places, unless it is there already."""
        if values.data_ptr() != self.places[0].data_ptr():
            store(values, self.places)


def _check_dense(model: nn.Module, units: Sequence[Unit]) -> None:
    """Raise CommHookError for parameters whose gradients FSDP cannot reduce."""
    sharded = {name for unit in units for name in unit.full_shapes()}
    sparse = sparse_parameters(model)
    if names := [
        n for n, p in model.named_parameters() if p in sparse and p.requires_grad and n in sharded
    ]:
        raise CommHookError(
            f"the gradients of {', '.join(names)} are sparse, and FSDP cannot reduce those; create "
            "their embeddings with sparse=False"
        )


def _replicated(units: Sequence[Unit], replicas: dist.ProcessGroup | None) -> list[Unit]:
    """Return the units to reduce, or raise CommHookError if there is no one group for them."""
    found = _distinct([unit.replicas for unit in units])
    if replicas is not None:
        if found:
            raise CommHookError(
                "the model is sharded over a 2-D mesh, which has a group of replicas; use "
                "commhooks.register(model, hook) without replicate_group"
            )
        return list(units)
    if not found:
        raise CommHookError(
            "the model is sharded over a 1-D mesh: it has no replicas to average over. Shard it "
            "over a mesh of two dimensions (replicate, shard), or pass the group of replicas: "
            "commhooks.integrations.fsdp.register(model, hook, replicate_group=group)"
        )
    if len(found) > 1:
        ranks = ", ".join(str(dist.get_process_group_ranks(group)) for group in found)
        raise CommHookError(
            f"expected one group of replicas for all parameters, found the ranks {ranks}; a hook "
            "averages over one group only"
        )
    return [unit for unit in units if unit.replicas is not None]


def _distinct(groups: Sequence[dist.ProcessGroup | None]) -> list[dist.ProcessGroup]:
    """Return the first group of each set of several ranks."""
    by_ranks: dict[tuple[int, ...], dist.ProcessGroup] = {}
    for group in groups:
        if group is not None:
            by_ranks.setdefault(tuple(dist.get_process_group_ranks(group)), group)
    return list(by_ranks.values())


def _refusal(rank: int, again: set[str], hook: CommHook) -> CommHookError:
    return CommHookError(
        f"[rank {rank}] expected one gradient of each parameter between two steps of the "
        f"optimizer, because what hook {hook!r} does has a period or a momentum; found another "
        f"one of {', '.join(sorted(again))}. Call set_requires_gradient_sync(False) before all "
        "backward passes of a step but the last, or use a hook that only averages gradients"
    )
