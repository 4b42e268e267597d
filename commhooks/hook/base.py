"""The base class of hooks, and what they can rely on.

A hook decides how the gradients of one bucket travel. The contract:

*When.* Once per bucket and synchronized backward, as soon as the bucket's gradients are there, in
the same order of buckets on every rank. A hook's buckets are numbered from 0 in each step, without
gaps. While the hook of one bucket waits for a collective, backward goes on, and so do the hooks of
other buckets. They never run at the same time as each other (on CPU they have one thread of their
own), so state needs no lock.

*What.* ``bucket.buffer()`` holds this rank's gradients, flat and without gaps; the hook may
overwrite it. It is the hook's until the result has been taken. A hook may change the bucket's
parameters as well: Note [Parameters change in backward] in algorithms/bucket_parameters.py.

*Result.* The **average** over ranks, never the sum: exact, or approximate in a way that the class
states. A tensor with the number of elements, dtype and device of the buffer; it may be the buffer.

*Streams.* On CUDA the hook has a stream of its own, which is the current one while it runs and
has waited for the bucket; an ``await`` makes that stream wait for the collective, not the host.
Nothing synchronizes the device, and backward's stream goes on meanwhile. Where the host need not
look at a tensor either, a CUDA graph can capture the hook.

*State* is kept by parameter name in ``self.state``, because buckets are cut anew after the first
step. *Failure:* if the hook fails on any rank the step fails on all of them, and
:meth:`CommHook.recover` is called before the next.

Note [Hooks around hooks]
~~~~~~~~~~~~~~~~~~~~~~~~~
An option annotated as ``CommHook``, or as a list, tuple or dict of them, takes a hook, its name or
its config. In ``reduce`` the outer hook awaits ``inner.reduce(bucket, comm.within(inner))``. All
else reaches nested hooks by itself: ``prepare``, ``recover``, ``metrics``, saved states, the check
of the backend. What a class says of itself, such as ``lossless``, holds if it holds for the nested
hooks as well; :func:`tree` lists them.

In a saved state the entries of a nested hook lie under its path, with a dot in front, which no name
of a parameter has: ``{".inner": {"weight": {"error": ...}}}``.
"""

import inspect
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch.distributed as dist
from torch import Tensor

from commhooks.comm.communicator import Communicator
from commhooks.errors import CommHookError, CommHookStateError
from commhooks.hook.options.validation import option_names, validate
from commhooks.hook.options.values import instances_in, to_json
from reducer import GradBucket
from reducer._C import NativeHook

__all__ = ["CommHook", "TensorState", "has_consensus", "tree"]

TensorState = dict[str, dict[str, Tensor]]


