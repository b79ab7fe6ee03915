"""A fit goes on from a checkpoint of another tool, imported by `moe-ckpt import`, on any ranks."""

from __future__ import annotations

import copy
import logging
import os
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from campaign._topologies import Layout, Travelling, Trip
from campaign._training import Checkpointing
from inspection._runs import FEATURES, Small, SmallMoE
from inspection.test_boxes import same
from inspection.test_shards import trained, whole
from launcher import run_world
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from safetensors.torch import save_file
from torch import Tensor, nn

from lightning_moe_ckpt import MoEStrategy
from lightning_moe_ckpt.callbacks import (
    DenseCheckpoint,
    DifferentialCheckpoint,
    PartialExpertCheckpoint,
    SparseCheckpoint,
)
from lightning_moe_ckpt.cli import main
from lightning_moe_ckpt.errors import IdentityMismatch
from lightning_moe_ckpt.inspection import verify
from lightning_moe_ckpt.storage import open_backend

STEPS = 12
"""Of two epochs of eight batches."""


class Scheduled(Small):
    """A rate that changes, a batch norm, and weights that do not train."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(FEATURES)
        self.fixed = nn.Linear(FEATURES, FEATURES).requires_grad_(requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.fixed(self.norm(x)))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), 1e-2)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.7), "interval": "step"}]


class Losses(Callback):
    """Keeps all losses, and the first rate and state that training has."""

    def __init__(self) -> None:
        self.losses: dict[int, float] = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.rate, self.step = trainer.optimizers[0].param_groups[0]["lr"], trainer.global_step

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *_: Any) -> None:
        self.losses[trainer.global_step] = outputs["loss"].item()


def fit(steps: int, *callbacks: Callback, module: LightningModule | None = None, **options: Any) -> tuple[Any, Losses]:
    """Train, whole epochs of the same batches; return the module and its losses."""
    os.environ.pop("PL_GLOBAL_SEED", None)
    seed_everything(1, verbose=False)
    module, losses, ckpt_path = module or Scheduled(), Losses(), options.pop("ckpt_path", None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = tiny.quiet_trainer(losses, *callbacks, max_steps=steps, **options)
        trainer.fit(module, tiny.rows(tiny.waves(16, FEATURES), 2), ckpt_path=ckpt_path)
    return module, losses


@pytest.fixture(scope="module")
def src(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A `.ckpt` of an epoch's end."""
    path = tmp_path_factory.mktemp("lightning") / "a.ckpt"
    module, _ = fit(8, enable_checkpointing=False)
    module.trainer.save_checkpoint(path)
    return path


def imported(src: Path, url: Path, part_nbytes: int = 500) -> str:
    assert main(["import", str(src), str(url), "--part-size", str(part_nbytes)]) == 0
    return str(url)


