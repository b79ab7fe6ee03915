"""The subcommand `repair`: a lost log, made again from what is there."""

from __future__ import annotations

from typing import Any

from rich.console import RenderableType
from rich.table import Table

from lightning_moe_ckpt.storage import GenerationId, RepairedLog

DESCRIPTION = """\
Rebuild the log of URL, of which `_log/` is gone or cannot be read, from the manifests of committed generations.

Without --yes it only shows which generations a restart would then try. What is shown as left out is not deleted. Each
generation names the line of starts that led to it; of several lines, that of the start which began last counts. (Older
releases named none: there, a later start is taken to have begun right below its oldest generation that is there.) A manifest that
cannot be read is made again where the markers of all ranks are good. Memory of the nodes is not found any more: names of it
were derived from the log that is lost. Stop the job first.
Exit status: 0 shown or written, 2 there is a log that can be read, or nothing to make one from."""


def document(found: RepairedLog) -> dict[str, Any]:
    """As JSON values."""
    return {
        "url": found.url,
        "run_id": found.run_id,
        "written": found.written,
        "usable": [_row(each) for each in found.usable],
        "mended": [_row(each) for each in found.mended],
        "left_out": [{**_row(each), "reason": reason} for each, reason in found.left_out.items()],
    }


def _row(generation: GenerationId) -> dict[str, int]:
    return {"step": generation.step, "epoch": generation.epoch}


def tables(found: RepairedLog) -> list[RenderableType]:
    """What a restart would try, and what not."""
    table = Table("step", "epoch", "", "why")
    mended = "its manifest cannot be read; markers of all ranks say the same"
    rows = [(each, "usable", mended if each in found.mended else "") for each in found.usable]
    rows += [(each, "left out", reason) for each, reason in found.left_out.items()]
    for each, fate, why in sorted(rows, reverse=True):
        table.add_row(str(each.step), str(each.epoch), fate, why)
    said = "the log is written" if found.written else "nothing is written yet: say --yes to write the log"
    return [f"{found.url}\nrun {found.run_id}", table, said]
