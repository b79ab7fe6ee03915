"""Which tokens of each expert a level has saved, from what was sent to it and what it has completed.

A generation that is under way counts as saved, so that the next one takes other experts; once the level has completed
a newer one without it, it was skipped and counts no more. An expert that was skipped counts as saved only when that is
certain: otherwise a level that takes every second generation could miss the same experts for ever, since they would be
given to it once, left out of the next one, and given to it again in the one after that. What the level has completed
comes from all ranks at once (with the votes of a window), so every rank has the same ledger.

A level that keeps so many generations only has dropped the others: the ledger then knows of no copy in those.

Shape suffixes: E experts of all layers, S experts of one generation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

NEVER = -1
"""Stands for "no generation": no boundary has this number."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Pending:
    """A generation that a level was given and has not completed yet."""

    step: int
    """Boundary."""
    experts: Tensor
    """int64 `[S]`, places in the vector over all experts."""
    alive: Tensor
    """int64 `[S]`, tokens in their weights at that boundary."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TierLedger:
    """One level; every method returns a new ledger."""

    alive: Tensor
    """int64 `[E]`: tokens in the weights of the newest complete copy of each expert; 0 without one."""
    step: Tensor
    """int64 `[E]`: boundary of that copy, `NEVER` without one."""
    skipped: Tensor
    """bool `[E]`: whether the newest generation with each expert that the level is through with was given up."""
    index: Tensor
    """int64 `[E]`: which of the level's complete generations, counted from 1, has that copy; 0 without one."""
    completed: int = 0
    """Generations that the level has completed."""
    pending: tuple[Pending, ...] = ()
    """What is under way, oldest first."""
    kept: int | None = None
    """Generations that the level keeps of those that it was given, the newest ones; `None` if it drops no newest copy."""
    given: tuple[int, ...] = ()
    """Where it keeps so many only: boundaries of those that it was given and has not dropped, oldest first."""

    @classmethod
    def empty(cls, num_experts: int) -> TierLedger:
        """Return the ledger of a level that has nothing."""
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
        """Note that the level has all of generation `step`: older ones are given up, and what is too old is dropped.

        A boundary that was never given, or was given up, changes nothing but that. Places in the level are also taken
        by generations that only some ranks have completed there, so all that were given count.
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
        """Note that generation `step` will not be complete: its experts were skipped. One never given changes nothing.

        Args:
            step: boundary.
            place_is_free: whether the level has dropped what it had of it; else that still takes a place.
        """
        skipped_E = self.skipped.clone()
        for each in self.pending:
            if each.step == step:
                skipped_E[each.experts] = True
        return replace(
            self,
            skipped=skipped_E,
            pending=tuple(each for each in self.pending if each.step != step),
            given=tuple(each for each in self.given if each != step or not place_is_free),
        )

    def expected(self) -> tuple[Tensor, Tensor]:
        """Return `(alive_E, step_E)` of the newest copies, if all that is under way completes; but see `skipped`."""
        alive_E, step_E = self.alive.clone(), self.step.clone()
        for each in self.pending:
            counted_S = ~self.skipped[each.experts]
            alive_E[each.experts[counted_S]] = each.alive[counted_S]
            step_E[each.experts[counted_S]] = each.step
        return alive_E, step_E

    def waited(self) -> Tensor:
        """Return the level's generations since the newest that has each expert, if all that is under way completes.

        int64 `[E]`: 1 if the newest one has it; one more than there are if none has.
        """
        index_E = self.index.clone()
        for number, each in enumerate(self.pending, start=self.completed + 1):
            index_E[each.experts[~self.skipped[each.experts]]] = number
        return self.completed + len(self.pending) + 1 - index_E

    def restore(self, alive_E: Tensor, step_E: Tensor, read_here_E: Tensor, *, durable: bool) -> TierLedger:
        """Return what is known of the level after a recovery.

        Nothing is under way. Copies newer than what was restored were lost or belong to the timeline that ended. An
        older one of the same expert counts only in a level that loses nothing by a fault.

        Args:
            alive_E: tokens in the restored weights.
            step_E: boundary from which each expert was restored.
            read_here_E: bool, whether this level holds that copy.
            durable: whether the level is one that loses nothing.
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
        """Return the tokens in the copy of `expert` from boundary `step`, if the ledger has it."""
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
        """Read what `to_journal` wrote. Raises `KeyError`, `TypeError` for anything else."""
        pending = stored["pending"]
        if not isinstance(pending, list):
            raise TypeError("`pending` is no list")
        rows = tuple(
            Pending(step=int(p["step"]), experts=counts(p["experts"]), alive=counts(p["alive"])) for p in pending
        )
        kept, given = stored.get("kept"), stored.get("given", [])  # ledgers that do not have them dropped nothing
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
        """Return what of `given` is still there once generation `step` is complete, oldest first."""
        if self.kept is None:
            return ()
        settled = [each for each in self.given if each <= step]
        return (*settled[-self.kept :], *(each for each in self.given if each > step))


def counts(value: object) -> Tensor:
    """Return `value` if it is a vector of int64. Raises `TypeError`."""
    if not isinstance(value, Tensor) or value.dtype != torch.int64 or value.ndim != 1:
        raise TypeError(f"found {type(value).__name__}, wanted a vector of int64")
    return value
