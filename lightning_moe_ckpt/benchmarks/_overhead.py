"""Measure the cost of checkpoints in training speed: each policy, in memory only and with storage.

Fits of the same model take turns, in another order in each round, and before each turn the fit without checkpoints has a turn.
Two such turns meet nearly the same machine; their difference is the cost per step, and the median over the rounds is reported.
Unmeasured steps begin each turn: in the first generation 0 is written, the window planned and the ring filled; in later ones the
pipeline is filled again, since complete generations are stored before a pause, so that the machine is free for others. In memory
only means that storage rests once it has generation 0.

A step is the time from one `on_train_batch_end` to the next, so that everything between counts, whichever hook or
thread it is spent in. A round's mean step gives the throughput; its median step leaves out the steps that waited longest.
CPU seconds of the training thread and of the process are reported beside: other load on the machine changes CPU seconds
little, but they do not see waiting. The command has large pages under all its processes: with small pages each process
has a speed of its own, and the speeds differ by more than the cost of checkpoints.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, Strategy
from rich.console import RenderableType
from typing_extensions import override

from lightning_moe_ckpt.benchmarks._benchmark import Progress, accelerator_for, medians, rounds_of, table_of
from lightning_moe_ckpt.benchmarks._fits import (
    BenchModel,
    HandOver,
    ModelSize,
    StorageGate,
    TurnTaker,
    bench_folders,
    bench_trainer,
    one_thread,
    own_memory,
    patient_storage,
    quiet_lightning,
    random_tokens,
)
from lightning_moe_ckpt.callbacks import (
    DenseCheckpoint,
    DifferentialCheckpoint,
    ExpertLoadMonitor,
    PartialExpertCheckpoint,
    SelectiveExpertCheckpoint,
    SparseCheckpoint,
)
from lightning_moe_ckpt.callbacks._base import CheckpointCallback
from lightning_moe_ckpt.errors import ConfigurationError
from lightning_moe_ckpt.fit.loops._port import ignore_names
from lightning_moe_ckpt.parallel import build_groups, expert_parallel_fqns, set_current_groups
from lightning_moe_ckpt.session import Report
from lightning_moe_ckpt.storage import wrapping_backends
from lightning_moe_ckpt.strategy import MoEStrategy
from lightning_moe_ckpt.testing._attempts import elastic_environment, free_port


@dataclass(frozen=True, slots=True)
class Variant:
    """Checkpoints of a fit."""

    system: str
    """Policy; `none` for no checkpoints, `monitored` for sparse ones beside an `ExpertLoadMonitor`."""
    every: int = 0
    """Steps between two checkpoints; the window of sparse ones. 0 for the default."""
    memory_only: bool = False
    """Whether storage rests."""
    shard_optimizer: bool = False
    """Whether each rank keeps the optimizer's state for a piece of every parameter."""
    strategy: str = ""
    """`ddp`, or the `gradient_reduction` of `MoEStrategy`; empty for trainings beside checkpoints."""
    make: Callable[[Path], Callback] | None = None
    """Maker of another system's callback, from its folder."""

    @property
    def name(self) -> str:
        """Name on the command line."""
        if self.strategy:
            return self.strategy
        if self.shard_optimizer:
            return f"zero1-{replace(self, shard_optimizer=False).name}"
        return f"{self.system}{self.every or ''}{'-memory' if self.memory_only else ''}"

    def skips(self, step: int) -> bool:
        """Return whether nothing is taken at this boundary."""
        return not (self.every < 2 or self.system in ("sparse", "monitored", "differential")) and step % self.every > 0


