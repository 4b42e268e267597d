"""Hooks that send factors of low rank.

Imports: _C, algorithms, codecs, comm, errors, extensions, hook, kernels, precision, reducer.
"""
