"""What `auto` derives from measurements, without processes."""

import time
from contextlib import suppress

import pytest
import torch
from torch import Tensor

from commhooks.algorithms.adaptive.choices import group_parameters, wire_bytes_of
from commhooks.algorithms.adaptive.link import UNKNOWN, Probe, link_of, probe_of
from commhooks.algorithms.exact import AllReduce
from commhooks.algorithms.wrappers.timing import HOST, HookTiming
from commhooks.algorithms.wrappers.trial import Check, draw_sample
from commhooks.hook.derived_bucket import bucket_with
from commhooks.planning.plan import label_of
from reducer import GradBucket

# ---------------------------------------------------------------------------------------- link


def test_a_probe_shows_the_costs_of_rounds_and_bytes_in_spite_of_late_threads() -> None:
    """Six small messages, of which the first waits for a peer; then three long ones."""
    nbytes = 1 << 20
    long = 2 * 1e-4 + nbytes / 1e8  # two ranks: as many bytes, in two rounds
    took = [0.5, 2e-4, 9e-3, 2e-4, 3e-4, 2e-4, long / 2, long, long]
    moments = [1]
    for seconds in took:
        moments.append(moments[-1] + round(seconds * 1e9))
    found = probe_of(HOST, list(moments), 0.03, nbytes, "gloo", 2)
    assert found.byte_seconds == pytest.approx(1e-8, rel=0.02)
    assert 0 < found.round_seconds <= 2e-4
    assert found.byte_cpu_seconds == pytest.approx(0.01 / nbytes, rel=0.02)


def test_a_rank_that_is_late_in_a_probe_does_not_make_the_link_faster() -> None:
    """It finds what its peer has sent before, and the other one has waited as long."""
    probes = [Probe(2e-4, 0.75e-9, 3e-9), Probe(1e-4, 1.25e-9, 1e-9)]
    found = link_of(probes, UNKNOWN)
    assert found == Probe(1e-4, pytest.approx(1e-9), 1e-9)
    assert link_of([Probe(5e-4, 2e-9, 2e-9)], found) == Probe(1e-4, 2e-9, 1e-9)
    assert link_of([], found) == found
    assert link_of([], UNKNOWN) == UNKNOWN


# --------------------------------------------------------------------------------- local seconds


def test_a_core_that_others_use_does_not_make_a_hook_slower() -> None:
    async def preempted() -> None:
        time.sleep(0.3)  # as if another thread had the core

    seen = HookTiming()
    with suppress(StopIteration):
        seen.observe(preempted()).send(None)
    assert sum(seen.local_seconds) < 0.1


# --------------------------------------------------------------------------- groups and samples


def test_a_formula_that_reads_numbers_is_not_used() -> None:
    """It is another package's, and against the rules; the bytes of trials take its place."""

    class Counting(AllReduce):
        def wire_bytes(self, bucket: GradBucket, size: int) -> int:
            return size * int(bucket.buffer().count_nonzero())

    parameters = {"w": torch.zeros(8, 8)}
    assert wire_bytes_of(Counting(), ["w"], parameters, 2) is None
    assert wire_bytes_of(AllReduce(), ["w"], parameters, 2) == 256


def test_groups_are_those_of_a_bucket_with_a_role_and_a_similar_size() -> None:
    shapes: dict[str, tuple[int, ...]] = {
        "h.0.w": (64, 64),
        "h.1.w": (64, 64),
        "h.0.b": (64,),
        "tokens": (64, 64),
        "head": (4, 64),
        "far": (64, 64),
    }
    parameters = {name: torch.zeros(shape) for name, shape in shapes.items()}
    buckets = [("h.0.w", "h.1.w", "h.0.b", "tokens", "head"), ("far",)]
    groups = group_parameters(buckets, parameters, {"h.0.b"}, {"tokens": "embedding"})
    found = [(set(g.names), g.bucket, g.is_exact) for g in groups]
    assert found == [
        ({"h.0.w", "h.1.w"}, 0, False),
        ({"h.0.b"}, 0, True),
        ({"tokens"}, 0, False),
        ({"head"}, 0, False),
        ({"far"}, 1, False),
    ]
    assert label_of(groups[0].names) == "h.*.w \N{MULTIPLICATION SIGN}2"
    assert label_of(groups[3].names) == "head"