_POLICIES = [
    *(Variant("sparse", every, memory) for memory in (True, False) for every in (4, 8)),
    *(Variant("dense", every, memory) for memory in (True, False) for every in (1, 4)),
    *(Variant(system, 1, memory) for memory in (True, False) for system in ("partial", "selective")),
]
_MORE = [
    *(Variant(system, 4, memory) for system in ("partial", "selective") for memory in (True, False)),
    Variant("monitored", 8),
    *(Variant(system) for system in ("sparse", "dense")),
    *(Variant("differential", 64, memory) for memory in (True, False)),
    Variant("none", shard_optimizer=True),
    *(Variant(system, every, True, True) for system, every in (("sparse", 8), ("dense", 1), ("dense", 4))),
]
VARIANTS = {each.name: each for each in (Variant("none"), *_POLICIES, *_MORE)}
"""All variants by name."""


def chosen_variants(options: SimpleNamespace) -> list[Variant]:
    """Return the variants to measure, no checkpoints first. Raises `ConfigurationError` if `--variants` names an unknown one."""
    known = {**VARIANTS, **getattr(options, "others", {})}
    names = [name for name in (options.variants or "").split(",") if name not in ("", "none")]
    if unknown := [name for name in names if name not in known]:
        raise ConfigurationError(f"`--variants {','.join(unknown)}`: there are {', '.join(known)}.")
    return [known["none"], *([known[name] for name in names] or _POLICIES)]


def checkpoint_of(variant: Variant, url: str, **more: Any) -> Callback | None:
    """Return the callback that saves to `url`, a `file://` for other systems; `None` for no checkpoints. `more` goes to those of ours."""
    if variant.make is not None:
        folder = Path(url.removeprefix("file://"))
        folder.mkdir(parents=True, exist_ok=True)
        return variant.make(folder)
    system, every = variant.system, variant.every
    shared: dict[str, Any] = {"resume": "never", **shared_arguments(memory_only=variant.memory_only), **more}
    if system in ("sparse", "monitored"):
        return SparseCheckpoint(url, window=every or "auto", **shared)
    policies = {
        "dense": DenseCheckpoint,
        "differential": DifferentialCheckpoint,
        "partial": PartialExpertCheckpoint,
        "selective": SelectiveExpertCheckpoint,
    }
    return policies[system](url, **{"every_n_steps": every} if every else {}, **shared) if system in policies else None


def shared_arguments(*, memory_only: bool) -> dict[str, Any]:
    """Return arguments for all checkpoint callbacks: in memory they go as fast as they can, as other systems do.

    The measuring callback has clocks of its own process.
    """
    return {"untouched": ["callback.*"], **({"overhead_target": None} if memory_only else {})}


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCosts:
    """Costs per step, over the steps that are measured."""

    mean_seconds: float
    median_seconds: float
    idle_seconds: float | None
    """Mean over steps without a capture; `None` where there is no such step."""
    thread_seconds: float
    """CPU time in the training thread, mean."""
    process_seconds: float
    """CPU time in all threads, mean."""
    stall_seconds: dict[str, float]
    """Time the training thread waited, mean, by cause; empty without checkpoints."""
    device_stall_seconds: float
    """Time training's stream stood still on a CUDA device, mean."""
    overhead_seconds: float
    """Training-thread time in checkpoint hooks, mean, waits included."""
    generations_complete: int
    generations_committed: int
    """Whenever storage has finished a generation, it is given the newest complete generation."""
    metered: dict[str, dict[str, float]] = field(default_factory=dict)
    """Further costs per step, by kind and name, from the option `meter`; empty without."""


class Turn(NamedTuple):
    """Measurements in a fit's turn."""

    costs: StepCosts
    report: Report | None
    """Report of the checkpoint callback after the last step measured."""
    state_nbytes: int
    """Bytes in the optimizer's tensors on the first rank."""
    shared_nbytes: int
    """Bytes in shared memory, for all ranks."""


class _Late(BenchModel):
    """Makes its layers once the strategy knows this rank's experts."""

    @override
    def build(self) -> None:
        pass

    @override
    def configure_model(self) -> None:
        if not hasattr(self, "head"):
            torch.manual_seed(0)
            super().build()


