"""Error feedback around any hook: nothing is lost, and unsuitable hooks are refused."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.inner_hooks import Recorder
from torch import Tensor

import commhooks
from commhooks.algorithms import ErrorFeedback
from commhooks.hook import registry
from commhooks.hook.options import option_names
from commhooks.testing.compare import mean_over_ranks
from commhooks.testing.probe import Trainer, draw_gradients, probe_parameters


def conserve(rank: int, size: int, dtype: torch.dtype, inner: Any, tolerance: float) -> None:
    """The applied averages plus the errors of all ranks are the sum of all gradients."""
    parameters = probe_parameters(dtype)
    hook = commhooks.create("error_feedback", inner=inner)
    trainer = Trainer(hook, parameters)
    applied = {name: tensor.double() for name, tensor in parameters.items()}
    given = {name: tensor.double() for name, tensor in parameters.items()}
    for step in range(4):
        of_ranks = [draw_gradients(parameters, peer, step) for peer in range(size)]
        for name, mean in mean_over_ranks(of_ranks, parameters).items():
            given[name] = given[name] + mean
        for name, average in trainer.step(of_ranks[rank]).items():
            applied[name] = applied[name] + average.double()
    unsent = 0.0
    for name in parameters:
        error = hook.state[name]["error"]
        assert error.dtype == torch.promote_types(dtype, torch.float32)
        left = error.double().contiguous()
        dist.all_reduce(left.div_(size))
        torch.testing.assert_close(applied[name] + left, given[name], rtol=0, atol=tolerance)
        unsent += left.abs().sum().item()
    assert unsent > 0.01  # otherwise error feedback had no effect


TOPMOST = Recorder(threshold=1.0).to_config()


@pytest.mark.parametrize("size", [1, 2, 3])
def test_unsent_part_is_kept(run_ranks: Any, size: int) -> None:
    run_ranks(conserve, size, torch.float64, TOPMOST, 1e-13)
    run_ranks(conserve, size, torch.float32, TOPMOST, 1e-5)


@pytest.mark.parametrize("inner", ["allreduce", "bf16"])
def test_rounding_errors_of_half_precision_are_kept(run_ranks: Any, inner: Any) -> None:
    """Except those of the sum over ranks, which is rounded twice per step."""
    run_ranks(conserve, 3, torch.bfloat16, inner, 4 * 2 * 2**-7)


def decay(rank: int, size: int, dtype: torch.dtype) -> None:
    """Compare errors of several steps with the formula; in the middle, training is resumed."""
    parameters = probe_parameters(dtype)
    hook = commhooks.create("error_feedback", inner=TOPMOST, decay=0.75)
    trainer = Trainer(hook, parameters)
    expected = {name: torch.zeros_like(tensor).float() for name, tensor in parameters.items()}
    for step in range(4):
        gradients = draw_gradients(parameters, rank, step)
        for name, gradient in gradients.items():
            p = gradient.float() + 0.75 * expected[name]
            sent = p.to(dtype).float()
            expected[name] = p - torch.where(sent.abs() >= 1.0, sent, 0.0)
        trainer.step(gradients)
        if step == 1:
            saved = trainer.handle.state_dict()
            hook = commhooks.create("error_feedback", inner=TOPMOST, decay=0.75)
            trainer.handle.replace(hook)
            trainer.handle.load_state_dict(saved)
        for name in parameters:
            error = hook.state[name]["error"]
            torch.testing.assert_close(error, expected[name], rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_error_decays(run_ranks: Any, dtype: torch.dtype) -> None:
    run_ranks(decay, 1, dtype)


def test_half_precision_on_the_wire_is_kept(run_ranks: Any) -> None:
    run_ranks(conserve, 1, torch.float32, "bf16", 1e-5)  # one rank: no rounding in the sum
    run_ranks(conserve, 1, torch.float64, "fp16", 1e-6)
    run_ranks(conserve, 1, torch.float64, {"name": "cast", "inner": TOPMOST}, 1e-13)


def outgrow_float16(rank: int, size: int, dtype: torch.dtype, inner: Any) -> None:
    """If one element in 50 is sent, the gradients of 50 steps add up to more than its maximum."""
    hook = ErrorFeedback(commhooks.create(inner))
    trainer = Trainer(hook, {"w": torch.zeros(500, dtype=dtype)})
    gradient = torch.full((500,), 3000.0, dtype=dtype)
    applied = torch.zeros(500)
    for _ in range(100):
        average = trainer.step({"w": gradient})["w"]
        assert average.isfinite().all()
        applied += average
    assert hook.state["w"]["error"].max() > 2**16
    assert torch.equal(applied + hook.state["w"]["error"], torch.full((500,), 300_000.0))


ONE_IN_FIFTY = {"name": "topk", "density": 0.02, "error_feedback": False, "warmup_steps": 0}


def test_errors_may_outgrow_float16(run_ranks: Any) -> None:
    run_ranks(outgrow_float16, 2, torch.float16, ONE_IN_FIFTY)
    run_ranks(
        outgrow_float16,
        2,
        torch.float32,
        {"name": "cast", "dtype": "float16", "inner": ONE_IN_FIFTY},
    )


@pytest.mark.parametrize(
    ("inner", "culprit"),
    [
        ("powersgd", "PowerSGD"),
        ("noop", "Noop"),
        ({"name": "error_feedback", "inner": "fp16"}, "ErrorFeedback"),
        ({"name": "schedule", "stages": [[0, "fp16"], [9, "powersgd"]]}, "PowerSGD"),
        ({"name": "skip_nonfinite", "inner": "fp16"}, "SkipNonfinite"),
    ],
)
def test_hooks_that_do_not_tell_their_contribution_are_refused(inner: Any, culprit: str) -> None:
    with pytest.raises(
        commhooks.CommHookOptionError, match=rf"tells its contribution .*; {culprit}\("
    ):
        commhooks.create("error_feedback", inner=inner)


FEEDABLE: list[dict[str, Any]] = [
    {"name": "allreduce"},
    {"name": "fp16"},
    {"name": "bf16"},
    {"name": "natural"},
    {"name": "qsgd"},
    {"name": "qsgd", "levels": 3, "block_size": 4096},
    {"name": "qsgd", "levels": 9, "norm": "l2"},
    {"name": "int8", "error_feedback": False},
    {"name": "int4", "error_feedback": False, "stochastic": True},
    {"name": "int2", "error_feedback": False},
    {"name": "fp8", "error_feedback": False, "format": "e5m2"},
    {"name": "fp4", "error_feedback": False, "format": "mxfp4"},
    {"name": "topk", "error_feedback": False, "density": 0.1, "warmup_steps": 0},
    {"name": "shared_topk", "error_feedback": False, "density": 0.1, "warmup_steps": 0},
    {"name": "threshold", "error_feedback": False, "value": 1.0},
    {"name": "cast", "inner": "qsgd", "dtype": "float64"},
    {"name": "schedule", "stages": [[0, "natural"], [50, "qsgd"]]},
    {"name": "route", "rules": [["w", "qsgd"]]},
]


def grow(rank: int, size: int, inner: dict[str, Any]) -> float:
    """Return the largest mean error of 100 steps as a share of the largest gradient."""
    hook = ErrorFeedback(commhooks.create(inner))
    trainer = Trainer(hook, {"w": torch.zeros(1024)})
    largest_error = largest_gradient = 0.0
    for step in range(100):
        generator = torch.Generator().manual_seed(1000 * step + rank)
        gradient = torch.randn(1024, generator=generator) ** 5  # a few are large
        trainer.step({"w": gradient})
        error = hook.state["w"]["error"].clone()
        dist.all_reduce(error.div_(size))
        largest_error = max(largest_error, error.norm().item())
        largest_gradient = max(largest_gradient, gradient.norm().item())
    return largest_error / largest_gradient


# Hooks that lose most, or in a way of their own. The others are exhaustive.
LOSSY = [
    inner
    for inner in FEEDABLE
    if inner["name"] in ("int2", "natural", "threshold", "topk") or inner.get("levels") == 3
]


@pytest.mark.parametrize(
    "inner",
    [
        pytest.param(inner, marks=[] if inner in LOSSY else [pytest.mark.exhaustive])
        for inner in FEEDABLE
    ],
    ids=str,
)
def test_errors_do_not_grow(run_ranks: Any, inner: dict[str, Any]) -> None:
    """Errors of hooks whose random rounding may lose more than the gradient reach 40 and more."""
    assert max(run_ranks(grow, 2, inner)) < 4


def can_be_fed_back(kind: type[commhooks.CommHook]) -> bool:
    flag: Any = kind.tells_contribution
    if isinstance(flag, bool) or flag is vars(commhooks.CommHook)["tells_contribution"]:
        return flag is True
    has_memory = "error_feedback" in option_names(kind)
    hook = commhooks.create(kind.name, **({"error_feedback": False} if has_memory else {}))
    return hook.tells_contribution


def test_all_hooks_that_tell_their_contribution_are_tested() -> None:
    own = map(registry._find, commhooks.algorithms.HOOKS)
    assert {kind.name for kind in own if can_be_fed_back(kind)} == {i["name"] for i in FEEDABLE}


@pytest.mark.parametrize(
    "inner",
    [
        {"name": "terngrad"},
        {"name": "terngrad", "clip": 0.0},
        {"name": "qsgd", "levels": 2},
        {"name": "qsgd", "levels": 8, "norm": "l2"},
        {"name": "randomk"},
        {"name": "route", "rules": [["*", {"name": "qsgd", "levels": 1}]]},
    ],
    ids=str,
)
def test_hooks_whose_errors_would_grow_are_refused(inner: dict[str, Any]) -> None:
    with pytest.raises(commhooks.CommHookOptionError, match="and would grow"):
        commhooks.create("error_feedback", inner=inner)


@dataclass
class Silent(commhooks.CommHook):
    """A hook that promises its contribution but does not set it."""

    tells_contribution = True

    async def reduce(self, bucket: commhooks.GradBucket, comm: commhooks.Communicator) -> Tensor:
        return await comm.all_reduce(bucket.buffer().div_(comm.size))


def be_silent(rank: int, size: int) -> None:
    trainer = Trainer(ErrorFeedback(Silent()))
    with pytest.raises(commhooks.CommHookError, match=r"Silent\(\) to set comm\.contribution"):
        trainer.step(draw_gradients(probe_parameters(), rank))


def test_missing_contribution_is_an_error(run_ranks: Any) -> None:
    run_ranks(be_silent, 1)


def recover(rank: int, size: int) -> None:
    """An infinite gradient on one rank does not change the errors of any rank."""
    parameters = probe_parameters()
    hook = ErrorFeedback(Recorder(threshold=1.0))
    trainer = Trainer(hook, parameters)
    trainer.step(draw_gradients(parameters, rank, 0))
    kept = hook.state["matrix"]["error"].clone()
    gradients = draw_gradients(parameters, rank, 1)
    if rank == 1:
        gradients["matrix"][0, 0] = -torch.inf
    found = trainer.step(gradients)
    assert not found["matrix"].isfinite().all()
    assert torch.equal(hook.state["matrix"]["error"], kept)
    assert kept.any()


def test_infinity_does_not_change_errors(run_ranks: Any) -> None:
    run_ranks(recover, 2)


def count_bytes(rank: int, size: int) -> None:
    parameters = {"even": torch.zeros(60)}
    trainer = Trainer(commhooks.create("error_feedback", inner="bf16"), parameters)
    trainer.step(draw_gradients(parameters, rank, 0))
    # A reduce-scatter and an all-gather of thirds of 60 numbers of 2 bytes.
    assert trainer.handle.stats().total.wire_bytes == 2 * 2 * 40


def test_wire(run_ranks: Any) -> None:
    run_ranks(count_bytes, 3)


@pytest.mark.parametrize("options", [{}, {"stochastic": True}], ids=str)
def test_both_roundings_of_two_shots_are_kept(run_ranks: Any, options: dict[str, Any]) -> None:
    """Each rank counts that of the averages which it sends. With 3 ranks, parts differ."""
    for size in (1, 3):
        inner = {"name": "bf16", "two_shot": True, **options}
        run_ranks(conserve, size, torch.float32, inner, 1e-5)
