"""Audits find ranks that compute or hold wrong bits, name them, change no bit of training, and stay silent otherwise."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from fit.test_departed import Heard
from launcher import run_world
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from strategy._staged import Staged
from tiny import ToZero, fit, rows, waves
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from typing_extensions import override

from lightning_moe_ckpt.callbacks import DenseCheckpoint, ExpertLoadMonitor, SparseCheckpoint
from lightning_moe_ckpt.errors import SilentFault
from lightning_moe_ckpt.inspection._progress_views import figures
from lightning_moe_ckpt.inspection._run_progress import Follower
from lightning_moe_ckpt.moe import MoELayer
from lightning_moe_ckpt.process import AuditFigures
from lightning_moe_ckpt.storage import RunView, open_backend
from lightning_moe_ckpt.strategy import MoEStrategy

STEPS, AT = 6, 4
"""Steps of a training, and that in which a fault strikes."""


class Net(ToZero):
    """Layers with buffers, random numbers, experts, and an attribute that steps read and write."""

    def __init__(self) -> None:
        super().__init__(nn.Identity())
        self.seen = 0.0

    @override
    def configure_model(self) -> None:
        if len(self.net) == 1:
            torch.manual_seed(0)
            layers = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.1), MoELayer(16, 16, 4), nn.Linear(16, 8)
            self.net = nn.Sequential(*layers)

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen = 0.9 * self.seen + 0.1 * float(batch[0].mean())
        loss = super().training_step(batch, batch_idx) * (1 + self.seen)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss


class Strikes(Callback):
    """A silent fault on this rank: a bit of a gradient, an output, a weight or a moment, once, or in each output from then on."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    @property
    def armed(self) -> bool:
        return "MOE_TEST_ARMED" in os.environ  # what a step changes in a callback is undone with the step

    @armed.setter
    def armed(self, armed: bool) -> None:
        os.environ.update({"MOE_TEST_ARMED": ""} if armed else {})
        if not armed:
            os.environ.pop("MOE_TEST_ARMED", None)

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.armed = False
        self.layer = next(each for each in pl_module.modules() if isinstance(each, nn.Linear))
        self.layer.weight.register_hook(self._gradient)  # type: ignore[no-untyped-call]
        self.layer.register_forward_hook(lambda *call: self._output(trainer, call[2]))

    @override
    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        if self.kind in ("gradient", "output") and trainer.global_step + 1 == AT:
            self.armed = True

    @override
    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_step + 1 != AT:
            return
        self.armed = self.kind == "play"
        if self.kind == "weight":
            flip(self.layer.weight)
        elif self.kind == "moment":
            flip(trainer.optimizers[0].state[self.layer.weight]["exp_avg"])

    def _gradient(self, grad: Tensor) -> Tensor:
        return self._struck(grad) if self.armed and self.kind in ("gradient", "play") else grad

    def _output(self, trainer: Trainer, output: Tensor) -> Tensor:
        if (self.kind == "sticky" and trainer.global_step + 1 >= AT) or (self.armed and self.kind == "output"):
            self._strike(output)
        return output

    def _struck(self, value: Tensor) -> Tensor:
        value = value.clone()
        self._strike(value)
        return value

    def _strike(self, value: Tensor) -> None:
        self.armed = False
        with _disable_current_modes():  # a device's faults are no operations
            flip(value)


