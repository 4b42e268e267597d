"""Replicas of pipelines, with the schedules of torch.distributed.pipelining."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.of_ranks import same_on_all_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import commhooks
from commhooks import DistributedDataParallel

MICROBATCHES = 4
STEPS = 5
WIDTH = 8
BACKWARD_BEFORE_STEPS = torch.__version__ >= "2.12"  # torch finds the shapes of gradients by one
EXACT = ["GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS"]
OF_WEIGHTS = ["InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]
HOOKS: dict[str, dict[str, Any]] = {
    "allreduce": {},
    "int8": {},
    "powersgd": {"rank": WIDTH, "start_step": 0, "min_compression_rate": 0.0},
    "topk": {"density": 1.0, "warmup_steps": 0},
    "diloco": {"period": 2},
}


def layers(count: int) -> list[nn.Sequential]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(count)]


def batch(replica: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + replica)
    return torch.randn(2 * MICROBATCHES, WIDTH, generator=generator)


class Stage(PipelineStage):
    """A stage that torch 2.11 can run over Gloo in a V, where a rank has neighboring stages.

    Torch 2.11 opens connections by messages, there to the rank itself, which Gloo cannot send. Gloo
    needs none of them. Later versions do not call this for stages like these.
    """

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        return []


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def wrap(module: nn.Module, mesh: Any, kind: str, hook: str | None, options: Any) -> nn.Module:
    if kind == "fsdp":
        fully_shard(module, mesh=mesh["dp", "shard"])
        model = module
    else:
        wrapper = DistributedDataParallel if kind == "ours" else TorchDDP
        model = wrapper(module, process_group=mesh["dp"].get_group(), **options)
    if hook is not None:
        commhooks.register(model, hook, **HOOKS[hook])
    return model


def trained_alone(net: nn.Module, replicas: list[int], steps: int) -> list[Tensor]:
    """Return the parameters that the data of these replicas give without a pipeline."""
    optimizer = torch.optim.SGD(net.parameters(), 0.5)
    for step in range(steps):
        data = torch.cat([batch(replica, step) for replica in replicas])
        loss_of(net(data), data).backward()
        optimizer.step()
        optimizer.zero_grad()
    return list(net.parameters())


def pipeline(
    rank: int,
    world_size: int,
    name: str,
    kind: str = "ours",
    hook: str | None = None,
    options: dict[str, Any] | None = None,
    depth: int = 2,
    steps: int = STEPS,
) -> tuple[list[Tensor], float]:
    """Return the parameters of this rank's stages, and their distance from those trained alone."""
    schedule_class = get_schedule_class(name)
    mesh = init_device_mesh("cpu", (2, depth, 1), mesh_dim_names=("dp", "pp", "shard"))
    group, replica = mesh["pp"].get_group(), mesh["dp"].get_local_rank()
    is_multi = issubclass(schedule_class, PipelineScheduleMulti)
    count = depth * (2 if is_multi else 1)
    position = group.rank()
    numbers = [position, position + depth] if is_multi else [position]
    if name in ("ZBVZeroBubble", "DualPipeV"):
        numbers[1] = count - 1 - position
    models = [wrap(layers(count)[n], mesh, kind, hook, options or {}) for n in numbers]
    optimizer = torch.optim.SGD([p for each in models for p in each.parameters()], 0.5)
    stages = [
        Stage(model, number, count, torch.device("cpu"), group=group)
        for model, number in zip(models, numbers, strict=True)
    ]
    schedule = schedule_class(
        stages if is_multi else stages[0], MICROBATCHES, loss_fn=loss_of, scale_grads=True
    )
    for step in range(steps):
        data = batch(replica, step)
        inputs = [data] if 0 in numbers else []
        target = {"target": data} if count - 1 in numbers else {}
        schedule.step(*inputs, **target)
        optimizer.step()
        optimizer.zero_grad()
    for model in models:
        if (handle := commhooks.handle_of(model)) is not None:
            # Torch's wrapper also averages in the backward of torch's search for shapes.
            more = kind == "torch" and BACKWARD_BEFORE_STEPS
            assert handle.adapter.steps == steps + more
    parameters = [p for each in models for p in each.parameters()]
    found = [p.full_tensor() if kind == "fsdp" else p for p in parameters]
    alone = trained_alone(nn.Sequential(*layers(count)), [0, 1], steps)
    if hook is not None and kind != "fsdp":  # the same wrappers and hooks, one after the other
        stages = [wrap(each, mesh, kind, hook, options or {}) for each in layers(count)]
        alone = trained_alone(nn.Sequential(*stages), [replica], steps)
    wanted = [each for n in numbers for each in alone[2 * n : 2 * n + 2]]
    errors = [(a - b).abs().max().item() for a, b in zip(found, wanted, strict=True)]
    return [p.detach().clone() for p in found], max(errors)


