"""What restoring a partial generation costs: tokens behind the experts that are older than the rest, and what is said of it.

Source: PEC/MoC (2024), Sec. 3; the accounting is that of `policies`.
"""

from __future__ import annotations

import logging
from collections import Counter

import torch
from torch import Tensor

from lightning_moe_ckpt.journal import Journal, decode_journal
from lightning_moe_ckpt.operators import OperatorSet
from lightning_moe_ckpt.policies import NEVER, PEER, TokenLedger
from lightning_moe_ckpt.recovery._attempt import RestoreAttempt, RestorePlan
from lightning_moe_ckpt.recovery._found import RestoreSource
from lightning_moe_ckpt.snapshot import JOURNAL
from lightning_moe_ckpt.storage import GenerationId

log = logging.getLogger(__name__)


def tokens_behind(attempt: RestoreAttempt, chosen: RestorePlan) -> dict[GenerationId, Tensor]:
    """Tokens behind the experts of each generation that supplies some, int64 `[E]`; of those that are counted. Collective."""
    told = attempt.tell(set(chosen.generations.values()), JOURNAL, _alive)
    return {each: value for each, value in told.items() if isinstance(value, Tensor) and value.numel()}


def _alive(record: memoryview) -> object:
    """The tokens in live weights as a journal has them; an empty tensor where they were not counted."""
    journal = decode_journal(torch.frombuffer(bytearray(record), dtype=torch.uint8))
    stored = journal["outcome"].get("accounting")
    return torch.empty(0, dtype=torch.int64) if stored is None else TokenLedger.from_journal(stored).alive


def account(outcome: Journal, found: RestoreSource, operators: OperatorSet) -> tuple[TokenLedger, Tensor] | None:
    """The accounting to go on with, and int64 `[E]`: tokens that this recovery has lost.

    Args:
        outcome: of the generation's journal.
        found: what was restored.
        operators: of this rank.

    Returns:
        `None` if the generation was not counted.
    """
    stored = outcome.get("accounting")
    if stored is None:
        return None
    accounting = TokenLedger.from_journal(stored)
    generations = [found.chosen.generations.get(name) for name in expert_names(operators)]
    alive = [_tokens_behind(i, generation, found, accounting) for i, generation in enumerate(generations)]
    apart = PEER in accounting.saved
    levels = [_levels(found.chosen.levels.get(name, frozenset()), apart=apart) for name in expert_names(operators)]
    read_from = {level: torch.tensor([level in each for each in levels]) for level in accounting.saved}
    steps = torch.tensor([NEVER if each is None else each.step for each in generations], dtype=torch.int64)
    return accounting.restore(torch.tensor(alive, dtype=torch.int64), steps, read_from)


def _levels(held: frozenset[str], *, apart: bool) -> frozenset[str]:
    """Levels of the accounting that hold all of a copy.

    Args:
        held: see `RestorePlan`.
        apart: whether what other nodes hold is counted apart; else it is memory like that of the own node.
    """
    if not apart:
        return held
    return (held - {"memory"}) | ({"memory"} if "host" in held else set())


def expert_names(operators: OperatorSet) -> list[str]:
    """Names of the operators of all experts of the model, by place over all layers."""
    return [f"{layer.prefix}/expert.{i}" for layer in operators.layers for i in range(layer.num_experts)]


def _tokens_behind(expert: int, generation: GenerationId | None, found: RestoreSource, accounting: TokenLedger) -> int:
    """Tokens in the copy of `expert` (place over all layers) that a generation supplies; none without a copy.

    Where nobody can read the generation's journal, the book has what it said, if it is of the newest copy.
    """
    if generation is None:
        return 0
    told = found.tokens.get(generation)
    if told is not None:
        return int(told[expert])
    # Of what was never counted nothing is known to be alive.
    return accounting.tokens_at(expert, generation.step) or 0


def note_recovery(found: RestoreSource, outcome: Journal, operators: OperatorSet) -> None:
    """Bring the journal of a generation up to date: tokens as of now, and copies that turned out bad; said in the log.

    Args:
        found: what was restored; nothing is noted if no expert may be of another generation.
        outcome: of its journal.
        operators: of this rank.
    """
    if not found.chosen.is_partial:
        return
    accounted = account(outcome, found, operators)
    log_recovery(found, accounted, operators)
    outcome["bad"] = {
        name: frozenset(each for each, stored in bad.items() if stored) for name, bad in found.chosen.bad.items()
    }
    if accounted is not None:
        outcome["accounting"] = accounted[0].to_journal()
        outcome["lost"] = accounted[1]


def log_recovery(
    found: RestoreSource,
    accounted: tuple[TokenLedger, Tensor] | None,
    operators: OperatorSet,
) -> None:
    """One line: how many experts are how old and from where, and what that has cost; and one for each that lost a copy."""
    chosen, generation = found.chosen, found.generation
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
    apart = accounted is not None and PEER in accounted[0].saved
    levels = [_levels(each, apart=apart) for each in chosen.levels.values()]
    places = Counter("memory" if "memory" in each else "/".join(sorted(each)) or "several" for each in levels)
    said = ", ".join(f"{number} of {age} steps ago" for age, number in sorted(ages.items()))
    cost = "its tokens were not counted"
    if accounted is not None:
        accounting, lost_E = accounted
        in_force = "" if accounting.k is None else f", K {accounting.k}"
        cost = f"{int(lost_E.sum())} tokens lost, PLT {accounting.plt:.4%}{in_force}"
    log.info(
        "%s is partial: %d experts (%s; from %s); %s",
        generation,
        len(chosen.generations),
        said,
        ", ".join(f"{place}: {number}" for place, number in sorted(places.items())),
        cost,
    )
