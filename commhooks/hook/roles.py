"""The roles that parameters have in a model, for hooks that treat some of them differently."""

from collections.abc import Iterator
from contextlib import suppress

from torch import nn

from commhooks.hook.base import Role

_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)


def roles_of(model: nn.Module) -> dict[str, Role]:
    """Return the roles of the parameters of ``model`` that have one, by all their names.

    Embeddings are the weights of ``nn.Embedding`` and ``nn.EmbeddingBag``, also where other modules
    share them. The output is the layer that ``get_output_embeddings()`` returns, as models of
    Transformers have it. Without one, it is the ``nn.Linear`` nearest to the root of the module
    tree, the one registered last if there are several; those inside an ``nn.ModuleList`` or
    ``nn.ModuleDict``, which hold repeated blocks, do not count.
    """
    output = _named_output(model) or _last_linear(model)
    roles: dict[int, Role] = {id(p): "output" for p in (output.parameters() if output else ())}
    for module in model.modules():
        if isinstance(module, _EMBEDDINGS):
            roles.update((id(parameter), "embedding") for parameter in module.parameters())
    named = model.named_parameters(remove_duplicate=False)
    return {name: roles[id(parameter)] for name, parameter in named if id(parameter) in roles}


def _named_output(model: nn.Module) -> nn.Module | None:
    for level in _levels(model):
        for module in level:
            with suppress(Exception):  # there is no such method, or it is another or abstract one
                found = module.get_output_embeddings()  # type: ignore[operator]
                if isinstance(found, nn.Module):
                    return found
    return None


def _last_linear(model: nn.Module) -> nn.Module | None:
    for level in _levels(model):
        if linears := [module for module in level if isinstance(module, nn.Linear)]:
            return linears[-1]
    return None


def _levels(model: nn.Module) -> Iterator[list[nn.Module]]:
    """Yield the modules at each depth, without repeated blocks."""
    level = [model]
    while level:
        yield level
        level = [
            child
            for module in level
            if not isinstance(module, nn.ModuleList | nn.ModuleDict)
            for child in module.children()
        ]
