"""Run the subcommand `gc`: say which generations go, which stay, and why."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from rich.console import RenderableType
from rich.filesize import decimal
from rich.table import Table

from lightning_moe_ckpt.errors import ConfigurationError
from lightning_moe_ckpt.inspection._verify import verify
from lightning_moe_ckpt.storage import Backend, Garbage, GenerationId, JudgedGeneration, Retention, collect_garbage


def garbage(
    backend: Backend,
    *,
    keep_last: int | None,
    keep_every: int | None,
    keep_days: float | None,
    verify_first: bool,
    dry_run: bool,
) -> Garbage:
    """Delete generations that no rule keeps; without rules, those that the run itself has given up.

    Raises:
        ConfigurationError: no generation would be kept, so there is none to verify first.
    """
    retention = None
    if (keep_last, keep_every, keep_days) != (None, None, None):
        last = Retention().last if keep_last is None else keep_last
        retention = Retention(last=last, every_n_steps=keep_every, days=keep_days)
    elif verify_first:
        raise ConfigurationError(
            "--verify reads what is to be kept before others are given up, and without --keep-... none are. "
            "Add --keep-last=2, or use `moe-ckpt verify`."
        )
    check = partial(_what_is_wrong, backend) if verify_first else None
    return collect_garbage(backend, retention, dry_run=dry_run, check=check)


def _what_is_wrong(backend: Backend, generation: GenerationId) -> str | None:
    """Return what is wrong with a generation's files, own or referenced; `None` if nothing is."""
    problems = verify(backend, step=generation.step).problems
    return next((each.reason for each in problems if each.generation == str(generation)), None)


def document(found: Garbage) -> dict[str, Any]:
    """Return the result as JSON values."""
    return {
        "url": found.url,
        "run_id": found.run_id,
        "watermark": found.watermark,
        "deleted": found.deleted,
        "nbytes": found.nbytes,
        "goes": [_row(each) for each in found.goes],
        "stays": [_row(each) for each in found.stays],
    }


def _row(each: JudgedGeneration) -> dict[str, Any]:
    return {
        "step": each.generation.step,
        "incarnation": each.generation.incarnation,
        "objects": each.num_objects,
        "unfinished": each.num_unfinished,
        "nbytes": each.nbytes,
        "reason": each.reason,
    }


def tables(found: Garbage) -> list[RenderableType]:
    """Return a table of generations, newest first as in `ls`, and the sum."""
    goes = "deleted" if found.deleted else "would go"
    table = Table("step", "incarnation", "objects", "size", "", "why")
    for column in table.columns[:4]:
        column.justify = "right"
    rows = [(each, goes) for each in found.goes] + [(each, "stays") for each in found.stays]
    for each, fate in sorted(rows, key=lambda row: row[0].generation, reverse=True):
        objects = str(each.num_objects) + (f" + {each.num_unfinished} unfinished" if each.num_unfinished else "")
        place = (str(each.generation.step), str(each.generation.incarnation), objects)
        table.add_row(*place, decimal(each.nbytes), fate, each.reason)
    said = f"{goes}: {_sum(found.goes)}; stays: {_sum(found.stays)}"
    return [f"{found.url}\nrun {found.run_id}", table, said]


def _sum(those: Sequence[JudgedGeneration]) -> str:
    return f"{len(those)} generations, {decimal(sum(each.nbytes for each in those))}"
