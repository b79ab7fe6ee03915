"""Saved tokens of each expert in one level, from given and completed generations.

A generation under way counts as saved, so that the next takes other experts; once the level has completed a newer
generation, it was skipped and counts no more. A skipped expert counts as saved only when that is certain: otherwise a
level that takes every second generation could miss the same experts for ever, since they would be given once, left out
of the next generation, and given again in the one after. All ranks agree on the completed generations (with the votes
of a window), so every rank has the same ledger.

A level that keeps a limited number of generations has dropped the rest: the ledger knows of no copy in those.

Shape suffixes: E experts of all layers, S experts of one generation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

NEVER = -1
"""No generation: no boundary has this number."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Pending:
    """A generation given to a level and not completed yet."""

    step: int
    """Boundary of the generation."""
    experts: Tensor
    """int64 `[S]`, places in the vector over all experts."""
    alive: Tensor
    """int64 `[S]`, tokens in the experts' weights at that boundary."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TierLedger:
    """Ledger of one level; every method returns a new ledger."""

    alive: Tensor
    """int64 `[E]`: tokens in the weights of each expert's newest complete copy; 0 without one."""
    step: Tensor
    """int64 `[E]`: boundary of that copy, `NEVER` without one."""
    skipped: Tensor
    """bool `[E]`: whether the level gave up its last settled generation with each expert."""
    index: Tensor
    """int64 `[E]`: number of that copy among the level's complete generations, counted from 1; 0 without a copy."""
    completed: int = 0
    """Generations that the level has completed."""
    pending: tuple[Pending, ...] = ()
    """Generations under way, oldest first."""
    kept: int | None = None
    """Newest given generations that the level keeps; `None` if it drops no newest copy."""
    given: tuple[int, ...] = ()
    """Boundaries of given generations not dropped, oldest first; empty if `kept` is `None`."""

    @classmethod
    def empty(cls, num_experts: int) -> TierLedger:
        """Return the ledger of an empty level."""
        zeros = torch.zeros(num_experts, dtype=torch.int64)
        return cls(alive=zeros, step=torch.full_like(zeros, NEVER), skipped=zeros.bool(), index=zeros)

    def take(self, step: int, experts: Sequence[int], alive_E: Tensor, kept: int | None = None) -> TierLedger:
        """Note that the level was given generation `step`.

        Args:
            step: boundary, above all earlier ones.
            experts: places in the vector over all experts.
            alive_E: tokens in the live weights at that boundary.
            kept: generations that the level keeps from now on.
        """
        chosen = torch.tensor(sorted(experts), dtype=torch.int64)
        pending = (*self.pending, Pending(step=step, experts=chosen, alive=alive_E[chosen]))
        return replace(self, pending=pending, kept=kept, given=() if kept is None else (*self.given, step))

    def complete(self, step: int) -> TierLedger:
        """Note that the level has all of generation `step`: older ones are given up, and ones past `kept` are dropped.

        A boundary never given, or given up, has only this effect. Generations complete on some ranks only also take
        places in the level, so all given generations count.
        """
        alive_E, step_E = self.alive.clone(), self.step.clone()
        skipped_E, index_E, completed = self.skipped.clone(), self.index.clone(), self.completed
        for each in self.pending:
            if each.step <= step:
                skipped_E[each.experts] = each.step < step
            if each.step == step:
                completed += 1
                alive_E[each.experts] = each.alive
                step_E[each.experts], index_E[each.experts] = step, completed
        given = self._held(step)
        dropped_E = step_E < given[0] if given else torch.zeros_like(skipped_E)
        return replace(
            self,
            alive=torch.where(dropped_E, 0, alive_E),
            step=torch.where(dropped_E, NEVER, step_E),
            skipped=skipped_E,
            index=torch.where(dropped_E, 0, index_E),
            completed=completed,
            pending=tuple(each for each in self.pending if each.step > step),
            given=given,
        )

    def give_up(self, step: int, *, place_is_free: bool) -> TierLedger:
        """Note that generation `step` will not be complete: its experts were skipped. A boundary never given changes
        nothing.

        Args:
            step: boundary.
            place_is_free: whether the level has dropped its part; else the part still takes a place.
        """
        skipped_E = self.skipped.clone()
        for each in self.pending:
            if each.step == step:
                skipped_E[each.experts] = True
        return replace(
            self,
            skipped=skipped_E,
            pending=tuple(each for each in self.pending if each.step != step),
            given=tuple(generation for generation in self.given if generation != step or not place_is_free),
        )

    def expected(self) -> tuple[Tensor, Tensor]:
        """Return `(alive_E, step_E)` of the newest copies, if all generations under way complete; but see `skipped`."""
        alive_E, step_E = self.alive.clone(), self.step.clone()
        for each in self.pending:
            counted_S = ~self.skipped[each.experts]
            alive_E[each.experts[counted_S]] = each.alive[counted_S]
            step_E[each.experts[counted_S]] = each.step
        return alive_E, step_E

    def waited(self) -> Tensor:
        """Return the level's generations since each expert's newest, if all generations under way complete.

        int64 `[E]`: 1 if the newest has the expert; one more than there are if none has.
        """
        index_E = self.index.clone()
        for number, each in enumerate(self.pending, start=self.completed + 1):
            index_E[each.experts[~self.skipped[each.experts]]] = number
        return self.completed + len(self.pending) + 1 - index_E

    def restore(self, alive_E: Tensor, step_E: Tensor, read_here_E: Tensor, *, durable: bool) -> TierLedger:
        """Return the ledger after a recovery.

        Nothing is under way. Copies newer than the restored were lost or belong to the timeline that ended. An older
        copy of the same expert counts only in a durable level.

        Args:
            alive_E: tokens in the restored weights.
            step_E: boundary from which each expert was restored.
            read_here_E: bool, whether this level holds that copy.
            durable: whether the level loses nothing by a fault.
        """
        keep_E = (self.step < step_E) & durable
        newer_E = read_here_E & (step_E > self.step)
        return replace(
            self,
            alive=torch.where(read_here_E, alive_E, torch.where(keep_E, self.alive, 0)),
            step=torch.where(read_here_E, step_E, torch.where(keep_E, self.step, NEVER)),
            skipped=torch.zeros_like(self.skipped),
            index=torch.where(newer_E, self.completed, torch.where(keep_E, self.index, 0)),
            pending=(),
        )

    def tokens_at(self, expert: int, step: int) -> int | None:
        """Return the tokens in the copy of `expert` from boundary `step`; `None` if the ledger does not have it."""
        for each in self.pending:
            if each.step == step and bool((here_S := each.experts == expert).any()):
                return int(each.alive[here_S][0])
        return int(self.alive[expert]) if int(self.step[expert]) == step else None

    def to_journal(self) -> dict[str, object]:
        """Return plain values and tensors."""
        pending = [{"step": p.step, "experts": p.experts, "alive": p.alive} for p in self.pending]
        return {**vars(self), "skipped": self.skipped.long(), "pending": pending, "given": list(self.given)}

    @classmethod
    def from_journal(cls, stored: Mapping[str, object]) -> TierLedger:
        """Read the value of `to_journal`. Raises `KeyError`, `TypeError` for any other value."""
        pending = stored["pending"]
        if not isinstance(pending, list):
            raise TypeError("`pending` is no list")
        rows = tuple(
            Pending(step=int(p["step"]), experts=counts(p["experts"]), alive=counts(p["alive"])) for p in pending
        )
        kept, given = stored.get("kept"), stored.get("given", [])  # older ledgers dropped nothing
        if not isinstance(given, list) or not isinstance(kept, int | None):
            raise TypeError("`kept` or `given` is not what it should be")
        completed = stored["completed"]
        if not isinstance(completed, int):
            raise TypeError("`completed` is no number")
        return cls(
            alive=counts(stored["alive"]),
            step=counts(stored["step"]),
            skipped=counts(stored["skipped"]).bool(),
            index=counts(stored["index"]),
            completed=completed,
            pending=rows,
            kept=kept,
            given=tuple(int(step) for step in given),
        )

    def _held(self, step: int) -> tuple[int, ...]:
        """Return the part of `given` still kept once generation `step` is complete, oldest first."""
        if self.kept is None:
            return ()
        settled = [generation for generation in self.given if generation <= step]
        return (*settled[-self.kept :], *(generation for generation in self.given if generation > step))


def counts(value: object) -> Tensor:
    """Return `value` if it is a vector of int64. Raises `TypeError`."""
    if not isinstance(value, Tensor) or value.dtype != torch.int64 or value.ndim != 1:
        raise TypeError(f"found {type(value).__name__}, wanted a vector of int64")
    return value