def check(
    results: list[tuple[list[Tensor], float]], hook: str | None, limit: float = 1e-6, depth: int = 2
) -> None:
    for (ours, error), (theirs, _) in zip(results, results[depth:], strict=False):
        assert all(map(torch.equal, ours, theirs)) or hook == "diloco"
        assert error < limit


@pytest.mark.parametrize("hook", [None, *HOOKS])
@pytest.mark.parametrize("name", EXACT)
def test_replicas_are_equal(run_ranks: Any, name: str, hook: str | None) -> None:
    check(run_ranks(pipeline, 4, name, "ours", hook), hook)


@pytest.mark.parametrize(
    "options",
    [
        {"find_unused_parameters": True},
        {"static_graph": True},
        {"gradient_as_bucket_view": True, "bucket_cap_mb": 1e-6},
        {"mixed_precision": commhooks.MixedPrecision(reduce_dtype=torch.float64)},
    ],
)
@pytest.mark.parametrize("hook", [None, "int8"])
def test_options(run_ranks: Any, hook: str | None, options: dict[str, Any]) -> None:
    for name in ("1F1B", "Interleaved1F1B"):
        check(run_ranks(pipeline, 4, name, "ours", hook, options), hook)


@pytest.mark.exhaustive
@pytest.mark.parametrize("hook", [None, "int8"])
@pytest.mark.parametrize("name", EXACT)
def test_four_stages_of_two_replicas(run_ranks: Any, name: str, hook: str | None) -> None:
    check(run_ranks(pipeline, 8, name, "ours", hook, depth=4), hook, depth=4)


def refused(rank: int, world_size: int, name: str) -> str:
    with pytest.raises(RuntimeError) as caught:
        pipeline(rank, world_size, name)
    return str(caught.value)


@pytest.mark.parametrize("name", OF_WEIGHTS)
def test_backwards_of_weights_are_refused(run_ranks: Any, name: str) -> None:
    """All ranks raise; one that waits for another one's data may notice that it has left."""
    texts = run_ranks(refused, 4, name)
    assert any(f"Schedule{name} computes gradients of weights" in text for text in texts)


@pytest.mark.parametrize(
    ("name", "hook", "limit"),
    [
        *((name, None, 1e-6) for name in (*EXACT, *OF_WEIGHTS)),
        *((name, "int8", 1e-3) for name in (*EXACT, *OF_WEIGHTS)),
        ("1F1B", "powersgd", 1e-6),
        ("1F1B", "topk", 1e-6),
    ],
)
def test_fsdp(run_ranks: Any, name: str, hook: str | None, limit: float) -> None:
    """It reduces what the backwards of weights have accumulated, too."""
    check(run_ranks(pipeline, 4, name, "fsdp", hook), hook, limit)


