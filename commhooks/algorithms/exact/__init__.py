"""Hooks that average exactly, up to rounding, and a hook that communicates nothing.

Imports: comm, hook, precision, reducer.
"""
