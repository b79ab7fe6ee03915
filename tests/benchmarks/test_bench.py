"""`moe-ckpt bench` measures what it says, tiny; and the command line does what command lines do."""

from __future__ import annotations

import io
import json
import tempfile
from collections import Counter
from contextlib import redirect_stderr, redirect_stdout
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from rich.table import Table

from lightning_moe_ckpt.benchmarks import (
    DeltaBench,
    Machine,
    NativeBench,
    OverheadBench,
    PartialBench,
    PlannerBench,
    RecoveryBench,
    ReductionBench,
    ReplicationBench,
    SelectionBench,
)
from lightning_moe_ckpt.benchmarks._benchmark import accelerator_for
from lightning_moe_ckpt.benchmarks._delta import DeltaFigure
from lightning_moe_ckpt.benchmarks._host_restore import HostRestoreFigure
from lightning_moe_ckpt.benchmarks._native_figure import NativeFigure
from lightning_moe_ckpt.benchmarks._overhead import VARIANTS, OverheadFigure, _order
from lightning_moe_ckpt.benchmarks._partial import PartialFigure
from lightning_moe_ckpt.benchmarks._persist import CPU, LOCAL, OBJECT, STEP, PersistFigure
from lightning_moe_ckpt.benchmarks._planner import PlannerFigure
from lightning_moe_ckpt.benchmarks._recovery import CASES, Recovery, RecoveryFigure
from lightning_moe_ckpt.benchmarks._replication import ReplicationFigure
from lightning_moe_ckpt.benchmarks._selection import SelectionFigure
from lightning_moe_ckpt.benchmarks._two_level import TwoLevelFigure
from lightning_moe_ckpt.cli import main
from lightning_moe_ckpt.errors import ConfigurationError
from lightning_moe_ckpt.parallel import run_world
from lightning_moe_ckpt.parallel._bench import ReductionCost

STEPS = 4
TINY_FITS = [
    *("--rounds", "2", "--steps", str(STEPS), "--settle", "2", "--warm-up", "5", "--window", "2"),
    *("--blocks", "1", "--dim", "32", "--experts", "4", "--batch-size", "2"),
]
TINY = {
    "planner": ("--operators", "1300", "--runs", "2"),
    "partial": ("--partial-experts", "8", "--partial-nodes", "2", "--partial-faults", "1", "--pairs", "8,1"),
    "selection": ("--selection-steps", "120"),
    "delta": ("--delta-steps", "6"),
    "reduction": ("--ranks", "2", "--width", "8", "--depth", "2", "--turns", "1"),
    "recovery": (
        *(
            "--kills",
            "1",
            "--host-kills",
            "1",
            "--host-megabytes",
            "1",
            "--nodes",
            "2",
            "--every",
            "2",
            "--recovery-blocks",
            "1",
            "--recovery-dim",
            "32",
        ),
        *("--systems", "dense", "dcp"),
    ),
    "quality": (
        *("--quality-quick", "--quality-seeds", "1"),
        *("--quality-out", str(Path(tempfile.gettempdir()) / "moe-ckpt-test-quality")),
    ),
    "persist": (
        *("--generation-megabytes", "1", "--segments", "2", "--persist-rounds", "2", "--persist-steps", "12"),
        *("--persist-dim", "32"),
    ),
    "replication": (
        *("--peer-rounds", "1", "--peer-steps", "4", "--peer-warm-up", "6", "--peer-dim", "16", "--peer-window", "2"),
    ),
    "overhead": tuple(TINY_FITS),
    "native": ("--slices", "50", "--repeats", "1", "--megabytes", "1", "--elements", "200000"),
}


def _run(argv: list[str]) -> tuple[int, str, str]:
    """Exit status, output and errors of the command in a process of its own: fits leave threads behind."""

    def work(_: int) -> tuple[int, str, str]:
        with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
            status = main(argv)
        return status, out.getvalue(), err.getvalue()

    return run_world(1, work, process_group=False, timeout=timedelta(minutes=4))[0]


@cache
def _document(name: str) -> dict[str, Any]:
    """What `moe-ckpt bench NAME --json` writes; each benchmark is run once."""
    chosen = TINY if name == "all" else [name]
    status, out, err = _run(["bench", name, "--json", *(option for each in chosen for option in TINY[each])])
    assert status == 0, err
    parsed: dict[str, Any] = json.loads(out)
    return parsed


