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
    tex = html.unescape(match["tex"]).strip()
    if match["kind"] == "(":
        return str(to_mathml(tex))
    # Formulas that a wide space separates wrap on a narrow screen.
    formulas = (to_mathml(part, display="block") for part in tex.split(r"\qquad"))
    spans = " ".join(f"<span>{formula}</span>" for formula in formulas)
    return f'<div class="formula">{spans}</div>'
