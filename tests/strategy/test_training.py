"""Training with experts spread over ranks: the same model everywhere, and the one a single process would get."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from launcher import WorldFailed
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.utils.data import DistributedSampler

from lightning_moe_ckpt.errors import ConfigurationError
from lightning_moe_ckpt.moe import MoELayer
from lightning_moe_ckpt.parallel import current_groups
from lightning_moe_ckpt.strategy import MoEStrategy

CLIPPED = {"gradient_clip_val": 0.3, "accumulate_grad_batches": 2}
LOW, LOWER = {"precision": "bf16-mixed"}, {"precision": "bf16-true"}
RUNS = [(3, 1, {}), (3, 3, CLIPPED), (4, 2, LOW)]
MORE_RUNS = [(1, 1, CLIPPED), (3, 3, {}), (4, 2, CLIPPED), (4, 4, LOWER)]


@pytest.mark.parametrize(
    ("world_size", "ep_size", "options"), [*RUNS, *(pytest.param(*run, marks=pytest.mark.soak) for run in MORE_RUNS)]
)
def test_replicas_stay_equal_and_sharding_changes_nothing_but_rounding(
    fit: Any, tools: Any, world_size: int, ep_size: int, options: dict[str, Any]
) -> None:
    """Copies agree in bits after two ragged epochs; the whole model is close to Lightning's DDP without sharding."""
    ranks = fit(world_size, ep_size, **options)
    tools.assert_replicas_agree(ranks, ep_size)
    assert all(torch.equal(rank.norm, ranks[0].norm) for rank in ranks if rank.norm is not None)
    ddp = fit(world_size, strategy=DDPStrategy, **options)
    assert ranks[0].global_step == ddp[0].global_step
    rtol, atol = (0.05, 0.02) if "precision" in options else (1e-3, 1e-5)
    for name, parameter in tools.whole(ranks, ep_size).items():
        torch.testing.assert_close(parameter, ddp[0].parameters[name], rtol=rtol, atol=atol)


@pytest.mark.soak
def test_bits_do_not_depend_on_the_bucket_size_and_those_of_a_plain_all_reduce_do(fit: Any) -> None:
    """At three ranks, where the order of a sum matters. The second half shows that the first can see."""

    def changed(mode: Any) -> int:
        first, second = (
            fit(3, strategy=lambda nbytes=nbytes: MoEStrategy(gradient_reduction=mode, bucket_nbytes=nbytes))[0]
            for nbytes in (600, 10**6)
        )
        return sum(int((first.parameters[name] != second.parameters[name]).sum()) for name in first.parameters)

    assert changed("ordered") == 0
    assert changed("allreduce") > 0


def test_a_string_selects_the_strategy(fit: Any) -> None:
    """`Trainer(strategy="moe")`, with a sampler for each rank as under DDP."""

    def after(trainer: Any) -> tuple[str, bool, int]:
        sampler = trainer.train_dataloader.sampler
        return type(trainer.strategy).__name__, isinstance(sampler, DistributedSampler), trainer.world_size

    for rank in fit(3, strategy=lambda: "moe", after=after):
        assert rank.value == ("MoEStrategy", True, 3)


class Recorder(pl.Callback):
    """What user code sees of the gradients."""

    def __init__(self) -> None:
        self.after_backward: list[Tensor] = []
        self.before_step: list[float] = []
        self.clipped: list[Tensor] = []

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        grad = pl_module.get_parameter("inp.weight").grad
        assert grad is not None
        self.after_backward.append(grad.clone())

    def on_before_zero_grad(self, trainer: pl.Trainer, pl_module: Any, optimizer: Any) -> None:
        norm = trainer.strategy.last_grad_norm  # type: ignore[attr-defined]
        if norm is not None:
            self.before_step.append(norm.item())
            self.clipped.append(trainer.strategy.grad_norm(pl_module.parameters()))  # type: ignore[attr-defined]


