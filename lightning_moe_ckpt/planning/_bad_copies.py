"""Bad copies of experts in storage, exchanged between ranks, so that all ranks plan and reference alike.

A few integers of the exchange before a window carry a rank's newest findings; more wait for the next exchange. An
expert with a bad copy is taken again, and the bad copy is not referenced until a newer copy is complete whose
generation began after the finding: a generation already under way may name the bad copy as its second.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from lightning_moe_ckpt.policies import NEVER, TierLedger
from lightning_moe_ckpt.storage import BadCopies, GenerationId
from lightning_moe_ckpt.tiers import BadCopy, Scrubber

_AT_ONCE = 4
"""Most copies that a rank reports before one window."""
_INTEGERS = 5
"""Integers per copy: the expert's place, counted from 1; step, incarnation and nonce; whether another copy exists."""

WIDTH = _AT_ONCE * _INTEGERS
"""Integers that each rank adds to an exchange."""


class BadCopyList:
    """Bad copies known to one incarnation; the same on all ranks, except unsent findings.

    `names` are the names of all experts' operators, by place over all layers.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names, self._places = names, {name: place for place, name in enumerate(names)}
        self._known: dict[int, set[GenerationId]] = {}
        self._newest: set[int] = set()
        """Experts whose newest copy is bad."""
        self._alone: set[int] = set()
        """Experts among `_newest` without another copy, as far as the finding rank knew."""
        self._begun: dict[int, int] = {}
        """Newest boundary that storage had begun at an expert's finding: markers up to there may name the bad copy."""
        self.scrubber: Scrubber | None = None
        """Reader of stored copies on this rank, which finds bad ones."""

    @property
    def not_referenced(self) -> BadCopies:
        """Bad copies of experts whose newest copy is bad, by name."""
        return {self._names[place]: frozenset(self._known[place]) for place in sorted(self._newest)}

    @property
    def all_have_copies(self) -> bool:
        """Whether each of these experts has another copy; else no generation is complete without the expert."""
        return not any(place in self._alone or len(self._known[place]) > 1 for place in self._newest)

    def restored(self, bad: Mapping[str, Collection[GenerationId]]) -> None:
        """Note the bad copies that this incarnation's restore found, by expert; the newest copy is among them."""
        for name, generations in bad.items():
            if generations:
                self._newest.add(self._places[name])
                self._known.setdefault(self._places[name], set()).update(generations)

    def again(self, storage: TierLedger) -> list[int]:
        """Return the places of experts with bad copies that no generation under way to storage takes."""
        under_way = {expert for each in storage.pending for expert in each.experts.tolist()}
        return sorted(self._known.keys() - under_way)

    def completed(self, storage: TierLedger, step: int) -> None:
        """Note that storage has all of generation `step`; call before the ledger completes it."""
        for each in storage.pending:
            for expert in each.experts.tolist() if each.step == step else ():
                self._newest.discard(expert)
                self._alone.discard(expert)
                if step > self._begun.get(expert, NEVER):
                    self._known.pop(expert, None)
                    self._begun.pop(expert, None)

    def close(self) -> None:
        """Stop reading stored copies."""
        if self.scrubber is not None:
            self.scrubber.close()

    def inputs(self) -> list[int]:
        """Return this rank's new findings as `WIDTH` integers."""
        found = [] if self.scrubber is None else self.scrubber.take_found(_AT_ONCE)
        told = [number for copy in found if copy.operator in self._places for number in self._numbers(copy)]
        return told + [0] * (WIDTH - len(told))

    def agreed(self, rows: Sequence[Sequence[int]], storage: TierLedger) -> None:
        """Take all ranks' findings."""
        for row in rows:
            for i in range(0, WIDTH, _INTEGERS):
                place, step, incarnation, nonce, spared = row[i] - 1, *row[i + 1 : i + _INTEGERS]
                if place < 0:
                    continue
                generation = GenerationId(step=step, incarnation=incarnation, nonce=f"{nonce:012x}")
                self._known.setdefault(place, set()).add(generation)
                self._begun[place] = max((each.step for each in storage.pending), default=NEVER)
                if int(storage.step[place]) == step:
                    self._newest.add(place)
                    self._alone |= set() if spared else {place}

    def _numbers(self, copy: BadCopy) -> list[int]:
        at = copy.generation
        return [self._places[copy.operator] + 1, at.step, at.incarnation, int(at.nonce, 16), int(copy.spared)]
