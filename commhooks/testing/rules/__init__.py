"""The rules that every hook must follow, one function per rule.

Each rule runs on every rank, and raises :class:`BrokenRuleError` only after its last collective, so
that no other rank waits for this one.
"""

from collections.abc import Mapping

from commhooks.testing.rules.composition import contribution, nested
from commhooks.testing.rules.context import (
    BrokenRuleError,
    Factory,
    Rule,
    RuleContext,
    has_consensus,
    is_lossless,
)
from commhooks.testing.rules.descriptions import config, registered, representation
from commhooks.testing.rules.engine import cost, failure, torch_ddp, unused, wire
from commhooks.testing.rules.results import (
    alone,
    consensus,
    deterministic,
    mean,
    result,
    sizes,
    zeros,
)
from commhooks.testing.rules.states import keys, non_finite, resume

__all__ = ["RULES", "BrokenRuleError", "Factory", "RuleContext", "has_consensus", "is_lossless"]

RULES: Mapping[str, Rule] = {
    rule.__name__: rule
    for rule in (
        registered,
        config,
        representation,
        result,
        mean,
        alone,
        deterministic,
        consensus,
        zeros,
        sizes,
        non_finite,
        keys,
        resume,
        wire,
        cost,
        unused,
        failure,
        nested,
        contribution,
        torch_ddp,
    )
}
