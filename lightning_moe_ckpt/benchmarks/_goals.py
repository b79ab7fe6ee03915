"""What the CUDA engine is meant to reach, and whether a measurement does.

Goals are relative to a baseline of the same run where there is one: absolute rates depend on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from lightning_moe_ckpt.benchmarks._benchmark import Goal
from lightning_moe_ckpt.benchmarks._native_figure import NativeFigure, attempt

Measurement = Callable[[], float]


GOALS = (
    Goal("G1", "device to host, slices of 1 MiB, of one pinned copy", 95, "%"),
    Goal("G2", "the same while matrices are multiplied, of G1's rate", 90, "%"),
    Goal("G3", "slowdown of those multiplications", 1.5, "%", at_least=False),
    Goal("G4", "slowdown of a loop bound by memory", 3, "%", at_least=False),
    Goal("G5", "delay added to a 4 KiB copy of training, p99", 0.8, "ms", at_least=False),
    Goal("G6", "8192 slices of 4 KiB, of torch's loop", 5, "times"),
    Goal("G7", "time of a submit of 10,000 slices", 50, "us", at_least=False),
    Goal("G8", "CPU of the process while copying", 5, "% of a core", at_least=False),
    Goal("G9", "compression, of torch", 4, "times"),
    Goal("G10", "replay of 8 steps, of torch fused", 4, "times"),
    Goal("G11", "checksum", 8, "GB/s"),
    Goal("G12", "mapping and registering host memory", 4, "GB/s"),
    Goal("G13", "loading both libraries, beyond importing the package", 50, "ms", at_least=False),
)


def judge(measurements: Mapping[str, Measurement], reason: str) -> list[NativeFigure]:
    """A row per goal.

    Args:
        measurements: by name of the goal; what is missing was not run.
        reason: why those that are missing are.
    """
    return [_judge_one(goal, measurements.get(goal.name), reason) for goal in GOALS]


def _judge_one(goal: Goal, measure: Measurement | None, reason: str) -> NativeFigure:
    what, wanted = f"{goal.name} {goal.what}", f"goal {goal}"
    if measure is None:
        note = f"{wanted}: not run on a GPU: {reason}"
        return NativeFigure(what=what, how="compiled engine", value=None, unit=goal.unit, note=note)
    figure = attempt(what, "compiled engine", measure, unit=goal.unit, note=wanted)
    if figure.value is None:
        return figure
    return replace(figure, note=f"{wanted}: {goal.outcome(figure.value)}")