@dataclass(frozen=True, kw_only=True)
class _Fit:
    """A rank that trains a variant, from scratch; the same model and data whatever the variant."""

    variant: Variant
    url: str
    memory: Path
    """Folder on a tmpfs, the node's shared memory."""
    options: SimpleNamespace
    num_turns: int
    rank: int
    port: int
    """Port for the ranks to meet."""

    def __call__(self, hand_over: HandOver[Turn]) -> None:
        """Train, and call `hand_over` at every turn's end."""
        options, ranks = self.options, self.options.ranks
        own_memory(self.memory, lost=False)
        os.environ.update(elastic_environment(self.rank, ranks, self.port))
        gate, checkpoint = StorageGate(), checkpoint_of(self.variant, self.url)
        measured = _Turns(options, self.variant, checkpoint, gate, hand_over)
        beside = [ExpertLoadMonitor(every_n_steps=10)] if self.variant.system == "monitored" else []
        total_steps = options.warm_up + self.num_turns * (options.settle + options.steps) - options.settle
        size = size_of(options)
        resting = wrapping_backends(gate.backend) if self.variant.memory_only else nullcontext()
        model = _Late(size)
        with one_thread(), quiet_lightning(), patient_storage(), resting:
            trainer = bench_trainer(
                accelerator=accelerator_for(options.accelerator, ranks),
                strategy=_strategy_of(self.variant, options),
                devices=ranks,
                precision=options.precision,
                callbacks=[measured, *beside, *([checkpoint] if checkpoint is not None else [])],
                max_steps=total_steps,
                enable_checkpointing=checkpoint is not None,
            )
            # One batch more than it takes, so that no epoch ends.
            trainer.fit(model, random_tokens(size, ranks * (total_steps + 1)))


class _ExpertDdp(DDPStrategy):
    """DDP without experts where these are spread, as their libraries advise."""

    def __init__(self, expert_parallel: int) -> None:
        super().__init__()
        self._size = expert_parallel

    @override
    def setup_distributed(self) -> None:
        super().setup_distributed()
        set_current_groups(build_groups(self._size, timedelta(minutes=5)))

    @override
    def configure_ddp(self) -> None:
        assert self.lightning_module is not None
        ignore_names(self.lightning_module, expert_parallel_fqns(self.lightning_module))
        super().configure_ddp()


def _strategy_of(variant: Variant, options: SimpleNamespace) -> Strategy | str:
    expert_parallel = options.expert_parallel
    if variant.strategy == "ddp":
        return _ExpertDdp(expert_parallel)
    if options.ranks == 1 and not variant.strategy:
        return "auto"
    reduction: Any = variant.strategy or "ordered"
    return MoEStrategy(
        expert_parallel=expert_parallel, shard_optimizer=variant.shard_optimizer, gradient_reduction=reduction
    )


class _Clocks(NamedTuple):
    wall: float
    thread: float
    process: float


