"""Figures of one incarnation."""

from __future__ import annotations

import time
from dataclasses import MISSING, dataclass, fields
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from lightning_moe_ckpt._units import size_text, time_text
from lightning_moe_ckpt.goodput import Goodput
from lightning_moe_ckpt.native import BubbleFigures
from lightning_moe_ckpt.planning import LossFigures
from lightning_moe_ckpt.process import AuditFigures, Finding, HookClock, Overhead, StragglerFigures, rounded
from lightning_moe_ckpt.tiers import DeltaFigures, RedundancyFigures

if TYPE_CHECKING:
    from lightning_moe_ckpt.session._opening import OpenRun

_NO_TIME, _NO_AUDITS = Goodput(), AuditFigures()


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
    """Mean bytes per segment; 0 before the first."""
    nbytes_captured: int
    """Bytes of all segments."""
    nbytes_persisted: int
    """Bytes of this rank in generations that became durable in this incarnation."""
    dense_nbytes: int
    """Bytes of a full snapshot on this rank."""
    reserved_nbytes: dict[str, int]
    """Bytes of shared memory here for this rank: `host` for own generations, `peer` for copies of other ranks."""
    stall_seconds: dict[str, float]
    """Seconds that the training thread waited, by cause.

    A CUDA device has work during a part of them, so training loses less."""
    device_stall_seconds: dict[str, float]
    """Seconds that a CUDA device's training stream stood still, by cause, up to its current work; empty without one."""
    overhead_seconds: float
    """Seconds of the training thread in our hooks, with waits, within `seconds`; without token counts in forward."""
    seconds: float
    """Wall time since this incarnation was ready for its first batch."""
    generations_complete: int
    generations_committed: int
    generations: dict[str, int]
    """Newest whole generation in each tier, by the boundary at which it is dense; without one, a tier is left out.

    `storage` means committed on the coordinator, and "my part is stored" on other ranks."""
    generations_skipped: dict[str, int]
    """Complete generations that passed a tier by, because it was still busy when a newer generation was complete."""
    generations_failed: dict[str, int]
    """Generations that a tier was given and some rank lost for good: a failed store, full memory, a lost node."""
    windows_skipped: int
    """Windows that did not begin, because memory was full of generations being read, or was taken away."""
    windows_missed: int
    """Consecutive windows up to now without a generation, for any reason; 3 or more are an error."""
    resumed_from: int | None
    """Boundary at which this incarnation became, or will become, dense again; `None` for a fresh start."""
    restored_from: dict[str, int]
    """Bytes read on this rank for the restore, by place: `host`, `peer` or `storage`."""
    missing_experts: tuple[str, ...]
    """Experts without any whole copy, which began anew; the same on all ranks."""
    replayed_steps: int
    replay_steps: int
    """Steps this incarnation replays in all; 0 after a fresh start or a dense generation."""
    replay_mismatches: int
    """Repeated steps that gave other losses than in the run, and those that other ranks repeat, right to rounding."""
    restore_seconds: float
    """Seconds from the start of `fit` to the first loaded slot."""
    overhead: Overhead
    """Shares of training's time, with the slowdown by tiers; replayed steps and the first steps do not count."""
    goodput: Goodput = _NO_TIME
    """Parts of the run's wall time over all its starts so far, as far as this rank knows; `goodput.share` is the productive part."""
    deltas: DeltaFigures | None = None
    """Bytes sent to other nodes, where gradients may be sent for experts that stay chosen."""
    redundancy: RedundancyFigures | None = None
    """Bytes sent to other nodes, and bytes not sent since other nodes have them; `None` without copies there."""
    bubbles: BubbleFigures | None = None
    """Copies in a pipeline's bubbles; `None` without pipeline stages, and where torch copies."""
    stragglers: StragglerFigures | None = None
    """Each rank's own work in a step, and the ranks that are slow at it; `None` where no two ranks have equal work."""
    audit: AuditFigures = _NO_AUDITS
    """Audits of this incarnation: number, newest clean step, findings and cost."""
    upstream_log_nbytes: int = 0
    """Bytes of host memory from which neighbours in the pipeline would repeat steps; 0 if all stages go back."""
    lost: LossFigures | None = None
    """Cost of restarts up to the newest window, under a policy whose restarts are not exact."""
    began: bool = True
    """Whether the run was opened; if `fit` ended before, all figures are zero, empty or `None`."""

    @classmethod
    def empty(cls) -> Report:
        """Return the report of a fit that ended before it began."""
        values: dict[str, Any] = {"int": 0, "float": 0.0, "tuple[str, ...]": (), "Overhead": Overhead()}
        wanted = {field.name: str(field.type) for field in fields(cls) if field.default is MISSING}
        zeros: dict[str, Any] = {k: {} if t.startswith("dict") else values.get(t) for k, t in wanted.items()}
        return cls(**zeros, began=False)

    @property
    def exact(self) -> bool:
        """Whether all repeated steps gave the bits of the run."""
        return not self.replay_mismatches

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Findings of all audits, oldest first."""
        return self.audit.findings

    @property
    def audits(self) -> int:
        """Number of audits with a result."""
        return self.audit.audits

    @property
    def audited(self) -> int | None:
        """Step of the newest clean audit; `None` before one."""
        return self.audit.audited

    @property
    def stall_seconds_per_step(self) -> float:
        """Mean wait of the training thread per optimizer step."""
        return sum(self.stall_seconds.values()) / max(1, self.steps)

    @property
    def device_stall_seconds_per_step(self) -> float:
        """Mean time that a CUDA device's training stream stood still per optimizer step; 0 without CUDA."""
        return sum(self.device_stall_seconds.values()) / max(1, self.steps)

    @property
    def overhead_seconds_per_step(self) -> float:
        """Mean time of the training thread in our hooks per optimizer step."""
        return self.overhead_seconds / max(1, self.steps)

    @property
    def costs(self) -> str:
        """Costs of checkpoints to training, in words."""
        device = f"; the device stood still for {self.device_stall_seconds_per_step * 1e3:.2f} ms"
        return (
            f"checkpoints took {self.overhead_seconds_per_step * 1e3:.2f} ms of the training thread per step "
            f"({self.overhead.hooks * 1e2:.1f} % of the time), of which it waited "
            f"{self.stall_seconds_per_step * 1e3:.2f} ms{device if self.device_stall_seconds else ''}"
        )

    @override
    def __str__(self) -> str:
        """Return a short table, for `print(callback.report)`; the fields have more."""
        if not self.began:
            return "no figures: the fit ended before its run was opened"
        resumed = "nothing: a fresh start"
        if self.resumed_from is not None:
            places = ", ".join(f"{size_text(nbytes)} from {place}" for place, nbytes in self.restored_from.items())
            resumed = f"step {self.resumed_from} in {time_text(self.restore_seconds)}" + (
                f", {places}" if places else ""
            )
        newest = ", ".join(f"{tier} {step}" for tier, step in self.generations.items()) or "no tier has one yet"
        not_taken = {"skipped": self.generations_skipped, "failed": self.generations_failed}
        lost = [f"{sum(each.values())} {what}" for what, each in not_taken.items() if sum(each.values())]
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
            "cost": f"{self.overhead_seconds_per_step * 1e3:.2f} ms per step, {self.overhead.hooks:.1%} of the time, of which "
            f"it waited {self.stall_seconds_per_step * 1e3:.2f} ms",
            "goodput": f"{self.goodput.share:.1%} of {time_text(self.goodput.wall)}, over all starts",
        }
        if self.bubbles is not None:
            lines["bubbles"] = f"{self.bubbles.seconds * 1e3:.1f} ms per step; {self.bubbles.verdict}"
        if self.stragglers is not None and self.stragglers.slow:
            lines["slow"] = str(self.stragglers)
        if self.audit.audits:
            found = "; ".join(each.text for each in self.findings) or "nothing found"
            lines["audits"] = f"{self.audits}, {self.audit.seconds / self.audits:.2f} s each: {found}"
        if self.missing_experts:
            lines["began anew"] = ", ".join(self.missing_experts)
        width = max(map(len, lines)) + 2
        return "\n".join(f"{name:<{width}}{text}" for name, text in lines.items())


