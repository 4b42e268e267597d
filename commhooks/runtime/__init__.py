"""Runs hooks while backward goes on, and records what they cost.

Imports: _C, comm, errors, hook, reducer.
"""
