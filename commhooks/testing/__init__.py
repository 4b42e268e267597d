"""What an author of hooks needs to test them."""

from commhooks.testing.ranks import RankError, close_ranks, run_ranks

__all__ = ["RankError", "close_ranks", "run_ranks"]
