"""Hooks that send some of the elements.

Imports: _C, algorithms, codecs, comm, errors, hook, kernels, precision, reducer.
"""
