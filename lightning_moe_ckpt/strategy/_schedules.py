"""Run batches through the stages of a pipeline, with schedules of torch.distributed.pipelining.

A batch is cut into micro-batches. The schedule runs forward and backward of them all, which includes gradient
accumulation, so each loss is divided by their number, and scaled for low precision, where the schedule computes it.
Auxiliary losses of inner stages enter by an identity on the stage's output: its backward gives them their gradient.

To find the shapes of activations, torch would run every stage once more and change buffers, counters of tokens and
random state. A resumed process would then differ from an uninterrupted run. Here a copy of each stage runs once, and
torch is told the shapes.

A stage that repeats steps runs its micro-batches in the schedule's order, but without neighbours: see `UpstreamLog`.
Recomputation in backward (activation checkpointing) changes batch normalisation's statistics, which depend on that
order.

Source: GPipe (2019), Sec. 2.3; PipeDream-Flush in Narayanan et al. (2021), Sec. 2.2 (1F1B).
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining._backward import stage_backward

from lightning_moe_ckpt.coordination import Exchange
from lightning_moe_ckpt.errors import ConfigurationError
from lightning_moe_ckpt.journal import capture_rng, restore_rng
from lightning_moe_ckpt.native import PipelinePhase
from lightning_moe_ckpt.parallel import GradientReducer, ParallelGroups
from lightning_moe_ckpt.parallel._upstream import UpstreamLog
from lightning_moe_ckpt.strategy._stage import StagedModule, StageLogs, StageMetrics, first_dimensions, staged

# Shape suffix: M micro-batches.

ScheduleName = Literal["1f1b", "gpipe"]

SCHEDULES: dict[str, type[Schedule1F1B | ScheduleGPipe]] = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}

Context = Callable[[], AbstractContextManager[None]]
Border = list[list[Any]]
"""Shape and type of each tensor from one stage to the next."""


class Pipeline:
    """This rank's stage, and its schedules, over batches cut into `micro_batches` parts.

    `forward_context` makes a forward's context, such as autocast; `scale` scales a loss for the precision; `upstream`
    logs tensors that cross the stage's borders; `enter` is called where training comes to another phase.
    """

    def __init__(
        self,
        module: LightningModule,
        stage: nn.Module,
        groups: ParallelGroups,
        *,
        micro_batches: int,
        schedule: ScheduleName,
        forward_context: Context,
        scale: Callable[[Tensor], Tensor],
        device: torch.device,
        upstream: UpstreamLog,
        metrics: StageMetrics,
        enter: Callable[[PipelinePhase], None],
    ) -> None:
        self._module, self._stage, self._groups = module, _Forward(stage, forward_context, self._inject), groups
        self._hooks: StagedModule = staged(module)
        self._micro_batches, self._schedule, self._context = micro_batches, schedule, forward_context
        self._scale, self._device, self._upstream, self._enter = scale, device, upstream, enter
        self._exchange = Exchange(groups, "pipeline_control")
        self._logs = StageLogs(module, self._exchange, upstream, metrics)
        self._share = partial(metrics.share, module, stage)
        self._runners: dict[bool, tuple[Border, _Runner]] = {}
        self._reducer: GradientReducer | None = None

    def train(self, batch: Any, reducer: GradientReducer) -> Tensor:
        """Run a batch forward and backward, and return its mean loss, the same on all stages. Collective."""
        self._reducer = reducer
        return self._run(batch, training=True)

    def evaluate(self, batch: Any) -> Tensor:
        """Run a batch forward, and return its mean loss, the same on all stages. Collective."""
        return self._run(batch, training=False)

    # -- private

    def _run(self, batch: Any, *, training: bool) -> Tensor:
        inputs, target = self._split(batch)
        run: Callable[[Sequence[Tensor], Tensor], None] = partial(self._repeat, training=training)
        if not self._upstream.repeating:
            run = self._runner(inputs, training=training).run
        self._logs.begin()
        self._share()
        with self._logs.taken():
            run(inputs, target)
        return self._logs.exchanged().to(self._device)

    def _repeat(self, inputs: Sequence[Tensor], target: Tensor, *, training: bool) -> None:
        """Run all micro-batches of a batch again in the same order, fed with the other stages' recorded tensors."""
        cut, targets = [tensor.chunk(self._micro_batches) for tensor in inputs], target.chunk(self._micro_batches)
        given = list(zip(*cut, strict=True)) if self._groups.stage == 0 else [None] * self._micro_batches
        ahead = self._micro_batches if self._schedule == "gpipe" else self._groups.num_stages - self._groups.stage
        begun: deque[tuple[Sequence[Tensor], Any]] = deque()
        for generation, part in zip(given, targets, strict=True):
            begun.append(self._forward_again(generation, part, training=training))
            if training and len(begun) == ahead:
                self._backward_again(*begun.popleft(), last=part is targets[-1] and not begun)
        while training and begun:
            self._backward_again(*begun.popleft(), last=len(begun) == 0)

    def _forward_again(
        self, given: Sequence[Tensor] | None, target: Tensor, *, training: bool
    ) -> tuple[Sequence[Tensor], Any]:
        """Return a micro-batch's inputs, and its loss or the tensors for the next stage."""
        if given is None:
            given = self._upstream.take("down")
            if training:
                given = [each.to(self._device).requires_grad_(each.is_floating_point()) for each in given]
        with torch.set_grad_enabled(training):
            output = self._stage(*given)
            if self._groups.stage == self._groups.num_stages - 1:
                return given, self._loss(output, target)
        self._upstream.sent("down", _tensors(output))
        return given, _tensors(output)

    def _backward_again(self, given: Sequence[Tensor], output: Any, *, last: bool) -> None:
        self._backward_begins(last=last)
        at_end = self._groups.stage == self._groups.num_stages - 1
        grads = None if at_end else [each.to(self._device) for each in self._upstream.take("up")]
        found = stage_backward(output, grads, given)
        if self._groups.stage > 0:
            pairs = [(each, grad) for each, grad in zip(given, found, strict=True) if each.is_floating_point()]
            self._upstream.sent("up", [torch.zeros_like(e) if grad is None else grad for e, grad in pairs])

    def _split(self, batch: Any) -> tuple[tuple[Tensor, ...], Tensor]:
        split = getattr(self._hooks, "split_batch", None)
        pair = batch if split is None else split(batch)
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise ConfigurationError(
                f"A batch of {type(pair).__name__} is no pair of inputs and target. Return one from `split_batch`."
            )
        inputs, target = pair
        lengths = {*first_dimensions(inputs), *first_dimensions(target)}
        if len(lengths) > 1 or next(iter(lengths)) % self._micro_batches:
            raise ConfigurationError(
                f"A batch of {' and '.join(map(str, sorted(lengths)))} samples cannot be cut into "
                f"`micro_batches={self._micro_batches}` of equal size. Choose a batch size that is a multiple of it, and "
                "`drop_last=True` where the last batch is smaller."
            )
        return tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,), target

    def _runner(self, inputs: Sequence[Tensor], *, training: bool) -> _Runner:
        """Return the schedule for such batches, whose shapes the first decides. Raises `ConfigurationError` if they change in training."""
        said, known = _border(inputs), self._runners.get(training)
        if known is not None and known[0] == said:
            return known[1]
        if known is not None and training:
            raise ConfigurationError(
                f"A batch has {_shown(said)}, batches before had {_shown(known[0])}: activations would have other shapes, which "
                "`pipeline_parallel` does not support. Give all batches one shape, with `drop_last=True` where the last is "
                "smaller."
            )
        runner = _Runner(self, self._shapes(inputs), training=training)
        self._runners[training] = said, runner
        return runner

    def _shapes(self, inputs: Sequence[Tensor]) -> list[Border]:
        """Return shapes and types at each border, the first before stage 0. Collective over the pipeline."""
        borders = [_border(tensor.chunk(self._micro_batches)[0] for tensor in inputs)]
        for stage in range(self._groups.num_stages):
            own: Border | None = None
            if stage == self._groups.stage:
                given = [tensor.chunk(self._micro_batches)[0] for tensor in inputs]
                if stage > 0:
                    given = [*_zeros(borders[-1], self._device)]
                random = capture_rng()
                with torch.no_grad():
                    own = _border(_tensors(self._stage.run(_trial(self._stage.stage), *given)))
                restore_rng(random)
            borders.append(cast("Border", self._exchange.gather_values(own)[stage]))
        return borders

    def _inject(self, output: Any) -> Any:
        """Give the auxiliary loss of the micro-batch just run a gradient, if there is such a loss."""
        hook = getattr(self._hooks, "stage_auxiliary_loss", None)
        auxiliary = None if hook is None else hook()
        if auxiliary is None:
            return output
        self._logs.auxiliary.append(auxiliary.detach())
        first, *rest = _tensors(output)
        if torch.is_grad_enabled() and auxiliary.requires_grad:
            first = _WithAuxiliary.apply(first, self._scale(auxiliary / self._micro_batches))  # type: ignore[no-untyped-call]
        return (first, *rest) if rest else first

    def _loss(self, output: Any, target: Tensor) -> Tensor:
        with self._context():
            loss = self._hooks.stage_loss(output, target)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            found = f"a tensor of shape {[*loss.shape]}" if isinstance(loss, Tensor) else type(loss).__name__
            raise ConfigurationError(
                f"`{type(self._hooks).__name__}.stage_loss` returned {found}. Return the mean loss of the micro-batch, a tensor "
                "with one element."
            )
        self._logs.losses.append(loss.detach())
        return self._scale(loss / self._micro_batches)

    def _backward_begins(self, *, last: bool) -> None:
        """Collect gradients over micro-batches; gradients complete in the last one are reduced meanwhile."""
        assert self._reducer is not None
        # Inner stages unscale too, and have no loss to initialise the scale.
        self._scale(torch.zeros((), device=self._device))
        self._reducer.prepare(sync=last)


