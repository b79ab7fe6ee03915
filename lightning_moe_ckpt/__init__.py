"""Mixture-of-Experts training in PyTorch Lightning that survives failures every few minutes, bit for bit.

Importing the package registers the strategy names `moe`, `moe_spawn` and `moe_fork` with Lightning.
"""

from importlib.metadata import version as _version

from lightning_moe_ckpt.strategy import MoEStrategy as MoEStrategy

__version__ = _version("lightning-moe-ckpt")
