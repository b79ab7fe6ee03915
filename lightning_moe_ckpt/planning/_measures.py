"""What follows steps: popularity of experts, which changes the order of capture, and checks in an incarnation's first steps.

Popularity is of a run's history, whatever a process's timing.

Each rank measures its own tokens, step by step, and holds the result at every multiple of `reorder_every_n_steps` until
the next window boundary sends it to the other ranks. All measures are linear, so sums over ranks are taken there and
nowhere else. A rank's measure is journaled with the window's first boundary: a resumed run re-runs the steps after it,
counts each of them once, and has the undisturbed run's popularity at the same step.

At the boundary each rank compares the sum with the newest plan's popularity. If enough has changed, the next plan is
made on its own thread and holds from the next window on, however long planning takes: so a killed and resumed run
follows the same sequence of plans, though its windows start at other steps.

The first steps show whether tokens are counted right, and in which precision parameters are consumed. Popularity only orders
experts, and a run is exact in any order. If counts decide which experts a restart may lose, training does not go on without
right counts.

Source: MoEvement (2026), Sec. 3.5, Appendix B.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_moe_ckpt._logging import rank_logger
from lightning_moe_ckpt.coordination import Exchange
from lightning_moe_ckpt.errors import ConfigurationError, WrongCounts
from lightning_moe_ckpt.journal import Arrival, Arrivals
from lightning_moe_ckpt.operators import ComputeDtypeProbe, CountProbe, LoadCounter, OperatorSet
from lightning_moe_ckpt.policies import Popularity, decayed_popularity, popularity_per_capacity, should_reorder

log = rank_logger(__name__)

# Shape suffix: E experts of all layers, over all ranks.


class StepFollower:
    """Part that follows optimizer steps. Each event does nothing unless a subclass listens; all ranks get the same events."""

    is_over = False
    """Whether no later step is of interest."""

    def begin(self) -> None:
        """Start, before the first step."""

    def batch_begins(self, *, replaying: bool, planned: bool, last_step: int | None) -> None:
        """A batch is about to run forward and backward. `replaying` says whether the batch repeats a step of a window,
        `planned` whether a plan is in force, or measurements for the first plan have ended. `last_step` is the planned
        end of training, if any.
        """

    def before_step(self) -> None:
        """The optimizer is about to step, with whole gradients."""

    def stepped(self, step: int) -> None:
        """Optimizer step `step` has ended."""

    def remove(self) -> None:
        """Remove all hooks."""


class CaptureOrder(StepFollower):
    """Order of capture in windows; this one is fixed, and has nothing to exchange or to store."""

    counts_tokens = False
    """Whether tokens are measured, not probabilities."""

    def distrust(self, layers: Collection[str]) -> None:
        """Count nothing in these layers, whose experts then keep their order."""

    def first(self, exchange: Exchange) -> list[float] | None:  # a fixed order asks nobody
        """Return the popularity for the first plan; `None` for a fixed order. Collective."""
        return None

    def inputs(self) -> list[int]:
        """Return this rank's inputs to the exchange that opens a window."""
        return []

    def agreed(self, rows: Sequence[Sequence[int]]) -> list[float] | None:
        """Take every rank's inputs, by rank. Return the popularity for another plan if one is due, else `None`."""
        return None

    def refused(self, in_force: Sequence[float]) -> None:
        """Note that the newest plan was not put in force."""

    def state(self) -> dict[str, Any] | None:
        """Return the journal's entry for going on from this boundary; tensors may be on the device."""
        return None

    def restore(self, state: Mapping[str, Any], in_force: Sequence[float] | None) -> list[float] | None:
        """Go on from a boundary's entry, with the popularity of the adopted plan, if any; return that of a newer plan, if one was under way."""
        return None