def bucket_of(shapes: dict[str, tuple[int, ...]]) -> GradBucket:
    tensors = [torch.zeros(shape) for shape in shapes.values()]
    tensors[0] = tensors[0].T.contiguous().T  # strides that are not trivial
    flat = torch.arange(float(sum(t.numel() for t in tensors)))
    return GradBucket(flat, tensors, list(shapes))


def test_a_sample_has_whole_parameters_or_evenly_spaced_rows() -> None:
    bucket = bucket_of({"a": (8, 6), "b": (5,), "c": (100, 10)})
    gradients = dict(zip(bucket.names, bucket.gradients(), strict=True))
    whole = draw_sample(bucket, ["a", "b"], 60, turn=0)
    assert whole.names == ["a", "b"]
    assert torch.equal(whole.gradients()[0], gradients["a"])
    assert whole.gradients()[0].stride() == gradients["a"].stride()
    assert draw_sample(bucket, ["a", "b"], 50, turn=1).names == ["b"]
    rows = draw_sample(bucket, ["c"], 300, turn=5)
    assert torch.equal(rows.gradients()[0], gradients["c"][::4])
    columns = draw_sample(bucket, ["a"], 2)  # less than a row
    assert torch.equal(columns.gradients()[0], gradients["a"][::8, ::3])


@pytest.mark.parametrize("shape", [(1, 4000), (4, 4000), (7, 300), (3000,), (2, 3, 500), (33, 31)])
def test_a_sample_is_never_larger_than_its_limit(shape: tuple[int, ...]) -> None:
    sample = draw_sample(bucket_of({"first": (1, 1), "p": shape}), ["p"], 1000)
    assert 300 < sample.buffer().numel() <= 1000


def test_a_sample_has_what_has_not_been_sent() -> None:
    bucket = bucket_of({"a": (8, 6), "b": (5,)})
    before = bucket.buffer().clone()

    def residual(name: str, gradient: Tensor, where: slice) -> Tensor | None:
        return before[:48][where] if name == "a" else None  # as it lies in memory

    sample = draw_sample(bucket, ["a", "b"], 60, residual=residual)
    assert torch.equal(sample.gradients()[0], 2 * bucket.gradients()[0])
    assert torch.equal(sample.gradients()[1], bucket.gradients()[1])
    assert torch.equal(bucket.buffer(), before)


class OneRank:
    """A communicator of one rank."""

    size = 1

    async def all_reduce(self, message: Tensor) -> Tensor:
        return message


def test_a_check_compares_the_same_elements_of_each_parameter() -> None:
    bucket = bucket_of({"a": (8, 6), "b": (5,), "c": (100, 10)})
    bucket = bucket_with(bucket, bucket.buffer(), step=3)
    groups = {2: ("a", "c"), 4: ("b",)}  # of the first, every 11th, from the 3rd on
    residuals = {"a": 2.0, "b": 3.0, "c": None}

    def residual(name: str, gradient: Tensor, where: slice) -> Tensor | None:
        found = residuals[name]
        return None if found is None else torch.full((gradient.numel(),), found)[where]

    flat = bucket.buffer().clone()
    drawn = Check(bucket, groups, residual, 100)
    p = [flat[3:48:11] + 2, flat[48:53] + 3, flat[56::11]]
    assert torch.equal(drawn.p, torch.cat(p))
    with pytest.raises(StopIteration) as end:
        drawn.squares(flat, OneRank()).send(None)  # type: ignore[arg-type]
    squares = {i: found.tolist() for i, found in end.value.value.items()}
    of_two = float(torch.cat([p[0], p[2]]).double().square().sum())
    assert squares == {2: [4.0 * 5, of_two], 4: [9.0 * 5, float(p[1].square().sum())]}
    with pytest.raises(StopIteration) as end:
        Check(bucket, {}, residual, 100).squares(flat, OneRank()).send(None)  # type: ignore[arg-type]
    assert end.value.value == {}
