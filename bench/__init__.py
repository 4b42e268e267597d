"""Measurements; see README.md for what each column means."""