class PopularityMeter(CaptureOrder):
    """Meter of experts' popularity among this rank's tokens, which decides if the order of capture is out of date.
    Raises `ConfigurationError` if a layer does not show the counts that `config` needs.
    """

    def __init__(self, config: Popularity, operators: OperatorSet, module: nn.Module) -> None:
        self._config = config
        self.counts_tokens = config.counts == "hard"
        self._counter = LoadCounter(operators, module, "tokens" if config.counts == "hard" else "probabilities")
        self._capacity = LoadCounter(operators, module, "capacity") if config.per_capacity else None
        if config.counts == "soft":
            _require(self._counter, "counts='soft'", "router probabilities", "counts='hard'", "probabilities")
        if self._capacity is not None:
            _require(self._capacity, "per_capacity=True", "the capacity of experts", "per_capacity=False", "capacity")
        self._value_E = torch.zeros(operators.num_experts, dtype=torch.float64)
        self._held: list[Tensor] = []
        self._arrivals, self._coming = Arrivals(), list[Arrival]()
        """Copies of `_held` to the host under way."""
        self._planned: list[float] | None = None
        """Popularity of the newest plan, in force or not."""

    @override
    def begin(self) -> None:
        self._counter.install()
        if self._capacity is not None:
            self._capacity.install()

    @override
    def remove(self) -> None:
        self._counter.remove()
        if self._capacity is not None:
            self._capacity.remove()

    @override
    def distrust(self, layers: Collection[str]) -> None:
        self._counter.distrust(layers)

    @override
    def stepped(self, step: int) -> None:
        """Note that optimizer step `step` has ended, with all its micro-batches. Does not wait for the device."""
        due = step % self._config.reorder_every_n_steps == 0
        if self._every_step or due:
            self._fold()
        if due:
            self._hold([self._value_E.clone()])
            if self._config.half_life_steps is None:
                self._value_E = torch.zeros_like(self._value_E)

    def value(self) -> Tensor:
        """Return the popularity of this rank's tokens now, float64 `[E]`."""
        if not self._every_step:
            self._fold()
        return self._value_E

    def restore_measure(self, state: Mapping[str, Any]) -> bool:
        """Go on from a state; for a state of another measure return `False`, and keep the own state."""
        if state["measure"] != self._measure:
            return False
        self._value_E, self._held, self._coming = state["value"].clone(), [], []
        self._hold(state["held"])
        return True

    # -- at window boundaries

    @override
    def first(self, exchange: Exchange) -> list[float]:
        """Return the popularity for the first plan: the sum over ranks, or if zero the last incarnation's. Collective."""
        popularity: list[float] = sum_in_order(exchange.gather_tensor(self._newest().cpu())).tolist()
        if self._planned is None or any(popularity):
            self._planned = popularity
        return self._planned

    @override
    def inputs(self) -> list[int]:
        """Return this rank's inputs to the exchange that opens a window: bits of the looks held since the last call, oldest first.

        The same number on all ranks, since steps are; usually none. The only wait here for the device, up to the looks' steps.
        """
        coming, self._coming, self._held = self._coming, [], []
        return [bits for each in coming for value_E in each.wait() for bits in value_E.view(torch.int64).tolist()]

    @override
    def agreed(self, rows: Sequence[Sequence[int]]) -> list[float] | None:
        due = None
        if rows[0]:
            own = [torch.from_numpy(np.array(row, np.int64)).view(torch.float64) for row in rows]
            limits = {name: getattr(self._config, name) for name in ("reorder_threshold", "reorder_fraction")}
            for look_E in sum_in_order(own).view(-1, len(self._value_E)):
                if self._planned is None or should_reorder(self._planned, look_E, **limits):
                    due = self._planned = look_E.tolist()
        return due

    @override
    def refused(self, in_force: Sequence[float]) -> None:
        """Note that the newest plan was not put in force: the next look compares with the plan in force."""
        self._planned = list(in_force)

    @override
    def state(self) -> dict[str, Any]:
        planned = None if self._planned is None else torch.tensor(self._planned, dtype=torch.float64)
        measured = {"measure": self._measure, "value": self.value().clone(), "held": list(self._held)}
        return {**measured, "planned": planned}

    @override
    def restore(self, state: Mapping[str, Any], in_force: Sequence[float] | None) -> list[float] | None:
        if not self.restore_measure(state):
            log.info("popularity is measured otherwise than by the run before: it starts anew")
            return None
        planned: Tensor | None = state["planned"]
        self._planned = None if planned is None else planned.tolist()
        return None if in_force is None or list(in_force) == self._planned else self._planned

    # -- private

    def _newest(self) -> Tensor:
        """Return the popularity for a plan outside the looks: `value`, or the look just held if that look has reset it."""
        if self._held and self._config.half_life_steps is None:
            return self._held[-1]
        return self.value()

    @property
    def _measure(self) -> dict[str, Any]:
        """Settings that make values comparable; thresholds may change between incarnations."""
        names = ("counts", "half_life_steps", "per_capacity", "reorder_every_n_steps")
        return {name: getattr(self._config, name) for name in names}

    @property
    def _every_step(self) -> bool:
        """Whether steps weigh differently; otherwise counts may pile up until needed."""
        return self._config.half_life_steps is not None or self._config.per_capacity

    def _hold(self, values: Sequence[Tensor]) -> None:
        self._held += values
        self._coming += [self._arrivals.start([value_E]) for value_E in values]

    def _fold(self) -> None:
        counts_E = self._counter.read_and_reset().double()
        if self._capacity is not None:
            counts_E = popularity_per_capacity(counts_E, self._capacity.read_and_reset())
        value_E = self._value_E.to(counts_E.device)
        if (half_life := self._config.half_life_steps) is None:
            self._value_E = value_E + counts_E
        else:
            self._value_E = decayed_popularity(value_E, counts_E, half_life_steps=half_life)