@dataclass
class CommHook:
    """How gradients travel. Subclasses are dataclasses whose fields are the hook's options.

    ::

        @commhooks.register_hook("half")
        @dataclass
        class Half(commhooks.CommHook):
            \"\"\"Average in half precision.\"\"\"
            dtype: torch.dtype = torch.float16

            async def reduce(self, bucket, comm):
                wire = bucket.buffer().to(self.dtype).div_(comm.size)
                wire = await comm.all_reduce(wire)
                return bucket.buffer().copy_(wire)

    Options are checked against their annotations (see :mod:`commhooks.hook.options.validation`). A
    subclass with a
    ``__post_init__`` of its own calls ``super().__post_init__()`` first.

    A hook may have hooks among its options: a wrapper, see Note [Hooks around hooks].

    Raises:
        CommHookOptionError: an option is of the wrong type or out of range.
        CommHookError: at class definition, when ``reduce`` is not ``async def``.
    """

    name: ClassVar[str] = ""
    """Set by :func:`commhooks.register_hook`."""
    lossless: ClassVar[bool] = False
    """Whether the result is the exact average, up to rounding."""
    consensus: ClassVar[bool] = True
    """Whether the result is the same on all ranks."""
    tells_contribution: ClassVar[bool] = False
    """Whether ``reduce`` sets ``comm.contribution`` when ``comm.wants_contribution``."""
    checks_finite: ClassVar[bool] = False
    """Whether ``reduce`` begins with ``bucket.all_finite()``: packing then finds it out on the way.

    Asked of the hook that is registered. One that hands on buckets as they come says what the
    hooks in it say.
    """
    backends: ClassVar[tuple[str, ...]] = ("gloo", "nccl", "mpi", "ucc")
    wire: ClassVar[str] = ""
    """What is sent, in words."""
    paper: ClassVar[str] = ""

    state: TensorState = field(default_factory=dict, init=False, repr=False, compare=False)
    """Tensors by parameter name, then by a name of the hook's choice. Each rank has its own."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if not inspect.iscoroutinefunction(cls.reduce):
            raise CommHookError(
                f"{cls.__qualname__}.reduce must be a coroutine: write `async def reduce(self, "
                "bucket, comm)`, and `await` each collective"
            )
        if "name" not in cls.__dict__:
            cls.name = f"{cls.__module__}.{cls.__qualname__}"

    def __post_init__(self) -> None:
        validate(self)

    def prepare(self, parameters: Mapping[str, Tensor], group: dist.ProcessGroup) -> None:
        """Called on every rank when the hook is registered, before any step.

        Raise CommHookError here for what cannot work with this model or group: then the hook is
        refused on all ranks. Nothing may be sent. Called again each time the hook is registered.
        Nested hooks are prepared for the same parameters, unless overridden.

        Args:
            parameters: those that are trained, by name, in the model's order.
            group: the ranks that train together.
        """
        for hook in self.nested().values():
            hook.prepare(parameters, group)

    def bucket_key(self, parameter: str) -> Hashable:
        """Parameters with other keys are better not in one bucket. Asked after :meth:`prepare`.

        A preference: torch's own wrapper, and ours with a ``group_key`` of its own, do not know it.
        """
        return tuple(hook.bucket_key(parameter) for hook in self.nested().values())

    async def reduce(self, bucket: GradBucket, comm: Communicator) -> Tensor:
        """Returns the average of ``bucket.buffer()`` over the ranks of ``comm``."""
        raise NotImplementedError(f"{type(self).__qualname__} has no `async def reduce`")

    def wire_bytes(self, bucket: GradBucket, size: int) -> int | None:  # noqa: ARG002
        """What this rank sends for ``bucket`` in a step, of ``size`` ranks; None if that varies.

        The cost formula of the hook, against which the conformance kit holds what is sent.
        """
        return None

    @property
    def changes_parameters(self) -> bool:
        """Whether ``reduce`` changes the bucket's parameters too, or a nested hook does."""
        return any(hook.changes_parameters for hook in self.nested().values())

    def native(self, group: dist.ProcessGroup) -> NativeHook | None:  # noqa: ARG002
        """The same hook in C++, for our own reducer only, where there is one."""
        return None

    def recover(self) -> None:
        """Called on every rank after a failed step, before the next, and at the end of ``join``.

        A bucket may have been finished on some ranks and not on others, so state that has to be the
        same on all ranks must be forgotten here, or made the same. ``join`` ends with the model of
        the last rank on all of them: so must what belongs to another. Nested hooks recover as well.
        """
        for hook in self.nested().values():
            hook.recover()

    def metrics(self) -> dict[str, float]:
        """What the hook wants to be known of its work on this rank, by name.

        Called between two steps; shown by ``handle.stats()``. Those of nested hooks have their path
        in front: "inner.skipped_steps".
        """
        return {
            f"{path}.{name}": value
            for path, hook in self.nested().items()
            for name, value in hook.metrics().items()
        }

    def nested(self) -> dict[str, "CommHook"]:
        """The hooks among the options, by path: "inner", or "stages.1.1" for ``stages[1][1]``."""
        options = {name: getattr(self, name) for name in option_names(type(self))}
        return dict(instances_in(options, CommHook))

    def knows_state_key(self, key: str, parameters: Mapping[str, Tensor]) -> bool:
        """Whether ``state[key]`` can belong to a model with ``parameters``."""
        return key in parameters

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs; tensors are copies. Default: :attr:`state` and nested ones."""
        own = {
            parameter: {name: tensor.detach().clone() for name, tensor in tensors.items()}
            for parameter, tensors in self.state.items()
        }
        nested = {f".{path}": hook.state_dict() for path, hook in self.nested().items()}
        return own | {path: state for path, state in nested.items() if state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over what :meth:`state_dict` gave.

        Raises CommHookStateError if it is damaged: a nested hook's part may have been taken over.
        """
        entries = _mapping(state, "the state of a hook")
        nested = {f".{path}": hook for path, hook in self.nested().items()}
        own = {
            parameter: {
                name: _tensor(value, parameter, name).detach().clone()
                for name, value in _mapping(tensors, parameter).items()
            }
            for parameter, tensors in entries.items()
            if parameter not in nested
        }
        for path, hook in nested.items():
            hook.load_state_dict(entries.get(path, {}))
        self.state = own

    def to_config(self) -> dict[str, Any]:
        """Name and options in JSON's types; what :func:`commhooks.create` takes."""
        options = {name: to_json(getattr(self, name)) for name in option_names(type(self))}
        return {"name": self.name, **options}


def tree(hook: CommHook) -> Iterator[CommHook]:
    """The hook, and all hooks in it."""
    yield hook
    for nested in hook.nested().values():
        yield from tree(nested)


def has_consensus(hook: CommHook) -> bool:
    """Whether results are the same on all ranks, and with them the models."""
    return all(each.consensus for each in tree(hook))


def _mapping(value: Any, what: str) -> Mapping[str, Any]:
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return value
    raise CommHookStateError(f"{what}: expected a dict with names as keys, found {type(value)}")


def _tensor(value: Any, parameter: str, name: str) -> Tensor:
    if isinstance(value, Tensor):
        return value
    raise CommHookStateError(f"{name!r} of {parameter!r}: expected a tensor, found {type(value)}")
