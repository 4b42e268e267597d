"""The base class of hooks."""

import re
from dataclasses import dataclass, field
from pathlib import Path
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


def test_the_page_has_all_members() -> None:
    """Its first table has the last members of the class, the capabilities, and these are twelve."""
    page = (Path(__file__).parents[2] / "docs" / "writing-a-hook.md").read_text()
    section = page.partition("\n## What a hook may add\n")[2].partition("\n## ")[0]
    tables = [
        [name for row in re.findall(r"^\| (`.*?) \|", table, re.M) for name in names_in(row)]
        for table in section.split("|---|---|")[1:]
    ]
    members = [*vars(commhooks.CommHook), "caches", "extra_state"]
    public = {name for name in members if not name.startswith("_")}
    assert sorted(name for table in tables for name in table) == sorted(public)
    last = members[members.index("capturable_from") : members.index("notes") + 1]
    assert tables[0] == last
    assert len(last) == 12


def names_in(cell: str) -> list[str]:
    return re.findall(r"`(\w+)[^`]*`", cell)
