"""Measure where the reducer of `MoEStrategy` spends its time, beside what `moe-ckpt bench strategy` says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace

from lightning.pytorch import Callback
from rich.console import Group, RenderableType

from benchmarks.breakdown import CostMeter, TurnMeter
from benchmarks.costs import Goal
from lightning_moe_ckpt.benchmarks import _strategy
from lightning_moe_ckpt.benchmarks._benchmark import Progress, milliseconds, table_of
from lightning_moe_ckpt.benchmarks._overhead import Variant
from lightning_moe_ckpt.benchmarks._strategy import StrategyFigure
from lightning_moe_ckpt.parallel._reducer import GradientReducer, WholeGradient

GOAL = Goal("strategy", "of a step under DDP", 1.02, "times", at_least=False)
_REDUCING = {
    name: [f"{owner.__module__}:{owner.__name__} {name}"]
    for owner, names in ((GradientReducer, ("prepare", "_on_gradient", "finish")), (WholeGradient, ("send",)))
    for name in names
}
"""Methods of the reduction, by class; hooks contain the copies in `send`."""
_PARTS = ("hooks", "copies", "sums", "gloo", "waits")
_NOTE = """\
CPU per step of hooks and of what comes before backward, of copies into the flat buffer, of the thread that sums, of gloo's threads; \
waits: behind backward"""


def _meter_of(variant: Variant, checkpoint: Callback | None) -> TurnMeter:
    return TurnMeter(CostMeter(_REDUCING))


def measure(options: SimpleNamespace, progress: Progress) -> list[StrategyFigure]:
    """Run the benchmark."""
    return _strategy.measure(SimpleNamespace(**{**vars(options), "meter": _meter_of}), progress)


def table(figures: Sequence[StrategyFigure]) -> RenderableType:
    """Return the figures for people, and what the reducer does below."""
    rows = [
        [f"{each.num_ranks}", each.strategy, *(milliseconds(parts_of(each.metered).get(part)) for part in _PARTS)]
        for each in figures
    ]
    said = [
        f"{each.strategy} on {each.num_ranks} ranks: {each.ratio:.3f} times, goal {GOAL}: {GOAL.outcome(each.ratio)}"
        for each in figures
        if each.strategy != "ddp again"
    ]
    parts = table_of("Where the reducer spends it", ("ranks", "strategy", *_PARTS), rows, _NOTE)
    return Group(_strategy.table(figures), parts, *said)


def parts_of(metered: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Return seconds per step by what the reducer does; empty where nothing is reduced."""
    wall, cpu, threads = metered["wall"], metered["cpu"], metered["threads"]
    if "send" not in cpu:
        return {}
    sums, gloo = (sum(each for thread, each in threads.items() if name in thread) for name in ("reduction", "gloo"))
    hooks = cpu["prepare"] + cpu["_on_gradient"] - cpu["send"]
    return dict(zip(_PARTS, (hooks, cpu["send"], sums, gloo, wall["finish"]), strict=True))