@pytest.mark.soak
def test_all_of_them_can_be_asked_for_at_once() -> None:
    """One document has the machine and every benchmark."""
    document = _document("all")
    assert sorted(document) == sorted(["machine", "accelerator", *TINY])
    assert all(document.values())


@pytest.mark.soak
def test_copies_are_measured_beside_none() -> None:
    """Three ranks on three nodes; twice the copies are twice the bytes, and nobody waits longer than a step takes."""
    none, one, two = (ReplicationFigure(**row) for row in _document("replication")["replication"])
    assert (none.replicas, one.replicas, two.replicas) == (0, 1, 2)
    assert (none.throughput, none.nbytes_per_step) == (1.0, 0.0)
    for figure in (one, two):
        assert figure.nbytes_per_step > 0
        assert figure.generations_complete > figure.generations_skipped
        assert figure.stall < 1 / figure.steps_per_second
    assert "copies" in _shown(ReplicationBench().table([none, one, two]))


@pytest.fixture
def overhead() -> dict[str, OverheadFigure]:
    """Figures of training by variant."""
    return {row["variant"]: OverheadFigure(**row) for row in _document("overhead")["overhead"]}


def _shown(table: Table) -> str:
    console = Console(width=200, file=io.StringIO(), record=True)
    console.print(table)
    return console.export_text()


def test_figures_come_with_the_machine_they_hold_for() -> None:
    """Hardware, date and versions are part of the document."""
    machine = _document("planner")["machine"]
    assert Machine(**machine).num_cores == Machine.read().num_cores
    assert machine["cpu"]
    assert machine["date"].endswith("+00:00")


def test_planner_figures_are_those_of_the_design() -> None:
    """At 2.5 bytes per parameter Algorithm 1 needs 20 slots, packing 9; no packed slot exceeds the budget."""
    figures = [PlannerFigure(**row) for row in _document("planner")["planner"]]
    windows = {planner: [f.window for f in figures if f.planner == planner] for planner in ("packed", "algorithm1")}
    assert windows == {"packed": [9, 7, 4, 3], "algorithm1": [20, 10, 5, 3]}
    assert all(f.largest_slot <= 1 for f in figures if f.planner == "packed")
    assert all(f.seconds > 0 for f in figures)
    assert "algorithm1" in _shown(PlannerBench().table(figures))


def test_adaptive_sharding_lowers_the_peak() -> None:
    """Of a partial generation, wherever ranks have different numbers of experts; and it never raises it."""
    figures = [PartialFigure(**row) for row in _document("partial")["partial"] if "adaptive_nbytes" in row]
    assert [figure.k for figure in figures] == [1, 2, 4, 8]
    for figure in figures:
        assert figure.average_nbytes <= figure.adaptive_nbytes <= figure.equal_nbytes
        assert figure.adaptive_nbytes <= 1.04 * figure.average_nbytes
    assert figures[0].saved > 0.05


def test_memory_of_surviving_nodes_keeps_tokens_that_storage_lost() -> None:
    """Real kills, one of two nodes lost: PLT is below that of storage alone, and both are shown beside the bytes."""
    rows = _document("partial")["partial"]
    (figure,) = (TwoLevelFigure(**row) for row in rows if "storage_plt" in row)
    assert (figure.num_nodes, figure.num_experts, figure.snapshot_k, figure.k) == (2, 8, 8, 1)
    assert 0 < figure.plt < figure.storage_plt
    sharding = [PartialFigure(**row) for row in rows if "adaptive_nbytes" in row]
    shown = _shown(PartialBench().table([*sharding, figure]))
    assert "adaptive" in shown
    assert f"{figure.plt:.1%}" in shown
    assert f"{figure.storage_plt:.1%}" in shown


def test_gradients_tell_a_copy_in_a_third_or_a_sixth_of_its_bytes() -> None:
    """Without rounding to the last bit, with it nearly; where other experts are chosen in between, more travels."""
    figures = [DeltaFigure(**row) for row in _document("delta")["delta"]]
    exact, rounded = figures[:3], figures[3:]
    assert all(figure.equal and figure.param_difference == figure.moment_difference == 0 for figure in exact)
    assert not any(figure.equal for figure in rounded)
    assert all(0 < figure.param_difference < 0.01 and 0 < figure.moment_difference < 0.1 for figure in rounded)
    assert exact[0].share <= 0.35
    assert rounded[0].share <= 1 / 6
    assert exact[0].share < exact[2].share < 1
    assert "equal" in _shown(DeltaBench().table(figures))