class _Runner:
    """A stage and a schedule of torch for one shape of batches."""

    def __init__(self, pipeline: Pipeline, borders: Sequence[Border], *, training: bool) -> None:
        groups, here = pipeline._groups, pipeline._groups.stage  # noqa: SLF001  # of this module
        self._is_first, self._is_last = here == 0, here == groups.num_stages - 1
        self._training = training
        stage = _Stage(
            pipeline._stage,  # noqa: SLF001
            here,
            groups.num_stages,
            pipeline._device,  # noqa: SLF001
            input_args=_zeros(borders[here], "meta", grad=training and not self._is_first),
            output_args=_zeros(borders[here + 1], "meta", grad=training),
            group=groups.groups["pipeline"],
        )
        stage.backward_begins = pipeline._backward_begins  # noqa: SLF001
        stage.upstream = pipeline._upstream  # noqa: SLF001
        # Nothing is copied in gaps of an evaluation.
        self._enter = stage.enter = pipeline._enter if training else lambda _: None  # noqa: SLF001
        kind = SCHEDULES[pipeline._schedule] if training else ScheduleGPipe  # noqa: SLF001
        self._schedule = kind(stage, pipeline._micro_batches, loss_fn=pipeline._loss, scale_grads=False)  # noqa: SLF001

    def run(self, inputs: Sequence[Tensor], target: Tensor) -> None:
        """Run all micro-batches."""
        given: dict[str, Any] = {"target": target, "losses": []} if self._is_last else {}
        run = self._schedule.step if self._training else self._schedule.eval
        self._enter(PipelinePhase.GAP)
        try:
            run(*(inputs if self._is_first else ()), **given)
        finally:
            self._enter(PipelinePhase.OUTSIDE)


