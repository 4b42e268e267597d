"""Hooks that send factors of low rank.

Imports: algorithms, codecs, comm, errors, hook, kernels, precision, reducer.
"""
