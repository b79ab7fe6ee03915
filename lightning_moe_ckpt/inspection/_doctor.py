"""Tables of `doctor`: which compiled parts are in use; and with a URL, what is safe there."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator, Sequence
from typing import NoReturn

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from lightning_moe_ckpt.inspection._conformance import Conformance
from lightning_moe_ckpt.native import Finding

_STYLES = {
    "good": "green", "slower": "yellow", "absent": "dim", "weaker": "yellow", "broken": "red", "unknown": "dim",
}  # fmt: skip


@contextlib.contextmanager
def interrupted_by_sigterm() -> Iterator[None]:
    """What was written is removed also when a scheduler ends us."""

    def interrupt(*_: object) -> NoReturn:
        raise SystemExit(128 + signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def conformance_tables(found: Conformance) -> list[RenderableType]:
    """One row per check, then what that means."""
    table = Table("", "state", "found", show_edge=False)
    for each in found.checks:
        table.add_row(each.name, Text(each.state, _STYLES[each.state]), each.found)
    return [table, found.meaning]


def finding_tables(findings: Sequence[Finding]) -> list[RenderableType]:
    """One row per finding."""
    table = Table("", "state", "found", "to do", show_edge=False)
    for each in findings:
        table.add_row(each.name, Text(each.state, _STYLES[each.state]), each.found, each.advice)
    return [table]
