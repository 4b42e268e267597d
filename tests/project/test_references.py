"""Files, tests and notes that docs and comments name exist."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("commhooks", "reducer", "csrc", "tests", "bench", "docs", "examples")
FILES = sorted(
    path.relative_to(ROOT).as_posix()
    for path in [*ROOT.glob("*.md"), *(p for folder in FOLDERS for p in (ROOT / folder).rglob("*"))]
    if path.is_file() and "__pycache__" not in path.parts
)
TEXTS = {
    path: (ROOT / path).read_text()
    for path in FILES
    if Path(path).suffix in (".py", ".md", ".cpp", ".h", ".cu", ".cuh")
    and not path.startswith(("bench/results/", "docs/results"))
}
# A file may be named from any folder above it.
NAMES = {
    "/".join(parts[start:])
    for parts in (path.split("/") for path in FILES)
    for start in range(len(parts))
}
NAMED = re.compile(
    r"(?<![\w/.-])((?:commhooks|reducer|csrc|tests|bench|docs|examples|algorithms|comm|runtime"
    r"|adapters|codecs|hook|costs|lab|cluster|kernels)/[\w/-]+\.(?:py|cpp|h|cuh?|md))\b"
)


def words(text: str) -> str:
    """Join the lines of comments, so that names across line ends are found."""
    return re.sub(r"\s*\n\s*(?://|#)?\s*", " ", text)


def test_named_files_exist() -> None:
    named = {(name, path) for path, text in TEXTS.items() for name in NAMED.findall(text)}
    for path, text in TEXTS.items():
        if path.startswith("docs/"):
            named |= {(name, path) for name in re.findall(r"`(test_\w+\.py)", text)}
    assert sorted(pair for pair in named if pair[0] not in NAMES) == []


def test_named_notes_exist() -> None:
    defined = set()
    for text in TEXTS.values():
        defined |= set(re.findall(r"^[ /#]*Note \[([^\]]+)\](?::|\n)", text, re.M))
    cited = {
        (note, path)
        for path, text in TEXTS.items()
        for note in re.findall(r"Note \[([^\]]+)\]", words(text))
    }
    assert sorted(pair for pair in cited if pair[0] not in {*defined, "Title"}) == []


def test_tests_that_pages_name_exist() -> None:
    named = {
        (path, file, test)
        for path, text in TEXTS.items()
        if path.startswith("docs/")
        for file, test in re.findall(r"`(test_\w+\.py)::(\w+)", text)
    }
    assert len(named) > 20
    assert [each for each in sorted(named) if f"def {each[2]}(" not in text_of_test(each[1])] == []


def text_of_test(name: str) -> str:
    (text,) = (TEXTS[path] for path in FILES if re.fullmatch(rf"tests/.*/{name}", path))
    return text


def test_the_tests_of_names_of_torchs_wrapper_use_them() -> None:
    page = TEXTS["docs/compatibility.md"]
    untested, count = [], 0
    for title in ("Constructor", "Methods and attributes"):
        rows = page.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
        for names, _, tests in re.findall(r"^\| (.*`.*) \| (.*) ?\| (.*) \|$", rows, re.M):
            files = re.findall(r"`(test_\w+\.py)", tests)
            if not files:  # tested everywhere, or missing on purpose
                continue
            text = "\n".join(map(text_of_test, files))
            for name in re.findall(r"`([^`]+)`", names):
                count += 1
                if not re.search(rf"\b{name.rpartition('.')[2]}\b", text):
                    untested.append((name, files))
    assert count > 80
    assert untested == []
