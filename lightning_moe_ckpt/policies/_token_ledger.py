"""Tokens of every expert: in the live weights, in copies, and lost for good.

A token counts once per expert it is routed to. `alive` counts the tokens that the live weights have learned from.
Restoring an expert from an older copy puts `alive` back to the copy's count, and the difference is lost; so no token is
counted as lost twice, and tokens of a full rollback are not lost but trained on again.

Invariant: `processed == alive + lost`, for every expert.

The ledger is a function of counts summed over ranks and of the ranks' agreements: equal on all ranks. A ledger is never
changed; methods return a new one.

Sources: PEC (2024), Sec. 3.1; MOETION (2024), Sec. 4.1.

Shape suffixes: E experts of all layers, in the order of `OperatorSet.count_offsets`; L layers.
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
from lightning_moe_ckpt.policies._tier_ledger import NEVER, TierLedger, counts


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
    """Experts per layer at the start of this incarnation, by which memory was made."""
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
        """Count processed and dropped tokens, on all ranks together.

        Args:
            tokens_E: int64, tokens that experts have processed.
            dropped_L: int64, tokens that layers have dropped over capacity.
            steps: optimizer steps of these tokens.
            steps_left: planned steps after them; 0 if unknown.
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
        """Return the ledger after a recovery, from the ledger in the restored generation's journal.

        Args:
            alive_E: int64, tokens in each expert's restored copy (`tokens_at`).
            step_E: int64, the boundary of that copy.
            read_from: by level, bool `[E]`: whether the level holds that copy.

        Returns:
            The ledger to go on with, and int64 `[E]`: tokens that this recovery has lost; below zero for an expert that
            an earlier recovery had put back further than to this copy.
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
        """Return the ledger with another K in force; `memory_k` as an incarnation begins."""
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
        """Return tokens as a part of all routed in the training: the share of PLT that losing them adds."""
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
        """Return the tokens in the copy of `expert` (place over all layers) from boundary `step`; `None` if no level
        has it.

        Otherwise that generation's journal has the tokens, as `alive`.
        """
        found = (ledger.tokens_at(expert, step) for ledger in self.saved.values())
        return next((tokens for tokens in found if tokens is not None), None)

    def tables(
        self, layouts: Sequence[ExpertLayout], again: Collection[int] = (), coming: Tensor | None = None
    ) -> list[ExpertTable]:
        """Return the tables that a policy chooses from.

        Args:
            layouts: of the experts.
            again: places of experts that come before all others.
            coming: int64 `[E]`, further tokens that experts will have learned from by the time the choice is carried
                out.
        """
        alive_then_E = self.alive if coming is None else self.alive + coming
        first_E = torch.zeros_like(self.alive)
        first_E[list(again)] = 1
        first = self._by_layer(first_E)
        expected = {level: self._within_reach(level) for level in self.saved}
        unsaved = {level: self._by_layer(alive_then_E - alive_E) for level, (alive_E, _) in expected.items()}
        saved_at = {level: self._by_layer(step_E) for level, (_, step_E) in expected.items()}
        skipped = {level: self._by_layer(ledger.skipped.long()) for level, ledger in self.saved.items()}
        waited = {level: self._by_layer(ledger.waited()) for level, ledger in self.saved.items()}
        stored_E = self.saved[STORAGE].step
        stored = {
            level: self._by_layer(((stored_E >= step_E) & (stored_E != NEVER)).long())
            for level, (_, step_E) in expected.items()
        }
        age = self._by_layer(self.generations - self.taken)
        return [
            ExpertTable(
                layer=layout.layer,
                rank_of=layout.rank_of,
                nbytes=layout.nbytes,
                unsaved={level: rows[i] for level, rows in unsaved.items()},
                saved_at={level: rows[i] for level, rows in saved_at.items()},
                skipped={level: tuple(map(bool, rows[i])) for level, rows in skipped.items()},
                age=age[i],
                waited={level: rows[i] for level, rows in waited.items()},
                stored={level: tuple(map(bool, rows[i])) for level, rows in stored.items()},
                again=tuple(map(bool, first[i])) if again else (),
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
        """Read the value of `to_journal`.

        Raises:
            Corrupt: the value is no ledger.
        """
        try:
            found = cls(
                num_experts=tuple(int(number) for number in stored["num_experts"]),
                alive=counts(stored["alive"]),
                processed=counts(stored["processed"]),
                lost=counts(stored["lost"]),
                # Journals of older versions do not have all of them.
                dropped=counts(stored.get("dropped", torch.zeros(len(stored["num_experts"]), dtype=torch.int64))),
                steps=int(stored.get("steps", 0)),
                steps_left=int(stored.get("steps_left", 0)),
                last_lost=int(stored.get("last_lost", 0)),
                last_k=_optional(stored.get("last_k")),
                memory_k=_optional(stored.get("memory_k")),
                faults=int(stored["faults"]),
                k=_optional(stored["k"]),
                generations=int(stored["generations"]),
                taken=counts(stored["taken"]),
                saved={str(level): TierLedger.from_journal(ledger) for level, ledger in stored["saved"].items()},
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

    def _by_layer(self, values_E: Tensor) -> list[tuple[int, ...]]:
        return [tuple(part.tolist()) for part in torch.split(values_E, list(self.num_experts))]


def _optional(value: Any) -> int | None:
    return None if value is None else int(value)
