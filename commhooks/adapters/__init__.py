"""Puts hooks on a wrapped model, and saves their state.

Imports: ``runtime`` and the floors below it.
"""
