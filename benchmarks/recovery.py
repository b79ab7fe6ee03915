"""Measure the time lost to a failure: from a SIGKILL to the first step that was never taken before.

Runs of the same model are killed at the same step and resumed by real processes: sparse and dense checkpoints after
the loss of a process, of a node with its memory, and of every node's memory; torch's Distributed Checkpoint (saving
asynchronously) and Lightning's own `.ckpt`, which restore from storage whatever was lost. Each rank is a node, with shared
memory of its own. All save every so many steps, to the same disk. Kills fall on different steps between two
checkpoints, one per round, and in each round all runs take turns.

New processes are forked from a process that has imported everything: imports cost every system alike.

The time of a restarted process until its state is back out of memory of the node is measured by itself. A process captures a
generation in a ring, publishes the generation and dies by SIGKILL. The clock runs from that signal to the moment at which another
process has found the generation, holds its bytes, and has verified them as a restore does, by the digest of the whole and
the places of records. A rank of a real job starts new processes in between, which is not counted.

Source: TierCheck (arXiv 2605.17821), Table 3. There the steps lost are an average of best and worst; here they happen.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, seed_everything
from rich.console import Group, RenderableType
from typing_extensions import override

from benchmarks.breakdown import CostMeter
from benchmarks.costs import Goal
from benchmarks.failure import failure_of
from benchmarks.peers_saving import DcpCheckpoint, MeteredCheckpoint
from benchmarks.segments import made_up_layout, records_of
from benchmarks.steps import StepLines, lines_of
from lightning_moe_ckpt._units import size_text
from lightning_moe_ckpt.benchmarks._benchmark import (
    Accelerator,
    Progress,
    accelerator_for,
    medians,
    milliseconds,
    rounds_of,
    table_of,
)
from lightning_moe_ckpt.benchmarks._fits import (
    BenchModel,
    HandOver,
    ModelSize,
    TurnTaker,
    bench_folders,
    bench_trainer,
    own_memory,
    quiet_lightning,
    random_tokens,
)
from lightning_moe_ckpt.callbacks import (
    DenseCheckpoint,
    PartialExpertCheckpoint,
    SelectiveExpertCheckpoint,
    SparseCheckpoint,
)
from lightning_moe_ckpt.errors import CheckpointError
from lightning_moe_ckpt.snapshot._shards import as_memoryview
from lightning_moe_ckpt.storage import GenerationId, SegmentLayout, digest_of
from lightning_moe_ckpt.storage._catalog import expect_places
from lightning_moe_ckpt.testing import Attempt, AttemptFailed, AttemptResult, Kill, run_attempts
from lightning_moe_ckpt.testing._attempts import attempt_path
from lightning_moe_ckpt.testing._records import JsonLines, read_lines
from lightning_moe_ckpt.tiers import HostTier, SegmentRing, shared_name
from lightning_moe_ckpt.tiers._sealed import Markers, SealedFile

RecoverySystem = Literal["none", "sparse", "dense", "partial", "selective", "dcp", "lightning"]
RecoveryLoss = Literal["process", "node", "cluster"]
"""Loss of a process, a process with its node's memory, or every node's memory."""
Precision = Literal["32-true", "bf16-mixed"]
CASES: tuple[tuple[RecoverySystem, RecoveryLoss], ...] = (
    *(("sparse", loss) for loss in ("process", "node", "cluster")),
    *(("dense", loss) for loss in ("process", "node", "cluster")),
    *(("partial", loss) for loss in ("process", "cluster")),
    *(("selective", loss) for loss in ("process", "cluster")),
    ("dcp", "cluster"),
    ("lightning", "cluster"),
)
"""Other systems restore from storage after any loss, so each is measured once."""
_SYSTEMS = {
    "sparse": "SparseCheckpoint",
    "dense": "DenseCheckpoint",
    "partial": "PartialExpertCheckpoint",
    "selective": "SelectiveExpertCheckpoint",
    "dcp": "torch DCP, async",
    "lightning": "Lightning .ckpt",
}
_COLUMNS = (
    *("checkpoints", "lost", "restored from", "saved per step", "in hooks per step", "step", "steps lost"),
    *("tokens lost", "restored after", "of it restore", "re-run", "total", "range"),
)
_NOTE = """\
before the kill: bytes saved per step by all ranks together, what the training thread spent on it, waits included, and the \
mean step with it
restored after: from the SIGKILL until the state is there, with new processes but without imports; re-run: steps lost, and \
done again; tokens lost: over all experts, for good, where restarts are not exact"""
_OURS, _OF_LIGHTNING = "lightning_moe_ckpt.", "lightning.pytorch."
PHASES = {
    "process group": [f"{_OURS}strategy:MoEStrategy setup_distributed"],
    "operators": [f"{_OURS}fit:FitSession __init__"],
    "log": [f"{_OURS}recovery._opener:RunOpener _open_store _open_incarnation _list"],
    "agreement": [f"{_OURS}coordination:Exchange gather gather_tensor broadcast"],
    "discovery": [f"{_OURS}recovery._inventory:Reader __init__", f"{_OURS}recovery._attempt:RestoreAttempt marker"],
    "bytes and digests": [f"{_OURS}recovery._transfer:Transfer fill"],
    "plan": [f"{_OURS}snapshot:FileLayout __init__", f"{_OURS}planning:Planner settle"],
    "load": [
        *(f"{_OURS}recovery._replay:Replay load", "benchmarks.peers_saving:DcpCheckpoint on_fit_start"),
        f"{_OF_LIGHTNING}trainer.connectors.checkpoint_connector:_CheckpointConnector _restore_modules_and_callbacks",
    ],
    "second look or load": [f"{_OURS}recovery._replay:Replay reconcile"],
    "tiers": [f"{_OURS}session._opening _joined"],
    "rings": [f"{_OURS}tiers:Rings make"],
    "thaw": [f"{_OURS}snapshot:Constants settle", f"{_OURS}process:FrozenHeap sweep"],
    "loaders": [f"{_OF_LIGHTNING}loops.fit_loop:_FitLoop setup_data"],
    "rest of a restore": [f"{_OURS}session:CheckpointSession begin", f"{_OURS}fit._recorder:BoundaryRecorder resume"],
}
"""Functions by a restart's phase: owners, each with its functions' names."""
EXCHANGES = "exchanges"
"""Number of exchanges of values between ranks in a restart, beside its phases."""
_LOSSES = {"process": "process", "node": "node", "cluster": "all nodes"}
_CYCLES = 3
"""Checkpoints due before the kill: the newest may still be on its way."""
_GOAL = Goal("host", "from a SIGKILL to 50 MiB out of host memory", 100, "ms", at_least=False)
_RUN, _GENERATION = "bench", GenerationId(step=1, incarnation=1, nonce="0" * 12)
_SHARE_K = 4
"""Experts per layer that partial checkpoints take, of 16."""
OWN = DenseCheckpoint | SparseCheckpoint | PartialExpertCheckpoint | SelectiveExpertCheckpoint


@dataclass(frozen=True, kw_only=True, slots=True)
class Recovery:
    """A kill and its consequences."""

    killed_at: int
    """Steps done before the kill."""
    rollback_steps: float
    """Steps of `killed_at` that had to be taken again."""
    step_seconds: float
    """Mean step before the kill, checkpoints included."""
    hook_seconds: float
    """Part of `step_seconds` that the killed rank's training thread spent on checkpoints, waits included."""
    saved_nbytes: float
    """Bytes that were saved per step before the kill, by all ranks together."""
    begin_seconds: float
    """Time from the SIGKILL until a new process runs the user's code: noticing the death, ending the others, a fork."""
    ready_seconds: float
    """Time from the SIGKILL until the state was there on all ranks; after the fork come process group, model, Trainer, and the restore."""
    restore_seconds: float | None
    """Part of `ready_seconds` that the checkpoint callback took; unknown for other systems."""
    lost_tokens: int
    """Tokens whose updates are in no weights any more, each as often as it was routed; 0 where restarts are exact."""
    rerun_seconds: float
    """Time from there until the slowest rank had done the step of the kill again."""
    total_seconds: float
    """Time from the SIGKILL to the end of the first new step."""
    restored_from: list[dict[str, int]]
    """Bytes that each rank read, by tier: `host`, `peer` or `storage`; empty for other systems."""
    phases: list[dict[str, float]]
    """Each rank's seconds by phase until its first step is done, and its `EXCHANGES`, with `--breakdown`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RecoveryFigure(Recovery):
    """A system and a kind of failure; medians over the rounds, and the last round's `restored_from`."""

    system: RecoverySystem
    loss: RecoveryLoss
    num_params: int
    num_ranks: int
    every: int
    """Steps between two checkpoints."""
    total_range: tuple[float, float]
    """Least and greatest of the rounds."""
    rounds: list[Recovery]


