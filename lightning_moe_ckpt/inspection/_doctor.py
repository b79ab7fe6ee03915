"""The subcommand `doctor`: which compiled parts are in use, and what of the machine they could use."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table

from lightning_moe_ckpt.inspection._screen import Screen
from lightning_moe_ckpt.native import Finding, examine

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]  # noqa: SLF001  # argparse has no public name for it

_DESCRIPTION = """\
Show which compiled parts are in use and why not, and what limits copies on this machine.

Exit status: 0 whatever was found, since everything runs without compiled parts, only slower."""
_STYLES = {"good": "green", "slower": "yellow", "absent": "dim"}


def add_doctor(commands: Commands) -> None:
    """Declare the subcommand."""
    parser = commands.add_parser(
        "doctor",
        help="show which compiled parts are in use and why not",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="write one JSON document instead of a table")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    findings = examine()
    if args.json:
        sys.stdout.write(json.dumps({"findings": [dataclasses.asdict(each) for each in findings]}, indent=2) + "\n")
    else:
        Screen().print(_table(findings))
    return 0


def _table(findings: Sequence[Finding]) -> Table:
    table = Table(show_edge=False)
    for title in ("", "state", "found", "to do"):
        table.add_column(title)
    for each in findings:
        table.add_row(each.name, f"[{_STYLES[each.state]}]{each.state}", each.found, each.advice)
    return table
