"""Reads what the ranks of both trainings of the demo wrote, compares these, and shows tables and a picture.

Every figure comes from the records; nothing is assumed about what happened.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.table import Table

from demo import Kill
from lightning_moe_ckpt.testing import differences

Line = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """What happened after a kill."""

    lost: int
    """Newest step that any rank had finished."""
    replayed: dict[int, float]
    """Steps that were taken again, with their loss in bits per byte."""
    begin_seconds: float
    """From the kill until all ranks trained again."""
    seconds: float
    """From the kill until the slowest rank had finished the first new step."""
    stayed: int
    """Ranks that went on in the same process."""


class RunRecords:
    """The records of one training, of all ranks and all their processes.

    Args:
        out: folder of the training.
    """

    def __init__(self, out: Path) -> None:
        self.out = out
        paths = sorted(out.glob("steps.rank*.jsonl"))
        self.ranks = [[json.loads(line) for line in path.read_text().splitlines()] for path in paths]

    def lines(self, event: str, rank: int = 0) -> list[Line]:
        return [line for line in self.ranks[rank] if line["event"] == event]

    def losses(self) -> dict[int, float]:
        """Training loss in bits per byte by step, mean over the ranks."""
        return _bits_per_byte([line for rank in range(len(self.ranks)) for line in self.lines("step", rank)])

    def recovery(self, killed_at: float) -> Recovery:
        """Return what happened after a kill at this time, in seconds since 1970."""
        before: list[Line] = []
        after: list[list[Line]] = []
        stayed, begun = 0, 0.0
        for rank in range(len(self.ranks)):
            begins = self.lines("begin", rank)
            index = next(index for index, line in enumerate(begins) if line["time"] > killed_at)
            since, until = (begins[at]["time"] if at < len(begins) else math.inf for at in (index, index + 1))
            begun = max(begun, since)
            stayed += begins[index]["pid"] == begins[index - 1]["pid"]
            steps = self.lines("step", rank)
            before += [line for line in steps if line["time"] < since]
            after.append([line for line in steps if since < line["time"] < until])
        lost: int = max(line["step"] for line in before)
        first = max(min(line["time"] for line in lines if line["step"] > lost) for lines in after)
        replayed = _bits_per_byte([line for lines in after for line in lines if line["step"] <= lost])
        return Recovery(
            lost=lost,
            replayed=replayed,
            begin_seconds=begun - killed_at,
            seconds=first - killed_at,
            stayed=stayed,
        )

    def loss_bits(self) -> tuple[dict[tuple[int, int], str], int]:
        """Exact loss by (rank, step), and how many steps gave other bits when they were taken again."""
        bits: dict[tuple[int, int], str] = {}
        changed = 0
        for rank in range(len(self.ranks)):
            for line in self.lines("step", rank):
                changed += bits.setdefault((rank, line["step"]), line["loss"]) != line["loss"]
        return bits, changed

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


def _bits_per_byte(lines: list[Line]) -> dict[int, float]:
    """Loss by step, mean over the ranks."""
    by_step: dict[int, list[float]] = defaultdict(list)
    for line in lines:
        by_step[line["step"]].append(line["nats_per_byte"] / math.log(2))
    return {step: sum(values) / len(values) for step, values in sorted(by_step.items())}


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
        found.append(f"{changed} replayed losses differ from those before a kill")
    return Verdict(lines=found, compared=compared + len(want_loss))


def recoveries(killed: RunRecords, kills: Sequence[Kill]) -> Table:
    """Return a row per kill, with the seconds until training went on."""
    rows = Table(title="From SIGKILL of one rank to the first new step", title_justify="left")
    rows.add_column("launcher")
    for column in ("in step", "trains\nagain", "first\nnew step", "steps\nreplayed", "processes\nkept"):
        rows.add_column(column, justify="right")
    for kill in kills:
        found = killed.recovery(kill.time)
        rows.add_row(
            *(kill.launcher, f"{found.lost + 1}", f"{found.begin_seconds:.1f} s", f"{found.seconds:.1f} s"),
            *(f"{len(found.replayed)}", f"{found.stayed} of {len(killed.ranks)}"),
        )
    return rows


def figures(clean: RunRecords, killed: RunRecords, verdict: Verdict) -> Table:
    """Return the other figures, one per row.

    Args:
        clean: the training in peace.
        killed: the one that lost ranks.
        verdict: of their comparison.
    """
    rows = Table(
        title="Killed and resumed, against the training without failures", show_header=False, title_justify="left"
    )
    reports = [killed.lines("report", rank)[-1] for rank in range(len(killed.ranks))]
    rows.add_row("steps", f"{max(killed.losses())} on {len(killed.ranks)} ranks")
    rows.add_row("window", f"{reports[0]['window']} steps")
    rows.add_row("bytes per step", _share(reports, "nbytes_per_step", "dense_nbytes"))
    stall = max(report["stall_seconds_per_step"] for report in reports)
    rows.add_row("stall per step", f"{stall * 1e3:.2f} ms, on the rank that waited most")
    share = max(report["hooks_share"] for report in reports)
    rows.add_row("time spent in hooks of checkpoints", f"{share:.2%} of training time")
    rows.add_row("validation, without failures", f"{clean.bits_per_byte():.4f} bits per byte")
    rows.add_row("validation, killed and resumed", f"{killed.bits_per_byte():.4f} bits per byte")
    rows.add_section()
    answer = "yes" if verdict.identical else "no"
    rows.add_row(f"bit-identical: {answer}", f"{verdict.compared} tensors, values and losses compared")
    rows.caption = "Stall and bytes are those after the last kill."
    return rows


def _share(reports: list[Line], taken: str, whole: str) -> str:
    taken_nbytes, whole_nbytes = (sum(report[key] for report in reports) for key in (taken, whole))
    return f"{taken_nbytes / whole_nbytes:.0%} of the {whole_nbytes / 1e6:.1f} MB of a full copy"


def draw(clean: RunRecords, killed: RunRecords, kills: Sequence[Kill], path: Path) -> None:
    """Write a picture: the loss of both trainings with kills and replays, and below it their difference.

    Args:
        clean: the training in peace.
        killed: the one that lost ranks.
        kills: when, and under which launcher.
        path: of the picture; its suffix decides the format.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, (losses, differs) = plt.subplots(
        2, 1, figsize=(10, 6.4), sharex=True, height_ratios=[7, 3], layout="constrained"
    )
    times = {1: "once", 2: "twice", 3: "three times"}.get(len(kills), f"{len(kills)} times")
    figure.suptitle(f"One training, run twice: without failures, and with a rank killed {times}", fontsize="x-large")
    _draw_losses(losses, clean, killed, kills)
    _draw_differences(differs, clean, killed)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _draw_losses(axes: Any, clean: RunRecords, killed: RunRecords, kills: Sequence[Kill]) -> None:
    for run, style in (
        (clean, {"color": "0.78", "linewidth": 5, "label": "without failures"}),
        (killed, {"color": "tab:blue", "linewidth": 1.2, "label": "killed and resumed"}),
    ):
        losses = run.losses()
        axes.plot(list(losses), list(losses.values()), **style)
    for index, kill in enumerate(kills):
        found, last = killed.recovery(kill.time), index == len(kills) - 1
        axes.plot(
            *(list(found.replayed), list(found.replayed.values()), "o"),
            color="tab:orange",
            markersize=4,
            label="steps repeated after a kill" if last else None,
        )
        axes.axvline(found.lost + 0.5, color="tab:red", linestyle="--", label="SIGKILL of one rank" if last else None)
        axes.annotate(
            f"{kill.launcher}\nnew step after {found.seconds:.1f} s",
            (found.lost + 2, 0.97),
            xycoords=("data", "axes fraction"),
            va="top",
            fontsize="small",
        )
    axes.set_ylabel("training loss (bits per byte)")
    axes.legend(loc="center right")


def _draw_differences(axes: Any, clean: RunRecords, killed: RunRecords) -> None:
    """Of every rank at every step, in units of the loss's last float32 bit: anything but zero would be far off the line."""
    want, got = clean.loss_bits()[0], killed.loss_bits()[0]
    both = sorted(want.keys() & got.keys())
    units = [_last_bits(float.fromhex(want[key]), float.fromhex(got[key])) for key in both]
    axes.plot([step for _, step in both], units, ".", color="tab:blue", markersize=3)
    equal = sum(want[key] == got[key] for key in both)
    axes.set_title(
        f"Difference of the two losses: {equal} of {len(want.keys() | got.keys())} are equal to the last bit",
        fontsize="medium",
    )
    axes.set_ylim(*np.array([-1.1, 1.1]) * max(2.0, *np.abs(units)))
    axes.set_ylabel("last bits of float32")
    axes.set_xlabel("optimizer step")
    axes.grid(axis="y", alpha=0.4)


def _last_bits(want: float, got: float) -> float:
    return (got - want) / float(np.spacing(np.float32(abs(want))))