@dataclass(frozen=True, kw_only=True, slots=True)
class HostRestoreFigure:
    """Kills of one process, and the time until its state was read back."""

    nbytes: int
    seconds: list[float]
    """Time from each SIGKILL to verified bytes in another process."""

    @property
    def median(self) -> float:
        """Median over the kills."""
        return statistics.median(self.seconds)

    @property
    def outcome(self) -> str:
        """Outcome for the goal, which is in proportion above 50 MiB."""
        return _GOAL.outcome(1e3 * self.median / max(1.0, self.nbytes / (50 * 2**20)))


_MEDIANS = [name for name in Recovery.__annotations__ if name not in ("restored_from", "phases")]


def measure(options: SimpleNamespace, progress: Progress) -> list[RecoveryFigure | HostRestoreFigure]:
    """Run the benchmark."""
    cases = [case for case in CASES if case[0] in options.systems]
    found: dict[tuple[RecoverySystem, RecoveryLoss], list[Recovery]] = {case: [] for case in cases}
    for done, (turn, case) in enumerate(rounds_of(options.kills, cases)):
        progress(f"killed and resumed: {case[0]}, {case[1]}", done, options.kills * len(cases))
        step = _CYCLES * options.every + 1 + turn * options.every // options.kills
        found[case].append(_recover(case, step, options))
    host = _restore_from_host(options, progress)
    return [*(_figure(case, options, rounds) for case, rounds in found.items()), host]


