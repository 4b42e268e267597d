"""Tools for authors of hooks to test them: the conformance kit, and tests on several ranks."""

from commhooks.cluster import RankError
from commhooks.testing.conformance import ConformanceError, check_hook
from commhooks.testing.ranks import close_ranks, run_ranks

__all__ = ["ConformanceError", "RankError", "check_hook", "close_ranks", "run_ranks"]
