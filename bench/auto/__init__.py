"""What the hook ``auto`` is worth: ``python -m bench.auto``."""