class Durations:
    """Durations of one incarnation in seconds, from the start of its fit to the end; written on the training thread."""

    def __init__(self, clock: HookClock) -> None:
        self._clock = clock
        self.start = self.restore = self.end = 0.0
        """Seconds in hooks before the first batch, until a generation was loaded, and until the last step was durable."""
        self.began: tuple[float, float] | None = None
        """`perf_counter` and seconds in hooks at the first batch; `None` before."""

    def first_batch(self) -> None:
        """Note that the first batch begins."""
        self.began = time.perf_counter(), self._clock.seconds
        self.start += self._clock.seconds

    def training(self) -> tuple[float, float]:
        """Return the wall time and the seconds in hooks since the first batch began; zeros before. On any thread."""
        if self.began is None:
            return 0.0, 0.0
        return time.perf_counter() - self.began[0], self._clock.seconds - self.began[1]


def run_figures(run: OpenRun) -> dict[str, Any]:
    """Return the figures of captures, tiers and the restore."""
    capture, tiers, storage, found, layout = run.capture, run.tiers, run.storage, run.found, run.capture.memory.layout
    return {
        "window": len(layout.steps) if layout is not None else 0,
        "window_position": len(capture.window.segments) if capture.window is not None else 0,
        "nbytes_per_step": capture.nbytes_captured / max(1, capture.segments_captured),
        "nbytes_captured": capture.nbytes_captured,
        "nbytes_persisted": storage.nbytes_complete,
        "generations_complete": capture.generations_complete,
        "generations_committed": storage.num_complete,
        "windows_skipped": capture.windows_skipped,
        "windows_missed": capture.missed_windows.in_a_row,
        "reserved_nbytes": tiers.reserved(),
        "generations": (found.tiers if found is not None else {}) | tiers.newest(),
        "generations_skipped": tiers.skipped(),
        "generations_failed": tiers.failed(),
        "stragglers": None if tiers.stragglers is None else tiers.stragglers.figures,
        "redundancy": next((each.redundancy for each in tiers.workers if each.redundancy is not None), None),
        "deltas": next((worker.deltas for worker in tiers.workers if worker.deltas is not None), None),
        "resumed_from": found.generation.step if found is not None else None,
        "restored_from": found.restored_from if found is not None else {},
        "missing_experts": tuple(found.chosen.missing) if found is not None else (),
        "replay_steps": len(found.steps) - 1 if found is not None else 0,
    }


