"""Tokens of every expert: in the live weights, in each level's copies, and lost for good.

A token counts once per expert it is routed to. `alive` counts the tokens that the live weights have learned from.
Restoring an expert from an older copy puts `alive` back to the copy's count, and the difference is lost; so no token is
counted as lost twice, and tokens of a full rollback are not lost but trained on again.

Invariant: `processed == alive + lost`, for every expert.

A generation under way counts as saved, so that the next takes other experts; once the level has completed a newer
generation, it was skipped and counts no more. A skipped expert counts as saved only when that is certain: otherwise a
level that takes every second generation could miss the same experts for ever, since they would be given once, left out
of the next generation, and given again in the one after. All ranks agree on the completed generations (with the votes
of a window). A level that keeps a limited number of generations has dropped the rest: the ledger knows of no copy in
those.

The ledger is a function of counts summed over ranks and of the ranks' agreements: equal on all ranks. A ledger is never
changed; methods return a new one.

Sources: PEC (2024), Sec. 3.1; MOETION (2024), Sec. 4.1.

Shape suffixes: E experts of all layers, in the order of `OperatorSet.count_offsets`; L layers; S experts of one
generation.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lightning_moe_ckpt.errors import Corrupt
from lightning_moe_ckpt.policies._expert_tables import (
    LEVELS,
    MEMORY,
    PEER,
    STORAGE,
    ExpertLayout,
    ExpertTable,
    Selection,
)

NEVER = -1
"""No generation: no boundary has this number."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenLedger:
    """Tokens of every expert: in live weights, saved by tier, and lost for good. Methods return a new ledger."""

    num_experts: tuple[int, ...]
    """Experts per layer."""
    alive: Tensor
    """int64 `[E]`: tokens whose updates are in the live weights."""
    processed: Tensor
    """int64 `[E]`: tokens processed on this timeline."""
    lost: Tensor
    """int64 `[E]`: tokens whose updates were lost, over all faults."""
    dropped: Tensor
    """int64 `[L]`: routed tokens dropped over capacity on this timeline; 0 for layers that do not show them."""
    steps: int = 0
    """Counted steps."""
    steps_left: int = 0
    """Planned steps left; 0 if unknown."""
    faults: int = 0
    """Recoveries that lost updates."""
    last_lost: int = 0
    """Tokens lost by the last of these."""
    last_k: int | None = None
    """`k` at the last of these."""
    k: int | None = None
    """Experts per layer to storage, if the policy counts experts."""
    memory_k: int | None = None
    """Experts per layer at this incarnation's start, by which memory was made."""
    generations: int = 0
    """Generations so far, the index of the next."""
    taken: Tensor
    """int64 `[E]`: index of the newest generation that took each expert to memory, `NEVER` for none."""
    saved: Mapping[str, TierLedger]
    """Ledgers per level."""

    @classmethod
    def start(cls, num_experts: Sequence[int], *, k: int | None = None, levels: Sequence[str] = LEVELS) -> TokenLedger:
        """Return the ledger of a new run."""
        total = sum(num_experts)
        zeros = torch.zeros(total, dtype=torch.int64)
        return cls(
            num_experts=tuple(num_experts),
            alive=zeros,
            processed=zeros,
            lost=zeros,
            dropped=torch.zeros(len(num_experts), dtype=torch.int64),
            k=k,
            memory_k=k,
            taken=torch.full_like(zeros, NEVER),
            saved={level: TierLedger.empty(total) for level in levels},
        )

    def blank(self) -> TokenLedger:
        """Return the ledger of a new run, with the same levels and K."""
        return self.start(self.num_experts, k=self.k, levels=[*self.saved])

    # -- what happens

    def add(
        self, tokens_E: Tensor, dropped_L: Tensor | None = None, *, steps: int = 0, steps_left: int = 0
    ) -> TokenLedger:
        """Count tokens that experts have processed and layers have dropped over capacity (int64), on all ranks
        together, in so many optimizer steps. `steps_left` are planned steps after them; 0 if unknown.
        """
        tokens_E = tokens_E.to(self.alive)
        return replace(
            self,
            alive=self.alive + tokens_E,
            processed=self.processed + tokens_E,
            dropped=self.dropped if dropped_L is None else self.dropped + dropped_L.to(self.dropped),
            steps=self.steps + steps,
            steps_left=steps_left,
        )

    def take(self, step: int, selection: Selection, levels: Collection[str] = LEVELS) -> TokenLedger:
        """Note that generation `step` takes `selection` to `levels`; call at its boundary, before its journal is written."""
        taken_E = self.taken.clone()
        taken_E[list(selection.flat(MEMORY, self.num_experts))] = self.generations
        found = replace(self, taken=taken_E, generations=self.generations + 1)
        for level in [each for each in self.saved if each in levels]:
            found = found.give(level, step, selection)
        return found

    def give(self, level: str, step: int, selection: Selection, kept: int | None = None) -> TokenLedger:
        """Note that `level` begins to take its part of boundary `step`'s `selection`; see `TierLedger.take`."""
        places = selection.flat(level, self.num_experts)
        return self._with(level, self.saved[level].take(step, places, self.alive, kept=kept))

    def complete(self, level: str, step: int) -> TokenLedger:
        """Note that `level` has all of generation `step` on every rank; call in the order of completion."""
        return self._with(level, self.saved[level].complete(step))

    def give_up(self, level: str, step: int, *, place_is_free: bool) -> TokenLedger:
        """Note that some rank has failed to bring its part of generation `step` to `level`; see `TierLedger.give_up`."""
        return self._with(level, self.saved[level].give_up(step, place_is_free=place_is_free))

    def forget(self, level: str) -> TokenLedger:
        """Note that `level` has lost everything."""
        found = self._with(level, TierLedger.empty(len(self.alive)))
        return replace(found, taken=torch.full_like(self.taken, NEVER)) if level == MEMORY else found

    def restore(
        self, alive_E: Tensor, step_E: Tensor, read_from: Mapping[str, Tensor] | None = None
    ) -> tuple[TokenLedger, Tensor]:
        """Return the ledger after a recovery, from the ledger in the restored generation's journal, and int64 `[E]`:
        tokens that this recovery has lost; below zero for an expert that an earlier recovery had put back further than
        to this copy.

        `alive_E`, int64, has the tokens in each expert's restored copy (`tokens_at`), `step_E`, int64, its boundary;
        `read_from`, by level, bool `[E]`, says whether the level holds that copy.
        """
        lost_E = self.alive - alive_E
        nowhere = torch.zeros_like(alive_E, dtype=torch.bool)
        saved = {
            level: ledger.restore(alive_E, step_E, (read_from or {}).get(level, nowhere), durable=level == STORAGE)
            for level, ledger in self.saved.items()
        }
        in_memory_E = saved[MEMORY].step != NEVER
        number = int(lost_E.clamp(min=0).sum())
        after = replace(
            self,
            alive=alive_E,
            lost=self.lost + lost_E,
            faults=self.faults + (number > 0),
            last_lost=number or self.last_lost,
            last_k=self.k if number else self.last_k,
            taken=torch.where(in_memory_E, self.taken, NEVER),
            saved=saved,
        )
        return after, lost_E

    def with_peers(self, *, kept: bool) -> TokenLedger:
        """Return the ledger with an empty level of copies on other nodes, or without that level."""
        others = {level: ledger for level, ledger in self.saved.items() if level != PEER}
        return replace(self, saved={**others, PEER: TierLedger.empty(len(self.alive))} if kept else others)

    def with_k(self, k: int | None, *, memory_k: int | None = None) -> TokenLedger:
        """Return the ledger with `k` in force. `memory_k` is given as an incarnation begins; `None` or 0 keeps the present one."""
        return replace(self, k=k, memory_k=memory_k or self.memory_k)

    # -- what it says

    @property
    def plt(self) -> float:
        """Portion of lost tokens among all routed in the planned training, or so far if no length is planned."""
        return self.share(self.lost)

    @property
    def mlt(self) -> float:
        """Lost tokens by layer, each as a part of those routed so far, added up."""
        from lightning_moe_ckpt.metrics import moementary_lost_tokens  # imports torchmetrics, which takes seconds

        return moementary_lost_tokens(self.lost, self.processed, self.num_experts, dropped_L=self.dropped)

    def share(self, tokens_E: Tensor) -> float:
        """Return tokens as a part of all tokens routed in the training: the increase of PLT if they are lost."""
        from lightning_moe_ckpt.metrics import portion_of_lost_tokens  # as above

        return portion_of_lost_tokens(tokens_E, self.processed, dropped=self.dropped, progress=self.progress)

    @property
    def progress(self) -> float:
        """Counted part of the planned training; 1 if its length is unknown."""
        return self.steps / (self.steps + self.steps_left) if self.steps else 1.0

    def unsaved(self, level: str) -> Tensor:
        """Return the tokens in the live weights that `level` lacks by `TierLedger.expected`, int64 `[E]`."""
        return self.alive - self.saved[level].expected()[0]

    def tokens_at(self, expert: int, step: int) -> int | None:
        """Return the tokens in the copy of `expert` (place over all layers) from boundary `step`; `None` if no level has the copy.

        Otherwise that generation's journal has the tokens, as `alive`.
        """
        found = (ledger.tokens_at(expert, step) for ledger in self.saved.values())
        return next((tokens for tokens in found if tokens is not None), None)

    def tables(
        self, layouts: Sequence[ExpertLayout], again: Collection[int] = (), coming: Tensor | None = None
    ) -> list[ExpertTable]:
        """Return the tables that a policy chooses from. Experts at the places `again` come before all others. `coming`,
        int64 `[E]`, are further tokens that experts will have learned from by the time the choice is carried out.
        """
        alive_then_E = self.alive if coming is None else self.alive + coming
        again_E = torch.zeros_like(self.alive, dtype=torch.bool)
        again_E[list(again)] = True
        expected, stored_E = {level: self._within_reach(level) for level in self.saved}, self.saved[STORAGE].step
        by_level = {
            "unsaved": {level: alive_then_E - alive_E for level, (alive_E, _) in expected.items()},
            "saved_at": {level: step_E for level, (_, step_E) in expected.items()},
            "skipped": {level: ledger.skipped for level, ledger in self.saved.items()},
            "waited": {level: ledger.waited() for level, ledger in self.saved.items()},
            "stored": {level: (stored_E >= step_E) & (stored_E != NEVER) for level, (_, step_E) in expected.items()},
        }
        rows = {
            name: {level: self._by_layer(values_E) for level, values_E in levels.items()}
            for name, levels in by_level.items()
        }
        ages, firsts = self._by_layer(self.generations - self.taken), self._by_layer(again_E)
        return [
            ExpertTable(
                layer=layout.layer,
                rank_of=layout.rank_of,
                nbytes=layout.nbytes,
                age=ages[i],
                again=firsts[i] if again else (),
                **{name: {level: each[i] for level, each in levels.items()} for name, levels in rows.items()},
            )
            for i, layout in enumerate(layouts)
        ]

    # -- the journal

    def to_journal(self) -> dict[str, Any]:
        """Return plain values and int64 tensors."""
        saved = {level: ledger.to_journal() for level, ledger in self.saved.items()}
        return {**vars(self), "num_experts": list(self.num_experts), "saved": saved}

    @classmethod
    def from_journal(cls, stored: Mapping[str, Any]) -> TokenLedger:
        """Read the value of `to_journal`. Raises `Corrupt` if the value is no ledger."""
        try:
            known: dict[str, Any] = {name: counts(stored[name]) for name in ("alive", "processed", "lost", "taken")}
            known |= {name: int(stored[name]) for name in ("faults", "generations")}
            # Journals of older versions do not have all of these.
            known |= {name: int(stored.get(name, 0)) for name in ("steps", "steps_left", "last_lost")}
            numbers = {"k": stored["k"], "last_k": stored.get("last_k"), "memory_k": stored.get("memory_k")}
            known |= {name: None if number is None else int(number) for name, number in numbers.items()}
            found = cls(
                num_experts=tuple(int(number) for number in stored["num_experts"]),
                dropped=counts(stored.get("dropped", torch.zeros(len(stored["num_experts"]), dtype=torch.int64))),
                saved={str(level): TierLedger.from_journal(ledger) for level, ledger in stored["saved"].items()},
                **known,
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise Corrupt(f"The token accounting of a journal cannot be read: {error}. Use an older one.") from error
        lengths = {len(each) for each in (found.alive, found.processed, found.lost, found.taken)}
        if lengths != {sum(found.num_experts)} or len(found.dropped) != len(found.num_experts):
            raise Corrupt(f"The token accounting of a journal has {lengths} experts, wanted {sum(found.num_experts)}.")
        return found

    # -- private

    def _with(self, level: str, ledger: TierLedger) -> TokenLedger:
        return replace(self, saved={**self.saved, level: ledger})

    def _within_reach(self, level: str) -> tuple[Tensor, Tensor]:
        """Return `(alive_E, step_E)` of the newest copies if only `level` and storage are left, by
        `TierLedger.expected`.

        Copies that memory has dropped are restored from storage: only later tokens are at risk.
        """
        alive_E, step_E = self.saved[level].expected()
        stored_alive_E, stored_step_E = self.saved[STORAGE].expected()
        newer_E = stored_step_E > step_E
        return torch.where(newer_E, stored_alive_E, alive_E), torch.where(newer_E, stored_step_E, step_E)

    def _by_layer(self, values_E: Tensor) -> list[tuple[Any, ...]]:
        return [tuple(part.tolist()) for part in torch.split(values_E, list(self.num_experts))]


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
        """Note that the level was given generation `step`, above all earlier ones, with experts by their places in the
        vector over all. `alive_E` are tokens in the live weights at that boundary, `kept` the generations that the
        level keeps from now on.
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
        nothing. `place_is_free` says whether the level has dropped its part; else the part still takes a place.
        """
        skipped_E = self.skipped.clone()
        for each in self.pending:
            if each.step == step:
                skipped_E[each.experts] = True
        pending = tuple(each for each in self.pending if each.step != step)
        given = tuple(each for each in self.given if each != step or not place_is_free)
        return replace(self, skipped=skipped_E, pending=pending, given=given)

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
        """Return the ledger after a recovery to weights with `alive_E` tokens, each expert from boundary `step_E`.

        Nothing is under way. Copies newer than the restored were lost or belong to the timeline that ended. An older
        copy of the same expert counts only in a `durable` level, which loses nothing by a fault. `read_here_E`, bool,
        says whether this level holds the restored copy.
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
