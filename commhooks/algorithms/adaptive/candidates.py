"""The hooks that ``auto`` chooses from, and their specs in plans."""

import json
from contextlib import suppress
from typing import Any

from commhooks.errors import CommHookError, CommHookOptionError
from commhooks.hook.base import CommHook, has_consensus, tree
from commhooks.hook.registry import create, declared_candidates
from commhooks.hook.spec import parse_hook_spec
from commhooks.planning import DEFAULT_CANDIDATES

__all__ = ["check_candidate", "default_candidates", "hook_of_spec", "spec_of"]


def default_candidates() -> list[CommHook]:
    """Return new hooks: those of planning/candidates.py, and those that declare themselves."""
    own = [parse_hook_spec(spec).create() for spec in DEFAULT_CANDIDATES]
    return own + [create(name) for name in declared_candidates()]


def hook_of_spec(value: Any) -> Any:
    """Return the hook of a spec with options, such as "powersgd:rank=4"; other values as is."""
    if isinstance(value, str) and ":" in value:
        return parse_hook_spec(value).create()
    return value


def spec_of(hook: CommHook) -> str:
    """Return the hook as on the command line, with the options that are not the default."""
    options = hook.to_config()
    del options["name"]
    with suppress(CommHookError):  # it has options without a default
        usual = create(hook.name).to_config()
        options = {name: value for name, value in options.items() if value != usual[name]}
    texts = [f"{name}={json.dumps(value)}" for name, value in options.items()]
    return f"{hook.name}:{','.join(texts)}" if texts else hook.name


def check_candidate(hook: CommHook, option: str, owner: str) -> None:
    """Raise CommHookOptionError unless parameters may move from and to the hook at any step."""
    problem = ""
    if not has_consensus(hook):
        problem = "does not return the same on all ranks"
    elif hook.changes_parameters:
        problem = "changes parameters"
    elif any(each.skips_steps for each in tree(hook)):
        problem = "skips steps of the training loop"
    elif any(each.spreads_parameters for each in tree(hook)):
        problem = "keeps state of other parameters on other ranks"
    if problem:
        raise CommHookOptionError(
            f"option {option!r} of hook {owner!r}: expected hooks that average gradients in the "
            f"same step, such as int8 or powersgd; {hook!r} {problem}"
        )
