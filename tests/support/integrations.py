"""Which packages of the extra `integrations` are installed."""

from importlib.util import find_spec

PACKAGES = ("accelerate", "lightning", "transformers")
MISSING = [name for name in PACKAGES if find_spec(name) is None]
