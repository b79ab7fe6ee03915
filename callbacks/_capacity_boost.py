"""Give experts that lost progress in a partial restore more tokens for a while, until they have made up for it.

Invariant: without a loss nothing is changed, counted or sent. Once every token deficit is repaid, capacity is bitwise what
it was. All ranks set the same capacity at the same boundary, since deficits and counts are summed over all ranks.

Source: MOETION (2024), Sec. 6.

Shape suffix: E experts of one layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn
from typing_extensions import override

from lightning_moe_ckpt._logging import rank_logger
from lightning_moe_ckpt.boosting import (
    WATCHED_STEPS,
    BiasRoute,
    MarginRoute,
    Measured,
    Meter,
    Route,
    TokenDeficits,
    boost_factors,
    faded_use,
    find_bias,
    find_router,
    meter_of,
)
from lightning_moe_ckpt.callbacks._base import checkpoint_of
from lightning_moe_ckpt.callbacks._loads import gather_over_ranks
from lightning_moe_ckpt.callbacks._shared_arguments import require_count
from lightning_moe_ckpt.errors import ConfigurationError
from lightning_moe_ckpt.fit.loops._trainer import expert_parallel_size, log_row
from lightning_moe_ckpt.operators import Capacity, CapacityView, MoELayerSpec, OperatorSet, discover
from lightning_moe_ckpt.policies import TokenLedger

log = rank_logger(__name__)


@dataclass
class _Boost:
    """State of one layer that has a capacity, or a router whose choices can be changed."""

    layer: MoELayerSpec
    view: CapacityView | None
    """`None` for a layer that drops nothing."""
    debts: TokenDeficits
    base: Capacity = None
    """Capacity without boost, while a boost is in force."""
    meter: Meter | None = None
    factors: Sequence[float] = (1.0,)
    """Factors on the capacity that are in force."""
    term: Sequence[float] | None = None
    """Term beside the router's bias that is in force."""
    since: int = 0
    """Step at which the newest debt arose."""
    displaced: int = 0
    """Tokens that were dropped because experts gave capacity away, in all."""
    use: Sequence[float] = ()
    """Largest use of each expert that was seen in this boost, see `faded_use`."""
    watched: int = 0
    """Number of steps over which `use` was seen."""
    extra: Sequence[int] = ()
    """Tokens of the last step over all ranks, as in `Measured`."""
    kept: Sequence[int] = ()
    room: Sequence[int] = ()

    def to_state(self) -> dict[str, Any]:
        """Return plain values."""
        own = {"base": self.base, "factors": list(self.factors), "term": self.term, "since": self.since}
        seen = {"displaced": self.displaced, "use": list(self.use), "watched": self.watched}
        return {**self.debts.to_state(), **own, **seen}

    @classmethod
    def from_state(cls, layer: MoELayerSpec, view: CapacityView | None, stored: Mapping[str, Any]) -> _Boost:
        """Read what `to_state` returned. Raises `Corrupt`."""
        newer = {name: stored[name] for name in ("since", "displaced", "use", "watched") if name in stored}
        debts, base = TokenDeficits.from_state(stored), _as_capacity(stored["base"])
        return cls(layer, view, debts, base, factors=stored["factors"], term=stored["term"], **newer)

    def took(self, extra: Sequence[int], displaced: Sequence[int], kept: Sequence[int], room: Sequence[int]) -> None:
        """Note a step's effects, over all ranks."""
        self.extra, self.kept, self.room = extra, kept, room
        self.debts, self.displaced = self.debts.repay(extra), self.displaced + sum(displaced)

    def watch(self, use: Sequence[float]) -> None:
        """Note the use of each expert in a step, the largest of all ranks."""
        self.use, self.watched = faded_use(self.use, use) if self.use else list(use), self.watched + 1


