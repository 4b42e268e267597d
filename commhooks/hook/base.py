"""The base class of hooks, and the contract between hooks and the framework.

A hook decides how the gradients of one bucket are averaged over the ranks.

*When it runs.* Once per bucket and step (a synchronized backward; on FSDP2, all before the
optimizer's step), as soon as the bucket's gradients are ready, and in the same order of buckets on
every rank. Buckets are numbered from 0 in each step, without gaps. While the hook of one bucket
waits for a collective, backward continues, and so do the hooks of other buckets. Hooks of one model
never run at the same time (on the CPU they share one thread), so their state needs no lock.

*What it gets.* ``bucket.buffer()`` holds this rank's gradients, flat and without gaps. The hook may
overwrite it until its result has been taken. It may also change the parameters of the bucket, see
Note [Parameters change in backward] in algorithms/bucket_parameters.py.

*What it returns.* The **average** over the ranks, never the sum: exact, or approximate in a way
that the class documents. It is a tensor with the same number of elements, dtype and device as the
buffer, and may be the buffer itself.

*Streams.* On CUDA, each hook has its own stream. While the hook runs, that stream is the current
one and has waited for the bucket. ``await`` makes the stream wait for the collective, not the host.
Nothing synchronizes the device, and backward's stream continues in the meantime. If the host does
not read a tensor, a CUDA graph can capture the hook.

*State.* A hook keeps its state by parameter name in ``self.state``, because buckets are rebuilt
after the first step. It declares the fields of its state, see :mod:`commhooks.hook.state`; loading
a saved state checks it against them.

*Failure.* If the hook fails on any rank, the step fails on all ranks, and :meth:`CommHook.recover`
is called before the next step.

Note [Hooks around hooks]
~~~~~~~~~~~~~~~~~~~~~~~~~
An option annotated as ``CommHook``, or as a list, tuple or dict of hooks, accepts a hook, its name
or its config, also as its default. In ``reduce`` the outer hook awaits ``inner.reduce(bucket,
comm.within(inner))``. The framework does the rest for nested hooks: ``prepare``, ``recover``,
``metrics``, saved states and the check of the backend. A property of a class, such as ``lossless``,
holds for an instance only if it also holds for all nested hooks; :func:`tree` yields them. In a
saved state, the entries of a nested hook are stored under its path with a leading dot, which no
parameter name has: ``{".inner": {"weight": {"error": ...}}}``.

Note [Capabilities]
~~~~~~~~~~~~~~~~~~~
The last members of :class:`CommHook` say what a hook does beyond averaging. A *flag* is a property
that is False; a hook assigns True in its class, or defines a property if it depends on options.
``capturable_from`` is a number or None instead.
Each hook speaks for itself: where a nested hook counts as well, the framework asks it.
"""

import inspect
import json
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Literal, TypeAlias

import torch.distributed as dist
from torch import Tensor

from commhooks.comm.communicator import Communicator
from commhooks.errors import CommHookError, CommHookOptionError, CommHookStateError
from commhooks.hook.options import instances_in, option_names, to_json, validate
from commhooks.hook.state import EXTRA_STATE, StateField, entry_problem
from reducer import GradBucket
from reducer.native import NativeHook

TensorState = dict[str, dict[str, Tensor]]
Role: TypeAlias = Literal["embedding", "output"]
"""The role of a parameter in its model, see :func:`commhooks.hook.roles.roles_of`."""


@dataclass(frozen=True)
class ModelInfo:
    """What is known of a model beyond its parameters."""

    roles: Mapping[str, Role] | None = None
    """The roles of the parameters that have one; None if they are unknown."""
    units: Sequence[Sequence[str]] | None = None
    """The parameters of each bucket, if they never change: the units of a model that is sharded
    with FSDP2, in its order. None on other models."""
    replicated: Collection[str] = ()
    """The parameters that ranks of other groups have as well: those that tensor parallelism leaves
    whole. No decision that is made in one group may change their averages."""


