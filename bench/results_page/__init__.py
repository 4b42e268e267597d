"""docs/results.md out of what is stored in bench/results.

``python -m bench.results_page`` writes it; for files named as arguments it shows their tables.

A kind of result is a module here with a :class:`Kind`, named in ``KINDS`` of page.py.
"""