class CapacityBoost(Callback):
    """Raise the capacity of experts that lost tokens in a partial restore, until they have processed as many more.

    Use it beside a callback whose generations are partial; without one it does nothing and warns. After a restore that
    lost tokens, each expert in debt gets a tenth more capacity. From the tenth step on it is taken from other experts,
    as far as the largest use that was seen of them leaves some. Only tokens that the expert would have
    dropped without the boost repay the debt: an expert that does not overflow stays in debt, until `within_steps` are
    over. If all experts of a layer, or all layers, share one capacity, that capacity is raised, and the log says so.
    Layers that drop nothing have no capacity to raise; the log names them.

    Debts and the raised capacity survive further crashes, as part of the callback's state. While there are debts, each
    step has one small collective, and three numbers are logged: `moe/boost_debt`, the tokens that are still to be made up
    for; `moe/boost_repaid`, those that were; `moe/boost_displaced`, those that were dropped because experts gave capacity
    away.

    Args:
        boost: additional capacity as a fraction of the capacity; 0.1 is a tenth more.
        dropless: also boost layers that drop nothing. Tokens whose last choice was nearly an expert in debt go to that
            expert, a tenth as many as chose it. Works for the routers of Hugging Face's Mixtral, Qwen-MoE, OLMoE, GraniteMoE
            and gpt-oss, and for routers with a selection-only bias, such as DeepSeek-V3's, by a term beside that bias.
            This is an extension of the paper, and it changes what the router learns from.
        within_steps: optimizer steps after a loss, at the end of which debts that are still open are given up.

    Raises:
        ConfigurationError: an argument is out of range.

    Source: MOETION (2024), Sec. 6.
    """

    def __init__(self, boost: float = 0.1, *, dropless: bool = False, within_steps: int = 1000) -> None:
        if not (isinstance(boost, int | float) and 0 < boost <= 10):
            raise ConfigurationError(
                f"`CapacityBoost(boost={boost!r})` must be above 0, such as 0.1, and no more than 10."
            )
        require_count(self, "within_steps", within_steps, what="steps")
        self.boost, self.dropless, self.within_steps = boost, dropless, within_steps
        self._boosts: dict[str, _Boost] = {}
        self._stored: Mapping[str, Any] = {}
        self._step = 0

    @property
    def debts(self) -> dict[str, tuple[int, ...]]:
        """Tokens that each expert still has to make up for, by layer; layers without debts are left out."""
        return {fqn: boost.debts.open for fqn, boost in self._boosts.items() if boost.debts.any}

    @property
    def asks_all_ranks(self) -> bool:
        """Whether there are debts, for which every step has a collective of all ranks."""
        return bool(self._stored or any(boost.debts.any for boost in self._boosts.values()))

    @property
    def repaid(self) -> int:
        """Tokens that experts in debt have processed beyond what they would have without boost, in the whole run."""
        return sum(sum(boost.debts.repaid) for boost in self._boosts.values())

    @property
    def displaced(self) -> int:
        """Tokens that other experts have dropped because they gave capacity away, in the whole run."""
        return sum(boost.displaced for boost in self._boosts.values())

    # -- hooks

    @override
    def state_dict(self) -> dict[str, Any]:
        if not self._boosts:
            return dict(self._stored)
        known = {fqn: boost for fqn, boost in self._boosts.items() if any(boost.debts.lost)}
        return {fqn: each.to_state() for fqn, each in known.items()}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._stored = dict(state_dict)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._step = trainer.global_step
        found, checkpoint = discover(pl_module, ep_size=expert_parallel_size(trainer)), checkpoint_of(trainer)
        accounting = None if checkpoint is None else checkpoint.accounting
        if accounting is None and (checkpoint is None or checkpoint.run_id is not None):
            beside = (
                "no checkpoint callback" if checkpoint is None else f"{type(checkpoint).__name__}, which loses no token"
            )
            log.warning(
                "CapacityBoost does nothing: it makes up for tokens that a partial restart has lost, and beside it is %s. "
                "Add PartialExpertCheckpoint or SelectiveExpertCheckpoint, or leave it out",
                beside,
            )
        self._boosts = {}
        unlimited = []
        for layer, lost_E in zip(found.layers, _lost_by_layer(accounting, found), strict=True):
            if (view := layer.live_capacity) is not None and view.limited(pl_module):
                self._boosts[layer.fqn] = self._resume(layer, view, lost_E)
            elif self.dropless and (find_router(layer, pl_module) or find_bias(layer)) is not None:
                self._boosts[layer.fqn] = self._resume(layer, None, lost_E)
            elif any(lost_E):
                unlimited.append(layer.prefix)
        self._stored = {}
        if unlimited:
            log.warning("%s drop no tokens: what their experts have lost is not made up for", unlimited)
        self._begin(found, pl_module)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == self._step:
            return  # gradients are still accumulating
        self._step = trainer.global_step
        if not (active := [boost for boost in self._boosts.values() if boost.meter is not None]):
            return
        measured = _over_ranks([each.meter.take() for each in active if each.meter], trainer)
        for each, (sums, use) in zip(active, measured, strict=True):
            each.took(*sums)
            each.watch(use)
            if each.debts.any and self._step - each.since >= self.within_steps:
                log.warning(
                    "%s: %d of %d lost tokens were not made up for within %d steps, and are given up: their experts overflow too little",
                    *(each.layer.prefix, sum(each.debts.open), sum(each.debts.lost), self.within_steps),
                )
                each.debts = each.debts.expire()
            if not each.debts.any:
                self._end(each, pl_module)
        self._aim()
        self._set(pl_module)
        self._log(trainer)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._remove()

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._remove()

    # -- private

    def _resume(self, layer: MoELayerSpec, view: CapacityView | None, lost_E: Sequence[int]) -> _Boost:
        stored, none = self._stored.get(layer.fqn), TokenDeficits.none(layer.num_experts)
        found = _Boost(layer, view, none) if stored is None else _Boost.from_state(layer, view, stored)
        if found.debts.lost != tuple(lost_E):
            found.debts, found.since = found.debts.with_lost(lost_E), self._step
        return found

    def _begin(self, found: OperatorSet, module: nn.Module) -> None:
        """Start to count in layers with debts. The capacity changes once a step has shown which experts have room."""
        for boost in self._boosts.values():
            if not boost.debts.any:
                if boost.base is not None:
                    self._end(boost, module)
                continue
            if boost.view is None:
                boost.meter = self._route(boost, module)
                self._say(boost, "more tokens, which nearly chose them: an extension of what is published")
                continue
            if boost.base is None:
                boost.base = boost.view.get(module)
            boost.meter = meter = meter_of(found, boost.layer, module, boost.base)
            meter.factor = max(boost.factors)
            scope = "" if boost.view.scope == "expert" else f", as all of the {boost.view.scope}: it has one for all"
            self._say(boost, f"more capacity{scope}{'' if meter.exact else '; what they process more is estimated'}")

    def _route(self, each: _Boost, module: nn.Module) -> Route:
        bias, router = find_bias(each.layer), find_router(each.layer, module)
        if bias is not None:
            return BiasRoute(each.layer, bias, module, self.boost, each.term)
        assert router is not None
        route = MarginRoute(each.layer, router, self.boost)
        route.aim(each.debts.open)
        return route

    def _say(self, each: _Boost, what: str) -> None:
        log.info(
            "%s: %d experts have %d tokens to make up for, and get %.0f%% %s",
            *(each.layer.prefix, sum(map(bool, each.debts.open)), sum(each.debts.open), 100 * self.boost, what),
        )

    def _end(self, each: _Boost, module: nn.Module) -> None:
        """Put the layer back once no debt is open."""
        if each.view is not None:
            each.view.set(module, each.base)
        each.base, each.factors, each.term, each.use, each.watched = None, (1.0,), None, (), 0
        if each.meter is not None:
            each.meter.remove()
            each.meter = None
        log.info(
            "%s: %d of %d lost tokens are made up for, and %d others were dropped for it; capacity is what it was",
            *(each.layer.prefix, sum(each.debts.repaid), sum(each.debts.lost), each.displaced),
        )

    def _aim(self) -> None:
        for boost in self._boosts.values():
            if isinstance(boost.meter, Route):
                boost.meter.aim(boost.debts.open, boost.extra, boost.kept)
                boost.term = boost.meter.term

    def _set(self, module: nn.Module) -> None:
        owners: dict[int, list[_Boost]] = {}
        for boost in self._boosts.values():
            if boost.meter is not None and boost.view is not None:
                owners.setdefault(id(boost.view.owner(module)), []).append(boost)
        for sharing in owners.values():
            for each in sharing:
                known = any(each.room) and each.watched >= WATCHED_STEPS
                each.factors = boost_factors(
                    each.debts.open, self.boost, use_E=each.use if known else None, room_E=each.room
                )
            most = max(sharing, key=lambda each: max(each.factors))
            if most.view is not None:
                most.view.set(module, most.view.scaled(most.base, most.factors))
            for each in sharing:
                if each.meter is not None:
                    each.meter.factor = max(most.factors)

    def _log(self, trainer: Trainer) -> None:
        every = int(trainer.log_every_n_steps)  # type: ignore[attr-defined]
        if every and self._step % every == 0 and trainer.is_global_zero:
            debt = sum(sum(boost.debts.open) for boost in self._boosts.values())
            figures = {"debt": debt, "repaid": self.repaid, "displaced": self.displaced}
            log_row(trainer, {f"moe/boost_{name}": float(number) for name, number in figures.items()})

    def _remove(self) -> None:
        for boost in self._boosts.values():
            if boost.meter is not None:
                boost.meter.remove()
                boost.meter = None


