"""Hooks under which models differ between ranks or nodes, and are averaged.

Imports: algorithms, comm, errors, hook, precision, reducer.
"""