def test_callbacks_see_reduced_gradients_and_clipping_uses_the_norm_of_all_experts(fit: Any) -> None:
    """`on_after_backward` sees the mean, as under DDP; after clipping the whole model has the norm asked for."""

    def after(trainer: pl.Trainer) -> tuple[list[Tensor], list[float], list[Tensor]]:
        recorder = next(callback for callback in trainer.callbacks if isinstance(callback, Recorder))  # type: ignore[attr-defined]
        return recorder.after_backward, recorder.before_step, recorder.clipped

    ranks = fit(3, 3, callbacks=lambda: [Recorder()], after=after, gradient_clip_val=0.05)
    grads, norms, clipped = ranks[0].value
    assert len(grads) == ranks[0].global_step
    assert min(norms) > 0.05
    for norm in clipped:
        torch.testing.assert_close(norm, torch.tensor(0.05), rtol=1e-3, atol=0)
    for rank in ranks[1:]:
        assert all(torch.equal(a, b) for a, b in zip(rank.value[0], grads, strict=True))
        assert rank.value[1] == norms


class Freezer(pl.Callback):
    """Freezes other experts on every rank in every step."""

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        for position, (_, parameter) in enumerate(pl_module.moe.expert_parameters()):
            parameter.requires_grad_((position + batch_idx + trainer.global_rank) % 2 == 0)


@pytest.mark.parametrize(
    ("world_size", "ep_size"), [(4, 2), *(pytest.param(*each, marks=pytest.mark.soak) for each in ((3, 3), (3, 1)))]
)
def test_freezing_on_some_ranks_between_steps_neither_hangs_nor_diverges(
    fit: Any, tools: Any, world_size: int, ep_size: int
) -> None:
    """Replicas receive the gradient that any of them computed."""
    tools.assert_replicas_agree(fit(world_size, ep_size, callbacks=lambda: [Freezer()]), ep_size)


class Overflow(pl.Callback):
    """Puts an infinity into the gradient of one rank's experts, in one step."""

    def __init__(self, at_step: int, rank: int) -> None:
        self.at_step, self.rank = at_step, rank
        self.scales: list[float] = []
        self.moved: list[bool] = []

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, *args: Any) -> None:
        self.before = pl_module.moe.w1.detach().clone()

    def on_after_backward(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if trainer.global_step == self.at_step and trainer.global_rank == self.rank:
            pl_module.moe.w1.grad[0, 0, 0] = float("inf")

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *args: Any) -> None:
        self.scales.append(trainer.precision_plugin.scaler.get_scale())  # type: ignore[attr-defined]
        self.moved.append(not torch.equal(self.before, pl_module.moe.w1))


def test_an_overflow_in_one_ranks_experts_skips_the_step_on_all(fit: Any, tools: Any) -> None:
    """The verdict of the scaler is that of the world; scale and replicas stay equal."""

    def after(trainer: pl.Trainer) -> tuple[list[float], list[bool]]:
        overflow = next(callback for callback in trainer.callbacks if isinstance(callback, Overflow))  # type: ignore[attr-defined]
        return overflow.scales, overflow.moved

    ranks = fit(
        3,
        3,
        callbacks=lambda: [Overflow(at_step=3, rank=1)],
        after=after,
        plugins=lambda: [MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=64.0))],
        gradient_clip_val=0.5,
        max_epochs=1,
    )
    tools.assert_replicas_agree(ranks, 3)
    for rank in ranks:
        scales, moved = rank.value
        assert moved == [step != 3 for step in range(len(moved))]
        assert scales == [64.0 if step < 3 else 32.0 for step in range(len(scales))]


