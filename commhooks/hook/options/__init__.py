"""The options of a hook: fields of its dataclass, checked against their annotations.

Exposes the limits that authors of hooks write into annotations: ``Annotated[int, Ge(1)]``.
"""

from commhooks.hook.options.constraints import Ge, Gt, Le, Lt, Made, MinLen, MultipleOf

__all__ = ["Ge", "Gt", "Le", "Lt", "Made", "MinLen", "MultipleOf"]