@pytest.mark.parametrize(
    ("name", "hook", "limit"),
    [
        *(("1F1B", hook, 1e-6) for hook in ("allreduce", "powersgd", "topk")),
        *((name, "int8", 1e-3) for name in EXACT),
    ],
)
def test_torchs_wrapper(run_ranks: Any, name: str, hook: str, limit: float) -> None:
    """Torch's reducer cannot rebuild buckets in other schedules than 1F1B."""
    options = {"find_unused_parameters": name != "1F1B"}
    check(run_ranks(pipeline, 4, name, "torch", hook, options), hook, limit)


def without_a_backward(rank: int, world_size: int) -> None:
    model = DistributedDataParallel(layers(1)[0])
    for step in range(3):
        with model.no_sync():
            output = model(batch(rank, step))
        model.reducer.prepare_for_backward([output])
        if step < 2:
            output.sum().backward()
        else:
            torch.autograd.grad(output.sum(), list(model.parameters()))
    with pytest.raises(RuntimeError, match=rf"\[Rank {rank}\] A backward was announced by prepare"):
        model.reducer.prepare_for_backward([output])
    with model.no_sync():
        output = model(batch(rank, 3))
    model.zero_grad()
    model.reducer.prepare_for_backward([output])
    output.sum().backward()
    gradient = model.module[0].weight.grad
    assert same_on_all_ranks(gradient)
    assert model.reducer.has_rebuilt_buckets  # so steps were prepared
    model.module[0].weight = nn.Parameter(torch.ones(WIDTH, WIDTH))
    with model.no_sync():
        output = model(batch(rank, 4))
    with pytest.raises(RuntimeError, match=r'"0\.weight" was replaced'):
        model.reducer.prepare_for_backward([output])


def test_a_step_without_a_backward_is_an_error_of_the_next(run_ranks: Any) -> None:
    run_ranks(without_a_backward, 2)


def orders(rank: int, world_size: int, options: dict[str, Any], local_first: bool) -> None:
    """The gradients of a local forward are averaged if its backward comes first."""
    model = DistributedDataParallel(layers(1)[0], **options)
    for step in range(3):
        model.zero_grad()
        synchronized = model(batch(rank, step)).sum()
        if step == 1:  # which is no backward of the step
            torch.autograd.grad(synchronized, list(model.parameters()), retain_graph=True)
        with model.no_sync():
            local = model(batch(rank, 9 + step)).sum()
        for loss in (local, synchronized) if local_first else (synchronized, local):
            loss.backward()
        found = model.module[0].weight.grad.clone()
        means = [torch.zeros_like(found), torch.zeros_like(found)]
        for number, mean in zip((step, 9 + step), means, strict=True):
            for peer in range(world_size):
                net = copy.deepcopy(model.module)
                net.zero_grad()
                (net(batch(peer, number)).sum() / world_size).backward()
                mean += net[0].weight.grad
        if not local_first:
            net = copy.deepcopy(model.module)
            net.zero_grad()
            net(batch(rank, 9 + step)).sum().backward()
            means[1] = net[0].weight.grad
        torch.testing.assert_close(found, sum(means))


class ReturnsParameter(nn.Module):
    """Returns a parameter as it is, whose gradient comes before those of the other output."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1, bias=False)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.layer(x), self.scale


def local_forward_in_between(rank: int, world_size: int) -> None:
    model = DistributedDataParallel(ReturnsParameter())
    for inside in (False, True, True):
        model.zero_grad()
        y, scale = model(torch.full((1, 2), rank + 1.0))
        loss = (y + (rank + 1) * scale).sum()
        with model.no_sync():
            model(torch.ones(1, 2))
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        assert model.module.scale.grad.tolist() == [1.5]
        assert model.module.layer.weight.grad.tolist() == [[1.5, 1.5]]


def test_an_output_that_is_a_parameter_is_no_local_gradient(run_ranks: Any) -> None:
    run_ranks(local_forward_in_between, 2)


@pytest.mark.parametrize("local_first", [False, True])
@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"static_graph": True}])
def test_forward_decides_which_backward_averages(
    run_ranks: Any, options: dict[str, Any], local_first: bool
) -> None:
    run_ranks(orders, 2, options, local_first)
