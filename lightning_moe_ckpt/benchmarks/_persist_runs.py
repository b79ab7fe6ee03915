"""What is measured of persisting: a generation made durable by the real worker, the bare write, and steps meanwhile."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from itertools import count, pairwise
from pathlib import Path
from typing import Any, TypeVar

import obstore
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from obstore.store import S3Store
from typing_extensions import override

from lightning_moe_ckpt.benchmarks._benchmark import Accelerator
from lightning_moe_ckpt.benchmarks._fits import HandOver, at_level, bench_trainer, one_thread, quiet_lightning
from lightning_moe_ckpt.benchmarks._host_restore import made_up_layout, made_up_rows
from lightning_moe_ckpt.benchmarks._model import BenchModel, ModelSize, random_tokens
from lightning_moe_ckpt.callbacks import SparseCheckpoint
from lightning_moe_ckpt.errors import CheckpointError, ConfigurationError
from lightning_moe_ckpt.session._persist import PersistWorker
from lightning_moe_ckpt.session._sealed import Markers, SealedFile, SealedSegment
from lightning_moe_ckpt.session._skips import Skips
from lightning_moe_ckpt.session._worker import Announced
from lightning_moe_ckpt.storage import RecordRows, Retention, RunStore, open_backend, wrapping_backends
from lightning_moe_ckpt.storage._object_options import split_url, translate
from lightning_moe_ckpt.testing._watched_backend import StorageCall, WatchedBackend

T = TypeVar("T")
StorageOptions = Mapping[str, Any]
_NEVER_DELETES = 10**9
"""Generations that are kept while time is measured: deleting comes after what is measured."""
_STRETCH = 16
"""Steps, two windows."""
_LARGE_NBYTES = 2**14
"""A write of fewer bytes is not what a step notices."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """One transfer."""

    nbytes: int
    seconds: float
    cpu_seconds: float
    """Of all threads of the process."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """The same bytes twice."""

    bare: Cost
    ours: Cost


def take_pairs(
    url: str, storage_options: StorageOptions | None, nbytes: int, num_segments: int, hand_over: HandOver[Pair]
) -> None:
    """Store a generation and the same bytes barely, turn by turn, each first in turn."""
    segments = [_segment(number, nbytes // num_segments) for number in range(num_segments)]
    views = [view for view, _ in segments]
    bare = _bare(url, storage_options)
    store = RunStore.open(open_backend(f"{url}/run", storage_options=storage_options), resume="auto")
    store.candidates()
    if store.open_epoch(None) is None:
        raise CheckpointError(f"another process uses {url}. Name a place for this measurement alone.")
    markers, kept = Markers(run_id=store.run_id, rank=0, world_size=1), Retention(last=_NEVER_DELETES)
    with closing(PersistWorker(store, markers, retention=kept)) as worker:
        for turn in count():
            runs = {
                "bare": lambda turn=turn: bare(f"bare-{turn}", views),
                "ours": lambda turn=turn: _persist(store, worker, segments, turn + 1),
            }
            order = ("bare", "ours") if turn % 2 else ("ours", "bare")
            costs = {name: _timed(runs[name], sum(view.nbytes for view in views)) for name in order}
            bare.forget(f"bare-{turn}")
            store.retain(Retention(last=1))
            hand_over(Pair(bare=costs["bare"], ours=costs["ours"]))


def _timed(work: Callable[[], object], nbytes: int) -> Cost:
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return Cost(nbytes=nbytes, seconds=time.perf_counter() - wall, cpu_seconds=time.process_time() - cpu)


def _segment(number: int, nbytes: int) -> tuple[memoryview, RecordRows]:
    """Random bytes in the layout of a segment, of parameters that no segment of another number has."""
    layout = made_up_layout(f"record {number}", nbytes)
    memory = torch.randint(256, (layout.nbytes,), dtype=torch.uint8)
    layout.write_header(memory)
    return memoryview(memory.numpy().data), made_up_rows(layout)


def _persist(store: RunStore, worker: PersistWorker, segments: list[tuple[memoryview, RecordRows]], step: int) -> None:
    """Until a generation is committed."""
    generation = store.name(step)
    worker.begin(Announced(generation=generation, plan_hash="bench", plan_json="{}", num_segments=len(segments)))
    for index, (view, rows) in enumerate(segments):
        file = SealedFile(generation=generation, rank=0, step=step + index, view=view, records=rows)
        worker.add(generation, SealedSegment.of_file(file))
    if not worker.drain(600) or not worker.holds(generation):
        raise CheckpointError(f"not stored: {'; '.join(map(str, worker.take_failures())) or 'not within 600 s'}")


def _bare(url: str, storage_options: StorageOptions | None) -> _RawFiles | _BareObjects:
    """What a generation is compared with: called, it makes bytes durable under names that begin alike."""
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
    """`obstore.put` as it is called without thinking about it, one object per segment."""

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


@dataclass(frozen=True, kw_only=True, slots=True)
class StepsMeanwhile:
    """Seconds of the steps of one fit."""

    idle: list[float]
    """While storage was held still."""
    persisting: list[float]
    """While a segment was written during any part of the step."""


def time_steps(url: str, size: ModelSize, num_steps: int, warm_up: int, accelerator: Accelerator) -> StepsMeanwhile:
    """Train with sparse checkpoints and tell the steps apart.

    In every other stretch of steps writes wait until it is over: there would be no idle step where storage is slow.

    Args:
        url: where checkpoints go.
        size: what is trained.
        num_steps: measured.
        warm_up: before these.
        accelerator: what is trained on.
    """
    writes = _Writes()
    clock = _Clock(writes, warm_up, num_steps)
    watched = wrapping_backends(lambda backend: WatchedBackend(backend, writes))
    # That storage is slower than training, and memory full, is our own doing here.
    with watched, one_thread(), quiet_lightning(), at_level(Skips.__module__, logging.CRITICAL):
        trainer = bench_trainer(
            accelerator=accelerator,
            strategy="auto",
            gradient_clip_val=None,
            callbacks=[clock, SparseCheckpoint(url, window=8)],
            max_steps=warm_up + num_steps + 1,
        )
        torch.manual_seed(0)
        trainer.fit(BenchModel(size), random_tokens(size, warm_up + num_steps + 2))
    found = StepsMeanwhile(idle=[], persisting=[])
    for number, (start, end) in enumerate(pairwise(clock.ends[warm_up:])):
        overlaps = any(begun < end and done > start for begun, done in writes.spans)
        if overlaps != _is_idle(number):
            (found.persisting if overlaps else found.idle).append(end - start)
    return found


def _is_idle(number: int) -> bool:
    """Whether storage is held still during step `number`, counted from the first that is measured."""
    return number // _STRETCH % 2 == 1


class _Writes:
    """When large objects were being written; they wait while `go` is not set."""

    def __init__(self) -> None:
        self.spans: list[tuple[float, float]] = []
        self.go = threading.Event()
        self.go.set()

    def __call__(self, call: StorageCall, operation: Callable[[], T]) -> T:
        if not call.writes or call.nbytes < _LARGE_NBYTES:
            return operation()
        self.go.wait()
        started = time.perf_counter()
        try:
            return operation()
        finally:
            self.spans.append((started, time.perf_counter()))


class _Clock(Callback):
    """Notes when each step was done, and holds writes in every other stretch. Goes before the checkpoint callback.

    After the steps that are measured nothing is held: what ends a fit waits until the last step is stored.
    """

    def __init__(self, writes: _Writes, warm_up: int, num_steps: int) -> None:
        self.ends: list[float] = []
        self._writes, self._warm_up, self._num_steps = writes, warm_up, num_steps

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: object) -> None:
        self.ends.append(time.perf_counter())
        number = len(self.ends) - 1 - self._warm_up
        if 0 <= number < self._num_steps and _is_idle(number):
            self._writes.go.clear()
        else:
            self._writes.go.set()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._writes.go.set()
