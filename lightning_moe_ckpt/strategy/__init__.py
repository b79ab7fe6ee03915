"""Provide the Lightning Strategy for Mixture-of-Experts models. Importing it registers `Trainer(strategy="moe")`."""

from lightning.pytorch.strategies import StrategyRegistry as _StrategyRegistry

from lightning_moe_ckpt.fit._cli import explain_errors as _explain_errors
from lightning_moe_ckpt.strategy._moe_strategy import MoEStrategy as MoEStrategy

MoEStrategy.register_strategies(_StrategyRegistry)

_explain_errors()
