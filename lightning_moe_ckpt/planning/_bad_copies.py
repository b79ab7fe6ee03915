"""Which stored copies of experts turned out bad, on any rank: told to all of them, so that all plan and reference alike.

A few integers of the exchange before a window carry what a rank has found since; more wait for the next one. An expert
of which a copy is bad is taken again, and its bad copy is not referenced any more, until a newer one is complete that was
begun since: one that was under way may name the bad copy as its second.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from lightning_moe_ckpt.policies import NEVER, TierLedger
from lightning_moe_ckpt.storage import BadCopies, GenerationId
from lightning_moe_ckpt.tiers import BadCopy, Scrubber

_AT_ONCE = 4
"""Copies that a rank tells of before one window."""
_INTEGERS = 5
"""That say which one: place of the expert, counted from 1, then step, incarnation and nonce; and whether there is another."""

WIDTH = _AT_ONCE * _INTEGERS
"""Integers that each rank adds to an exchange."""


class BadCopyList:
    """Bad copies known to one incarnation; the same on all ranks but for what this one has found and not told.

    `names` are those of the operators of all experts, by place over all layers.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names, self._places = names, {name: place for place, name in enumerate(names)}
        self._known: dict[int, set[GenerationId]] = {}
        self._newest: set[int] = set()
        """Experts whose newest copy is among them."""
        self._alone: set[int] = set()
        """Of these, those that had no other one, as far as the rank knew that found it."""
        self._begun: dict[int, int] = {}
        """Newest boundary that storage had begun when an expert got here: up to that, markers may name the bad copy."""
        self.scrubber: Scrubber | None = None
        """Finds some on this rank."""

    @property
    def not_referenced(self) -> BadCopies:
        """Of experts whose newest copy is bad."""
        return {self._names[place]: frozenset(self._known[place]) for place in sorted(self._newest)}

    @property
    def all_have_copies(self) -> bool:
        """Whether each of these experts has another one; else nothing completes a generation without it."""
        return not any(place in self._alone or len(self._known[place]) > 1 for place in self._newest)

    def restored(self, bad: Mapping[str, Collection[GenerationId]]) -> None:
        """Note what the restore of this incarnation found, by name of expert; the newest copy is among them."""
        for name, generations in bad.items():
            if generations:
                self._newest.add(self._places[name])
                self._known.setdefault(self._places[name], set()).update(generations)

    def again(self, storage: TierLedger) -> list[int]:
        """Return places of experts that have to be taken once more, as none that storage is given has them."""
        under_way = {expert for each in storage.pending for expert in each.experts.tolist()}
        return sorted(self._known.keys() - under_way)

    def completed(self, storage: TierLedger, step: int) -> None:
        """Note that storage has all of generation `step`; call before its ledger takes that in."""
        for each in storage.pending:
            for expert in each.experts.tolist() if each.step == step else ():
                self._newest.discard(expert)
                self._alone.discard(expert)
                if step > self._begun.get(expert, NEVER):
                    self._known.pop(expert, None)
                    self._begun.pop(expert, None)

    def close(self) -> None:
        """Stop looking."""
        if self.scrubber is not None:
            self.scrubber.close()

    def inputs(self) -> list[int]:
        """Return what this rank tells the others: `WIDTH` integers."""
        found = [] if self.scrubber is None else self.scrubber.take_found(_AT_ONCE)
        told = [number for copy in found if copy.operator in self._places for number in self._numbers(copy)]
        return told + [0] * (WIDTH - len(told))

    def agreed(self, rows: Sequence[Sequence[int]], storage: TierLedger) -> None:
        """Take what all ranks told."""
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
