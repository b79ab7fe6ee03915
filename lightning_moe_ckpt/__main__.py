"""Run the command `moe-ckpt` as `python -m lightning_moe_ckpt`."""

import sys

from lightning_moe_ckpt.cli import main

if __name__ == "__main__":
    sys.exit(main())
