"""Cost of restoring a partial generation: tokens behind the experts that are older than the rest, and its log lines.

Source: PEC/MoC (2024), Sec. 3; the ledger is in `policies`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lightning_moe_ckpt._logging import rank_logger
from lightning_moe_ckpt.journal import Journal, decode_journal
from lightning_moe_ckpt.operators import OperatorSet
from lightning_moe_ckpt.policies import NEVER, PEER, TokenLedger, expert_names
from lightning_moe_ckpt.recovery._attempt import RestoreAttempt, RestorePlan
from lightning_moe_ckpt.snapshot import JOURNAL
from lightning_moe_ckpt.storage import GenerationId

log = rank_logger(__name__)

TokensByGeneration = Mapping[GenerationId, Tensor]
"""Tokens behind the experts of each supplying generation, int64 `[E]`; without generations that counted none."""


def tokens_behind(attempt: RestoreAttempt, chosen: RestorePlan) -> TokensByGeneration:
    """Read the tokens behind the chosen experts from journals. Collective."""
    read = attempt.read_common(set(chosen.generations.values()), JOURNAL, _alive)
    return {each: alive_E for each, alive_E in read.items() if alive_E.numel()}


def _alive(record: memoryview) -> Tensor:
    """Return a journal's tokens in live weights; an empty tensor if tokens were not counted."""
    journal = decode_journal(torch.frombuffer(bytearray(record), dtype=torch.uint8))
    stored = journal["outcome"].get("accounting")
    return torch.empty(0, dtype=torch.int64) if stored is None else TokenLedger.from_journal(stored).alive


def note_recovery(
    generation: GenerationId,
    chosen: RestorePlan,
    tokens: TokensByGeneration,
    outcome: Journal,
    operators: OperatorSet,
) -> None:
    """Bring a generation's journal up to date: tokens as of now, and bad copies; log both.

    Args:
        generation: the restored generation.
        chosen: sources of its experts; without partial sources nothing is noted.
        tokens: of the generations that supply experts.
        outcome: outcome half of its journal, changed in place.
        operators: of this rank.
    """
    if not chosen.is_partial:
        return
    names = [name for layer in operators.layers for name in expert_names(layer)]
    ledger, lost = None, dict[str, int]()
    if (stored := outcome.get("accounting")) is not None:
        ledger, lost_E = _restore(TokenLedger.from_journal(stored), names, chosen, tokens)
        outcome["accounting"], outcome["lost"] = ledger.to_journal(), lost_E
        lost = dict(zip(names, lost_E.tolist(), strict=True))
    outcome["bad"] = {
        name: frozenset(each for each, stored in bad.items() if stored) for name, bad in chosen.bad.items()
    }
    _log_experts(names, chosen, lost)
    _log_cost(generation, chosen, ledger, sum(lost.values()))


def _restore(
    ledger: TokenLedger, names: Sequence[str], chosen: RestorePlan, tokens: TokensByGeneration
) -> tuple[TokenLedger, Tensor]:
    """Return the ledger to go on with, and int64 `[E]`: tokens lost by this recovery."""
    sources = [chosen.generations.get(name) for name in names]
    alive = [_tokens_of(expert, source, tokens, ledger) for expert, source in enumerate(sources)]
    levels = [_levels(chosen.levels.get(name, frozenset()), ledger) for name in names]
    read_from = {level: torch.tensor([level in each for each in levels]) for level in ledger.saved}
    steps = torch.tensor([NEVER if each is None else each.step for each in sources], dtype=torch.int64)
    return ledger.restore(torch.tensor(alive, dtype=torch.int64), steps, read_from)


def _tokens_of(expert: int, source: GenerationId | None, tokens: TokensByGeneration, ledger: TokenLedger) -> int:
    """Return the tokens in a generation's copy of `expert` (place over all layers); 0 without a copy.

    If nobody can read the generation's journal, the ledger has its tokens, provided it is the expert's newest copy.
    """
    if source is None:
        return 0
    if source in tokens:
        return int(tokens[source][expert])
    # Uncounted tokens count as not alive.
    return ledger.tokens_at(expert, source.step) or 0


def _levels(held: frozenset[str], ledger: TokenLedger | None) -> frozenset[str]:
    """Return the ledger's levels that hold all of a copy, from a `RestorePlan`'s levels."""
    if ledger is None or PEER not in ledger.saved:
        return held
    # The ledger counts copies on other nodes apart, so memory is the own node's.
    return (held - {"memory"}) | ({"memory"} if "host" in held else set())


def _log_experts(names: Sequence[str], chosen: RestorePlan, lost: Mapping[str, int]) -> None:
    """Log one line for each expert that lost a copy."""
    for name in [each for each in names if each in chosen.bad and each in chosen.generations]:
        log.warning(
            "%s: its copy of %s is bad, %s is taken; tokens lost: %s",
            *(name, " and of ".join(map(str, chosen.bad[name])), chosen.generations[name]),
            lost.get(name, "not counted"),
        )
    for name, why in chosen.missing.items():
        log.warning(
            "%s is lost: it begins anew, with the weights that the model starts with and without optimizer state; tokens "
            "lost: %s; its copies: %s",
            *(name, lost.get(name, "not counted"), why),
        )


def _log_cost(generation: GenerationId, chosen: RestorePlan, ledger: TokenLedger | None, lost: int) -> None:
    """Log one line: ages and places of experts, and the cost in tokens."""
    ages = Counter(generation.step - each.step for each in chosen.generations.values())
    levels = [_levels(level, ledger) for level in chosen.levels.values()]
    places = Counter("memory" if "memory" in level else "/".join(sorted(level)) or "several" for level in levels)
    cost = "its tokens were not counted"
    if ledger is not None:
        in_force = "" if ledger.k is None else f", K {ledger.k}"
        cost = f"{lost} tokens lost, PLT {ledger.plt:.4%}{in_force}"
    log.info(
        "%s is partial: %d experts (%s; from %s); %s",
        generation,
        len(chosen.generations),
        ", ".join(f"{number} of {age} steps ago" for age, number in sorted(ages.items())),
        ", ".join(f"{place}: {number}" for place, number in sorted(places.items())),
        cost,
    )
