"""Communication of hooks: the communicator, its process groups, and topologies."""
