"""The subcommands `ls`, `inspect`, `verify`, `export`, `gc` and `repair`: arguments in, tables or JSON out.

Exit status: 0 if all is well, 1 if `verify` found damage, 2 if the command could not do its work, with one line on
standard error that says why; with `--json` standard output then has `{"error": ...}`, one document in any case.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from rich.console import Console, RenderableType
from rich.filesize import decimal
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from lightning_moe_ckpt.errors import CheckpointError
from lightning_moe_ckpt.inspection import _gc, _repair
from lightning_moe_ckpt.inspection._export import MAX_SHARD_NBYTES, ExportFormat, ExportOptions, export
from lightning_moe_ckpt.inspection._options import add_storage_option, pair, report_failure
from lightning_moe_ckpt.inspection._report import describe, generation_rows, inspect_tables, ls_tables
from lightning_moe_ckpt.inspection._screen import Screen
from lightning_moe_ckpt.inspection._select import select
from lightning_moe_ckpt.inspection._verify import Verdict, verify
from lightning_moe_ckpt.storage import Backend, RunView, open_backend, repair_log

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]  # noqa: SLF001  # argparse has no public name for it

Run = Callable[[argparse.Namespace], int]
Act = Callable[[Backend, argparse.Namespace], int]

_PATIENCE = timedelta(seconds=5)
"""How long a store that does not answer is tried: somebody sits and waits."""

_LS = """\
List what is stored under URL, newest first, and say of each generation whether a restart would try it.

Reads names, the log and manifests, no segments: `verify` reads those. KIND is dense if one step holds everything,
sparse if a window of steps adds up to it, partial if it borrows experts from older ones; NEEDS says from which. Works while the run goes on, and writes nothing.
Exit status: 0 listed, 2 there is no run or it could not be read."""

_INSPECT = """\
Show one generation: how it was planned, which operator was captured at which step, and which rank wrote what.

Reads the markers of all ranks, no segments. What a partial generation borrows is shown with the step it is of. Sizes are without padding; `compute` is what forward and backward of
replayed steps need of an operator whose full state comes later in the window.
Exit status: 0 shown, 2 there is no such generation or its markers could not be read."""

_VERIFY = """\
Read every byte of committed generations, and the log, and compare all digests.

Without --step and --all: each generation that a restart would try, and what it borrows. Files stream past, so memory does not depend on
their size. Exit status: 0 all good, 1 something is damaged or there is nothing to restore, 2 could not be read."""

_EXPORT = """\
Write a generation as files that other programs read; experts of all ranks are put together. Those that a partial
generation borrows are as old as they are; the file says which.

OUT decides what is written:
  *.safetensors   parameters and buffers by name
  *.ckpt          what Lightning would have saved, for load_from_checkpoint and Trainer.fit(ckpt_path=...); it passes
                  torch.load(weights_only=True), and what does not is left out and named
  a folder        for from_pretrained of transformers: config.json and weights of the Hugging Face model in the module
