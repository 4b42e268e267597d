"""How numbers become bytes and back; what quantizing hooks send.

Imports: hook, kernels, reducer.
"""

from commhooks.codecs.block import BlockCodec
from commhooks.codecs.codec import Codec
from commhooks.codecs.fp8 import Fp8
from commhooks.codecs.levels import Levels
from commhooks.codecs.natural import Natural
from commhooks.codecs.sign import Sign

__all__ = ["BlockCodec", "Codec", "Fp8", "Levels", "Natural", "Sign"]
