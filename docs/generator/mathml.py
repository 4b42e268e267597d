"""Formulas as MathML: no script and no font is loaded to show them."""

import html
import re

from latex2mathml.converter import convert as to_mathml

_FORMULA = re.compile(
    r'<(?P<tag>span|div) class="arithmatex">\\(?P<kind>[(\[])(?P<tex>.*?)\\[)\]]</(?P=tag)>', re.S
)


def convert(page: str) -> str:
    """Replace the formulas that the extension ``arithmatex`` has marked in ``page``."""
    return _FORMULA.sub(_convert_one, page)


def _convert_one(match: re.Match[str]) -> str:
    is_block = match["kind"] == "["
    formula = to_mathml(
        html.unescape(match["tex"]).strip(), display="block" if is_block else "inline"
    )
    return f'<div class="formula">{formula}</div>' if is_block else formula
