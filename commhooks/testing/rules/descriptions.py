"""Rules for the name, the config and the source of a hook."""

import json

import torch

import commhooks
from commhooks.hook.base import tree
from commhooks.testing.rules.context import BrokenRuleError, RuleContext, require

__all__ = ["config", "registered", "representation"]


def registered(context: RuleContext) -> None:
    """Be available by name: decorate the class with @register_hook("name")."""
    hook = context.make_hook()
    kind = type(hook)
    require(
        kind.name in commhooks.available(),
        f"expected {kind.__name__} to be registered by name, found none",
    )
    found = type(commhooks.create(hook.to_config()))
    require(found is kind, f"expected create({kind.name!r}) to make a {kind}, found {found}")


def config(context: RuleContext) -> None:
    """Be rebuilt equal by create(hook.to_config()), also through JSON."""
    hook = context.make_hook()
    try:
        stored = json.loads(json.dumps(hook.to_config()))
    except TypeError as error:
        raise BrokenRuleError(f"{hook.to_config()} cannot be written as JSON: {error}") from error
    found = commhooks.create(stored)
    require(found == hook, f"expected {hook!r} from {stored}, found {found!r}")


def representation(context: RuleContext) -> None:
    """Have a repr(hook) that is source code of an equal hook."""
    hook = context.make_hook()
    try:
        kinds = {type(each).__name__: type(each) for each in tree(hook)}
        found = eval(repr(hook), kinds | {"torch": torch})
    except Exception as error:
        raise BrokenRuleError(f"{hook!r} is not valid source code: {error}") from error
    require(found == hook, f"expected the source {hook!r} to make that hook, found {found!r}")
