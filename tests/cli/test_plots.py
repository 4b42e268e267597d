"""Lines of a plot can be told apart."""

from commhooks import algorithms
from commhooks.cli.plots import color_of, line_styles


def test_lines_of_one_color_have_different_dashes() -> None:
    styles = line_styles(["torch", "int8", "int8:block_size=64", "my_hook", "cast"])
    assert styles["int8"]["color"] == styles["int8:block_size=64"]["color"] == color_of("int8")
    assert len({tuple(style.values()) for style in styles.values()}) == len(styles)


def test_lines_of_one_family_have_different_dashes() -> None:
    styles = line_styles(["allreduce", "topk", "bf16", "noop:"])
    dashes = {style["linestyle"] for hook, style in styles.items() if hook != "topk"}
    assert len(dashes) == 3


def test_each_hook_has_a_color_of_its_own_except_wrappers() -> None:
    colors = {}
    for name, place in algorithms.HOOKS.items():
        if not place.startswith(("wrappers", "adaptive")):
            colors[name] = color_of(name)
    assert {"int8", "topk", "noop"} <= colors.keys()
    assert len(set(colors.values())) == len(colors)
    assert color_of("my_hook") == color_of("cast") not in colors.values()
