"""Hooks that send some of the elements.

Imports: algorithms, codecs, comm, hook, kernels, precision, reducer.
"""
