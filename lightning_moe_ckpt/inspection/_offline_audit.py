"""Run the steps between two stored generations again, and compare every bit with the stored ones.

A difference is a verdict only if it comes back: the steps are then run a second time, and must give the same bits as the
first time.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import RenderableType

from lightning_moe_ckpt.errors import NoUsableGeneration
from lightning_moe_ckpt.inspection._answers import Answer, Row, kind_of
from lightning_moe_ckpt.inspection._diff import (
    Comparison,
    StoredState,
    differences_shown,
    losses_text,
    plain,
    worst_first,
)
from lightning_moe_ckpt.inspection._replays import run_again
from lightning_moe_ckpt.storage import Backend, PosixBackend, RunView

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
            "losses": [
                {"step": row["step"], "rank": row["rank"], "again": row["losses"], "stored": row["journal"]}
                for row in plain(wrong)
            ],
            "operators_compared": len(compared),
            "not_compared": [each for each in comparisons[-1].apart if each not in compared],
            "tensors": rows,
            "notes": [*notes, *comparisons[-1].beside()],
        }
    return Answer(document, lambda: _tables(document), status=_VERDICTS[verdict][0])


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


def _tables(document: Row) -> list[RenderableType]:
    said: list[RenderableType] = [
        f"steps {document['first']} to {document['last'] - 1} of run {document['run_id']} were run again",
        f"losses: {document['losses_compared']} compared, {len(document['losses'])} differ",
    ]
    for row in document["losses"][:1]:
        both = f"{losses_text(row['again'])}, in the run {losses_text(row['stored'])}"
        said.append(f"first: step {row['step']}, rank {row['rank']}: {both}")
    differ = len({row["operator"] for row in document["tensors"]})
    said.append(f"the state that they led to: {document['operators_compared']} operators compared, {differ} differ")
    said += differences_shown(document, "in the run", "again")
    return [*said, *(f"note: {note}" for note in document["notes"]), _VERDICTS[document["verdict"]][1]]
