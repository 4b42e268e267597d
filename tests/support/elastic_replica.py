"""One replica, or a rank of one, that trains under a torchft manager with an elastic hook.

It writes a line of JSON for each step that has sent or taken something: the step, whether it was
committed, how many replicas took part, and digests of the parameters after it and of the anchors.
"""

import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torchft
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import commhooks
from commhooks.adapters.handle import HookHandle
from commhooks.comm.communicator import Communicator
from commhooks.integrations.torchft import DistributedDataParallel, register

RATE = 0.05


@dataclass
class Plan:
    """What a replica does. All are the same for all replicas, but for the number and the death."""

    hook: dict[str, Any]
    lighthouse: str
    folder: str
    replicas: int
    number: int = 0
    life: int = 0
    """How often it has died before."""
    steps: int = 0
    """Where it ends. 0: when there is a file named "end"."""
    dies_at: int = -1
    """The step whose backward it does not survive for long: it is killed just after it."""
    pause: float = 0.0
    """Seconds in each step."""
    shards: int = 1
    """Ranks of a replica, over which ``fully_shard`` shards the model."""
    shard: int = 0

    @property
    def path(self) -> Path:
        return Path(self.folder, f"{self.number}.{self.life}.{self.shard}.jsonl")


@commhooks.register_hook("dying")
@dataclass
class Dying(commhooks.CommHook):
    """Average, and be killed in the middle of it, if the process has a file with this round."""

    async def reduce(self, bucket: commhooks.GradBucket, comm: Communicator) -> Tensor:
        average = await comm.all_reduce(bucket.buffer().div_(comm.size))
        if bucket.step == dying_round and bucket.is_last():
            os.kill(os.getpid(), signal.SIGKILL)
        return average


dying_round = -1


def make_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 6))


def loss_of(model: nn.Module, replica: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + replica)
    inputs = torch.randn(8, 12, generator=generator)
    loss: Tensor = (model(inputs) - inputs[:, :6].sin()).square().mean()
    return loss


def digest(tensors: Iterable[Tensor]) -> str:
    found = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        found.update(tensor.detach().contiguous().numpy().tobytes())
    return found.hexdigest()


def digest_of(state: Mapping[str, Mapping[str, Tensor]]) -> str:
    return digest(tensor for entry in state.values() for tensor in entry.values())


def local(tensor: Any) -> Tensor:
    """Return the numbers that this rank has."""
    found: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return found.detach()


def connect(plan: Plan) -> dist.TCPStore:
    """Return the store of the replica, through which its ranks are connected."""
    path = Path(plan.folder, f"{plan.number}.{plan.life}.port")
    if plan.shard == 0:
        store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        path.with_suffix(".new").write_text(str(store.port))
        path.with_suffix(".new").rename(path)
    else:
        while not path.exists():
            time.sleep(0.01)
        store = dist.TCPStore("localhost", int(path.read_text()), wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=plan.shard, world_size=plan.shards)
    return store


def make_manager(
    plan: Plan, store: dist.TCPStore, net: nn.Module, optimizer: Any
) -> tuple[Any, Any]:
    replicas = torchft.ProcessGroupGloo(timeout=timedelta(seconds=20))

    def load(state: dict[str, Any]) -> None:
        with torch.no_grad():
            for name, parameter in net.named_parameters():
                local(parameter).copy_(state["net"][name])
                local(optimizer.state[parameter]["momentum_buffer"]).copy_(state["momenta"][name])

    def save() -> dict[str, Any]:
        momenta = {n: optimizer.state[p]["momentum_buffer"] for n, p in net.named_parameters()}
        return {
            "net": {name: local(each) for name, each in net.named_parameters()},
            "momenta": {name: local(each) for name, each in momenta.items()},
        }

    manager = torchft.Manager(
        pg=replicas,
        min_replica_size=1,
        use_async_quorum=False,
        timeout=timedelta(seconds=30),
        quorum_timeout=timedelta(seconds=120),
        load_state_dict=load,
        state_dict=save,
        rank=plan.shard,
        world_size=plan.shards,
        store_addr="localhost",
        store_port=store.port,
        lighthouse_addr=plan.lighthouse,
        replica_id=f"replica{plan.number}" if plan.shard == 0 else None,
        hostname="localhost",
    )
    return manager, replicas


def wait_for_all(plan: Plan) -> None:
    """Wait until the managers of all replicas exist, so that all are in the first quorum."""
    plan.path.with_suffix(".ready").touch()
    while len(list(Path(plan.folder).glob("*.ready"))) < plan.replicas * plan.shards:
        time.sleep(0.01)


def wrap(plan: Plan, manager: Any, replicas: Any, net: nn.Module) -> tuple[nn.Module, HookHandle]:
    if plan.shards > 1:
        return net, register(manager, replicas, net, plan.hook)
    options = {"bucket_cap_mb": 5e-4}
    model = DistributedDataParallel(manager, replicas, net, plan.hook, wrapper_options=options)
    handle = commhooks.handle_of(model)
    assert handle is not None
    return model, handle


def ends(plan: Plan, step: int) -> bool:
    """Return whether it is time to end, the same on all ranks of a replica."""
    end = torch.tensor(step == plan.steps if plan.steps else Path(plan.folder, "end").exists())
    dist.broadcast(end, 0)
    return bool(end)


def train(plan: Plan) -> None:
    store = connect(plan)
    net = make_net()
    if plan.shards > 1:
        mesh = init_device_mesh("cpu", (plan.shards,))
        fully_shard(net[0], mesh=mesh)
        fully_shard(net, mesh=mesh)
    optimizer = torch.optim.SGD(net.parameters(), lr=RATE, momentum=0.5)
    for parameter in net.parameters():
        optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    manager, replicas = make_manager(plan, store, net, optimizer)
    model, handle = wrap(plan, manager, replicas, net)
    hook: Any = handle.hook
    wait_for_all(plan)
    with plan.path.open("w") as log:
        while not ends(plan, handle.adapter.steps):
            time.sleep(plan.pause)
            optimizer.zero_grad()
            loss = loss_of(model, plan.number * plan.shards + plan.shard, handle.adapter.steps)
            step = handle.adapter.steps  # another one if it has just come back
            before = manager.current_step()
            sent = handle.adapter._save()["state"]  # what a joining replica would receive
            sent_digest = digest_of(sent)
            loss.backward()
            if step == plan.dies_at:
                os.kill(os.getpid(), signal.SIGKILL)
            if hook.sends(step) or hook.takes(step):
                assert digest_of(sent) == sent_digest, "changed while it may be on its way"
                entries = hook.state.values()
                found = {
                    "step": step,
                    "committed": manager.current_step() == before + 1,
                    "participants": manager.num_participants(),
                    "parameters": digest(local(parameter) for parameter in net.parameters()),
                    "anchors": digest_of(hook.state),
                    "has_momentum": any(bool(e["momentum"].any()) for e in entries if e),
                    "wire_bytes": handle.stats().total.wire_bytes,
                }
                log.write(json.dumps(found) + "\n")
                log.flush()
            optimizer.step()
    os._exit(0)  # threads of the manager would wait for other replicas


if __name__ == "__main__":
    given = Plan(**json.loads(sys.argv[1]))
    dying_round = given.hook.pop("dying_round", -1)
    train(given)
