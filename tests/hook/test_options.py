"""Options of hooks: strict types, ranges, dtypes by name, and errors that say what to do."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

import commhooks
from commhooks.hook.options import Limits


class Le(NamedTuple):
    """A limit as the package annotated_types writes it."""

    le: float


@commhooks.register_hook("test_options")
@dataclass
class Optional(commhooks.CommHook):
    """A hook with options of all kinds."""

    bits: Annotated[int, Limits(ge=1), Le(8)]
    scale: float = 1.0
    dtype: torch.dtype = torch.float16
    other: torch.dtype | None = None
    mode: Literal["left", "right"] = "left"
    warm: bool = True
    cuts: list[tuple[Annotated[int, Limits(ge=0)], float | None]] = field(default_factory=list)
    names: dict[str, tuple[int, ...]] = field(default_factory=dict)
    anything: Any = None

    async def reduce(self, bucket: commhooks.GradBucket, comm: commhooks.Communicator) -> Tensor:
        return bucket.buffer()


def test_values_of_the_right_types_are_kept() -> None:
    hook = commhooks.create("test_options", bits=3, scale=2, mode="right", other=torch.bfloat16)
    assert hook == Optional(3, 2.0, torch.float16, torch.bfloat16, "right", True)
    assert isinstance(hook, Optional)
    assert isinstance(hook.scale, float)


def test_scalars_of_numpy_are_numbers() -> None:
    hook = commhooks.create("test_options", bits=np.int64(3), scale=np.float32(0.5))
    assert isinstance(hook, Optional)
    assert hook == Optional(3, 0.5)
    assert (type(hook.bits), type(hook.scale)) == (int, float)
    with pytest.raises(commhooks.CommHookOptionError, match="it is not of type int"):
        commhooks.create("test_options", bits=np.float64(3))
    with pytest.raises(commhooks.CommHookOptionError, match="it is not of type float"):
        commhooks.create("test_options", bits=3, scale=np.bool_(True))


@pytest.mark.parametrize("value", ["text", np.int64(3)])
def test_an_option_of_any_type_keeps_its_value(value: Any) -> None:
    hook = commhooks.create("test_options", bits=3, anything=value)
    assert isinstance(hook, Optional)
    assert hook.anything is value


def test_lists_and_ints_from_json_become_tuples_and_floats() -> None:
    hook = commhooks.create("test_options", bits=3, cuts=[[0, None], [2, 1]], names={"a": [1, 2]})
    assert isinstance(hook, Optional)
    assert hook.cuts == [(0, None), (2, 1.0)]
    assert isinstance(hook.cuts[1][1], float)
    assert hook.names == {"a": (1, 2)}
    assert commhooks.create(hook.to_config()) == hook


def test_options_as_text() -> None:
    info = {option.name: str(option) for option in commhooks.describe("test_options").options}
    assert info["bits"] == "bits: int  (>= 1, <= 8)"
    assert info["cuts"] == "cuts: list[tuple[int, float | None]] = []"
    assert info["names"] == "names: dict[str, tuple[int, ...]] = {}"
    assert info["other"] == "other: dtype | None = None"


def test_dtypes_by_name() -> None:
    hook = commhooks.create("test_options", bits=3, dtype="bfloat16", other="torch.float64")
    assert hook == Optional(3, dtype=torch.bfloat16, other=torch.float64)
    config = hook.to_config()
    assert config["dtype"] == "bfloat16"
    assert config["other"] == "float64"
    assert commhooks.create(config) == hook


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bits": 0}, r"option 'bits' of hook 'test_options': expected int, >= 1, <= 8; found 0"),
        ({"bits": 9}, r"found 9 \(it is not <= 8\)"),
        ({"bits": "3"}, r"found '3'"),
        ({"bits": True}, r"found True"),
        ({"bits": 3.0}, r"found 3.0"),
        ({"bits": 3, "warm": 1}, r"option 'warm'.*expected bool; found 1"),
        ({"bits": 3, "mode": "up"}, r"option 'mode'.*Literal\['left', 'right'\]; found 'up'"),
        ({"bits": 3, "dtype": "float12"}, r"option 'dtype'.*torch has no dtype 'float12'"),
        ({"bits": 3, "dtype": None}, r"option 'dtype'.*found None"),
        ({"bits": 3, "scale": True}, r"option 'scale'.*found True \(it is not of type float\)"),
        ({"bits": 3, "scale": 10**400}, r"option 'scale'.*too large for a float"),
        ({"bits": 3, "cuts": (1, None)}, r"found \(1, None\) \(it is not of type list\)"),
        ({"bits": 3, "cuts": [[1]]}, r"item 0: it has 1 items instead of 2"),
        ({"bits": 3, "cuts": [[0, 1], [-1, 2]]}, r"item 1: item 0: it is not >= 0"),
        (
            {"bits": 3, "cuts": [[0, "1"]]},
            r"item 0: item 1: it is not of type float, and it is not of type None",
        ),
        ({"bits": 3, "names": {"a": [1, 2.0]}}, r"item 'a': item 1: it is not of type int"),
        ({"bits": 3, "names": {1: []}}, r"key 1: it is not of type str"),
        ({"bits": 3, "bit": 3}, r"no option 'bit'; did you mean 'bits'\? Its options are bits, "),
        ({"bits": 3, "state": {}}, r"no option 'state'"),
        ({"scale": 1.0}, r"needs the option 'bits', found \['scale'\]"),
        ({}, r"needs the option 'bits', found none"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(commhooks.CommHookOptionError, match=message):
        commhooks.create("test_options", **options)


def test_the_constructor_checks_options() -> None:
    with pytest.raises(ValueError, match="option 'bits'"):
        Optional(bits=99)


def test_hooks_without_options_say_so() -> None:
    with pytest.raises(commhooks.CommHookOptionError, match=r"no option 'rank'\. It has none\."):
        commhooks.create("noop", rank=3)
