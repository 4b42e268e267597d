"""Puts hooks on a wrapped model, and saves their state.

Imports: algorithms, algorithms.exact, comm, errors, extensions, hook, precision, reducer, runtime.
"""
