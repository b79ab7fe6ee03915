"""Runs of the quality benchmark: real processes, real SIGKILLs, and what their records come to."""

from __future__ import annotations

import multiprocessing
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from lightning_moe_ckpt.benchmarks._benchmark import Accelerator, Progress
from lightning_moe_ckpt.benchmarks._quality_cases import Case, Loss, Scale, System
from lightning_moe_ckpt.benchmarks._quality_life import Line, QualityFit, read_record
from lightning_moe_ckpt.errors import CheckpointError
from lightning_moe_ckpt.metrics import load_skew
from lightning_moe_ckpt.testing import Kill, LifeFailed, LifeResult, assert_same_end, run_lives
from lightning_moe_ckpt.tiers import shared_directory

_SETTLE = 60.0
"""Seconds: a fault strikes when what was complete is durable, so that it takes the same wherever the benchmark runs."""
_TIMEOUT = 1800.0
"""Seconds of one life; a machine may be busy with other things."""


@dataclass(frozen=True, kw_only=True, slots=True)
class QualityRun:
    """One policy with one seed."""

    system: System
    loss: Loss
    boosted: bool
    seed: int
    curve: list[tuple[int, float]]
    """Validation loss in bits per byte by step, of the life that went on from there."""
    resumed: list[tuple[int, float]]
    """The same right after each recovery, by the step that was recovered; of the fault-free run where others have faults."""
    killed_at: list[int]
    """Steps that were done when a fault struck."""
    identical: bool | None
    """Whether state, random state and every loss have the bits of the fault-free run; `None` where it is not asked."""
    skew: float
    """Normalised HHI of the tokens that the experts of a layer processed, mean over layers; 0 unless fault-free."""
    dropped: float
    """Part of the tokens that were dropped over capacity; 0 unless fault-free."""
    plt: float
    mlt: float
    k: int | None
    """Experts per layer that generations took to storage at the end, where the policy counts them."""
    lossy_faults: int
    """Recoveries that lost something."""
    lost: int
    """Tokens, each as often as it was routed."""
    processed: int
    """Likewise; 0 where nothing can be lost."""
    captured: float
    """Bytes per step to memory, in the last life, as part of a dense snapshot."""
    persisted: float
    """The same to storage."""
    boosted_steps: int
    """Steps in which some expert was in debt, hence had more capacity, times how many were."""
    repaid: int
    """Lost tokens that experts have made up for by the end, as the boost counts them."""
    seconds: float

    @property
    def final(self) -> float:
        """Validation loss after the last step."""
        return self.curve[-1][1]


@dataclass(frozen=True, kw_only=True)
class _Task:
    """Runs that one process does after the other. The sparse run is compared with the fault-free one before it."""

    cases: tuple[Case, ...]
    seed: int
    scale: Scale
    folder: str | None
    accelerator: Accelerator


def run_all(
    cases: Sequence[Case],
    seeds: Sequence[int],
    scale: Scale,
    *,
    jobs: int,
    folder: Path | None,
    accelerator: Accelerator,
    progress: Progress,
) -> list[QualityRun]:
    """Every case with every seed, in any order.

    Args:
        cases: what is trained.
        seeds: each with data, initial weights and fault steps of its own.
        scale: how much.
        jobs: runs at once.
        folder: for checkpoints, `None` for the temporary directory.
        accelerator: what is trained on.
        progress: see `Progress`.

    Raises:
        CheckpointError: a run did not end as scripted.
    """
    tasks = _tasks(cases, seeds, scale, folder, accelerator)
    total, runs = len(cases) * len(seeds), []
    progress("final validation loss after faults", 0, total)
    # Forked before this process has run anything parallel, each forks the lives of its runs.
    with multiprocessing.get_context("fork").Pool(min(jobs, len(tasks))) as pool:
        for done in pool.imap_unordered(_run_task, tasks):
            runs += done
            progress("final validation loss after faults", len(runs), total)
    return runs


