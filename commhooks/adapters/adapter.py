"""The base of adapters, which put hooks on one kind of wrapped model each."""

import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.utils.hooks import RemovableHandle

from commhooks.adapters.training_loop import LateBackwards
from commhooks.errors import CommHookError, CommHookMismatchError
from commhooks.hook.base import CommHook, tree
from commhooks.hook.roles import roles_of
from commhooks.precision import at_least_float32
from commhooks.runtime.recording import Recording, Span
from commhooks.runtime.runner import Runner
from commhooks.runtime.stats import HookStats, StatsCollector
from commhooks.runtime.stream_runner import StreamRunner
from commhooks.runtime.threaded_runner import ThreadedRunner
from commhooks.state.layout import DistributedModel
from reducer import GradBucket
from reducer.agreement import check_agreement, values_of_ranks
from reducer.backends import GLOO, family_of
from reducer.peers import collective

IS_TAKEN = (
    "the model has a hook already, from register_comm_hook(), which can neither be replaced nor "
    "removed; use commhooks.register() instead"
)

TorchHook = Callable[[Any], Future[Tensor]]
"""A torch-style hook with its state bound."""


class Adapter(DistributedModel, ABC):
    """Installs hooks on one wrapped model, observes them, and knows which one is installed.

    It keeps what it needs of the model, but not the model, so that the model can be freed.

    Args:
        model: The module inside the wrapper.
        device: Where the gradients are.
        parameters: The parameters that hooks average, by the names that :class:`CommHook` uses.
        names: The names that recorded gradients refer to by index.
        wrapper: What trains the parameters themselves, rather than gathered copies of them.
    """

    has_fixed_ranks: bool = True
    """Whether the ranks stay the same as long as the model trains."""
    sparse: Sequence[str] = ()
    """The names of parameters whose sparse gradients are averaged exactly, whatever the hook."""
    tensor_parallel: Collection[str] = ()
    """The names of parameters sharded by tensor parallelism."""

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        parameters: dict[str, Tensor],
        names: Sequence[str],
        wrapper: nn.Module | None = None,
    ) -> None:
        self.device = device
        self.parameters = parameters
        self.roles = roles_of(model)
        self.hook: CommHook | TorchHook | None = None
        """The installed hook. None: the plain average."""
        self.recording: Recording | None = None
        """The recording under way, if any."""
        self._names = names
        self._runner: Runner | None = None
        self._collector = StatsCollector()
        self._wrapper = None if wrapper is None else weakref.ref(wrapper)
        self._late_backwards: RemovableHandle | None = None

    @property
    def units(self) -> Sequence[Sequence[str]] | None:
        """The names of each bucket's parameters, if buckets never change; otherwise None."""
        return None

    def agree(self, what: str, value: str) -> int:
        """Raise CommHookMismatchError on all ranks unless they have the same text ``value``.

        Collective. Return a number that is the same on all ranks of :attr:`group`.
        """
        return check_same(self.group, self.device, what, value)

    def problem_of_any(self, problem: str | None) -> str | None:
        """Return ``problem``, or that of a rank that shares the model, but not the group.

        Collective over all ranks; ``problem`` is the same on all ranks of :attr:`group`.
        """
        for group in self.shard_groups:
            found = values_of_ranks(problem, group, self.device, "the comparison of a shard group")
            problem = problem or next((each for each in found if each), None)
        return problem

    def check(self, hook: CommHook | TorchHook) -> None:
        """Raise CommHookError if ``hook`` cannot work on this kind of model."""
        if not isinstance(hook, CommHook):
            return
        backend = family_of(self.group, self.device)
        if self.sparse and self.group.size() > 1 and backend != GLOO:
            raise CommHookError(
                f"the gradients of {', '.join(self.sparse)} are sparse, and {backend!r} cannot "
                "average those; create their embeddings with sparse=False, or use Gloo"
            )
        for each in tree(hook):
            if each.skips_steps and (self.shards > 1 or self.tensor_parallel):
                raise CommHookError(
                    f"hook {each!r} tells the training loop which steps to skip, but the ranks of "
                    "a replica see gradients of other parts of the parameters, and would skip "
                    "other steps. Check the norm that clip_grad_norm_() returns instead, which is "
                    "that of all parts"
                )

    def install(
        self,
        hook: CommHook | TorchHook | None,
        token: int = 0,
        collector: StatsCollector | None = None,
    ) -> None:
        """Use ``hook`` from the next step on, in place of the one that is installed.

        ``token``, ``collector``: see :class:`Runner`. After an error the former hook stays in use.
        """
        runner = target = None
        if isinstance(hook, CommHook) and (target := self._stand_in(hook)) is None:
            target = runner = make_runner(hook, self.group, self.device, token, collector)
        try:
            self._use(hook, target)
        except BaseException:
            if runner is not None:
                runner.close()
            raise
        if self._runner is not None:
            self._runner.close()
        self.hook, self._runner = hook, runner
        if runner is not None and isinstance(hook, CommHook):
            with runner.between_steps():  # records what belongs to the stream of another runner
                pass
        self._collector = StatsCollector() if runner is None else runner.collector
        self._collector.units = {name: tuple(unit) for unit in self.units or () for name in unit}
        self._listen()
        self._check_backwards(hook)

    def _check_backwards(self, hook: CommHook | TorchHook | None) -> None:
        if self._late_backwards is not None:
            self._late_backwards.remove()
            self._late_backwards = None
        wrapper = None if self._wrapper is None else self._wrapper()
        if wrapper is None or not isinstance(hook, CommHook):
            return
        if any(each.changes_parameters for each in tree(hook)):
            check = LateBackwards(self, hook.name)
            self._late_backwards = wrapper.register_forward_hook(check)

    def _stand_in(self, hook: CommHook) -> Any:  # noqa: ARG002
        """Return what runs ``hook`` in place of a runner in Python, None if nothing does.

        It is ``hook`` itself if the wrapper's own average is the same.
        """
        return None

    @abstractmethod
    def _use(self, hook: CommHook | TorchHook | None, target: Any) -> None:
        """Let the wrapper call ``hook``. ``target``: the runner or stand-in of a CommHook."""

    def stats(self, last: int | None = None) -> HookStats:
        """Return the statistics of the installed hook, since it was installed.

        ``last``: only of this number of the last steps, unless C++ or torch runs the hook.
        """
        return self._collector.stats(self.group.size(), last if self._runner else None)

    def regroup(self, key_of: Callable[[str], Hashable]) -> None:
        """Rebuild the buckets by the keys of parameters' names, where the wrapper can do that."""

    def start_recording(self) -> None:
        """Record what happens and when, until :meth:`stop_recording`."""
        self.recording = Recording(self._names)
        self._listen()

    def stop_recording(self) -> Recording:
        """Return what has happened since :meth:`start_recording`."""
        recording, self.recording = self.recording, None
        assert recording is not None
        self._listen()
        return recording

    @torch.no_grad()
    def average_parameters(self) -> None:
        """Set the parameters of all ranks to their average, between two steps. Collective."""
        for parameter in self.parameters.values():
            dtype = at_least_float32(parameter.dtype)
            mean = parameter.reshape(-1).to(dtype) / self.group.size()
            with collective(self.group, "the average of the parameters"):
                dist.all_reduce(mean, group=self.group)
            parameter.copy_(mean.view(parameter.shape))

    def drain(self) -> None:
        """Wait until the exchanges that the hook has begun are over."""
        if self._runner is not None:
            self._runner.drain()

    def between_steps(self) -> AbstractContextManager[None]:
        """Read or change what the hook keeps inside this context: Runner.between_steps."""
        return nullcontext() if self._runner is None else self._runner.between_steps()

    def _add_span(
        self,
        activity: str,
        index: int,
        start_ns: int,
        bucket: GradBucket | None = None,
        hook: str = "",
    ) -> None:
        """Record an activity that ends now; for one of a hook, with its bucket and name."""
        if self.recording is not None:
            of_bucket = ("", ()) if bucket is None else (bucket.key, tuple(bucket.names))
            now = time.monotonic_ns()
            self.recording.spans.append(Span(activity, index, start_ns, now, *of_bucket, hook))

    def _listen(self) -> None:
        self._collector.listener = None if self.recording is None else self.recording.runs.append


