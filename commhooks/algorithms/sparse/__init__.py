"""Hooks that send some of the elements.

Imports: _C, algorithms, codecs, comm, hook, kernels, precision, reducer.
"""