def test_popular_experts_first_halves_what_a_fault_costs() -> None:
    """On a skewed router, in turns costs about twice as much; on an even one nothing is gained, and little is lost."""
    figures = [SelectionFigure(**row) for row in _document("selection")["selection"]]
    even, skewed, very = (figures[i : i + 3] for i in (0, 3, 6))
    for found, most in ((skewed, 0.8), (very, 0.55)):
        assert [figure.relative for figure in found if figure.selection == "round robin"] == [1.0]
        assert all(figure.relative < most for figure in found if figure.selection != "round robin")
    assert max(figure.relative for figure in even) < 1.1
    assert even[0].skew < skewed[0].skew < very[0].skew
    assert "popularity (MOETION)" in _shown(SelectionBench().table(figures))


def test_reduction_is_compared_with_all_reduce_and_ddp() -> None:
    """Every variant has a row."""
    (cost,) = [ReductionCost(**row) for row in _document("reduction")["reduction"]]
    shown = _shown(ReductionBench().table([cost]))
    assert cost.world_size == 2
    assert all(name in shown for name in ("ordered", "allreduce", "ddp"))


def test_throughput_is_relative_to_training_without_checkpoints(overhead: dict[str, OverheadFigure]) -> None:
    """Without checkpoints the ratio is one and nothing waits; each variant has a figure of every round."""
    assert set(overhead) == set(VARIANTS)
    assert (overhead["none"].throughput, overhead["none"].stall_seconds) == (1.0, {})
    for figure in overhead.values():
        low, high = figure.throughput_range
        assert 0 < low <= figure.throughput <= high
        assert len(figure.rounds) == 2
        assert 0 < 0.99 * figure.thread_seconds <= figure.process_seconds, "the clocks have different grains"


def test_only_steps_after_the_warm_up_are_measured(overhead: dict[str, OverheadFigure]) -> None:
    """A dense generation per step, a sparse one per window, of the steps measured in two rounds."""
    assert overhead["dense"].generations_complete == 2 * STEPS
    assert overhead["sparse"].generations_complete == 2 * STEPS // 2
    assert "dense" not in overhead["sparse"].stall_seconds, "generation 0 was written before the steps measured"


def test_sparse_segments_are_smaller_than_dense_ones(overhead: dict[str, OverheadFigure]) -> None:
    """Two slots of two kinds of records are less than two dense snapshots."""
    sparse, dense = overhead["sparse"], overhead["dense"]
    assert (sparse.window, dense.window) == (2, 1)
    assert 0.5 * dense.nbytes_per_step < sparse.nbytes_per_step < 0.75 * dense.nbytes_per_step
    assert 12 * dense.num_params <= dense.dense_nbytes < dense.nbytes_per_step, "the journal comes on top"


def test_overhead_table_names_every_cause_of_stall(overhead: dict[str, OverheadFigure]) -> None:
    """A row per variant, and below them where the stall comes from."""
    shown = _shown(OverheadBench().table(list(overhead.values())))
    assert all(name in shown for name in ("none", "sparse", "dense"))
    assert all(f"stall, {variant}: " in shown for variant in ("sparse", "dense"))
    assert all(cause in shown for cause in overhead["sparse"].stall_seconds)


def test_variants_take_order() -> None:
    """Every round has each variant once, and each begins a round equally often."""
    turns = list(_order(2 * len(VARIANTS)))
    rounds = [turns[index : index + len(VARIANTS)] for index in range(0, len(turns), len(VARIANTS))]
    assert [set(each) for each in rounds] == [set(VARIANTS)] * (2 * len(VARIANTS))
    assert Counter(each[0] for each in rounds) == dict.fromkeys(VARIANTS, 2)


