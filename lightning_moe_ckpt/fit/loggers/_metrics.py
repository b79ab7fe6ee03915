"""Take and restore values logged so far in the current epoch, so that epoch means come out the same.

Lightning accumulates `self.log(..., on_epoch=True)` in objects made by the first call. In a resumed process that call
may never come again in the epoch, so the objects are built anew from the call's arguments. The module's torchmetrics
keep their state themselves; the objects only refer to them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from operator import attrgetter, is_
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.connectors.logger_connector.result import _Metadata, _ResultMetric, _Sync
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat, dim_zero_max, dim_zero_mean, dim_zero_min, dim_zero_sum
from torchmetrics.utilities.distributed import gather_all_tensors

from lightning_moe_ckpt._logging import rank_logger
from lightning_moe_ckpt.journal import Constant, differs
from lightning_moe_ckpt.parallel import current_groups

log = rank_logger(__name__)

MetricState = dict[str, Any]

_REDUCTIONS: dict[str, Callable[..., Any]] = {
    **{f"torch.{each.__name__}": each for each in (torch.mean, torch.sum, torch.max, torch.min)},
    **{each.__name__: each for each in (sum, max, min)},
}
"""Functions that `self.log(reduce_fx=...)` takes; later calls must give the same function again."""

_GIVEN = ("fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph", "add_dataloader_idx")
_GIVEN_LATER = ("dataloader_idx", "metric_attribute")
"""Further arguments of `self.log`, which may be `None`."""


def take_metrics(trainer: Trainer, module: LightningModule) -> MetricState:
    """Return the newest logged values, and the epoch's accumulated state, as of now."""
    connector = trainer._logger_connector
    results, copies = trainer.fit_loop.epoch_loop._results, _Copies()
    return {
        "callback": copies.of(connector._callback_metrics),
        "logged": copies.of(connector._logged_metrics),
        "progress_bar": copies.of(connector._progress_bar_metrics),
        "epoch": {key: copies.of(_take(metric)) for key, metric in results.items() if not metric.has_reset},
        "module": {name: _take_module_metric(metric) for name, metric in module_metrics(module)},
    }


class _Copies:
    """Copies of tensors with their values as of now; a tensor logged in several places is copied once.

    Of a DTensor, such as the norm that torch returns of gradients in shards, a copy is the whole value.
    """

    def __init__(self) -> None:
        self._made: dict[int, tuple[Tensor, Tensor]] = {}

    def of(self, values: dict[str, Any]) -> dict[str, Any]:
        return {name: self._of(each) if isinstance(each, Tensor) else each for name, each in values.items()}

    def _of(self, value: Tensor) -> Tensor:
        if (made := self._made.get(id(value))) is None:
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            made = self._made[id(value)] = value, whole.detach().clone()
        return made[1]


def follow_metrics(trainer: Trainer, module: LightningModule, state: MetricState) -> None:
    """Set the newest logged values and the module's own metrics to `state`, in replay."""
    connector = trainer._logger_connector
    connector._callback_metrics.update(state["callback"])
    connector._logged_metrics.update(state["logged"])
    connector._progress_bar_metrics.update(state["progress_bar"])
    for name, metric in module_metrics(module):
        # Metrics of a collection may share tensors, so equal ones are not written.
        if name in state["module"] and differs(state["module"][name], _take_module_metric(metric)):
            _restore_module_metric(metric, state["module"][name])


def restore_metrics(trainer: Trainer, module: LightningModule, state: MetricState, *, mid_epoch: bool) -> None:
    """Restore the result of `take_metrics`; call before the fit loop runs."""
    connector = trainer._logger_connector
    follow_metrics(trainer, module, state)
    if mid_epoch:
        connector._first_loop_iter = True  # the next batch is not the first: nothing accumulated is to be reset
        results = trainer.fit_loop.epoch_loop._results
        for key, taken in state["epoch"].items():
            if (rebuilt := _rebuild(trainer, module, taken)) is not None:
                results[key] = rebuilt


def settled(state: MetricState, module: LightningModule, rank: int, *, says: bool = True) -> MetricState:
    """Return a rank's state from a state with lists, one entry per writer, as after a resume on other ranks; any other state
    unchanged.

    At the epoch's end, ranks reduce to the same value as if all writers had taken part. With `says`, metrics without a known
    reduction are logged.
    """
    metrics = dict(module_metrics(module))
    epoch = {
        key: _settled_value(each, rank) if isinstance(each, list) else each for key, each in state["epoch"].items()
    }
    states = {
        name: _settled_states(name, metrics[name], each, rank, says=says) if isinstance(each, list) else each
        for name, each in state["module"].items()
        if name in metrics
    }
    return {**state, "epoch": epoch, "module": states}


