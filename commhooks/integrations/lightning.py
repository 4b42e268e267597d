"""Hooks in Lightning's Trainer and in Fabric: the package ``lightning``.

::

    from lightning.pytorch import Trainer
    from commhooks.integrations.lightning import CommHooksStrategy

    trainer = Trainer(strategy=CommHooksStrategy("powersgd", rank=4), devices=2)

See docs/integrations/lightning.md and docs/integrations/fabric.md. For the package
``pytorch_lightning`` there is :mod:`commhooks.integrations.pytorch_lightning`.
"""

try:
    from lightning.fabric.strategies import STRATEGY_REGISTRY
    from lightning.fabric.strategies.ddp import DDPStrategy as FabricDDPStrategy
    from lightning.pytorch.callbacks import Callback
    from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
except ImportError as error:
    raise ImportError(
        "commhooks.integrations.lightning needs the package lightning: pip install lightning"
    ) from error

from commhooks.integrations.lightning_parts import FabricStrategy, HookCallback, TrainerStrategy


class CommHooksStrategy(TrainerStrategy, DDPStrategy):
    """The Trainer's ``DDPStrategy`` on our wrapper, with a hook.

    Args:
        hook: What :func:`commhooks.register` accepts; None: the plain average, unless a callback
            registers a hook.
        **options: Arguments of Lightning's ``DDPStrategy`` and of our wrapper, by name. All others
            are options of the hook.

    Attributes:
        handle: The handle of the hook, once ``fit`` has wrapped the model.
    """


class FabricCommHooksStrategy(FabricStrategy, FabricDDPStrategy):
    """Fabric's ``DDPStrategy`` on our wrapper, with a hook.

    Arguments and attributes are those of the Trainer's strategy. ``fabric.save()`` and
    ``fabric.load()`` keep the state of all ranks if the model and an optimizer are in their dict,
    or ``handle``.
    """


class CommHookCallback(HookCallback, Callback):
    """Register a hook on the model of any strategy, and log what it costs.

    Args:
        hook: What :func:`commhooks.register` accepts; None: only log, for a strategy that has
            registered a hook.
        log_stats: Log the statistics of the hook after each batch, as "commhooks/wire_bytes" and so
            on; Lightning's ``log_every_n_steps`` applies.
        **options: The options of a named hook.

    Attributes:
        handle: The handle of the hook, once ``fit`` has begun.
    """


# After another import of this module, as in an interactive session, the newest class counts.
StrategyRegistry.register("commhooks", CommHooksStrategy, override=True)
STRATEGY_REGISTRY.register("commhooks", FabricCommHooksStrategy, override=True)
