"""Start the user's training to run stored steps again, for `moe-ckpt replay`, and show the results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import RenderableType

from lightning_moe_ckpt.errors import CheckpointError, ConfigurationError, NoUsableGeneration
from lightning_moe_ckpt.inspection._answers import Answer, Row, plain_table
from lightning_moe_ckpt.inspection._diff import losses_text
from lightning_moe_ckpt.launch import RerunRequest
from lightning_moe_ckpt.storage import Backend, RunView
from lightning_moe_ckpt.storage._open import memory_tag

_STANDARD_ERROR = 2
"""File descriptor for the training's output, since that is no answer."""
_COLUMNS = ("step", "rank", "losses", "journal", "same")
_TITLES = ("step", "rank", "loss", "in the run")
_NONE = "No generation is kept."


def rerun(
    backend: Backend,
    *,
    step: int,
    until: int | None,
    command: Sequence[str],
    dump: Sequence[str] = (),
    out: Path | None = None,
    given: Iterable[tuple[str, object]] = (),
    hook: str = "",
) -> Answer:
    """Run the steps from `step` to `until` again by `command`, see `RerunRequest`. Raises `NoUsableGeneration` if no generation is as old."""
    view, until = RunView.open(backend), step if until is None else until
    kept = sorted(stored.generation.step for stored in view.generations() if stored.usable)
    if not kept or kept[0] > step:
        can = f"Steps from {kept[0]} on can be: generations are kept of {', '.join(map(str, kept))}." if kept else _NONE
        raise NoUsableGeneration(f"Step {step} of run {view.run_id} cannot be run again. {can}")
    if until < step:
        raise ConfigurationError(f"`--until {until}` is before `--step {step}`.")
    if bool(dump) != (out is not None):
        raise ConfigurationError("`--dump` needs `--out`, the folder for it, and `--out` needs `--dump`.")
    if out is not None and f"{out.resolve().as_uri()}/".startswith(f"{view.url.rstrip('/')}/"):
        raise ConfigurationError(
            f"`--out {out}` is inside of the run's URL, where nothing is written. Give another folder."
        )
    asked = {"step": step, "until": until}
    found = run_again(
        view, command, hook=hook, dump=tuple(dump), out=str(out.absolute()) if out else "", given=dict(given), **asked
    )
    document = {
        "url": view.url,
        "run_id": view.run_id,
        "restored": max(each for each in kept if each <= step),
        **asked,
        **found,
        "compared": sum(row["same"] is not None for row in found["steps"]),
        "different": sum(row["same"] is False for row in found["steps"]),
    }
    return Answer(document, lambda: _tables(document), status=1 if document["different"] and not found["notes"] else 0)


def run_again(view: RunView, command: Sequence[str], *, until: int, **asked: Any) -> Row:
    """Run steps of a run again by `command`, as a `RerunRequest` asks, and return its results.

    Raises:
        NoUsableGeneration: the run's log cannot be read.
        CheckpointError: there are no results.
    """
    if view.history is None:
        raise NoUsableGeneration(f"{view.url}: its log cannot be read. `moe-ckpt repair` rebuilds a lost log.")
    tag = memory_tag(view.history.key, view.url)
    with tempfile.TemporaryDirectory(prefix="moe-ckpt-replay-") as folder:
        results = Path(folder, "results.json")
        request = RerunRequest(tag=tag, name=uuid.uuid4().hex, results=str(results), until=until, **asked)
        status = _run(command, os.environ | request.to_environment())
        if not results.is_file():
            failed = f"ended with status {status}, as its output says"
            raise CheckpointError(
                f"Step {until} was not run again: COMMAND {failed if status else 'has ended, and its fit has not come to this step'}. "
                "It has to train as the run did, with its checkpoint callback at this URL."
            )
        found = json.loads(results.read_text("utf-8"))
    rows = [(step, rank, *row) for rank, (own, *_) in enumerate(found["ranks"]) for step, *row in own]
    return {
        "first": found["first"],
        "steps": [dict(zip(_COLUMNS, row, strict=True)) for row in sorted(rows, key=lambda row: row[:2])],
        "notes": list(dict.fromkeys(note for _, _, notes in found["ranks"] for note in notes)),
        "files": sorted(path for _, files, _ in found["ranks"] for path in files),
    }


def _run(command: Sequence[str], environment: dict[str, str]) -> int:
    start = [sys.executable] if command[0].endswith(".py") else []
    try:
        with subprocess.Popen([*start, *command], env=environment, stdout=_STANDARD_ERROR) as child:  # noqa: S603
            try:
                return child.wait()
            except BaseException:
                child.terminate()  # so that a launcher ends its ranks
                raise
    except OSError as error:
        raise ConfigurationError(f"`{command[0]}` cannot be started: {error.strerror}.") from error


def _tables(document: Row) -> list[RenderableType]:
    table = plain_table(*_TITLES, right=_TITLES)
    for row in document["steps"]:
        if row["step"] >= document["step"] or row["same"] is False:
            known = {None: "not known", True: "the same bits"}.get(row["same"], losses_text(row["journal"] or ()))
            table.add_row(str(row["step"]), str(row["rank"]), losses_text(row["losses"]), known)
    restored, compared, different = (document[key] for key in ("restored", "compared", "different"))
    said = f"generation {restored} was restored; {compared} losses compared with the run's, {different} differ"
    lines = [f"note: {note}" for note in document["notes"]]
    if files := document["files"]:
        lines.append(f"{len(files)} files in {os.path.relpath(Path(files[0]).parent)}")
    return [table, said, *lines]
