"""The pages of the site: each hook has one of the same form, and everything public a reference."""

import re
from pathlib import Path

import hook_pages
import pytest

import commhooks
import commhooks.testing

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
OWN = sorted(hook_pages.NAMES)


def page_of(name: str) -> str:
    return (DOCS / "hooks" / f"{name}.md").read_text()


def test_each_hook_has_a_page() -> None:
    assert set(OWN) == set(commhooks.algorithms.HOOKS)
    families = {family.name for family in hook_pages.FAMILIES}
    assert {path.stem for path in (DOCS / "hooks").glob("*.md")} == {*OWN, *families, "index"}


@pytest.mark.parametrize("page", sorted((DOCS / "hooks").glob("*.md")), ids=lambda page: page.stem)
def test_pages_have_what_the_code_and_the_results_say(page: Path) -> None:
    """``make results`` writes it."""
    assert page.read_text() == hook_pages.made(page)
    found = re.findall(r"^<!--=(\w+)-->$", page.read_text(), re.M)
    parts = [name for name in found if name in hook_pages.PARTS]
    if page.stem == "index":
        assert parts == ["overview", "conditions"]
    elif page.stem in OWN:
        assert parts == ["facts", "options", "cost", "fidelity", "source"]


@pytest.mark.parametrize("name", OWN)
def test_a_page_has_the_form(name: str) -> None:
    start, sections = hook_pages.sections_of(page_of(name))
    assert start.strip().startswith(f"# {name}\n")
    assert list(sections)[:2] == hook_pages.FORM[:2]
    assert "$$" in sections["What it does"]
    found = [title for title in sections if title in hook_pages.FORM]
    assert found == [title for title in hook_pages.FORM if title in found]
    assert set(hook_pages.FORM) - set(found) <= {"What happens when"}
    assert all(sections.values())


@pytest.mark.parametrize("name", OWN)
def test_each_option_is_in_the_table_with_an_explanation(name: str) -> None:
    table = hook_pages.sections_of(page_of(name))[1]["Options"].replace("\\|", "")
    for option in commhooks.describe(name).options:
        assert re.search(rf"^\| `{option.name}` \|.*\| [^ |][^|]+\|$", table, re.M)


def test_a_loss_of_more_than_two_percent_is_on_the_first_screen() -> None:
    for name in OWN:
        found = commhooks.describe(name).fidelity
        changes = found.changes.values() if found else []
        start = page_of(name).partition("\n## ")[0]
        assert ("[!WARNING]" in start) == any(change > 2 for change in changes), name


def test_pages_say_when_not_to_use_a_hook_that_loses_on_several_tasks() -> None:
    """Before the first heading but one: on the first screen."""
    for name in OWN:
        if len(hook_pages.tasks_beyond(name)) > 1:
            when = " ".join(hook_pages.sections_of(page_of(name))[1]["When to use it"].split())
            assert re.search(r"Do not (use|train)[^.]* (loss|percents?|trainings)\b", when), name


def test_everything_public_has_a_reference() -> None:
    compiled_pages = pytest.importorskip("compiled_pages")  # extra `cli`
    pages = [path.read_text() for path in (DOCS / "reference").glob("*.md")]
    text = "\n".join([*pages, compiled_pages.bucket()])
    public = {f"commhooks.{name}" for name in commhooks.__all__ if name != "algorithms"}
    public |= {f"commhooks.testing.{name}" for name in commhooks.testing.__all__}
    found = set(re.findall(r"^::: (commhooks[\w.]+)$|#(commhooks[\w.]+) }", text, re.M))
    assert public <= {name for pair in found for name in pair}


@pytest.mark.exhaustive
def test_formulas_become_mathml() -> None:
    mathml = pytest.importorskip("mathml")  # extra `docs`
    page = '<p><span class="arithmatex">\\(x_i &lt; 1\\)</span></p>'
    assert mathml.convert(page).startswith("<p><math")
    assert "&#x0003C;" in mathml.convert(page)
    block = mathml.convert('<div class="arithmatex">\\[\nx, \\qquad y\n\\]</div>')
    assert block.startswith('<div class="formula"><span><math')
    assert block.count("</math></span>") == 2
    assert 'display="block"' in block


@pytest.mark.exhaustive
def test_reference_has_no_marks_for_sphinx() -> None:
    events = pytest.importorskip("events")  # extra `docs`
    page = "<p>As :class:<code>X</code>, for example::</p><p>::</p><pre>a::b</pre>"
    expected = "<p>As <code>X</code>, for example:</p><pre>a::b</pre>"
    assert events._without_sphinx(page) == expected


def test_pages_load_nothing_from_other_hosts() -> None:
    """The built pages are checked by ``make check-site``."""
    config = (ROOT / "mkdocs.yml").read_text()
    assert "font: false" in config
    assert "http" not in config
    assert "http" not in (DOCS / "assets" / "site.css").read_text()


def test_the_readme_says_what_the_package_says() -> None:
    text = (ROOT / "README.md").read_text()
    assert f"\n{len(OWN)} hooks come with the package" in text
    package = (ROOT / "pyproject.toml").read_text()
    assert 'requires-python = ">=3.11"' in package
    assert "Python :: 3.13" in package
    assert 'SUPPORTED = "torch>=2.11,<2.16"' in (ROOT / "setup.py").read_text()
    for badge in ("python-3.11_to_3.13", "torch-2.11_to_2.15"):
        assert badge in text
