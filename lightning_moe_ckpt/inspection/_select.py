"""Choose the generation of a command."""

from __future__ import annotations

from lightning_moe_ckpt.errors import NoUsableGeneration
from lightning_moe_ckpt.storage import Commit, RunView, StoredGeneration


def kind_of(commit: Commit) -> str:
    """Return `dense` if one segment per rank holds everything, whatever the callback; `partial` if it references; else `sparse`."""
    if commit.needs:
        return "partial"
    return "dense" if len(commit.steps) == 1 else "sparse"


def select(view: RunView, step: int | None) -> StoredGeneration:
    """Return the generation with this step, or the newest one that a restart would try.

    Of several with one step, usable ones come first, then those of newer incarnations.

    Raises:
        NoUsableGeneration: there is no such generation with a readable manifest.
    """
    stored = view.generations()
    known = sorted({each.generation.step for each in stored if each.commit is not None})
    chosen = [each for each in stored if each.commit is not None and step in {None, each.generation.step}]
    chosen.sort(key=lambda each: each.usable, reverse=True)  # stable: newest first within each
    if not chosen or (step is None and not chosen[0].usable):
        wanted = "no generation that could be restored" if step is None else f"no committed generation of step {step}"
        raise NoUsableGeneration(f"{view.url} holds {wanted}. Committed steps: {known or 'none'}.")
    return chosen[0]
