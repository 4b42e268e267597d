"""Push-sum: parameters are mixed with whoever sends some, and rightly weighted all the same.

Assran et al.: Stochastic Gradient Push, ICML 2019, https://arxiv.org/abs/1811.10792; push-sum is
from Kempe et al., FOCS 2003. A is the mixing matrix of step t, see comm/topologies.py; its columns
sum
to 1, its rows need not, so a rank may hear from several others or from none. With x_i the numbers
that are pushed around, w_i the weights, z_i = x_i/w_i the de-biased parameters, with which the
model computes, and u an optimizer's step:

    x_i(t) = Σ_j A_ij·(x_j(t-1) - u_j)      w_i(t) = Σ_j A_ij·w_j(t-1)      z_i(t) = x_i(t)/w_i(t)

No sum over ranks changes but by the optimizers' steps, and the weights tell how much of it a rank
has: z_i goes to the mean.

How that fits a hook of gradients: the model holds z, so its optimizer turns z into p = z - u. The
hook keeps x and w; what it pushes, x - u, is x + (p - x/w), whatever the optimizer does. It returns
this rank's gradients as they are.

    step t    backward:   gradients of p = z(t-1) - u
              hook:       pushes x(t-1) - u and w(t-1), keeps x(t) and w(t), the model becomes z(t)
              optimizer:  p = z(t) - u, with the gradients from above

The paper takes the gradients of z(t), after the messages have arrived. Here both go on at the same
time, as in D-PSGD. Under permutations all weights stay 1: gossip of parameters does the same then,
without keeping anything.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from commhooks.algorithms.averaging.consensus_distance import WithoutConsensus
from commhooks.algorithms.bucket_parameters import pack, parameters_of, store
from commhooks.comm.communicator import Communicator
from commhooks.comm.topologies import Push, check_topology, round_at
from commhooks.errors import CommHookStateError
from commhooks.hook.registry import register_hook
from commhooks.precision import at_least_float32
from reducer import GradBucket

__all__ = ["PushSum"]


@register_hook("push_sum")
@dataclass
class PushSum(WithoutConsensus):
    """Push parameters to one rank per step, who need not push any back; models may differ.

    Every rank gets another result, so save and load each rank's own model. Gradients are not sent.
    Nothing is averaged exactly, but the ranks' models tend to their common, weighted mean.

    Wire, per bucket and step: its parameters and a weight of each, in float32 (float64 for float64
    parameters), to one rank. Memory: one number per parameter element, in the same dtype. A
    parameter that is not finite reaches whom it is sent to. With one rank nothing changes. After a
    step that failed, and at the end of ``join``, all ranks begin anew, with their models as they
    are.
    """

    topology: Push = "exponential"
    """Who sends to whom, see :mod:`commhooks.comm.topologies`. With "uniform" weights differ."""
    seed: int = 0
    """Of the targets of "uniform", "random" and "dissemination". All ranks need the same."""

    wire = "the parameters and their weights once, in float32, to one rank"
    paper = "https://arxiv.org/abs/1811.10792"

    def prepare(self, parameters: Mapping[str, Tensor], group: dist.ProcessGroup) -> None:
        """Raises CommHookError if the topology cannot be built of the group's ranks."""
        super().prepare(parameters, group)
        check_topology(self.topology, group.size())

    async def reduce(self, bucket: GradBucket, comm: Communicator) -> Tensor:
        if comm.size > 1:
            half = self._pushed(bucket).mul_(0.5)
            round_ = round_at(self.topology, comm.size, bucket.step, self.seed)
            received = await comm.push(
                half, send_to=round_.targets[comm.rank], receive_from=round_.sources(comm.rank)
            )
            if len(received) > 0:
                difference = _debiased(received[0], bucket) - _debiased(half, bucket)
                self._distance.add(bucket.step, difference, partner_of=comm.size)
            self._keep(bucket, half.add_(received.sum(0)))
        return bucket.buffer()

    @property
    def changes_parameters(self) -> bool:
        return True

    def wire_bytes(self, bucket: GradBucket, size: int) -> int:
        parameters = parameters_of(bucket)
        elements = sum(parameter.numel() + 1 for parameter in parameters)
        return elements * at_least_float32(parameters[0].dtype).itemsize if size > 1 else 0

    def recover(self) -> None:
        """What was sent may not have arrived, or parameters are not what the last step made."""
        self.state = {}

    def _pushed(self, bucket: GradBucket) -> Tensor:
        """(numel + parameters,): x - u, and w of each parameter.

        These are equal, unless some buckets were left out of a step; who is in one bucket changes.
        """
        parameters = pack(parameters_of(bucket))
        dtype = at_least_float32(parameters.dtype)
        if any(name not in self.state for name in bucket.names):
            weights = parameters.new_ones(len(bucket.names), dtype=dtype)
            return torch.cat([parameters.to(dtype), weights])
        kept = [[self.state[name][part] for name in bucket.names] for part in ("biased", "weight")]
        pushed = pack([*kept[0], *kept[1]])
        biased = pushed[: -len(bucket.names)]
        if biased.shape != parameters.shape:
            raise CommHookStateError(
                f"state of {bucket.names}: expected {parameters.numel()} numbers as 'biased', "
                f"found {biased.numel()}: it was saved for another model"
            )
        biased += parameters - _debiased(pushed, bucket).to(parameters.dtype)
        return pushed

    def _keep(self, bucket: GradBucket, pushed: Tensor) -> None:
        parameters = parameters_of(bucket)
        parts, weights = _split(pushed, bucket)
        for name, parameter, part, weight in zip(
            bucket.names, parameters, parts, weights, strict=True
        ):
            self.state[name] = {"biased": part.view(parameter.shape), "weight": weight}
        store(_debiased(pushed, bucket), parameters)


def _split(pushed: Tensor, bucket: GradBucket) -> tuple[list[Tensor], list[Tensor]]:
    """X of each parameter, flat, and w."""
    sizes = [parameter.numel() for parameter in parameters_of(bucket)]
    *parts, weights = torch.split(pushed, [*sizes, len(sizes)])
    return parts, list(weights.unbind())


def _debiased(pushed: Tensor, bucket: GradBucket) -> Tensor:
    """Z = x/w"""
    debiased = pushed.clone()
    torch._foreach_div_(*_split(debiased, bucket))
    return debiased[: -len(bucket.names)]
