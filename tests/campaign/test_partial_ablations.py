"""Each check of the partial campaigns can fail: with something broken in the product, it does.

The controls, the same checks with nothing broken, are in `test_partial_recovery`, `test_boosted` and `test_dynamic_k`; the
latter also has the ablation of Dynamic-K.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from campaign._boosted import Boosting
from campaign._campaign import Campaigns
from campaign._partial_damage import Damage
from campaign._partial_runs import KILL, Machines, restarts, two_level_setup
from campaign._promises import Restarts
from campaign.test_boosted import BASE, BATCH, require_boosted, run_boosted
from campaign.test_partial_recovery import TURN
from lightning_moe_ckpt.policies import PartialPolicy, Selection, TokenLedger
from lightning_moe_ckpt.recovery._index import newest_whole
from lightning_moe_ckpt.testing import Seam

EXPERT = "model.moe.layer/expert.4"
ADD, SELECT = TokenLedger.add, PartialPolicy.select


def _one_is_older(
    offered: Mapping[str, Mapping[Any, int]], sizes: Mapping[str, int]
) -> tuple[dict[str, Any], list[str]]:
    """An expert comes from one generation before the newest that has it."""
    chosen, missing = newest_whole(offered, sizes)
    rest = {origin: numel for origin, numel in offered[EXPERT].items() if origin != chosen[EXPERT]}
    older, _ = newest_whole({EXPERT: rest}, {EXPERT: sizes[EXPERT]})
    return {**chosen, **older}, missing


def _forget_a_step(self: TokenLedger, *args: Any, **kwargs: Any) -> TokenLedger:
    """Tokens of one step are not counted."""
    return self if self.generations == 4 else ADD(self, *args, **kwargs)


def _never_the_fifth(self: PartialPolicy, *args: Any) -> Selection:
    """One expert is never taken."""
    chosen = SELECT(self, *args)
    memory, storage = (tuple(tuple(set(row) - {4}) for row in rows) for rows in (chosen.memory, chosen.storage))
    return Selection(memory, storage)


def _trust(self: Any, buffer: Any) -> None:
    """What was read is taken for what was written."""
    self.good = True


def _nothing(*args: Any) -> None:
    """In place of something."""


@dataclass(frozen=True, kw_only=True)
class Ablation:
    """What is broken, and the check that sees it."""

    seam: Seam
    check: Callable[[Restarts], object]
    says: str
    """What the check finds wrong."""
    damage: Damage | None = None


def _seam(module: str, attribute: str, replacement: Any) -> Seam:
    return Seam(module=f"lightning_moe_ckpt.{module}", attribute=attribute, replacement=replacement)


ABLATIONS = {
    "an expert one generation older": Ablation(
        seam=_seam("recovery._attempt", "newest_whole", _one_is_older),
        check=lambda found: found.require(1),
        says=re.escape(EXPERT),
    ),
    "a step not counted": Ablation(
        seam=_seam("policies", "TokenLedger.add", _forget_a_step),
        check=Restarts.require_accounting,
        says="tensor",
    ),
    "an expert never taken": Ablation(
        seam=_seam("policies", "PartialPolicy.select", _never_the_fifth),
        check=lambda found: found.require_turns(1, within=TURN),
        says=f"older than {TURN} steps: .*{re.escape(EXPERT)}': .*step=0",
    ),
    "records not verified": Ablation(
        seam=_seam("recovery._assembly", "Wanted.verify", _trust),
        check=lambda found: found.require(1),
        says="/expert",
        damage="ring",
    ),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.soak] * (i > 0)) for i, name in enumerate(ABLATIONS)]
)
def test_what_is_broken_is_seen(campaigns: Campaigns, folder: Path, name: str) -> None:
    """The run goes on to its end, and the check of the campaign raises."""
    ablation = ABLATIONS[name]
    machines, kill = Machines(folder, (0,), damaged=ablation.damage), replace(KILL, settle=20.0)
    found = restarts(campaigns, two_level_setup(1, 1), machines, kill, seams=[ablation.seam])
    with pytest.raises(AssertionError, match=ablation.says):
        ablation.check(found)


@pytest.mark.soak
def test_a_boost_that_forgets_its_debts_at_a_crash_is_seen(campaigns: Campaigns, folder: Path) -> None:
    """What was repaid before the second crash would be paid twice."""
    seam = _seam("callbacks", "CapacityBoost.load_state_dict", _nothing)
    found = run_boosted(campaigns, folder, 1, "expert", seams=[seam])
    with pytest.raises(AssertionError, match="BoostedStep"):
        require_boosted(found, Boosting(found, BASE, BATCH, "expert"), "expert")
