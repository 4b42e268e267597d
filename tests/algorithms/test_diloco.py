"""Test DiLoCo against its definition, simulated in one process, and against numbers by hand."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from support.states import hook_state
from test_gossip import loss_of, make_net, rows, train
from torch import Tensor, nn

import commhooks
from commhooks.algorithms.averaging.diloco import DiLoCo, FragmentSchedule, runs_of
from commhooks.planning import Plan
from commhooks.testing.probe import GradientProbe, Trainer, draw_gradients, probe_parameters

PARAMETERS = probe_parameters()


class Outer:
    """The oracle of one parameter: torch's SGD on an anchor per rank, with what was sent before."""

    def __init__(self, hook: DiLoCo, start: Tensor, size: int) -> None:
        self.hook = hook
        self.anchors = [nn.Parameter(start.clone()) for _ in range(size)]
        momentum = hook.outer_momentum
        self.optimizers = [
            torch.optim.SGD([a], lr=hook.outer_lr, momentum=momentum, nesterov=momentum > 0)
            for a in self.anchors
        ]
        self.sent: dict[int, list[Tensor]] = {}  # by step

    def __call__(self, step: int, of_ranks: list[nn.Parameter], *, is_due: bool) -> None:
        if is_due:
            differences = zip(self.anchors, of_ranks, strict=True)
            self.sent[step] = [(a - p).detach() for a, p in differences]
        if step - self.hook.delay in self.sent:
            self.step([self.mean(step - self.hook.delay)] * len(of_ranks), of_ranks)

    def mean(self, step: int) -> Tensor:
        return torch.stack(self.sent[step]).mean(0)

    def step(self, gradients: list[Tensor], of_ranks: list[nn.Parameter]) -> None:
        for anchor, optimizer, gradient, parameter in zip(
            self.anchors, self.optimizers, gradients, of_ranks, strict=True
        ):
            anchor.grad = gradient.clone()
            optimizer.step()
            own = self.hook.merge * parameter
            parameter.copy_((own + (1 - self.hook.merge) * anchor).detach())


def simulate_training(size: int, steps: int, hook: DiLoCo) -> Tensor:
    nets = [make_net().double() for _ in range(size)]
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9) for net in nets]
    lists = [list(net.parameters()) for net in nets]
    fragment_of = runs_of([p.numel() for p in lists[0]], hook.fragments)
    outer: list[Outer] = []
    for step in range(steps):
        for rank, net in enumerate(nets):
            net.zero_grad()
            loss_of(net, rank, step).backward()
        local = step - hook.start_step
        if local == 0:
            outer = [Outer(hook, p.detach(), size) for p in lists[0]]
        together = size if local < 0 else hook.ranks_per_node
        with torch.no_grad():
            for index, of_ranks in enumerate(map(list, zip(*lists, strict=True))):
                for first in range(0, size, together):
                    node = of_ranks[first : first + together]
                    mean = torch.stack([p.grad for p in node]).mean(0)
                    for parameter in node:
                        parameter.grad.copy_(mean)
                if local >= 0:
                    turn = fragment_of[index] * hook.period // hook.fragments
                    is_due = local > 0 and local % hook.period == turn
                    outer[index](step, of_ranks, is_due=is_due)
        for optimizer in optimizers:
            optimizer.step()
    return rows(lists).detach()


HOOKS = {
    "DiLoCo": DiLoCo(period=2, start_step=1),
    "average of models": DiLoCo(period=3, outer_lr=1.0, outer_momentum=0.0),
    "fragments": DiLoCo(period=3, fragments=3),
    "more fragments than steps": DiLoCo(period=2, fragments=4),
    "nodes": DiLoCo(period=3, ranks_per_node=3),
    "delay": DiLoCo(period=4, delay=2, merge=0.5),
    "delay of a period": DiLoCo(period=2, delay=2, outer_lr=0.4),
    "streaming": DiLoCo(period=3, fragments=3, delay=2, merge=0.5, start_step=1),
}
STEPS = 11