@pytest.mark.parametrize(("world_size", "ep_size"), [pytest.param(3, 1, marks=pytest.mark.soak), (3, 3)])
def test_buffers_are_those_of_rank_zero_everywhere(fit: Any, world_size: int, ep_size: int) -> None:
    """Batch statistics differ between ranks; after a step all hold rank 0's, as DDP's rank 0 does."""
    ranks = fit(world_size, ep_size, model={"norm": True})
    ddp = fit(world_size, strategy=DDPStrategy, model={"norm": True})
    assert ranks[0].buffers["norm.num_batches_tracked"] > 0
    for rank in ranks:
        for name, buffer in rank.buffers.items():
            assert torch.equal(buffer, ranks[0].buffers[name])
            torch.testing.assert_close(buffer, ddp[0].buffers[name], rtol=1e-3, atol=1e-5)


@pytest.mark.filterwarnings("ignore:Using `DistributedSampler` with the dataloaders")
def test_validation_leaves_experts_alone_and_groups_are_reset_at_the_end(fit: Any) -> None:
    """A run without training broadcasts dense weights, never one rank's experts; then the world is one again."""

    def after(trainer: pl.Trainer) -> tuple[float, float, Tensor, int]:
        fitted = trainer.lightning_module.get_parameter("moe.w1").detach().clone()
        size = current_groups().world_size
        (first,) = trainer.validate(trainer.lightning_module, verbose=False)
        (second,) = trainer.validate(trainer.lightning_module, verbose=False)
        assert torch.equal(fitted, trainer.lightning_module.get_parameter("moe.w1"))
        return first["val"], second["val"], fitted, size

    ranks = fit(3, 3, after=after, limit_val_batches=1.0, max_epochs=1)
    assert len({rank.value[0] for rank in ranks} | {rank.value[1] for rank in ranks}) == 1
    assert not torch.equal(ranks[0].value[2], ranks[1].value[2])
    assert [rank.value[3] for rank in ranks] == [1, 1, 1]


class Manual(pl.Callback):
    """Turns the module to manual optimization."""

    def setup(self, trainer: pl.Trainer, pl_module: Any, stage: str) -> None:
        pl_module.automatic_optimization = False
        original = pl_module.training_step

        def step(batch: Any, batch_idx: int) -> None:
            optimizer = pl_module.optimizers()
            optimizer.zero_grad()
            pl_module.manual_backward(original(batch, batch_idx))
            optimizer.step()

        pl_module.training_step = step


def test_manual_optimization_reduces_every_backward_or_is_refused_for_sharded_experts(fit: Any, tools: Any) -> None:
    """Without expert parallelism it is what automatic optimization does."""
    manual = fit(3, callbacks=lambda: [Manual()], max_epochs=1)
    automatic = fit(3, max_epochs=1)
    for name, parameter in automatic[0].parameters.items():
        assert torch.equal(parameter, manual[0].parameters[name])
    with pytest.raises(WorldFailed, match="Expert parallelism needs automatic optimization"):
        fit(3, 3, callbacks=lambda: [Manual()])


class BuildsEarly(pl.Callback):
    """Puts a layer into the module before the processes are set up."""

    def __init__(self) -> None:
        self.layer = MoELayer(6, 8, 12)

    def setup(self, trainer: pl.Trainer, pl_module: Any, stage: str) -> None:
        pl_module.moe = self.layer


def test_a_layer_built_before_the_processes_is_refused(fit: Any) -> None:
    """It would hold all experts on every rank; the error names it and says where to build it."""
    with pytest.raises(WorldFailed, match=r"(?s)`moe` was built for `expert_parallel=1`.*configure_model"):
        fit(3, 3, callbacks=lambda: [BuildsEarly()])
    fit(3, 1, callbacks=lambda: [BuildsEarly()], max_epochs=1)


def test_an_expert_parallel_size_that_does_not_fit_is_refused(fit: Any) -> None:
    """By the strategy, and against the number of processes."""
    with pytest.raises(ConfigurationError, match="expert_parallel=0"):
        MoEStrategy(expert_parallel=0)
    with pytest.raises(WorldFailed, match=r"expert_parallel=2.*3 processes"):
        fit(3, 2)
    with pytest.raises(WorldFailed, match=r"num_experts=7.*expert_parallel=3"):
        fit(3, 3, model={"num_experts": 7})
