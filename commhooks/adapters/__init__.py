"""Puts hooks on a wrapped model, and saves their state.

Imports: algorithms, algorithms.exact, algorithms.quantized, codecs, comm, errors, extensions, hook,
precision, reducer, runtime.
"""