class _Turns(Callback):
    """Measure every turn's last steps. It goes before the checkpoint callback in the list."""

    def __init__(
        self,
        options: SimpleNamespace,
        variant: Variant,
        checkpoint: Callback | None,
        gate: StorageGate,
        hand_over: HandOver[Turn],
    ) -> None:
        self._warm_up, self._steps, self._period = options.warm_up, options.steps, options.settle + options.steps
        self._variant, self._gate, self._hand_over = variant, gate, hand_over
        self._checkpoint = checkpoint if isinstance(checkpoint, CheckpointCallback) else None
        meter_of = getattr(options, "meter", None)
        self._meter = meter_of(variant, checkpoint) if meter_of is not None else None
        self._before: Report | None
        self._clocks: list[_Clocks] = []
        self._skipping: list[bool] = []

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: object) -> None:
        if trainer.global_step == 1 and self._variant.memory_only and self._checkpoint is not None:
            self._checkpoint.wait_committed()  # of generation 0
            self._gate.close()
        step = trainer.global_step - self._warm_up
        within = step % self._period
        if step < 0 or within > self._steps:
            return
        if pl_module.device.type == "cuda" and within in (0, self._steps):
            torch.cuda.synchronize()  # the host runs ahead of the device, by a step or more
        if within == 0:
            self._clocks, self._skipping = [], []
            self._before = self._report()
            if self._meter is not None:
                self._meter.begin()  # takes a while, so before the first clock is read
        self._clocks.append(_Clocks(time.perf_counter(), time.thread_time(), time.process_time()))
        self._skipping.append(self._variant.skips(trainer.global_step))
        if within == self._steps:
            after = self._report()
            if self._checkpoint is not None and not self._variant.memory_only:
                self._checkpoint.wait_committed()
            states = [each for state in trainer.optimizers[0].state.values() for each in state.values()]
            held = sum(each.nbytes for each in states if isinstance(each, torch.Tensor))
            shared = [path.stat() for path in Path(os.environ["MOE_CKPT_SHARED_MEMORY"]).rglob("*")]
            pages = sum(512 * each.st_blocks for each in shared)
            self._hand_over(Turn(self._costs(after), after, held, pages))

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._gate.open()

    def _report(self) -> Report | None:
        return None if self._checkpoint is None else self._checkpoint.report

    def _costs(self, after: Report | None) -> StepCosts:
        first, last = self._clocks[0], self._clocks[-1]
        num_steps = len(self._clocks) - 1
        steps = [end.wall - start.wall for start, end in pairwise(self._clocks)]
        idle = [seconds for seconds, skipped in zip(steps, self._skipping, strict=False) if skipped]
        return StepCosts(
            mean_seconds=(last.wall - first.wall) / num_steps,
            median_seconds=statistics.median(steps),
            idle_seconds=statistics.fmean(idle) if idle else None,
            thread_seconds=(last.thread - first.thread) / num_steps,
            process_seconds=(last.process - first.process) / num_steps,
            metered=self._meter.end(num_steps) if self._meter is not None else {},
            **_gained(self._before, after, num_steps),
        )


def _gained(before: Report | None, after: Report | None, num_steps: int) -> dict[str, Any]:
    """Return the fields of `StepCosts` that follow from reports."""
    if before is None or after is None:
        names = ("device_stall_seconds", "overhead_seconds", "generations_complete", "generations_committed")
        return {"stall_seconds": {}, **dict.fromkeys(names, 0)}
    on_device = sum(after.device_stall_seconds.values()) - sum(before.device_stall_seconds.values())
    waited = {cause: seconds - before.stall_seconds.get(cause, 0.0) for cause, seconds in after.stall_seconds.items()}
    return {
        "stall_seconds": {cause: seconds / num_steps for cause, seconds in waited.items() if seconds > 0},
        "device_stall_seconds": on_device / num_steps,
        "overhead_seconds": (after.overhead_seconds - before.overhead_seconds) / num_steps,
        "generations_complete": after.generations_complete - before.generations_complete,
        "generations_committed": after.generations_committed - before.generations_committed,
    }


class FitRanks(ExitStack):
    """One variant's processes, whose turns begin and end together."""

    def __init__(self, variant: Variant, url: str, memory: Path, options: SimpleNamespace, num_turns: int) -> None:
        super().__init__()
        port, self._takers = free_port(), list[TurnTaker[Turn]]()
        for rank in range(options.ranks):
            fit = _Fit(
                variant=variant, url=url, memory=memory, options=options, num_turns=num_turns, rank=rank, port=port
            )  # fmt: skip
            self._takers.append(self.enter_context(TurnTaker(fit)))

    def take(self) -> Turn:
        """Give all ranks a turn and return the first one's; every rank waits for the slowest in each step."""
        for taker in self._takers:
            taker.begin()
        first, *_ = [taker.end() for taker in self._takers]
        return first


