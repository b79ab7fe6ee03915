"""Lightning's own checkpoints hold every expert and load again at any number of expert-parallel ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from launcher import WorldFailed
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor

EXPERTS = ("moe.w1", "moe.b1", "moe.w2", "moe.b2")


def load(path: Path) -> dict[str, Any]:
    checkpoint: dict[str, Any] = torch.load(path, weights_only=False)
    return checkpoint


def saver(folder: Path) -> list[pl.Callback]:
    return [ModelCheckpoint(folder, filename="epoch{epoch}", auto_insert_metric_name=False, save_top_k=-1)]


def optimizer_state(trainer: pl.Trainer) -> dict[str, dict[str, Tensor]]:
    """State by parameter name, of this rank's part."""
    names = {id(p): name for name, p in trainer.lightning_module.named_parameters()}
    return {names[id(p)]: dict(state) for p, state in trainer.optimizers[0].state.items()}


@pytest.mark.parametrize(("world", "optimizer"), [((3, 3), "adamw"), ((4, 2), "sgd")])
def test_a_checkpoint_holds_all_experts_and_their_optimizer_state(
    fit: Any, tools: Any, tmp_path: Path, world: tuple[int, int], optimizer: str
) -> None:
    """One file; tensors as an unsharded model would have them; `step` once."""
    world_size, ep_size = world
    ranks = fit(
        world_size,
        ep_size,
        model={"optimizer": optimizer},
        callbacks=lambda: saver(tmp_path),
        after=optimizer_state,
        enable_checkpointing=True,
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["epoch0.ckpt", "epoch1.ckpt"]
    checkpoint = load(tmp_path / "epoch1.ckpt")
    whole = tools.whole(ranks, ep_size)
    names = list(whole)
    assert all(torch.equal(checkpoint["state_dict"][name], parameter) for name, parameter in whole.items())
    states = checkpoint["optimizer_states"][0]["state"]
    for idx, name in enumerate(names):
        for key, value in ranks[0].value[name].items():
            parts = [rank.value[name][key] for rank in ranks[:ep_size]]
            stacked = name in EXPERTS and value.ndim > 0
            assert torch.equal(states[idx][key], torch.cat(parts) if stacked else value), (name, key)


RESUMES = [
    pytest.param((3, 3), (3, 3), "adamw", marks=pytest.mark.soak),
    ((4, 2), (4, 2), "sgd"),
    pytest.param((3, 1), (3, 3), "adamw", marks=pytest.mark.soak),
    pytest.param((3, 3), (3, 1), "adamw", marks=pytest.mark.soak),
    pytest.param((4, 2), (4, 4), "sgd", marks=pytest.mark.soak),
]


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
@pytest.mark.parametrize(("first", "second", "optimizer"), RESUMES)
def test_training_goes_on_at_another_expert_parallel_size(
    request: pytest.FixtureRequest, tmp_path: Path, first: tuple[int, int], second: tuple[int, int], optimizer: str
) -> None:
    """Resumed at the end of epoch one: bits of the uninterrupted run at the same sharding, rounding at another."""
    fit, tools = request.getfixturevalue("fit"), request.getfixturevalue("tools")
    model = {"optimizer": optimizer}
    straight = fit(*second, model=model, gradient_clip_val=0.5)
    fit(
        *first,
        model=model,
        callbacks=lambda: saver(tmp_path),
        gradient_clip_val=0.5,
        max_epochs=1,
        enable_checkpointing=True,
    )
    resumed = fit(*second, model=model, gradient_clip_val=0.5, ckpt_path=str(tmp_path / "epoch0.ckpt"))
    tools.assert_replicas_agree(resumed, second[1])
    assert resumed[0].global_step == straight[0].global_step
    for want, got in zip(straight, resumed, strict=True):
        for name, parameter in want.parameters.items():
            if first == second:
                assert torch.equal(got.parameters[name], parameter), name
            else:
                torch.testing.assert_close(got.parameters[name], parameter, rtol=1e-3, atol=1e-5)


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_one_process_without_this_strategy_loads_it_and_the_other_way_round(
    fit: Any, tools: Any, tmp_path: Path
) -> None:
    """A plain Trainer resumes from a sharded run's file, and a sharded run from a plain one's."""
    sharded = fit(3, 3, callbacks=lambda: saver(tmp_path / "sharded"), max_epochs=1, enable_checkpointing=True)
    plain = fit(
        1,
        strategy=lambda: "auto",
        ckpt_path=str(tmp_path / "sharded" / "epoch0.ckpt"),
        max_epochs=1,
        after=optimizer_state,
    )
    for name, parameter in tools.whole(sharded, 3).items():
        assert torch.equal(plain[0].parameters[name], parameter)
    assert plain[0].value["moe.w1"]["exp_avg"].shape[0] == 12

    ddp = fit(
        3, strategy=DDPStrategy, callbacks=lambda: saver(tmp_path / "ddp"), max_epochs=1, enable_checkpointing=True
    )
    again = fit(3, 3, ckpt_path=str(tmp_path / "ddp" / "epoch0.ckpt"), max_epochs=1, after=optimizer_state)
    for name, parameter in tools.whole(again, 3).items():
        assert torch.equal(ddp[0].parameters[name], parameter)
    assert again[1].value["moe.w1"]["exp_avg"].shape[0] == 4


def test_saving_after_fit_still_gathers(fit: Any, tools: Any, tmp_path: Path) -> None:
    """`trainer.save_checkpoint` is often called when training has ended."""
    path = tmp_path / "final.ckpt"
    ranks = fit(3, 3, after=lambda trainer: trainer.save_checkpoint(path), max_epochs=1)
    state = load(path)["state_dict"]
    assert all(torch.equal(state[name], parameter) for name, parameter in tools.whole(ranks, 3).items())


class FreezeRankOne(pl.Callback):
    """Rank 1 never trains its experts."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        for _, parameter in pl_module.moe.expert_parameters():
            parameter.requires_grad_(trainer.global_rank != 1)


def test_experts_without_optimizer_state_are_saved_as_zeros(fit: Any, tmp_path: Path) -> None:
    """A rank whose experts never had a gradient has no state beside ranks that have."""
    path = tmp_path / "partial.ckpt"
    fit(
        3,
        3,
        callbacks=lambda: [FreezeRankOne()],
        after=lambda trainer: trainer.save_checkpoint(path),
        max_epochs=1,
    )
    checkpoint = load(path)
    moments = [
        state["exp_avg"] for state in checkpoint["optimizer_states"][0]["state"].values() if len(state["exp_avg"]) == 12
    ]
    assert len(moments) == 5, "four stacked parameters, and the gate with its 12 rows"
    stacked = sorted(moments, key=lambda moment: bool(moment[4:8].any()))[:4]
    assert all(moment[:4].any() and not moment[4:8].any() and moment[8:].any() for moment in stacked)


def test_another_number_of_experts_is_refused(fit: Any, tmp_path: Path) -> None:
    """The error names the parameter and both numbers, before anything is loaded."""
    path = tmp_path / "twelve.ckpt"
    fit(3, 3, after=lambda trainer: trainer.save_checkpoint(path), max_epochs=1)
    with pytest.raises(WorldFailed, match=r"12 experts in `moe.b1`, the model has 6"):
        fit(3, 3, model={"num_experts": 6}, ckpt_path=str(path))