@dataclass
class CommHook:
    """Average the gradients of buckets. Subclasses are dataclasses; their fields are the options.

    ::

        @commhooks.register_hook("half")
        @dataclass
        class Half(commhooks.CommHook):
            \"\"\"Average in half precision.\"\"\"
            dtype: torch.dtype = torch.float16

            async def reduce(self, bucket, comm):
                wire = bucket.buffer().div_(comm.size).to(self.dtype)  # divided first: in range
                wire = await comm.all_reduce(wire)
                return bucket.buffer().copy_(wire)

    Options are checked against their annotations, see :mod:`commhooks.hook.options`. If a
    subclass defines ``__post_init__``, it must call ``super().__post_init__()`` first. A hook may
    have other hooks among its options, see Note [Hooks around hooks].

    Raises:
        CommHookOptionError: an option has the wrong type or is out of range.
        CommHookError: at class definition, if ``reduce`` is not ``async def``, or if the name of
            another member stands for something else.
    """

    name: ClassVar[str] = ""
    """The registered name, set by :func:`commhooks.register_hook`; else ``module:Class``."""
    lossless: ClassVar[bool] = False
    """Whether the result is the exact average, up to rounding."""
    consensus: ClassVar[bool] = True
    """Whether the result is the same on all ranks."""
    backends: ClassVar[tuple[str, ...]] = ("gloo", "nccl")
    """The backends of process groups on which the hook may be registered.

    "nccl" stands for its family: Note [Backends] in reducer/backends.py. A hook may name others,
    such as "mpi" or "ucc". Nothing here has run on those, and a failure on one rank leaves the
    others waiting there: docs/writing-a-hook.md, Backends.
    """
    wire: ClassVar[str] = ""
    """The bytes on the wire, as text: "1 byte per element, in an all-gather"."""
    paper: ClassVar[str] = ""
    """The address of the paper."""
    needs: ClassVar[tuple[str, ...]] = ()
    """What registering the hook by its name alone needs, as texts: "a launcher such as torchrun".

    Required options need not be named.
    """
    free_options: ClassVar[tuple[str, ...]] = ()
    """Options that may differ from those of the run that saved a state."""
    is_candidate: ClassVar[bool] = False
    """Whether ``auto`` considers the hook, with its default options, unless the user names others.

    For hooks of other packages; those of this package are in algorithms/adaptive/choices.py.
    """
    model_info: ModelInfo = field(default=ModelInfo(), init=False, repr=False, compare=False)
    """What is known of the model beyond its parameters, set before :meth:`prepare`."""
    caches: list[dict[Any, Any]] = field(
        default_factory=list, init=False, repr=False, compare=False
    )
    """Dicts of what was made from :attr:`state`, which are cleared when another one replaces it."""
    _state: TensorState = field(default_factory=dict, init=False, repr=False, compare=False)
    extra_state: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    """The rest of the state: values in JSON's types, the same on all ranks."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if not inspect.iscoroutinefunction(cls.reduce):
            raise CommHookError(
                f"{cls.__qualname__}.reduce must be a coroutine: write `async def reduce(self, "
                "bucket, comm)`, and `await` each collective"
            )
        _check_members(cls)
        if "name" not in cls.__dict__:
            cls.name = f"{cls.__module__}:{cls.__qualname__}"

    def __post_init__(self) -> None:
        validate(self)

    @property
    def state(self) -> TensorState:
        """Tensors by parameter name, then by a key that the hook chooses. Each rank has its own."""
        return self._state

    @state.setter
    def state(self, state: TensorState) -> None:
        self._state = state
        for cache in self.caches:  # now, because a hook that is not used again would keep them
            cache.clear()

    def prepare(self, parameters: Mapping[str, Tensor], group: dist.ProcessGroup) -> None:
        """Prepare for a model; called on every rank each time the hook is registered.

        Override it to raise CommHookError if the hook cannot work with this model or group; the
        registration then fails on all ranks. The hook may not communicate here. By default, nested
        hooks are prepared for the same parameters.

        Args:
            parameters: the trained parameters by name, in the model's order.
            group: the ranks that train together.
        """
        of_nested = self.nested_parameters(parameters)
        for path, hook in self.nested().items():
            if path in of_nested:
                hook.prepare(of_nested[path], group)

    async def reduce(self, bucket: GradBucket, comm: Communicator) -> Tensor:
        """Return the average of ``bucket.buffer()`` over the ranks of ``comm``.

        A flat tensor of the same length, dtype and device; it may be the buffer, overwritten. Runs
        on a thread or, for CUDA tensors, a stream of the framework, for one bucket after another in
        their order. An exception fails the step.
        """
        raise NotImplementedError(f"{type(self).__qualname__} has no `async def reduce`")

    def models_agree(self, step: int) -> bool:  # noqa: ARG002
        """Return whether all ranks have the same model before the step with this number.

        :func:`commhooks.check_replicas` compares the models only then. By default if the hook has
        :attr:`consensus`.
        """
        return self.consensus

    def wire_bytes(self, bucket: GradBucket, size: int) -> int | None:  # noqa: ARG002
        """Return the bytes that each of ``size`` ranks sends for ``bucket``; None if they vary.

        Use shapes, dtypes and the step only: ``bucket`` may be on the meta device. The conformance
        kit compares the bytes with those that are sent.
        """
        return None

    @property
    def rounds(self) -> int:
        """How many collectives of all ranks a bucket awaits at most, one after the other."""
        return 1

    def collectives(self, rank: int, size: int) -> dict[tuple[int, ...], int]:
        """Return how many collectives a bucket awaits at most, by the ranks that take part.

        ``()`` stands for all ranks, which also end a step together. Registration connects that many
        stage groups; others connect in backward, when they are first awaited. By default the most
        of the nested hooks, or :attr:`rounds` of all ranks. Called after :meth:`prepare`.
        """
        nested = self.nested().values()
        if not nested:
            return {(): self.rounds} if self.rounds else {}
        found: dict[tuple[int, ...], int] = {}
        for hook in nested:
            for ranks, count in hook.collectives(rank, size).items():
                found[ranks] = max(count, found.get(ranks, 0))
        return found or {(): 1}

    def recover(self) -> None:
        """Recover from a failed step; called on every rank before the next one.

        Some ranks may have finished a bucket that others have not. So a hook must discard state
        here that has to be the same on all ranks, or make it the same. Our own wrapper also calls
        it at the end of ``join``, where all ranks take over the model of the last one, so state
        that belongs to another model must be discarded as well. By default, nested hooks recover.
        """
        for hook in self.nested().values():
            hook.recover()

    def metrics(self) -> dict[str, float]:
        """Return numbers about the hook's work on this rank, which ``handle.stats()`` shows.

        Called between two steps. Names of nested hooks' metrics begin with their path:
        "inner.skipped_steps".
        """
        return {
            f"{path}.{name}": value
            for path, hook in self.nested().items()
            for name, value in hook.metrics().items()
        }

    def nested(self) -> dict[str, "CommHook"]:
        """Return the hooks among the options by path: "stages.1.1" for ``stages[1][1]``."""
        options = {name: getattr(self, name) for name in option_names(type(self))}
        return dict(instances_in(options, CommHook))

    def state_fields(self, gradient: Tensor) -> Sequence[StateField] | None:  # noqa: ARG002
        """Return the fields of ``state[parameter]`` for a parameter with such a gradient.

        ``gradient`` has the shape, strides and dtype of those in ``bucket.gradients()``, and no
        numbers. None, the default: a saved state has to have the fields, shapes and dtypes that
        ``state[parameter]`` has when it is loaded, if it exists then.
        """
        return None

    def bucket_fields(self) -> Sequence[StateField]:
        """Return the fields of ``state[bucket.key]``; none by default."""
        return ()

    def keep_own(self, mean: dict[str, Tensor], own: Mapping[str, Tensor]) -> None:
        """Add to ``mean`` what one rank's "own" fields contribute to the mean over the ranks.

        Called for each of the ranks that saved a state, when another number of ranks loads it.
        ``mean`` has the averageable fields of a parameter. By default, own fields are dropped.
        """

    @property
    def spreads_parameters(self) -> bool:
        """Whether nested hooks get other parameters, or parts of them, on other ranks.

        Then only the same ranks can load their states.
        """
        return False

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs: copies of :attr:`state` and of nested hooks' states."""
        own = {
            parameter: {name: tensor.detach().clone() for name, tensor in tensors.items()}
            for parameter, tensors in self.state.items()
        }
        nested = {f".{path}": hook.state_dict() for path, hook in self.nested().items()}
        extra = {name: json.dumps(value) for name, value in self.extra_state.items()}
        return own | {key: each for key, each in {EXTRA_STATE: extra, **nested}.items() if each}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state that :meth:`state_dict` returned. A handle checks it before.

        Raises CommHookStateError if it has another form; nested hooks may then have loaded theirs.
        """
        if not isinstance(state, Mapping) or not all(isinstance(key, str) for key in state):
            raise CommHookStateError(f"expected a dict with names as keys, found {type(state)}")
        nested = {f".{path}": hook for path, hook in self.nested().items()}
        own = {key: entry for key, entry in state.items() if key not in {*nested, EXTRA_STATE}}
        for key, entry in own.items():
            if problem := entry_problem(entry):
                raise CommHookStateError(f"{key!r}: {problem}")
        extra = state.get(EXTRA_STATE, {})
        extra_state = {name: json.loads(text) for name, text in extra.items()}
        for path, hook in nested.items():
            hook.load_state_dict(state.get(path, {}))
        self.state = {
            key: {name: tensor.detach().clone() for name, tensor in entry.items()}
            for key, entry in own.items()
        }
        self.extra_state = extra_state

    def to_config(self) -> dict[str, Any]:
        """Return name and options in JSON's types, which :func:`commhooks.create` accepts."""
        options = {name: to_json(getattr(self, name)) for name in option_names(type(self))}
        return {"name": self.name, **options}

    # ----------------------------------------------------------- capabilities: Note [Capabilities]

    @property
    def capturable_from(self) -> int | None:
        """The first step in which a CUDA graph may capture ``reduce``; None if it never may.

        From then on, ``reduce`` does the same work in each step: it depends on no step, random
        number or value that the host has read, and changes its state in place. All nested hooks
        have to be capturable, too.
        """
        return None

    @property
    def changes_parameters(self) -> bool:
        """Whether ``reduce`` also changes the parameters."""
        return False

    @property
    def checks_finite(self) -> bool:
        """Whether ``reduce`` begins with ``bucket.all_finite()``, which packing then computes.

        Only the registered hook is asked. A wrapper that passes buckets on unchanged gives the
        answer of its nested hooks.
        """
        return False

    @property
    def gets_each_once(self) -> bool:
        """Whether it has to get each parameter once per step, as with a period or a momentum."""
        return False

    @property
    def has_exchanges(self) -> bool:
        """Whether it begins exchanges, which go on between steps.

        The state that they use must not be replaced in the meantime.
        """
        return False

    @property
    def is_adaptive(self) -> bool:
        """Whether it decides by what it has measured in this run, which a joining rank lacks."""
        return False

    @property
    def skips_steps(self) -> bool:
        """Whether the training loop asks it, on every rank, which optimizer steps to skip."""
        return False

    @property
    def tells_contribution(self) -> bool:
        """Whether ``reduce`` sets ``comm.contribution`` when ``comm.wants_contribution``."""
        return False

    def bucket_key(self, parameter: str) -> Hashable:
        """Return a key; parameters with different keys should not share a bucket.

        Called after :meth:`prepare`. This is a preference: torch's wrapper ignores it, and so does
        ours if it is given another ``group_key``. By default, parameters are kept apart as the
        nested hooks prefer.
        """
        return tuple(hook.bucket_key(parameter) for hook in self.nested().values())

    def nested_parameters(
        self, parameters: Mapping[str, Tensor]
    ) -> Mapping[str, Mapping[str, Tensor]]:
        """Return those of this hook's parameters that each nested hook gets, by its path.

        A hook that gets none may be missing. By default, each gets all.
        """
        return dict.fromkeys(self.nested(), parameters)

    def native(
        self,
        group: dist.ProcessGroup,  # noqa: ARG002
        step: int | None = None,  # noqa: ARG002
    ) -> NativeHook | None:
        """Return the same hook in C++ for our reducer, None if there is none.

        Only the registered hook is asked, after :meth:`prepare`: for all steps, and if there is
        none, before each synchronized forward for its ``step``. All ranks must return the same
        kind.
        """
        return None

    def notes(self) -> list[tuple[int, str]]:
        """Return what the hook has decided so far, as texts with their steps.

        Called between two steps; the list only grows at its end. TensorBoard shows it.
        """
        return []


