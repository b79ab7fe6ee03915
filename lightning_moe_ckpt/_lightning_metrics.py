"""What a run has logged so far in the epoch under way: taken and restored, so that epoch means come out the same.

Lightning accumulates `self.log(..., on_epoch=True)` in metric objects that exist from the first call on; in a resumed
process that call is yet to come. So the accumulated values wait here, and are put into each object just before its
first update. Metrics of torchmetrics that belong to the module keep their state themselves and are set at once.

Like `_lightning`, the only place that touches these private attributes.
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torchmetrics import Metric

MetricState = dict[str, Any]


def take_metrics(trainer: Trainer, module: LightningModule) -> MetricState:
    """Newest values of everything logged, and what accumulates over the epoch."""
    connector = trainer._logger_connector
    results = trainer.fit_loop.epoch_loop._results
    return {
        "callback": dict(connector._callback_metrics),
        "logged": dict(connector._logged_metrics),
        "progress_bar": dict(connector._progress_bar_metrics),
        "epoch": {key: _take(metric) for key, metric in results.items() if metric.is_tensor and not metric.has_reset},
        "module": {name: _take_module_metric(metric) for name, metric in _module_metrics(module)},
    }


def restore_metrics(trainer: Trainer, module: LightningModule, state: MetricState, *, mid_epoch: bool) -> None:
    """Put back what `take_metrics` took; call before the fit loop runs."""
    connector = trainer._logger_connector
    connector._callback_metrics.update(state["callback"])
    connector._logged_metrics.update(state["logged"])
    connector._progress_bar_metrics.update(state["progress_bar"])
    for name, metric in _module_metrics(module):
        if name in state["module"]:
            _restore_module_metric(metric, state["module"][name])
    if mid_epoch:
        connector._first_loop_iter = True  # the next batch is not the first: nothing accumulated is to be reset
        _restore_when_logged(trainer, dict(state["epoch"]))


def _take(metric: Any) -> dict[str, Any]:
    return {
        "value": metric.value,
        "cumulated_batch_size": getattr(metric, "cumulated_batch_size", None),
        "forward_cache": metric._forward_cache if isinstance(metric._forward_cache, Tensor) else None,
        "updates": metric._update_count,
    }


def _restore_when_logged(trainer: Trainer, waiting: dict[str, dict[str, Any]]) -> None:
    results = trainer.fit_loop.epoch_loop._results
    original = results.update_metrics

    def update_metrics(key: str, value: Any, batch_size: int) -> None:
        if key in waiting:
            _restore(results[key], waiting.pop(key))
        original(key, value, batch_size)

    if waiting:
        results.update_metrics = update_metrics


def _restore(metric: Any, state: dict[str, Any]) -> None:
    metric.value = state["value"].to(metric.value.device)
    if state["cumulated_batch_size"] is not None:
        metric.cumulated_batch_size = state["cumulated_batch_size"].to(metric.value.device)
    metric._forward_cache = state["forward_cache"]
    metric._update_count = state["updates"]


def _module_metrics(module: LightningModule) -> list[tuple[str, Metric]]:
    return [(name, each) for name, each in module.named_modules() if isinstance(each, Metric)]


def _take_module_metric(metric: Metric) -> dict[str, Any]:
    values = {key: getattr(metric, key) for key in metric._defaults}
    return {"values": values, "updates": metric._update_count}


def _restore_module_metric(metric: Metric, state: dict[str, Any]) -> None:
    for key, value in state["values"].items():
        moved = [each.to(metric.device) for each in value] if isinstance(value, list) else value.to(metric.device)
        setattr(metric, key, moved)
    metric._update_count = state["updates"]
    metric._computed = None
