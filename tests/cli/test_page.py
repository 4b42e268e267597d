"""The page of a comparison: complete, and without anything from elsewhere."""

import importlib.metadata
import re
from dataclasses import replace
from datetime import datetime
from html import escape
from html.parser import HTMLParser
from pathlib import Path

import pytest
from support.comparisons import HOOKS, make_comparison

pytest.importorskip("click")
from click.testing import CliRunner

from commhooks.cli.commands import commands
from commhooks.cli.page import comparison_page
from commhooks.lab.comparison import ComparisonInterrupted
from commhooks.lab.comparison.result import Failure


class _Parser(HTMLParser):
    """Checks that tags are closed, and collects them."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_needs_nothing_else() -> None:
    text = comparison_page(make_comparison())
    parser = _Parser()
    parser.feed(text)
    assert parser.open == []
    names = [tag for tag, _ in parser.tags]
    assert names.count("svg") == 5  # step times, losses on three links, losses by bytes
    assert not {"script", "link", "img", "iframe", "object"} & set(names)
    for _, attributes in parser.tags:
        for name in ("src", "href", "xlink:href"):
            assert (attributes.get(name) or "#").startswith("#")
    without_namespaces = re.sub(r'xmlns(:\w+)?="[^"]*"', "", text)
    assert not re.search(r"https?://|@import|url\((?!#)", without_namespaces)


def test_the_page_says_everything() -> None:
    failed = replace(make_comparison(), failures=(Failure("a<b", None, "c & d"),))
    text = comparison_page(failed)
    for word in (*HOOKS, "100 Mbit/s, predicted", "a note &amp; more", "break-even", "&lt;c&gt;"):
        assert word in text
    assert "Failed: a&lt;b: c &amp; d" in text
    assert f'<pre tabindex="0">{escape(str(failed))}</pre>' in text


def test_the_page_says_when_and_how_it_was_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["/usr/bin/commhooks", "compare", "--model", "a<b:c"])
    text = comparison_page(make_comparison())
    assert "<code>$ commhooks compare --model &#x27;a&lt;b:c&#x27;</code>" in text
    assert f"{datetime.now():%Y-%m-%d}" in text
    assert f"commhooks {importlib.metadata.version('commhooks')}." in text


def test_after_an_interrupt_the_command_prints_and_writes_what_there_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise ComparisonInterrupted(make_comparison())

    monkeypatch.setattr("commhooks.cli.compare.compare_hooks", interrupted)
    monkeypatch.setenv("COLUMNS", "80")
    page = tmp_path / "page.html"
    result = CliRunner().invoke(
        commands, ["compare", "--model", "a:b", "--hooks", "bf16", "--html", str(page)]
    )
    assert result.exit_code == 130
    for word in ("loopback, measured", "bf16", "a - b", "slow", "Note: a note & more."):
        assert word in result.output
    assert max(map(len, result.output.splitlines())) <= 80
    assert page.read_text().startswith("<!DOCTYPE html>")