@pytest.mark.parametrize(
    ("name", "size", "stock"),
    [(name, 3, False) for name in HOOKS]
    + [("streaming", 1, False), ("streaming", 2, True)]
    + [
        pytest.param(name, *case, marks=pytest.mark.exhaustive)
        for name in HOOKS
        if name != "streaming"
        for case in [(1, False), (2, True)]
    ],
)
def test_training_is_what_the_definition_says(
    run_ranks: Any, name: str, size: int, stock: bool
) -> None:
    hook = HOOKS[name]
    if size % hook.ranks_per_node:
        pytest.skip("unequal nodes")
    results = run_ranks(train, size, hook, range(STEPS), stock)
    expected = simulate_training(size, STEPS, hook)
    for (found, *_), of_rank in zip(results, expected, strict=True):
        torch.testing.assert_close(found, of_rank, rtol=1e-9, atol=1e-11)
    if size > hook.ranks_per_node:
        assert not torch.equal(results[0][0], results[1][0])
        assert results[0][3]["consensus_distance"] > 0


@pytest.mark.parametrize(
    "name",
    [
        "streaming",
        *(pytest.param(n, marks=pytest.mark.exhaustive) for n in ("DiLoCo", "delay")),
    ],
)
def test_resumes_bitwise(run_ranks: Any, name: str) -> None:
    """At 5 and at 6 steps averages are under way."""
    hook = HOOKS[name]
    whole = run_ranks(train, 2, hook, range(STEPS), False)
    for step in (5, 6):
        half = run_ranks(train, 2, hook, range(step), False)
        states = [saved for _, saved, *_ in half]
        resumed = run_ranks(train, 2, hook, range(step, STEPS), False, states)
        for (found, *_), (expected, *_) in zip(resumed, whole, strict=True):
            assert torch.equal(found, expected)


# --------------------------------------------------------------------------------------- by hand