def _settled_value(rows: list[dict[str, Any]], rank: int) -> dict[str, Any]:
    own = rows[rank % len(rows)]
    reduces = own["sync"]["should"] or len(rows) == 1  # one process may say that ranks reduce, and does not
    if own["value"] is None or not reduces or own["sync"]["rank_zero_only"]:
        return own
    names = [name for name in ("value", "cumulated_batch_size") if own[name] is not None]
    found = {name: torch.stack([row[name] for row in rows]) for name in names}
    if (reduction := own["reduction"].removeprefix("torch.")) in ("max", "min"):
        return {**own, "value": getattr(found["value"], reduction)()}
    return {**own, **{name: each.sum(0) * (rank == 0) for name, each in found.items()}}


def _settled_states(name: str, metric: Metric, rows: list[dict[str, Any]], rank: int, *, says: bool) -> dict[str, Any]:
    own, apart = rows[rank % len(rows)], list[str]()
    values = dict(own["values"])
    for key, value in values.items():
        found, how = [row["values"][key] for row in rows], metric._reductions[key]
        if how is dim_zero_cat:
            items = [item for each in found for item in (each if isinstance(each, list) else [each])]
            whole = items if isinstance(value, list) else torch.cat(items)
            values[key] = whole if rank == 0 else whole[:0]
        elif how in (dim_zero_sum, dim_zero_mean, dim_zero_max, dim_zero_min):
            values[key] = how(torch.stack(found)) * (rank == 0 or how is not dim_zero_sum)
        elif any(differs(each, value) for each in found):
            apart.append(key)
    if apart and says:
        log.warning(
            "metric `%s` does not say how states of ranks become one (%s): a rank goes on with that of one rank of before",
            *(name, ", ".join(apart)),
            alike=True,
        )
    return {**own, "values": values, "updates": max(row["updates"] for row in rows)}


def _take(metric: _ResultMetric) -> dict[str, Any]:
    return {
        **_take_meta(metric.meta),
        "value": metric.value if metric.is_tensor else None,
        "default": metric._defaults["value"] if metric.is_tensor else None,
        "cumulated_batch_size": getattr(metric, "cumulated_batch_size", None),
        "forward_cache": metric._forward_cache if isinstance(metric._forward_cache, Tensor) else None,
        "updates": metric._update_count,
    }


def _take_meta(meta: _Metadata) -> dict[str, Any]:
    """Return the arguments of `self.log`. They are the same at every step, so the result is made, and encoded, once."""
    *sync, group = _sync_of(meta)
    values = (*_given_of(meta), *sync, group is not None, meta.reduce_fx)
    key = (*values, *map(type, values))  # a flag may be given as a number, which is equal to it
    if (taken := _metas.get(key)) is None:
        *given, should, rank_zero_only, grouped, reduction = values
        if len(_metas) >= _MOST_METAS:
            _metas.clear()
        taken = _metas[key] = {
            "given": Constant(zip((*_GIVEN, *_GIVEN_LATER), given, strict=True)),
            "reduction": next(name for name, function in _REDUCTIONS.items() if function is reduction),
            "sync": Constant(should=should, rank_zero_only=rank_zero_only, grouped=grouped),
        }
    return taken


_given_of = attrgetter(*_GIVEN, *_GIVEN_LATER)
_sync_of = attrgetter("sync.should", "sync.rank_zero_only", "sync.group")
_metas: dict[tuple[object, ...], dict[str, Any]] = {}
_MOST_METAS = 1_000


def _rebuild(trainer: Trainer, module: LightningModule, taken: dict[str, Any]) -> _ResultMetric | None:
    """Rebuild the object that accumulates values logged under a name; `None` if it cannot be rebuilt."""
    device, name = trainer.strategy.root_device, taken["given"]["name"]
    if taken["sync"]["grouped"]:
        log.warning("%r was logged with `sync_dist_group`: its value for this epoch starts anew", name)
        return None
    is_tensor = taken["value"] is not None
    metric = _ResultMetric(_metadata(trainer, taken), is_tensor)
    if is_tensor:
        metric.value = taken["value"].to(device)
        if "default" in taken:  # of the dtype that was torch's default in the step that logged
            metric._defaults["value"] = taken["default"].to(device)
        if taken["cumulated_batch_size"] is not None:
            metric.cumulated_batch_size = taken["cumulated_batch_size"].to(device)
    else:
        metric.value = dict(module.named_modules()).get(str(taken["given"]["metric_attribute"]))
        if metric.value is None:
            log.warning("the module has no metric %r any more", taken["given"]["metric_attribute"])
            return None
    cache = taken["forward_cache"]
    metric._forward_cache = None if cache is None else cache.to(device)
    metric._update_count = taken["updates"]
    return metric


