"""A hook as the pair ``(state, hook)`` that ``register_comm_hook`` takes."""

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket as TorchBucket
from torch.futures import Future

from commhooks.adapters.dispatch import inner_module
from commhooks.adapters.handle import HookHandle, keep
from commhooks.adapters.sparse_gradients import SparseGradients
from commhooks.adapters.torch_ddp import TorchAdapter
from commhooks.algorithms.exact import AllReduce
from commhooks.errors import CommHookError
from commhooks.hook.base import CommHook
from commhooks.hook.registry import create, hook_of
from reducer import GradBucket
from reducer.agreement import values_of_ranks

_DETACHED = "an unpickled CommHookState has no module; call attach(module) before training"


class CommHookState:
    """The state for ``model.register_comm_hook(state, commhooks.comm_hook)``.

    Use it where a library takes a torch hook but hides the wrapped model; otherwise use
    :func:`register`, which checks more and sooner. Results and state are the same::

        state = commhooks.CommHookState("powersgd", module=net, rank=4)
        model = torch.nn.parallel.DistributedDataParallel(net)
        model.register_comm_hook(state, commhooks.comm_hook)

    The hook is registered in the first backward, which is a collective like :func:`register`; what
    that raises, ``backward()`` raises. Pickling keeps the hook, and the state that this rank's
    :meth:`HookHandle.state_dict` returns. Call :meth:`attach` after unpickling; the state is loaded
    in the first backward.

    Args:
        hook: The name of a hook, a config, or a :class:`CommHook`.
        module: The module that the wrapper gets. It names the parameters.
        process_group: The group that the wrapper averages over. Default: all ranks.
        **options: The options of a named hook.

    Raises:
        UnknownHookError, CommHookOptionError: See :func:`create`.
    """

    def __init__(
        self,
        hook: str | Mapping[str, Any] | CommHook,
        /,
        *,
        module: nn.Module,
        process_group: dist.ProcessGroup | None = None,
        **options: Any,
    ) -> None:
        self._hook = hook_of(hook, options)
        self._saved: dict[str, Any] | None = None
        self._module: nn.Module | None = None
        self._adapter: _PairAdapter | None = None
        self._handle: HookHandle | None = None
        self._is_registered = False
        self.attach(module, process_group)

    def attach(self, module: nn.Module, process_group: dist.ProcessGroup | None = None) -> None:
        """Name the parameters after those of ``module``. Call it after unpickling, once."""
        if self._module is not None:
            raise CommHookError("this CommHookState has a module already; create another state")
        self._module = inner_module(module)
        trained = list(_trained(self._module).values())
        self._sparse = SparseGradients(self._module, trained, self._module, fill_unused=True)
        self._group = process_group
        self._handle = HookHandle(self._module, awaited=self._hook)
        keep(self._module, self._handle)

    @property
    def handle(self) -> HookHandle:
        """The handle of the hook, as :func:`register` returns it.

        Before the first backward, it only has ``hook``.
        """
        if self._handle is None:
            raise CommHookError(_DETACHED)
        return self._handle

    def run(self, bucket: TorchBucket) -> Future[Tensor]:
        """Average the gradients of ``bucket``."""
        if self._adapter is None:
            if self._module is None:
                raise CommHookError(_DETACHED)
            group = self._group or dist.group.WORLD
            assert group is not None  # or there were no wrapper
            device, parameters = bucket.buffer().device, _trained(self._module)
            of_model = self._module, group, device, parameters, self._sparse
            self._adapter = _PairAdapter(self._register, *of_model)
        return self._adapter.run(bucket)

    def _register(self) -> None:
        assert self._adapter is not None
        self.handle.start(self._adapter, self._saved)
        self._is_registered = True

    def __getstate__(self) -> dict[str, Any]:
        if not self._is_registered:
            return {"hook": self._hook.to_config(), "saved": self._saved}
        if not self.handle.is_registered:
            return {"hook": AllReduce().to_config(), "saved": None}
        saved = self.handle.state_dict()
        return {"hook": cast("CommHook", self.handle.hook).to_config(), "saved": saved}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self._hook = create(state["hook"])
        self._saved = state["saved"]
        self._module = self._group = self._adapter = self._handle = None
        self._is_registered = False


def comm_hook(state: CommHookState, bucket: dist.GradBucket) -> Future[Tensor]:  # type: ignore[name-defined]
    """Average the gradients of ``bucket``: the hook for ``register_comm_hook(state, hook)``."""
    return state.run(bucket)


def _trained(module: nn.Module) -> dict[str, Tensor]:
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


class _PairAdapter(TorchAdapter):
    """Learns from the buckets what :class:`TorchDDPAdapter` asks the wrapper.

    Calls ``register`` in the first backward, when all ranks are known to be there.
    """

    def __init__(self, register: Callable[[], None], *model: Any) -> None:
        super().__init__(*model)
        self._register: Callable[[], None] | None = register  # None once it has succeeded

    def _with_names(self, bucket: TorchBucket, index: int) -> GradBucket:
        is_known = set(self._names_in(bucket)) <= set(self._names)
        if self._register is not None:
            what = "the comparison of the ranks' modules"
            known = values_of_ranks(is_known, self.group, self.device, what)
            if not all(known):
                raise self._lacks_parameters(known.index(False), bucket)
            self._register()
            self._register = None
        if not is_known:
            if bucket.buffer().is_sparse:
                self._average(bucket)  # because the other ranks wait for it
            elif self._runner is not None:
                self._runner.abort()  # ends the step on the other ranks
            raise self._lacks_parameters(self.group.rank(), bucket)
        return super()._with_names(bucket, index)

    def _lacks_parameters(self, rank: int, bucket: TorchBucket) -> CommHookError:
        return CommHookError(
            f"[rank {self.group.rank()}] the module of the CommHookState on rank {rank} lacks "
            f"parameters of bucket {bucket.index()}; pass it the module that the wrapper gets"
        )
