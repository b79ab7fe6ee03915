"""Reads what the ranks of the two demo runs wrote, compares the runs, and shows them as a table and a picture.

Every figure comes from the records; nothing is assumed about what happened.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from rich.table import Table

from lightning_moe_ckpt.testing import differences

Line = dict[str, Any]


class RunRecords:
    """The records of one run, of all ranks and attempts.

    Args:
        out: folder of the run.
    """

    def __init__(self, out: Path) -> None:
        self.out = out
        paths = sorted(out.glob("steps.rank*.jsonl"))
        self.ranks = [[json.loads(line) for line in path.read_text().splitlines()] for path in paths]

    def lines(self, event: str, rank: int = 0) -> list[Line]:
        return [line for line in self.ranks[rank] if line["event"] == event]

    def last_step(self, attempt: int) -> int:
        """Newest step that any rank finished in an attempt; 0 if there was none."""
        return max((step for step, _ in self._steps(attempt)), default=0)

    def losses(self, attempt: int) -> dict[int, float]:
        """Training loss in bits per byte by step, mean over the ranks."""
        by_step: dict[int, list[float]] = defaultdict(list)
        for step, line in self._steps(attempt):
            by_step[step].append(line["nats_per_byte"] / math.log(2))
        return {step: sum(values) / len(values) for step, values in sorted(by_step.items())}

    def loss_bits(self) -> tuple[dict[tuple[int, int], str], int]:
        """Exact loss by (rank, step), and how many steps gave other bits when they were taken again."""
        bits: dict[tuple[int, int], str] = {}
        changed = 0
        for rank in range(len(self.ranks)):
            for line in self.lines("step", rank):
                changed += bits.setdefault((rank, line["step"]), line["loss"]) != line["loss"]
        return bits, changed

    def first_time_after(self, attempt: int, step: int) -> float:
        """Return when the slowest rank had finished the first step past `step` in an attempt."""
        times: list[float] = []
        for rank in range(len(self.ranks)):
            lines = self.lines("step", rank)
            times.append(min(line["time"] for line in lines if line["attempt"] == attempt and line["step"] > step))
        return max(times)

    def loads(self) -> npt.NDArray[np.int64]:
        """Bytes routed to each expert, over all ranks: `[steps, layers, experts]`; of a repeated step the last."""
        by_step: dict[int, Any] = {}
        for rank in range(len(self.ranks)):
            own = {line["step"]: np.asarray(line["loads"], dtype=np.int64) for line in self.lines("step", rank)}
            by_step = {step: by_step.get(step, 0) + load for step, load in own.items()}
        return np.stack([by_step[step] for step in sorted(by_step)])

    def bits_per_byte(self) -> float:
        """Return the result of the last validation."""
        return float.fromhex(self.lines("validation")[-1]["bits_per_byte"])

    def seconds(self) -> float:
        """Return the time from the first start of a rank to the last line."""
        started: list[float] = [rank[0]["time"] for rank in self.ranks]
        ended: list[float] = [rank[-1]["time"] for rank in self.ranks]
        return max(ended) - min(started)

    def end_state(self, rank: int) -> dict[str, Any]:
        state: dict[str, Any] = torch.load(self.out / f"end.rank{rank}.pt", weights_only=True)
        return state

    def _steps(self, attempt: int) -> Iterator[tuple[int, Line]]:
        for rank in range(len(self.ranks)):
            yield from ((line["step"], line) for line in self.lines("step", rank) if line["attempt"] == attempt)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Whether two runs ended in the same bits."""

    lines: list[str]
    """One per difference."""
    compared: int
    """Entries of the end states and losses that were compared."""

    @property
    def identical(self) -> bool:
        return not self.lines and self.compared > 0


def compare(clean: RunRecords, killed: RunRecords) -> Verdict:
    """Compare parameters, optimizer state, schedules, random state, and the loss of every step, bit by bit."""
    found: list[str] = []
    compared = 0
    for rank in range(len(clean.ranks)):
        want, got = clean.end_state(rank), killed.end_state(rank)
        found += [f"rank {rank}: {line}" for line in differences(want, got)]
        compared += len(want)
    want_loss, _ = clean.loss_bits()
    got_loss, changed = killed.loss_bits()
    found += [f"loss of {key}: differs" for key in want_loss | got_loss if want_loss.get(key) != got_loss.get(key)]
    if changed:
        found.append(f"{changed} replayed losses differ from those before the kill")
    return Verdict(lines=found, compared=compared + len(want_loss))