def tree(hook: CommHook) -> Iterator[CommHook]:
    """Yield the hook, and all hooks nested in it."""
    yield hook
    for nested in hook.nested().values():
        yield from tree(nested)


def prepare_all(
    hook: CommHook,
    parameters: Mapping[str, Tensor],
    group: dist.ProcessGroup,
    info: ModelInfo = ModelInfo(),
) -> None:
    """Prepare the hook, and those nested in it, for a model."""
    for each in tree(hook):
        object.__setattr__(each, "model_info", info)  # its class may be frozen
    hook.prepare(parameters, group)


def has_consensus(hook: CommHook) -> bool:
    """Return whether results, and so the models, are the same on all ranks."""
    return all(each.consensus for each in tree(hook))


def is_lossless(hook: CommHook) -> bool:
    """Return whether results are the exact average, up to rounding."""
    return all(each.lossless for each in tree(hook))


def refuse(where: str, hook: CommHook, expected: str, reasons: Mapping[str, str]) -> None:
    """Raise CommHookOptionError if a hook, or one nested in it, has a flag, with its reason.

    "consensus" stands for hooks without it. ``where``: what the user has set to this hook.
    """
    hooks = list(tree(hook))
    for flag, reason in reasons.items():
        if any(getattr(each, flag) != (flag == "consensus") for each in hooks):
            raise CommHookOptionError(f"{where}: expected {expected}; {hook!r} {reason}")


