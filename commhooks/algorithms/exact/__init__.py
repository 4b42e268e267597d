"""Hooks that average exactly, up to rounding, and a hook that communicates nothing."""
