"""Hooks under which models differ between ranks or nodes, and are averaged.

Imports: algorithms, algorithms.wrappers, comm, errors, hook, precision, reducer.
"""
