"""Lines of a plot can be told apart."""

from commhooks.cli.plots import color_of, line_styles


def test_lines_of_one_color_have_different_dashes() -> None:
    styles = line_styles(["torch", "int8", "int8:block_size=64", "my_hook", "cast"])
    assert styles["int8"]["color"] == styles["int8:block_size=64"]["color"] == color_of("int8")
    assert len({tuple(style.values()) for style in styles.values()}) == len(styles)