Names are those of the module's state_dict: with tied weights, without buffers that are not persistent. Buffers are
those of rank 0. No format has what an exact restart needs; a run itself resumes from URL.
A sparse generation is several steps in one and cannot be exported; the message names the nearest dense one.
Exit status: 0 written, 2 not written."""


def add_commands(commands: Commands) -> None:
    """Declare the subcommands; each sets `run`, which takes the parsed arguments and returns the exit status."""
    _declare(commands, "ls", "list stored generations", _LS, _ls)
    inspect = _declare(commands, "inspect", "show one generation: operators, steps, ranks, bytes", _INSPECT, _inspect)
    check = _declare(commands, "verify", "read every byte and check every digest", _VERIFY, _verify)
    check.add_argument("--all", action="store_true", help="also generations that no restart would use any more")
    write = _declare(
        commands,
        "export",
        "write a dense or partial generation to safetensors, a .ckpt or a Hugging Face folder",
        _EXPORT,
        _export,
    )
    write.add_argument("out", metavar="OUT", type=Path, help="what to write: *.safetensors, *.ckpt, or a folder")
    _gc.add_arguments(_declare(commands, "gc", "delete what no restart would use any more", _gc.DESCRIPTION, _collect))
    mend = _declare(commands, "repair", "rebuild a lost log from committed generations", _repair.DESCRIPTION, _mend)
    mend.add_argument("--yes", action="store_true", help="write the log; without it, only show what it would name")
    for parser in (inspect, check, write):
        parser.add_argument("--step", type=int, metavar="N", help="this step instead of the newest usable one")
    write.add_argument(
        "--format",
        choices=get_args(ExportFormat),
        metavar="FORMAT",
        help="safetensors, ckpt or huggingface, whatever OUT ends in",
    )
    write.add_argument(
        "--optimizer",
        action="store_true",
        help="safetensors: optimizer state too, beside OUT as *.optimizer.safetensors",
    )
    write.add_argument(
        "--weights-only",
        action="store_true",
        help="ckpt: without optimizer, schedulers and callbacks; a third of the size",
    )
    write.add_argument("--module", metavar="NAME", help="folder: which Hugging Face model, if the module holds several")
    write.add_argument(
        "--max-shard-size",
        type=_size,
        default=MAX_SHARD_NBYTES,
        metavar="SIZE",
        help="folder: bytes per file of weights, such as 500MB (default: 5GB)",
    )
    write.add_argument(
        "--leave-out", action="append", default=[], metavar="PATTERN", help="names to leave out, such as '*.mask'"
    )
    write.add_argument(
        "--tie", action="append", default=[], type=pair, metavar="NEW=STORED", help="a further name of a stored tensor"
    )
    write.add_argument("--force", action="store_true", help="replace files that exist")


def _declare(commands: Commands, name: str, summary: str, description: str, act: Act) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        name, help=summary, description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "url", metavar="URL", help="where the run's checkpoints are: a path, or the URL that was trained with"
    )
    parser.add_argument(
        "--json", action="store_true", help="write one JSON document instead of tables, also of an error"
    )
    add_storage_option(parser)
    parser.set_defaults(run=lambda args: _run(act, args))
    return parser


def _run(act: Act, args: argparse.Namespace) -> int:
    try:
        backend = open_backend(args.url, storage_options=dict(args.storage_option), patience=_PATIENCE)
        try:
            return act(backend, args)
        finally:
            backend.close()
    except CheckpointError as error:
        return report_failure(args.url, error, as_json=args.json)


def _size(text: str) -> int:
    """Bytes, as a number with or without a decimal unit."""
    number = text.strip().upper().removesuffix("B")
    factor = {"K": 10**3, "M": 10**6, "G": 10**9}.get(number[-1:], 1)
    try:
        nbytes = int(float(number.rstrip("KMG")) * factor)
    except (ValueError, OverflowError) as error:
        raise argparse.ArgumentTypeError(f"`{text}` must be bytes such as 500MB or 5GB") from error
    if nbytes < 1:
        raise argparse.ArgumentTypeError(f"`{text}` must be one byte or more")
    return nbytes


def _ls(backend: Backend, args: argparse.Namespace) -> int:
    view = RunView.open(backend)
    rows = generation_rows(view)
    _show(args, {"url": view.url, "run_id": view.run_id, "generations": rows}, lambda: ls_tables(view, rows))
    return 0


def _inspect(backend: Backend, args: argparse.Namespace) -> int:
    view = RunView.open(backend)
    document = describe(view, select(view, args.step))
    _show(args, document, lambda: inspect_tables(document))
    return 0


def _verify(backend: Backend, args: argparse.Namespace) -> int:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    total = sum(each.nbytes for each in RunView.open(backend).generations() if each.committed)
    quiet = args.json or not sys.stderr.isatty()
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=quiet) as bar:
        task = bar.add_task("reading", total=total)
        show = partial(bar.advance, task)
        verdict = verify(backend, step=args.step, everything=args.all, show=show)
    document = dataclasses.asdict(verdict) | {
        "sound": verdict.sound,
        "megabytes_per_second": round(verdict.nbytes_per_second / 1e6, 1),
    }
    _show(args, document, lambda: _verdict_lines(verdict))
    return 0 if verdict.sound else 1


def _verdict_lines(verdict: Verdict) -> list[RenderableType]:
    lines = [f"damaged: {each.generation or 'log'}: {each.reason}" for each in verdict.problems]
    if not verdict.generations:
        lines.append("nothing that could be restored was found")
    count, speed = len(verdict.generations), verdict.nbytes_per_second / 1e6
    lines.append(f"{count} generations read: {', '.join(verdict.generations) or 'none'}; others: {verdict.skipped}")
    lines.append(f"{verdict.num_files} files, {decimal(verdict.nbytes)} in {verdict.seconds:.2f} s: {speed:.0f} MB/s")
    if verdict.num_single:
        lines.append(f"operators with one good copy only, of those taken in turns: {verdict.num_single}")
    lines.append("good" if verdict.sound else "NOT GOOD")
    return list(lines)


def _export(backend: Backend, args: argparse.Namespace) -> int:
    options = ExportOptions(
        format=args.format,
        optimizer=args.optimizer,
        weights_only=args.weights_only,
        module=args.module,
        leave_out=args.leave_out,
        ties=dict(args.tie),
        max_shard_nbytes=args.max_shard_size,
        force=args.force,
    )
    done = export(backend, args.out, options, step=args.step)
    lines: list[RenderableType] = [f"{path}: {decimal(nbytes)}" for path, nbytes in done.files.items()]
    lines += [f"step {done.step} (epoch {done.epoch}) as {done.format}, {done.num_tensors} parameters and buffers"]
    lines += [f"note: {note}" for note in done.notes]
    _show(args, dataclasses.asdict(done), lambda: lines)
    return 0


def _collect(backend: Backend, args: argparse.Namespace) -> int:
    found = _gc.garbage(backend, args)
    _show(args, _gc.document(found), lambda: _gc.tables(found))
    return 0


def _mend(backend: Backend, args: argparse.Namespace) -> int:
    found = repair_log(backend, dry_run=not args.yes)
    _show(args, _repair.document(found), lambda: _repair.tables(found))
    return 0


def _show(args: argparse.Namespace, document: Mapping[str, Any], tables: Callable[[], list[RenderableType]]) -> None:
    """The result on standard output."""
    if args.json:
        sys.stdout.write(json.dumps(document, indent=2) + "\n")
        return
    console = Screen(markup=False)
    for each in tables():
        console.print(each)
