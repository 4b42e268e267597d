"""Hooks that send a few bits per element.

Imports: algorithms, codecs, comm, errors, hook, precision, reducer.
"""
