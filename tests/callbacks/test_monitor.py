"""The monitor's rows: equal to a count by hand, once per token, and beside a checkpoint callback its figures."""

from __future__ import annotations

import csv
import logging
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from launcher import run_world
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ProgressBar, RichProgressBar, TQDMProgressBar
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from lightning_moe_ckpt.callbacks import DenseCheckpoint, ExpertLoadMonitor, SparseCheckpoint
from lightning_moe_ckpt.callbacks._loads import LayerLoad, LayerLoads
from lightning_moe_ckpt.errors import ConfigurationError
from lightning_moe_ckpt.metrics import load_skew
from lightning_moe_ckpt.moe import MoELayer
from lightning_moe_ckpt.operators import OperatorSet, discover
from lightning_moe_ckpt.planning import Planner
from lightning_moe_ckpt.planning._measures import PopularityMeter
from lightning_moe_ckpt.session import Report
from lightning_moe_ckpt.strategy import MoEStrategy

D, E, TOKENS = 4, 6, 6
CAPACITY = 2 * TOKENS // E
"""Of `Model.own`, in one forward."""


class Listed(nn.Module):
    """Experts that are modules of their own: counted by hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(D, E)
        self.experts = nn.ModuleList([nn.Linear(D, D) for _ in range(E)])

    def forward(self, x: Tensor) -> Tensor:
        idx, out = self.gate(x).argmax(-1), torch.zeros_like(x)
        for j, expert in enumerate(self.experts):
            out = out.index_add(0, (idx == j).nonzero()[:, 0], expert(x[idx == j]))
        summed: Tensor = out + self.gate(x).sum()
        return summed


class Model(LightningModule):
    """One layer with a capacity, one with hooks; counts by hand what each routes in a training step."""

    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.own: MoELayer | None = None
        self.listed = Listed()
        self.recompute = recompute
        self.routed = {name: torch.zeros(E, dtype=torch.int64) for name in ("own", "listed", "kept")}

    def configure_model(self) -> None:
        if self.own is None:
            self.own = MoELayer(D, 3, E, top_k=1, capacity_factor=1.0)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x = batch[0].flatten(0, 1)
        for name in ("own", "listed"):
            layer = getattr(self, name)
            routed_E = torch.bincount(layer.gate(x).argmax(-1), minlength=E)
            self.routed[name] += routed_E
            if name == "own":
                self.routed["kept"] += routed_E.clamp(max=CAPACITY)
            x = x + (checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x))
        loss: Tensor = x.pow(2).mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        assert self.own is not None
        self.listed(self.own(batch[0]).flatten(0, 1))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-2)


class ByHand(Callback):
    """What the module counted in each interval of `every` steps."""

    def __init__(self, every: int) -> None:
        self.every, self.rows, self.last = every, [], 0

    rows: list[dict[str, Tensor]]

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: object) -> None:
        if trainer.global_step != self.last:
            self.last = trainer.global_step
            if self.last % self.every == 0:
                assert isinstance(pl_module, Model)
                self.rows.append({name: counts.clone() for name, counts in pl_module.routed.items()})
                for counts in pl_module.routed.values():
                    counts.zero_()


def loader() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    return DataLoader(TensorDataset(torch.randn(18, TOKENS, D, generator=generator)), batch_size=2)


def fit(
    folder: Path,
    *callbacks: Callback,
    steps: int = 6,
    recompute: bool = False,
    model: LightningModule | None = None,
    **kwargs: Any,
) -> LightningModule:
    """Train with a CSV logger in `folder`, and validate in between."""
    seed_everything(1, verbose=False)
    model = Model(recompute) if model is None else model
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning's advice about this tiny run
        trainer = Trainer(
            accelerator="cpu",
            devices=kwargs.pop("devices", 1),
            max_steps=steps,
            max_epochs=-1,
            enable_model_summary=False,
            enable_checkpointing=any(isinstance(c, (DenseCheckpoint, SparseCheckpoint)) for c in callbacks),
            callbacks=list(callbacks),
            **{
                "enable_progress_bar": False,
                "log_every_n_steps": 2,
                "logger": CSVLogger(str(folder), name="", version=""),
                **kwargs,
            },
        )
        trainer.fit(model, loader(), None if isinstance(model, tiny.ToZero) else loader())
    return model


def rows(folder: Path) -> dict[int, dict[str, float]]:
    """What the logger wrote, by step."""
    with (folder / "metrics.csv").open() as file:
        found: dict[int, dict[str, float]] = {}
        for row in csv.DictReader(file):
            values = {name: float(value) for name, value in row.items() if value and name != "step"}
            found.setdefault(int(row["step"]), {}).update(values)
    return found


def expected(counts_E: Tensor, layer: str) -> dict[str, float]:
    shares = counts_E / counts_E.sum()
    return {
        f"moe/load_skew/{layer}": load_skew(counts_E).item(),
        f"moe/min_share/{layer}": shares.min().item(),
        f"moe/max_share/{layer}": shares.max().item(),
    }


@pytest.mark.parametrize(("recompute", "accumulate"), [(False, 1), (True, 1), (False, 3), (True, 3)])
def test_rows_are_what_was_counted_by_hand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recompute: bool, accumulate: int
) -> None:
    """Each token of the steps since the last row once: accumulated, recomputed or validated in between."""
    hand, read, loads = ByHand(2), LayerLoads.read, []

    def recorded(self: LayerLoads, numbers: Sequence[int]) -> tuple[list[LayerLoad], Tensor]:
        answer = read(self, numbers)
        assert answer is not None
        loads.append(answer[0])
        return answer

    # Shares alone would not tell: counting everything twice leaves them as they are.
    monkeypatch.setattr(LayerLoads, "read", recorded)
    fit(
        tmp_path,
        ExpertLoadMonitor(),
        hand,
        recompute=recompute,
        accumulate_grad_batches=accumulate,
        val_check_interval=3,
    )
    found = {step: row for step, row in rows(tmp_path).items() if any(name.startswith("moe/") for name in row)}
    assert list(found) == [1, 3, 5]
    for row, counted in zip(found.values(), hand.rows, strict=True):
        assert "loss" in row  # in the row of the same step
        assert int(counted["listed"].sum()) == 2 * accumulate * 2 * TOKENS
        want = expected(counted["listed"], "listed") | expected(counted["kept"], "own")
        for name, value in want.items():
            assert row[name] == pytest.approx(value, rel=1e-6)
        by_layer = {load.layer: load.tokens for load in loads.pop(0)}
        assert torch.equal(by_layer["listed"], counted["listed"])
        assert torch.equal(by_layer["own"], counted["kept"])
        assert "moe/dropped_share/listed" not in row  # it does not know


def test_dropped_tokens_are_a_share_of_all_routed(tmp_path: Path) -> None:
    """What the gate chose is what experts processed and what was dropped."""
    hand = ByHand(1)
    fit(tmp_path, ExpertLoadMonitor(every_n_steps=1), hand, steps=4)
    found, dropped = rows(tmp_path), 0
    for step, counted in enumerate(hand.rows):
        kept_E = counted["kept"]
        dropped += int((counted["own"] - kept_E).sum())
        want = (counted["own"] - kept_E).sum() / counted["own"].sum()
        assert found[step]["moe/dropped_share/own"] == pytest.approx(want.item(), rel=1e-6)
        assert found[step]["moe/max_share/own"] == pytest.approx((kept_E.max() / kept_E.sum()).item(), rel=1e-6)
    assert dropped > 0


def planned(folder: Path, *others: Callback) -> list[float]:
    """Popularity with which the planner would plan next."""
    seen: list[float] = []

    class Peek(Callback):
        def on_train_batch_end(self, trainer: Trainer, *args: object) -> None:
            if trainer.global_step == 5 and own._run is not None:
                planner = own._run.session._planner
                assert isinstance(planner, Planner)
                assert isinstance(planner.order, PopularityMeter)
                seen.extend(planner.order.value().tolist())

    own = SparseCheckpoint(str(folder / "run"), window=2)
    fit(folder, *others, Peek(), own)
    return seen


def test_the_planner_counts_the_same_with_a_monitor(tmp_path: Path) -> None:
    """Each has its own accumulator; the layers' counters are only read."""
    alone = planned(tmp_path / "alone")
    assert sum(alone) > 0
    assert planned(tmp_path / "beside", ExpertLoadMonitor(every_n_steps=1)) == alone


