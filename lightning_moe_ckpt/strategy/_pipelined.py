"""Take a trainer's steps with pipeline stages; without stages, the user's own.

Lightning runs `training_step`, sets gradients to zero, and runs backward. A schedule runs forward and backward of all
micro-batches together, so the schedule is the step, gradients are zeroed before it, and `backward` only reduces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from inspect import signature
from types import SimpleNamespace
from typing import Any, Literal, Protocol, TypeVar

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor, nn
from torch.distributed.pipelining import ScheduleGPipe
from typing_extensions import override

from lightning_moe_ckpt.coordination import Exchange
from lightning_moe_ckpt.errors import ConfigurationError
from lightning_moe_ckpt.fit.loops import _port
from lightning_moe_ckpt.moe._spread import spread_while_loading
from lightning_moe_ckpt.native import PipelinePhase
from lightning_moe_ckpt.parallel import GradientReducer, ParallelGroups
from lightning_moe_ckpt.parallel._upstream import UpstreamLog
from lightning_moe_ckpt.strategy._schedules import SCHEDULES, Pipeline
from lightning_moe_ckpt.strategy._stage import (
    StageMetrics,
    build_stage,
    refuse_module,
    refuse_tied,
    stage_of,
    staged,
    stand_in,
    stand_out,
)

T = TypeVar("T")

_NEEDED = {
    "scale_grads": "scale_grads" in signature(ScheduleGPipe.__init__).parameters,
    "eval": hasattr(ScheduleGPipe, "eval"),
}
"""Newer features of torch's schedules, and whether this torch has them."""


class StepGuard(Protocol):
    """Repeats steps if another stage has failed meanwhile."""

    def take_step(self, step: Callable[[], Any]) -> Any:
        """Call `step` until taken, and return its last result."""

    def commit(self, agree: Callable[[], dict[str, int]]) -> None:
        """Call `agree`; the step is taken once it returns."""

    def between(self, ask: Callable[[], T]) -> T | None:
        """Return the result of `ask`, with collectives between two steps; `None` after a failure that the next step handles."""

    def outlasts(self, rank: int) -> bool:
        """Return whether collectives under way are not to be aborted for a failure of `rank`. Called from another thread."""