def flip(value: Tensor) -> None:
    with torch.no_grad():
        words = value.detach().view(-1).view(torch.int32)
        words[len(words) // 2] ^= 1 << 18


class Fit(NamedTuple):
    """What a rank has at a training's end."""

    state: dict[str, Tensor]
    audit: AuditFigures
    error: str
    lines: list[str]
    row: dict[str, float]


class Setup(NamedTuple):
    """A training."""

    ranks: int
    strategy: Callable[[], Any] = MoEStrategy
    module: Callable[[], Any] = Net
    options: dict[str, Any] = {}  # noqa: RUF012  # never changed


PLACES = {
    "one": Setup(1, lambda: "auto"),
    "two": Setup(2),
    "three": Setup(3),
    "ddp": Setup(3, lambda: DDPStrategy(process_group_backend="gloo")),
    "experts": Setup(4, lambda: MoEStrategy(expert_parallel=2)),
    "stages": Setup(4, lambda: MoEStrategy(pipeline_parallel=2, micro_batches=2), lambda: Staged(0.1)),
    "sharded": Setup(3, lambda: MoEStrategy(shard_optimizer=True), options={"gradient_clip_val": 0.5}),
    "accumulated": Setup(3, options={"accumulate_grad_batches": 2, "precision": "bf16-mixed"}),
}


def train(
    path: Path, setup: Setup, every: int | None, kind: str = "", at: int = 0, *, steps: int = STEPS, **arguments: Any
) -> list[Fit]:
    def work(rank: int) -> Fit:
        heard, error, module = Heard.of_all(), "", setup.module()
        if every is not None:
            arguments["audit_every_n_steps"] = every
        checkpoint = arguments.pop("policy", DenseCheckpoint)(str(path), overhead_target=None, **arguments)
        monitor = ExpertLoadMonitor(every_n_steps=1)
        more = [Strikes(kind)] if kind and rank == at else []
        data = None if setup.module is not Net else rows(waves(64 * setup.ranks, 8), batch_size=8)
        options = {"max_steps": steps, "devices": setup.ranks, "strategy": setup.strategy(), **setup.options}
        try:
            fit(module, data, checkpoint, monitor, *more, **options)
        except SilentFault as fault:
            error = str(fault)
        state = {name: each.clone() for name, each in module.state_dict().items()}
        return Fit(state, checkpoint.report.audit, error, heard.lines, monitor.latest)

    return run_world(setup.ranks, work, timeout=timedelta(seconds=180), process_group=False)


def alike(ranks: list[Fit], others: list[Fit]) -> bool:
    return all(
        torch.equal(a.state[name], b.state[name]) for a, b in zip(ranks, others, strict=True) for name in a.state
    )


soak = pytest.mark.soak


@pytest.mark.parametrize(
    "place",
    [
        "one",
        "three",
        "stages",
        *(pytest.param(place, marks=soak) for place in ("experts", "sharded", "accumulated")),
    ],
)
def test_audited_training_has_the_same_bits(place: str, tmp_path: Path) -> None:
    """All steps but the first are audited, without a finding; random numbers, buffers and attributes are those of no audits."""
    audited, plain = train(tmp_path / "a", PLACES[place], 1), train(tmp_path / "b", PLACES[place], None)
    assert alike(audited, plain)
    for each in audited:
        assert each.audit.audits == STEPS - 1
        assert (each.audit.audited, each.audit.findings, each.audit.left_out) == (STEPS - 1, (), ())
    assert plain[0].audit == AuditFigures()
    assert audited[0].row["moe/audits"] == STEPS - 1


@pytest.mark.parametrize(
    ("place", "kind", "at", "named"),
    [
        pytest.param("one", "gradient", 0, (0,), marks=soak),
        pytest.param("two", "output", 1, (1,), marks=soak),
        ("two", "sticky", 1, (0, 1)),
        pytest.param("ddp", "sticky", 1, (1,), marks=soak),
        ("three", "play", 2, (2,)),
        pytest.param("three", "moment", 0, (0,), marks=soak),
        ("experts", "output", 3, (3,)),
        ("stages", "output", 2, (2,)),
        pytest.param("stages", "sticky", 3, (2, 3), marks=soak),  # the same stage of both replicas
        pytest.param("stages", "weight", 0, (0, 1), marks=soak),
    ],
)
def test_a_fault_is_found_and_named(place: str, kind: str, at: int, named: tuple[int, ...], tmp_path: Path) -> None:
    """In the step that it strikes; which of two replicas cannot be said where it stays, and which rank of a replica can."""
    ranks = train(tmp_path, PLACES[place], 1, kind, at, every_n_steps=1)
    assert len({(each.audit.findings, each.audit.audits) for each in ranks}) == 1
    first, *_ = ranks[0].audit.findings
    assert (first.ranks, first.sticky) == (named, kind in ("sticky", "moment", "weight"))
    assert (first.check, first.step) == (("state", AT - 1) if kind in ("weight", "moment") else ("compute", AT))
    assert first.operators
    lines = [line for line in ranks[0].lines if first.text in line]
    assert len(lines) == 1, ranks[0].lines
    shown = figures(Follower(RunView.open(open_backend(str(tmp_path)))).look())
    assert first.text in shown["audits"]


def test_a_found_fault_stops_the_run_before_it_does_harm(tmp_path: Path) -> None:
    """No rank takes the step; another start, on devices that compute right, ends like a training without a fault."""
    stopped = train(tmp_path / "a", PLACES["three"], 2, "output", 1, on_fault="stop", every_n_steps=1)
    assert all("rank 1 on" in each.error for each in stopped)
    again = train(tmp_path / "a", PLACES["three"], 2, on_fault="stop", every_n_steps=1)
    plain = train(tmp_path / "b", PLACES["three"], None)
    assert alike(again, plain)
    assert again[0].audit.audits
    assert not again[0].audit.findings


class Reads(ToZero):
    """A step that depends on what no other rank can be given."""

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * (1 + self.global_rank)


_times = itertools.count(1)


class Varies(ToZero):
    """A step that is another one each time, by what nobody can put back."""

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * next(_times)


class ByHand(ToZero):
    """Manual optimization."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self.automatic_optimization = False

    @override
    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Reads, "a step depends on what other ranks are not given"),
        (Varies, "some kernel is not deterministic"),
        (ByHand, "manual optimization"),
    ],
)
def test_steps_that_cannot_be_played_are_no_faults(kind: Callable[..., Any], said: str, tmp_path: Path) -> None:
    """They are named once, and state is still audited."""

    def module() -> Any:
        torch.manual_seed(0)
        return kind(nn.Linear(8, 8))

    def work(rank: int) -> tuple[AuditFigures, list[str]]:
        heard = Heard.of_all()
        logging.getLogger("lightning_moe_ckpt").setLevel(logging.WARNING)
        policy = DenseCheckpoint if kind is ByHand else SparseCheckpoint
        checkpoint = policy(str(tmp_path), audit_every_n_steps=1, overhead_target=None)
        strategy = DDPStrategy(process_group_backend="gloo")
        fit(module(), rows(waves(64, 8), batch_size=8), checkpoint, max_steps=4, devices=2, strategy=strategy)
        return checkpoint.report.audit, heard.lines

    found = run_world(2, work, timeout=timedelta(seconds=180), process_group=False)
    for audit, _ in found:
        assert not audit.findings
        assert said in audit.left_out[0]
        assert audit.audits == 3
    assert len([line for line in found[0][1] if said in line]) == 1, found[0][1]
