"""Join planning's counts over writers and their pipeline stages, and cut them for a stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from itertools import accumulate, chain
from typing import Any, cast

import torch
from torch import Tensor

from lightning_moe_ckpt._logging import rank_logger
from lightning_moe_ckpt.coordination import Exchange
from lightning_moe_ckpt.journal import Journal
from lightning_moe_ckpt.parallel import ParallelGroups
from lightning_moe_ckpt.snapshot import StateView

log = rank_logger(__name__)


def joined_outcome(outcomes: Sequence[Mapping[str, Any]], stage_size: int) -> Journal:
    """Return a boundary's outcome with all stages' experts, in order, and ranks' popularity added up, from the outcomes by rank."""
    found, firsts = dict(outcomes[0]), outcomes[::stage_size]
    if any("seen" in each for each in outcomes):
        found["seen"] = sorted(set(chain.from_iterable(each.get("seen", ()) for each in outcomes)))
    if "scalars" in found:
        found["scalars"] = dict(chain.from_iterable(each["scalars"].items() for each in firsts))
    if found.get("accounting") is not None:
        ledgers = [each["accounting"] for each in firsts]
        starts = accumulate((sum(each["num_experts"]) for each in ledgers), initial=0)
        joined = _joined([_moved(each, start) for each, start in zip(ledgers, starts, strict=False)])
        found["accounting"] = {**joined, "num_experts": [*chain.from_iterable(each["num_experts"] for each in ledgers)]}
    if found.get("popularity") is not None:
        states = [each["popularity"] for each in outcomes]
        stages = [states[at : at + stage_size] for at in range(0, len(states), stage_size)]
        found["popularity"] = _joined([reduce(_added, of) for of in stages])
    return found


def own_outcome(outcome: Journal, view: StateView, groups: ParallelGroups, exchange: Exchange) -> Journal:
    """Return this rank's part: its stage's experts. Collective."""
    told = exchange.gather_values([layer.num_experts for layer in view.operators.layers])[:: groups.stage_size]
    stages, found = cast("list[list[int]]", told), dict(outcome)
    before, sizes = [*chain.from_iterable(stages[: groups.stage])], stages[groups.stage]
    here = slice(sum(before), sum(before) + sum(sizes))
    if "scalars" in found:
        found["scalars"] = {fqn: each for fqn, each in found["scalars"].items() if fqn in view.params}
    counted = found.get("accounting")
    if counted is not None and list(counted["num_experts"]) != [*chain.from_iterable(stages)]:
        # Experts that did not train had no tokens to lose, and may be stored with all others on these ranks.
        log.warning(
            "tokens and popularity of experts are counted from here on: other layers are counted now", alike=True
        )
        return {**found, "accounting": None, "popularity": None}
    if (stored := found.get("accounting")) is not None:
        layers = slice(len(before), len(before) + len(sizes))
        dropped = {name: each[layers] for name, each in stored.items() if name == "dropped"}
        found["accounting"] = {**_part(stored, here), "num_experts": sizes, **dropped}
    if (state := found.get("popularity")) is not None:
        own = _part(state, here)
        if groups.rank % groups.stage_size:  # where it is used, ranks' values are added up
            own |= {"value": own["value"] * 0, "held": [each * 0 for each in own["held"]]}
        found["popularity"] = own
    return found


def _added(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, Any]:
    """Return two ranks' popularity, added up."""
    return {**a, "value": a["value"] + b["value"], "held": [*map(torch.add, a["held"], b["held"])]}


def _moved(value: Any, start: int) -> Any:
    """Return a stage's ledger with places among all stages' experts; the stage's own begin at `start`."""
    if isinstance(value, dict):
        return {name: each + start if name == "experts" else _moved(each, start) for name, each in value.items()}
    return [_moved(each, start) for each in value] if isinstance(value, list) else value


def _joined(rows: Sequence[Any]) -> Any:
    """Return values by expert, stages one behind the other."""
    first = rows[0]
    if isinstance(first, Tensor):
        return torch.cat([*rows])
    if isinstance(first, dict):
        return {name: _joined([row[name] for row in rows]) for name in first}
    return [_joined(each) for each in zip(*rows, strict=False)] if isinstance(first, list) else first


def _part(value: Any, here: slice) -> Any:
    """Return values by expert in these places."""
    if isinstance(value, Tensor):
        return value[here]
    if isinstance(value, dict) and "experts" in value:
        within = (value["experts"] >= here.start) & (value["experts"] < here.stop)
        return {**value, "experts": value["experts"][within] - here.start, "alive": value["alive"][within]}
    if isinstance(value, dict):
        return {name: _part(each, here) for name, each in value.items()}
    return [_part(each, here) for each in value] if isinstance(value, list) else value
