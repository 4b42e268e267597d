"""The same as :mod:`commhooks.integrations.lightning` for the package ``pytorch_lightning``."""

try:
    from lightning_fabric.strategies import STRATEGY_REGISTRY
    from lightning_fabric.strategies.ddp import DDPStrategy as FabricDDPStrategy
    from pytorch_lightning.callbacks import Callback
    from pytorch_lightning.strategies import DDPStrategy, StrategyRegistry
except ImportError as error:
    raise ImportError(
        "commhooks.integrations.pytorch_lightning needs its package: pip install pytorch-lightning"
    ) from error

from commhooks.integrations.lightning_parts import FabricStrategy, HookCallback, TrainerStrategy


class CommHooksStrategy(TrainerStrategy, DDPStrategy):
    """See :class:`commhooks.integrations.lightning.CommHooksStrategy`."""


class FabricCommHooksStrategy(FabricStrategy, FabricDDPStrategy):
    """See :class:`commhooks.integrations.lightning.FabricCommHooksStrategy`."""


class CommHookCallback(HookCallback, Callback):
    """See :class:`commhooks.integrations.lightning.CommHookCallback`."""


# After another import of this module, as in an interactive session, the newest class counts.
StrategyRegistry.register("commhooks", CommHooksStrategy, override=True)
STRATEGY_REGISTRY.register("commhooks", FabricCommHooksStrategy, override=True)
