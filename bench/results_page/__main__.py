"""Writes docs/results.md and its plots, or shows the tables of the files that are named."""

import sys
from pathlib import Path

from bench.results_page.page import UnknownResultError, section_of, write_page

try:
    if len(sys.argv) == 1:
        write_page()
    for path in sys.argv[1:]:
        print("\n".join(section_of(Path(path)).lines))
except UnknownResultError as error:
    sys.exit(str(error))
