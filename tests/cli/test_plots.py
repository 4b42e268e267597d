"""Lines of a plot can be told apart."""

from commhooks import algorithms
from commhooks.cli.plots import color_of, line_styles


def test_lines_of_one_color_have_different_dashes() -> None:
    styles = line_styles(["torch", "int8", "int8:block_size=64", "my_hook", "cast"])
    assert styles["int8"]["color"] == styles["int8:block_size=64"]["color"] == color_of("int8")
    assert len({tuple(style.values()) for style in styles.values()}) == len(styles)


def test_each_hook_has_a_color_of_its_own_except_wrappers() -> None:
    kinds = [getattr(algorithms, name) for name in algorithms.__all__]
    families = {kind.__module__.split(".")[2] for kind in kinds}
    colors = [
        color_of(kind.name)
        for kind in kinds
        if kind.__module__.split(".")[2] not in ("wrappers", "adaptive")
    ]
    assert {"wrappers", "adaptive"} < families
    assert len(set(colors)) == len(colors)
    assert color_of("my_hook") not in colors
