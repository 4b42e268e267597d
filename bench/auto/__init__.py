"""Benefit of the hook ``auto``: ``python -m bench.auto``."""
