"""Hooks that send a few bits per number: integers, small floats, a few levels, or signs."""