def table(figures: Sequence[RecoveryFigure | HostRestoreFigure]) -> RenderableType:
    """Return the figures for people."""
    killed = [figure for figure in figures if isinstance(figure, RecoveryFigure)]
    first = killed[0]
    title = (
        f"From a SIGKILL to the first new step: {first.num_params / 1e6:.1f}M parameters on {first.num_ranks} nodes of "
        f"one process, a checkpoint every {first.every} steps, medians of {len(first.rounds)} kills"
    )
    alone = [_host_line(figure) for figure in figures if isinstance(figure, HostRestoreFigure)]
    caption = "\n".join([_NOTE, *alone])
    lost = table_of(title, _COLUMNS, [_row(figure) for figure in killed], caption)
    phases = {f"{_SYSTEMS[each.system]}, {_LOSSES[each.loss]}": each.phases for each in killed if any(each.phases)}
    return Group(lost, phases_of(phases)) if phases else lost


def _recover(case: tuple[RecoverySystem, RecoveryLoss], step: int, options: SimpleNamespace) -> Recovery:
    system, loss = case
    with bench_folders(options.folder) as (folder, memory):
        fit = RecoveryFit(
            system=system,
            loss=loss,
            size=_size(options),
            every=options.every,
            max_steps=step + 1,
            memory=str(memory),
            accelerator=accelerator_for(options.accelerator, options.nodes),
            breakdown=options.breakdown,
        )
        kill = Kill(phase="batch_start", step=step, rank=options.nodes - 1)
        url = (folder / "run").as_uri()
        (folder / "run").mkdir()
        try:
            attempts = run_attempts(fit, url=url, workdir=folder, world_size=options.nodes, kills=[kill], timeout=300)
        except AttemptFailed as failed:
            raise CheckpointError(f"{_SYSTEMS[system]}, {loss} lost: {failed}") from failed
        return _read(attempts, step, (_CYCLES - 1) * options.every)


def _size(options: SimpleNamespace) -> ModelSize:
    dim = options.recovery_dim
    return ModelSize(num_blocks=options.recovery_blocks, model_dim=dim, expert_dim=2 * dim, batch_size=4)


