"""Trains random models with random hooks and random faults, and checks what the ranks do.

``PYTHONPATH=tests python -m soak --minutes 30``, or ``make soak MINUTES=30``.
"""
