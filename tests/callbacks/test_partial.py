"""PartialExpertCheckpoint and SelectiveExpertCheckpoint as users meet them: what they refuse, and what they report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BaseFinetuning
from lightning.pytorch.loggers import CSVLogger
from torch import nn

from lightning_moe_ckpt.callbacks import (
    DenseCheckpoint,
    ExpertLoadMonitor,
    PartialExpertCheckpoint,
    SelectiveExpertCheckpoint,
    SparseCheckpoint,
)
from lightning_moe_ckpt.errors import ConfigurationError, UnknownLayout
from lightning_moe_ckpt.moe import MoELayer
from lightning_moe_ckpt.storage import RankMarker

FEATURES, NUM_EXPERTS = 32, 8


class Net(tiny.ToZero):
    """One layer of experts, which have most of the parameters."""

    def __init__(self, *, experts: bool = True) -> None:
        last = MoELayer(FEATURES, 64, NUM_EXPERTS) if experts else nn.Linear(FEATURES, FEATURES)
        super().__init__(nn.Linear(FEATURES, FEATURES), last, optimizer=torch.optim.AdamW)


def fit(checkpoint: Any, *others: Any, experts: bool = True, net: Net | None = None, **options: Any) -> None:
    torch.manual_seed(1)
    data = tiny.rows(tiny.waves(4 * 12, FEATURES), 4)
    tiny.fit(net if net is not None else Net(experts=experts), data, *others, checkpoint, max_epochs=1, **options)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"k": 0}, r"k=0.*1 or more experts per layer"),
        ({"k": 3, "snapshot_k": 2}, r"k=3, snapshot_k=2.*`snapshot_k` of `k` or more"),
        ({"select": "random"}, r"select='random'.*'sequential' or 'load_aware'"),
        ({"plt_budget": 1.5}, r"plt_budget=1.5.*portion from 0 to 1"),
        ({"plt_budget": "5%"}, r"plt_budget='5%'.*portion from 0 to 1"),
        ({"every_n_steps": 0}, r"every_n_steps=0"),
    ],
)
def test_arguments_out_of_range_are_refused(options: dict[str, Any], said: str) -> None:
    """Each error shows the call, and what it may be."""
    with pytest.raises(ConfigurationError, match=said):
        PartialExpertCheckpoint("/ckpt", **options)


@pytest.mark.parametrize("policy", [PartialExpertCheckpoint, SelectiveExpertCheckpoint])
def test_a_model_without_experts_is_refused_when_training_starts(policy: Any, tmp_path: Path) -> None:
    """It would store everything at each generation and call it partial."""
    with pytest.raises(ConfigurationError, match=rf"`{policy.__name__}` takes some experts.*no Mixture-of-Experts"):
        fit(policy(tmp_path / "run"), experts=False)


def test_a_step_takes_a_fraction_of_a_snapshot_of_everything(tmp_path: Path) -> None:
    """The dense part, an expert in eight, and the journal; the report says what losing a level would cost."""
    partial, dense = (
        PartialExpertCheckpoint(tmp_path / "partial", keep=3),
        DenseCheckpoint(tmp_path / "dense", every_n_steps=1),
    )
    monitor = ExpertLoadMonitor(every_n_steps=1)
    fit(partial, monitor)
    fit(dense)
    report, lost = partial.report, partial.report.lost
    print(f"bytes per step: {report.nbytes_per_step:.0f}, dense: {dense.report.nbytes_per_step:.0f}")
    assert report.nbytes_per_step < 0.4 * dense.report.nbytes_per_step
    assert lost is not None
    assert (lost.k, lost.plt, lost.faults, lost.lost) == (1, 0.0, 0, 0)
    assert lost.processed == 12 * 4 * 2, "12 batches of 4, each token to two experts"
    assert 0 < lost.unsaved["memory"] <= lost.unsaved["storage"] <= lost.processed
    # No other node has copies, so memory has room for one of each expert.
    assert report.reserved_nbytes["host"] < 0.85 * dense.report.reserved_nbytes["host"]
    assert dense.report.lost is None
    assert monitor.latest["moe/experts_per_generation"] == 1
    assert (monitor.latest["moe/plt"], monitor.latest["moe/mlt"], monitor.latest["moe/partial_faults"]) == (0, 0, 0)
    assert 0 < monitor.latest["moe/unsaved_tokens/memory"] <= monitor.latest["moe/unsaved_tokens/storage"]


def test_without_a_monitor_it_says_itself_what_would_be_lost(tmp_path: Path) -> None:
    """In the rows of the Trainer's own logger, of the ledger; `metrics` has them as metrics of torchmetrics."""
    logger = CSVLogger(str(tmp_path / "logs"))
    checkpoint = PartialExpertCheckpoint(str(tmp_path / "run"), k=1)
    fit(checkpoint, logger=logger, log_every_n_steps=4)
    header, *rows = (Path(logger.log_dir) / "metrics.csv").read_text().splitlines()
    assert {"moe/plt", "moe/mlt", "moe/unsaved_tokens/memory", "moe/unsaved_tokens/storage"} <= set(header.split(","))
    assert len(rows) == 3
    assert float(checkpoint.metrics["moe/plt"].compute()) == 0
    assert int(checkpoint.metrics["moe/unsaved_tokens"].compute()["memory"]) > 0


