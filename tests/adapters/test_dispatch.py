"""What ``register`` accepts, and what it refuses."""

import itertools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.dying_ranks import set_timeout
from support.pages import run_page
from support.states import hook_state
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel

import commhooks
from commhooks.adapters.dispatch import unwrap


def make_net() -> nn.Sequential:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4))
    net[0].bias.requires_grad_(False)
    return net


def gradients(model: nn.Module, rank: int) -> Tensor:
    model.zero_grad()
    model(torch.full((2, 6), float(rank + 1))).square().sum().backward()
    return torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])


class Compiled(nn.Module):
    """Holds the wrapper as torch.compile does; tests/reducer/test_compile.py compiles one."""

    def __init__(self, wrapper: nn.Module) -> None:
        super().__init__()
        self._orig_mod = wrapper

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self._orig_mod(inputs)
        return result


class Fabric(nn.Module):
    """Holds the wrapper as Fabric does, and forwards unknown names to the original module."""

    def __init__(self, forward_module: nn.Module, original: nn.Module) -> None:
        super().__init__()
        self._forward_module = forward_module
        self._original_module = original

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("_original_module"), name)

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self._forward_module(inputs)
        return result


def register_on_forms(rank: int, size: int) -> None:
    for wrapper in (commhooks.DistributedDataParallel, TorchDistributedDataParallel):
        net = make_net()
        wrappers = [wrapper(net) for _ in range(2)]  # of which a library may keep the first one
        for again in wrappers:
            newest = commhooks.register(again, "int8")
        assert [commhooks.handle_of(other) for other in (again, net, net[1])] == [newest] * 3
        plain = wrapper(make_net())
        net = make_net()
        wrapped = wrapper(net)
        compiled = Compiled(wrapped)
        forms = [wrapped, compiled, Fabric(compiled, net), Fabric(wrapped, net)]
        for form in forms:
            plain_handle = commhooks.register(plain, "int8")
            handle = commhooks.register(form, "int8")
            parts = [net[1], nn.ModuleDict({"student": form, "teacher": make_net()})]
            assert [commhooks.handle_of(other) for other in (*forms, net, *parts)] == [handle] * 7
            assert commhooks.handle_of(wrapper(net)) is None  # another wrapper of the same module
            for other in forms:
                with pytest.raises(commhooks.CommHookError, match="has a hook already"):
                    commhooks.register(other, "int8")
            assert torch.equal(gradients(form, rank), gradients(plain, rank))
            both = nn.ModuleList([plain, form])
            with pytest.raises(commhooks.CommHookError, match="ModuleList belongs to 2 models"):
                commhooks.handle_of(both)
            plain_handle.remove()
            assert commhooks.handle_of(both) is handle
            handle.remove()
            assert [commhooks.handle_of(other) for other in (*forms, net, *parts)] == [None] * 7


def test_forms_of_a_model_share_a_handle(run_ranks: Any) -> None:
    run_ranks(register_on_forms, 2)


def register_on_replicated(rank: int, size: int) -> None:
    plain = TorchDistributedDataParallel(make_net())
    rules = [["1.*", "int8"]]
    expected_handle = commhooks.register(plain, "route", rules=rules, default="onebit")
    for has_begun in (False, True):
        model = replicate(make_net())
        if has_begun:
            gradients(model, rank)
        handle = commhooks.register(model, "route", rules=rules, default="onebit")
        assert commhooks.handle_of(model) is handle
        expected_handle.replace("route", rules=rules, default="onebit")
        for _ in range(3):
            assert torch.equal(gradients(model, rank), gradients(plain, rank))
        assert set(handle.stats().total.names) == {"0.weight", "1.weight", "1.bias"}
        if not has_begun:
            assert hook_state(handle).keys() == hook_state(expected_handle).keys()


def test_replicated_modules_have_their_own_names(run_ranks: Any) -> None:
    """Torch wraps a list of the parameters, in which their names are numbers."""
    run_ranks(register_on_replicated, 2)


class Words(nn.Module):
    """A model with an embedding, whose weight the output layer shares if wanted."""

    def __init__(self, *, is_tied: bool = False) -> None:
        super().__init__()
        self.tokens = nn.Embedding(6, 4)
        self.hidden, self.head = nn.Linear(4, 4), nn.Linear(4, 6)
        if is_tied:
            self.head.weight = self.tokens.weight

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self.head(self.hidden(inputs @ self.tokens.weight))
        return result


BY_ROLE = [["@1d", "allreduce"], ["@embedding", "bf16"], ["@output", "fp16"]]


def route_by_role(rank: int, size: int) -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    makers: dict[str, Callable[[nn.Module], nn.Module]] = {
        "ours": commhooks.DistributedDataParallel,
        "torch's": TorchDistributedDataParallel,
        "compiled": lambda net: Compiled(commhooks.DistributedDataParallel(net)),
        "of a compiled one": lambda net: commhooks.DistributedDataParallel(Compiled(net)),
        "replicated": replicate,
        "sharded": lambda net: fully_shard(net, mesh=mesh),
    }
    for name, make in makers.items():
        for is_tied in (False, True):
            handle = commhooks.register(
                make(Words(is_tied=is_tied)), "route", rules=BY_ROLE, default="int8"
            )
            check_routes(handle, name, is_tied=is_tied)
    net = Words()
    state = commhooks.CommHookState("route", module=net, rules=BY_ROLE, default="int8")
    model = TorchDistributedDataParallel(net)
    model.register_comm_hook(state, commhooks.comm_hook)
    gradients(model, rank)
    check_routes(state.handle, "pair", is_tied=False)


