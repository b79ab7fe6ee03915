"""Measure what checkpoints in memory add to a step beside those of DLRover and lm-resiliency, where these are installed.

`moe-ckpt bench overhead` measures the same beside what every installation has; here are systems of their own. Each saves
in the way its documentation shows first.

Sources: DLRover Flash Checkpoint, github.com/intelligent-machine-learning/dlrover, `docs/blogs/flash_checkpoint.md`; lm-resiliency's
in-memory checkpoints after Gemini (2023), github.com/LMResiliency/lm-resiliency, `docs/gemini.md`.
"""

from __future__ import annotations

import importlib
import logging
import os
import time
import warnings
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from rich.console import Group, RenderableType
from torch.distributed import HashStore  # type: ignore[attr-defined]  # exported at run time only
from typing_extensions import override

from benchmarks.costs import Goal
from lightning_moe_ckpt.benchmarks import _overhead
from lightning_moe_ckpt.benchmarks._benchmark import Progress
from lightning_moe_ckpt.benchmarks._overhead import OverheadFigure
from lightning_moe_ckpt.benchmarks._variants import PEERS, VARIANTS, SavingEvery, Variant, nbytes_of, state_dicts

PEER = Goal("peer", "of DLRover MEMORY at the same cadence", 0.5, "times", at_least=False)
GOALS = {
    "sparse8-memory": Goal("sparse", "sparse, window 8, memory only", 2.0, "ms", at_least=False),
    "dense1-memory": Goal("dense", "dense at every step, memory only", 4.0, "ms", at_least=False),
    "dense4-memory": Goal("dense 4", "dense every 4 steps, memory only", 1.0, "ms", at_least=False),
}
"""Limits of the time added to a step."""
IDLE = Goal("idle", "steps at which nothing is taken", 0.3, "ms", at_least=False)
SHARE = Goal("share", "of a step, with storage", 0.03, "of a step", at_least=False)
_OURS = ("sparse4-memory", "dense1-memory", "dense4-memory")
_MODULES = {"dlrover": "dlrover", "lm-resiliency": "lm_resiliency"}


def measure(options: SimpleNamespace, progress: Progress) -> list[OverheadFigure]:
    """Run the benchmark; without `--variants` of ours in memory, and of the others that are installed."""
    installed = [each.name for each in _OTHERS if find_spec(_MODULES[each.system]) is not None and options.ranks == 1]
    chosen = options.variants or ",".join([*_OURS, *installed])
    return _overhead.measure(SimpleNamespace(**{**vars(options), "variants": chosen}), progress)


def table(figures: Sequence[OverheadFigure]) -> RenderableType:
    """Return the figures for people."""
    return Group(_overhead.table(figures), *judged(figures), *_judged({figure.variant: figure for figure in figures}))


def judged(figures: Sequence[OverheadFigure]) -> list[str]:
    """Return a line per goal that something was measured for."""
    by_name, lines = {figure.variant: figure for figure in figures}, list[str]()

    def judge(goal: Goal, measured: float, form: str) -> None:
        lines.append(f"{goal.what}: {form.format(measured)}, goal {goal}: {goal.outcome(measured)}")

    for name, goal in GOALS.items():
        if (figure := by_name.get(name)) is None:
            continue
        judge(goal, figure.added_seconds * 1e3, "{:+.2f} ms")
        if figure.added_idle_seconds is not None:
            judge(IDLE, figure.added_idle_seconds * 1e3, "{:+.2f} ms")
    for name, figure in by_name.items():
        if VARIANTS[name].system in ("sparse", "dense") and not VARIANTS[name].memory_only:
            share = figure.added_seconds / figures[0].mean_seconds
            lines.append(f"{name}, with storage: {share:.1%} of a step, goal at most 3%: {SHARE.outcome(share)}")
    return lines


def _judged(figures: dict[str, OverheadFigure]) -> list[str]:
    lines = []
    for every in (1, 4):
        ours, theirs = figures.get(f"dense{every}-memory"), figures.get(f"dlrover{every}")
        if ours is not None and theirs is not None and theirs.added_seconds > 0:
            ratio = ours.added_seconds / theirs.added_seconds
            lines.append(f"dense every {every}, {PEER.what}: {ratio:.2f} times, goal {PEER}: {PEER.outcome(ratio)}")
    if not {name for name in figures if name.startswith(tuple(_MODULES))}:
        lines.append(f"nothing to compare with is installed: {', '.join(_MODULES)}")
    return lines


class DlroverCheckpoint(SavingEvery):
    """DLRover's Flash Checkpoint into shared memory (`StorageType.MEMORY`), one rank, without its agent; the folder stays empty."""

    _saver: Any = None
    _memory: Any = None

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        _own_world()
        self._name = f"moe-ckpt-bench-{os.getpid()}"
        os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        os.environ["TORCHELASTIC_RUN_ID"] = self._name  # of its memory
        logging.disable(logging.WARNING)
        ddp: Any = importlib.import_module("dlrover.trainer.torch.flash_checkpoint.ddp")
        self._saver, self._memory = ddp.DdpCheckpointer(str(self._folder)), ddp.StorageType.MEMORY

    @override
    def save(self, step: int, trainer: Trainer, module: LightningModule) -> int:
        state = {"step": step, **state_dicts(trainer, module)}
        self._saver.save_checkpoint(step, state, storage_type=self._memory)
        return nbytes_of(state)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        for path in Path("/dev/shm").glob(f"{self._name}*"):  # noqa: S108  # it leaves its memory behind
            path.unlink(missing_ok=True)


class LmResiliencyCheckpoint(SavingEvery):
    """lm-resiliency's in-memory checkpoint on a single rank, without replicas; copies until the next optimizer step."""

    _keeper: Any = None

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        _own_world()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            package: Any = importlib.import_module("lm_resiliency")
            experimental: Any = importlib.import_module("lm_resiliency.experimental")
        config = package.InMemoryCkptConfig(
            enable=True, interval=self._every, disk_flush_interval=0, disk_folder=str(self._folder), run_id="bench",
            verify_integrity=True, pin_memory=False, replication_jump=1,
        )  # fmt: skip
        self._keeper = experimental.InMemoryCheckpointManager(config)

    @override
    def save(self, step: int, trainer: Trainer, module: LightningModule) -> int:
        state = state_dicts(trainer, module)
        self._keeper.save(state, step)
        return nbytes_of(state)

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: object) -> None:
        began = time.perf_counter()
        self._keeper.maybe_wait()
        self.seconds += time.perf_counter() - began


def _own_world() -> None:
    """Make a process group of this process alone, as these systems want."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)


PEERS.update({"dlrover": DlroverCheckpoint, "lm-resiliency": LmResiliencyCheckpoint})
_OTHERS = [
    *(Variant("dlrover", every, memory_only=True) for every in (1, 4)),
    Variant("lm-resiliency", 4, memory_only=True),
]
VARIANTS.update({each.name: each for each in _OTHERS})
