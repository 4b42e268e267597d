"""Hooks that measure while they train, and change what they do by it.

Imports: algorithms, algorithms.exact, algorithms.wrappers, codecs, comm, costs, errors, hook,
planning, precision, reducer.
"""