def test_every_failure_is_recovered_from() -> None:
    """Each resumed at a step that was stored, took the lost steps again, and then one that was new."""
    *rows, host = _document("recovery")["recovery"]
    figures = [RecoveryFigure(**row | {"rounds": [Recovery(**each) for each in row["rounds"]]}) for row in rows]
    assert [(figure.system, figure.loss) for figure in figures] == [
        case for case in CASES if case[0] in ("dense", "dcp")
    ]
    for figure in figures:
        (only,) = figure.rounds
        assert only.killed_at == 3 * 2 + 1
        assert 0 < only.rollback_steps <= only.killed_at, "no checkpoint can be of the step that died"
        assert 0 < only.rerun_seconds < only.total_seconds
        assert only.begin_seconds < only.ready_seconds
        assert only.ready_seconds + only.start_seconds + only.rerun_seconds < only.total_seconds == figure.total_seconds
        assert len(only.restored_from) == 2
        assert all(rank.keys() <= {"host", "peer", "storage"} for rank in only.restored_from)
        assert (figure.restore_seconds is not None) == (figure.system == "dense")
    lost_everything = [figure for figure in figures if (figure.system, figure.loss) == ("dense", "cluster")]
    assert all([*rank] == ["storage"] for figure in lost_everything for rank in figure.restored_from)
    shown = _shown(RecoveryBench().table([*figures, HostRestoreFigure(**host)]))
    assert "out of host memory, without imports: median" in shown
    assert all(text in shown for text in ("DenseCheckpoint", "torch DCP, async", "all nodes", "any", "steps lost"))


def test_persisting_is_compared_with_bare_writes() -> None:
    """Every goal has a row; object storage is left out without a bucket, and says so."""
    figures = [PersistFigure(**row) for row in _document("persist")["persist"]]
    assert [figure.what for figure in figures] == [goal.what for goal in (LOCAL, OBJECT, CPU, STEP)]
    local, stored, cpu, _ = figures
    assert local.value is not None
    assert local.value > 0
    assert local.baseline.endswith("MB/s")
    assert stored.outcome == cpu.outcome == "not run: name a bucket with --object-url"


def test_tables_are_printed_without_json(capsys: pytest.CaptureFixture[str]) -> None:
    """The machine, then one table per benchmark; a pipe gets whole lines."""
    assert main(["bench", "planner", "--operators", "130", "--runs", "1"]) == 0
    printed = capsys.readouterr().out
    assert Machine.read().torch in printed
    assert "Planning 130 operators" in printed


def test_trainings_take_a_gpu_where_each_rank_has_one() -> None:
    """By default they take none, which figures and their goals were stated for; too few are an error that counts them."""

    num_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    with pytest.raises(ConfigurationError, match=f"each of {num_devices + 1} ranks, torch sees {num_devices}"):
        accelerator_for("gpu", num_devices + 1)
    assert [accelerator_for(wanted, num_devices + 1) for wanted in (None, "cpu", "auto")] == ["cpu"] * 3
    assert accelerator_for("auto") == ("gpu" if num_devices else "cpu")


@pytest.mark.parametrize(
    "argv", [[], ["bench"], ["bench", "sorting"], ["bench", "overhead", "--rounds", "0"], ["bench", "planner", "--url"]]
)
def test_wrong_arguments_exit_with_two(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """They are explained on standard error."""
    with pytest.raises(SystemExit) as raised:
        main(argv)
    assert raised.value.code == 2
    assert "usage: moe-ckpt" in capsys.readouterr().err


def test_a_failed_command_says_why_and_exits_with_two(tmp_path: Path) -> None:
    """An error of this package is a line on standard error, not a traceback."""
    (tmp_path / "file").touch()
    status, out, err = _run(["bench", "overhead", *TINY_FITS, "--url", f"file://{tmp_path}/file"])
    assert (status, out) == (2, "")
    assert err.splitlines()[-1].startswith("moe-ckpt: ")


def test_native_figures_stand_beside_those_of_torch() -> None:
    """Small slices three ways; what cannot be run here has no value and says why."""
    figures = [NativeFigure(**row) for row in _document("native")["native"]]
    small = [figure for figure in figures if "50 slices of 256 bytes" in figure.what]
    assert [figure.how for figure in small] == ["torch, loop of copy_", "torch, _foreach_copy_", "compiled engine"]
    goals = [figure for figure in figures if figure.what.startswith("G")]
    # A goal may be a difference of two times, which noise can make negative.
    assert all(figure.value is None or figure.value > 0 for figure in figures if figure not in goals)
    assert len(goals) == 13
    assert all(figure.value is not None or "not run on a GPU: " in figure.note for figure in goals)
    same = [figure for figure in figures if "same bits as torch" in figure.note]
    assert len(same) == 3 + 6, "three compressions and six replays are checked"
    assert not [figure for figure in figures if "OTHER BITS" in figure.note]
    assert "slices/s" in _shown(NativeBench().table(figures))
