"""Which generations may go: a pure decision over a listing, so that it can be tested against a model.

Mark and sweep: the watermark is appended to the log first, and only then is anything below it deleted; a crash in
between costs space, never a generation. What a life of ours may still be writing is never touched.
"""

from __future__ import annotations

from collections.abc import Sequence

from lightning_moe_ckpt.storage._catalog import Catalog, Contents
from lightning_moe_ckpt.storage._log import History
from lightning_moe_ckpt.storage._names import GenerationId


def next_watermark(
    history: History, usable: Sequence[GenerationId], *, keep: int, in_use: GenerationId | None
) -> int | None:
    """Step of the oldest generation to keep, `None` if the watermark stays.

    Args:
        history: state of the log.
        usable: restorable generations, newest first.
        keep: how many of them to keep.
        in_use: the generation the run is restoring from; never passed.
    """
    if len(usable) <= keep:
        return None
    step = usable[keep - 1].step
    if in_use is not None:
        step = min(step, in_use.step)
    return step if step > history.watermark else None


def doomed_generations(
    catalog: Catalog, history: History, *, epoch: int, in_use: GenerationId | None
) -> list[GenerationId]:
    """Generations to delete, oldest first.

    Args:
        catalog: what is stored.
        history: state of the log, with the watermark already appended.
        epoch: our own life.
        in_use: the generation the run is restoring from.
    """
    ours = [g for g, contents in catalog.items() if g.epoch == epoch and contents.committed]
    newest_own = max(ours, default=GenerationId(step=-1, epoch=epoch))
    return sorted(
        generation
        for generation, contents in catalog.items()
        if generation != in_use and generation.epoch <= epoch and _is_garbage(generation, contents, history, newest_own)
    )


def _is_garbage(generation: GenerationId, contents: Contents, history: History, newest_own: GenerationId) -> bool:
    if generation.epoch < history.first_epoch:
        # An earlier run stays whole until this one has more generations than it keeps.
        return not contents.committed or history.watermark > 0
    if not contents.committed:
        # Ranks write generations in order: below our newest commit nothing is in flight any more.
        return generation.epoch < newest_own.epoch or generation.step < newest_own.step
    return history.why_dead(generation) is not None
