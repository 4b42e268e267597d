"""The base class of hooks."""

from dataclasses import dataclass, field, fields
from typing import Any

import pytest
import torch
from torch import Tensor

import commhooks


@dataclass
class Remembering(commhooks.CommHook):
    decay: float = 0.5
    calls: int = field(default=0, init=False, repr=False, compare=False)

    async def reduce(self, bucket: commhooks.GradBucket, comm: commhooks.Communicator) -> Tensor:
        return bucket.buffer()


def test_repr_is_source_and_state_is_not_an_option() -> None:
    hook = Remembering(0.25)
    hook.state["weight"] = {"error": torch.ones(2)}
    assert repr(hook) == "Remembering(decay=0.25)"
    assert hook == Remembering(0.25)


def test_unregistered_hooks_have_a_name() -> None:
    assert Remembering.name == f"{__name__}:Remembering"
    assert Remembering().to_config() == {"name": Remembering.name, "decay": 0.5}


def test_state_dict_copies_when_saving_and_when_loading() -> None:
    hook = Remembering()
    hook.state["weight"] = {"error": torch.ones(2)}
    saved = hook.state_dict()
    hook.state["weight"]["error"].zero_()
    assert torch.equal(saved["weight"]["error"], torch.ones(2))
    hook.load_state_dict(saved)
    saved["weight"]["error"].zero_()
    assert torch.equal(hook.state["weight"]["error"], torch.ones(2))


@pytest.mark.parametrize("state", [None, [1], {"weight": 3}, {"weight": {"error": 3}}, {3: {}}])
def test_damaged_state_raises_and_changes_nothing(state: Any) -> None:
    hook = Remembering()
    hook.state = kept = {"weight": {"error": torch.ones(2)}}
    with pytest.raises(commhooks.CommHookStateError, match="expected"):
        hook.load_state_dict(state)
    assert hook.state is kept


def test_reduce_must_be_a_coroutine() -> None:
    with pytest.raises(commhooks.CommHookError, match=r"Blocking.reduce.*`async def reduce"):

        class Blocking(commhooks.CommHook):
            def reduce(self, bucket: Any, comm: Any) -> Tensor:  # type: ignore[override]
                return bucket.buffer()


def test_members_are_those_that_an_author_may_need() -> None:
    """Flags, and contracts that few hooks have, are in capabilities.py."""
    names = {*dir(commhooks.CommHook), *(each.name for each in fields(commhooks.CommHook))}
    about = {"name", "lossless", "consensus", "backends", "wire", "paper"}
    work = {"prepare", "reduce", "wire_bytes", "collectives", "recover", "metrics", "nested"}
    optional = {"native", "bucket_key", "models_agree", "notes", "nested_parameters"}
    optional |= {"bucket_fields", "keep_own"}
    state = {"state", "state_fields", "state_dict", "load_state_dict", "to_config"}
    assert {name for name in names if not name.startswith("_")} == about | work | state | optional
    assert len(about | work | state | optional) == 25
