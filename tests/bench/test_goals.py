"""Goals are judged and told as they are: met, missed, failed, or not run; and figures reach a file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import native
from benchmarks.documents import write_document
from benchmarks.native import MIB, NativeFigure
from benchmarks.native_goals import (
    CHUNKS_MIB,
    DEPTHS,
    GOALS,
    CopyScale,
    DeviceCopies,
    judge,
)
from benchmarks.native_kernels import Kernels
from lightning_moe_ckpt.benchmarks._benchmark import Machine
from lightning_moe_ckpt.native import _library
from lightning_moe_ckpt.native._cpu import CompiledCpuEngine


def _failing() -> float:
    raise RuntimeError("no such kernel")


def test_every_goal_has_a_row_whatever_was_run() -> None:
    """Thirteen, in order; without a device each says that it was not run and why."""
    rows = judge({}, "no driver")
    assert [row.what.split()[0] for row in rows] == [f"G{number}" for number in range(1, 14)]
    assert all(row.value is None and row.note.endswith("not run on a GPU: no driver") for row in rows)


def test_rates_are_met_from_above_and_delays_from_below() -> None:
    """The limit itself meets a goal; NaN meets none."""
    by_name = {goal.name: goal for goal in GOALS}
    rate, delay = by_name["G1"], by_name["G5"]
    assert [rate.outcome(value) for value in (95.0, 94.9, float("nan"))] == ["met", "NOT met", "NOT met"]
    assert [delay.outcome(value) for value in (0.8, 0.81, float("nan"))] == ["met", "NOT met", "NOT met"]


def test_outcomes_are_told_one_by_one() -> None:
    """A measurement that fails costs no other."""
    rows = {row.what.split()[0]: row for row in judge({"G1": lambda: 96.0, "G3": lambda: 2.0, "G9": _failing}, "-")}
    assert (rows["G1"].value, rows["G1"].note) == (96.0, "goal at least 95 %: met")
    assert (rows["G3"].value, rows["G3"].note) == (2.0, "goal at most 1.5 %: NOT met")
    assert rows["G9"].value is None
    assert rows["G9"].note.endswith("FAILED: RuntimeError: no such kernel")
    assert "in _failing" in rows["G9"].traceback


def test_what_a_device_is_asked_runs_on_a_cpu() -> None:
    """Every goal and every row of the sweeps has a figure: the code that measures is known to run."""
    scale = CopyScale(megabytes=2, repeats=1, matrix=16, loop_seconds=0.005)
    cpu = torch.device("cpu")
    copies, kernels = DeviceCopies(cpu, scale), Kernels(cpu, 200_000, 1)
    goals = [
        row for row in judge({**copies.goals(), **kernels.goals()}, "on the host") if "on the host" not in row.note
    ]
    rates = [*copies.rates(), *kernels.rates()]
    assert [row.what.split()[0] for row in goals] == [f"G{number}" for number in (*range(1, 11), 12)]
    assert [row for row in goals + rates if row.value is None] == []
    arrangements = {row.what for row in rates if row.what.startswith("1 MiB slices")}
    assert len(arrangements) == len(CHUNKS_MIB) * len(DEPTHS)


def test_slices_of_the_copies_are_not_joined() -> None:
    """What is called a slice of 1 MiB is copied as one: a plan joins neighbours, and a gap keeps them apart."""
    library = _library.cpu()
    if library is None:
        pytest.skip(_library.status("cpu").reason)
    copies = DeviceCopies(torch.device("cpu"), CopyScale(megabytes=4)).slices(MIB)
    planned = CompiledCpuEngine(library).prepare(copies)
    assert planned.plan is not None
    assert [piece.count * piece.rows for piece in planned.plan.copies()] == [MIB] * 4


def test_figures_reach_the_file_with_their_machine(tmp_path: Path) -> None:
    """Written again after every part, whole each time."""
    figure = NativeFigure(what="a", how="b", value=1.5, unit="ms")
    path = tmp_path / "native.json"
    write_document(path, {"machine": Machine.read(), "native": [figure]})
    write_document(path, {"machine": Machine.read(), "native": [figure, figure]})
    document = json.loads(path.read_text())
    assert Machine(**document["machine"]).torch == torch.__version__
    assert [NativeFigure(**row) for row in document["native"]] == [figure, figure]
    assert [*tmp_path.iterdir()] == [path]
    assert native.table([figure]).row_count == 1
