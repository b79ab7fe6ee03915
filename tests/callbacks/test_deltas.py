"""Gradients recorded in a real fit lead from each boundary's segment to the next one's, byte for byte.

In the place of copies on other nodes stands a mirror: it keeps the segment of the boundary before, and rebuilds.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from door import Baseline, DeltaDecoder, WriteJob, encode_delta
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

from lightning_moe_ckpt.callbacks import SelectiveExpertCheckpoint
from lightning_moe_ckpt.moe import MoELayer
from lightning_moe_ckpt.policies import Audience
from lightning_moe_ckpt.session import _opening
from lightning_moe_ckpt.storage import RankMarker, SegmentEntry
from lightning_moe_ckpt.tiers import Gradients, Markers, SealedSegment, TierWorker

FEATURES, HIDDEN, NUM_EXPERTS = 16, 64, 4
EXPERT_NUMEL = FEATURES * HIDDEN * 2


@dataclass
class Seen:
    """Of one boundary."""

    step: int
    known: bool
    """Whether there were gradients to send."""
    equal: bool | None
    """Whether they led here."""
    payload_nbytes: int
    nbytes: int


@dataclass
class Mirror(TierWorker):
    """Stands for the worker of copies on other nodes."""

    seen: list[Seen] = field(default_factory=list)

    def __init__(self, markers: Markers, audiences: frozenset[Audience]) -> None:
        super().__init__("peer", markers)
        self.seen, self.audiences = [], audiences
        self._before: tuple[int, Tensor] | None = None

    @property
    @override
    def idle(self) -> bool:
        return True

    @property
    @override
    def wants_gradients(self) -> bool:
        return True

    @override
    def _put(self, job: WriteJob, segment: SealedSegment) -> list[SegmentEntry]:
        entry = segment.digested()
        now = torch.frombuffer(bytearray(segment.view), dtype=torch.uint8)
        gradients = segment.step_record.gradients() if segment.step_record is not None else None
        equal, nbytes = None, 0
        if self._before is not None and gradients is not None and self._before[0] == segment.step - 1:
            rebuilt, nbytes = rebuild(self._before[1], now, gradients)
            equal = torch.equal(rebuilt, now)
        self.seen.append(Seen(segment.step, gradients is not None, equal, nbytes, now.numel()))
        self._before = segment.step, now
        return entry

    @override
    def _finish(self, job: WriteJob, marker: RankMarker) -> None:
        """It is seen."""


def rebuild(before: Tensor, now: Tensor, gradients: Gradients) -> tuple[Tensor, int]:
    """What a holder would have, and what it would be sent."""
    delta = encode_delta(Baseline.of(before), now, gradients)
    room = torch.zeros(now.numel() + 64 + gradients.area.numel(), dtype=torch.uint8)
    decoder = DeltaDecoder(delta.recipe, before, room)
    offset = 0
    for view in delta.payload:
        decoder.place(offset, view.numel()).copy_(view)
        decoder.arrived(view.numel())
        offset += view.numel()
    assert decoder.whole
    return decoder.segment, delta.payload_nbytes


class Experts(nn.ModuleList):
    """Modules, of which the token's feature chooses one; some never get any."""

    def __init__(self, used: int) -> None:
        super().__init__(nn.Linear(FEATURES, FEATURES) for _ in range(NUM_EXPERTS))
        self.used = used


class ListLayer(nn.Module):
    """A mixture of modules."""

    def __init__(self, used: int) -> None:
        super().__init__()
        self.gate, self.experts, self.used = nn.Linear(FEATURES, NUM_EXPERTS), Experts(used), used

    def forward(self, x_TD: Tensor) -> Tensor:
        probs_TE = self.gate(x_TD).softmax(-1)
        weight_T, expert_T = probs_TE[:, : self.used].max(-1)
        return torch.stack([
            weight * self.experts[int(expert)](x_D) for weight, expert, x_D in zip(weight_T, expert_T, x_TD, strict=True)
        ])  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Case:
    """A fit."""

    layer: str = "stacked"
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW
    options: tuple[tuple[str, Any], ...] = ()
    trainer: tuple[tuple[str, Any], ...] = ()
    set_to_none: bool = True
    schedule: bool = True
    callbacks: tuple[Callable[[], Callback], ...] = ()
    budget: int = 10**7
    stay: int = NUM_EXPERTS
    """Experts that are in two generations that follow each other, at least."""
    deltas: int = 9
    """Boundaries whose gradients lead there, of ten; the first has none before it."""
    dropped: tuple[int, ...] = ()
    """Boundaries of which nothing is sent, because it would lead elsewhere."""