def test_figures_of_checkpoints_stand_beside_the_load(tmp_path: Path) -> None:
    """They are those of the report, and the stall is per step since the last row."""
    reports: list[Report] = []
    own = SparseCheckpoint(str(tmp_path / "run"), window=2)
    monitor = ExpertLoadMonitor(every_n_steps=3)

    class Peek(Callback):
        def on_train_start(self, *args: object) -> None:
            reports.append(own.report)

        def on_train_batch_end(self, trainer: Trainer, *args: object) -> None:
            if trainer.global_step % 3 == 0:
                reports.append(own.report)

    fit(tmp_path, Peek(), monitor, own, steps=6, log_every_n_steps=1)
    found = rows(tmp_path)
    assert [step for step, row in found.items() if "moe/window" in row] == [2, 5]
    row, before, now = found[5], reports[-2], reports[-1]
    assert (row["moe/window"], row["moe/window_position"], row["moe/replaying"]) == (2, now.window_position, 0)
    assert row["moe/captured_nbytes_per_step"] == (now.nbytes_captured - before.nbytes_captured) / 3 > 0
    assert (row["moe/generations_failed/host"], row["moe/generations_failed/storage"]) == (0, 0)
    assert row["moe/generations_complete"] == now.generations_complete == 2
    assert row["moe/generations_committed"] <= row["moe/generations_complete"] + 1
    assert row["moe/generation/storage"] + row["moe/lag_steps/storage"] == 6
    stalls = {name.rpartition("/")[2]: value for name, value in row.items() if name.startswith("moe/stall_seconds/")}
    assert stalls.pop("slowest_rank") == pytest.approx(stalls.pop("all")) == pytest.approx(sum(stalls.values()))
    parts = {name: share for name, share in row.items() if name.startswith("moe/goodput/")}
    assert sum(parts.values()) == pytest.approx(1)
    assert row["moe/goodput"] == parts["moe/goodput/productive"] == pytest.approx(now.goodput.share, rel=0.1)
    for cause, seconds in stalls.items():
        want = (now.stall_seconds[cause] - before.stall_seconds.get(cause, 0.0)) / 3
        assert seconds == pytest.approx(want, abs=1e-3)
    assert (row["moe/device_stall_seconds/all"], row["moe/device_stall_seconds/slowest_rank"]) == (0, 0)  # a CPU
    assert stalls["dense"] == 0  # generation 0 was before the first row
    assert set(monitor.latest) <= set(row)