def table(clean: RunRecords, killed: RunRecords, killed_at: float, verdict: Verdict) -> Table:
    """The figures of the demo, one per row.

    Args:
        clean: the run in peace.
        killed: the run that lost a worker.
        killed_at: when it did, in seconds since 1970, the clock of the records.
        verdict: of their comparison.
    """
    rows = Table(title="Killed and resumed, against the run without failures", show_header=False, title_justify="left")
    reports = [killed.lines("report", rank)[-1] for rank in range(len(killed.ranks))]
    lost = killed.last_step(attempt=0)
    replayed = sorted(step for step in killed.losses(attempt=1) if step <= lost)
    rows.add_row("steps", f"{killed.last_step(attempt=1)} on {len(killed.ranks)} ranks, killed in step {lost + 1}")
    rows.add_row("window", f"{reports[0]['window']} steps")
    rows.add_row("bytes per step", _share(reports, "nbytes_per_step", "dense_nbytes"))
    stall = max(report["stall_seconds_per_step"] for report in reports)
    rows.add_row("stall per step", f"{stall * 1e3:.2f} ms, on the rank that waited most")
    share = max(report["checkpoint_share"] for report in reports)
    rows.add_row("time spent on checkpointing", f"{share:.2%} of training time")
    again = f"steps {replayed[0]} to {replayed[-1]}" if replayed else "no step"
    rows.add_row("taken again after the restart", f"{again}, dense from step {reports[0]['resumed_from']}")
    waited = killed.first_time_after(1, lost) - killed_at
    rows.add_row("from kill to first new step", f"{waited:.1f} s, process start and imports included")
    rows.add_row("validation, without failures", f"{clean.bits_per_byte():.4f} bits per byte")
    rows.add_row("validation, killed and resumed", f"{killed.bits_per_byte():.4f} bits per byte")
    rows.add_row("seconds, without checkpoints", f"{clean.seconds():.0f} s")
    rows.add_row("seconds, killed and resumed", f"{killed.seconds():.0f} s")
    rows.add_section()
    answer = "yes" if verdict.identical else "no"
    rows.add_row(f"bit-identical: {answer}", f"{verdict.compared} tensors, values and losses compared")
    rows.caption = "Stall and bytes are those of the attempt after the restart."
    return rows


def _share(reports: list[Line], taken: str, whole: str) -> str:
    taken_nbytes, whole_nbytes = (sum(report[key] for report in reports) for key in (taken, whole))
    return f"{taken_nbytes / 1e6:.2f} MB of {whole_nbytes / 1e6:.2f} MB for a dense snapshot ({taken_nbytes / whole_nbytes:.0%})"


def draw(clean: RunRecords, killed: RunRecords, path: Path) -> None:
    """Write a picture: the loss of both runs with the kill and the replay, and the load of every expert over time."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, (losses, loads) = plt.subplots(
        2, 1, figsize=(11, 8), sharex=True, height_ratios=[3, 2], layout="constrained"
    )
    _draw_losses(losses, clean, killed)
    _draw_loads(loads, killed.loads())
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _draw_losses(axes: Any, clean: RunRecords, killed: RunRecords) -> None:
    lost = killed.last_step(attempt=0)
    before, after = killed.losses(attempt=0), killed.losses(attempt=1)
    replay = {step: loss for step, loss in after.items() if step <= lost}
    reference = clean.losses(attempt=0)
    axes.plot(list(reference), list(reference.values()), color="0.75", linewidth=4, label="without failures")
    axes.plot(list(before), list(before.values()), color="tab:blue", linewidth=1, label="until the kill")
    axes.plot(list(after), list(after.values()), color="tab:green", linewidth=1, label="after the restart")
    if replay:
        axes.plot(
            list(replay), list(replay.values()), "o", color="tab:orange", markersize=3, label="taken again (replay)"
        )
    axes.axvline(lost + 0.5, color="tab:red", linestyle="--", label="SIGKILL of one rank")
    for run, marker in ((clean, "s"), (killed, "x")):
        validations = {line["step"]: float.fromhex(line["bits_per_byte"]) for line in run.lines("validation")}
        axes.plot(list(validations), list(validations.values()), f"k{marker}", fillstyle="none", markersize=8)
    axes.set_ylabel("bits per byte (training; squares and crosses: validation)")
    axes.legend()


def _draw_loads(axes: Any, loads_SLE: npt.NDArray[np.int64]) -> None:
    steps, layers, experts = loads_SLE.shape
    share = loads_SLE / np.maximum(1, loads_SLE.sum(axis=2, keepdims=True)) * experts
    image = axes.imshow(
        share.reshape(steps, layers * experts).T,
        aspect="auto",
        interpolation="nearest",
        cmap="magma",
        vmin=0,
        vmax=float(np.quantile(share, 0.995)),
        extent=(0.5, steps + 0.5, layers * experts, 0),
    )
    for layer in range(1, layers):
        axes.axhline(layer * experts, color="white", linewidth=0.5)
    axes.set_yticks([(layer + 0.5) * experts for layer in range(layers)], [f"block {layer}" for layer in range(layers)])
    axes.set_xlabel("optimizer step")
    axes.figure.colorbar(image, ax=axes, label="load of each expert, 1 is even")
