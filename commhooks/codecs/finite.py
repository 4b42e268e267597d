"""Check that all numbers are finite, and select results by the answer.

Note [All finite]
~~~~~~~~~~~~~~~~~
Hooks encode numbers so that one that is not finite makes its message not finite. So all ranks
derive the same answer, ``all_finite``, from the messages that they have received: a () bool tensor
on the gradients' device. Until then the state keeps its values. A hook may change it only if the
answer is true; if it is false, the result is NaN. On the CPU the answer is known at once, and
:func:`is_known_false` lets a hook skip the rest of its work. On a GPU the host does not wait for
it: the hook continues, sends what it always sends, and passes the answer to the operations that
write.
"""

import torch
from torch import Tensor

from commhooks import native
from commhooks.kernels import kernel_backend_of, launch
from commhooks.kernels.launcher import streaming_blocks
from commhooks.kernels.source import MASKED


def all_finite(tensor: Tensor) -> Tensor:
    """Return whether all elements are finite: () bool on the tensor's device, true if empty.

    Does not wait for the device. Takes one pass over the memory, unlike
    :meth:`GradBucket.all_finite`, which may know the answer for a bucket from packing it.
    """
    return native.all_finite(tensor)


def is_known_false(condition: Tensor) -> bool:
    """Return whether ``condition`` is false, if that is known without waiting for the device.

    See Note [All finite].
    """
    return kernel_backend_of(condition) is None and not condition


def poison(tensor: Tensor, is_damaged: Tensor) -> None:
    """Write NaN to the first element if ``is_damaged``, so that all ranks see it.

    Does not wait for the device.
    """
    tensor[:1].masked_fill_(is_damaged, torch.nan)


def copy_if(condition: Tensor, source: Tensor, out: Tensor) -> None:
    """Copy ``source`` to ``out`` if ``condition`` is true. Does not wait for the device."""
    if kernel_backend_of(out) is not None:
        arguments = (condition, source, out.nbytes, out)
        launch(MASKED, MASKED.kernels[0], arguments, grid=streaming_blocks(out))
    elif condition:
        out.copy_(source)


def select(condition: Tensor, tensor: Tensor, other: Tensor | float) -> Tensor:
    """Return ``tensor`` or a copy if ``condition`` is true, else ``other``. Does not wait."""
    if kernel_backend_of(tensor) is None and condition:
        return tensor
    return torch.where(condition, tensor, other)