class Stop(Callback):
    """Ends a life the hard way."""

    def on_train_batch_start(self, trainer: Trainer, *args: object) -> None:
        if trainer.global_step == 9:
            raise RuntimeError("killed, for this test")


class Wait(Callback):
    """Before the monitor, so that its rows say what is certain."""

    def __init__(self, own: SparseCheckpoint) -> None:
        self.own = own

    def on_train_batch_end(self, *args: object) -> None:
        assert self.own.wait_committed()


def test_rows_tell_what_became_durable(tmp_path: Path) -> None:
    """The newest generation in storage, by how many steps training is ahead, and bytes since the last row."""
    own, reports = SparseCheckpoint(str(tmp_path / "run"), window=2), []

    class Peek(Callback):
        def on_train_batch_end(self, *args: object) -> None:
            reports.append(own.report)

    fit(tmp_path, Wait(own), Peek(), ExpertLoadMonitor(every_n_steps=1), own, steps=8, log_every_n_steps=1)
    found = rows(tmp_path)
    newest = [found[step]["moe/generation/storage"] for step in range(8)]
    # Steps 1 to 3 are measured for nothing: the window is given. A generation is complete at its last boundary, sealed
    # when the next batch starts, and known to be durable in the row of that batch.
    assert newest == [0, 0, 2, 2, 4, 4, 6, 6]
    assert [found[step]["moe/lag_steps/storage"] for step in range(8)] == [1, 2, 1, 2, 1, 2, 1, 2]
    assert [found[step]["moe/window_position"] for step in range(2, 8)] == [0, 1, 0, 1, 0, 1]
    for step in range(1, 8):
        row, before, now = found[step], reports[step - 1], reports[step]
        gained = now.nbytes_persisted - before.nbytes_persisted
        assert (row["moe/persisted_nbytes_per_second"] > 0) == (gained > 0) == (newest[step] != newest[step - 1])
        assert row["moe/persisted_nbytes_per_second"] == pytest.approx(gained / (now.seconds - before.seconds), rel=0.3)


def resumed(tmp_path: Path, *bars: Callback, **kwargs: Any) -> SparseCheckpoint:
    """A run that ended in step 9 and goes on, with `bars` in its second life."""
    with pytest.raises(RuntimeError, match="for this test"):
        fit(
            tmp_path / "first", ExpertLoadMonitor(), Stop(), SparseCheckpoint(str(tmp_path / "run"), window=4), steps=12
        )
    own = SparseCheckpoint(str(tmp_path / "run"), window=4, untouched=["callback.Shown.*"])
    fit(tmp_path / "second", *bars, ExpertLoadMonitor(), own, steps=12, **kwargs)
    return own


