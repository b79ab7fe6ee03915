"""A user's module in a pipeline stage: its hooks, and the values of one stage that all stages need.

Lightning asks for `training_step`, `validation_step` and `configure_model`. A module cut into stages has other hooks in
their place, called by `MoEStrategy`, and needs nothing else. Modules that cannot run in stages are refused.

*Logged values.* Only the last stage computes the loss, and whatever the user logs there. Callbacks, loggers and schedulers
run on every rank, so after a batch the ranks of a pipeline exchange both, and all log the same. Each value is the mean over
the micro-batches; a torchmetrics metric is logged as such.

*Metrics.* One stage updates a torchmetrics metric, mostly the last in `stage_loss`, and every rank asks for its value: in
hooks, and through Lightning if logged. torchmetrics would gather states from the ranks of all stages, most without states or
with other shapes. So each stage's ranks gather among themselves, and all stages get the value of the last stage that has
updated the metric, or of the last stage if none is known to have. Metrics inside a stage are left to the stage.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from inspect import signature
from typing import Any, Protocol, cast
from weakref import WeakKeyDictionary

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_moe_ckpt.coordination import Exchange
from lightning_moe_ckpt.errors import ConfigurationError
from lightning_moe_ckpt.fit.loggers._metrics import gather_in_stage, module_metrics
from lightning_moe_ckpt.fit.loops import _port
from lightning_moe_ckpt.operators import is_sharded
from lightning_moe_ckpt.parallel import ParallelGroups, current_groups, expert_parallel_fqns, expert_parallel_modules
from lightning_moe_ckpt.parallel._expert_parallel import refuse_tutel
from lightning_moe_ckpt.parallel._upstream import UpstreamLog

ATTRIBUTE = "stage"
"""Attribute for a stage that is not part of the LightningModule already."""

_STEPS = ("training_step", "validation_step", "test_step")

_built: WeakKeyDictionary[LightningModule, tuple[int, int, nn.Module]] = WeakKeyDictionary()
"""Stage index, number of stages and stage of each built module."""


class StagedModule(Protocol):
    """Hooks of a LightningModule under `MoEStrategy(pipeline_parallel=...)`."""

    def configure_stage(self, stage: int, num_stages: int) -> nn.Module:
        """Return one stage. Its parameters have their names in the whole model: no name is in two stages.

        Called in place of `configure_model`, when process groups exist. The result becomes `self.stage`, unless it is
        an attribute already.
        """

    def split_batch(self, batch: Any) -> tuple[Any, Tensor]:
        """Return the first stage's inputs, a tensor or several, and the loss's target.

        Both are cut into micro-batches along their first dimension. Without this hook a batch has to be such a pair.
        """

    def stage_loss(self, output: Any, target: Tensor) -> Tensor:
        """Return one micro-batch's mean loss, on the last stage; in training and in validation, by `self.training`.

        Values logged here, or in `stage_auxiliary_loss`, are averaged over micro-batches and logged on all stages.
        """

    def stage_auxiliary_loss(self) -> Tensor | None:
        """Return this stage's addition to its latest micro-batch's loss, such as `l_aux` of its experts, or `None`.

        Without this hook nothing is added.
        """


def staged(module: LightningModule) -> StagedModule:
    """Return the module typed with its stage hooks. Raises `ConfigurationError` if a required hook is missing."""
    missing = [name for name in ("configure_stage", "stage_loss") if not callable(getattr(module, name, None))]
    if missing:
        raise ConfigurationError(
            f"`MoEStrategy(pipeline_parallel=...)` needs `{type(module).__name__}.{missing[0]}`, which it does not have. "
            "See the section on pipeline stages of the documentation for the hooks of a module that is cut into stages."
        )
    return cast("StagedModule", module)


def stand_in(module: LightningModule, build: Callable[[], None], *, validates: bool) -> None:
    """Let Lightning find its steps, and call `build` in place of `configure_model`."""
    for name in _STEPS:
        # Without data, a `validation_step` would make Lightning warn.
        if not is_overridden(name, module) and (validates or name != "validation_step"):
            setattr(module, name, _never_called)
    module.configure_model = build  # type: ignore[method-assign]


def stand_out(module: LightningModule) -> None:
    """Undo `stand_in`."""
    vars(module).pop("configure_model", None)
    for name in _STEPS:
        if vars(module).get(name) is _never_called:
            delattr(module, name)


def build_stage(module: LightningModule, groups: ParallelGroups) -> None:
    """Make this rank's stage part of the module, once: averaging callbacks may ask before Lightning. Raises `ConfigurationError`."""
    if (known := _built.get(module)) is not None and known[:2] == (groups.stage, groups.num_stages):
        return
    made = staged(module).configure_stage(groups.stage, groups.num_stages)
    if not isinstance(made, nn.Module):
        raise ConfigurationError(
            f"`{type(module).__name__}.configure_stage` returned {type(made).__name__}. Return the stage, an `nn.Module`."
        )
    if all(each is not made for each in module.modules()):
        setattr(module, ATTRIBUTE, made)
    _built[module] = groups.stage, groups.num_stages, made


