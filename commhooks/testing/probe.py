"""A model whose gradients equal its input, to test hooks on known gradients."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel

import commhooks
from commhooks.adapters.wrapper import wrap
from commhooks.hook.base import CommHook
from commhooks.runtime.side_stream import record_on_current_stream

# Small enough to make several buckets of `probe_parameters`.
_BUCKET_MB = 0.0003


def probe_parameters(
    dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> dict[str, Tensor]:
    """Return zeros in awkward forms: odd sizes, no dimension, no element, various layouts."""
    shapes: dict[str, tuple[int, ...]] = {
        "matrix": (12, 10),
        "vector": (7,),
        "scalar": (),
        "empty": (0, 3),
        "convolution": (6, 4, 3, 3),
        "odd": (5, 3),
        "transposed": (9, 8),
        "spare": (11,),
    }
    zeros = {name: torch.zeros(shape, dtype=dtype, device=device) for name, shape in shapes.items()}
    zeros["convolution"] = zeros["convolution"].contiguous(memory_format=torch.channels_last)
    zeros["transposed"] = zeros["transposed"].T
    return zeros


def draw_gradients(like: Mapping[str, Tensor], *seeds: int) -> dict[str, Tensor]:
    """Draw normal numbers with the shapes, dtypes and layouts of ``like``, for these seeds."""
    generator = torch.Generator()
    seed = 0
    for part in seeds:
        seed = seed * 1009 + part
    generator.manual_seed(seed)
    return {
        name: torch.empty_like(tensor, dtype=torch.float64)
        .copy_(torch.randn(tensor.shape, generator=generator, dtype=torch.float64))
        .to(tensor.dtype)
        for name, tensor in like.items()
    }


class GradientProbe(nn.Module):
    """The gradient of each parameter is the input of its name; without input it is unused."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        super().__init__()
        for name, value in parameters.items():
            self.register_parameter(name, nn.Parameter(value.detach().clone()))

    def forward(self, gradients: Mapping[str, Tensor]) -> Tensor:
        terms = [
            # Sum in one precision, so that no term is lost in the dtype of another one.
            (parameter * gradients[name]).sum().float()
            for name, parameter in self.named_parameters()
            if name in gradients
        ]
        return torch.stack(terms).sum()


class Trainer:
    """A :class:`GradientProbe` in our wrapper, or in torch's if ``torch_ddp``, with a hook."""

    def __init__(
        self,
        hook: CommHook,
        parameters: Mapping[str, Tensor] | None = None,
        *,
        torch_ddp: bool = False,
        **options: Any,
    ) -> None:
        probe = GradientProbe(probe_parameters() if parameters is None else parameters)
        wrapper: Any = TorchDistributedDataParallel if torch_ddp else wrap
        self.model = wrapper(probe, **{"bucket_cap_mb": _BUCKET_MB} | options)
        self.parameters = dict(probe.named_parameters())
        self.hook = hook
        self.handle = commhooks.register(self.model, hook)

    def state(self) -> dict[str, Any]:
        """Return the state of the hook on this rank, after its exchanges."""
        hook = self.handle.hook
        if not isinstance(hook, CommHook):
            return {}
        with self.handle.adapter.between_steps():
            state = hook.state_dict()
        record_on_current_stream(state)
        return state

    def step(
        self, gradients: Mapping[str, Tensor], *, before: Iterable[Mapping[str, Tensor]] = ()
    ) -> dict[str, Tensor]:
        """Return the results of one backward, after those of ``before`` under no_sync()."""
        for parameter in self.parameters.values():
            parameter.grad = None
        for accumulated in before:
            with self.model.no_sync():
                self.model(accumulated).backward()
        self.model(gradients).backward()
        return {
            name: parameter.grad.detach().clone()
            for name, parameter in self.parameters.items()
            if parameter.grad is not None
        }
