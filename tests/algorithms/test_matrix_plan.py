"""Test how buckets are divided into matrices, and the byte counts of the paper's models."""

import math

import pytest
import torch
from torch import Tensor

from commhooks.algorithms.lowrank.batched_powersgd import plan_of_bucket
from commhooks.algorithms.lowrank.matrix_plan import MatrixPlan, RankRule, Side
from commhooks.algorithms.lowrank.powersgd import PowerSGD


def rule(rank: int = 2, min_rate: float = 2.0, two_sided: bool = True) -> RankRule:
    return PowerSGD(rank=rank, min_compression_rate=min_rate, two_sided=two_sided).rank_of


def plan_of(*gradients: Tensor, **options: object) -> MatrixPlan:
    names = [f"p{i}" for i in range(len(gradients))]
    return MatrixPlan.of_parameters(names, gradients, rule(**options))  # type: ignore[arg-type]


def meta(*shape: int) -> Tensor:
    return torch.empty(shape, device="meta")


# ------------------------------------------------------------------------------ the paper's models


def resnet18() -> list[Tensor]:
    """For CIFAR10, as in the paper: a 3x3 stem and 4 stages of 2 blocks."""
    tensors = [meta(64, 3, 3, 3), meta(64), meta(64)]
    inputs = 64
    for outputs in (64, 128, 256, 512):
        for block_inputs in (inputs, outputs):
            tensors += [meta(outputs, block_inputs, 3, 3), meta(outputs), meta(outputs)]
            tensors += [meta(outputs, outputs, 3, 3), meta(outputs), meta(outputs)]
            if block_inputs != outputs:
                tensors += [meta(outputs, block_inputs, 1, 1), meta(outputs), meta(outputs)]
        inputs = outputs
    return [*tensors, meta(10, 512), meta(10)]


def lstm() -> list[Tensor]:
    """For WikiText-2, as in the paper: the embedding is shared with the output."""
    vocabulary, width = 28869, 650
    layer = [meta(4 * width, width), meta(4 * width, width), meta(4 * width), meta(4 * width)]
    return [meta(vocabulary, width), *layer * 3, meta(vocabulary)]


@pytest.mark.parametrize(
    ("model", "ratios"),
    [(resnet18, {1: 243.3, 2: 135.8, 4: 72.1}), (lstm, {1: 309.7, 2: 203.1, 4: 120.3})],
)
@pytest.mark.parametrize("rank", [1, 2, 4])
def test_ratios_of_the_paper(model, ratios, rank):
    gradients = model()
    elements = sum(gradient.numel() for gradient in gradients)
    plan = plan_of(*gradients, rank=rank)
    sent = plan.exact_elements + sum(plan.factor_elements[side] for side in Side)
    assert round(elements / sent, 1) == ratios[rank]

    one_sided = plan_of(*gradients, rank=rank, two_sided=False)
    assert one_sided.exact_elements == plan.exact_elements
    assert one_sided.factor_elements == plan.factor_elements


def test_sizes_of_the_papers_models():
    assert sum(gradient.numel() for gradient in resnet18()) == 11_173_962
    assert round(sum(gradient.numel() for gradient in lstm()) * 4 / 2**20, 1) == 110.4


# ------------------------------------------------------------------------------------------- rules


def test_rule_compares_with_what_is_sent():
    # 40 x 20 at rank 2: 800 elements, or 2 * 60 = 120 in factors; 60 on average if one-sided
    assert rule(min_rate=800 / 120)(40, 20) == 2
    assert rule(min_rate=801 / 120)(40, 20) == 0
    assert rule(min_rate=800 / 60, two_sided=False)(40, 20) == 2
    assert rule(min_rate=801 / 60, two_sided=False)(40, 20) == 0


def test_rank_is_at_most_the_smaller_dimension():
    plan = plan_of(meta(3, 1000), rank=64, min_rate=0.0)
    assert plan.batches[0].rank == 3


def test_vectors_scalars_and_empty_tensors_are_exact():
    plan = plan_of(meta(7), meta(), meta(0, 5), meta(40, 20), meta(5, 0), meta(1, 9), min_rate=0.0)
    assert [batch.shape for batch in plan.batches] == [(1, 40, 20)]
    assert plan.exact == ((0, 8), (808, 817))


# ----------------------------------------------------------------------------------------- layouts


