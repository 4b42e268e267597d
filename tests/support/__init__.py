"""What several test files share: hooks, models, and ranks that run in lockstep in one process."""