def _lost_by_layer(accounting: TokenLedger | None, found: OperatorSet) -> list[tuple[int, ...]]:
    sizes = [layer.num_experts for layer in found.layers]
    lost_E = torch.zeros(sum(sizes), dtype=torch.int64) if accounting is None else accounting.lost
    return [tuple(max(lost, 0) for lost in part.tolist()) for part in torch.split(lost_E, sizes)]


def _over_ranks(measured: Sequence[Measured], trainer: Trainer) -> list[tuple[list[list[int]], list[float]]]:
    """Return, for each, all ranks' counts together, and the largest use on any rank, by one collective."""
    device = trainer.strategy.root_device
    flat_RN = gather_over_ranks(torch.cat([part.to(device) for each in measured for part in each]), device)
    found = []
    for of_layer_RN in torch.split(flat_RN, [5 * each.use.numel() for each in measured], dim=1):
        counts_R5E = of_layer_RN.view(len(of_layer_RN), 5, -1)
        found.append((counts_R5E[:, :4].sum(0).long().tolist(), counts_R5E[:, 4].amax(0).tolist()))
    return found


def _as_capacity(value: Any) -> Capacity:
    """Return `value` with its lists as tuples: Lightning may have turned tuples into lists."""
    return tuple(map(_as_capacity, value)) if isinstance(value, list | tuple) else value
