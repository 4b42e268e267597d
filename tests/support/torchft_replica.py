"""One replica that trains under a torchft manager.

Replica 1 ends after a few steps together. Replica 0 goes on until it is told that the other one has
left for the last time, and it has noticed so. A replica writes its committed steps, the errors of
its hook, its statistics, how often its hook has recovered, and a trace of its last step.
"""

import json
import os
import sys
import time
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torchft
from torch import Tensor, nn

import commhooks
from commhooks.hook.base import tree
from commhooks.integrations.torchft import DistributedDataParallel

RATE = 0.05
STEPS_TOGETHER = 5


class Errors(NamedTuple):
    """What a replica has not sent yet, in the order of the parameters."""

    own: Tensor
    of_averages: Tensor


class Step(NamedTuple):
    participants: int
    size: int
    """Of the group: a member that is still receiving the model sends zeros."""
    before: Tensor
    """The parameters."""
    errors: tuple[Errors, Errors]
    """Before and after the step."""


def make_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 6))


def draw_inputs(replica: int, step: int) -> Tensor:
    return torch.randn(8, 12, generator=torch.Generator().manual_seed(10 * step + replica))


def loss_of(model: nn.Module, replica: int, step: int) -> Tensor:
    loss: Tensor = model(draw_inputs(replica, step)).square().mean()
    return loss


def flat(net: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in net.parameters()])


def errors_of(hook: commhooks.CommHook, net: nn.Module) -> Errors:
    own, of_averages = [], []
    for name, parameter in net.named_parameters():
        own.append(torch.zeros(parameter.numel()))
        of_averages.append(torch.zeros(parameter.numel()))
        for each in tree(hook):
            entry = each.state.get(name, {})
            if "error" in entry:
                own[-1] += entry["error"].reshape(-1)
            if "average_error" in entry:
                start, error = int(entry["average_start"]), entry["average_error"]
                of_averages[-1][start : start + error.numel()] += error
    return Errors(torch.cat(own), torch.cat(of_averages))


def train(replica: int, hook: str, lighthouse: str, dies: bool, path: Path) -> None:
    last_departure = path.with_name("last departure")
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    replicas = torchft.ProcessGroupGloo(timeout=timedelta(seconds=20))
    net = make_net()
    inner = torch.optim.SGD(net.parameters(), lr=RATE)
    manager = torchft.Manager(
        pg=replicas,
        min_replica_size=1,
        # Otherwise, if both begin in one quorum, one contributes zeros and is counted.
        init_sync=False,
        timeout=timedelta(seconds=30),
        load_state_dict=lambda state: net.load_state_dict(state["net"]),
        state_dict=lambda: {"net": net.state_dict()},
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
        lighthouse_addr=lighthouse,
        replica_id=f"replica{replica}",
        hostname="localhost",
    )
    model = DistributedDataParallel(manager, replicas, net, json.loads(hook))
    optimizer = torchft.Optimizer(manager, inner)
    handle = commhooks.handle_of(model)
    assert handle is not None
    used: Any = handle.hook
    recoveries: list[int] = []
    recover = used.recover
    used.recover = lambda: (recoveries.append(1), recover())
    steps: dict[int, Step] = {}
    participants = together = 0
    while (
        together < STEPS_TOGETHER if replica else participants != 1 or not last_departure.exists()
    ):
        time.sleep(0.05)  # so that a replica does not train far ahead while it is alone
        optimizer.zero_grad()  # begins the quorum
        manager.wait_quorum()
        step = manager.current_step()
        before, errors = flat(net), errors_of(used, net)
        with handle.trace(path.with_suffix(".json")) if steps else nullcontext():
            loss_of(model, replica, step).backward()
        optimizer.step()
        participants = manager.num_participants()
        if manager.is_participating() and manager.current_step() == step + 1:
            step_errors = errors, errors_of(used, net)
            steps[step] = Step(participants, replicas.size(), before, step_errors)
            together = together + 1 if participants == 2 else 0
    stats = handle.stats()
    found = {"steps": steps, "errors": errors_of(used, net), "wire_bytes": stats.total.wire_bytes}
    torch.save(found | {"recoveries": len(recoveries), "counted": stats.steps}, path)
    os._exit(7 if dies else 0)  # threads of the manager would wait for the other replica


def main() -> None:
    number, hook, lighthouse, dies, path = sys.argv[1:]
    train(int(number), hook, lighthouse, dies == "True", Path(path))