class _Stage(PipelineStage):
    """A stage that reports begins of backwards (and the last), tensors across its borders, and computing or waiting."""

    backward_begins: Callable[..., None]
    upstream: UpstreamLog
    enter: Callable[[PipelinePhase], None]

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Return operations that send activations, and log the activations."""
        ops = super().get_fwd_send_ops(fwd_chunk_id)
        self.upstream.sent("down", [op.tensor for op in ops])
        return ops

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Return operations that send gradients, and log the gradients."""
        ops = super().get_bwd_send_ops(bwd_chunk_id)
        self.upstream.sent("up", [op.tensor for op in ops])
        return ops

    def _retrieve_recv_activations(self, fwd_chunk_id: int) -> Any:
        found = super()._retrieve_recv_activations(fwd_chunk_id)
        self.upstream.received("down", found)
        return found

    def _retrieve_recv_grads(self, bwd_chunk_id: int) -> Any:
        found = super()._retrieve_recv_grads(bwd_chunk_id)
        self.upstream.received("up", found)
        return found

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> Any:
        """Run one micro-batch's backward."""
        if self.has_backward:
            self.backward_begins(last=last_backward)
        self.enter(PipelinePhase.OPERATION)
        found = super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        self.enter(PipelinePhase.GAP)
        return found

    def forward_one_chunk(self, *args: Any, **options: Any) -> Any:
        """Run one micro-batch's forward."""
        self.enter(PipelinePhase.OPERATION)
        found = super().forward_one_chunk(*args, **options)
        self.enter(PipelinePhase.GAP)
        return found


