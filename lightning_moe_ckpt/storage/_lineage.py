"""What a life descends from, as the log says it and as everything that the life stores repeats it.

So the log can be made again of what is stored: each generation names the line of lives that led to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

from lightning_moe_ckpt.errors import Corrupt
from lightning_moe_ckpt.storage._entries import read_life
from lightning_moe_ckpt.storage._json import Fields, read_integer
from lightning_moe_ckpt.storage._names import GenerationId


@dataclass(frozen=True, slots=True)
class Cut:
    """An epoch and the step it began from; generations of earlier epochs beyond that step are dead."""

    epoch: int
    step: int | None
    """`None` if the epoch began from nothing."""
    life: str = ""
    """Name of the epoch's life; empty for one that an older release began."""

    @property
    def floor(self) -> int:
        """Newest step that survives."""
        return -1 if self.step is None else self.step


@dataclass(frozen=True, kw_only=True, slots=True)
class Lineage:
    """The state of the log when a life began; its own cut is the last one."""

    opened_ns: int
    """When that was, by the clock of its coordinator: nanoseconds since 1970."""
    first_epoch: int
    watermark: int
    kept: frozenset[GenerationId]
    cuts: tuple[Cut, ...]

    @property
    def ancestors(self) -> set[tuple[int, str]]:
        """Epochs and names of the lives before."""
        return {(cut.epoch, cut.life) for cut in self.cuts[:-1]}

    def body(self) -> dict[str, object]:
        """JSON form."""
        return {
            "opened_ns": self.opened_ns,
            "first_epoch": self.first_epoch,
            "watermark": self.watermark,
            "kept": kept_body(self.kept),
            "cuts": cuts_body(self.cuts),
        }

    @classmethod
    def read(cls, body: Fields, generation: GenerationId, where: str) -> Lineage | None:
        """Take what a generation's document says of it; `None` in those that do not. Raises `Corrupt`."""
        if not body.has("lineage"):
            return None
        fields = body.mapping("lineage")
        lineage = cls(
            opened_ns=fields.integer("opened_ns"),
            first_epoch=fields.integer("first_epoch"),
            watermark=fields.integer("watermark"),
            kept=read_kept(fields),
            cuts=read_cuts(fields),
        )
        fields.end()
        if not generation.life or [(c.epoch, c.life) for c in lineage.cuts[-1:]] != [
            (generation.epoch, generation.life)
        ]:
            raise Corrupt(f"{where}: its lineage does not end with the life that wrote it. Another copy may be good.")
        return lineage


def cuts_body(cuts: Sequence[Cut]) -> list[dict[str, object]]:
    """JSON form of cuts."""
    return [{"epoch": cut.epoch, "step": cut.step, "life": cut.life} for cut in cuts]


def read_cuts(body: Fields) -> tuple[Cut, ...]:
    """Take the list of cuts. Raises `Corrupt`."""
    return body.rows("cuts", _read_cut)


def kept_body(kept: Iterable[GenerationId]) -> list[dict[str, object]]:
    """JSON form of what stays, by life, which is shorter: every entry repeats them."""
    lives: dict[tuple[int, str], list[int]] = {}
    for each in sorted(kept, key=lambda each: (each.epoch, each.life, each.step)):
        lives.setdefault((each.epoch, each.life), []).append(each.step)
    return [{"epoch": epoch, "life": life, "steps": steps} for (epoch, life), steps in lives.items()]


def read_kept(body: Fields) -> frozenset[GenerationId]:
    """Take the list of what stays. Raises `Corrupt`."""
    return frozenset(chain.from_iterable(body.rows("kept", _read_kept)))


def _read_kept(value: object, where: str) -> list[GenerationId]:
    body = Fields(value, where)
    epoch, life = body.integer("epoch"), _read_life(body, where)
    kept = [GenerationId(step=step, epoch=epoch, life=life) for step in body.rows("steps", read_integer)]
    body.end()
    return kept


def _read_cut(value: object, where: str) -> Cut:
    body = Fields(value, where)
    cut = Cut(body.integer("epoch"), body.optional("step", read_integer), _read_life(body, where))
    body.end()
    return cut


def _read_life(body: Fields, where: str) -> str:
    """Name of a life; older releases say nothing."""
    life = body.text("life") if body.has("life") else ""
    return read_life(life, where) if life else ""
