"""Puts hooks on a wrapped model."""