class _Forward(nn.Module):
    """Module that torch runs as a stage; part of no model, so that no name changes."""

    def __init__(self, stage: nn.Module, context: Context, inject: Callable[[Any], Any]) -> None:
        super().__init__()
        self.stage, self._context, self._inject = stage, context, inject

    def forward(self, *inputs: Tensor) -> Any:
        """Return the stage's output, with its auxiliary loss attached."""
        output = self.run(self.stage, *inputs)
        with self._context():
            return self._inject(output)

    def run(self, stage: nn.Module, *inputs: Tensor) -> Any:
        """Return a stage's output."""
        with self._context():
            output = stage(*inputs)
        whole = tuple(tensor.contiguous() for tensor in _tensors(output))
        return whole if len(whole) > 1 else whole[0]


class _WithAuxiliary(torch.autograd.Function):
    """The identity on a stage's output. Its backward also gives the auxiliary loss a gradient of 1, as a loss has it."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, auxiliary: Tensor) -> Tensor:
        """Return the output."""
        ctx.like = auxiliary.dtype, auxiliary.shape, auxiliary.device
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of output and auxiliary loss."""
        dtype, shape, device = ctx.like
        return grad, torch.ones(shape, dtype=dtype, device=device)


def _tensors(output: Any) -> tuple[Tensor, ...]:
    found = tuple(output) if isinstance(output, (tuple, list)) else (output,)
    if wrong := [type(each).__name__ for each in found if not isinstance(each, Tensor)]:
        raise ConfigurationError(f"A stage returned {wrong[0]}. Return a tensor, or several, to the next stage.")
    return found


def _border(tensors: Any) -> Border:
    return [[list(tensor.shape), str(tensor.dtype).removeprefix("torch.")] for tensor in tensors]


def _zeros(border: Border, device: torch.device | str, *, grad: bool = False) -> tuple[Tensor, ...]:
    made = [torch.zeros(shape, dtype=getattr(torch, name), device=device) for shape, name in border]
    return tuple(each.requires_grad_(grad and each.is_floating_point()) for each in made)


def _shown(border: Border) -> str:
    return " and ".join(f"{shape} {name}" for shape, name in border)


def _trial(stage: nn.Module) -> nn.Module:
    """Return a stage for a trial without traces: same parameters, copied buffers, counters and attributes, no hooks.
    Raises `ConfigurationError` if a part of the stage cannot be copied.
    """
    shared = [*stage.parameters(), *(value for module in stage.modules() for value in vars(module).values())]
    # The previous batch's auxiliary loss has a graph, and tensors with a graph cannot be copied.
    kept = (each for each in shared if isinstance(each, nn.Parameter) or getattr(each, "grad_fn", None) is not None)
    memo = {id(each): each for each in kept}
    try:
        trial = copy.deepcopy(stage, memo)
    except (TypeError, RuntimeError) as error:
        raise ConfigurationError(
            f"`{type(stage).__name__}` cannot be copied ({error}), so the shapes of its activations cannot be found out without "
            "changing it. Keep locks, files and process groups out of modules."
        ) from error
    for module in trial.modules():
        for name, hooks in vars(module).items():
            if name.endswith(("_hooks", "_hooks_with_kwargs", "_hooks_always_called")) and isinstance(hooks, dict):
                hooks.clear()
    return trial
