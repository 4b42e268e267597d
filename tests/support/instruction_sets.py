"""The instructions that loops on the CPU use: both extensions choose the widest by themselves."""

from commhooks import native
from reducer.native import use_instruction_set as use_in_engine

__all__ = ["instruction_sets", "use_instruction_set"]


def instruction_sets() -> list[str]:
    """Return the instruction sets that this CPU has and loops are compiled for, widest last."""
    return native.instruction_sets()


def use_instruction_set(name: str) -> None:
    """Set the instruction set of all loops, for the whole process; the default is the widest.

    All of them give the same bits, except for the products of PowerSGD.
    """
    native.use_instruction_set(name)
    use_in_engine(name)
