"""What a hook is: the base class, its options, the registry of names, and hooks inside hooks."""
