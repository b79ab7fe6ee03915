"""The subcommand `gc`: what of a run goes, what stays, and why."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from typing import Any

from rich.console import RenderableType
from rich.filesize import decimal
from rich.table import Table

from lightning_moe_ckpt.errors import ConfigurationError
from lightning_moe_ckpt.inspection._verify import verify
from lightning_moe_ckpt.storage import Backend, Garbage, GenerationId, JudgedGeneration, Retention, collect_garbage

DESCRIPTION = """\
Delete what nobody may restore any more, and say why; with --dry-run only say it.

Without --keep-...: what the run itself has given up but not deleted, because it was killed or its storage failed:
generations below the watermark, of lives that others took over from, never committed by lives that are over, and of
earlier runs once the newer one has more than it keeps; and what interrupted writes and uploads of those left.
With --keep-...: first gives up all that none of these rules keeps, the newest always being kept. What a generation
that stays borrows from stays with it; if the newest borrows, the last two are kept, since a save may borrow from both,
and with them the copy before the newest one of each operator that is taken in turns.
Manifests and sizes say what is whole. With --verify, which reads every byte of as many of the newest as --keep-last says
(2 without it), a damaged one does not count, and the next older one is kept in its place.

Works while a job uses URL, which takes note and goes on; a job that starts meanwhile picks again.
Exit status: 0 done, 2 there is no run or something could not be read or deleted; the next gc goes on there."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what only `gc` has."""
    parser.add_argument("--dry-run", action="store_true", help="delete nothing and write nothing")
    parser.add_argument("--keep-last", type=int, metavar="N", help="keep the newest N (default: 2)")
    parser.add_argument(
        "--keep-every", type=int, metavar="N", help="keep the first at or after every Nth step (default: none)"
    )
    parser.add_argument(
        "--keep-days",
        type=float,
        metavar="D",
        help="keep those committed at most D days before the newest (default: none)",
    )
    parser.add_argument(
        "--verify", action="store_true", help="with --keep-...: read what is to be kept before others are given up"
    )


def garbage(backend: Backend, args: argparse.Namespace) -> Garbage:
    """Collect as the arguments say.

    Raises:
        ConfigurationError: nothing is to be kept, so there is nothing to verify first.
    """
    retention = _retention(args)
    if args.verify and retention is None:
        raise ConfigurationError(
            "--verify reads what is to be kept before others are given up, and without --keep-... none are. "
            "Add --keep-last=2, or use `moe-ckpt verify`."
        )
    check = partial(_what_is_wrong, backend) if args.verify else None
    return collect_garbage(backend, retention, dry_run=args.dry_run, check=check)


def _what_is_wrong(backend: Backend, generation: GenerationId) -> str | None:
    """With the files of a generation, or with what it borrows."""
    problems = verify(backend, step=generation.step).problems
    return next((each.reason for each in problems if each.generation == str(generation)), None)


def _retention(args: argparse.Namespace) -> Retention | None:
    """What was asked for; `None` if nothing was."""
    last, every, days = args.keep_last, args.keep_every, args.keep_days
    if last is None and every is None and days is None:
        return None
    return Retention(last=Retention().last if last is None else last, every_n_steps=every, days=days)


def document(found: Garbage) -> dict[str, Any]:
    """As JSON values."""
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
        "epoch": each.generation.epoch,
        "objects": each.num_objects,
        "unfinished": each.num_leftovers,
        "nbytes": each.nbytes,
        "reason": each.reason,
    }


def tables(found: Garbage) -> list[RenderableType]:
    """Newest first, as `ls` has them, and the sum."""
    goes = "deleted" if found.deleted else "would go"
    table = Table("step", "epoch", "objects", "size", "", "why")
    for column in table.columns[:4]:
        column.justify = "right"
    rows = [(each, goes) for each in found.goes] + [(each, "stays") for each in found.stays]
    for each, fate in sorted(rows, key=lambda row: row[0].generation, reverse=True):
        objects = str(each.num_objects) + (f" + {each.num_leftovers} unfinished" if each.num_leftovers else "")
        place = (str(each.generation.step), str(each.generation.epoch), objects)
        table.add_row(*place, decimal(each.nbytes), fate, each.reason)
    said = f"{goes}: {_sum(found.goes)}; stays: {_sum(found.stays)}"
    return [f"{found.url}\nrun {found.run_id}", table, said]


def _sum(those: Sequence[JudgedGeneration]) -> str:
    return f"{len(those)} generations, {decimal(sum(each.nbytes for each in those))}"
