"""Tokens of every expert: which are in the live weights, which a copy has, which were lost for good.

A token counts once per expert it is routed to. `alive` is what the live weights have learned from. Restoring an expert
from an older copy puts `alive` back to what that copy had, and the difference is lost; so no token is counted as lost
twice, and what a rollback of everything gives up is not lost but trained on again.

Invariant: `processed == alive + lost`, for every expert.

All of it is a function of counts summed over ranks and of what ranks agreed on: equal on all ranks. A ledger is
never changed; methods return a new one.

Sources: PEC (2024), Sec. 3.1; MOETION (2024), Sec. 4.1.

Shape suffix: E experts of all layers, in the order of `OperatorSet.count_offsets`.
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
    """By layer."""
    alive: Tensor
    """int64 `[E]`: tokens whose updates are in the live weights."""
    processed: Tensor
    """int64 `[E]`: tokens processed on this timeline."""
    lost: Tensor
    """int64 `[E]`: tokens whose updates were lost, over all faults."""
    faults: int = 0
    """Recoveries that lost something."""
    k: int | None = None
    """Experts per layer that generations take to storage, where a policy counts them."""
    generations: int = 0
    """Taken so far: the index of the next one."""
    taken: Tensor
    """int64 `[E]`: index of the newest generation that took each expert to memory, `NEVER` for none."""
    saved: Mapping[str, TierLedger]
    """By level."""

    @classmethod
    def start(cls, num_experts: Sequence[int], *, k: int | None = None, levels: Sequence[str] = LEVELS) -> TokenLedger:
        """Of a run that has done nothing yet."""
        total = sum(num_experts)
        zeros = torch.zeros(total, dtype=torch.int64)
        return cls(
            num_experts=tuple(num_experts),
            alive=zeros,
            processed=zeros,
            lost=zeros,
            k=k,
            taken=torch.full_like(zeros, NEVER),
            saved={level: TierLedger.empty(total) for level in levels},
        )

    # -- what happens

    def add(self, tokens_E: Tensor) -> TokenLedger:
        """Training has processed `tokens_E`, int64, of all ranks together."""
        tokens_E = tokens_E.to(self.alive)
        return replace(self, alive=self.alive + tokens_E, processed=self.processed + tokens_E)

    def take(self, step: int, selection: Selection, levels: Collection[str] = LEVELS) -> TokenLedger:
        """Generation `step` takes `selection` to `levels`; call at its boundary, before its journal is written."""
        places = {level: selection.flat(level, self.num_experts) for level in self.saved}
        saved = {
            level: ledger.take(step, places[level], self.alive) if level in levels else ledger
            for level, ledger in self.saved.items()
        }
        taken_E = self.taken.clone()
        taken_E[list(places[MEMORY])] = self.generations
        return replace(self, saved=saved, taken=taken_E, generations=self.generations + 1)

    def complete(self, level: str, step: int) -> TokenLedger:
        """On every rank `level` has all of generation `step`; call in the order in which generations completed."""
        return replace(self, saved={**self.saved, level: self.saved[level].complete(step)})

    def give_up(self, level: str, step: int, *, place_is_free: bool) -> TokenLedger:
        """Some rank has failed to bring its part of generation `step` to `level`; see `TierLedger.give_up`."""
        ledger = self.saved[level].give_up(step, place_is_free=place_is_free)
        return replace(self, saved={**self.saved, level: ledger})

    def forget(self, level: str) -> TokenLedger:
        """What `level` held is gone."""
        saved = {**self.saved, level: TierLedger.empty(len(self.alive))}
        return replace(self, saved=saved, taken=torch.full_like(self.taken, NEVER) if level == MEMORY else self.taken)

    def restore(
        self, alive_E: Tensor, step_E: Tensor, read_from: Mapping[str, Tensor] | None = None
    ) -> tuple[TokenLedger, Tensor]:
        """After a recovery; of the ledger that the restored generation has in its journal.

        Args:
            alive_E: int64, tokens in the copy that each expert was restored from (`tokens_at`).
            step_E: int64, the boundary of that copy.
            read_from: by level, bool `[E]`: whether the level holds that copy.

        Returns:
            The ledger to go on with, and int64 `[E]`: tokens that this recovery has lost; below zero for an expert
            that an earlier recovery had put back further than to this copy.
        """
        lost_E = self.alive - alive_E
        nowhere = torch.zeros_like(alive_E, dtype=torch.bool)
        saved = {
            level: ledger.restore(alive_E, step_E, (read_from or {}).get(level, nowhere), durable=level == STORAGE)
            for level, ledger in self.saved.items()
        }
        in_memory_E = saved[MEMORY].step != NEVER
        after = replace(
            self,
            alive=alive_E,
            lost=self.lost + lost_E,
            faults=self.faults + int(bool((lost_E > 0).any())),
            taken=torch.where(in_memory_E, self.taken, NEVER),
            saved=saved,
        )
        return after, lost_E

    def with_peers(self, *, kept: bool) -> TokenLedger:
        """With a level of copies on other nodes, of which nothing is known yet, or without one."""
        others = {level: ledger for level, ledger in self.saved.items() if level != PEER}
        return replace(self, saved={**others, PEER: TierLedger.empty(len(self.alive))} if kept else others)

    def with_k(self, k: int | None) -> TokenLedger:
        """The same with another K in force."""
        return replace(self, k=k)

    # -- what it says

    @property
    def plt(self) -> float:
        """Portion of lost tokens."""
        return self.share(self.lost)

    @property
    def mlt(self) -> float:
        """Lost tokens by layer, added up."""
        from lightning_moe_ckpt.metrics import moementary_lost_tokens  # with torchmetrics, which takes seconds

        return moementary_lost_tokens(self.lost, self.processed, self.num_experts)

    def share(self, tokens_E: Tensor) -> float:
        """Tokens as a part of all that were processed: what a fault that lost them adds to PLT."""
        from lightning_moe_ckpt.metrics import portion_of_lost_tokens  # as above

        return portion_of_lost_tokens(tokens_E, self.processed)

    def unsaved(self, level: str) -> Tensor:
        """int64 `[E]`: tokens in the live weights that `level` lacks, as `TierLedger.expected` has it."""
        return self.alive - self.saved[level].expected()[0]

    def tokens_at(self, expert: int, step: int) -> int | None:
        """Tokens in the copy of `expert` (place over all layers) from boundary `step`, if some level's ledger has it.

        Otherwise the journal of that generation has it, as `alive`.
        """
        found = (ledger.tokens_at(expert, step) for ledger in self.saved.values())
        return next((tokens for tokens in found if tokens is not None), None)

    def tables(self, layouts: Sequence[ExpertLayout], again: Collection[int] = ()) -> list[ExpertTable]:
        """What a policy chooses from now; `again` are places of experts that come before all others."""
        first_E = torch.zeros_like(self.alive)
        first_E[list(again)] = 1
        first = self._by_layer(first_E)
        expected = {level: self._within_reach(level) for level in self.saved}
        unsaved = {level: self._by_layer(self.alive - alive_E) for level, (alive_E, _) in expected.items()}
        saved_at = {level: self._by_layer(step_E) for level, (_, step_E) in expected.items()}
        skipped = {level: self._by_layer(ledger.skipped.long()) for level, ledger in self.saved.items()}
        waited = {level: self._by_layer(ledger.waited()) for level, ledger in self.saved.items()}
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
                again=tuple(map(bool, first[i])) if again else (),
            )
            for i, layout in enumerate(layouts)
        ]

    # -- the journal

    def to_journal(self) -> dict[str, Any]:
        """Plain values and int64 tensors."""
        return {
            "num_experts": list(self.num_experts),
            "alive": self.alive,
            "processed": self.processed,
            "lost": self.lost,
            "faults": self.faults,
            "k": self.k,
            "generations": self.generations,
            "taken": self.taken,
            "saved": {level: ledger.to_journal() for level, ledger in self.saved.items()},
        }

    @classmethod
    def from_journal(cls, stored: Mapping[str, Any]) -> TokenLedger:
        """Read what `to_journal` wrote.

        Raises:
            Corrupt: it is no ledger.
        """
        try:
            found = cls(
                num_experts=tuple(int(number) for number in stored["num_experts"]),
                alive=counts(stored["alive"]),
                processed=counts(stored["processed"]),
                lost=counts(stored["lost"]),
                faults=int(stored["faults"]),
                k=None if stored["k"] is None else int(stored["k"]),
                generations=int(stored["generations"]),
                taken=counts(stored["taken"]),
                saved={str(level): TierLedger.from_journal(ledger) for level, ledger in stored["saved"].items()},
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise Corrupt(f"The token accounting of a journal cannot be read: {error}. Use an older one.") from error
        lengths = {len(each) for each in (found.alive, found.processed, found.lost, found.taken)}
        if lengths != {sum(found.num_experts)}:
            raise Corrupt(f"The token accounting of a journal has {lengths} experts, wanted {sum(found.num_experts)}.")
        return found

    # -- private

    def _within_reach(self, level: str) -> tuple[Tensor, Tensor]:
        """`(alive_E, step_E)` of the newest copies if all is lost but `level` and storage, as `TierLedger.expected` has it.

        What memory has dropped is restored from storage: only what an expert has learned since is at risk.
        """
        alive_E, step_E = self.saved[level].expected()
        stored_alive_E, stored_step_E = self.saved[STORAGE].expected()
        newer_E = stored_step_E > step_E
        return torch.where(newer_E, stored_alive_E, alive_E), torch.where(newer_E, stored_step_E, step_E)

    def _by_layer(self, values_E: Tensor) -> list[tuple[int, ...]]:
        return [tuple(part.tolist()) for part in torch.split(values_E, list(self.num_experts))]
