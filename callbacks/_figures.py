"""Compute the cost and progress of checkpoints, from one row of the monitor to the next."""

from __future__ import annotations

import time

from torch import Tensor

from lightning_moe_ckpt.metrics import (
    CapturedPerStep,
    Generations,
    PersistedPerSecond,
    StallPerStep,
    StallShare,
    WindowPosition,
)
from lightning_moe_ckpt.planning import LossFigures
from lightning_moe_ckpt.session import Report

# Shape suffixes: R ranks, 4 the numbers of `own`.


class CheckpointFigures:
    """Rows of figures, each over the steps since the previous row.

    Args:
        report: figures at the beginning of the first row.
        step: step of `report`.
    """

    def __init__(self, report: Report, step: int) -> None:
        self._before, self._step, self._clock = report, step, time.perf_counter()
        # The monitor exchanges all figures at once; metrics would sync one by one.
        self._stall_per_step, self._stall_share = StallPerStep(sync_on_compute=False), StallShare(sync_on_compute=False)
        self._device_stall_per_step = StallPerStep(sync_on_compute=False)
        self._captured = CapturedPerStep(sync_on_compute=False)
        self._persisted = PersistedPerSecond(sync_on_compute=False)
        self._window, self._generations = WindowPosition(sync_on_compute=False), Generations(sync_on_compute=False)

    def own(self, now: Report) -> tuple[int, int, int, int]:
        """Return this rank's stall and device stall in ns, captured bytes and persisted bytes since the last row."""
        before = self._before
        stalled = sum(now.stall_seconds.values()) - sum(before.stall_seconds.values())
        stood_still = sum(now.device_stall_seconds.values()) - sum(before.device_stall_seconds.values())
        captured, persisted = (
            now.nbytes_captured - before.nbytes_captured,
            now.nbytes_persisted - before.nbytes_persisted,
        )
        return round(stalled * 1e9), round(stood_still * 1e9), captured, persisted

    def row(self, now: Report, step: int, ranks_R4: Tensor) -> dict[str, float]:
        """Return the next row, by name of the figure.

        Args:
            now: report of this rank.
            step: step that training has reached.
            ranks_R4: `own` of every rank.
        """
        clock = time.perf_counter()
        seconds, self._clock = clock - self._clock, clock
        before, self._before = self._before, now
        steps, self._step = step - self._step, step
        values = {**self._stalls(before, now, steps), **self._rates(ranks_R4, steps, seconds)}
        self._window.update(now.window, now.window_position)
        self._generations.update(step, now.generations)
        place = self._window.compute()
        return {
            **values,
            "moe/window": place["window"].item(),
            "moe/window_position": place["position"].item(),
            **{f"moe/{name}": value.item() for name, value in self._generations.compute().items()},
            "moe/generations_complete": now.generations_complete,
            "moe/generations_committed": now.generations_committed,
            "moe/windows_skipped": now.windows_skipped,
            "moe/windows_missed": now.windows_missed,
            **{f"moe/generations_skipped/{tier}": number for tier, number in now.generations_skipped.items()},
            **{f"moe/generations_failed/{tier}": number for tier, number in now.generations_failed.items()},
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

    def _rates(self, ranks_R4: Tensor, steps: int, seconds: float) -> dict[str, float]:
        """Return the figures over all ranks."""
        nanoseconds, of_device, captured, persisted = ranks_R4.unbind(1)
        longest = int(nanoseconds.max()) / 1e9
        stalls = (self._stall_per_step, self._device_stall_per_step, self._stall_share)
        for metric in (*stalls, self._captured, self._persisted):
            metric.reset()
        self._stall_per_step.update(longest, steps)
        self._device_stall_per_step.update(int(of_device.max()) / 1e9, steps)
        self._stall_share.update(longest, seconds)
        self._captured.update(int(captured.sum()), steps)
        self._persisted.update(int(persisted.sum()), seconds)
        return {
            "moe/stall_seconds/slowest_rank": self._stall_per_step.compute().item(),
            "moe/device_stall_seconds/slowest_rank": self._device_stall_per_step.compute().item(),
            "moe/stall_share": self._stall_share.compute().item(),
            "moe/captured_nbytes_per_step": self._captured.compute().item(),
            "moe/persisted_nbytes_per_second": self._persisted.compute().item(),
        }


def _lost(lost: LossFigures | None) -> dict[str, float]:
    """Return the figures on lost tokens; they exist only if restarts are not exact."""
    if lost is None:
        return {}
    figures = {
        "moe/plt": lost.plt,
        "moe/mlt": lost.mlt,
        "moe/lost_tokens": float(lost.lost),
        "moe/lossy_faults": float(lost.faults),
        **{f"moe/unsaved_tokens/{level}": float(number) for level, number in lost.unsaved.items()},
    }
    figures |= {f"moe/{name}": float(nbytes) for name, nbytes in lost.budgets.items()}
    figures |= {f"moe/bandwidth/{name}": rate for name, rate in lost.bandwidths.items()}
    figures |= {f"moe/experts_taken/{level}": float(sum(layers)) for level, layers in lost.taken.items()}
    return figures if lost.k is None else {**figures, "moe/experts_per_generation": float(lost.k)}
