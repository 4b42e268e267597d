"""One color per hook in all plots, readable on light and on dark pages."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

__all__ = ["GRAY", "color_of", "line_styles"]

GRAY = "#7f8794"
"""Of text and axes, and of what is only shown for comparison."""

# One hue per family: blue exact, orange and pink few bits, green sparse, violet low rank, cyan
# fewer partners, brown wrappers. All have about the same lightness.
_COLORS = {
    "torch": GRAY,
    "allreduce": "#3b82c4",
    "bf16": "#5aa9e6",
    "fp16": "#2f78b7",
    "noop": "#7fa8d1",
    "int8": "#e8710a",
    "int4": "#f0932b",
    "int2": "#d9a441",
    "fp8": "#c9822b",
    "fp4": "#d98f3d",
    "natural": "#b5893a",
    "qsgd": "#e0567a",
    "terngrad": "#c95d9e",
    "onebit": "#e0403f",
    "signsgd": "#c2506a",
    "topk": "#2f9e44",
    "shared_topk": "#57ad2c",
    "threshold": "#66a80f",
    "randomk": "#8aa63a",
    "dgc": "#12a17a",
    "demo": "#0b7a5c",
    "powersgd": "#845ef7",
    "batched_powersgd": "#a58bf0",
    "gossip": "#1098ad",
    "push_sum": "#3aa6b5",
    "local_sgd": "#0f8fb0",
    "diloco": "#3b7dd8",
    "hierarchical": "#22a7c4",
}
_OTHER = "#a9745b"  # wrappers and hooks of other packages
_DASHES = ("-", "--", ":", "-.")


def color_of(hook: str) -> str:
    """Return the color of a hook, whatever its options."""
    return _COLORS.get(hook.partition(":")[0], _OTHER)


def line_styles(hooks: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return matplotlib's options for each hook's line; lines of one color differ in dashes."""
    seen: Counter[str] = Counter()
    styles = {}
    for hook in hooks:
        color = color_of(hook)
        styles[hook] = {"color": color, "linestyle": _DASHES[seen[color] % len(_DASHES)]}
        seen[color] += 1
    return styles