def measured_figures(run: OpenRun) -> dict[str, Any]:
    """Return figures of this incarnation for the log, from which a profile is made; `None` for what is not known.

    Seconds of means: `step_seconds` of a quiet step without hooks, with its relative spread `step_noise`; `hooks_quiet_seconds` and
    `hooks_captured_seconds` of the training thread in hooks, by step; `repeated_seconds` of a repeated step. `slowed_seconds` has by tier the
    seconds by which steps were longer in all, and `nbytes` the bytes that this rank has brought there. `capture_nbytes` is the mean of a
    captured step, `nbytes_per_second` the newest speed of each tier at work. `restored_nbytes` has by place what the restore has read.
    `own` has the parts of goodput since the last sign of life of the start before, `warm_up_seconds` the part of its `startup` that first steps took
    longer; `None` before it is known.
    """
    capture, account, found, governor = run.capture, run.account, run.found, run.tiers.governor
    own, again = account.own(), account.taken_again()
    return {
        **governor.measured.figures(),
        "repeated_seconds": own.repeated / again["repeated"] if again["repeated"] else None,
        "repeated_steps": again["repeated"],
        "lost_steps": again["lost"],
        "capture_nbytes": capture.nbytes_captured / max(1, capture.segments_captured),
        "nbytes": {"host": capture.nbytes_captured, "storage": run.storage.nbytes_complete},
        "nbytes_per_second": {worker.name: worker.rate for worker in run.tiers.workers},
        "restored_nbytes": found.restored_from if found is not None else {},
        "warm_up_seconds": account.warm_up,
        "own": rounded(own),
    }
