"""Figures of one incarnation."""

from __future__ import annotations

import time
from dataclasses import MISSING, dataclass, fields
from typing import TYPE_CHECKING, Any, TypeVar

from typing_extensions import override

from lightning_moe_ckpt._units import size_text, time_text
from lightning_moe_ckpt.native import BubbleFigures
from lightning_moe_ckpt.planning import LossFigures
from lightning_moe_ckpt.session._pacing import Overhead
from lightning_moe_ckpt.tiers import DeltaFigures, RedundancyFigures

if TYPE_CHECKING:
    from lightning_moe_ckpt.recovery import RestoreSource
    from lightning_moe_ckpt.session._capture import CaptureSession
    from lightning_moe_ckpt.session._tiers import Tiers

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Report:
    """Figures of one incarnation, on this rank."""

    steps: int
    """Optimizer steps taken in this incarnation, replayed ones included."""
    window: int
    """Steps per generation; 0 before the first plan."""
    window_position: int
    """Boundaries of the window under way that are sealed; 0 between windows."""
    nbytes_per_step: float
    """Mean bytes of the segments taken."""
    nbytes_captured: int
    """Bytes of all segments taken."""
    nbytes_persisted: int
    """Bytes of this rank in generations that became durable in this incarnation."""
    dense_nbytes: int
    """Bytes of a snapshot of everything on this rank."""
    reserved_nbytes: dict[str, int]
    """Shared memory that tiers hold on this node for this rank: `host` for its own generations, `peer` for copies that
    it keeps for others."""
    stall_seconds: dict[str, float]
    """Seconds that the training thread waited, by cause.

    Not all of it is lost with a CUDA device, which has work meanwhile.
    """
    device_stall_seconds: dict[str, float]
    """Seconds that the training stream of a CUDA device stood still, by cause, up to where the device is.

    Else empty.
    """
    overhead_seconds: float
    """Seconds of the training thread in hooks of this package, waits included, within `seconds`; not token counts in
    forward passes."""
    seconds: float
    """Wall time since this incarnation was ready for its first batch."""
    generations_complete: int
    generations_committed: int
    generations: dict[str, int]
    """Newest generation whole in each tier, by the boundary at which it is dense; tiers that hold none are left out.

    `storage` means committed on the coordinator, and "my part is stored" on other ranks.
    """
    generations_skipped: dict[str, int]
    """Complete generations that a tier never got, because it was still busy when a newer one was complete."""
    generations_failed: dict[str, int]
    """Generations that a tier was given and some rank does not have there, for good, over all ranks: storage that
    failed, memory
    that was full, a node or a connection that is gone."""
    windows_skipped: int
    """Windows that were not begun, because memory was full of generations that are being read, or was taken away."""
    windows_missed: int
    """Windows in a row, up to now, that gave no generation, whatever for; from 3 on that is an error."""
    resumed_from: int | None
    """Boundary at which this incarnation became, or will become, dense again; `None` for a fresh start."""
    restored_from: dict[str, int]
    """Bytes that this incarnation began from, on this rank, by where they were read: `host`, `peer` or `storage`."""
    missing_experts: tuple[str, ...]
    """Experts of which nothing whole was left, and that began anew; the same on all ranks."""
    replayed_steps: int
    replay_steps: int
    """Steps this incarnation replays in all; 0 where it resumed from a dense generation or not at all."""
    replay_mismatches: int
    restore_seconds: float
    """From the start of `fit` to the first slot loaded."""
    overhead: Overhead
    """Shares of training's time, with what tiers slow steps down by; steps of a replay and the first ones do not count."""
    deltas: DeltaFigures | None = None
    """What copies on other nodes took on the wire, where gradients may be sent for experts that stay chosen."""
    redundancy: RedundancyFigures | None = None
    """What was sent to other nodes, and what was not since they have it anyway; `None` without copies there."""
    bubbles: BubbleFigures | None = None
    """What was copied in the bubbles of a pipeline; `None` without pipeline stages, and where torch copies."""
    upstream_log_nbytes: int = 0
    """Bytes of host memory that this rank takes for what its neighbours in the pipeline would repeat steps from; 0 where all stages
    go back."""
    lost: LossFigures | None = None
    """What restarts have cost, under a policy whose restarts are not exact; up to the newest window."""
    began: bool = True
    """Whether the run was opened; all figures are zero, empty or `None` where `fit` ended before."""

    @classmethod
    def empty(cls) -> Report:
        """Return the report of a fit that ended before it began."""
        overhead = Overhead(
            target=None, hooks=0.0, tiers={}, recent=0.0, gap_steps=0, rests={}, start_seconds=0.0, end_seconds=0.0
        )
        values: dict[str, Any] = {"int": 0, "float": 0.0, "tuple[str, ...]": (), "Overhead": overhead}
        wanted = {each.name: str(each.type) for each in fields(cls) if each.default is MISSING}
        zeros: dict[str, Any] = {k: {} if t.startswith("dict") else values.get(t) for k, t in wanted.items()}
        return cls(**zeros, began=False)

    @property
    def stall_seconds_per_step(self) -> float:
        """Mean wait of the training thread per optimizer step."""
        return sum(self.stall_seconds.values()) / max(1, self.steps)

    @property
    def device_stall_seconds_per_step(self) -> float:
        """Mean time that the training stream of a CUDA device stood still per optimizer step; 0 without one."""
        return sum(self.device_stall_seconds.values()) / max(1, self.steps)

    @property
    def checkpoint_share(self) -> float:
        """Part of the wall time that the training thread waited for checkpoints."""
        return sum(self.stall_seconds.values()) / self.seconds if self.seconds else 0.0

    @property
    def overhead_seconds_per_step(self) -> float:
        """Mean time of the training thread in our hooks per optimizer step."""
        return self.overhead_seconds / max(1, self.steps)

    @property
    def overhead_share(self) -> float:
        """Part of the wall time that the training thread spent in our hooks."""
        return self.overhead_seconds / self.seconds if self.seconds else 0.0

    @property
    def costs(self) -> str:
        """Costs of checkpoints to training, in words."""
        device = f"; the device stood still for {self.device_stall_seconds_per_step * 1e3:.2f} ms"
        return (
            f"checkpoints took {self.overhead_seconds_per_step * 1e3:.2f} ms of the training thread per step "
            f"({self.overhead_share * 1e2:.1f} % of the time), of which it waited "
            f"{self.stall_seconds_per_step * 1e3:.2f} ms{device if self.device_stall_seconds else ''}"
        )

    @override
    def __str__(self) -> str:
        """Return a short table, for `print(callback.report)`; the fields have the rest."""
        if not self.began:
            return "no figures: the fit ended before its run was opened"
        resumed = "nothing: a fresh start"
        if self.resumed_from is not None:
            places = ", ".join(f"{size_text(nbytes)} from {place}" for place, nbytes in self.restored_from.items())
            resumed = f"step {self.resumed_from} in {time_text(self.restore_seconds)}" + (
                f", {places}" if places else ""
            )
        newest = ", ".join(f"{tier} {step}" for tier, step in self.generations.items()) or "no tier has one yet"
        lost = [f"{sum(each.values())} {what}" for what, each in self._not_taken.items() if sum(each.values())]
        lines = {
            "resumed from": resumed,
            "steps": f"{self.steps}" + (f", {self.replayed_steps} of them replayed" if self.replayed_steps else ""),
            "window": f"{self.window} step{'s' * (self.window > 1)}, {size_text(self.nbytes_per_step)} each"
            if self.window
            else "not planned yet",
            "newest step in": newest,
            "generations": ", ".join(
                [f"{self.generations_complete} whole, {self.generations_committed} stored", *lost]
            ),
            "shared memory": ", ".join(f"{k} {size_text(n)}" for k, n in self.reserved_nbytes.items()) or "none",
            "cost": f"{self.overhead_seconds_per_step * 1e3:.2f} ms per step, {self.overhead_share:.1%} of the time, of which "
            f"it waited {self.stall_seconds_per_step * 1e3:.2f} ms",
        }
        if self.bubbles is not None:
            lines["bubbles"] = (
                f"{time_text(self.bubbles.seconds)} per step, {self.bubbles.share:.0%} of copies not beside operations"
            )
        if self.missing_experts:
            lines["began anew"] = ", ".join(self.missing_experts)
        width = max(map(len, lines)) + 2
        return "\n".join(f"{name:<{width}}{text}" for name, text in lines.items())

    @property
    def _not_taken(self) -> dict[str, dict[str, int]]:
        return {"skipped": self.generations_skipped, "failed": self.generations_failed}


