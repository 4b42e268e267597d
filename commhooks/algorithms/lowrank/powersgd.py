"""PowerSGD: average the gradients through factors of low rank.

Vogels, Karimireddy, Jaggi: PowerSGD, NeurIPS 2019, https://arxiv.org/abs/1905.13727. For one matrix
G on each of N ranks, with the error E and the factor Q that the last step has left::

    def powersgd(G, E, Q):                    # (n, m), (n, m), (r, m)
        M = G + E
        P = all_reduce(M @ Q.T) / N           # (n, r)
        P = torch.linalg.qr(P).Q              # orthonormal columns
        own_Q = P.T @ M                       # (r, m)
        Q = all_reduce(own_Q) / N
        E = M - P @ own_Q                     # what this rank has not sent
        return P @ Q, E, Q

These are two half steps, each from an orthonormal factor to the other factor. One-sided, the form
of the authors' later code, https://github.com/epfml/powersgd, a step is only one of them: from Q to
P and from P to Q in turn. A bucket's matrices travel together, and with them whatever is not
compressed: algorithms/lowrank/compressor.py computes for all of them at once.

Note [Sent + error]
~~~~~~~~~~~~~~~~~~~
A half step turns a given orthonormal factor, say P, into the other one, Q, and averages that:

    rank i:    Q_i = Pᵀ·M_i          sent:     P·Q_i
    all:       Q   = mean of Q_i     result:   P·Q = mean of P·Q_i
    rank i:    E_i = M_i - P·Q_i

P is the same on all ranks, so the result is exactly the mean of what the ranks sent, and each rank
keeps exactly what it did not send: sent + error == gradient + old error, on every rank. Summed over
ranks and steps nothing is lost. (Some implementations subtract the *averaged* P·Q. The errors then
have the same mean, but each one also gathers its rank's difference from the mean, which no step
removes.) As P·Pᵀ is a projection, E_i is never longer than M_i.

Two-sided, the first half step only finds the P that the second one starts from; one-sided, each
half step sends. With several iterations per step, the next one starts from the factor that was
found, with M_i less all P·Q_i so far; the result is the sum of their means.

Note [One commit]
~~~~~~~~~~~~~~~~~
Nothing that is kept of a bucket changes before its last collective has delivered finite numbers:
products are taken of E + G without storing it, and errors, factors and bucket are updated at the
end. Numbers that are not finite survive products and sums, so if any rank's gradient has one, every
rank finds one in what it receives, keeps its state bit for bit, and returns NaN, which a gradient
scaler sees on every rank. On the CPU, where this is known at once, all ranks skip the remaining
collectives; on a GPU the host does not wait for it: Note [All finite] in codecs/finite.py. A
collective that fails leaves the state unchanged as well. Other buckets of the same step, if their
own gradients are finite, go on as usual.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated

import torch
import torch.distributed as dist
from torch import Tensor

from commhooks.algorithms.bucket_memory import ErrorDtype, PerBucketCache
from commhooks.algorithms.bucket_parameters import real_view
from commhooks.algorithms.lowrank.compressor import Compressor, HalfStep, draw_factor
from commhooks.algorithms.lowrank.kernel_compressor import make_compressor
from commhooks.algorithms.lowrank.matrix_plan import MatrixPlan, Side, matrix_shape
from commhooks.codecs.finite import is_known_false
from commhooks.comm.communicator import Communicator
from commhooks.comm.wire import all_reduce_bytes
from commhooks.errors import CommHookError
from commhooks.hook.base import CommHook
from commhooks.hook.options import Limits
from commhooks.hook.registry import register_hook
from commhooks.hook.state import StateField
from commhooks.kernels import require_for
from commhooks.precision import at_least_float32
from reducer import GradBucket


@register_hook("powersgd")
@dataclass
class PowerSGD(CommHook):
    """Average matrices through factors of low rank, with error feedback.

    A gradient with two or more dimensions is seen as a matrix (n, m), n being its outermost
    dimension in memory. Vectors, and matrices that would not shrink enough, are averaged exactly.
    Factors, errors and, from ``start_step`` on, all numbers on the wire are float32 (float64 for
    float64 gradients).

    Wire, per bucket and step: r·(n + m) elements for each matrix, and everything exact. Two-sided:
    two all-reduces, of P and everything exact, then of Q. One-sided: a single all-reduce of P or Q,
    and everything exact, which halves the bytes of the factors. Every further iteration sends
    factors again. Memory: the errors, as large as the gradients in float32, and the factors.

    A bucket with a number that is not finite, on any rank, averages to NaN on all ranks and leaves
    the state of its parameters as it was. See Note [Sent + error] and Note [One commit].
    """

    rank: Annotated[int, Limits(ge=1)] = 8
    """r, for every matrix (n, m) at most min(n, m). Higher: closer to the average, more bytes. A
    rank other than the default at which no matrix of the model would shrink is refused."""
    min_compression_rate: Annotated[float, Limits(ge=0, lt=math.inf)] = 2.0
    """Compress a matrix when n·m is at least this many times what is sent for it: r·(n + m), or
    half of that if one-sided. At 0, compress all."""
    start_step: Annotated[int, Limits(ge=0)] = 10
    """Average exactly in the steps before this one: early gradients change fast, and the buckets
    are rebuilt after the first step. The paper starts at 0, its authors' code at 100."""
    two_sided: bool = True
    """Compute both factors in each step, a full step of power iteration in two collectives; else
    one of them, left and right in turn, in a single collective."""
    num_iters_per_step: Annotated[int, Limits(ge=1)] = 1
    """Each further iteration compresses the remainder with r more vectors, for as many bytes
    again."""
    error_feedback: bool = True
    """Add what a step did not send to the next gradient. Without, the result is biased."""
    warm_start: bool = True
    """Start from the factors of the last step; else from new random ones each time."""
    seed: int = 0
    """Seed of the random factors, which also depend on the parameter's name. All ranks need the
    same."""
    error_dtype: ErrorDtype = field(default=None, kw_only=True)
    """None keeps errors in float32 (float64 for float64 gradients). bfloat16, rounded
    stochastically, halves their memory."""

    lossless = False
    wire = "r·(n + m) elements per matrix in 2 all-reduces; one-sided: half of that, in 1"
    paper = "https://arxiv.org/abs/1905.13727"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._compressors: PerBucketCache[Compressor] = PerBucketCache(self)

    async def reduce(self, bucket: GradBucket, comm: Communicator) -> Tensor:
        buffer = bucket.buffer()
        if bucket.step < self.start_step:
            return await comm.all_reduce(buffer.div_(comm.size))
        compressor = self._compressors.get(bucket)
        if compressor is None:  # the composition of the bucket has changed
            compressor = self._compressors.put(bucket, self._make_compressor(bucket))
        with compressor.step(bucket, comm):
            return await self._average(compressor, bucket, comm)

    async def _average(
        self, compressor: Compressor, bucket: GradBucket, comm: Communicator
    ) -> Tensor:
        buffer = bucket.buffer()
        sides = self._sides(bucket.step)
        start = sides[0].other
        if self.warm_start:
            factors = compressor.factors[start]
        else:
            factors = compressor.draw_factors(start, self.seed, bucket.step)
        halves: list[HalfStep] = []
        for side in sides:
            basis = compressor.orthonormalize(side.other, factors)
            own = compressor.project(side, buffer, basis, has_exact=not halves)
            for half in self._sent(halves):
                compressor.deflate(side, own, basis, half)
            earlier = halves[-1].all_finite if halves else None
            mean, all_finite = compressor.message(side, own, earlier)
            if mean.numel() > 0:
                mean = await comm.all_reduce(mean)
            all_finite = compressor.average(mean, comm.size, all_finite)
            if is_known_false(all_finite):
                return buffer.fill_(torch.nan)
            halves.append(HalfStep(side, basis, own, mean, all_finite))
            factors = mean
        self._commit(compressor, halves, buffer)
        return buffer

    @property
    def capturable_from(self) -> int | None:
        is_alike = self.warm_start and (self.two_sided or self.rounds % 2 == 0)
        is_random = self.error_feedback and self.error_dtype is not None
        return self.start_step if is_alike and not is_random else None

    def _sides(self, step: int) -> list[Side]:
        """Return the side that each half step computes. One-sided, steps go on in turn."""
        first = 0 if self.two_sided else step * self.rounds
        return [Side(i % 2) for i in range(first, first + self.rounds)]

    @property
    def rounds(self) -> int:
        """Return the number of half steps, each with an all-reduce."""
        return self.num_iters_per_step * (2 if self.two_sided else 1)

    def _sent(self, halves: Sequence[HalfStep]) -> list[HalfStep]:
        """Return the half steps whose products are sent. See Note [Sent + error]."""
        return [half for half in halves if not self.two_sided or half.side is Side.RIGHT]

    def _commit(self, compressor: Compressor, halves: Sequence[HalfStep], buffer: Tensor) -> None:
        """Update errors, warm-start factors and the bucket. See Note [One commit]."""
        sent, all_finite = self._sent(halves), halves[-1].all_finite
        compressor.apply(sent, halves[0], buffer, all_finite)
        for half in sent:
            if half.side in compressor.factors:
                compressor.store_factors(half, all_finite)

    def _make_compressor(self, bucket: GradBucket) -> Compressor:
        return make_compressor(
            self._plan(bucket),
            bucket.buffer(),
            self.state,
            kept_sides=self._kept_sides,
            error_feedback=self.error_feedback,
            error_dtype=self.error_dtype,
            seed=self.seed,
        )

    @property
    def _kept_sides(self) -> tuple[Side, ...]:
        """The sides whose factors the next step starts from."""
        if not self.warm_start:
            return ()
        return (Side.RIGHT,) if self.two_sided else tuple(Side)

    def state_fields(self, gradient: Tensor) -> Sequence[StateField]:
        shape = matrix_shape(gradient)
        rank = 0 if shape is None else self.rank_of(*shape)
        if shape is None or rank == 0:
            return ()
        return *self.error_fields(*shape), *self.factor_fields(*shape, rank)

    def error_fields(self, *shape: int) -> Sequence[StateField]:
        if not self.error_feedback:
            return ()
        return (StateField("error", "averageable", shape, self.error_dtype, per_element=True),)

    def factor_fields(self, n: int | None, m: int | None, rank: int | None) -> list[StateField]:
        """Return the fields of the factors of a matrix (n, m), None if it is not known."""
        shapes = {Side.LEFT: (n, rank), Side.RIGHT: (rank, m)}
        return [StateField(side.name.lower(), "same", shapes[side]) for side in self._kept_sides]

    def recover(self) -> None:
        """Begin with random factors again: some ranks may have kept newer ones than others."""
        super().recover()
        for key, entry in self.state.items():
            for side in self._kept_sides:
                if (kept := entry.get(side.name.lower())) is not None:
                    fresh = torch.empty(kept.shape)
                    draw_factor(fresh, side, key, self.seed)
                    kept.copy_(fresh)

    def _plan(self, bucket: GradBucket) -> MatrixPlan:
        return MatrixPlan.of_parameters(bucket.names, bucket.gradients(), self.rank_of)

    def rank_of(self, n: int, m: int) -> int:
        """Return r for a matrix, 0 if it would not shrink by ``min_compression_rate``."""
        rank = min(self.rank, n, m)
        return rank if rank <= self._highest_rank(n, m) else 0

    def _highest_rank(self, n: int, m: int) -> int:
        """Return the highest rank, at most min(n, m), at which a matrix shrinks enough; 0 if none.

        A step sends r·(n + m) elements for n·m two-sided; one-sided r·n and r·m in turn, half of
        that on average. With more iterations it sends that many times as much.
        """
        least = self.min_compression_rate * (n + m) * self.rounds / 2  # elements, for rank 1
        worth = int(n * m // least) if least else math.inf
        return int(min(n, m, worth))

    def prepare(self, parameters: Mapping[str, Tensor], group: dist.ProcessGroup) -> None:
        """Raise CommHookError if the rank is so high that no matrix of the model would shrink.

        Where none would at any rank, raise it if the rank is above min(n, m) of all matrices. The
        default rank is always accepted: with it small models are averaged exactly. Also raise it if
        errors in bfloat16 are on a device that cannot run the kernel that rounds them.
        """
        super().prepare(parameters, group)
        if self.error_feedback and self.error_dtype is not None:
            require_for(parameters.values())
        found = self._matrices(parameters)
        highest = max((self._highest_rank(*shape) for shape in found.values()), default=0)
        highest = highest or max(map(min, found.values()), default=0)
        if 0 < highest < self.rank != type(self).rank:
            raise CommHookError(
                f"hook {self.name!r}: expected a rank of at most {highest}, found {self.rank}, at "
                "which no matrix of the model would shrink by min_compression_rate="
                f"{self.min_compression_rate}: the largest are {_largest(found)}. Lower the rank"
            )

    def _matrices(self, parameters: Mapping[str, Tensor]) -> dict[str, tuple[int, int]]:
        """Return (n, m) of everything that can be compressed, by its name in messages."""
        shapes = {name: matrix_shape(real_view(p)) for name, p in parameters.items()}
        return {name: shape for name, shape in shapes.items() if shape is not None}

    def wire_bytes(self, bucket: GradBucket, size: int) -> int:
        buffer = bucket.buffer()
        if bucket.step < self.start_step:
            return all_reduce_bytes(buffer.nbytes, size)
        plan = self._plan(bucket)
        itemsize = at_least_float32(buffer.dtype).itemsize
        return sum(
            all_reduce_bytes(plan.sent_elements(side, has_exact=i == 0) * itemsize, size)
            for i, side in enumerate(self._sides(bucket.step))
        )


def _largest(matrices: Mapping[str, tuple[int, int]]) -> str:
    """Return the three largest, for an error message."""
    ordered = sorted(matrices.items(), key=lambda item: math.prod(item[1]), reverse=True)
    return ", ".join(f"{n} x {m} ({name})" for name, (n, m) in ordered[:3])
