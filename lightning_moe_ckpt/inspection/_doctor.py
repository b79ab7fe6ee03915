"""The subcommand `doctor`: which compiled parts are in use; and with a URL, what is safe there."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NoReturn

from rich.table import Table

from lightning_moe_ckpt.errors import CheckpointError
from lightning_moe_ckpt.inspection._conformance import Conformance, examine_url
from lightning_moe_ckpt.inspection._options import add_storage_option, report_failure
from lightning_moe_ckpt.inspection._screen import Screen
from lightning_moe_ckpt.native import Finding, examine

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]  # noqa: SLF001  # argparse has no public name for it

_DESCRIPTION = """\
Without URL: show which compiled parts are in use and why not, and what limits copies on this machine.
Exit status: 0 whatever was found, since everything runs without compiled parts, only slower.

With URL: try there what checkpoints rely on (listings, exclusive creates and races of them, large and half-written
objects, leftovers), and say whether they are safe. Objects are written under URL/_doctor/ and removed again, also when
interrupted; a run that is stored there is not touched.
Exit status: 0 fenced, that is safe whatever happens; 1 unfenced or unsafe, and the last line says which and what that
means; 2 nothing can be written there."""
_STYLES = {
    "good": "green", "slower": "yellow", "absent": "dim", "weaker": "yellow", "broken": "red", "unknown": "dim",
}  # fmt: skip


def add_doctor(commands: Commands) -> None:
    """Declare the subcommand."""
    parser = commands.add_parser(
        "doctor",
        help="show which compiled parts are in use, or whether checkpoints are safe at a URL",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("url", nargs="?", metavar="URL", help="a path or any URL that the callback takes")
    parser.add_argument("--json", action="store_true", help="write one JSON document instead of a table")
    add_storage_option(parser)
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    if args.url is not None:
        return _run_url(args.url, dict(args.storage_option), as_json=args.json)
    findings = examine()
    if args.json:
        sys.stdout.write(json.dumps({"findings": [dataclasses.asdict(each) for each in findings]}, indent=2) + "\n")
    else:
        Screen().print(_table(findings))
    return 0


def _run_url(url: str, storage_options: Mapping[str, object], *, as_json: bool) -> int:
    try:
        with _interrupted_by_sigterm():
            found = examine_url(url, storage_options=storage_options, progress=_show)
    except CheckpointError as error:
        return report_failure(url, error, as_json=as_json)
    if as_json:
        document = {**dataclasses.asdict(found), "verdict": found.verdict, "meaning": found.meaning}
        sys.stdout.write(json.dumps(document, indent=2) + "\n")
    else:
        screen = Screen()
        screen.print(_conformance_table(found))
        screen.print(found.meaning, markup=False)
    return 0 if found.verdict == "fenced" else 1


def _show(check: str) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\033[Ktrying: {check}\r")
        sys.stderr.flush()


@contextlib.contextmanager
def _interrupted_by_sigterm() -> Iterator[None]:
    """What was written is removed also when a scheduler ends us."""

    def interrupt(*_: object) -> NoReturn:
        raise SystemExit(128 + signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _conformance_table(found: Conformance) -> Table:
    table = Table(show_edge=False)
    for title in ("", "state", "found"):
        table.add_column(title)
    for each in found.checks:
        table.add_row(each.name, f"[{_STYLES[each.state]}]{each.state}", each.found)
    return table


def _table(findings: Sequence[Finding]) -> Table:
    table = Table(show_edge=False)
    for title in ("", "state", "found", "to do"):
        table.add_column(title)
    for each in findings:
        table.add_row(each.name, f"[{_STYLES[each.state]}]{each.state}", each.found, each.advice)
    return table
