"""The emulation of a GPU computes what a GPU computes, and finds errors of kernels."""

import pytest
import torch
from emulation import EmulationError, LocalSource, emulated
from emulation.sanitizer import run_sanitized

from commhooks import CommHookError, kernels
from commhooks.codecs.block import BlockCodec
from commhooks.codecs.formats import E4M3, integers, signs

BROKEN = LocalSource(
    "broken.cu",
    ("sum_by_halves", "misses_a_barrier", "waits_at_two_barriers", "shuffles_without_a_lane",
     "forgets_a_barrier", "reads_beyond_the_end", "all_collectives"),
)  # fmt: skip


@pytest.mark.parametrize("is_backward", [False, True])
def test_blocks_and_threads_work_together(is_backward):
    values = torch.arange(300.0)
    expected = values.view(3, 100).sum(1)
    with emulated(is_backward):
        kernels.launch(BROKEN, "sum_by_halves", (values, 100), grid=3, block=128)
    assert torch.equal(values[::100], expected)


@pytest.mark.parametrize("is_backward", [False, True])
@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        ("misses_a_barrier", r"waits at __syncthreads, broken.cu:\d+; thread .* has ended"),
        ("waits_at_two_barriers", r"__syncthreads, broken.cu:\d+; .* __syncthreads, broken.cu"),
        ("shuffles_without_a_lane", r"waits at __shfl_xor_sync, broken.cu:\d+; thread .* has end"),
    ],
)
def test_divergence_raises_instead_of_hanging(kernel, message, is_backward):
    values = torch.zeros(64)
    with emulated(is_backward), pytest.raises(EmulationError, match=message):
        kernels.launch(BROKEN, kernel, (values, 40), grid=1, block=64)


def test_a_missing_barrier_shows_when_threads_run_in_another_order():
    found = []
    for is_backward in (False, True):
        values = torch.arange(64.0)
        with emulated(is_backward):
            kernels.launch(BROKEN, "forgets_a_barrier", (values, 64), grid=1, block=64)
        found.append(values)
    assert not torch.equal(*found)


def test_collectives_of_a_warp():
    values = torch.randperm(32, generator=torch.Generator().manual_seed(0)).int()
    room = torch.cat([values, torch.zeros(32 * 14 + 1, dtype=torch.int32)])
    with emulated():
        kernels.launch(BROKEN, "all_collectives", (room, 14), grid=1, block=32)
    v = values.tolist()
    thirds = sum(1 << i for i in range(32) if v[i] % 3 == 0)
    for lane, found in enumerate(room[32:-1].view(32, 14).tolist()):
        same = sum(1 << i for i in range(32) if v[i] % 4 == v[lane] % 4)
        expected = [
            v[3], v[lane // 8 * 8 + 1], v[lane ^ 5], v[lane - 2] if lane >= 2 else v[lane],
            v[lane + 2] if lane % 16 < 14 else v[lane], thirds, 1, 1, same, sum(v), 31, 16,
            v[lane ^ 1] if lane < 4 else -1, 1,
        ]  # fmt: skip
        assert [number % 2**32 for number in found] == [number % 2**32 for number in expected]
    assert room[-1] == 32


def test_errors_name_wrong_arguments():
    with emulated():
        with pytest.raises(EmulationError, match="expected 2 arguments, found 1"):
            kernels.launch(BROKEN, "sum_by_halves", (torch.zeros(3),), grid=1, block=32)
        with pytest.raises(CommHookError, match=r"expected contiguous tensors on one device"):
            kernels.launch(BROKEN, "sum_by_halves", (torch.zeros(4, 4).T, 1), grid=1, block=32)
    with pytest.raises(CommHookError, match=r"expected tensors on a GPU, found cpu"):
        kernels.launch(BROKEN, "sum_by_halves", (torch.zeros(3), 3), grid=1, block=32)


def read_beyond_the_end() -> None:
    values = torch.zeros(64)
    kernels.launch(BROKEN, "reads_beyond_the_end", (values, 33), grid=1, block=32)


def encode_and_decode() -> None:
    """Encode and decode in tensors of exactly the required size."""
    for codec in (
        BlockCodec(integers(8), 32),
        BlockCodec(signs("mean"), 1056),
        BlockCodec(E4M3, 96),
    ):
        for numel, parts in ((1, 1), (33, 2), (2500, 3)):
            values = torch.randn(numel)
            length = -(-numel // parts)
            messages = torch.zeros(parts, codec.encoded_bytes(length), dtype=torch.uint8)
            codec.encode(values, messages, length, error=values / 8, keep_residual=True)
            codec.average(messages, torch.zeros(length), length)
            codec.assemble(messages, values, length, kept=torch.zeros(numel))


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
def test_an_access_outside_a_tensor_is_found():
    assert "heap-buffer-overflow" in run_sanitized(read_beyond_the_end)


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
def test_codecs_access_nothing_outside_their_tensors():
    assert run_sanitized(encode_and_decode) == ""