class Net(LightningModule):
    """Dense, experts, dense."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        self.first = nn.Linear(FEATURES, FEATURES)
        self.second = MoELayer(FEATURES, HIDDEN, NUM_EXPERTS, bias=False) if case.layer == "stacked" else ListLayer(3)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = (self.second(self.first(batch[0])) - batch[0]).pow(2).mean()
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.second(batch[0])

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad(set_to_none=self.case.set_to_none)

    def configure_optimizers(self) -> Any:
        matrices = [p for p in self.parameters() if p.ndim > 1]
        others = [p for p in self.parameters() if p.ndim <= 1]
        groups = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
        optimizer = self.case.optimizer(groups, lr=0.01, **dict(self.case.options))
        if not self.case.schedule:
            return optimizer
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def fit(case: Case, folder: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[list[Seen], Any]:
    mirrors: list[Mirror] = []

    def join(config: Any, claim: Any, markers: Markers, *args: Any, plan: Any, **more: Any) -> list[Mirror]:
        plan.deltas()
        mirrors.append(Mirror(markers, plan.peer_audiences))
        return mirrors

    monkeypatch.setattr(_opening, "join_peers", join)
    torch.manual_seed(3)
    module = Net(case)
    own = SelectiveExpertCheckpoint(folder / "run", local_budget=case.budget, remote_budget=case.budget, **options)
    settings = {"accumulate_grad_batches": 1, "limit_val_batches": 0, **dict(case.trainer)}
    rows = torch.randn(11 * settings["accumulate_grad_batches"] * 8, FEATURES)
    trainer = Trainer(
        accelerator="cpu", max_epochs=1, logger=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[*(make() for make in case.callbacks), Slow(), own], **settings,
    )  # fmt: skip
    data = DataLoader(TensorDataset(rows), batch_size=8)
    trainer.fit(module, data, data)
    return mirrors[0].seen, own


class Slow(Callback):
    """Steps that take a while: on a busy machine memory would be full of what was not looked at, and pass a step over."""

    @override
    def on_train_batch_start(self, *args: object) -> None:
        time.sleep(0.02)


class Edits(Callback):
    """Weights of an expert are edited in a hook, once."""

    hook, at = "on_train_batch_end", 4

    def edit(self, trainer: Trainer, pl_module: Any) -> None:
        if trainer.global_step == self.at:
            with torch.no_grad():
                pl_module.second.w1.mul_(1.01)


class EditsAfterStep(Edits):
    """Before the boundary is taken."""

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *args: object) -> None:
        self.edit(trainer, pl_module)


class EditsBeforeStep(Edits):
    """After the boundary before was sealed."""

    @override
    def on_after_backward(self, trainer: Trainer, pl_module: Any) -> None:
        self.edit(trainer, pl_module)


class EditsGradients(Edits):
    """Right after the step that consumed them."""

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *args: object) -> None:
        if trainer.global_step == self.at:
            pl_module.second.w1.grad.mul_(2)


def options(**given: Any) -> tuple[tuple[str, Any], ...]:
    return tuple(given.items())


CASES = {
    "AdamW": Case(options=options(weight_decay=0.1)),
    "Adam, L2, amsgrad": Case(optimizer=torch.optim.Adam, options=options(weight_decay=0.1, amsgrad=True)),
    "AdamW, maximize, amsgrad": Case(options=options(maximize=True, amsgrad=True, betas=(0.4, 0.9), eps=1e-3)),
    "clipped by norm, accumulated": Case(trainer=options(gradient_clip_val=0.01, accumulate_grad_batches=2)),
    "clipped by value, no schedule": Case(
        trainer=options(gradient_clip_val=1e-3, gradient_clip_algorithm="value"), schedule=False
    ),
    "gradients set to zero": Case(set_to_none=False, trainer=options(accumulate_grad_batches=2)),
    "modules, one never used": Case(layer="list", options=options(weight_decay=0.1)),
    "modules, gradients set to zero": Case(layer="list", set_to_none=False),
    "three experts in turns": Case(budget=110_000 + 7 * 12 * EXPERT_NUMEL // 2, stay=2, optimizer=torch.optim.Adam),
    "bf16-mixed": Case(trainer=options(precision="bf16-mixed")),
    "validated": Case(trainer=options(limit_val_batches=1, val_check_interval=3)),
    "averaged": Case(callbacks=(lambda: EMAWeightAveraging(decay=0.8),)),
    "edited after a step": Case(callbacks=(EditsAfterStep,), deltas=8, dropped=(4,)),
    "edited before a step": Case(callbacks=(EditsBeforeStep,), deltas=8, dropped=(5,)),
}


@pytest.mark.parametrize("name", CASES)
def test_recorded_gradients_lead_to_the_bytes_of_the_next_boundary(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the optimizer, clipping, accumulation, schedule and precision; what would lead elsewhere is not offered."""
    case = CASES[name]
    seen, _ = fit(case, tmp_path, monkeypatch)
    assert [each.step for each in seen] == list(range(1, 11))
    assert tuple(each.step for each in seen if not each.known) == case.dropped
    told = [each for each in seen if each.equal is not None]
    assert len(told) == case.deltas
    assert [each.step for each in told if not each.equal] == []
    numel = EXPERT_NUMEL if case.layer == "stacked" else FEATURES * (FEATURES + 1)
    assert max(each.nbytes - each.payload_nbytes for each in told) > 7.9 * numel * min(case.stay, 3)


