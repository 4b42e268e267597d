"""Follow a tutorial: write the files that it shows, and run its commands."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

# A block of code with a language and an attribute, such as title="train.py" or exit=1.
_BLOCK = re.compile(r"^```(\w+)(?: (.*?))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def follow(page: Path, folder: Path, environment: dict[str, str]) -> None:
    """Follow ``page`` in ``folder``.

    A block with a title is a file; with ``replace``, the lines above ``---`` are replaced by those
    below. In a ``console`` block, lines after ``$`` are commands. A command must exit with 0, or
    with the block's ``exit``; each line below it must occur in its output, in this order, and
    ``...`` stands for any lines.
    """
    for language, attributes, text in _BLOCK.findall(page.read_text()):
        title = re.search(r'title="(.*?)"', attributes)
        if title is not None and "replace" in attributes.split():
            before, after = text.split("---\n")
            path = folder / title[1]
            assert path.read_text().count(before) == 1, f"{title[1]} has no such lines:\n{before}"
            path.write_text(path.read_text().replace(before, after))
        elif title is not None:
            (folder / title[1]).write_text(text)
        elif language == "console":
            status = re.search(r"exit=(\d+)", attributes)
            for command in text.removeprefix("$ ").split("\n$ "):
                line, *expected = command.splitlines()
                output = _run(line, folder, environment, int(status[1]) if status else 0)
                for words in expected:
                    if words != "...":
                        assert words in output, f"$ {line}\n{output}\nhas no line {words!r}"
                        output = output.partition(words)[2]


def _run(line: str, folder: Path, environment: dict[str, str], status: int) -> str:
    binaries = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    result = subprocess.run(
        shlex.split(line),
        cwd=folder,
        env=os.environ | {"PATH": binaries} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert result.returncode == status, f"$ {line}\n{result.stdout}"
    return result.stdout
