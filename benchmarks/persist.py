"""Measure the time and CPU until a generation is durable, and the slow-down of training meanwhile.

A generation is digested, stored, marked and committed by the worker of a training; beside it the same bytes
are written plainly: to local disk by write and fsync, to object storage by `obstore.put` with its own
settings. Both take turns in one process, each first in turn, and the ratio is taken within a turn. Deleting older generations
comes afterwards and is not measured.

Steps are the steps of a fit with sparse checkpoints on local disk, told apart by whether a segment was being written. To have
idle steps, writes are held up in every other stretch of steps.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import count, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar

import obstore
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from obstore.store import S3Store
from rich.table import Table
from typing_extensions import override

from benchmarks.costs import Cost, Goal
from benchmarks.segments import made_up_layout, records_of
from lightning_moe_ckpt._units import rate_text
from lightning_moe_ckpt.benchmarks._benchmark import (
    Accelerator,
    Progress,
    accelerator_for,
    milliseconds,
    table_of,
)
from lightning_moe_ckpt.benchmarks._fits import (
    BenchModel,
    HandOver,
    ModelSize,
    StorageGate,
    TurnTaker,
    bench_trainer,
    one_thread,
    patient_storage,
    quiet_lightning,
    random_tokens,
)
from lightning_moe_ckpt.callbacks import SparseCheckpoint
from lightning_moe_ckpt.errors import CheckpointError, ConfigurationError
from lightning_moe_ckpt.storage import RecordRows, Retention, RunStore, open_backend, wrapping_backends
from lightning_moe_ckpt.storage._backend import StorageOptions
from lightning_moe_ckpt.storage._object_options import split_url, translate
from lightning_moe_ckpt.tiers._sealed import Markers, SealedFile, SealedSegment
from lightning_moe_ckpt.tiers._storage_writer import PersistWorker
from lightning_moe_ckpt.tiers._tier_worker import WriteRequest

T = TypeVar("T")

LOCAL = Goal("local", "time until durable on local disk, of a raw write and fsync", 1.2, "times", at_least=False)
OBJECT = Goal("object", "time until durable in object storage, of a bare obstore put", 1.25, "times", at_least=False)
CPU = Goal("cpu", "CPU seconds per GiB uploaded", 0.64, "s", at_least=False)
STEP = Goal("step", "p99 of a step while a segment is written, of other steps", 1.5, "times", at_least=False)
_WARM_UP = 20
_NEVER_DELETES = 10**9
"""Generations that are kept while time is measured: deleting comes after what is measured."""
_STRETCH = 16
"""Steps, two windows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PersistFigure:
    """A goal and its measurement; a goal without a value was not run."""

    what: str
    wanted: str
    unit: str
    value: float | None
    """Median over the rounds, for ratios of two times; over all steps together for p99."""
    range: tuple[float, float] | None
    """Least and greatest of the rounds."""
    baseline: str
    """Absolute figure to which `value` is relative."""
    ours: str
    outcome: str


class Pair(NamedTuple):
    """Costs of the same bytes stored twice."""

    nbytes: int
    bare: Cost
    ours: Cost


class StepsMeanwhile(NamedTuple):
    """Step seconds of a fit."""

    idle: list[float]
    """Steps while storage was held still."""
    persisting: list[float]
    """Steps during any part of which a segment was written."""


def measure(options: SimpleNamespace, progress: Progress) -> list[PersistFigure]:
    """Run the benchmark."""
    with tempfile.TemporaryDirectory(prefix="moe-ckpt-bench-", dir=options.persist_folder) as folder:
        url = Path(folder).as_uri()
        local = _pairs(options, url, None, progress, "local disk")
        stored = _pairs(options, options.object_url, options.object_options, progress, "object storage")
        progress("training with sparse checkpoints", 0, 1)
        steps = _steps(options, f"{url}/fit")
    unnamed = "not run: name a bucket with --object-url"
    return [_ratio(LOCAL, local, ""), _ratio(OBJECT, stored, unnamed), _cpu(stored, unnamed), _p99(steps)]


def table(figures: Sequence[PersistFigure]) -> Table:
    """Return the figures for people."""
    columns = ("goal", "measured", "range", "baseline", "ours", "wanted", "outcome")
    return table_of("What persisting costs", columns, [_row(figure) for figure in figures])


def _pairs(
    options: SimpleNamespace, url: str | None, storage_options: StorageOptions | None, progress: Progress, where: str
) -> list[Pair]:
    if url is None:
        return []
    nbytes = options.generation_megabytes * 2**20
    pairs = []
    with TurnTaker[Pair](lambda end: take_pairs(url, storage_options, nbytes, options.segments, end)) as taker:
        taker.take()  # the first touches new memory and opens connections
        for turn in range(options.persist_rounds):
            progress(f"storing, {where}", turn, options.persist_rounds)
            pairs.append(taker.take())
    return pairs


