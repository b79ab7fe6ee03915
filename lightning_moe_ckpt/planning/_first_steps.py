"""Checks during an incarnation's first steps: right counts of tokens, and the precision of consumed parameters.

Popularity only orders experts, and a run is exact in any order. If counts decide which experts a restart may lose,
training does not go on without right counts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
from typing_extensions import override

from lightning_moe_ckpt._logging import rank_logger
from lightning_moe_ckpt.coordination import Exchange
from lightning_moe_ckpt.errors import WrongCounts
from lightning_moe_ckpt.operators import ComputeDtypeProbe, CountProbe, OperatorSet
from lightning_moe_ckpt.planning._popularity_meter import StepFollower, sum_in_order

log = rank_logger(__name__)


class CountProof(StepFollower):
    """Check over whole optimizer steps until every layer's counts are judged. All ranks call it in the same steps.

    Wrong counts end the fit if counts are `required`; else `distrust` is called with the layers that have them.

    Raises `WrongCounts` if counts are required, and a layer has none.
    """

    def __init__(
        self,
        operators: OperatorSet,
        module: torch.nn.Module,
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
        """Start to watch, before a batch outside of replay."""
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

    def __init__(self, module: torch.nn.Module, dtype: torch.dtype) -> None:
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
