"""Runs hooks while backward goes on, and records what they cost.

Imports: comm, errors, hook, reducer.
"""
