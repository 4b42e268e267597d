"""Puts hooks on a wrapped model, and saves their state."""
