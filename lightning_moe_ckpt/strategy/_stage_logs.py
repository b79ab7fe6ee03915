"""Bring one stage's values of a batch to all stages: its loss, and logged values.

Only the last stage computes the loss, and whatever the user logs there. Callbacks, loggers and schedulers run on every
rank, so after a batch the ranks of a pipeline exchange both, and all log the same. Each value is the mean over the
micro-batches; a torchmetrics metric is logged as such, see `StageMetrics`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from inspect import signature
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torchmetrics import Metric

from lightning_moe_ckpt.coordination import Exchange
from lightning_moe_ckpt.errors import ConfigurationError
from lightning_moe_ckpt.parallel._upstream import UpstreamLog
from lightning_moe_ckpt.strategy._stage_metrics import StageMetrics

_OPTIONS = list(signature(LightningModule.log).parameters)[3:]
"""Names of the arguments behind name and value."""

_PLAIN = (bool, int, float, str, type(None))


class StageLogs:
    """Losses and logged values of the batch under way.

    Args:
        module: the module with the `log` in use.
        exchange: exchange between the stages of this rank's pipeline.
        upstream: log with recorded answers, for a stage that repeats steps.
        metrics: the module's metrics.
    """

    def __init__(
        self, module: LightningModule, exchange: Exchange, upstream: UpstreamLog, metrics: StageMetrics
    ) -> None:
        self._module, self._exchange, self._upstream, self._metrics = module, exchange, upstream, metrics
        self.losses: list[Tensor] = []
        """Losses by micro-batch, on the last stage."""
        self.auxiliary: list[Tensor] = []
        """Auxiliary losses by micro-batch, on stages that have some."""
        self._logged: dict[str, tuple[list[Tensor], dict[str, Any]]] = {}

    def begin(self) -> None:
        """Drop values of the previous batch, left over if it failed."""
        self.losses, self.auxiliary, self._logged = [], [], {}

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Take values logged in this context."""
        self._module.log = self._log  # type: ignore[method-assign]
        try:
            with self._metrics.local():
                yield
        finally:
            vars(self._module).pop("log", None)

    def exchanged(self) -> Tensor:
        """Log the values of all stages, and return the batch's loss, on the CPU. Collective over the pipeline."""
        logged = [[name, _mean(values), options] for name, (values, options) in self._logged.items()]
        own = [_mean(each) for each in (self.losses, self.auxiliary)]
        row = [*own, logged]
        rows: list[Any] = self._upstream.answer("logged", lambda: self._exchange.gather_values(row))
        self._upstream.require_same("what a stage computed and logged", row, rows[self._exchange.rank])
        self.begin()
        named = [(stage, each) for stage, row in enumerate(rows) for each in row[2]]
        seen: dict[str, int] = {}
        for stage, (name, value, options) in named:
            if name in seen:
                raise ConfigurationError(
                    f"Stages {seen[name]} and {stage} both log `{name}`. Give each a name of its own, such as "
                    f"`{name}/stage{stage}`."
                )
            seen[name] = stage
            if "metric_attribute" in options:
                self._module.log(
                    name, self._metrics.named(self._module, name, options["metric_attribute"], value), **options
                )
            else:
                self._module.log(name, value.to(self._module.device), **options)
        loss: Tensor = rows[-1][0]
        for row in rows:  # in stage order: the bits are the same everywhere
            loss = loss if row[1] is None else loss + row[1].to(loss.dtype)
        return loss

    def _log(self, name: str, value: Any, *positional: Any, **options: Any) -> None:
        options |= dict(zip(_OPTIONS, positional, strict=False))
        if isinstance(value, Metric):
            options["metric_attribute"] = self._metrics.name_of(self._module, name, value)
            value = self._metrics.of_batch(value)
        elif not isinstance(value, (Tensor, int, float)):
            raise ConfigurationError(
                f"`self.log({name!r})` was given {type(value).__name__} in a pipeline stage, which cannot be averaged over "
                "micro-batches. Log a number, a tensor or a metric."
            )
        odd = [key for key, option in options.items() if not isinstance(option, _PLAIN)]
        if odd:
            raise ConfigurationError(
                f"`self.log({name!r}, {odd[0]}=...)`: only options that are numbers, words or flags reach other stages."
            )
        values, _ = self._logged.setdefault(name, ([], options))
        if value is None:
            return
        value = torch.as_tensor(value).detach().reshape(())
        values.append(value.to(torch.promote_types(value.dtype, torch.float32)))


def _mean(values: list[Tensor]) -> Tensor | None:
    """Return the mean over micro-batches, on the CPU; `None` if there are no values."""
    if not values:
        return None
    stacked = torch.stack([each.reshape(()) for each in values])
    return stacked.to(torch.promote_types(stacked.dtype, torch.float32)).mean().cpu()
