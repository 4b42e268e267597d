"""Puts hooks on a wrapped model, and saves their state.

Imports: comm, errors, hook, precision, reducer, runtime.
"""