def stage_of(module: LightningModule) -> nn.Module:
    """Return a built module's stage."""
    return _built[module][2]


def check_module(module: LightningModule, groups: ParallelGroups) -> None:
    """Raise `ConfigurationError` if a module would train wrongly in these groups."""
    if is_sharded(module):
        raise ConfigurationError(
            "`strategy='moe'` reduces whole gradients, and this module has parameters in shards (`fully_shard`, `parallelize_module`). "
            "Use `ModelParallelStrategy`, or leave parameters whole, and spread experts with `expert_parallel=`."
        )
    for name, layer in expert_parallel_modules(module):
        if layer.ep_size != groups.ep_size:
            raise ConfigurationError(
                f"`{name}` was built for `expert_parallel={layer.ep_size}`, the strategy has "
                f"`expert_parallel={groups.ep_size}`. Build it in `LightningModule.configure_model`, "
                "which runs once the strategy has set up its processes, not in `__init__`."
            )
    if groups.ep_size > 1 and not expert_parallel_fqns(module):
        experts = next((f"`{name}`" for name, _ in module.named_parameters() if "expert" in name.lower()), "no expert")
        raise ConfigurationError(
            f"`expert_parallel={groups.ep_size}` would have no effect: found {experts} with all experts on "
            "every rank, and no layer that shards them. Take a Hugging Face model whose experts are stacked, build `MoELayer`, "
            "or a module that keeps the contract `ExpertParallelModule`, in `LightningModule.configure_model`, or use "
            "`expert_parallel=1`."
        )
    if (reason := refuse_tutel(module, _port.ignored_names(module))) is not None:
        raise ConfigurationError(reason)
    if groups.ep_size > 1 and not module.automatic_optimization:
        raise ConfigurationError(
            "Expert parallelism needs automatic optimization: every backward of manual optimization would divide "
            "the experts' gradients again. Set `automatic_optimization = True` or `expert_parallel=1`."
        )


def refuse_module(module: LightningModule) -> None:
    """Raise `ConfigurationError` for a module that no pipeline can run."""
    if not module.automatic_optimization:
        raise ConfigurationError(
            "`MoEStrategy(pipeline_parallel=...)` needs automatic optimization: a schedule runs forward and backward of all "
            "micro-batches together. Set `automatic_optimization = True`."
        )
    compiled = next((name for name, each in module.named_modules() if _is_compiled(each)), None)
    if compiled is not None:
        raise ConfigurationError(
            f"`{compiled or type(module).__name__}` is compiled, and torch.compile over a pipeline stage is not supported. "
            "Leave it out under `MoEStrategy(pipeline_parallel=...)`."
        )


def refuse_tied(module: LightningModule, exchange: Exchange) -> None:
    """Raise `ConfigurationError`, on every rank, if stages share parameters. Collective over the pipeline."""
    own = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    stages = cast("list[list[str]]", exchange.gather_values(own))
    if empty := [stage for stage, names in enumerate(stages) if not names]:
        raise ConfigurationError(f"Stage {empty[0]} has no parameters. Give every stage some, or use fewer stages.")
    tied = [name for name, count in Counter(name for names in stages for name in names).items() if count > 1]
    if tied:
        where = [stage for stage, names in enumerate(stages) if tied[0] in names]
        raise ConfigurationError(
            f"`{tied[0]}`{f' and {len(tied) - 1} more' if len(tied) > 1 else ''}: stages {where} have a parameter of this name. "
            "Parameters tied across stages are not supported; if they are different ones, give them the names that they have in "
            "the whole model, such as the number of a block among all blocks."
        )


