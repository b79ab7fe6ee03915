"""Start the user's training to run stored steps again, for `moe-ckpt replay`, and tell what came of it."""

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
from lightning_moe_ckpt.inspection._answers import Answer, plain_table
from lightning_moe_ckpt.launch import RerunRequest
from lightning_moe_ckpt.storage import Backend, RunView
from lightning_moe_ckpt.storage._open import memory_tag

_STANDARD_ERROR = 2
"""File descriptor: what the training prints is no answer."""


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
        can = (
            f"Steps from {kept[0]} on can be: generations are kept of {', '.join(map(str, kept))}."
            if kept
            else "No generation is kept."
        )
        raise NoUsableGeneration(f"Step {step} of run {view.run_id} cannot be run again. {can}")
    if until < step:
        raise ConfigurationError(f"`--until {until}` is before `--step {step}`.")
    if bool(dump) != (out is not None):
        raise ConfigurationError("`--dump` needs `--out`, the folder for it, and `--out` needs `--dump`.")
    if out is not None and _url_of(out).startswith(f"{view.url.rstrip('/')}/"):
        raise ConfigurationError(
            f"`--out {out}` is inside of the run's URL, where nothing is written. Give another folder."
        )
    with tempfile.TemporaryDirectory(prefix="moe-ckpt-replay-") as folder:
        request = request_for(
            view,
            Path(folder, "results.json"),
            step=step,
            until=until,
            hook=hook,
            dump=tuple(dump),
            out="" if out is None else str(out.absolute()),
            given=dict(given),
        )
        return _answer(view, request, run_again(request, command), kept)


def request_for(view: RunView, results: Path, **asked: Any) -> RerunRequest:
    """Return a request to run steps of a run again. Raises `NoUsableGeneration` if the run's log cannot be read."""
    if view.history is None:
        raise NoUsableGeneration(f"{view.url}: its log cannot be read. `moe-ckpt repair` rebuilds a lost log.")
    tag = memory_tag(view.history.key, view.url)
    return RerunRequest(tag=tag, name=uuid.uuid4().hex, results=str(results), **asked)


def run_again(request: RerunRequest, command: Sequence[str]) -> dict[str, Any]:
    """Run steps again by `command`, and return the results. Raises `CheckpointError` if there are none."""
    status, results = _run(command, os.environ | request.to_environment()), Path(request.results)
    if results.is_file():
        return dict(json.loads(results.read_text("utf-8")))
    failed, ended = (
        f"ended with status {status}, as its output says",
        "has ended, and its fit has not come to this step",
    )
    raise CheckpointError(
        f"Step {request.until} was not run again: COMMAND {failed if status else ended}. It has to train as the run did, with its "
        "checkpoint callback at this URL."
    )


def _url_of(path: Path) -> str:
    return path.resolve().as_uri() + "/"


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


def _answer(view: RunView, request: RerunRequest, found: dict[str, Any], kept: Sequence[int]) -> Answer:
    steps = [
        {"step": step, "rank": rank, "losses": losses, "journal": journal, "same": same}
        for rank, (rows, *_) in enumerate(found["ranks"])
        for step, losses, journal, same in rows
    ]
    notes = list(dict.fromkeys(note for _, _, own in found["ranks"] for note in own))
    document = {
        "url": view.url,
        "run_id": view.run_id,
        "restored": max(step for step in kept if step <= request.step),
        "first": found["first"],
        "step": request.step,
        "until": request.until,
        "steps": sorted(steps, key=lambda row: (row["step"], row["rank"])),
        "compared": sum(row["same"] is not None for row in steps),
        "different": sum(row["same"] is False for row in steps),
        "notes": notes,
        "files": sorted(path for _, files, _ in found["ranks"] for path in files),
    }
    return Answer(document, lambda: _tables(document), status=1 if document["different"] and not notes else 0)


def _tables(document: dict[str, Any]) -> list[RenderableType]:
    table = plain_table()
    for column in ("step", "rank", "loss", "in the run"):
        table.add_column(column, justify="right")
    for row in document["steps"]:
        if row["step"] >= document["step"] or row["same"] is False:
            known = {None: "not known", True: "the same bits"}.get(row["same"], _text(row["journal"]))
            table.add_row(str(row["step"]), str(row["rank"]), _text(row["losses"]), known)
    compared, different = document["compared"], document["different"]
    said = (
        f"generation {document['restored']} was restored; {compared} losses compared with the run's, {different} differ"
    )
    lines = [f"note: {note}" for note in document["notes"]]
    if files := document["files"]:
        lines.append(f"{len(files)} files in {os.path.relpath(Path(files[0]).parent)}")
    return [table, said, *lines]


def _text(losses: Sequence[float] | None) -> str:
    return ", ".join(f"{loss:.9g}" for loss in losses or ())
