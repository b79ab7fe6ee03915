"""Start the user's training to run stored steps again: for `moe-ckpt replay` to show them, for `moe-ckpt audit` to compare every bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Iterable, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import RenderableType

from lightning_moe_ckpt.errors import CheckpointError, ConfigurationError, NoUsableGeneration
from lightning_moe_ckpt.inspection._answers import Answer, Row, kind_of, plain_table
from lightning_moe_ckpt.inspection._diff import (
    Comparison,
    StoredState,
    differences_shown,
    losses_text,
    plain,
    worst_first,
)
from lightning_moe_ckpt.launch import RerunRequest
from lightning_moe_ckpt.storage import Backend, PosixBackend, RunView
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
    module, _, function = hook.partition(":")
    beside = [str(Path(each).parent) for each in command if each.endswith(".py")]
    if hook and not (function and PathFinder.find_spec(module.partition(".")[0], ["", *beside, *sys.path])):
        raise ConfigurationError(
            f"`--hook {hook}`: give MODULE:FUNCTION, of a module that Python finds in this folder or beside the script."
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
    with TemporaryDirectory(prefix="moe-ckpt-replay-") as folder:
        results = Path(folder, "results.json")
        request = RerunRequest(tag=tag, name=uuid.uuid4().hex, results=str(results), until=until, **asked)
        status = _run(command, os.environ | request.to_environment())
        found = json.loads(results.read_text("utf-8")) if results.is_file() else {}
    if "ranks" not in found:
        why = "has ended without a fit. It has to train as the run did, with its checkpoint callback at this URL"
        if "ended" in found:
            why = f"has trained up to step {found['ended']}, and ended there. Steps behind the run's end need larger limits in the script"
        why = f"ended with status {status}, as its output says" if status else why
        raise CheckpointError(f"Step {until} was not run again: COMMAND {why}.")
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


_SETTLED = ("ranks", "expert_parallel", "pipeline_parallel", "sharding", "autocast", "versions")
"""Facts that decide a run's bits."""
_WRONG = (
    "OTHER BITS, twice the same here: the run has computed, or kept, something wrong in these steps, or this machine does, "
    "always; an audit on a third machine tells which"
)
_VERDICTS = {
    "the same bits": (0, "the same bits"),
    "other bits": (1, _WRONG),
    "no verdict": (2, "NO VERDICT, for the reasons above"),
}
"""Exit status and words of each verdict."""


class _Again:
    """The steps up to a stored generation, from the boundary `first` on, run again by `command`, with states in `folder`."""

    def __init__(self, view: RunView, first: int, stored: StoredState, command: Sequence[str], folder: Path) -> None:
        steps = stored.commit.steps if stored.told["kind"] == "sparse" else (stored.step,)
        until = stored.step - 1
        self.found = run_again(view, command, step=first, until=until, store=str(folder), store_from=steps[0])
        """Losses by step and rank, and reasons for other bits than those of the run."""
        run = PosixBackend(folder), RunView.open(PosixBackend(folder))
        self.states = [StoredState(run, step, constants=False) for step in steps]
        """States at all boundaries of the stored generation's operators."""

    def doubts(self, twice: _Again, stored: StoredState) -> list[str]:
        """Return reasons why other bits than those that are stored prove nothing; `twice` is the second time."""
        told = self.states[-1].told
        other = [f"other {key} than in the run" for key in _SETTLED if told.get(key) != stored.told.get(key)]
        same = all(Comparison(*pair).equal() for pair in zip(self.states, twice.states, strict=True))
        repeats = same and json.dumps(self.found["steps"]) == json.dumps(twice.found["steps"])
        return [*self.found["notes"], *other, *([] if repeats else ["run twice here, the steps gave different bits"])]


def audit_window(backend: Backend, start: int | None, command: Sequence[str]) -> Answer:
    """Run the steps from one kept generation to the next again, and compare.

    Args:
        backend: storage of the run.
        start: the window begins with the newest generation at or before this step; `None` for the newest two generations.
        command: starts the run's training.

    Raises:
        NoUsableGeneration: there are no two such generations.
        CheckpointError: the training did not come to the second.
    """
    view = RunView.open(backend)
    first, last = _window(view, start)
    stored = StoredState((backend, view), last, constants=False)
    with TemporaryDirectory(prefix="moe-ckpt-audit-") as folder:
        again = _Again(view, first, stored, command, Path(folder, "first"))
        comparisons = [Comparison(stored, state, steps=0) for state in again.states]
        losses = again.found["steps"]
        wrong = [row for row in losses if row["same"] is False]
        rows = worst_first(row for comparison in comparisons for row in comparison.differences())
        notes = list(dict.fromkeys(note for comparison in comparisons for note in comparison.notes))
        verdict = "the same bits"
        if wrong or rows or notes:
            reasons = again.doubts(_Again(view, first, stored, command, Path(folder, "second")), stored)
            verdict, notes = "no verdict" if reasons else "other bits", [*notes, *reasons]
        compared = {operator for comparison in comparisons for operator in comparison.compared}
        document = {
            "url": view.url,
            "run_id": view.run_id,
            "first": first,
            "last": last,
            "verdict": verdict,
            "losses_compared": sum(row["same"] is not None for row in losses),
            "losses_unknown": sum(row["same"] is None for row in losses),
            "losses": [
                {"step": row["step"], "rank": row["rank"], "again": row["losses"], "stored": row["journal"]}
                for row in plain(wrong)
            ],
            "operators_compared": len(compared),
            "not_compared": [each for each in comparisons[-1].apart if each not in compared],
            "tensors": rows,
            "notes": [*notes, *comparisons[-1].beside()],
        }
    return Answer(document, lambda: _audited(document), status=_VERDICTS[verdict][0])


def _window(view: RunView, start: int | None) -> tuple[int, int]:
    """Return the steps of two generations: the first can be resumed for bits, the second is the next one."""
    kept = {each.generation.step: kind_of(each.commit) for each in view.generations() if each.usable and each.commit}
    pairs = [(step, min(later for later in kept if later > step)) for step in kept if step < max(kept)]
    pairs = sorted(pair for pair in pairs if kept[pair[0]] != "partial" and (start is None or pair[0] <= start))
    if not pairs:
        raise NoUsableGeneration(
            f"{view.url} has no two generations, the first of which is{f' at or before step {start}, and' if start is not None else ''} "
            f"resumed for bits. It keeps {', '.join(f'{step} ({kept[step]})' for step in sorted(kept)) or 'none'}."
        )
    return pairs[-1]


def _audited(document: Row) -> list[RenderableType]:
    said: list[RenderableType] = [
        f"steps {document['first']} to {document['last'] - 1} of run {document['run_id']} were run again",
        f"losses: {document['losses_compared']} compared, {len(document['losses'])} differ, {document['losses_unknown']} in no journal",
    ]
    for row in document["losses"][:1]:
        both = f"{losses_text(row['again'])}, in the run {losses_text(row['stored'])}"
        said.append(f"first: step {row['step']}, rank {row['rank']}: {both}")
    differ = len({row["operator"] for row in document["tensors"]})
    said.append(f"the state that they led to: {document['operators_compared']} operators compared, {differ} differ")
    said += differences_shown(document, "in the run", "again")
    return [*said, *(f"note: {note}" for note in document["notes"]), _VERDICTS[document["verdict"]][1]]