@pytest.mark.parametrize(("options", "named"), [({"k": 99}, "k=99"), ({"snapshot_k": 77}, "snapshot_k=77"), ({}, "")])
def test_more_experts_than_there_are_is_said(
    tmp_path: Path, options: dict[str, int], named: str, caplog: pytest.LogCaptureFixture
) -> None:
    """All of them are taken, which is what DenseCheckpoint does, exactly."""
    fit(PartialExpertCheckpoint(str(tmp_path), **options))  # type: ignore[arg-type]
    said = [record.getMessage() for record in caplog.records if "experts at most" in record.getMessage()]
    assert len(said) == bool(named)
    assert all(f"PartialExpertCheckpoint({named})" in each and "DenseCheckpoint" in each for each in said)


def test_as_many_experts_go_to_memory_as_steps_can_hide(tmp_path: Path) -> None:
    """Small ones all of them: this machine copies kilobytes in no time."""
    checkpoint = PartialExpertCheckpoint(str(tmp_path), k=1, snapshot_k="auto", overhead_target=None)
    fit(checkpoint)
    lost = checkpoint.report.lost
    assert lost is not None
    assert lost.taken == {"memory": (NUM_EXPERTS,), "storage": (1,)}


# -- bytes


@pytest.mark.parametrize(
    ("given", "wanted"),
    [(7, 7), ("7", 7), ("400MB", 400 * 10**6), ("1.5 GiB", 3 * 2**29), ("64kib", 2**16), (" 2 tb ", 2 * 10**12)],
)
def test_bytes_may_be_written_with_a_unit(given: int | str, wanted: int) -> None:
    """The same for every argument that counts bytes."""
    shared = PartialExpertCheckpoint("/ckpt", bandwidth=given, max_chunk=given)
    own = SelectiveExpertCheckpoint("/ckpt", local_budget=given, remote_budget=given)
    sparse = SparseCheckpoint("/ckpt", budget_nbytes=given)
    found = [shared.bandwidth, shared.max_chunk, own.local_budget, own.remote_budget, sparse.budget_nbytes]
    assert found == [wanted] * 5


@pytest.mark.parametrize("wrong", ["400M", "MB", "-4MB", "0.2", "4 MB/s", True, 2.5, 0])
def test_what_is_no_number_of_bytes_is_refused(wrong: Any) -> None:
    """With what it may be."""
    with pytest.raises(ConfigurationError, match=r"`PartialExpertCheckpoint\(max_chunk=.*'400MB' or '1.5GiB'"):
        PartialExpertCheckpoint("/ckpt", max_chunk=wrong)


# -- selective


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"local_budget": 0}, r"local_budget=0.*'auto' or 1 or more bytes"),
        ({"remote_budget": 2.5}, r"remote_budget=2\.5.*'auto' or 1 or more bytes"),
        ({"local_budget": "all"}, r"local_budget='all'.*'auto' or 1 or more"),
        ({"local_budget": 10, "remote_budget": 20}, r"`local_budget` of `remote_budget` or more"),
        ({"every_n_steps": 0}, r"every_n_steps=0"),
    ],
)
def test_budgets_out_of_range_are_refused(options: dict[str, Any], said: str) -> None:
    """Each error shows the call, and what it may be."""
    with pytest.raises(ConfigurationError, match=rf"`SelectiveExpertCheckpoint\(.*{said}"):
        SelectiveExpertCheckpoint("/ckpt", **options)


