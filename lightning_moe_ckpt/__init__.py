"""Mixture-of-Experts training in PyTorch Lightning that survives failures every few minutes, bit for bit.

Importing the package registers the strategy names `moe`, `moe_spawn` and `moe_fork` with Lightning.
"""

import sys as _sys
from importlib.metadata import version as _version

# Not for the command, which would wait for Lightning for seconds: only its benchmarks train, and they import the strategy.
if not any(program.endswith("moe-ckpt") for program in _sys.argv[:1]):
    from lightning_moe_ckpt.strategy import MoEStrategy as MoEStrategy

__version__ = _version("lightning-moe-ckpt")
