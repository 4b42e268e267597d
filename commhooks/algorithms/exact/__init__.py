"""Hooks that average exactly, up to rounding, and a hook that communicates nothing.

Imports: algorithms, comm, hook, precision, reducer.
"""