def test_gradients_edited_after_their_step_lead_elsewhere_and_are_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the step and the boundary nobody copies them yet: what was consumed is gone, and not sent."""
    seen, _ = fit(Case(callbacks=(EditsGradients,)), tmp_path, monkeypatch)
    assert [each.step for each in seen if not each.known] == [4]
    assert all(each.equal for each in seen if each.equal is not None)


REFUSED: dict[str, tuple[Case, dict[str, Any], str]] = {
    "SGD": (Case(optimizer=torch.optim.SGD), {}, "SGD is not Adam"),
    "fused": (Case(options=options(fused=True)), {}, "rounds otherwise"),
    "foreach": (Case(options=options(foreach=True)), {}, "rounds otherwise"),
    "double": (Case(trainer=options(precision="64-true")), {}, "nothing is trained in float32"),
    "every other step": (Case(), {"every_n_steps": 2}, "2 steps apart"),
    "not wanted": (Case(), {"delta": None}, ""),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_repeated_is_sent_whole_and_the_log_says_why(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is recorded, and slots have no room for it; one line, none if it was not asked for."""
    case, given, said = REFUSED[name]
    with caplog.at_level(logging.INFO, logger="lightning_moe_ckpt.planning._planning"):
        seen, own = fit(case, tmp_path, monkeypatch, **given)
    lines = [message for message in caplog.messages if "sent to other nodes as they are" in message]
    assert len(lines) == (1 if said else 0)
    assert said in "".join(lines)
    assert not any(each.known for each in seen)
    assert own.report.deltas is None


def test_arguments_out_of_range_are_refused() -> None:
    """The error shows the call, and what it may be."""
    with pytest.raises(
        ValueError, match=r"`SelectiveExpertCheckpoint\(delta='fp16'\)` must be 'lossless', 'bf16' or None"
    ):
        SelectiveExpertCheckpoint("/ckpt", delta="fp16")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"resync_every=0.*1 or more generations"):
        SelectiveExpertCheckpoint("/ckpt", resync_every=0)
