"""Hooks that send factors of low rank."""
