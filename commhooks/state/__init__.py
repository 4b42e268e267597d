"""The saved state of hooks: its form, and how the same or other ranks load it.

Each rank saves a dict, in types that ``torch.load`` reads by default::

    {
        "version": 2,
        "hook": '{"name": "powersgd", ...}',            the config, as JSON
        "step": 100,
        "state": {
            "rank 1 of 2x1": {"weight": {"error": ...}},    what this rank alone has
            "shard 0 of 2x1": {"weight": {"right": ...}},   what is the same in all replicas
        },
        "tensors": {"rank 1 of 2x1": 1, ...},           the number of values, by the keys of "state"
    }

``2x1`` stands for 2 replicas of 1 shard. If other ranks train another part of the model, as under
tensor parallelism and in pipelines, a part has the number of its first rank, and its keys end in
it, unless it is 0: ``rank 1 of 2x1, part 4``. All keys differ, so the dicts of all ranks can be
merged into one, in a file or in a ``torch.distributed.checkpoint``. A rank loads any such dict that
has what it needs: on the same ranks what it saved, on other ranks its share of the whole.
"""

from commhooks.state.checkpoint import HookState
from commhooks.state.files import GatheredState

__all__ = ["GatheredState", "HookState"]
