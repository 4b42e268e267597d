"""Follow a tutorial: write the files that it shows, and run its commands."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

# A block of code with its language and title, and a comment in front of it.
_BLOCK = re.compile(
    r'(?:^<!-- (.*?) -->\n)?^```(\w+)(?: title="(.*?)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL
)


def follow(page: Path, folder: Path, environment: dict[str, str]) -> int:
    """Follow ``page`` in ``folder``. Return the number of commands.

    A block with a title is a file; if the comment in front says "replaces what is above the line",
    the lines above ``---`` are replaced by those below. In a ``console`` block, lines after ``$``
    are commands. They must succeed, unless the comment in front says "fails". Each line below a
    command must occur in its output, in this order, and ``...`` stands for any lines.
    """
    count = 0
    for comment, language, title, text in _BLOCK.findall(page.read_text()):
        if title and comment.startswith("replaces"):
            _replace(folder / title, *text.split("---\n"))
        elif title:
            (folder / title).write_text(text)
        elif language == "console":
            for command in text.removeprefix("$ ").split("\n$ "):
                count += 1
                line, *expected = command.replace("\\\n", "").splitlines()
                output = _run(line, folder, environment, fails=comment == "fails")
                for words in expected:
                    if words != "...":
                        assert words in output, f"$ {line}\n{output}\nhas no line {words!r}"
                        output = output.partition(words)[2]
    return count


def _replace(path: Path, before: str, after: str) -> None:
    text = path.read_text()
    assert text.count(before) == 1, f"{path.name} has no such lines:\n{before}"
    path.write_text(text.replace(before, after))


def _run(line: str, folder: Path, environment: dict[str, str], *, fails: bool) -> str:
    binaries = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    # In a worker of xdist, pytest-benchmark is disabled.
    own = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    result = subprocess.run(
        shlex.split(line),
        cwd=folder,
        env=own | {"PATH": binaries} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert (result.returncode != 0) == fails, f"$ {line}\n{result.stdout}"
    return result.stdout
