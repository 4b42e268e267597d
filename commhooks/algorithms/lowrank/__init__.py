"""Hooks that send factors of low rank.

Imports: _C, algorithms, codecs, comm, errors, hook, kernels, precision, reducer.
"""
