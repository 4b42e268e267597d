"""Hooks around other hooks.

Imports: algorithms, codecs, comm, errors, hook, precision, reducer.
"""