def take_pairs(
    url: str, storage_options: StorageOptions | None, nbytes: int, num_segments: int, hand_over: HandOver[Pair]
) -> None:
    """Store a generation and the same bytes barely, turn by turn, each first in turn."""
    segments = [_segment(number, nbytes // num_segments) for number in range(num_segments)]
    views = [view for view, _ in segments]
    bare = _bare(url, storage_options)
    store = RunStore.open(open_backend(f"{url}/run", storage_options=storage_options), resume="auto")
    store.candidates()
    if store.open_incarnation(None) is None:
        raise CheckpointError(f"another process uses {url}. Name a place for this measurement alone.")
    markers, kept = Markers(run_id=store.run_id, rank=0, world_size=1), Retention(last=_NEVER_DELETES)
    with closing(PersistWorker(store, markers, retention=kept)) as worker:
        for turn in count():
            runs = {
                "bare": lambda turn=turn: bare(f"bare-{turn}", views),
                "ours": lambda turn=turn: _persist(store, worker, segments, turn + 1),
            }
            order = ("bare", "ours") if turn % 2 else ("ours", "bare")
            costs = {name: Cost.of(runs[name]) for name in order}
            bare.forget(f"bare-{turn}")
            store.retain(Retention(last=1))
            hand_over(Pair(sum(view.nbytes for view in views), costs["bare"], costs["ours"]))


def _segment(number: int, nbytes: int) -> tuple[memoryview, RecordRows]:
    """Return random bytes in a segment's layout, with parameters that no segment with another number has."""
    layout = made_up_layout(f"record {number}", nbytes)
    memory = torch.randint(256, (layout.nbytes,), dtype=torch.uint8)
    layout.write_header(memory)
    return memoryview(memory.numpy().data), records_of(layout)


def _persist(store: RunStore, worker: PersistWorker, segments: list[tuple[memoryview, RecordRows]], step: int) -> None:
    """Store a generation and return when it is committed."""
    generation = store.name(step)
    worker.begin(WriteRequest(generation=generation, plan_hash="bench", plan_json="{}", num_segments=len(segments)))
    for index, (view, rows) in enumerate(segments):
        file = SealedFile(generation=generation, rank=0, step=step + index, view=view, records=rows)
        worker.add(generation, SealedSegment(files=[file], view=view))
    if not worker.drain(600) or not worker.holds(generation):
        raise CheckpointError(f"not stored: {'; '.join(map(str, worker.take_failures())) or 'not within 600 s'}")


def _bare(url: str, storage_options: StorageOptions | None) -> _RawFiles | _BareObjects:
    """Return the baseline: a function that makes bytes durable under names with a common beginning."""
    if url.startswith("file://"):
        return _RawFiles(Path(url.removeprefix("file://")))
    return _BareObjects(url, storage_options)


class _RawFiles:
    """Write and fsync, one file per segment."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __call__(self, name: str, segments: list[memoryview]) -> None:
        for index, view in enumerate(segments):
            with (self._folder / f"{name}-{index}").open("wb", buffering=0) as file:
                written = 0
                while written < view.nbytes:
                    written += file.write(view[written:]) or 0
                os.fsync(file.fileno())

    def forget(self, name: str) -> None:
        for path in self._folder.glob(f"{name}-*"):
            path.unlink()


class _BareObjects:
    """`obstore.put` with its defaults, one object per segment."""

    def __init__(self, url: str, storage_options: StorageOptions | None) -> None:
        kind, bucket, prefix = split_url(f"{url}/bare")
        if kind != "s3":
            raise ConfigurationError(f"`--object-url {url}` must begin with s3://, which is what puts are measured on.")
        self._backend = open_backend(f"{url}/bare", storage_options=storage_options)
        options = translate(kind, storage_options or {})
        given: dict[str, Any] = {"config": options.config or None, "client_options": options.client or None}
        self._store = S3Store(bucket, prefix=prefix, **given)

    def __call__(self, name: str, segments: list[memoryview]) -> None:
        for index, view in enumerate(segments):
            obstore.put(self._store, f"{name}-{index}", view)

    def forget(self, name: str) -> None:
        for entry in self._backend.list(name):
            self._backend.delete(entry.key)


def _steps(options: SimpleNamespace, url: str) -> StepsMeanwhile:
    dim, accelerator = options.persist_dim, accelerator_for(options.accelerator)
    size = ModelSize(model_dim=dim, expert_dim=2 * dim, num_blocks=max(1, dim // 32))
    measured = partial(time_steps, url, size, options.persist_steps, _WARM_UP, accelerator)
    with TurnTaker[StepsMeanwhile](lambda hand_over: hand_over(measured()), timedelta(hours=1)) as taker:
        return taker.take()


def time_steps(url: str, size: ModelSize, num_steps: int, warm_up: int, accelerator: Accelerator) -> StepsMeanwhile:
    """Train with sparse checkpoints and tell the steps apart.

    In every other stretch of steps writes wait until it is over: there would be no idle step where storage is slow. The steps of
    the warm-up are not measured.
    """
    held = _HeldWrites(warm_up, num_steps)
    watched = wrapping_backends(held.gate.backend)
    with watched, one_thread(), quiet_lightning(), patient_storage():
        trainer = bench_trainer(
            accelerator=accelerator,
            strategy="auto",
            gradient_clip_val=None,
            callbacks=[
                held,
                SparseCheckpoint(url, window=8, overhead_target=None, untouched=["callback._HeldWrites.*"]),
            ],
            max_steps=warm_up + num_steps + 1,
        )
        torch.manual_seed(0)
        trainer.fit(BenchModel(size), random_tokens(size, warm_up + num_steps + 2))
    found = StepsMeanwhile(idle=[], persisting=[])
    for number, (start, end) in enumerate(pairwise(held.ends[warm_up:])):
        overlaps = any(begun < end and done > start for begun, done in held.gate.spans)
        if overlaps != _is_idle(number):
            (found.persisting if overlaps else found.idle).append(end - start)
    return found


def _is_idle(number: int) -> bool:
    """Return whether storage is held still during step `number`, counted from the first that is measured."""
    return number // _STRETCH % 2 == 1


class _TimedGate(StorageGate):
    """Note when large objects were written."""

    def __init__(self) -> None:
        super().__init__()
        self.spans: list[tuple[float, float]] = []

    @override
    def _write(self, operation: Callable[[], T]) -> T:
        started = time.perf_counter()
        try:
            return operation()
        finally:
            self.spans.append((started, time.perf_counter()))


class _HeldWrites(Callback):
    """Note when steps were done, and let large writes wait in every other stretch. It goes first in the list.

    After the measured steps nothing is held: the end of a fit waits until the last step is stored.
    """

    def __init__(self, warm_up: int, num_steps: int) -> None:
        self.gate = _TimedGate()
        self.ends: list[float] = []
        self._warm_up, self._num_steps = warm_up, num_steps

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: object) -> None:
        self.ends.append(time.perf_counter())
        number = len(self.ends) - 1 - self._warm_up
        if 0 <= number < self._num_steps and _is_idle(number):
            self.gate.close()
        else:
            self.gate.open()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.gate.open()


def _ratio(goal: Goal, pairs: Sequence[Pair], unnamed: str) -> PersistFigure:
    ratios = [pair.ours.wall / pair.bare.wall for pair in pairs]
    rates = [(pair.nbytes / pair.bare.wall, pair.nbytes / pair.ours.wall) for pair in pairs]
    return _figure(goal, ratios, _medians(rates, rate_text), unnamed)


def _cpu(pairs: Sequence[Pair], unnamed: str) -> PersistFigure:
    costs = [(pair.bare.cpu / pair.nbytes * 2**30, pair.ours.cpu / pair.nbytes * 2**30) for pair in pairs]
    return _figure(CPU, [ours for _, ours in costs], _medians(costs, "{:.2f} s/GiB".format), unnamed)


def _medians(pairs: Sequence[tuple[float, float]], form: Callable[[float], str]) -> tuple[str, ...]:
    """Return the medians, baseline and ours, as text, empty where nothing was measured."""
    return tuple(form(statistics.median(each)) for each in zip(*pairs, strict=True)) or ("", "")


def _p99(steps: StepsMeanwhile) -> PersistFigure:
    if min(len(steps.idle), len(steps.persisting)) < 2:
        reason = f"not run: {len(steps.persisting)} steps met a write and {len(steps.idle)} did not"
        return _figure(STEP, [], ("", ""), reason)
    idle, persisting = (statistics.quantiles(each, n=100)[98] for each in (steps.idle, steps.persisting))
    said = f"{milliseconds(idle)} of {len(steps.idle)} steps", f"{milliseconds(persisting)} of {len(steps.persisting)}"
    return _figure(STEP, [persisting / idle], said, "")


def _figure(goal: Goal, values: Sequence[float], said: tuple[str, ...], unnamed: str) -> PersistFigure:
    value = statistics.median(values) if values else None
    outcome = unnamed if value is None else goal.outcome(value)
    return PersistFigure(
        what=goal.what,
        wanted=str(goal),
        unit=goal.unit,
        value=value,
        range=(min(values), max(values)) if values else None,
        baseline=said[0],
        ours=said[1],
        outcome=outcome,
    )


def _row(figure: PersistFigure) -> list[str]:
    value = "" if figure.value is None else f"{figure.value:.2f} {figure.unit}"
    spread = "" if figure.range is None else f"{figure.range[0]:.2f}-{figure.range[1]:.2f}"
    return [figure.what, value, spread, figure.baseline, figure.ours, figure.wanted, figure.outcome]
