"""A spare that imports what takes long, waits for its place, and runs the user's script: for scripts that read RANK early.

python -m lightning_moe_ckpt.launch._imports [-m] script args
"""

from __future__ import annotations

import importlib
import os
import runpy
import sys
from pathlib import Path

from lightning_moe_ckpt.launch import Supervised

_PACKAGES = ("torch", "lightning.pytorch", "lightning_moe_ckpt.callbacks", "lightning_moe_ckpt.strategy")


def main() -> None:
    """Import, wait, run."""
    _, script, *arguments = sys.argv
    is_module = script == "-m"
    if is_module:
        script, *arguments = arguments
    for name in _PACKAGES:
        importlib.import_module(name)
    Supervised.from_environment()
    # What Lightning prints on rank 0 only, it decides at import.
    rank_zero = importlib.import_module("lightning.fabric.utilities.rank_zero")
    rank_zero.rank_zero_only.rank = int(os.environ["RANK"])
    sys.argv = [script, *arguments]
    if is_module:
        sys.path[0] = ""
        runpy.run_module(script, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(script).resolve().parent)
        runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
