"""Sum up a campaign of injected faults: `python -m lightning_moe_ckpt.testing FOLDER`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence

from lightning_moe_ckpt._cli_options import remedy
from lightning_moe_ckpt.errors import CheckpointError
from lightning_moe_ckpt.testing._fault_record import summarize_faults


def main(argv: Sequence[str] | None = None) -> int:
    """Print a table or JSON, and return the exit status: 2 if there is no record."""
    parser = argparse.ArgumentParser(prog="python -m lightning_moe_ckpt.testing", description=__doc__)
    parser.add_argument("folder", help="of the FaultInjector")
    parser.add_argument("--json", action="store_true", help="write figures as JSON")
    args = parser.parse_args(argv)
    try:
        summary = summarize_faults(args.folder)
    except CheckpointError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    if args.json:
        sys.stdout.write(json.dumps({**dataclasses.asdict(summary), "ettr": summary.ettr}, indent=2) + "\n")
        return 0
    try:
        from lightning_moe_ckpt.inspection import Screen
    except ModuleNotFoundError as error:
        sys.stderr.write(f"{remedy(error) or error}\n")
        return 2
    Screen().print(summary.table())
    return 0


if __name__ == "__main__":
    sys.exit(main())