def take_steps(
    rank: int, size: int, options: dict[str, Any], gradients: list[list[float]]
) -> dict[str, float]:
    """Train scalars a and b with SGD at a learning rate of 1; gradients by rank and step."""
    probe = GradientProbe({name: torch.zeros(()) for name in "ab"})
    model = commhooks.DistributedDataParallel(probe)
    commhooks.register(model, "diloco", **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for gradient in gradients[rank]:
        optimizer.zero_grad()
        model(dict.fromkeys("ab", torch.tensor(gradient))).backward()
        optimizer.step()
    return {name: parameter.item() for name, parameter in probe.named_parameters()}


def test_fragments_and_delay_by_hand(run_ranks: Any) -> None:
    """Rank 0 has gradients of 1, rank 1 of 3, so parameters are -t and -3t until the first average.

    a: In step 4, 4 and 12 are sent; the mean is 8. In step 5, v = 8 and the anchor becomes
    0 - (8 + 8/2)/2 = -6; the parameters -5 and -15 become -5.5 and -10.5. In step 8 they are -8.5
    and -19.5, and 2.5 and 13.5 are sent: 8. In step 9, v = 12, the anchor -6 - (8 + 6)/2 = -13, and
    -9.5 and -22.5 become -11.25 and -17.75.

    b: In step 2, 2 and 6: 4. In step 3, v = 4, the anchor -3; -3 and -9 become -3 and -6. In step
    6, 3 and 12: 7.5. In step 7, v = 9.5, the anchor -3 - (7.5 + 4.75)/2 = -9.125; -7 and -18 become
    -8.0625 and -13.5625, and three steps follow.
    """
    options = {"period": 4, "fragments": 2, "delay": 1, "merge": 0.5}
    options |= {"outer_lr": 0.5, "outer_momentum": 0.5}
    first, second = run_ranks(take_steps, 2, options, [[1.0] * 10, [3.0] * 10])
    assert first == {"a": -12.25, "b": -11.0625}
    assert second == {"a": -20.75, "b": -22.5625}


# ------------------------------------------------------------------------------------- the parts


def test_fragments_are_runs_of_about_equal_size() -> None:
    assert runs_of([10] * 6, 3) == [0, 0, 1, 1, 2, 2]
    assert runs_of([1, 1, 1, 97], 2) == [0, 0, 0, 1]
    assert runs_of([5, 0, 0], 2) == [1, 1, 1]
    assert runs_of([0, 0], 2) == [0, 0]
    assert runs_of([3, 4, 5], 1) == [0, 0, 0]


def test_units_are_in_one_fragment_each() -> None:
    parameters = {name: torch.empty(size) for name, size in zip("abcd", [6, 1, 1, 4], strict=True)}
    schedule = FragmentSchedule(start=0, period=2, fragments=2)
    schedule.assign(parameters, [["x", "a"], ["b"], ["c", "d"], ["y"]])
    assert [schedule.is_due(name, 2) for name in "abcd"] == [True, False, False, False]
    schedule.assign({name: parameters[name] for name in "cd"})
    assert [schedule.is_due(name, 2) for name in "cd"] == [True, False]


def in_half_precision(rank: int, size: int) -> dict[str, Tensor]:
    """Train with numbers that bfloat16 cannot add up, and lose a step."""
    parameters = {"a": torch.full((4,), 256.0).bfloat16()}
    model = commhooks.DistributedDataParallel(GradientProbe(parameters))
    hook = commhooks.register(model, "diloco", period=1, outer_lr=1.0, outer_momentum=0.0).hook
    for step in range(3):
        (parameter,) = model.parameters()
        model({"a": torch.ones(4).bfloat16()}).backward()
        with torch.no_grad():
            parameter -= 2 * rank if step < 2 else 0  # at 256, bfloat16 has steps of 2
    return {**hook.state["a"], "parameter": parameter.detach().clone()}


def test_the_outer_optimizer_is_in_float32_for_half_precision_models(run_ranks: Any) -> None:
    first, second = run_ranks(in_half_precision, 2)
    assert {first[name].dtype for name in ("anchor", "momentum")} == {torch.float32}
    assert torch.equal(first["anchor"], torch.full((4,), 254.0))
    assert torch.equal(first["anchor"], second["anchor"])
    assert torch.equal(first["parameter"], second["parameter"])


@dataclass
class Rounds(commhooks.CommHook):
    """Average exactly, and note what was sent: step, index, whether it is last, and the names."""

    calls: list[tuple[int, int, bool, list[str]]] = field(
        default_factory=list, init=False, repr=False, compare=False
    )

    async def reduce(self, bucket: commhooks.GradBucket, comm: commhooks.Communicator) -> Tensor:
        self.calls.append((bucket.step, bucket.index(), bucket.is_last(), bucket.names))
        return await comm.all_reduce(bucket.buffer().div_(comm.size))


def note_rounds(rank: int, size: int) -> list[tuple[int, int, bool, list[str]]]:
    inner = Rounds()
    probe = GradientProbe({name: torch.zeros(8) for name in "abc"})
    options: dict[str, Any] = {"bucket_cap_mb": 1e-5, "stable_buckets": True}
    model = commhooks.DistributedDataParallel(probe, **options)
    commhooks.register(model, DiLoCo(period=3, fragments=2, start_step=1, inner=inner))
    for _ in range(7):
        model(dict.fromkeys("abc", torch.ones(8))).backward()
    return inner.calls


def test_the_inner_hook_counts_rounds_and_its_own_buckets(run_ranks: Any) -> None:
    """The first fragment is due in steps 4 and 7, the second in 2 and 5."""
    (calls, _) = run_ranks(note_rounds, 2)
    assert calls == [
        (0, 0, False, ["c"]),
        (0, 1, True, ["b"]),
        (0, 0, True, ["a"]),
        (1, 0, False, ["c"]),
        (1, 1, True, ["b"]),
    ]


def lose(rank: int, size: int, options: dict[str, Any]) -> list[float]:
    """Fail in step 8, when an average is under way; return the numbers of a rank."""
    probe = GradientProbe({"a": torch.zeros(8)})
    model = commhooks.DistributedDataParallel(probe)
    handle = commhooks.register(model, "diloco", period=4, outer_momentum=0.0, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    reduce = handle.hook.reduce  # type: ignore[union-attr]

    async def fail(*_: Any) -> Tensor:
        raise ValueError("broken")

    found = []
    for step in range(11):
        handle.hook.reduce = fail if (rank, step) == (0, 8) else reduce  # type: ignore[union-attr]
        optimizer.zero_grad()
        loss = model({"a": torch.full((8,), 1.0 + 2 * rank)})
        if step == 8:
            with pytest.raises(commhooks.CommHookError, match="broken"):
                loss.backward()
        else:
            loss.backward()
            optimizer.step()
        found.append(probe.a[0].item())
    return found


@pytest.mark.parametrize("options", [{"delay": 1}, {"delay": 4}], ids=str)
def test_models_are_averaged_after_a_failed_step(run_ranks: Any, options: Any) -> None:
    first, second = run_ranks(lose, 2, options)
    before, after, later = list(zip(first, second, strict=True))[8:]
    mean = sum(before) / 2  # one of them may have taken the last average
    assert after == pytest.approx((mean - 1, mean - 3))
    assert later == pytest.approx((mean - 2, mean - 6))


def lose_a_local_step(rank: int, size: int, options: dict[str, Any]) -> list[tuple[int, bool]]:
    """Fail in step 5 on rank 0. Return the number of steps that succeeded, after each one."""
    probe = GradientProbe({"a": torch.zeros(8), "b": torch.zeros(8)})
    model = commhooks.DistributedDataParallel(probe)
    handle = commhooks.register(model, "diloco", period=4, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reduce = handle.hook.reduce  # type: ignore[union-attr]

    async def fail(*_: Any) -> Tensor:
        raise ValueError("broken")

    found = []
    for step in range(14):
        handle.hook.reduce = fail if (rank, step) == (0, 5) else reduce  # type: ignore[union-attr]
        optimizer.zero_grad()
        loss = model({"a": torch.full((8,), 1.0 + rank), "b": torch.ones(8)})
        has_failed = False
        try:
            loss.backward()
            optimizer.step()
        except commhooks.CommHookError:
            has_failed = True
        found.append((model.reducer.steps, has_failed))
    return found


@pytest.mark.parametrize("options", [{}, {"delay": 2, "fragments": 2}], ids=str)
def test_a_local_step_that_fails_on_one_rank_fails_once_on_each(
    run_ranks: Any, options: Any
) -> None:
    """If the first rank sent before the other one has noticed, it would be a step behind."""
    alone, other = run_ranks(lose_a_local_step, 2, options)
    noticed = next(step for step, (_, has_failed) in enumerate(other) if has_failed)
    assert alone[5] == (5, True)
    assert noticed > 5
    assert alone[noticed:] == [(steps, False) for steps, _ in other[noticed:]]
    assert [has_failed for _, has_failed in alone + other].count(True) == 2


def leave_out(rank: int, size: int) -> float:
    """Use b in all steps but that in which an average of b is to arrive."""
    probe = GradientProbe({name: torch.zeros(()) for name in "ab"})
    options: dict[str, Any] = {"bucket_cap_mb": 1e-6, "stable_buckets": True}
    options |= {"find_unused_parameters": True, "skip_all_reduce_unused_params": True}
    model = commhooks.DistributedDataParallel(probe, **options)
    outer = {"outer_lr": 1.0, "outer_momentum": 0.0}
    commhooks.register(model, "diloco", period=4, delay=1, **outer)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for step in range(7):
        optimizer.zero_grad()
        gradient = torch.tensor(1.0 + 2 * rank)
        model(dict.fromkeys("a" if step == 5 else "ab", gradient)).backward()
        optimizer.step()
    return probe.b.item()


def test_an_average_of_a_bucket_that_is_left_out_arrives_in_the_next_step(run_ranks: Any) -> None:
    """In step 4, 4 and 12 are sent; in step 6 the mean, 8, arrives, and 1 and 3 follow."""
    assert run_ranks(leave_out, 2) == [-9.0, -11.0]


def not_finite(rank: int, size: int, options: dict[str, Any]) -> list[bool]:
    """Break the parameter of rank 1 before step 2, and mend it before step 4."""
    probe = GradientProbe({"a": torch.zeros(8)})
    model = commhooks.DistributedDataParallel(probe)
    handle = commhooks.register(model, "diloco", period=2, **options)
    found = []
    for step in range(9):
        with torch.no_grad():
            if rank == 1 and step in (2, 4):
                probe.a.fill_(torch.inf if step == 2 else 1.0)
        model.zero_grad()
        model({"a": torch.ones(8)}).backward()
        found.append(bool(probe.a.grad.isfinite().all()))
        entries = hook_state(handle).get("a", {}).items()
        assert all(t.isfinite().all() for name, t in entries if name != "outer_gradient")
    assert probe.a.isfinite().all()
    return found


@pytest.mark.parametrize(
    ("options", "bad"),
    [({}, {2: (0, 1)}), ({"delay": 1}, {3: (0, 1)})],
    ids=str,
)
def test_an_average_that_is_not_finite_shows_in_gradients(
    run_ranks: Any, options: Any, bad: dict[int, tuple[int, ...]]
) -> None:
    for rank, found in enumerate(run_ranks(not_finite, 2, options)):
        assert [step for step, good in enumerate(found) if not good] == [
            step for step, ranks in bad.items() if rank in ranks
        ]


def drift(rank: int, size: int, options: dict[str, Any]) -> tuple[float, Tensor]:
    """Return the distance that the hook has measured in step 2, and the parameters then."""
    probe = GradientProbe({"a": torch.zeros(300, 200), "b": torch.zeros(5)})
    model = commhooks.DistributedDataParallel(probe)
    handle = commhooks.register(model, "diloco", **options)
    generator = torch.Generator().manual_seed(rank)
    for step in range(4):
        if step == 2:
            with torch.no_grad():
                for parameter in probe.parameters():
                    parameter.copy_(torch.randn(parameter.shape, generator=generator))
            own = torch.cat([each.detach().flatten() for each in probe.parameters()])
        model({name: torch.ones(()) for name in "ab"}).backward()
        if step == 2 + options.get("delay", 0):
            return handle.hook.metrics()["consensus_distance"], own  # type: ignore[union-attr]
    raise AssertionError


@pytest.mark.parametrize(("delay", "within"), [(0, 1e-5), (1, 0.03)])
def test_consensus_distance(run_ranks: Any, delay: int, within: float) -> None:
    """It is exact, and with a delay estimated from every 17th number."""
    found = run_ranks(drift, 3, {"period": 1, "delay": delay})
    models = torch.stack([own for _, own in found])
    for distance, own in found:
        assert distance == pytest.approx((own - models.mean(0)).norm().item(), rel=within)


# ---------------------------------------------------------------------------------------- options

INNER = r"'inner'.*expected a hook that averages gradients, such as int8; "
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"delay": 31}, "'delay'.*at most the period, 30, found 31"),
    ({"inner": "local_sgd"}, f"{INNER}LocalSGD.*changes parameters"),
    ({"inner": "noop"}, f"{INNER}Noop.*does not return the same on all ranks"),
    ({"inner": "diloco"}, f"{INNER}DiLoCo.*changes parameters"),
    ({"inner": {"name": "skip_nonfinite"}}, f"{INNER}SkipNonfinite.*skips steps"),
    ({"outer_lr": 0.0}, "'outer_lr'"),
    ({"outer_momentum": 1.0}, "'outer_momentum'"),
    ({"fragments": 0}, "'fragments'"),
    ({"merge": 1.5}, "'merge'"),
]


