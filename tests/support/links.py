"""A mark for tests over shaped links."""

import pytest

from commhooks.cluster.links import unavailable

needs_links = pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))