def test_a_budget_without_room_for_an_expert_takes_one_all_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And says how many bytes are missing: else an expert would be lost whole."""
    checkpoint, dense = (
        SelectiveExpertCheckpoint(tmp_path / "run", local_budget=1000, remote_budget=1000),
        DenseCheckpoint(tmp_path / "dense", every_n_steps=1),
    )
    fit(checkpoint)
    fit(dense)
    warned = [record.message for record in caplog.records if "no room for an expert" in record.message]
    assert [text.split("`")[1] for text in warned] == ["local_budget", "remote_budget"]
    report = checkpoint.report
    assert report.generations_complete > NUM_EXPERTS
    assert report.nbytes_per_step < 0.4 * dense.report.nbytes_per_step


def test_the_generation_of_the_end_names_copies_of_the_newest_before_it(tmp_path: Path) -> None:
    """Of which no window came any more to tell ranks that it is whole."""
    checkpoint = PartialExpertCheckpoint(tmp_path, every_n_steps=5, k=2)

    class Wait(Callback):
        def on_train_batch_start(self, *args: object) -> None:
            assert checkpoint.wait_committed()

    fit(checkpoint, Wait())
    markers = [RankMarker.from_bytes(path.read_bytes(), path.name) for path in sorted(tmp_path.rglob("*.done"))]
    assert [marker.generation.step for marker in markers] == [0, 5, 10, 12]
    assert [spare.generation.step for spare in markers[-1].spares] == [0, 5, 10]


def test_budgets_that_are_measured_train(tmp_path: Path) -> None:
    """Generations begin once three steps were measured."""
    checkpoint, monitor = SelectiveExpertCheckpoint(tmp_path / "run"), ExpertLoadMonitor(every_n_steps=1)
    fit(checkpoint, monitor)
    report = checkpoint.report
    assert 0 < report.generations_complete < report.steps
    assert report.lost is not None
    assert report.lost.k is None
    budgets, rates = report.lost.budgets, report.lost.bandwidths
    assert set(budgets) == set(rates) == {"local_budget", "remote_budget"}
    assert all(value > 0 for value in (*budgets.values(), *rates.values()))
    (in_memory,), (in_storage,) = report.lost.taken["memory"], report.lost.taken["storage"]
    assert 1 <= in_storage <= in_memory <= NUM_EXPERTS
    assert monitor.latest["moe/experts_taken/memory"] == in_memory


def test_experts_that_cannot_be_placed_are_refused_here_and_taken_whole_elsewhere(tmp_path: Path) -> None:
    """What is partial has to know experts; what is exact has not."""
    net = Net(experts=False)
    net.experts = nn.Linear(FEATURES, 3 * FEATURES)
    with pytest.raises(UnknownLayout, match=r"experts.bias, experts.weight"):
        fit(PartialExpertCheckpoint(str(tmp_path / "partial"), k=1), net=net)
    for make in (DenseCheckpoint, SparseCheckpoint):
        checkpoint = make(str(tmp_path / make.__name__))
        fit(checkpoint, net=net)
        assert checkpoint.report.steps == 12


class Unfreezing(BaseFinetuning):
    """Might add parameters to the optimizer."""

    def freeze_before_training(self, pl_module: LightningModule) -> None:
        """Everything trains."""


class Adding(Callback):
    """Adds a parameter to the optimizer in a step."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self._step:
            trainer.optimizers[0].add_param_group({"params": [pl_module.late]})


class Late(Net):
    """Has a parameter that its optimizer does not have at first."""

    def __init__(self, *, experts: bool = True) -> None:
        super().__init__(experts=experts)
        self.late = nn.Parameter(torch.ones(FEATURES))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.parameters() if p is not self.late])


def test_finetuning_that_adds_parameters_is_refused(tmp_path: Path) -> None:
    """A generation of states from before and after has no meaning."""
    with pytest.raises(
        ConfigurationError, match=r"Unfreezing adds parameters.*Use SparseCheckpoint or DenseCheckpoint"
    ):
        fit(PartialExpertCheckpoint(str(tmp_path), k=1), Unfreezing())


@pytest.mark.parametrize("step", [4, 0])
def test_parameters_that_were_added_nevertheless_end_the_taking(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, step: int
) -> None:
    """Said as an error; the end is stored whole. Before the first plan of a start, too: nothing else could be read back."""
    checkpoint = PartialExpertCheckpoint(str(tmp_path), k=1, every_n_steps=1, keep=100)
    fit(checkpoint, Adding(step), net=Late())
    assert "none is taken until training ends" in caplog.text
    kept = sorted(int(path.name) for path in (tmp_path / "snap").iterdir() if any(path.rglob("_COMMITTED")))
    assert (kept[-2] <= step, kept[-1]) == (True, 12)
