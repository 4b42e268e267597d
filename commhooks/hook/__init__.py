"""The contract of hooks: the base class, options, the registry of names, and nested hooks."""
