"""Deep gradient compression against the algorithm of the paper in plain torch."""

import pytest
import torch
from support.lockstep import lockstep, make_bucket
from torch import Tensor

from commhooks.algorithms.sparse.dgc import DGC
from commhooks.algorithms.sparse.topk import TopK

NUMEL = 997


def gradient_of(rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(NUMEL, generator=generator, dtype=torch.float64)


def run(hooks: list[DGC], step: int) -> list[Tensor]:
    buckets = [make_bucket({"p": gradient_of(rank, step)}, step) for rank in range(len(hooks))]
    return lockstep(hooks, buckets)[0]


class Reference:
    """Algorithms 1 and 4 of the paper, and its warm-up, for one rank of N.

    As in the paper, gradients are divided by N first, and the sent vectors are summed.
    """

    def __init__(self, *, size: int, momentum: float, clip: float | None, masking: bool) -> None:
        self.size, self.momentum, self.clip, self.masking = size, momentum, clip, masking
        self.u = torch.zeros(NUMEL, dtype=torch.float64)
        self.v = torch.zeros(NUMEL, dtype=torch.float64)

    def send(self, gradient: Tensor, count: int) -> Tensor:
        gradient = gradient / self.size
        if self.clip is not None:
            threshold = self.clip * self.size**-0.5
            norm = gradient.square().sum().sqrt()
            if norm > threshold:
                gradient = gradient * threshold / norm
        self.u = self.momentum * self.u + gradient
        self.v = self.v + self.u
        mask = torch.zeros(NUMEL, dtype=torch.bool)
        mask[torch.topk(self.v.abs(), count).indices] = True
        sent = torch.where(mask, self.v, 0)
        self.v = torch.where(mask, 0, self.v)
        if self.masking:
            self.u = torch.where(mask, 0, self.u)
        return sent


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("clip", [None, 5.0, 1e9])
@pytest.mark.parametrize("masking", [True, False])
def test_follows_the_paper(masking, clip, size):
    options = {"momentum": 0.8, "clip": clip, "masking": masking}
    hooks = [DGC(density=0.02, warmup_steps=3, warmup_density=0.16, **options) for _ in range(size)]
    ranks = [Reference(size=size, **options) for _ in hooks]
    for step, density in enumerate([0.16, 0.08, 0.04, 0.02, 0.02, 0.02]):
        results = run(hooks, step)
        sent = [
            reference.send(gradient_of(rank, step), round(density * NUMEL))
            for rank, reference in enumerate(ranks)
        ]
        expected = torch.stack(sent).sum(0)
        torch.testing.assert_close(results[0], expected, rtol=1e-12, atol=1e-12)
        for hook, reference in zip(hooks, ranks, strict=True):
            state = hook.state["p"]
            for found, expected in ("velocity", reference.u), ("error", reference.v):
                torch.testing.assert_close(state[found], size * expected, rtol=1e-12, atol=1e-12)


def test_average_within_the_norm_is_not_clipped():
    """Orthogonal gradients are each √N times as long as their average."""
    hooks = [DGC(density=1.0, warmup_steps=0, momentum=0.0, clip=1.001) for _ in range(4)]
    gradients = 2 * torch.eye(4, dtype=torch.float64)
    results, _ = lockstep(hooks, [make_bucket({"p": gradient}) for gradient in gradients])
    torch.testing.assert_close(results[0], gradients.mean(0))


def test_without_momentum_is_topk():
    hooks = [DGC(density=0.05, momentum=0.0, warmup_steps=0), TopK(density=0.05, warmup_steps=0)]
    for step in range(4):
        found, expected = (run([hook], step)[0] for hook in hooks)
        assert torch.equal(found, expected)


def test_density_decreases_exponentially():
    def counts(density: float) -> list[int]:
        hook = DGC(density=density, warmup_steps=4, warmup_density=0.25)
        buckets = [make_bucket({"p": torch.zeros(1)}, step) for step in range(6)]
        return [hook.sent_elements(bucket, 10**6) for bucket in buckets]

    ratio = (0.001 / 0.25) ** 0.25
    expected = [0.25 * ratio**step for step in range(4)] + [0.001, 0.001]
    assert counts(0.001) == [round(density * 10**6) for density in expected]
    assert counts(0.5) == [500_000] * 6