@dataclass(frozen=True, kw_only=True, slots=True)
class OverheadFigure(StepCosts):
    """A variant: medians over the rounds, sums of generations."""

    variant: str
    precision: str
    num_params: int
    num_ranks: int
    throughput: float
    """Steps per second relative to `none` right before."""
    added_seconds: float
    """Mean step less that of `none` right before."""
    added_range: tuple[float, float]
    """Least and greatest of the rounds."""
    added_idle_seconds: float | None
    """Seconds added to a step without a capture."""
    added_thread_seconds: float
    """Training-thread CPU time beyond that of `none` right before."""
    added_beside_seconds: float
    """CPU time in all other threads beyond that of `none` right before."""
    window: int
    """Steps per generation; 0 without checkpoints of this package."""
    nbytes_per_step: float
    """Mean, 0 without checkpoints of this package."""
    dense_nbytes: int
    """Bytes of a full snapshot; 0 without checkpoints of this package."""
    state_nbytes: int
    """Bytes in the optimizer's tensors on the first rank."""
    shared_nbytes: int
    """Shared memory per rank."""
    rounds: list[StepCosts]


def measure(
    options: SimpleNamespace, progress: Progress, keep: Callable[[list[OverheadFigure]], None] | None = None
) -> list[OverheadFigure]:
    """Run the benchmark; `keep` gets the rounds' figures so far, after each."""
    none, *variants = chosen_variants(options)
    pairs: dict[Variant, list[tuple[Turn, Turn]]] = {variant: [] for variant in variants}
    num_pairs = options.rounds * len(variants)
    # Fits end in mid-step, as by an exception: what is newest stays in memory for a next start that never comes.
    with bench_folders() as (folder, memory), ExitStack() as stack:
        base = folder.as_uri() if options.url is None else options.url.rstrip("/")

        def ranks(variant: Variant, num_turns: int) -> FitRanks:
            return stack.enter_context(
                FitRanks(variant, f"{base}/{variant.name}", memory / variant.name, options, num_turns)
            )

        bare, takers = ranks(none, num_pairs), {each: ranks(each, options.rounds) for each in variants}
        for index, (_, variant) in enumerate(rounds_of(options.rounds, variants)):
            progress(f"training, checkpoints: {variant.name}", index, num_pairs)
            pairs[variant].append((bare.take(), takers[variant].take()))
            if keep is not None and all(pairs.values()):
                keep(_figures(none, options, pairs))
    return _figures(none, options, pairs)


def _figures(
    none: Variant, options: SimpleNamespace, pairs: Mapping[Variant, Sequence[tuple[Turn, Turn]]]
) -> list[OverheadFigure]:
    bares = [(each, each) for own in pairs.values() for each, _ in own]
    return [_figure(variant, options, own) for variant, own in {none: bares, **pairs}.items()]


def size_of(options: SimpleNamespace) -> ModelSize:
    """Return the size of the model that the command line names."""
    return ModelSize(
        num_blocks=options.blocks,
        model_dim=options.dim,
        num_experts=options.experts,
        expert_dim=4 * options.dim,
        batch_size=options.batch_size,
    )


