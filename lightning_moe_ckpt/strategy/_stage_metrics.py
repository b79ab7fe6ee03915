"""Give a torchmetrics metric the same value on all pipeline stages.

One stage updates the metric, mostly the last in `stage_loss`, and every rank asks for its value: in hooks, and through
Lightning if logged. torchmetrics would gather states from the ranks of all stages, most without states or with other
shapes. So each stage's ranks gather among themselves, and all stages get the value of the last stage that has updated
the metric, or of the last stage if none is known to have.

Metrics inside a stage are left to the stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_moe_ckpt.coordination import Exchange
from lightning_moe_ckpt.errors import ConfigurationError
from lightning_moe_ckpt.fit.loggers._metrics import gather_in_stage, module_metrics
from lightning_moe_ckpt.parallel import current_groups
from lightning_moe_ckpt.parallel._upstream import UpstreamLog


class StageMetrics:
    """The metrics of a module in stages; `upstream` has their values for a stage that repeats steps."""

    def __init__(self, upstream: UpstreamLog) -> None:
        self._upstream, self._is_local = upstream, False

    def share(self, module: LightningModule, stage: nn.Module) -> None:
        """Take over the module's present metrics. Undoing an attempt, or a fit, undoes this too."""
        new = [
            metric
            for _, metric in module_metrics(module)
            if metric.dist_sync_fn is not gather_in_stage and _own(metric) is None
        ]
        parts = set(map(id, stage.modules())) if new else set()
        for metric in new:
            if metric.process_group is None and metric.dist_sync_fn is None:
                metric.dist_sync_fn = gather_in_stage
            if id(metric) not in parts:
                metric.compute = self._shared(metric, metric.compute)  # type: ignore[method-assign]

    def release(self, module: LightningModule) -> None:
        """Undo `share`."""
        for _, metric in module_metrics(module):
            if metric.dist_sync_fn is gather_in_stage:
                metric.dist_sync_fn = None
            if (own := _own(metric)) is not None:
                metric.compute = own  # type: ignore[method-assign]

    @contextmanager
    def local(self) -> Iterator[None]:
        """Let metrics in this context give the stage's own value: other stages do not ask meanwhile."""
        before, self._is_local = self._is_local, True
        try:
            yield
        finally:
            self._is_local = before

    def value(self, metric: Metric, compute: Callable[[], Any]) -> Any:
        """Return a metric's value for all stages. Collective, unless this rank asks as part of its stage.

        Args:
            metric: this rank's metric.
            compute: returns its value over this stage's ranks. Collective over the stage.
        """
        # `forward` computes its own batch's value, without unsynchronising, until it has put the states back.
        if self._is_local or self._upstream.silent or not metric._should_unsync:  # noqa: SLF001
            return compute()
        groups, upstream = current_groups(), self._upstream
        exchange = Exchange(groups, "pipeline_control")
        is_updated = not Exchange(groups, "stage_control").all_agree(not _is_updated(metric))
        flags: list[list[int]] = upstream.answer("metric", lambda: exchange.gather([int(is_updated)]))
        updated = [stage for stage, [flag] in enumerate(flags) if flag]
        owner = max(updated, default=groups.num_stages - 1)
        own: object = None
        if groups.stage == owner or not updated:  # an error here is raised on every rank
            with self.local():  # only this stage asks the metrics inside this metric
                own = move_data_to_device(compute(), torch.device("cpu"))
        rows: list[Any] = upstream.answer("metric", lambda: exchange.gather_values(own))
        upstream.require_same(
            "the value of a metric", [is_updated, own], [bool(flags[groups.stage][0]), rows[groups.stage]]
        )
        return move_data_to_device(rows[owner], metric.device)

    def _shared(self, metric: Metric, own: Callable[..., Any]) -> Callable[..., Any]:
        # A function: searches of metrics' attributes would look into an object, and find the log of all stages.
        def compute(*args: Any, **options: Any) -> Any:
            return self.value(metric, partial(own, *args, **options))

        compute.own = own  # type: ignore[attr-defined]
        return compute

    # -- logged by a stage

    def name_of(self, module: LightningModule, logged: str, metric: Metric) -> str:
        """Return a metric's name in the module. Raises `ConfigurationError` if other stages do not have the metric."""
        name = next((name for name, each in module_metrics(module) if each is metric), None)
        if name is None or _own(metric) is None:
            raise ConfigurationError(
                f"`self.log({logged!r})` was given {type(metric).__name__} that is part of a pipeline stage, or of nothing, so "
                f"that other stages do not have it. Make it an attribute in `{type(module).__name__}.__init__`."
            )
        return name

    def of_batch(self, metric: Metric) -> Tensor | None:
        """Return a micro-batch's result of `forward`, if a number."""
        found: object = metric._forward_cache  # noqa: SLF001
        return found if isinstance(found, Tensor) and found.numel() == 1 else None

    def named(self, module: LightningModule, logged: str, name: str, of_batch: Tensor | None) -> Metric:
        """Return this rank's metric of a name, and set its result of `forward` to `of_batch`.

        Raises:
            ConfigurationError: this stage does not have the metric.
        """
        metric = dict(module_metrics(module)).get(name)
        if metric is None:
            raise ConfigurationError(
                f"`self.log({logged!r})` was given the metric `{name}`, which another stage does not have. Make it in "
                f"`{type(module).__name__}.__init__`, so that all stages have it."
            )
        if of_batch is not None:
            metric._forward_cache = of_batch.to(metric.device)  # type: ignore[assignment]  # noqa: SLF001
        return metric


def _is_updated(metric: Metric) -> bool:
    """Return whether a metric, or a metric inside it, has counted an update; some composed metrics count none."""
    return any(module.update_called for module in metric.modules() if isinstance(module, Metric))


def _own(metric: Metric) -> Callable[..., Any] | None:
    """Return a shared metric's own `compute`; `None` if not shared. torchmetrics too keeps `compute` among attributes."""
    return getattr(vars(metric)["compute"], "own", None)
