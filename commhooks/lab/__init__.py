"""Choosing a hook: comparisons, simulations, models to measure with, and the doctor.

Imports: cluster, costs, extensions, reducer.
"""