@pytest.mark.parametrize(
    ("gradient", "shape"),
    [
        (torch.empty(8, 6, 3, 3), (8, 54)),
        (torch.empty(8, 6, 3, 3).to(memory_format=torch.channels_last), (8, 54)),
        (torch.empty(6, 40).T, (6, 40)),
        (torch.empty(8, 6, 5).permute(1, 2, 0), (8, 30)),
        (torch.empty(1, 40, 30), (40, 30)),
        (torch.empty(40, 1, 30).to(memory_format=torch.contiguous_format), (40, 30)),
    ],
)
def test_rows_are_the_outermost_dimension_in_memory(gradient, shape):
    (batch,) = plan_of(gradient, min_rate=0.0).batches
    assert (batch.rows, batch.columns) == shape


# ----------------------------------------------------------------------------------------- batches


def test_matrices_at_equal_distances_are_one_batch_of_the_buffer():
    layer = [meta(20, 30), meta(20), meta(30, 20)]
    plan = plan_of(*layer * 3, min_rate=0.0)
    assert [batch.keys for batch in plan.batches] == [("p0", "p3", "p6"), ("p2", "p5", "p8")]
    assert plan.exact == ((600, 620), (1820, 1840), (3040, 3060))

    buffer = torch.arange(3.0 * 1220)[None].repeat(2, 1)[1]  # with an offset in its storage
    view = plan.gradients(buffer)[0]
    assert view.shape == (3, 20, 30)
    assert torch.equal(view[2].flatten(), buffer[2440:3040])
    assert view.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()


def test_unequal_distances_begin_another_batch():
    matrix = meta(20, 30)
    plan = plan_of(matrix, matrix, meta(3), matrix, meta(5), matrix, min_rate=0.0)
    assert [batch.keys for batch in plan.batches] == [("p0", "p1"), ("p3", "p5")]
    assert [batch.spacing for batch in plan.batches] == [600, 605]


def bucket_plan_of(*gradients: Tensor, **options: object) -> MatrixPlan:
    names = [f"p{i}" for i in range(len(gradients))]
    return plan_of_bucket("key", names, gradients, rule(**options))  # type: ignore[arg-type]


@pytest.mark.parametrize("numel", [1, 2, 3, 8, 9, 10, 99, 100, 101, 5041, 100_003])
def test_a_bucket_of_vectors_is_nearly_square(numel):
    lengths = [numel // 3, 0, numel - numel // 3]
    plan = bucket_plan_of(*(meta(length) for length in lengths), rank=1, min_rate=0.0)
    (batch,) = plan.batches
    assert 0 <= batch.rows - batch.columns <= 2
    assert plan.exact_elements == numel - batch.rows * batch.columns < batch.columns
    assert [shape for _, shape in plan.error_shapes] == [(length,) for length in lengths]


@pytest.mark.parametrize(
    ("shapes", "columns"),
    [
        ([(256, 64), (64, 256), (192, 64), (64, 64), (64,)], 256),  # 210 would be square
        ([(64, 512), (32, 16, 3, 3), (10, 64)], 256),  # half of 512; 195 would be square
        ([(100, 30), (100,)], 60),  # twice 30 is near 55
        ([(3, 5000)], 125),  # a part of 5000 that is near 122
        ([(40, 997)], 199),  # a prime that is too long: no better than square
    ],
)
def test_rows_of_a_bucket_suit_those_of_its_matrices(shapes, columns):
    (batch,) = bucket_plan_of(*(meta(*shape) for shape in shapes), rank=1).batches
    assert batch.columns == columns
    square = 2 * math.sqrt(batch.rows * batch.columns)
    assert batch.rows + batch.columns <= 1.07 * square


def test_a_matrix_of_low_rank_keeps_a_low_rank_in_the_bucket():
    matrix = torch.randn(200, 1) @ torch.randn(1, 48)
    plan = bucket_plan_of(torch.randn(7), matrix, rank=1)
    bucket = torch.cat([torch.zeros(7), matrix.flatten()])
    assert plan.batches[0].columns == 96
    (view,) = plan.gradients(bucket)
    assert torch.linalg.matrix_rank(view) <= 2 * 2  # two per row, which begin at an offset


def test_small_and_empty_buckets_are_exact():
    assert bucket_plan_of(meta(0)) == MatrixPlan((), (), ())
    assert bucket_plan_of(meta(30)) == MatrixPlan((), ((0, 30),), ())
