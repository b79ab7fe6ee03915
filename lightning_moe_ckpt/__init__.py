"""Mixture-of-Experts training in PyTorch Lightning that survives failures every few minutes, bit for bit.

Importing the package registers the strategy names `moe`, `moe_spawn` and `moe_fork` with Lightning.
"""

import sys as _sys
from importlib.metadata import version as _version


def _is_command() -> bool:
    """Whether this process is `moe-ckpt`, or `python -m lightning_moe_ckpt`."""
    program = _sys.argv[0] if _sys.argv else ""
    if program == "-m":  # as long as Python looks for the module, which imports this package
        return f"-m {__name__} " in f"{' '.join(_sys.orig_argv)} ".replace(f"{__name__}.cli ", f"{__name__} ")
    return program.endswith("moe-ckpt")


# Not for the command, which would wait for Lightning for seconds: only its benchmarks train, and they import the strategy.
if not _is_command():
    from lightning_moe_ckpt.strategy import MoEStrategy as MoEStrategy

__version__ = _version("lightning-moe-ckpt")
