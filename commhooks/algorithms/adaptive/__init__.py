"""Hooks that measure while they train, and change what they do by it."""
