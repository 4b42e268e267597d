"""Counts the memory of tensors that operations make, while these live."""

from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode


class LiveMemory(TorchDispatchMode):
    """``peak``: the most bytes at a time of storages that were made in the context.

    Looks after each operation, so temporaries inside of operations do not count.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}
        self._known: set[int] = set()

    def ignore(self, *tensors: Tensor) -> None:
        """Do not count the storages of these, which exist already."""
        self._known.update(tensor.untyped_storage()._cdata for tensor in tensors)

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, list | tuple) else [result]:
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._known:
                    self._made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.peak = max(self.peak, self.now())
        return result

    def now(self) -> int:
        """Return the bytes of those that still live."""
        self._made = {k: each for k, each in self._made.items() if not each[0].expired()}
        return sum(nbytes for _, nbytes in self._made.values())
