"""Hooks that send some of the elements."""
