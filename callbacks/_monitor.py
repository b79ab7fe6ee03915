"""Log the load of experts and the cost of checkpoints, and show replay in the progress bar.

Values go to the loggers directly, in the row of their step. Values logged through the module would be part of every
step's journal, and Lightning would repeat them in rows in which they were not measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from typing_extensions import override

from lightning_moe_ckpt.callbacks._base import CheckpointCallback, checkpoint_of
from lightning_moe_ckpt.callbacks._loads import LayerLoads
from lightning_moe_ckpt.errors import ConfigurationError
from lightning_moe_ckpt.fit._callbacks import ProgressNote
from lightning_moe_ckpt.fit.loops._trainer import expert_parallel_size, log_row
from lightning_moe_ckpt.metrics import TIERS
from lightning_moe_ckpt.planning import LossFigures
from lightning_moe_ckpt.process import AuditFigures, Overhead, StragglerFigures
from lightning_moe_ckpt.session import Report

REPLAYING = "moe/replaying"


class ExpertLoadMonitor(Callback):
    """Log the load of every MoE layer and, beside a checkpoint callback of this package, its figures.

    Figures of each layer, over the steps since the last row and over all ranks: `moe/load_skew/<layer>` (0: even, 1: one
    expert has all tokens), `moe/min_share/<layer>` and `moe/max_share/<layer>` (shares of processed tokens of the experts
    with fewest and most) and, if the layer counts drops, `moe/dropped_share/<layer>` (over capacity, of all routed).
    Tokens count once per training forward. Accumulation adds up all forwards of a step; forwards that activation
    checkpointing repeats do not count. A layer that processed nothing is left out. If the first step shows that a layer's
    tokens are not counted as its experts process them, that layer is left out and a warning names it.

    `moe/goodput` is the share of the run's wall time, over all its starts, that the steps that count would have taken without checkpoints
    and failures, and `moe/goodput/<part>` the shares of all parts, see `Report.goodput`; the progress bar shows `goodput=93%`.

    Further figures of checkpoints, over the steps since the last row:

    * `moe/stall_seconds/<cause>` and `moe/stall_seconds/all`: seconds per step that the training thread of rank 0 waited;
      `moe/stall_seconds/slowest_rank`: the same of the rank that waited longest;
    * `moe/device_stall_seconds/<cause>`, `/all` and `/slowest_rank`: the same for training's stream on a CUDA device; 0
      without one. This is what training loses there: waiting while the device has work costs nothing;
    * `moe/overhead_seconds`: seconds per step of the training thread of rank 0 in hooks of checkpoints, waits included;
    * `moe/overhead/all`: share of training's time that checkpoints have cost rank 0 so far: in hooks (`moe/overhead/hooks`),
      and by which steps were longer while a tier worked (`moe/overhead/<tier>`); `moe/overhead/recent` is that of the
      second half of training so far;
      `moe/gap_steps` and `moe/rest_seconds/<tier>`: how far apart `overhead_target` keeps windows, and how long a tier rests
      between generations; 0 where it does not;
    * `moe/captured_nbytes_per_step` and `moe/persisted_nbytes_per_second`: bytes that all ranks copied to host memory
      per step, and made durable per second;
    * `moe/window` and `moe/window_position`: steps per window, and steps taken of the current window;
    * `moe/generation/<tier>`: newest generation that is complete in a tier (such as `storage`); `moe/lag_steps/<tier>`:
      steps by which training is ahead of it, negative in replay; `moe/generations_complete` and
      `moe/generations_committed`: numbers of generations; `moe/generations_skipped/<tier>`: generations that a busy tier
      did not get; `moe/generations_failed/<tier>`: generations that some rank failed to keep there. If this grows with
      every generation, the tier is lost, as other nodes are to a rank whose connection to them broke;
    * `moe/straggler/factor`: what the slowest rank takes for its own work in a step, without waiting for others, as a multiple of
      its peers' median; `moe/straggler/<rank>`: the same of each rank that is slow, once it is for long enough;
    * `moe/audits`, `moe/audited_step`, `moe/audit_findings` and `moe/audit_seconds`: number of audits, step of the newest clean one, their
      findings, and seconds in them, with `audit_every_n_steps`;
    * `moe/windows_skipped`: windows that were not begun; `moe/windows_missed`: newest windows in a row that gave no
      generation, for any reason;
    * `moe/replaying`: 1 in the row of a step that a resumed run repeats, else 0. Every repeated step has a row (unless
      the logger's file has one of that step already), and the progress bar shows `replay=3/6`.

    A resumed run counts from where it resumes. Each row costs one small collective, and so does the first step; other
    steps cost none. Reading the counts does not change the order of checkpoints.

    Args:
        every_n_steps: optimizer steps between two rows; `None` for `Trainer(log_every_n_steps=...)`.

    Raises:
        ConfigurationError: an argument is out of range.
    """

    def __init__(self, every_n_steps: int | None = None) -> None:
        if every_n_steps is not None and every_n_steps < 1:
            raise ConfigurationError(f"`ExpertLoadMonitor(every_n_steps={every_n_steps})` must be 1 or more, or None.")
        self.every_n_steps = every_n_steps
        self.latest: dict[str, float] = {}
        """Newest row, on rank 0; it exists without any logger too."""
        self._loads: LayerLoads | None = None
        self._checkpoint: CheckpointCallback | None = None
        self._figures: CheckpointFigures | None = None
        self._notes: list[ProgressNote] = []
        self._step = 0
        self._replay: str | None = None
        """Position of the current batch's step among the steps to replay."""

    # -- hooks

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        device = trainer.strategy.root_device
        upstream = getattr(trainer.strategy, "upstream", None)
        self._loads = LayerLoads(pl_module, ep_size=expert_parallel_size(trainer), device=device, upstream=upstream)
        self._checkpoint = checkpoint_of(trainer)
        self._step, self.latest = trainer.global_step, {}
        if self._checkpoint is not None:
            self._figures = CheckpointFigures(self._checkpoint.report, self._step)
        texts: dict[str, Callable[[], str | None]] = {"goodput": self._goodput, "replay": lambda: self._replay}
        self._notes = [ProgressNote(trainer, name, text) for name, text in texts.items()]

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        # Ask before the step: after the last replayed step the answer has changed.
        self._replay = None
        if self._checkpoint is not None and self._checkpoint.replaying:
            report = self._checkpoint.report
            self._replay = f"{report.replayed_steps + 1}/{report.replay_steps}"
        elif self._loads is not None:
            self._loads.watch()

    @override
    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        if self._loads is not None and self._replay is None:
            self._loads.judge()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == self._step:
            return  # gradients are still accumulating
        self._step = trainer.global_step
        every = self.every_n_steps or int(trainer.log_every_n_steps)  # type: ignore[attr-defined]
        if every and self._step % every == 0:
            guard: Any = getattr(trainer.strategy, "step_guard", None)
            row = self._row(trainer) if guard is None else guard.between(lambda: self._row(trainer))
            if row:
                log_row(trainer, row)
        elif self._replay is not None:
            log_row(trainer, {REPLAYING: 1.0})

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._remove()

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._remove()

    # -- private

    def hold_attempt(self) -> Callable[[], None]:
        """Return a function to restore the present counts: a step may be repeated."""
        undo = [] if self._loads is None else self._loads.hold()

        def put_back() -> None:
            for each in undo:
                each()

        return put_back

    def _row(self, trainer: Trainer) -> dict[str, float] | None:
        assert self._loads is not None
        report = self._checkpoint.report if self._checkpoint is not None else None
        own = self._figures.own(report) if self._figures is not None and report is not None else ()
        if (read := self._loads.read(own)) is None:
            return None
        loads, ranks = read
        row = {f"moe/{name}/{load.layer}": value for load in loads for name, value in load.values().items()}
        if self._figures is not None and report is not None:
            row |= {**self._figures.row(report, self._step, ranks), REPLAYING: float(self._replay is not None)}
        if not trainer.is_global_zero:
            return {}
        self.latest = row
        return row

    def _remove(self) -> None:
        for each in (self._loads, *self._notes):
            if each is not None:
                each.remove()
        self._loads = self._checkpoint = self._figures = self._replay = None
        self._notes = []

    def _goodput(self) -> str | None:
        found = None if self._checkpoint is None else self._checkpoint.goodput
        return None if found is None else f"{found.share:.0%}"


# Shape suffixes: R ranks, 4 the numbers of `own`.


class CheckpointFigures:
    """Rows of figures, each over the steps since the previous row; the first since `report`, of `step`."""

    def __init__(self, report: Report, step: int) -> None:
        self._before, self._step, self._clock = report, step, time.perf_counter()

    def own(self, now: Report) -> tuple[int, int, int, int]:
        """Return this rank's stall and device stall in ns, captured bytes and persisted bytes since the last row."""
        before = self._before
        stalled = sum(now.stall_seconds.values()) - sum(before.stall_seconds.values())
        stood_still = sum(now.device_stall_seconds.values()) - sum(before.device_stall_seconds.values())
        captured = now.nbytes_captured - before.nbytes_captured
        persisted = now.nbytes_persisted - before.nbytes_persisted
        return round(stalled * 1e9), round(stood_still * 1e9), captured, persisted

    def row(self, now: Report, step: int, ranks_R4: Tensor) -> dict[str, float]:
        """Return the next row, by name of the figure, from this rank's report and the `own` figures `ranks_R4` of every rank."""
        clock = time.perf_counter()
        seconds, self._clock = clock - self._clock, clock
        before, self._before = self._before, now
        steps, self._step = step - self._step, step
        newest = {tier: now.generations[tier] for tier in TIERS if tier in now.generations}
        return {
            "moe/goodput": now.goodput.share,
            **{f"moe/goodput/{part}": share for part, share in now.goodput.shares().items()},
            **self._stalls(before, now, steps),
            **self._rates(ranks_R4, steps, seconds),
            "moe/window": now.window,
            "moe/window_position": now.window_position,
            **{f"moe/generation/{tier}": generation for tier, generation in newest.items()},
            **{f"moe/lag_steps/{tier}": step - generation for tier, generation in newest.items()},
            "moe/generations_complete": now.generations_complete,
            "moe/generations_committed": now.generations_committed,
            "moe/windows_skipped": now.windows_skipped,
            "moe/windows_missed": now.windows_missed,
            **{f"moe/generations_skipped/{tier}": number for tier, number in now.generations_skipped.items()},
            **{f"moe/generations_failed/{tier}": number for tier, number in now.generations_failed.items()},
            **_overhead(now.overhead),
            **_stragglers(now.stragglers),
            **_audits(now.audit),
            **_lost(now.lost),
        }

    @staticmethod
    def _stalls(before: Report, now: Report, steps: int) -> dict[str, float]:
        """Return the stalls of this rank in seconds per step, by cause."""
        figures: dict[str, float] = {}
        for name in ("stall_seconds", "device_stall_seconds"):
            totals, earlier = getattr(now, name), getattr(before, name)
            stalls = {cause: (seconds - earlier.get(cause, 0.0)) / steps for cause, seconds in totals.items()}
            figures |= {f"moe/{name}/{cause}": seconds for cause, seconds in stalls.items()}
            figures[f"moe/{name}/all"] = sum(stalls.values())
        return {**figures, "moe/overhead_seconds": (now.overhead_seconds - before.overhead_seconds) / steps}

    @staticmethod
    def _rates(ranks_R4: Tensor, steps: int, seconds: float) -> dict[str, float]:
        """Return the figures over all ranks, as the metrics of the same name have them."""
        nanoseconds, of_device, captured, persisted = ranks_R4.unbind(1)
        longest = int(nanoseconds.max()) / 1e9
        return {
            "moe/stall_seconds/slowest_rank": longest / steps,
            "moe/device_stall_seconds/slowest_rank": int(of_device.max()) / 1e9 / steps,
            "moe/captured_nbytes_per_step": int(captured.sum()) / steps,
            "moe/persisted_nbytes_per_second": int(persisted.sum()) / seconds,
        }


def _overhead(found: Overhead) -> dict[str, float]:
    """Return the cost of checkpoints so far, and the means taken against it."""
    return {
        "moe/overhead/all": found.share,
        "moe/overhead/recent": found.recent,
        "moe/overhead/hooks": found.hooks,
        **{f"moe/overhead/{tier}": share for tier, share in found.tiers.items()},
        "moe/gap_steps": found.gap_steps,
        **{f"moe/rest_seconds/{tier}": seconds for tier, seconds in found.rest_seconds.items()},
    }


def _stragglers(found: StragglerFigures | None) -> dict[str, float]:
    """Return the slowest rank's factor, and the factor of each rank that is slow; nothing before the first look."""
    if found is None or not found.factors:
        return {}
    return {"moe/straggler/factor": max(found.factors), **{f"moe/straggler/{k}": f for k, f in found.slow.items()}}


def _audits(found: AuditFigures) -> dict[str, float]:
    """Return the audits so far; nothing before the first."""
    if not found.audits:
        return {}
    numbers = {
        "moe/audits": found.audits,
        "moe/audit_findings": len(found.findings),
        "moe/audit_seconds": found.seconds,
    }
    return numbers if found.audited is None else {**numbers, "moe/audited_step": found.audited}


def _lost(lost: LossFigures | None) -> dict[str, float]:
    """Return the figures on lost tokens; they exist only if restarts are not exact."""
    if lost is None:
        return {}
    figures = {
        "moe/plt": lost.plt,
        "moe/mlt": lost.mlt,
        "moe/lost_tokens": float(lost.lost),
        "moe/partial_faults": float(lost.faults),
        **{f"moe/unsaved_tokens/{level}": float(number) for level, number in lost.unsaved.items()},
    }
    figures |= {f"moe/{name}": float(nbytes) for name, nbytes in lost.budgets.items()}
    figures |= {f"moe/bandwidth/{name}": rate for name, rate in lost.bandwidths.items()}
    figures |= {f"moe/capped_nbytes/{name}": float(nbytes) for name, nbytes in lost.capped.items()}
    figures |= {f"moe/experts_taken/{level}": float(sum(layers)) for level, layers in lost.taken.items()}
    return figures if lost.k is None else {**figures, "moe/experts_per_generation": float(lost.k)}
