"""Hooks that send a few bits per element."""
