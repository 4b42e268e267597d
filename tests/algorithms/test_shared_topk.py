"""shared_topk: the documented algorithm, and bytes that do not grow with the ranks."""

import textwrap

import pytest
import torch
from support.lockstep import lockstep, make_bucket
from support.states import hook_state

import commhooks
from commhooks.algorithms.sparse import shared_topk
from commhooks.algorithms.sparse.messages import gather_bytes
from commhooks.algorithms.sparse.shared_topk import SharedTopK
from commhooks.comm.wire import all_reduce_bytes
from commhooks.testing.probe import Trainer


def run_documented(names: dict[str, object]) -> None:
    """Run the algorithm that opens the file, with ``names`` as its variables."""
    text = (shared_topk.__doc__ or "").partition("::\n\n")[2].partition("\n\nIn the paper")[0]
    exec(textwrap.dedent(text), names)


@pytest.mark.parametrize("beta", [1.0, 0.25])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_documented_algorithm_gives_the_results_and_the_errors(size, beta):
    n, k = 420, 60
    hooks = [SharedTopK(density=k / n, warmup_steps=0, beta=beta) for _ in range(size)]
    names = {
        "torch": torch,
        "N": size,
        "k": k,
        "beta": beta,
        "e": [torch.zeros(n) for _ in range(size)],
        "parts": [slice(p * n // size, (p + 1) * n // size) for p in range(size)],
    }
    generator = torch.Generator().manual_seed(size)
    for step in range(5):
        gradients = [torch.randn(n, generator=generator) for _ in range(size)]
        results, _ = lockstep(hooks, [make_bucket({"p": g.clone()}, step) for g in gradients])
        names |= {"g": gradients, "t": step}
        run_documented(names)
        for result in results:
            assert torch.equal(result, results[0])
            torch.testing.assert_close(result, names["result"], rtol=1e-5, atol=1e-6)
        assert int(results[0].count_nonzero()) == k
        for expected, hook in zip(names["e"], hooks, strict=True):
            torch.testing.assert_close(hook.state["p"]["error"], expected, rtol=1e-5, atol=1e-6)


def test_every_rank_chooses_for_every_part():
    """Each rank's gradient is one large number, which is sent only if that rank chooses."""
    size, n = 3, 300
    for step in range(size):
        hooks = [SharedTopK(density=0.01, warmup_steps=0) for _ in range(size)]
        gradients = [torch.zeros(n) for _ in range(size)]
        for rank, gradient in enumerate(gradients):
            gradient[10 + rank :: 100] = 1 + rank
        results, _ = lockstep(hooks, [make_bucket({"p": g}, step) for g in gradients])
        expected = [100 * part + 10 + (part - step) % size for part in range(size)]
        assert results[0].nonzero().flatten().tolist() == expected


def test_contribution_is_what_is_sent():
    hooks = [SharedTopK(density=0.1, warmup_steps=0, error_feedback=False) for _ in range(3)]
    buckets = [make_bucket({"p": torch.randn(500)}) for _ in range(3)]
    gradients = [bucket.buffer().clone() for bucket in buckets]
    results, comms = lockstep(hooks, buckets, wants_contribution=True)
    sent = torch.stack([comm.contribution for comm in comms])
    torch.testing.assert_close(sent.mean(0), results[0])
    for own, gradient in zip(sent, gradients, strict=True):
        torch.testing.assert_close(own[own != 0], gradient[own != 0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("density", [0.001, 0.01, 0.3])
@pytest.mark.parametrize("numel", [4096, 100_003, 6_553_600])
def test_bytes_are_below_twice_the_message_at_any_number_of_ranks(numel, density, dtype):
    hook = SharedTopK(density=density, warmup_steps=0)
    bucket = make_bucket({"p": torch.empty(numel, dtype=dtype)})
    for size in (2, 3, 8, 64, 1000, 4096, 100_000):
        count = max(1, round(density * -(-numel // size))) * size
        found = hook.wire_bytes(bucket, size)
        if numel >= 64 * size:
            assert found < 2 * gather_bytes(bucket, count, 2), size
        assert found <= all_reduce_bytes(bucket.buffer().nbytes, size)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("numel", [1, 2, 3, 100, 101, 1000])
def test_bytes_are_those_of_the_formula(numel, size):
    hooks = [SharedTopK(density=0.1, warmup_steps=0) for _ in range(size)]
    buckets = [make_bucket({"p": torch.randn(numel)}) for _ in range(size)]
    _, comms = lockstep(hooks, buckets)
    for comm in comms:
        *indices, values = (tensor.nbytes for tensor in comm.sent)
        expected = (size - 1) * sum(indices) + 2 * (size - 1) * -(-values // size)
        assert hooks[0].wire_bytes(buckets[0], size) == expected


def send_rounds(rank: int, size: int) -> None:
    """Only rank 1 has a gradient, whose steps are all even."""
    inner = {"name": "shared_topk", "density": 0.05, "warmup_steps": 0}
    trainer = Trainer(
        commhooks.create("diloco", period=4, outer_lr=1.0, outer_momentum=0.0, inner=inner),
        {"p": torch.zeros(40)},
    )
    optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.1)
    gradient = torch.zeros(40)
    gradient[3] = rank
    for _ in range(13):
        trainer.step({"p": gradient})
        optimizer.step()
    # After rounds of 4 steps of 0.1 each, averaged over 2 ranks.
    assert hook_state(trainer.handle)["p"]["anchor"][3] < -0.2


def test_every_rank_chooses_in_rounds_of_diloco(run_ranks):
    run_ranks(send_rounds, 2)