def sum_in_order(rows: Sequence[Tensor]) -> Tensor:
    """Return the sum over ranks, first rank first: the same bits on every rank and in every incarnation."""
    return sum(rows[1:], start=rows[0])


def _require(counter: LoadCounter, wanted: str, what: str, instead: str, field: str) -> None:
    if counter.uncounted:
        layers = ", ".join(f"`{name or 'root'}`" for name in counter.uncounted)
        raise ConfigurationError(
            f"`Popularity({wanted})`: {what} cannot be seen in {layers}. "
            f"Use `{instead}`, or `register_adapter` with a `MoELayerSpec({field}=...)` that says where they are."
        )


class CountProof(StepFollower):
    """Check over whole optimizer steps until every layer's counts are judged. All ranks call it in the same steps.

    Wrong counts end the fit if counts are `required`; else `distrust` is called with the layers that have them.

    Raises `WrongCounts` if counts are required, and a layer has none.
    """

    def __init__(
        self,
        operators: OperatorSet,
        module: nn.Module,
        exchange: Exchange,
        *,
        required: bool,
        distrust: Callable[[Collection[str]], object],
    ) -> None:
        uncounted = [layer.fqn or "root" for layer in operators.layers if layer.count is None]
        if required and uncounted:
            raise WrongCounts(
                f"Nothing counts the tokens of {uncounted}, and what may be lost is decided by them. Describe the layers with "
                "`register_adapter` and a `MoELayerSpec(count=...)`."
            )
        self._probe = CountProbe(operators, module)
        self._exchange, self._required = exchange, required
        self._distrust, self._watching = distrust, False
        self.is_over = self._probe.done

    @override
    def batch_begins(self, *, replaying: bool, planned: bool, last_step: int | None) -> None:
        if not (replaying or self._watching or self.is_over):
            self._watching = True
            self._probe.install()

    @override
    def before_step(self) -> None:
        """Judge the counts, when gradients are whole and before the optimizer steps. Collective while watching. Raises
        `WrongCounts`, on every rank, if counts are required and wrong on any rank.
        """
        if not self._watching or self.is_over:
            return
        failures = self._probe.check(lambda vector: sum_in_order(self._exchange.gather_tensor(vector)))
        if self._required:
            with self._exchange.raise_together(WrongCounts):
                if failures:
                    raise WrongCounts(" ".join(map(str, failures)))
        for failure in failures:
            log.warning("%s Until then its experts keep their order; what is restored is exact all the same.", failure)
        if failures:
            self._distrust([failure.layer for failure in failures])
        self.is_over = self._probe.done

    @override
    def remove(self) -> None:
        self._probe.remove()


class ConsumedPrecision(StepFollower):
    """Precision in which parameters are consumed; this one is known, else their own, and there is nothing to wait for."""

    is_watched = False
    """Whether the first plan waits for what forward and backward show."""

    def __init__(self, known: dict[str, torch.dtype] | None = None) -> None:
        self._known = known or {}

    def agreed(self, names: Sequence[str], exchange: Exchange) -> dict[str, torch.dtype]:
        """Return the low precision of the named parameters that every rank may store in it. Collective."""
        return self._known


class PrecisionProof(ConsumedPrecision):
    """Watch forward and backward of the first iterations for parameters that are consumed in low precision only."""

    is_watched = True

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._probe = ComputeDtypeProbe(module, dtype)
        self._entered = False

    @override
    def batch_begins(self, *, replaying: bool, planned: bool, last_step: int | None) -> None:
        if not planned and not self._entered:
            self._probe.__enter__()
            self._entered = True

    @override
    def before_step(self) -> None:
        if self._entered:
            self._entered = False
            self._probe.__exit__(None, None, None)

    @override
    def remove(self) -> None:
        self.before_step()

    @override
    def agreed(self, names: Sequence[str], exchange: Exchange) -> dict[str, torch.dtype]:
        verdict = self._probe.verdict()
        rows = exchange.gather([int(verdict.get(name) == self._dtype) for name in names])
        return {name: self._dtype for i, name in enumerate(names) if all(row[i] for row in rows)}
