"""Writes docs/results.md and its plots."""

import sys

from bench.results_page.page import UnknownResultError, write_page

try:
    write_page()
except UnknownResultError as error:
    sys.exit(str(error))
