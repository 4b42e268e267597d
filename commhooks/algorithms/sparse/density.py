"""Which share of a bucket is sent, and how that share begins.

Gradients change fastest in the first steps, and what is held back then is out of date when it is
sent. So the share falls step by step, by the same factor each time, to what it is to be: the
warm-up of Lin et al., https://arxiv.org/abs/1712.01887, section 3.3.
"""

import math
from dataclasses import dataclass

__all__ = ["Density"]


@dataclass(frozen=True)
class Density:
    """``first`` in step 0, then falling exponentially to ``last`` in step ``warmup_steps``."""

    last: float
    first: float
    warmup_steps: int

    def at(self, step: int) -> float:
        """Never less than ``last``."""
        if step >= self.warmup_steps:
            return self.last
        fall = self.last / self.first
        return max(self.last, self.first * math.pow(fall, step / self.warmup_steps))
