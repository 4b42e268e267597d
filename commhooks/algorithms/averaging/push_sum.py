"""Push-sum: parameters are mixed one way, and weights correct what that does to their average.

Assran et al.: Stochastic Gradient Push, ICML 2019, https://arxiv.org/abs/1811.10792; push-sum is
from Kempe et al., FOCS 2003. One step of rank i, whose model has parameters p and gradients g; x
starts as p, the weight w as 1::

    def step(x, w, p, g, t):
        x = x + (p - x / w)                           # with the optimizer's last step
        push(x / 2, w / 2, to=target(i, t))           # keep the other halves
        x = x / 2 + sum(received x)                   # of any number of ranks, none included
        w = w / 2 + sum(received w)
        z = x / w                                     # the de-biased parameters
        return x, w, z - u(g)                         # the optimizer's step

With A the mixing matrix of step t (comm/topologies.py) and u_j the steps of the optimizers:

    x_i(t) = Σ_j A_ij·(x_j(t-1) - u_j)      w_i(t) = Σ_j A_ij·w_j(t-1)      z_i(t) = x_i(t)/w_i(t)

The columns of A sum to 1, its rows need not. So only the optimizers change the sum of x over ranks,
w says how much of that sum a rank has, and z tends to the mean.

The paper takes gradients at z(t), after the messages have arrived. Here both happen at the same
time, as in D-PSGD: in step t backward takes gradients at z(t-1) - u, which the optimizer applies to
z(t). Under permutations all weights stay 1: gossip of parameters then does the same and keeps
nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from commhooks.algorithms.averaging.gossip import PeerToPeer
from commhooks.algorithms.bucket_parameters import pack, parameters_of, store
from commhooks.comm.communicator import Communicator
from commhooks.comm.topologies import Push
from commhooks.hook.registry import register_hook
from commhooks.hook.state import StateField
from commhooks.precision import at_least_float32
from reducer import GradBucket


@register_hook("push_sum")
@dataclass
class PushSum(PeerToPeer):
    """Push parameters to one rank per step, which need not push any back; models may differ.

    Every rank gets another result, so save and load each rank's own model. Gradients are not sent.
    Nothing is averaged exactly, but the ranks' models tend to their common, weighted mean.

    Wire, per bucket and step: its parameters and one weight for each of them, in float32 (float64
    for float64 parameters), to one rank. Memory: one number per parameter element, in the same
    dtype. A parameter that is not finite reaches the ranks that it is sent to. With one rank
    nothing changes. After a failed step, and at the end of ``join``, all ranks start again from
    their models as they are.
    """

    topology: Push = "exponential"
    """The target of each rank, see :mod:`commhooks.comm.topologies`. Weights differ with
    "uniform"."""
    seed: int = 0
    """Seed of the targets of "uniform", "random" and "dissemination". All ranks need the same."""

    changes_parameters = True
    wire = "the parameters and their weights once, in float32, to one rank"
    paper = "https://arxiv.org/abs/1811.10792"

    def state_fields(self, gradient: Tensor) -> Sequence[StateField]:
        return (
            StateField.like(gradient, "biased", "averageable"),
            StateField("weight", "averageable", (), check=_misfit),
        )

    async def reduce(self, bucket: GradBucket, comm: Communicator) -> Tensor:
        if comm.size > 1:
            half = self._with_last_step(bucket).mul_(0.5)
            partners = self.round_of(bucket, comm)
            received = await comm.push(
                half, send_to=partners.targets[comm.rank], receive_from=partners.sources(comm.rank)
            )
            if len(received) > 0:
                difference = _debiased(received[0], bucket) - _debiased(half, bucket)
                self.measure(bucket.step, [[difference]], ranks_if_partner=comm.size)
            self._keep(bucket, half.add_(received.sum(0)))
        return bucket.buffer()

    def _with_last_step(self, bucket: GradBucket) -> Tensor:
        """Return (numel + parameters,): x with the optimizer's last step, and w of each parameter.

        Weights in a bucket are equal, unless some buckets were left out of a step and the buckets
        were then rebuilt.
        """
        parameters = pack(parameters_of(bucket))
        dtype = at_least_float32(parameters.dtype)
        if any(name not in self.state for name in bucket.names):
            weights = parameters.new_ones(len(bucket.names), dtype=dtype)
            return torch.cat([parameters.to(dtype), weights])
        kept = [[self.state[name][part] for name in bucket.names] for part in ("biased", "weight")]
        # A loaded state may be elsewhere, and in float64.
        pushed = pack([*kept[0], *kept[1]]).to(parameters.device, dtype)
        biased = pushed[: -len(bucket.names)]
        biased += parameters - _debiased(pushed, bucket).to(parameters.dtype)
        return pushed

    def _keep(self, bucket: GradBucket, pushed: Tensor) -> None:
        """Store x and w, and give the model z."""
        parameters = parameters_of(bucket)
        parts, weights = _split(pushed, bucket)
        for name, parameter, part, weight in zip(
            bucket.names, parameters, parts, weights, strict=True
        ):
            self.state[name] = {"biased": part.view(parameter.shape), "weight": weight}
        store(_debiased(pushed, bucket), parameters)

    def recover(self) -> None:
        """Forget x and w: a message may be lost, or another model may have been loaded."""
        super().recover()
        self.state = {}

    def wire_bytes(self, bucket: GradBucket, size: int) -> int:
        parameters = parameters_of(bucket)
        elements = sum(parameter.numel() + 1 for parameter in parameters)
        return elements * at_least_float32(parameters[0].dtype).itemsize if size > 1 else 0


def _misfit(entry: Mapping[str, Tensor]) -> str | None:
    """Describe a weight that models cannot be divided by."""
    weight = entry["weight"].item()
    return None if weight > 0 else f"expected a positive number, found {weight}"


def _split(pushed: Tensor, bucket: GradBucket) -> tuple[list[Tensor], list[Tensor]]:
    """Return x of each parameter, flat, and w."""
    sizes = [parameter.numel() for parameter in parameters_of(bucket)]
    *parts, weights = torch.split(pushed, [*sizes, len(sizes)])
    return parts, list(weights.unbind())


def _debiased(pushed: Tensor, bucket: GradBucket) -> Tensor:
    """Return z = x/w, flat."""
    debiased = pushed.clone()
    torch._foreach_div_(*_split(debiased, bucket))
    return debiased[: -len(bucket.names)]
