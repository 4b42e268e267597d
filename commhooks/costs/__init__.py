"""Costs of a training step on a network: pure arithmetic, without processes.

A step trace says what one rank does in a step. :func:`commhooks.costs.timeline.replay` computes how
long that takes on a :class:`commhooks.costs.network.Network`.
"""