def test_replayed_steps_are_marked(tmp_path: Path) -> None:
    """In the rows of the loggers, and only they."""
    report = resumed(tmp_path).report
    assert report.replayed_steps == report.replay_steps == 3
    assert report.resumed_from is not None
    dense = report.resumed_from
    marked = {
        step + 1: row["moe/replaying"] for step, row in rows(tmp_path / "second").items() if "moe/replaying" in row
    }
    assert [step for step, value in marked.items() if value == 1] == [dense - 2, dense - 1, dense]
    assert {step for step, value in marked.items() if value == 0} == {s for s in range(dense + 1, 13) if s % 2 == 0}


class Shown(Callback):
    """What the progress bar shows of each step, asked as Lightning's bars ask."""

    def __init__(self) -> None:
        self.texts: list[tuple[int, object]] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: object) -> None:
        bar = trainer.progress_bar_callback
        assert bar is not None
        self.texts.append((trainer.global_step, bar.get_metrics(trainer, pl_module).get("replay")))


@pytest.mark.parametrize("bar", [TQDMProgressBar, RichProgressBar])
@pytest.mark.parametrize("before", [True, False])
def test_a_progress_bar_says_which_replayed_step_it_is(
    tmp_path: Path, bar: type[ProgressBar], before: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    """While replaying and not after; wherever the bar stands among the callbacks; and it is left as it was."""
    shown, own_bar = Shown(), bar()
    report = resumed(
        tmp_path, *([own_bar] if before else []), shown, *([] if before else [own_bar]), enable_progress_bar=True
    ).report
    assert report.resumed_from is not None
    dense = report.resumed_from
    first = [(dense - 2, "1/3"), (dense - 1, "2/3"), (dense, "3/3")]
    assert shown.texts == [*first, *[(step, None) for step in range(dense + 1, 13)]]
    assert "get_metrics" not in vars(own_bar)
    assert bool(capfd.readouterr().out)


def test_a_resumed_run_with_a_monitor_ends_as_one_without(tmp_path: Path) -> None:
    """The monitor changes nothing that is trained."""
    whole = fit(tmp_path / "whole", steps=12)
    with pytest.raises(RuntimeError, match="for this test"):
        fit(
            tmp_path / "first", ExpertLoadMonitor(), Stop(), SparseCheckpoint(str(tmp_path / "run"), window=4), steps=12
        )
    again = fit(tmp_path / "second", ExpertLoadMonitor(1), SparseCheckpoint(str(tmp_path / "run"), window=4), steps=12)
    want = whole.state_dict()
    assert all(torch.equal(value, want[name]) for name, value in again.state_dict().items())


@pytest.mark.parametrize("expert_parallel", [1, 2])
def test_ranks_are_summed_in_one_collective_per_row(tmp_path: Path, expert_parallel: int) -> None:
    """Rows tell the tokens of the whole world; steps without a row send nothing."""

    def work(rank: int) -> tuple[list[dict[str, Tensor]], int]:
        calls: list[int] = []
        reduce = torch.distributed.all_reduce

        def counted(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            if tensor.dtype == torch.int64:
                calls.append(tensor.numel())
            return reduce(tensor, *args, **kwargs)

        torch.distributed.all_reduce = counted  # in this fork only
        hand = ByHand(2)
        strategy = MoEStrategy(expert_parallel=expert_parallel)
        fit(tmp_path, ExpertLoadMonitor(), hand, steps=4, devices=2, strategy=strategy, limit_val_batches=0)
        return hand.rows, calls.count(3 * E)

    results = run_world(2, work, process_group=False)
    found = rows(tmp_path)
    for step, first, second in zip((1, 3), results[0][0], results[1][0], strict=True):
        want = expected(first["listed"] + second["listed"], "listed")
        want |= expected(first["kept"] + second["kept"], "own")
        assert {name: found[step][name] for name in want} == pytest.approx(want, rel=1e-6)
    assert [num_calls for _, num_calls in results] == [2, 2]


def test_figures_of_all_ranks_come_with_the_same_collective(tmp_path: Path) -> None:
    """Bytes of all are added up, and the stall is that of the slowest; rank 0 alone knows the causes of its own."""

    def work(rank: int) -> list[tuple[float, int, int]]:
        own = SparseCheckpoint(str(tmp_path / "run"), window=2)
        seen: list[tuple[float, int, int]] = []

        class Peek(Callback):
            def on_train_batch_end(self, trainer: Trainer, *args: object) -> None:
                report = own.report
                stall = sum(report.stall_seconds.values())
                seen.append((stall, report.nbytes_captured, report.nbytes_persisted))

        strategy = MoEStrategy(expert_parallel=3)
        fit(tmp_path, Wait(own), Peek(), ExpertLoadMonitor(1), own, steps=5, devices=3, strategy=strategy)
        return seen

    ranks, found = run_world(3, work, process_group=False), rows(tmp_path)
    for step in range(1, 5):
        row = found[step]
        gained = [[now - before for before, now in zip(r[step - 1], r[step], strict=True)] for r in ranks]
        captured = sum(gain[1] for gain in gained)
        assert row["moe/captured_nbytes_per_step"] == captured
        assert row["moe/stall_seconds/slowest_rank"] == pytest.approx(max(gain[0] for gain in gained), rel=0.05)
        assert bool(row["moe/persisted_nbytes_per_second"]) == any(gain[2] for gain in gained)
    assert captured > 0


def test_a_model_without_experts_has_the_figures_of_checkpoints_only(tmp_path: Path) -> None:
    """And without a logger the newest row can still be read."""
    monitor = ExpertLoadMonitor(every_n_steps=1)
    fit(
        tmp_path,
        monitor,
        DenseCheckpoint(str(tmp_path / "run"), every_n_steps=1),
        model=tiny.ToZero(nn.Linear(D, D)),
        logger=False,
    )
    assert monitor.latest["moe/window"] == 1
    assert monitor.latest["moe/gap_steps"] == monitor.latest["moe/rest_seconds/storage"] == 0  # too short to tell
    assert monitor.latest["moe/overhead/all"] >= monitor.latest["moe/overhead/storage"]
    assert not [name for name in monitor.latest if "_share/" in name or "skew" in name]


def test_layers_that_cannot_be_counted_are_named_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The others are still read."""

    def half(module: nn.Module, *, ep_size: int) -> OperatorSet:
        found = discover(module, ep_size=ep_size)
        listed, own = found.layers
        return replace(found, layers=(replace(listed, count=None), own))

    monkeypatch.setattr("lightning_moe_ckpt.callbacks._loads.discover", half)
    model = Model()
    model.configure_model()
    assert model.own is not None
    with caplog.at_level(logging.WARNING):
        loads = LayerLoads(model, ep_size=1, device=torch.device("cpu"))
    (message,) = [record.message for record in caplog.records]
    assert "['listed'] is not logged" in message
    model.own(torch.ones(3, D))
    answer = loads.read()
    assert answer is not None
    (own,), _ = answer
    assert own.layer == "own"
    assert own.drops is not None
    assert int(own.tokens.sum() + own.drops.sum()) == 3
    loads.remove()


def test_an_argument_out_of_range_is_quoted() -> None:
    """As the user wrote it."""
    with pytest.raises(ConfigurationError, match="every_n_steps=0"):
        ExpertLoadMonitor(every_n_steps=0)


def test_a_configuration_file_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """LightningCLI builds it from YAML, defaults included."""
    (tmp_path / "config.yaml").write_text(
        "trainer:\n  logger: false\n  accelerator: cpu\n  callbacks:\n"
        "    - class_path: lightning_moe_ckpt.callbacks.ExpertLoadMonitor\n      init_args: {every_n_steps: 7}\n"
        "    - class_path: lightning_moe_ckpt.callbacks.ExpertLoadMonitor\n"
    )
    monkeypatch.setattr("sys.argv", ["train", "--config", str(tmp_path / "config.yaml")])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning uses what jsonargparse deprecates
        cli = LightningCLI(Model, run=False)
    callbacks: list[Callback] = cli.trainer.callbacks  # type: ignore[attr-defined]
    monitors = [callback for callback in callbacks if isinstance(callback, ExpertLoadMonitor)]
    assert [monitor.every_n_steps for monitor in monitors] == [7, None]


def test_hooks_are_gone_after_the_fit_and_a_second_fit_counts_anew(tmp_path: Path) -> None:
    """A monitor that outlives its fit would count, and hold on to, models it should not."""
    monitor = ExpertLoadMonitor(every_n_steps=2)
    for folder in ("first", "second"):
        hand = ByHand(2)
        model = fit(tmp_path / folder, monitor, hand, steps=2)
        assert not [name for name, module in model.named_modules() if module._forward_pre_hooks]
        want = expected(hand.rows[0]["listed"], "listed")
        assert {name: monitor.latest[name] for name in want} == pytest.approx(want, rel=1e-6)