def make_runner(
    hook: CommHook, group: dist.ProcessGroup, device: torch.device, *others: Any
) -> Runner:
    """Return a runner for ``hook``, as the backend of ``group`` for ``device`` needs it.

    Collective: connects the stage groups that the hook is known to need. Arguments are those of
    :class:`~commhooks.runtime.runner.Runner`.
    """
    is_threaded = family_of(group, device) == GLOO and group.size() > 1
    kind = ThreadedRunner if is_threaded else StreamRunner
    runner = kind(hook, group, device, *others)
    try:
        runner.connect(hook.collectives(group.rank(), group.size()))
    except BaseException:
        runner.close()
        raise
    return runner


def check_same(group: dist.ProcessGroup, device: torch.device, what: str, text: str) -> int:
    """Raise CommHookMismatchError on every rank unless all have the same ``text``.

    Collective: 16 bytes from each rank, on ``device``; texts are sent only if they differ. Returns
    a random number, which is the same on all ranks.
    """

    def explain(texts: Sequence[str]) -> CommHookMismatchError:
        other = next(rank for rank, text in enumerate(texts) if text != texts[0])
        return CommHookMismatchError(
            f"[rank {group.rank()}] expected the same {what} on all ranks, found on rank 0: "
            f"{texts[0]}; on rank {other}: {texts[other]}. Nothing was changed."
        )

    comparison = f"the comparison of the ranks' {what}, which all ranks have to set together,"
    return check_agreement(text, group, device, explain, comparison)