@pytest.mark.parametrize(("options", "text"), REFUSED)
def test_options_that_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(commhooks.CommHookOptionError, match=text):
        commhooks.create("diloco", **options)


def test_auto_needs_a_plan() -> None:
    """It would measure the steps of a round, and ranks would not repeat one that has failed."""
    for inner in ("auto", {"name": "route", "rules": [["*", "auto"]]}):
        with pytest.raises(
            commhooks.CommHookOptionError, match=r"auto cannot measure.*give it a plan"
        ):
            commhooks.create("diloco", inner=inner)
    commhooks.create("diloco", inner={"name": "auto", "plan": Plan.exact("by the test")})


def register_again(rank: int, size: int, way: str, same: bool) -> list[float]:
    """Do it while an average is under way, or after steps without the hook."""
    probe = GradientProbe({"a": torch.zeros(8)})
    model = commhooks.DistributedDataParallel(probe)
    options: dict[str, Any] = {"period": 4, "delay": 2, "merge": 0.5}
    handle = commhooks.register(model, "diloco", **options)
    hook = handle.hook if same else commhooks.create("diloco", **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    found = []
    for step in range(14):
        if step == 5 and way == "replace":
            handle.replace(hook)
        if step == 5 and way == "register":
            handle.remove()
        if step == 7 and way == "register":
            commhooks.register(model, hook)
        optimizer.zero_grad()
        model({"a": torch.full((8,), 1.0 + 2 * rank)}).backward()
        optimizer.step()
        found.append(probe.a[0].item())
    return found


@pytest.mark.parametrize("way", ["replace", "register"])
def test_it_begins_anew_when_it_is_registered_again(run_ranks: Any, way: str) -> None:
    assert run_ranks(register_again, 2, way, True) == run_ranks(register_again, 2, way, False)


def load_after_a_failure(rank: int, size: int) -> None:
    trainer = Trainer(commhooks.create("diloco", period=10), PARAMETERS)
    for step in range(4):
        gradient = draw_gradients(PARAMETERS, rank, step)
        if step == 3 and rank == 1:
            broken = trainer.parameters["matrix"].register_hook(lambda _: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                trainer.step(gradient)
            broken.remove()
        trainer.step(gradient)
    saved = trainer.handle.state_dict()
    with pytest.raises(commhooks.CommHookStateError, match=r"some rank.*begin without"):
        trainer.handle.load_state_dict(saved)


def test_a_state_from_after_a_failure_on_one_rank_names_the_remedy(run_ranks: Any) -> None:
    run_ranks(load_after_a_failure, 2)


def repeat_a_round(rank: int, size: int) -> list[tuple[int, int, bool, list[str]]]:
    inner = Rounds()
    options: dict[str, Any] = {"bucket_cap_mb": 1e-5, "stable_buckets": True}
    trainer = Trainer(DiLoCo(period=1, inner=inner), {n: torch.zeros(8) for n in "ab"}, **options)
    gradients = {name: torch.ones(8) for name in "ab"}
    for _ in range(3):
        saved = trainer.handle.state_dict()
        trainer.step(gradients)
    trainer.handle.load_state_dict(saved)
    trainer.step(gradients)
    return inner.calls


def test_a_round_that_is_loaded_and_repeated_is_numbered_from_0(run_ranks: Any) -> None:
    calls = run_ranks(repeat_a_round, 2)[0]
    assert [call[:3] for call in calls[-2:]] == [(1, 0, False), (1, 1, True)]
    assert calls[-4:-2] == calls[-2:]
