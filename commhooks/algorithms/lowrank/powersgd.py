"""PowerSGD: the average of the gradients, through factors of low rank.

Vogels, Karimireddy, Jaggi: PowerSGD, NeurIPS 2019, https://arxiv.org/abs/1905.13727; the one-sided
form is that of the authors' later code, https://github.com/epfml/powersgd.

Letters, as in algorithms/lowrank/products.py:  G: (n, m) gradient  E: (n, m) error  M = E + G  P:
(n, r)  Q: (r, m)

Note [Sent + error]
~~~~~~~~~~~~~~~~~~~
A half step turns a given orthonormal factor, say P, into the other one, Q, and averages that:

    rank i:    Q_i = Pᵀ·M_i          sent:     P·Q_i
    all:       Q   = mean of Q_i     result:   P·Q = mean of P·Q_i
    rank i:    E_i = M_i - P·Q_i

P is the same on all ranks, so the result is exactly the mean of what the ranks sent, and each rank
remembers exactly what it did not send: sent + error == gradient + old error, on every rank. Summed
over ranks and steps nothing is lost. (Some implementations subtract the *averaged* P·Q. The errors
have the same mean then, but each also gathers its rank's difference from the mean, which no step
takes out again.) As P·Pᵀ is a projection, E_i is never longer than M_i.

Two-sided, a first half step only finds the P that the second one starts from; one-sided, each half
step sends. With several iterations per step the next one goes on from the factor that was found,
with M_i less all P·Q_i so far; the result is the sum of their means.

Note [One commit]
~~~~~~~~~~~~~~~~~
Nothing that is kept of a bucket changes before its last collective has delivered finite numbers:
products are taken of E + G without storing it, and `absorb` then updates errors and bucket. What is
not finite survives products and sums, so if any rank's gradient has such a number, every rank finds
one in what it receives, keeps its state bit for bit, and returns NaN, which a gradient scaler sees
on every rank. On the CPU, where it is known at once, all skip the collectives that are left; on a
GPU nobody waits to know it: Note [All finite] in codecs/finite.py. A collective that fails leaves
the state
alone as well.
Other buckets of the same step, if their own gradients are finite, go on as usual.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
import torch.distributed as dist
from torch import Tensor

from commhooks.algorithms.bucket_parameters import real_view
from commhooks.algorithms.lowrank.bucket import Arithmetic, HalfStep, arithmetic_of
from commhooks.algorithms.lowrank.matrix_memory import MatrixMemory, check_state, draw_factors
from commhooks.algorithms.lowrank.matrix_plan import CompressionRule, MatrixPlan, Side
from commhooks.algorithms.lowrank.matrix_shape import matrix_shape
from commhooks.algorithms.lowrank.payload import Payload
from commhooks.algorithms.lowrank.products import deflate
from commhooks.algorithms.per_bucket_cache import PerBucketCache
from commhooks.codecs.finite import is_known_false
from commhooks.comm.communicator import Communicator
from commhooks.comm.wire import all_reduce_bytes
from commhooks.errors import CommHookError
from commhooks.hook.base import CommHook
from commhooks.hook.options import Ge, Lt
from commhooks.hook.registry import register_hook
from commhooks.precision import at_least_float32
from reducer import GradBucket

__all__ = ["PowerSGD"]


@register_hook("powersgd")
@dataclass
class PowerSGD(CommHook):
    """Average matrices through factors of low rank, with error feedback.

    A gradient with two or more dimensions is seen as a matrix (n, m), n being its outermost
    dimension in memory. Vectors, and matrices that would not shrink enough, are averaged exactly.
    Factors, errors and all numbers on the wire are float32 (float64 for float64 gradients).

    Wire, per bucket and step: r·(n + m) elements for each matrix, and what is exact. Two-sided: two
    all-reduces, of P and all that is exact, then of Q. One-sided: a single all-reduce of P or Q,
    and all that is exact, which halves the bytes of the factors. Every further iteration sends
    factors again. Memory: the errors, as large as the gradients in float32, and the factors.

    A bucket with a number that is not finite, on any rank, averages to NaN on all ranks and leaves
    the state of its parameters as it was. See Note [Sent + error] and Note [One commit].
    """

    rank: Annotated[int, Ge(1)] = 8
    """r, for every matrix (n, m) at most min(n, m). Higher: closer to the average, more bytes. One
    at which no matrix of the model would shrink is refused."""
    min_compression_rate: Annotated[float, Ge(0), Lt(math.inf)] = 2.0
    """Compress a matrix when n·m is at least this many times what is sent for it: r·(n + m), or
    half of that if one-sided. At 0, compress all."""
    start_step: Annotated[int, Ge(0)] = 10
    """Average exactly in the steps before this one: early gradients change fast, and the buckets
    are cut anew after the first step. The paper starts at 0, its authors' code at 100."""
    two_sided: bool = True
    """Compute both factors in each step, a full step of power iteration in two collectives; else
    one of them, left and right in turn, in a single collective."""
    num_iters_per_step: Annotated[int, Ge(1)] = 1
    """Each further iteration sends r more vectors, of what is left, for as many bytes again."""
    error_feedback: bool = True
    """Add what a step did not send to the next gradient. Without, the result is biased."""
    warm_start: bool = True
    """Start from the factors of the last step; else from new random ones each time."""
    seed: int = 0
    """Of the random factors, which also depend on the parameter's name. All ranks need the same."""

    _cuts: PerBucketCache["_Cut"] = field(
        default_factory=PerBucketCache, init=False, repr=False, compare=False
    )

    lossless = False
    wire = "r·(n + m) elements per matrix in 2 all-reduces; one-sided: half of that, in 1"
    paper = "https://arxiv.org/abs/1905.13727"

    def prepare(self, parameters: Mapping[str, Tensor], group: dist.ProcessGroup) -> None:
        """Raises CommHookError if the rank is so high that no matrix of the model would shrink.

        Also where none would at any rank, if it is above min(n, m) of all. Except for the default
        rank, with which small models are averaged exactly.
        """
        super().prepare(parameters, group)
        rule = self._rule()
        found = self._matrices(parameters)
        highest = max((rule.highest_rank(*shape) for shape in found.values()), default=0)
        highest = highest or max(map(min, found.values()), default=0)
        if 0 < highest < self.rank != type(self).rank:
            raise CommHookError(
                f"hook {self.name!r}: expected a rank of at most {highest}, found {self.rank}, at "
                "which no matrix of the model would shrink by min_compression_rate="
                f"{self.min_compression_rate}: the largest are {_largest(found)}. Lower the rank"
            )

    async def reduce(self, bucket: GradBucket, comm: Communicator) -> Tensor:
        buffer = bucket.buffer()
        if bucket.step < self.start_step:
            return await comm.all_reduce(buffer.div_(comm.size))
        cut = self._cut(bucket)
        sides = self._sides(bucket.step)
        factors = self._starting_factors(cut, sides[0].other, bucket.step)
        halves: list[HalfStep] = []
        for side in sides:
            half = await self._half_step(cut, buffer, factors, side, halves, comm)
            if is_known_false(half.verdict):
                return buffer.fill_(torch.nan)
            halves.append(half)
            factors = half.mean
        _commit(halves, cut, buffer)
        return buffer

    def wire_bytes(self, bucket: GradBucket, size: int) -> int:
        buffer = bucket.buffer()
        if bucket.step < self.start_step:
            return all_reduce_bytes(buffer.nbytes, size)
        plan = self._plan(bucket)
        elements = [plan.factor_elements(side) for side in self._sides(bucket.step)]
        elements[0] += plan.exact_elements
        itemsize = at_least_float32(buffer.dtype).itemsize
        return sum(all_reduce_bytes(count * itemsize, size) for count in elements)

    def _sides(self, step: int) -> list[Side]:
        """Of the half steps. One-sided, steps go on where the last one has stopped."""
        count = self.num_iters_per_step * (2 if self.two_sided else 1)
        first = 0 if self.two_sided else step * count
        return [Side.LEFT if i % 2 == 0 else Side.RIGHT for i in range(first, first + count)]

    async def _half_step(
        self,
        cut: "_Cut",
        buffer: Tensor,
        factors: Payload,
        side: Side,
        earlier: Sequence[HalfStep],
        comm: Communicator,
    ) -> HalfStep:
        """From the factors on the other side to those on ``side``. See Note [Sent + error].

        ``earlier``: the half steps of the same step. What is exact travels with the first.
        """
        has_exact = not earlier
        basis = cut.arithmetic.orthonormalize(factors)
        own = cut.arithmetic.project(buffer, basis, has_exact=has_exact)
        for half in earlier:
            if half.is_sent:
                for (P, Q), F, out in zip(half.own_pairs, basis.factors, own.factors, strict=True):
                    deflate(side, P, Q, F, out=out)
        total, verdict = cut.arithmetic.send(own, earlier[-1].verdict if earlier else None)
        if total.numel() > 0:
            total = await comm.all_reduce(total)
        verdict = cut.arithmetic.receive(total, comm.size, verdict)
        mean = Payload(cut.plan, side, total, has_exact=has_exact)
        return HalfStep(basis, own, mean, verdict, not self.two_sided or side is Side.RIGHT)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over what ``state_dict()`` gave, whatever bucket each parameter is in by now."""
        check_state(state)
        super().load_state_dict(state)
        self._cuts.clear()  # their memories are views of the state that was replaced

    def _starting_factors(self, cut: "_Cut", side: Side, step: int) -> Payload:
        if self.warm_start:
            return cut.memory.factors[side]
        return draw_factors(cut.plan, side, seed=self.seed, step=step, like=cut.like)

    def _cut(self, bucket: GradBucket) -> "_Cut":
        """The bucket's plan and memories, made anew when its composition has changed."""
        cut = self._cuts.get(bucket)
        if cut is not None:
            return cut
        plan = self._plan(bucket)
        buffer = bucket.buffer()
        like = buffer.new_empty(0, dtype=at_least_float32(buffer.dtype))
        kept = (Side.RIGHT,) if self.two_sided else (Side.LEFT, Side.RIGHT)
        memory = MatrixMemory(
            plan,
            self.state,
            sides=kept if self.warm_start else (),
            error_feedback=self.error_feedback,
            seed=self.seed,
            like=like,
        )
        arithmetic = arithmetic_of(plan, memory, buffer, like)
        return self._cuts.put(bucket, _Cut(plan, memory, arithmetic, like))

    def _matrices(self, parameters: Mapping[str, Tensor]) -> dict[str, tuple[int, int]]:
        """(n, m) of what can be compressed, by what it is made of."""
        shapes = {name: matrix_shape(real_view(p)) for name, p in parameters.items()}
        return {name: shape for name, shape in shapes.items() if shape is not None}

    def _plan(self, bucket: GradBucket) -> MatrixPlan:
        return MatrixPlan.of_parameters(bucket.names, bucket.gradients(), self._rule())

    def _rule(self) -> CompressionRule:
        return CompressionRule(
            self.rank, self.min_compression_rate, self.two_sided, self.num_iters_per_step
        )


@dataclass(frozen=True)
class _Cut:
    """How one bucket is compressed. ``like``: an empty tensor, of the device and dtype to use."""

    plan: MatrixPlan
    memory: MatrixMemory
    arithmetic: Arithmetic
    like: Tensor


def _commit(halves: Sequence[HalfStep], cut: _Cut, buffer: Tensor) -> None:
    """Updates errors, warm-start factors and the bucket. See Note [One commit]."""
    sent = [half for half in halves if half.is_sent]
    cut.arithmetic.absorb(sent, halves[0].mean, buffer)
    for half in sent:
        if half.mean.side in cut.memory.factors:
            kept = cut.memory.factors[half.mean.side]
            cut.arithmetic.keep(half.mean, kept, halves[-1].verdict)


def _largest(matrices: Mapping[str, tuple[int, int]]) -> str:
    """For an error: the first three."""
    ordered = sorted(matrices.items(), key=lambda item: math.prod(item[1]), reverse=True)
    return ", ".join(f"{n} x {m} ({what})" for what, (n, m) in ordered[:3])