def check_nesting(hook: CommHook) -> None:
    """Raise CommHookError unless each hook in the tree of ``hook`` occurs once."""
    paths: dict[int, str] = {}
    for path, nested in walk(hook, "", ()):
        if id(nested) in paths:
            raise CommHookError(
                f"{nested!r} is both {paths[id(nested)]} and {path!r} of {hook!r}, and would mix "
                "their states; make a hook for each of them, e.g. with "
                "commhooks.create(hook.to_config())"
            )
        paths[id(nested)] = repr(path) if path else "the outermost hook"


def walk(hook: CommHook, path: str, outer: tuple[CommHook, ...]) -> Iterator[tuple[str, CommHook]]:
    """Yield the hook and all hooks nested in it, with their paths."""
    if any(hook is other for other in outer):
        raise CommHookError(f"{outer[0]!r} contains itself, at {path!r}")
    yield path, hook
    for name, nested in hook.nested().items():
        yield from walk(nested, f"{path}.{name}" if path else name, (*outer, hook))


def _check_members(cls: type) -> None:
    """Raise CommHookError if the class uses the name of a member for something else."""
    types, own = inspect.get_annotations(cls), vars(cls)
    for name, member in {**vars(CommHook), "caches": None, "extra_state": None}.items():
        fits, expected = True, ""
        kind = member.fget.__annotations__["return"] if isinstance(member, property) else None
        if kind in (bool, int | None):
            fits = isinstance(own.get(name, False), kind | property | cached_property)
            fits &= name not in types or (name in own and "bool" in str(types[name]))
            expected = (
                "True, False or a property" if kind is bool else "a number, None or a property"
            )
        elif inspect.isfunction(member) and not name.startswith("_"):
            fits, expected = name not in types and callable(getattr(cls, name)), "a method"
        elif name in ("caches", "extra_state", "model_info", "state"):
            fits, expected = name not in types, "no option"
        if not fits:
            raise CommHookError(
                f"{cls.__qualname__}.{name}: expected {expected}, because the name has a meaning "
                "for all hooks, see docs/writing-a-hook.md; found something else"
            )