def _metadata(trainer: Trainer, taken: dict[str, Any]) -> _Metadata:
    meta = _Resumed(**taken["given"], reduce_fx=_REDUCTIONS[taken["reduction"]])
    sync = taken["sync"]
    meta.sync = _Sync(_should=sync["should"], fn=trainer.strategy.reduce, rank_zero_only=sync["rank_zero_only"])
    return meta


class _Resumed(_Metadata):
    """Arguments of an earlier process's call. The next call decides whether ranks reduce the value."""

    __hash__ = None  # type: ignore[assignment]  # as of its base

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Metadata):
            return NotImplemented
        self._sync = other._sync
        return vars(self) == vars(other)


class _Parts(NamedTuple):
    """A module's parts, and the metrics among them."""

    all: list[nn.Module]
    """The module and its parts, in the order of `modules`."""
    metrics: list[tuple[str, Metric]]
    children: list[dict[str, nn.Module | None]]
    """Each part's own parts, in live dictionaries."""
    names: list[tuple[str, ...]]
    """Names of each part's own parts when last looked at."""
    seen: list[nn.Module | None]

    @classmethod
    def of(cls, module: nn.Module) -> _Parts:
        parts = dict(module.named_modules())
        children = [part._modules for part in parts.values()]
        metrics = [(name, part) for name, part in parts.items() if Metric in type(part).__mro__]
        return cls([*parts.values()], metrics, children, list(map(tuple, children)), [*_all(children)])

    @property
    def hold(self) -> bool:
        """Whether the parts are still the same. Compared by identity: metrics are equal to anything."""
        return list(map(tuple, self.children)) == self.names and all(map(is_, _all(self.children), self.seen))


def _all(children: list[dict[str, nn.Module | None]]) -> Iterator[nn.Module | None]:
    return chain.from_iterable(map(dict.values, children))


_parts: WeakKeyDictionary[nn.Module, _Parts] = WeakKeyDictionary()


def module_metrics(module: LightningModule) -> list[tuple[str, Metric]]:
    """Return metrics among a module's parts, by name. Cached: walking through all parts at every step takes longest."""
    if (known := _parts.get(module)) is None or not known.hold:
        known = _parts[module] = _Parts.of(module)
    return known.metrics


def modules_of(module: LightningModule) -> list[nn.Module]:
    """Return a module and its parts, as `modules` does, from the same cache; do not change the list."""
    module_metrics(module)
    return _parts[module].all


def gather_in_stage(state: Tensor, group: Any = None) -> list[Tensor]:
    """Return a metric's state on all ranks of this rank's pipeline stage, for `Metric.dist_sync_fn`.

    A function that looks the group up, because a metric with a group could not be copied.
    """
    found: list[Tensor] = gather_all_tensors(state, group or current_groups().group("stage"))
    return found


def hold_metrics(module: LightningModule) -> Callable[[], None]:
    """Return a function to restore the present states of a module's metrics, in the same objects.

    Lists are copied without their items: items are added, and never changed.
    """
    states = [getattr(metric, key) for _, metric in module_metrics(module) for key in metric._defaults]
    held = [(each, list(each) if isinstance(each, list) else _copy(each)) for each in states]

    def put_back() -> None:
        for state, kept in held:
            if isinstance(state, list):
                state[:] = kept
            else:
                with torch.inference_mode(state.is_inference()), torch.no_grad():
                    state.copy_(kept)

    return put_back


def _take_module_metric(metric: Metric) -> dict[str, Any]:
    found = {key: getattr(metric, key) for key in metric._defaults}
    values = {key: [*map(_copy, each)] if isinstance(each, list) else _copy(each) for key, each in found.items()}
    # Values are rounded to the dtype first, which `bf16-true` changes between the first epoch and the second.
    return {"values": values, "updates": metric._update_count, "dtype": metric.dtype}


def _copy(value: Tensor) -> Tensor:
    return value.detach().clone()


def _restore_module_metric(metric: Metric, state: dict[str, Any]) -> None:
    for key, value in state["values"].items():
        moved = [item.to(metric.device) for item in value] if isinstance(value, list) else value.to(metric.device)
        setattr(metric, key, moved)
    metric._update_count = state["updates"]
    metric._dtype = state.get("dtype", metric._dtype)
    metric._computed = None