class PipelinedStrategy(DDPStrategy):
    """The part of `MoEStrategy` that knows stages; arguments as there, further arguments as of `DDPStrategy`."""

    step_guard: StepGuard | None = None
    """Guard around every optimizer step and its commit; `None` unless stages may recover alone."""

    on_phase: Callable[[PipelinePhase], None] | None = None
    """Called when a pass through the schedule comes to another phase."""

    def __init__(
        self,
        *,
        pipeline_parallel: int,
        micro_batches: int,
        schedule: Literal["1f1b", "gpipe"],
        localized_recovery: bool | None,
        upstream_log_nbytes: int,
        **ddp: Any,
    ) -> None:
        _check_pipeline(pipeline_parallel, micro_batches, schedule)
        if localized_recovery and pipeline_parallel == 1:
            raise ConfigurationError(
                "`MoEStrategy(localized_recovery=True)` has no effect without `pipeline_parallel`: there are no other stages that "
                "could stay where they are. Leave it out."
            )
        super().__init__(**ddp)
        self.pipeline_parallel = pipeline_parallel
        self.micro_batches = micro_batches
        self.schedule = schedule
        self.localized_recovery = localized_recovery
        self.groups = ParallelGroups()
        """Rank and process groups of this process; set before `configure_model`."""
        self.reducer: GradientReducer | None = None
        """Reduces gradients while fitting; its `flags` are exchanged at every optimizer step."""
        self.upstream = UpstreamLog(upstream_log_nbytes)
        """Log of tensors across this stage's borders; empty unless it `keeps`."""
        self._metrics = StageMetrics(self.upstream)
        self._pipeline: Pipeline | None = None
        self._zero_grad: Callable[[], None] | None = None

    @property
    def apart(self) -> bool:
        """Whether this process replaces another and has no groups yet: the other ranks are in the midst of training."""
        return self.groups.world_size > 1 and not self.groups.groups

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Sampler arguments with which all ranks of a pipeline take the same batches."""
        size = self.world_size // self.pipeline_parallel
        return {"num_replicas": size, "rank": self.global_rank % size}

    @override
    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Let `configure_model` load Hugging Face models with this rank's experts alone."""
        with super().tensor_init_context(empty_init), spread_while_loading():
            yield

    @override
    def connect(self, model: LightningModule) -> None:
        super().connect(model)
        if self.pipeline_parallel > 1:
            staged(model)
            stand_in(model, lambda: build_stage(model, self.groups), validates=_port.may_validate(model.trainer))

    @override
    def teardown(self) -> None:
        if self.pipeline_parallel > 1 and self.lightning_module is not None:
            stand_out(self.lightning_module)
            self._metrics.release(self.lightning_module)
        self._pipeline = None
        super().teardown()

    @property
    def pipeline_stage(self) -> nn.Module | None:
        """This rank's part of the model; `None` without pipeline stages."""
        return stage_of(self._module) if self.pipeline_parallel > 1 else None

    @property
    def _module(self) -> LightningModule:
        if (module := self.lightning_module) is None:
            raise RuntimeError("The strategy has no model yet. It is connected by `Trainer.fit` and its siblings.")
        return module

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        """Take the user's step; with pipeline stages run forward and backward of all micro-batches."""
        if self.pipeline_parallel == 1:
            return super().training_step(*args, **kwargs)
        if self._zero_grad is not None:  # Lightning zeroes between forward and backward, here one call
            self._zero_grad()
        assert self.reducer is not None
        return self._stages().train(args[0], self.reducer)

    def play(self, batch: Any) -> None:
        """Run forward and backward of all micro-batches apart from the training: nothing is reduced or kept of it."""
        reducer: Any = SimpleNamespace(prepare=lambda **_: None)
        with self.upstream.paused():
            self._stages().train(batch, reducer)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        """Take the user's step; with pipeline stages run forward of all micro-batches."""
        if self.pipeline_parallel == 1:
            return super().validation_step(*args, **kwargs)
        return self._stages().evaluate(args[0])

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        """Take the user's step; with pipeline stages run forward of all micro-batches."""
        return super().test_step(*args, **kwargs) if self.pipeline_parallel == 1 else self._stages().evaluate(args[0])

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        """Take the user's step. Raises `ConfigurationError` with pipeline stages."""
        if self.pipeline_parallel > 1:
            raise ConfigurationError(
                "`Trainer.predict` does not run with `pipeline_parallel`: a schedule returns losses. Export the weights and "
                "predict without stages."
            )
        predicted: STEP_OUTPUT = super().predict_step(*args, **kwargs)
        return predicted

    # -- answers of all ranks, which a repeating stage gets from the record

    def commit(self) -> dict[str, int]:
        """Agree with all ranks that the step is taken, and return all ranks' flags. Collective.

        After the commit, no other rank's failure can fail the step.
        """
        assert self.reducer is not None
        flags = self.upstream.answer("commit", self.reducer.exchange_flags)
        self.reducer.agreed |= flags
        return flags

    @override
    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        step = partial(super().optimizer_step, *args, **kwargs)
        return step() if self.step_guard is None else self.step_guard.take_step(step)

    def _closure_ended(self) -> None:
        if self.step_guard is None:
            self.commit()
        else:
            self.step_guard.commit(self.commit)

    @override
    def barrier(self, *args: Any, **kwargs: Any) -> None:
        if not self.upstream.apart:
            super().barrier(*args, **kwargs)

    @override
    def reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """Return all ranks' reduced tensor; this rank's own while `upstream.silent`."""
        if self.upstream.silent:
            return tensor
        return self.upstream.answer("reduce", lambda: super(PipelinedStrategy, self).reduce(tensor, *args, **kwargs))

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        return decision if self.upstream.silent else super().reduce_boolean_decision(decision, all)

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        if self.upstream.silent:
            return obj
        return self.upstream.answer("broadcast", lambda: super(PipelinedStrategy, self).broadcast(obj, src))

    @override
    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        if self.upstream.silent:
            return tensor[None]
        return self.upstream.answer(
            "all_gather", lambda: super(PipelinedStrategy, self).all_gather(tensor, group, sync_grads)
        )

    def _hold_zero_grad(self, zero_grad: Callable[[], None] | None) -> None:
        self._zero_grad = zero_grad

    def _entered(self, phase: PipelinePhase) -> None:
        if self.on_phase is not None:
            self.on_phase(phase)

    def _stages(self) -> Pipeline:
        if self._pipeline is None:
            precision = self.precision_plugin
            scaler = getattr(precision, "scaler", None)
            self._pipeline = Pipeline(
                *(self._module, stage_of(self._module), self.groups),
                micro_batches=self.micro_batches,
                schedule=self.schedule,
                forward_context=precision.forward_context,
                scale=(lambda loss: loss) if scaler is None else scaler.scale,
                device=self.root_device,
                upstream=self.upstream,
                metrics=self._metrics,
                enter=self._entered,
            )
        return self._pipeline

    def _check_stages(self, trainer: Trainer) -> None:
        if self.pipeline_parallel == 1:
            return
        if trainer.accumulate_grad_batches > 1:
            raise ConfigurationError(
                f"`accumulate_grad_batches={trainer.accumulate_grad_batches}` does not go with `pipeline_parallel`: gradients are "
                "accumulated over micro-batches. Use larger batches, and more `micro_batches`."
            )
        refuse_module(self._module)
        if not self.apart:
            refuse_tied(self._module, Exchange(self.groups, "pipeline_control"))


def _check_pipeline(pipeline_parallel: int, micro_batches: int, schedule: str) -> None:
    if pipeline_parallel < 1 or micro_batches < 1:
        raise ConfigurationError(
            f"`MoEStrategy(pipeline_parallel={pipeline_parallel}, micro_batches={micro_batches})` must be one or more."
        )
    if schedule not in SCHEDULES:
        raise ConfigurationError(
            f"`MoEStrategy(schedule={schedule!r})` must be one of {sorted(SCHEDULES)}: others interleave stages or change "
            "the order in which gradients are added up."
        )
    lacks = [name for name, there in _NEEDED.items() if not there]
    if pipeline_parallel > 1 and lacks:
        raise ConfigurationError(
            f"`MoEStrategy(pipeline_parallel={pipeline_parallel})` needs schedules of torch with `{lacks[0]}`, which torch "
            f"{torch.__version__} does not have. Use a newer torch; 2.13 was tested."
        )
    if schedule == "1f1b" and micro_batches < pipeline_parallel:
        raise ConfigurationError(
            f"`MoEStrategy(pipeline_parallel={pipeline_parallel}, micro_batches={micro_batches})`: 1f1b keeps every stage busy "
            f"with as many micro-batches as there are stages at least. Use `micro_batches={pipeline_parallel}` or more, or "
            "`schedule='gpipe'`."
        )
    if micro_batches > 1 and pipeline_parallel == 1:
        raise ConfigurationError(
            f"`MoEStrategy(micro_batches={micro_batches})` has no effect without `pipeline_parallel`. Use the trainer's "
            "`accumulate_grad_batches`."
        )