def test_a_fit_goes_on_as_lightning_does_from_the_file(
    src: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Losses, rates, weights, optimizer and progress have the bits of a fit with `ckpt_path`; what is not there is said."""
    module, losses = fit(STEPS, ckpt_path=src, enable_checkpointing=False)
    with caplog.at_level(logging.WARNING):
        other, found = fit(STEPS, DenseCheckpoint(imported(src, tmp_path / "run"), every_n_steps=2))
    assert "neither random state nor a place in the data" in caplog.text
    assert (found.step, found.rate) == (losses.step, losses.rate) == (8, pytest.approx(1e-2 * 0.7**2))
    assert found.losses == losses.losses
    assert same(other.state_dict(), module.state_dict())
    assert other.seen == module.seen
    states = [[*each.trainer.optimizers[0].state.values()] for each in (module, other)]
    assert all(same(*pair) for pair in zip(*states, strict=True))
    assert other.trainer.fit_loop.state_dict() == module.trainer.fit_loop.state_dict()
    third, _ = fit(STEPS + 2, DenseCheckpoint(str(tmp_path / "run"), every_n_steps=2))  # from the run's own checkpoint
    assert third.trainer.global_step == STEPS + 2


def test_two_ranks_go_on_from_it(src: Path, tmp_path: Path) -> None:
    """Both have weights and moments of the file."""
    url = imported(src, tmp_path / "run")
    content = torch.load(src, weights_only=True)

    class Look(Callback):
        def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
            self.weights = {name: each.clone() for name, each in pl_module.state_dict().items()}
            self.moments = [each["exp_avg"].clone() for each in trainer.optimizers[0].state.values()]

    def work(_: int) -> tuple[dict[str, Tensor], list[Tensor]]:
        look = Look()
        fit(10, look, DenseCheckpoint(url, every_n_steps=2), devices=2, strategy=MoEStrategy())
        return look.weights, look.moments

    for weights, moments in run_world(2, work, timeout=timedelta(seconds=60), process_group=False):
        assert same(weights, content["state_dict"])
        expected = [each["exp_avg"] for each in content["optimizer_states"][0]["state"].values()]
        assert all(map(torch.equal, moments, expected))


def test_experts_of_two_ranks_go_on_from_it(tmp_path: Path) -> None:
    """Each rank has its experts, weights and moments, of a file in which they are together."""
    module, _ = fit(3, module=SmallMoE(), enable_checkpointing=False)
    module.trainer.save_checkpoint(tmp_path / "a.ckpt")
    url = imported(tmp_path / "a.ckpt", tmp_path / "run")

    class Gather(Callback):
        def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
            strategy: Any = trainer.strategy
            self.weights = copy.deepcopy(dict(strategy.lightning_module_state_dict()))
            self.moments = copy.deepcopy(strategy.optimizer_state(trainer.optimizers[0])["state"])

    def work(_: int) -> tuple[dict[str, Tensor], dict[int, dict[str, Tensor]]]:
        gather = Gather()
        strategy = MoEStrategy(expert_parallel=2)
        fit(4, gather, DenseCheckpoint(url, every_n_steps=2), module=SmallMoE(), devices=2, strategy=strategy)
        return gather.weights, gather.moments

    weights, moments = run_world(2, work, timeout=timedelta(seconds=60), process_group=False)[0]
    content = torch.load(tmp_path / "a.ckpt", weights_only=True)
    assert same(weights, content["state_dict"])
    for number, state in content["optimizer_states"][0]["state"].items():
        assert same(moments[number], state)


@pytest.fixture(scope="module")
def of_one_rank(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A `.ckpt` of the end of an epoch of five steps, on one rank."""
    folder = tmp_path_factory.mktemp("one")
    trip, layout = Trip(checkpointing=Checkpointing(policy="dense"), one_process="auto"), Layout(ranks=1)
    trainer = trip.trainer(layout, [], max_steps=5, enable_checkpointing=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(Travelling(trip, layout), trip.loader(layout))
    trainer.save_checkpoint(folder / "a.ckpt")
    return folder / "a.ckpt"


@pytest.mark.parametrize(
    "layout",
    [Layout(ranks=2, stages=2), Layout(ranks=2, experts=2, zero=True), Layout(ranks=3, sharding="fsdp2")],
    ids=str,
)
def test_every_layout_goes_on_from_it(layout: Layout, of_one_rank: Path, tmp_path: Path) -> None:
    """Stages, experts with an optimizer in pieces, and shards: each rank begins with its part of the weights, at the file's step and rate."""
    url = imported(of_one_rank, tmp_path / "run", 5000)

    class Begin(Callback):
        def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
            self.weights = {name: whole(param) for name, param in pl_module.named_parameters()}
            self.at = trainer.global_step, trainer.optimizers[0].param_groups[0]["lr"]

    def work(_: int) -> tuple[dict[str, Tensor], tuple[int, float]]:
        begin, trip = Begin(), Trip(checkpointing=Checkpointing(policy="dense"))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer = trip.trainer(layout, [begin, DenseCheckpoint(url, every_n_steps=2)], max_steps=6)
            trainer.fit(Travelling(trip, layout), trip.loader(layout))
        assert trainer.global_step == 6
        return begin.weights, begin.at

    content, seen = torch.load(of_one_rank, weights_only=True), set[str]()
    for rank, (weights, at) in enumerate(
        run_world(layout.ranks, work, timeout=timedelta(seconds=90), process_group=False)
    ):
        seen |= weights.keys()
        assert at == (5, content["optimizer_states"][0]["param_groups"][0]["lr"])
        for name, found in weights.items():
            expected = content["state_dict"][name]
            if layout.experts > 1 and found.shape != expected.shape:
                expected = expected.chunk(layout.experts)[rank]
            assert torch.equal(found, expected)
    assert seen == content["state_dict"].keys()


@pytest.mark.parametrize(
    "make",
    [
        partial(SparseCheckpoint, window=2),
        DifferentialCheckpoint,
        partial(PartialExpertCheckpoint, k=2, every_n_steps=2),
    ],
    ids=["sparse", "differential", "partial"],
)
def test_every_policy_goes_on_from_it(make: Callable[[str], Callback], tmp_path: Path) -> None:
    """And from what it stores itself then; nothing there builds on the imported generation."""
    module, _ = fit(3, module=SmallMoE(), enable_checkpointing=False)
    module.trainer.save_checkpoint(tmp_path / "a.ckpt")
    url = imported(tmp_path / "a.ckpt", tmp_path / "run")
    straight, _ = fit(9, ckpt_path=tmp_path / "a.ckpt", module=SmallMoE(), enable_checkpointing=False)
    fit(7, make(url), module=SmallMoE())
    assert verify(open_backend(url)).sound
    found, losses = fit(9, make(url), module=SmallMoE())
    assert losses.step >= 5
    assert same(found.state_dict(), straight.state_dict())


def test_shards_go_on_from_a_folder_of_three_ranks_on_two(tmp_path: Path) -> None:
    """Under `ModelParallelStrategy`, whose folder of torch DCP has the optimizer's state by name."""

    class Save(Callback):
        def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
            trainer.save_checkpoint(tmp_path / "dcp")

    def work(run: str, size: int, steps: int, *callbacks: Callback) -> Any:
        checkpoint = DenseCheckpoint(str(tmp_path / run), every_n_steps=2)
        limit = timedelta(seconds=90)
        return run_world(
            size, lambda _: trained(checkpoint, (size, 1), steps, *callbacks), timeout=limit, process_group=False
        )

    weights, optimizer = work("first", 3, 3, Save())[0]
    imported(tmp_path / "dcp", tmp_path / "second")
    for found in work("second", 2, 3):  # trains no further
        assert same(found[0], weights)
        assert same(found[1], optimizer)


def test_weights_of_another_precision_are_converted(tmp_path: Path) -> None:
    """As `load_state_dict` does; training begins at step 0 with a new optimizer."""
    weights = {name: each.bfloat16() for name, each in Scheduled().state_dict().items() if each.is_floating_point()}
    weights |= {"norm.num_batches_tracked": torch.tensor(3)}
    save_file(weights, tmp_path / "model.safetensors")
    url = imported(tmp_path / "model.safetensors", tmp_path / "run")
    module, losses = fit(0, DenseCheckpoint(url, every_n_steps=2))
    assert same(module.state_dict(), {k: v.float() if v.is_floating_point() else v for k, v in weights.items()})
    module, losses = fit(2, DenseCheckpoint(url, every_n_steps=2))
    assert (losses.step, losses.rate, module.trainer.global_step) == (0, 1e-2, 2)


class Other(Scheduled):
    """Has a layer more, and one of another shape."""

    def __init__(self) -> None:
        super().__init__()
        self.more, self.fixed = nn.Linear(2, 2), nn.Linear(FEATURES, FEATURES, bias=False)


class Moved(Scheduled):
    """Trained by another optimizer."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 1e-2, momentum=0.9)


class Backwards(tiny.ToZero):
    """Layers of one shape, whose parameters the optimizer has backwards: only order tells their numbers apart."""

    def __init__(self) -> None:
        layers = [nn.Linear(FEATURES, FEATURES, bias=False) for _ in range(3)]
        super().__init__(*layers, optimizer=lambda params: torch.optim.AdamW([*params][::-1], 1e-2))


def test_numbers_in_another_order_are_found_out(tmp_path: Path) -> None:
    """The import takes them in the order of the module, for all it knows."""
    module, _ = fit(2, module=Backwards(), enable_checkpointing=False)
    module.trainer.save_checkpoint(tmp_path / "a.ckpt")
    url = imported(tmp_path / "a.ckpt", tmp_path / "run")
    with pytest.raises(IdentityMismatch, match="Give the optimizer its parameters as they were"):
        fit(3, DenseCheckpoint(url), module=Backwards())


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (Other, "`more.weight` has no values; `more.bias` has no values; `fixed.bias` is not in the model"),
        (Moved, "has no momentum_buffer"),
    ],
    ids=["names", "optimizer"],
)
def test_another_model_or_optimizer_is_refused(make: type[Scheduled], reason: str, src: Path, tmp_path: Path) -> None:
    """With what differs."""
    url = imported(src, tmp_path / "run")
    with pytest.raises(IdentityMismatch, match=reason):
        fit(10, DenseCheckpoint(url, every_n_steps=2), module=make())
