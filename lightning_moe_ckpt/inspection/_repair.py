"""The subcommand `repair`: a lost log, made again from what is there."""

from __future__ import annotations

from typing import Any

from rich.console import RenderableType
from rich.table import Table

from lightning_moe_ckpt.storage import GenerationId, RepairedLog


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