def _tasks(
    cases: Sequence[Case], seeds: Sequence[int], scale: Scale, folder: Path | None, accelerator: Accelerator
) -> list[_Task]:
    paired = tuple(case for case in cases if case.system in ("none", "sparse"))
    groups = [paired, *((case,) for case in cases if case not in paired)]
    where = None if folder is None else str(folder)
    return [
        _Task(cases=group, seed=seed, scale=scale, folder=where, accelerator=accelerator)
        for group in groups
        if group
        for seed in seeds
    ]


def _run_task(task: _Task) -> list[QualityRun]:
    """In a process of its own."""
    torch.set_num_threads(1)
    runs: list[QualityRun] = []
    reference: Sequence[LifeResult] = ()
    with _folders(task.folder) as (folder, memory):
        for case in task.cases:
            started = time.monotonic()
            workdir = folder / case.system
            fit = QualityFit(
                case=case,
                scale=task.scale,
                seed=task.seed,
                memory=str(memory / case.system),
                record=str(folder / f"{case.system}.jsonl"),
                accelerator=task.accelerator,
            )
            lives = _live(fit, workdir)
            if case.system == "none":
                reference = lives
            same = _is_same(reference, lives) if case.system == "sparse" else None
            runs.append(_read(fit, same, time.monotonic() - started))
    return runs


def _live(fit: QualityFit, workdir: Path) -> list[LifeResult]:
    steps = fit.scale.kill_steps(fit.seed) if fit.case.loss != "nothing" else []
    kills = [Kill(phase="after_backward", step=step, settle=_SETTLE) for step in steps]
    workdir.mkdir()
    (workdir / "run").mkdir()
    try:
        return run_lives(fit, url=(workdir / "run").as_uri(), workdir=workdir, kills=kills, timeout=_TIMEOUT)
    except LifeFailed as failed:
        raise CheckpointError(f"{fit.case}, seed {fit.seed}: {failed}") from failed


def _is_same(reference: Sequence[LifeResult], lives: Sequence[LifeResult]) -> bool:
    try:
        assert_same_end(reference, lives)
    except AssertionError:
        return False
    return True


def _read(fit: QualityFit, same: bool | None, seconds: float) -> QualityRun:
    curve = {line["step"]: line["bits"] for line in read_record(fit.record, "validation")}
    # Of a step that was taken twice, the second one counts.
    steps = {line["step"]: line for line in read_record(fit.record, "step")}
    (end,) = read_record(fit.record, "end")
    lost = end.get("lost", 0)
    skew, dropped = _spread(end) if fit.case.loss == "nothing" else (0.0, 0.0)
    return QualityRun(
        system=fit.case.system,
        loss=fit.case.loss,
        boosted=fit.case.boosted,
        seed=fit.seed,
        curve=sorted(curve.items()),
        resumed=[(line["step"], line["bits"]) for line in read_record(fit.record, "resumed", "beside")],
        killed_at=fit.scale.kill_steps(fit.seed) if fit.case.loss != "nothing" else [],
        identical=same,
        skew=skew,
        dropped=dropped,
        plt=end.get("plt", 0.0),
        mlt=end.get("mlt", 0.0),
        k=end.get("k"),
        lossy_faults=end.get("faults", 0),
        lost=lost,
        processed=end.get("processed", 0),
        captured=end.get("captured", 0.0),
        persisted=end.get("persisted", 0.0),
        boosted_steps=sum(line["boosted"] for line in steps.values()),
        repaid=lost - steps[max(steps)]["debt"] if fit.case.boosted else 0,
        seconds=seconds,
    )


def _spread(end: Line) -> tuple[float, float]:
    """Skew and dropped part, of a run with one life."""
    skews = [float(load_skew(torch.tensor(tokens))) for tokens in end["tokens"]]
    kept, dropped = (sum(sum(row) for row in end[name]) for name in ("tokens", "drops"))
    return sum(skews) / len(skews), dropped / (kept + dropped)


@contextmanager
def _folders(parent: str | None) -> Iterator[tuple[Path, Path]]:
    """A folder for checkpoints and one on the tmpfs, both gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="moe-ckpt-bench-", dir=parent) as folder:
        memory = tempfile.mkdtemp(prefix="moe-ckpt-bench-", dir=shared_directory())
        try:
            yield Path(folder), Path(memory)
        finally:
            shutil.rmtree(memory)
