"""Runs hooks while backward goes on, and records what they cost."""
