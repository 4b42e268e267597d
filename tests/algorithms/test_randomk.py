"""Random-k: all indices have the same probability, so the result is unbiased."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from support.lockstep import lockstep, make_bucket

from commhooks.algorithms.sparse.randomk import RandomK
from commhooks.algorithms.sparse.selection import draw_indices


@given(
    st.integers(1, 300).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n))), st.integers()
)
def test_indices_are_different_and_in_range(case, seed):
    numel, count = case
    generator = torch.Generator().manual_seed(seed % 2**32)
    indices = draw_indices(numel, count, generator, like=torch.empty(0)).tolist()
    assert indices == sorted(set(indices))
    assert len(indices) == count
    assert indices[0] >= 0
    assert indices[-1] < numel


def test_all_indices_have_the_same_probability():
    """Counts of hits are binomial; six standard deviations are exceeded once in 10^8 indices."""
    numel, count, draws = 23, 5, 40_000  # runs of 4 and of 5
    generator = torch.Generator().manual_seed(1)
    like = torch.empty(0)
    drawn = torch.cat([draw_indices(numel, count, generator, like) for _ in range(draws)])
    hits = torch.bincount(drawn, minlength=numel).double()
    chance = count / numel
    deviation = (draws * chance * (1 - chance)) ** 0.5
    assert (hits - draws * chance).abs().max() < 6 * deviation


def test_unbiased_without_error_feedback():
    """The mean over many steps is the exact average, within six standard deviations.

    An element's result is n/k times the average with probability k/n, else 0: its variance is
    (n/k - 1) times the square of the average.
    """
    numel, steps = 29, 1_000
    hooks = [RandomK(density=0.25) for _ in range(2)]
    count = round(0.25 * numel)
    gradients = [torch.randn(numel, dtype=torch.float64) for _ in hooks]
    average = (gradients[0] + gradients[1]) / 2
    total = torch.zeros(numel, dtype=torch.float64)
    for step in range(steps):
        buckets = [make_bucket({"p": gradient.clone()}, step) for gradient in gradients]
        results, _ = lockstep(hooks, buckets)
        sent = results[0].nonzero()[:, 0]
        assert len(sent) == count
        torch.testing.assert_close(results[0][sent], average[sent] * (numel / count))
        total += results[0]
    deviation = average.abs() * ((numel / count - 1) / steps) ** 0.5
    assert torch.all((total / steps - average).abs() < 6 * deviation)


def test_everything_is_sent_eventually():
    """With error feedback all of one gradient has arrived once every index has been drawn."""
    hook = RandomK(density=0.2, error_feedback=True)
    gradient = torch.randn(50)
    total = torch.zeros(50)
    for step in range(200):
        given_ = gradient.clone() if step == 0 else torch.zeros(50)
        (result,), _ = lockstep([hook], [make_bucket({"p": given_}, step)])
        total += result
    assert torch.equal(total, gradient)
