"""Restoring a lossy generation: everything but experts as of it, each expert as of when it was taken last.

Ranks put their parts together from wherever they are (`recovery.Mosaic`) into one segment that looks as if it had been
taken at once, with the pieces of each expert as the generation that it comes from had cut them. So it is loaded like any
other: each record is read by its writer and broadcast to the others that hold it.

What one optimizer keeps for several experts together, as the step count of a stacked tensor, is of no single one of
them: it is as of the generation, from its journal.

Source: PEC/MoC (2024), Sec. 3; the accounting is that of `policies`.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from lightning_moe_ckpt.errors import IdentityMismatch
from lightning_moe_ckpt.native import Copy
from lightning_moe_ckpt.operators import Operator, OperatorSet, ParamSlice, RecordKind
from lightning_moe_ckpt.parallel import ParallelGroups
from lightning_moe_ckpt.policies import NEVER, Accounting
from lightning_moe_ckpt.recovery import Chosen, Mosaic, Patchwork, Tile
from lightning_moe_ckpt.session._journal import Journal, decode_journal
from lightning_moe_ckpt.session._layout import (
    JOURNAL,
    PRESENT,
    REGIONS,
    Field,
    Part,
    SlotLayout,
    StateView,
    WindowLayout,
)
from lightning_moe_ckpt.session._planning import PlanRecord, lay_out
from lightning_moe_ckpt.session._replay import Replay
from lightning_moe_ckpt.storage import GenerationId

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ExpertSources:
    """Where the experts of a restored state are from."""

    chosen: Chosen
    alive: Mapping[GenerationId, Tensor]
    """Tokens behind the experts of each generation that supplies some, int64 `[E]`; of those that are counted."""

    @classmethod
    def of(cls, attempt: Mosaic, part: Patchwork) -> ExpertSources:
        """Of what was put together. Collective."""
        generations = set(part.chosen.generations.values())
        told = attempt.tell(generations, JOURNAL, _alive)
        alive = {each: value for each, value in told.items() if isinstance(value, Tensor) and value.numel()}
        return cls(chosen=part.chosen, alive=alive)


def _alive(record: memoryview) -> object:
    """The tokens in live weights as a journal has them; an empty tensor where they were not counted."""
    journal = decode_journal(torch.frombuffer(bytearray(record), dtype=torch.uint8))
    stored = journal["outcome"].get("accounting")
    return torch.empty(0, dtype=torch.int64) if stored is None else Accounting.from_journal(stored).alive


def lossy_window(
    record: PlanRecord, chosen: Chosen, view: StateView, groups: ParallelGroups, journal_nbytes: int
) -> WindowLayout:
    """The layout of a restored state: that of its generation, with all experts, cut as where they come from.

    Raises:
        IdentityMismatch: the plan is for other experts.
    """
    slot = lay_out(record, view, groups, journal_nbytes).slots[0]
    parts = {
        region: [part for part in slot.parts[region] if view.operators[part.operator].kind != "expert"]
        for region in REGIONS
    }
    for name, tiles in chosen.tiles.items():
        if name in view.operators:  # else it is on other ranks
            operator = view.operators[name]
            parts[operator.holders] += [_part(operator, tile) for tile in tiles]
    return WindowLayout.of(record, SlotLayout(parts, view, groups, journal_nbytes))


def _part(operator: Operator, tile: Tile) -> Part:
    whole = next((each for each in operator.slices if _covers(each, tile)), None)
    if whole is None:
        raise IdentityMismatch(
            f"`{tile.fqn}`: elements from {tile.global_start} on are not of {operator.name}, as the run has it. "
            "Resume with the code that wrote it, or start anew with resume='never'."
        )
    start = whole.start + tile.global_start - whole.global_start
    piece = ParamSlice(
        fqn=tile.fqn,
        start=start,
        stop=start + tile.numel,
        global_shape=whole.global_shape,
        global_start=tile.global_start,
    )
    return Part(operator=operator.name, kind=RecordKind.FULL, piece=piece, writer=tile.writer)


def _covers(whole: ParamSlice, tile: Tile) -> bool:
    stop = whole.global_start + whole.numel
    return whole.fqn == tile.fqn and whole.global_start <= tile.global_start and tile.global_start + tile.numel <= stop


class LossyLoad(Replay):
    """Loads a state whose experts are of different ages; dense at once. Arguments as in `Replay`.

    Experts that it lacks keep the weights that they have, and no optimizer state.
    """

    @override
    def load(self, step: int) -> None:
        self._active.update(self._view.operators.names)
        super().load(step)

    @override
    @torch.no_grad()
    def _load_records(self) -> None:
        """Optimizer state that experts share begins at zero: an expert that had none yet when it was taken has zeros."""
        schema, params = self._view.schema, self._view.params
        scalars = self.journals[0]["outcome"].get("scalars", {})
        for fqn in self._shared():
            schema.drop_state(params[fqn])
            if fqn in scalars:
                schema.ensure_state(params[fqn])
        for fqn in self._lacking():
            schema.drop_state(params[fqn])
        super()._load_records()
        for fqn, values in scalars.items():
            for key, value in values.items():
                live = schema.get_state(params[fqn], key)
                assert live is not None
                live.copy_(value)

    @override
    def _load_field(self, field: Field, value: Tensor, present: dict[str, bool]) -> list[Copy]:
        fqn = field.part.piece.fqn
        if fqn not in self._shared():
            return super()._load_field(field, value, present)
        if field.key == PRESENT:
            present[field.part.prefix] = bool(value.item())
            if present[field.part.prefix]:
                self._view.schema.ensure_state(self._view.params[fqn])
            return []
        if self._view.is_state(field) and not (present[field.part.prefix] and field.per_element):
            return []
        live = self._view.live(field)
        return [(value, live)] if live is not None else []

    def _lacking(self) -> set[str]:
        """Parameters of which nothing is loaded."""
        layout, _ = self._newest_slot()
        loaded = {part.operator for parts in layout.parts.values() for part in parts}
        lacking = [op for op in self._view.operators if op.kind == "expert" and op.name not in loaded]
        return {piece.fqn for op in lacking for piece in op.slices} - self._shared()

    def _shared(self) -> frozenset[str]:
        """Parameters of which several experts have a slice each."""
        experts = [op for op in self._view.operators if op.kind == "expert"]
        number = Counter(fqn for op in experts for fqn in {piece.fqn for piece in op.slices})
        return frozenset(fqn for fqn, count in number.items() if count > 1)


def account(outcome: Journal, sources: ExpertSources, operators: OperatorSet) -> tuple[Accounting, Tensor] | None:
    """The accounting to go on with, and int64 `[E]`: tokens that this recovery has lost.

    Args:
        outcome: of the generation's journal.
        sources: of the experts.
        operators: of this rank.

    Returns:
        `None` if the generation was not counted.
    """
    stored = outcome.get("accounting")
    if stored is None:
        return None
    accounting = Accounting.from_journal(stored)
    generations = [sources.chosen.generations.get(name) for name in expert_names(operators)]
    alive = [_tokens_behind(i, generation, sources, accounting) for i, generation in enumerate(generations)]
    levels = [sources.chosen.levels.get(name, ()) for name in expert_names(operators)]
    read_from = {level: torch.tensor([level in each for each in levels]) for level in accounting.saved}
    steps = torch.tensor([NEVER if each is None else each.step for each in generations], dtype=torch.int64)
    return accounting.restore(torch.tensor(alive, dtype=torch.int64), steps, read_from)


def expert_names(operators: OperatorSet) -> list[str]:
    """Names of the operators of all experts of the model, by place over all layers."""
    return [f"{layer.prefix}/expert.{i}" for layer in operators.layers for i in range(layer.num_experts)]


def _tokens_behind(expert: int, generation: GenerationId | None, sources: ExpertSources, accounting: Accounting) -> int:
    """Tokens in the copy of `expert` (place over all layers) that a generation supplies; none without a copy.

    Where nobody can read the generation's journal, the book has what it said, if it is of the newest copy.
    """
    if generation is None:
        return 0
    told = sources.alive.get(generation)
    if told is not None:
        return int(told[expert])
    # Of what was never counted nothing is known to be alive.
    return accounting.tokens_at(expert, generation.step) or 0


def log_recovery(
    generation: GenerationId,
    sources: ExpertSources,
    accounted: tuple[Accounting, Tensor] | None,
    operators: OperatorSet,
) -> None:
    """One line: how many experts are how old and from where, and what that has cost; and one for each that lost a copy."""
    chosen = sources.chosen
    names = expert_names(operators)
    lost = {} if accounted is None else dict(zip(names, accounted[1].tolist(), strict=True))
    for name in [each for each in names if each in chosen.bad and each in chosen.generations]:
        log.warning(
            "%s: its copy of %s is bad, %s is taken; tokens lost: %s",
            *(
                name,
                " and of ".join(map(str, chosen.bad[name])),
                chosen.generations[name],
                lost.get(name, "not counted"),
            ),
        )
    for name, why in chosen.missing.items():
        log.warning(
            "%s is lost: it begins anew, with the weights that the model starts with and without optimizer state; tokens "
            "lost: %s; its copies: %s",
            *(name, lost.get(name, "not counted"), why),
        )
    ages = Counter(generation.step - each.step for each in chosen.generations.values())
    places = Counter(
        "memory" if "memory" in each else "/".join(sorted(each)) or "several" for each in chosen.levels.values()
    )
    said = ", ".join(f"{number} of {age} steps ago" for age, number in sorted(ages.items()))
    cost = "its tokens were not counted"
    if accounted is not None:
        accounting, lost_E = accounted
        in_force = "" if accounting.k is None else f", K {accounting.k}"
        cost = f"{int(lost_E.sum())} tokens lost, PLT {accounting.plt:.4%}{in_force}"
    log.info(
        "%s is lossy: %d experts (%s; from %s); %s",
        generation,
        len(chosen.generations),
        said,
        ", ".join(f"{place}: {number}" for place, number in sorted(places.items())),
        cost,
    )