def captured_figures(capture: CaptureSession | None) -> dict[str, Any]:
    """Return what has been taken; `None` stands for the time before anything can be."""
    taken = capture.segments_captured if capture is not None else 0
    return {
        "window": len(capture.layout.steps) if capture is not None and capture.layout is not None else 0,
        "window_position": capture.window_position if capture is not None else 0,
        "nbytes_per_step": capture.nbytes_captured / taken if capture is not None and taken else 0.0,
        "nbytes_captured": capture.nbytes_captured if capture is not None else 0,
        "generations_complete": capture.generations_complete if capture is not None else 0,
        "windows_skipped": capture.windows_skipped if capture is not None else 0,
        "windows_missed": capture.misses.in_a_row if capture is not None else 0,
    }


def tier_figures(tiers: Tiers, found: RestoreSource | None) -> dict[str, Any]:
    """Return what tiers hold and skipped; of an earlier incarnation, the generations that this one began from."""
    return {
        "reserved_nbytes": tiers.reserved(),
        "generations": (found.tiers if found is not None else {}) | tiers.newest(),
        "generations_skipped": tiers.skipped(),
        "generations_failed": tiers.failed(),
        "redundancy": next((each.redundancy for each in tiers.workers if each.redundancy is not None), None),
        "deltas": next((worker.deltas for worker in tiers.workers if worker.deltas is not None), None),
    }


def log_figures(
    tiers: Tiers, capture: CaptureSession | None, began: tuple[float, float] | None, hook_seconds: float
) -> dict[str, object]:
    """Return figures for the log of the run, as JSON values; the thread of storage calls it while training goes on.

    Args:
        tiers: what they hold and skipped.
        capture: what has been taken.
        began: `perf_counter` and seconds in hooks as the first batch began.
        hook_seconds: seconds in hooks by now.
    """
    since, hooks = (time.perf_counter(), hook_seconds) if began is None else began
    return {
        "seconds": round(time.perf_counter() - since, 3),
        "overhead_seconds": round(hook_seconds - hooks, 4),
        "newest": tiers.newest(),
        "skipped": tiers.skipped(),
        "failed": tiers.failed(),
        "nbytes_captured": 0 if capture is None else capture.nbytes_captured,
    }


def found_figures(found: RestoreSource | None) -> dict[str, Any]:
    """Return what this incarnation began from; `None` stands for a fresh start."""
    return {
        "resumed_from": found.generation.step if found is not None else None,
        "restored_from": found.restored_from if found is not None else {},
        "missing_experts": tuple(found.chosen.missing) if found is not None else (),
        "replay_steps": len(found.segments) - 1 if found is not None else 0,
    }


def made(part: T | None) -> T:
    """Return the part, which is there once `begin` was called."""
    assert part is not None
    return part
