"""What a hook sends through: the communicator, its process groups, and who sends to whom."""