def _figure(variant: Variant, options: SimpleNamespace, turns: Sequence[tuple[Turn, Turn]]) -> OverheadFigure:
    """Return a variant's figure from its turns, each behind a turn without checkpoints."""
    pairs, report = [(base.costs, own.costs) for base, own in turns], turns[-1][1].report
    rounds = [own for _, own in pairs]
    added = [own.mean_seconds - base.mean_seconds for base, own in pairs]
    idle = [own.idle_seconds - base.mean_seconds for base, own in pairs if own.idle_seconds is not None]
    beside = [_beside(own) - _beside(base) for base, own in pairs]
    names = ("mean_seconds", "median_seconds", "idle_seconds", "thread_seconds", "process_seconds")
    return OverheadFigure(
        **medians(rounds, *names, "device_stall_seconds", "overhead_seconds"),
        stall_seconds=medians_by_name([run.stall_seconds for run in rounds]),
        metered=medians_by_kind(rounds),
        variant=variant.name,
        precision=options.precision,
        num_params=size_of(options).num_params(),
        num_ranks=options.ranks,
        throughput=statistics.median(base.mean_seconds / own.mean_seconds for base, own in pairs),
        added_seconds=statistics.median(added),
        added_range=(min(added), max(added)),
        added_idle_seconds=statistics.median(idle) if idle else None,
        added_thread_seconds=statistics.median(own.thread_seconds - base.thread_seconds for base, own in pairs),
        added_beside_seconds=statistics.median(beside),
        window=report.window if report is not None else 0,
        nbytes_per_step=report.nbytes_per_step if report is not None else 0.0,
        dense_nbytes=report.dense_nbytes if report is not None else 0,
        generations_complete=sum(run.generations_complete for run in rounds),
        generations_committed=sum(run.generations_committed for run in rounds),
        state_nbytes=turns[-1][1].state_nbytes,
        shared_nbytes=turns[-1][1].shared_nbytes // options.ranks,
        rounds=rounds,
    )


def _beside(costs: StepCosts) -> float:
    return costs.process_seconds - costs.thread_seconds


def medians_by_kind(rounds: Sequence[StepCosts]) -> dict[str, dict[str, float]]:
    return {kind: medians_by_name([run.metered[kind] for run in rounds]) for kind in rounds[0].metered}


def medians_by_name(rounds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return each name's median; 0 counts where a round lacks the name."""
    names = sorted({name for run in rounds for name in run})
    return {name: statistics.median(run.get(name, 0.0) for run in rounds) for name in names}


# -- tables

_COLUMNS = (
    *("checkpoints", "+ms/step", "range", "idle +ms", "CPU +ms", "beside +ms"),
    *("hooks ms", "stored", "state MiB", "shared MiB"),
)
_NOTE = """\
+ms/step: longer than without checkpoints, medians of rounds; idle: steps at which nothing is taken; CPU: of the training \
thread, beside: of all other threads of the process; hooks: time of the training thread in them, waits included; stored: \
generations of the steps measured; state: the optimizer's, of the first rank; shared: memory for checkpoints, per rank"""


def table(figures: Sequence[OverheadFigure]) -> RenderableType:
    """Return the figures for people."""
    note = "\n".join([_NOTE, *filter(None, map(_causes, figures))])
    return table_of(title_of(figures), _COLUMNS, [_row(figure) for figure in figures], note)


def title_of(figures: Sequence[OverheadFigure]) -> str:
    """Return the model and the machine's speed, for a table's title."""
    none = figures[0]
    return (
        f"Training {none.num_params / 1e6:.1f}M parameters in {none.precision} on {none.num_ranks} ranks, a step of "
        f"{none.mean_seconds * 1e3:.1f} ms, medians of {len(figures[-1].rounds)} rounds"
    )


def _row(figure: OverheadFigure) -> list[str]:
    low, high = figure.added_range
    held = [f"{nbytes / 2**20:.1f}" for nbytes in (figure.state_nbytes, figure.shared_nbytes)]
    if figure.variant == "none":
        return ["none", *[""] * 7, *held]
    added = (figure.added_idle_seconds, figure.added_thread_seconds, figure.added_beside_seconds)
    row = [figure.variant, _ms(figure.added_seconds), f"{low * 1e3:.1f} to {high * 1e3:.1f}", *map(_ms, added)]
    stored = f"{figure.generations_committed} of {figure.generations_complete}" if figure.window else ""
    return [*row, f"{figure.overhead_seconds * 1e3:.2f}", stored, *held]


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:+.2f}"


def _causes(figure: OverheadFigure) -> str:
    causes = sorted(figure.stall_seconds.items(), key=lambda item: -item[1])
    said = ", ".join(f"{cause} {seconds * 1e3:.2f}" for cause, seconds in causes if seconds >= 5e-6)
    return f"waits in ms, {figure.variant}: {said}" if said else ""
