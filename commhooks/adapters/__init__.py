"""Puts hooks on a wrapped model, and saves their state.

Imports: algorithms, comm, errors, hook, precision, reducer, runtime.
"""