def check_routes(handle: commhooks.HookHandle, form: str, *, is_tied: bool) -> None:
    expected = {"tokens.weight": 1, "hidden.weight": 3, "hidden.bias": 0, "head.bias": 0}
    if not is_tied:
        expected["head.weight"] = 2
    hook: Any = handle.hook
    names = handle.adapter.parameters
    assert {n.removeprefix("_orig_mod."): hook.bucket_key(n)[0] for n in names} == expected, form


def test_hooks_know_roles_on_every_form_of_a_model(run_ranks: Any) -> None:
    run_ranks(route_by_role, 2)


def named(module: str, name: str) -> nn.Module:
    """A module whose class has the name of another package's."""
    kind = type(name, (nn.Module,), {"__module__": module, "__qualname__": name})
    made: nn.Module = type("Subclass", (kind,), {})()
    return made


def refuse(rank: int, size: int) -> None:
    net = make_net()
    kind = type(named("torchft.ddp", "DistributedDataParallel")).__base__
    torchft = type("Fault", (kind, TorchDistributedDataParallel), {})(make_net())
    fsdp = named("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel")
    refused: list[tuple[Any, str]] = [
        (net, "found Sequential; wrap it first.*prepare.*setup.*trainer.strategy.model"),
        (net, "optimizer that averages gradients in .*: see docs/integrations/others.md"),
        (Compiled(net), "found Sequential; wrap it first"),
        (fsdp, "Subclass: FSDP1 flattens.*fully_shard"),
        (nn.Sequential(net, fsdp), "Sequential with Subclass at '1': FSDP1"),
        (named("deepspeed.runtime.engine", "DeepSpeedEngine"), "DeepSpeed averages"),
        (torchft, "registered on Fault.*: torchft's wrapper .* Use commhooks.integrations.torchft"),
        (nn.DataParallel(net), "DataParallel works in one process.*torchrun"),
        (
            nn.Sequential(commhooks.DistributedDataParallel(net)),
            "Sequential with DistributedDataParallel at '0'; register the hook on that",
        ),
        ("int8", "expected a wrapped model, found str"),
    ]
    for model, message in refused:
        with pytest.raises(commhooks.CommHookError, match=message):
            commhooks.register(model, "int8")
    with pytest.raises(commhooks.CommHookError, match="expected a wrapped model, found str"):
        commhooks.handle_of("int8")  # type: ignore[arg-type]
    taken = replicate(make_net())
    taken.register_comm_hook(None, lambda state, bucket: None)
    with pytest.raises(commhooks.CommHookError, match="register_comm_hook"):
        commhooks.register(taken, "int8")


def test_refusals_say_why_and_what_to_do(run_ranks: Any) -> None:
    run_ranks(refuse, 2)


def follow_page(rank: int, size: int, folder: Path) -> None:
    net = make_net()
    names: dict[str, Any] = {"commhooks": commhooks, "torch": torch, "net": net}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's optimizers use torch.jit
        assert run_page("integrations/others.md", folder, names) == 1
    before = [parameter.detach().clone() for parameter in net.parameters()]
    gradients(names["model"], rank)
    for name in ("muon", "adam"):
        names[name].step()
    trained = [p.detach() for p in net.parameters() if p.requires_grad]
    assert len(trained) == 3
    for parameter, old in zip(net.parameters(), before, strict=True):
        assert torch.equal(parameter, old) != parameter.requires_grad
        dist.broadcast(old.copy_(parameter.detach()), 0)
        assert torch.equal(parameter, old)
    assert commhooks.handle_of(net).stats().steps == 1  # type: ignore[union-attr]


def test_optimizers_that_only_compute(run_ranks: Any, tmp_path: Path) -> None:
    run_ranks(follow_page, 2, tmp_path)


def wrap_twice(rank: int, size: int) -> None:
    wrappers = (commhooks.DistributedDataParallel, TorchDistributedDataParallel)
    for outer, inner in itertools.product(wrappers, wrappers):
        model = outer(inner(make_net()))
        with pytest.raises(commhooks.CommHookError, match="gradients would be averaged twice"):
            commhooks.register(model, "int8")
        assert commhooks.handle_of(model) is None


def test_a_model_in_two_wrappers_is_refused(run_ranks: Any) -> None:
    run_ranks(wrap_twice, 1)


def register_on_one_rank(rank: int, size: int) -> None:
    group = dist.new_group()
    model = commhooks.DistributedDataParallel(make_net(), process_group=group)
    set_timeout(1.0, group)
    message = "hook and options, which all ranks have to set together, failed"
    if rank == 0:
        with pytest.raises(commhooks.CommHookPeerError, match=message):
            commhooks.register(model, "int8")
    else:
        with pytest.raises(commhooks.CommHookPeerError, match="the average of bucket 0"):
            gradients(model, rank)


def test_registering_on_one_rank_raises_on_both(run_ranks: Any) -> None:
    run_ranks(register_on_one_rank, 2)


def test_without_a_process_group() -> None:
    assert not dist.is_initialized()
    with pytest.raises(
        commhooks.CommHookError, match=r"no process group: call torch\.dist.*torchrun"
    ):
        commhooks.register(nn.Linear(2, 2), "int8")


def test_accelerate_keeps_the_wrapper_beside_a_copy_of_it() -> None:
    """``compile_regions`` copies the wrapper, and puts the original into the ``__dict__``."""
    original, copied = nn.Linear(2, 2), nn.Linear(2, 2)
    copied.__dict__["_orig_mod"] = original
    assert unwrap(copied) is original