def _read(attempts: Sequence[AttemptResult], step: int, num_steps: int) -> Recovery:
    """Return the cost when the last rank is killed at `step` in the first attempt and a second follows.

    Costs are averaged over `num_steps` before the kill, a whole number of checkpoint intervals.
    """
    killed, resumed = attempts
    rank, ranks = killed.world_size - 1, range(killed.world_size)
    (at,) = (line["at"] for line in killed.records(rank, "killed"))
    paths = [[attempt_path(attempt.workdir, attempt.index, own, "times") for attempt in attempts] for own in ranks]
    failure = failure_of([[line for path in own for line in read_lines(path)] for own in paths], at, rank)
    assert failure is not None
    before = [{line["step"]: line for line in lines_of(first, "step")} for first, _ in paths]
    last = min(map(max, before))  # a rank may not have got to its line
    spent = [
        [b - a for a, b in zip(each[last - num_steps]["costs"], each[last]["costs"], strict=True)] for each in before
    ]
    steady = sorted(line["at"] for line in before[rank].values())[-max(2, 2 * step // 3) :]
    own = resumed.returned(rank)
    return Recovery(
        killed_at=step,
        rollback_steps=failure.rerun_steps,
        step_seconds=statistics.fmean(later - earlier for earlier, later in pairwise(steady)),
        hook_seconds=spent[rank][0] / num_steps,
        saved_nbytes=sum(nbytes for _, nbytes in spent) / num_steps,
        begin_seconds=own["begun"] - at,
        ready_seconds=failure.begin_seconds,
        restore_seconds=own["restore_seconds"],
        lost_tokens=own["lost_tokens"],
        rerun_seconds=failure.rerun_seconds,
        total_seconds=failure.total_seconds,
        restored_from=[resumed.returned(each)["restored_from"] for each in ranks],
        phases=[resumed.returned(each)["phases"] for each in ranks],
    )


def _figure(
    case: tuple[RecoverySystem, RecoveryLoss], options: SimpleNamespace, rounds: list[Recovery]
) -> RecoveryFigure:
    totals = [run.total_seconds for run in rounds]
    return RecoveryFigure(
        **medians(rounds, *_MEDIANS),
        restored_from=rounds[-1].restored_from,
        phases=[
            {name: statistics.median(run.phases[rank].get(name, 0.0) for run in rounds) for name in found}
            for rank, found in enumerate(rounds[-1].phases)
        ],
        system=case[0],
        loss=case[1],
        num_params=_size(options).num_params(),
        num_ranks=options.nodes,
        every=options.every,
        total_range=(min(totals), max(totals)),
        rounds=rounds,
    )


def _sources(figure: RecoveryFigure) -> str:
    if figure.system in ("dcp", "lightning"):
        return "storage"
    return ", ".join(sorted({source for rank in figure.restored_from for source in rank})) or "nothing"


def _restore_from_host(options: SimpleNamespace, progress: Progress) -> HostRestoreFigure:
    nbytes, seconds = options.host_megabytes * 2**20, []
    for turn in range(options.host_kills):
        progress("killed, and read back from memory", turn, options.host_kills)
        seconds.append(host_restore_seconds(nbytes))
    return HostRestoreFigure(nbytes=nbytes, seconds=seconds)


def _host_line(figure: HostRestoreFigure) -> str:
    return (
        f"{size_text(figure.nbytes)} of state, from the SIGKILL to verified bytes out of host memory, without imports: "
        f"median {milliseconds(figure.median)}, {milliseconds(min(figure.seconds))} to "
        f"{milliseconds(max(figure.seconds))} in {len(figure.seconds)} kills; "
        f"goal 100 ms for 50 MiB: {figure.outcome}"
    )


def _row(figure: RecoveryFigure) -> list[str]:
    low, high = figure.total_range
    lost = "any" if figure.system in ("dcp", "lightning") else _LOSSES[figure.loss]
    after = (figure.ready_seconds, figure.restore_seconds, figure.rerun_seconds, figure.total_seconds)
    return [
        *(_SYSTEMS[figure.system], lost, _sources(figure)),
        *(size_text(figure.saved_nbytes), milliseconds(figure.hook_seconds), milliseconds(figure.step_seconds)),
        *(f"{figure.rollback_steps:g}", f"{figure.lost_tokens:.0f}" if figure.lost_tokens else ""),
        *(*map(milliseconds, after), f"{milliseconds(low)} to {milliseconds(high)}"),
    ]


# -- memory of the node alone


def host_restore_seconds(nbytes: int) -> float:
    """Return the seconds from a process's SIGKILL to its `nbytes` of state, a segment with 64 records, verified in another process.

    Raises:
        TurnFailed: the process that was to be killed did not get that far.
    """
    with bench_folders() as (_, memory):

        def capture(hand_over: HandOver[None]) -> None:
            ring = _capture(memory, nbytes)
            hand_over(None)
            ring.close()

        with TurnTaker(capture) as taker:
            taker.take()
            # Memory that a model has when it is restored to. Behind the fork: pages shared with a child are copied when written.
            out = torch.empty(nbytes + 2**20, dtype=torch.uint8).fill_(0)
            began = time.perf_counter()
            taker.kill()
            _restore(memory, out)
            return time.perf_counter() - began


def _capture(memory: Path, nbytes: int) -> SegmentRing:
    layout = made_up_layout("r", nbytes)
    ring = SegmentRing.create(shared_name(_RUN, 0), layout.nbytes, 1, memory)
    ring.begin_window(_GENERATION)
    slot = ring.acquire(_GENERATION, 1)
    slot.view.fill_(7)
    layout.write_header(slot.view)
    ring.seal(slot)
    ring.finish_window(_GENERATION)
    view = as_memoryview(slot.view)[: layout.nbytes]
    file = SealedFile(generation=_GENERATION, rank=0, step=1, view=view, records=records_of(layout))
    markers = Markers(run_id=_RUN, rank=0, world_size=1)
    ring.publish(_GENERATION, markers.of(_GENERATION, [file.digested()], plan_hash="", plan_json="{}"))
    return ring


def _restore(memory: Path, out: torch.Tensor) -> None:
    tier = HostTier(_RUN, memory)
    try:
        (holding,) = tier.holdings()
        (entry,) = tier.read_marker(holding).segments
        view = as_memoryview(out)[: entry.nbytes]
        tier.read_into(holding, entry, 0, view)
        if digest_of(view) != entry.digest:
            raise RuntimeError("The bytes in memory are not those that were captured.")
        expect_places(entry, SegmentLayout.parse(view))
    finally:
        tier.close()


@dataclass(frozen=True, kw_only=True)
class RecoveryFit:
    """A run that is killed and resumed; picklable. Each rank is on a node of its own."""

    system: RecoverySystem
    loss: RecoveryLoss
    size: ModelSize
    every: int
    """Steps between two checkpoints; the window of sparse ones."""
    max_steps: int
    memory: str
    """Folder on a tmpfs with a folder per node, which is that node's shared memory."""
    accelerator: Accelerator = "cpu"
    deterministic: bool = False
    """Whether the Trainer warns of kernels that are not deterministic."""
    precision: Precision = "32-true"
    breakdown: bool = False
    """Whether to measure the restart's phases."""

    def __call__(self, attempt: Attempt) -> dict[str, Any]:
        """Run an attempt; return its start time, and the callback's report on the restore."""
        begun, is_killed = time.monotonic(), attempt.rank == attempt.world_size - 1
        loses_memory = self.loss == "cluster" or (self.loss == "node" and is_killed)
        own_memory(f"{self.memory}/node{attempt.rank}", lost=attempt.index > 0 and loses_memory)
        folder = Path(attempt.url.removeprefix("file://"))
        first = newest_step(folder) if self.system == "dcp" else 0
        checkpoint = self._checkpoint(attempt, folder, first)
        meter = CostMeter(PHASES) if self.breakdown and attempt.index > 0 else None
        times = StepTimes(attempt.records.with_suffix(".times"), first, checkpoint, meter)
        with quiet_lightning():
            trainer = bench_trainer(
                accelerator=self.accelerator,
                devices=attempt.world_size,
                callbacks=attempt.callbacks(*([checkpoint] if checkpoint is not None else []), times),
                max_steps=self.max_steps - first,
                deterministic="warn" if self.deterministic else None,
                precision=self.precision,
            )
            torch.manual_seed(0)
            model = BenchModel(self.size)
            seed_everything(attempt.seed, verbose=False)  # another in every attempt: what is not restored shows
            data = random_tokens(self.size, attempt.world_size * (self.max_steps + 1))
            trainer.fit(model, data, ckpt_path=self._ckpt_path(folder))
        phases: dict[str, float] = {}
        if meter is not None:
            phases = {name: cost.wall for name, cost in meter.costs().items()} | {EXCHANGES: meter.calls["agreement"]}
        return {"begun": begun, "phases": phases, **_report(checkpoint)}

    def _checkpoint(self, attempt: Attempt, folder: Path, first: int) -> Callback | None:
        if self.system == "sparse":
            return SparseCheckpoint(attempt.url, window=self.every, overhead_target=None)
        if self.system == "dense":
            return DenseCheckpoint(attempt.url, every_n_steps=self.every, overhead_target=None)
        if self.system == "partial":
            return PartialExpertCheckpoint(
                attempt.url, every_n_steps=self.every, k=_SHARE_K, plt_budget=None, overhead_target=None
            )
        if self.system == "selective":
            return SelectiveExpertCheckpoint(attempt.url, every_n_steps=self.every, overhead_target=None)
        if self.system == "dcp":
            return DcpCheckpoint(folder, every_n_steps=self.every, first_step=first)
        return MeteredCheckpoint(folder, every_n_train_steps=self.every) if self.system == "lightning" else None

    def _ckpt_path(self, folder: Path) -> str | None:
        if self.system != "lightning":
            return None
        files = sorted(folder.glob("*.ckpt"), key=lambda path: path.stat().st_mtime)
        return str(files[-1]) if files else None


def newest_step(folder: Path) -> int:
    """Return the newest step of whole checkpoints in `folder`, 0 if there is none. Their metadata is written last."""
    return max((int(path.parent.name) for path in folder.glob("*/.metadata")), default=0)


class StepTimes(StepLines):
    """Append a line at every step, with the cost of `checkpoint` so far; the first one stops the `meter`, if any."""

    def __init__(
        self, path: Path, first_step: int, checkpoint: Callback | None, meter: CostMeter | None = None
    ) -> None:
        self.first_step, self._checkpoint, self.lines, self._meter = first_step, checkpoint, JsonLines(path), meter

    @override
    def values(self) -> dict[str, Any]:
        if self._meter is not None:
            self._meter.stop()
        return {"costs": _costs(self._checkpoint)}


def _costs(checkpoint: Callback | None) -> tuple[float, int]:
    """Return seconds of the training thread and bytes saved so far; summed over the ranks, no byte counts twice."""
    if isinstance(checkpoint, OWN):
        return checkpoint.report.overhead_seconds, checkpoint.report.nbytes_captured
    if isinstance(checkpoint, DcpCheckpoint | MeteredCheckpoint):
        return checkpoint.seconds, checkpoint.nbytes
    return 0.0, 0


def _report(checkpoint: Callback | None) -> dict[str, Any]:
    known = ("resumed_from", "restored_from", "restore_seconds")
    if not isinstance(checkpoint, OWN):
        return {"resumed_from": None, "restored_from": {}, "restore_seconds": None, "lost_tokens": 0}
    lost = checkpoint.report.lost
    return {**{name: getattr(checkpoint.report, name) for name in known}, "lost_tokens": lost.lost if lost else 0}


def phases_of(columns: Mapping[str, Sequence[Mapping[str, float]]]) -> RenderableType:
    """Return a table with seconds by phase, a column per system with every rank's."""
    rows = [
        [name, *(" / ".join(f"{1e3 * rank.get(name, 0.0):.1f}" for rank in ranks) for ranks in columns.values())]
        for name in PHASES
    ]
    rows.append(
        [EXCHANGES, *(" / ".join(f"{rank.get(EXCHANGES, 0):.0f}" for rank in ranks) for ranks in columns.values())]
    )
    note = "milliseconds of the training thread until the first step was done, by rank; waits for other ranks are in agreement"
    return table_of("Phases of these restarts", ("", *columns), rows, note)