def _is_compiled(module: nn.Module) -> bool:
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None


def _never_called(batch: Any, batch_idx: int) -> None:
    """Stand for a step that `MoEStrategy` takes."""
    raise RuntimeError("This step is taken by `MoEStrategy`, whose `pipeline_parallel` it stands for.")


def first_dimensions(inputs: Any) -> Iterator[int]:
    """Yield the lengths along which a stage's inputs are cut. Raises `ConfigurationError` if an input has no dimension."""
    for each in inputs if isinstance(inputs, (tuple, list)) else (inputs,):
        if not isinstance(each, Tensor) or each.ndim == 0:
            raise ConfigurationError(
                f"`split_batch` returned {type(each).__name__} where a tensor with a first dimension was expected, along which "
                "it is cut into micro-batches."
            )
        yield each.shape[0]


class StageMetrics:
    """The metrics of a module in stages; `upstream` has their values for a stage that repeats steps."""

    def __init__(self, upstream: UpstreamLog) -> None:
        self._upstream, self._is_local = upstream, False

    def share(self, module: LightningModule, stage: nn.Module) -> None:
        """Take over the module's present metrics. Undoing an attempt, or a fit, undoes this too."""
        new = [m for _, m in module_metrics(module) if m.dist_sync_fn is not gather_in_stage and _own(m) is None]
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
        """Return a metric's value for all stages, from `compute`, its value over this stage's ranks, which is
        collective. Collective, unless this rank asks as part of its stage.
        """
        # `forward` computes its own batch's value, without unsynchronising, until it has put the states back.
        if self._is_local or self._upstream.silent or not metric._should_unsync:  # noqa: SLF001
            return compute()
        groups, upstream = current_groups(), self._upstream
        exchange = Exchange(groups, "pipeline_control")
        is_updated = not Exchange(groups, "stage_control").all_agree(
            not any(module.update_called for module in metric.modules() if isinstance(module, Metric))
        )
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
        """Return this rank's metric of a name, and set its result of `forward` to `of_batch`. Raises
        `ConfigurationError` if this stage does not have the metric.
        """
        if (metric := dict(module_metrics(module)).get(name)) is None:
            raise ConfigurationError(
                f"`self.log({logged!r})` was given the metric `{name}`, which another stage does not have. Make it in "
                f"`{type(module).__name__}.__init__`, so that all stages have it."
            )
        if of_batch is not None:
            metric._forward_cache = of_batch.to(metric.device)  # type: ignore[assignment]  # noqa: SLF001
        return metric


def _own(metric: Metric) -> Callable[..., Any] | None:
    """Return a shared metric's own `compute`; `None` if not shared. torchmetrics too keeps `compute` among attributes."""
    return getattr(vars(metric)["compute"], "own", None)


_OPTIONS = list(signature(LightningModule.log).parameters)[3:]
"""Names of the arguments behind name and value."""

_PLAIN = (bool, int, float, str, type(None))


class StageLogs:
    """Losses and logged values of the batch under way; the module's `log` is in use. The exchange is between the stages
    of this rank's pipeline; `upstream` has recorded answers, for a stage that repeats steps.
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
        """Collect the values that the module logs in this context, for `exchanged`."""
        self._module.log = self._log  # type: ignore[method-assign]
        try:
            with self._metrics.local():
                yield
        finally:
            vars(self._module).pop("log", None)

    def exchanged(self) -> Tensor:
        """Log the values of all stages, and return the batch's loss, on the CPU. Collective over the pipeline."""
        logged = [[name, _mean(values), options] for name, (values, options) in self._logged.items()]
        row = [*[_mean(each) for each in (self.losses, self.auxiliary)], logged]
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
        if odd := [key for key, option in options.items() if not isinstance(option, _PLAIN)]:
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
