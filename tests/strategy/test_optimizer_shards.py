"""Sharded optimizers train to the bits of whole ones, keep a part of the state, and say no where they would not."""

from __future__ import annotations

import warnings
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from launcher import WorldFailed, run_world
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor

from lightning_moe_ckpt.parallel import ParallelGroups, shard_of
from lightning_moe_ckpt.strategy._model_state import gather_optimizer_state, shard_optimizer_state
from lightning_moe_ckpt.strategy._optimizer_shards import cut_shards, gather_shards
from strategy._sharded_optimizers import (
    OPTIMIZERS,
    ByHand,
    Edits,
    Freezable,
    Keeps,
    Norms,
    Odd,
    Reads,
    Thaws,
    Toggles,
    Training,
    differences,
    end_of,
    state_nbytes,
    train,
)
from strategy._staged import train as train_in_stages

LIMIT = timedelta(seconds=90)
CLIPPED: dict[str, Any] = {"gradient_clip_val": 0.3}


def scaled() -> Any:
    return [MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=2.0**30))]


SHORT = ("foreach", "sgd", "adadelta")
"""One optimizer with lists of tensors, one with few states, one whose groups have no rate; `fused` and the others follow these."""
FURTHER: dict[str, Training] = {
    name: Training(optimizer=name, steps=3) for name in OPTIMIZERS if name not in {"adamw", *SHORT}
}
TRAININGS: dict[str, Training] = {
    **{name: Training(optimizer=name, steps=3) for name in SHORT},
    "clipped": Training(options={**CLIPPED, "accumulate_grad_batches": 2}),
    "clipped by value": Training(
        optimizer="sgd", options={"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}
    ),
    "bf16-mixed": Training(options={**CLIPPED, "precision": "bf16-mixed"}),
    "bf16-true": Training(options={"precision": "bf16-true"}),
    "overflow": Training(plugins=scaled),
    "one bucket": Training(strategy={"bucket_nbytes": "32MiB"}),
    "buckets within pieces": Training(strategy={"bucket_nbytes": 100}, steps=2),
    "gradients are read": Training(module=Reads, options=CLIPPED),
    "gradients are kept": Training(module=Keeps),
    "by hand": Training(module=ByHand),
    "toggled": Training(module=Toggles),
    "edited": Training(module=Edits),
    "a layer thaws": Training(module=Freezable, callbacks=lambda: [Thaws()], options={"limit_train_batches": 3}),
    "norms": Training(callbacks=lambda: [Norms()], options=CLIPPED),
}
SHARED_EXPERTS = {
    "experts": Training(strategy={"expert_parallel": 2}, options=CLIPPED),
    "experts, read": Training(strategy={"expert_parallel": 2}, module=Reads, optimizer="sgd"),
    "experts in low precision": Training(strategy={"expert_parallel": 4}, options={"precision": "bf16-mixed"}),
}


def both(trainings: dict[str, Training], world_size: int, _: int) -> dict[str, tuple[list[str], int, int]]:
    """Names of what differs, with this rank's bytes of state without shards and with."""
    found = {}
    for name, training in trainings.items():
        whole, one = train(training, world_size, shard=False)
        sharded, other = train(training, world_size, shard=True)
        assert any(shard_of(param) is not None for param in other.parameters())
        found[name] = (
            differences(end_of(whole, one), end_of(sharded, other)),
            state_nbytes(whole),
            state_nbytes(sharded),
        )
    return found


@pytest.mark.parametrize(
    ("world_size", "trainings"),
    [(3, TRAININGS), (4, SHARED_EXPERTS), pytest.param(3, FURTHER, marks=pytest.mark.soak)],
    ids=["3", "4", "further"],
)
def test_bits_are_those_of_whole_optimizers(world_size: int, trainings: dict[str, Training]) -> None:
    """Parameters, buffers, losses and norms on every rank, under every setting; and no rank has all of the state."""
    ranks = run_world(world_size, partial(both, trainings, world_size), process_group=False, timeout=2 * LIMIT)
    for rank, found in enumerate(ranks):
        for name, (differ, nbytes, own) in found.items():
            assert not differ, (rank, name)
            if name != "overflow":
                assert 0 < own < 0.7 * nbytes, (rank, name)


def test_each_rank_keeps_its_part_of_the_state() -> None:
    """All parts together are the whole, but for what cannot be cut: the parameter that is transposed in memory is whole everywhere."""

    def work(_: int) -> tuple[int, int, int]:
        whole, _one = train(Training(steps=1), 3, shard=False)
        sharded, module = train(Training(steps=1), 3, shard=True)
        assert shard_of(module.across) is None
        assert shard_of(module.nothing) is None
        return state_nbytes(whole), state_nbytes(sharded), 2 * module.across.nbytes

    ranks = run_world(3, work, process_group=False, timeout=LIMIT)
    (all_, _, uncut), *_rest = ranks
    assert sum(own - uncut for _, own, _ in ranks) == all_ - uncut
    assert max(own for _, own, _ in ranks) < all_ / 2


def test_norms_are_those_of_whole_gradients() -> None:
    """Given whole parameters or what the optimizer steps, the same bits on all ranks."""

    def work(_: int) -> list[list[Tensor]]:
        found = []
        for shard in (False, True):
            norms = Norms()
            train(Training(callbacks=lambda norms=norms: [norms], steps=3), 3, shard=shard)  # type: ignore[misc]
            found.append([*norms.of_whole, *norms.of_stepped])
        return found

    for whole, sharded in run_world(3, work, process_group=False, timeout=LIMIT):
        assert len(whole) == 6
        assert not differences(whole, sharded)


def test_a_pipeline_of_sharded_stages_has_the_bits_of_whole_ones() -> None:
    """Two stages, each on two ranks that share its parameters."""
    ways = [
        train_in_stages(
            4,
            strategy={"pipeline_parallel": 2, "micro_batches": 2, "shard_optimizer": shard},
            after=state_nbytes,
            gradient_clip_val=0.05,
        )
        for shard in (False, True)
    ]
    for whole, sharded in zip(*ways, strict=True):
        assert not differences(whole.parameters, sharded.parameters)
        assert not differences([whole.losses, whole.norm], [sharded.losses, sharded.norm])
        assert sharded.value < 0.7 * whole.value


# -- checkpoints of Lightning


@pytest.mark.parametrize(("world_size", "ep_size"), [pytest.param(3, 1, marks=pytest.mark.soak), (4, 2)])
@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
def test_a_checkpoint_is_that_of_whole_optimizers(tmp_path: Path, world_size: int, ep_size: int) -> None:
    """The same bits in the file; it goes on in both ways from both, and on one rank."""
    training = Training(strategy={"expert_parallel": ep_size}, options=CLIPPED, steps=3)
    longer = Training(strategy={"expert_parallel": ep_size}, options=CLIPPED, steps=6)

    def work(_: int) -> list[Any]:
        for shard in (False, True):
            trainer, _module = train(training, world_size, shard=shard)
            trainer.save_checkpoint(tmp_path / f"{shard}.ckpt")
        ways = [(source, shard) for source in (False, True) for shard in (False, True)]
        ends = [
            end_of(*train(longer, world_size, shard=shard, ckpt_path=str(tmp_path / f"{source}.ckpt")))
            for source, shard in ways
        ]
        return [differences(ends[0], end) for end in ends[1:]]

    for rank in run_world(world_size, work, process_group=False, timeout=LIMIT):
        assert rank == [[], [], []]
    whole, sharded = (torch.load(tmp_path / f"{shard}.ckpt", weights_only=False) for shard in (False, True))
    assert sharded["optimizer_states"][0]["state"]
    for key in ("state_dict", "optimizer_states", "lr_schedulers"):
        assert not differences(whole[key], sharded[key])

    def alone(_: int) -> list[str]:
        ends = [
            end_of(*train(Training(steps=4), 1, shard=shard, ckpt_path=str(tmp_path / f"{source}.ckpt")))
            for source, shard in ((False, False), (True, True))
        ]
        return differences(ends[0], ends[1])

    assert run_world(1, alone, process_group=False, timeout=LIMIT) == [[]]


# -- what is refused


class Matrices(Odd):
    """An optimizer for matrices alone."""

    def configure_optimizers(self) -> Any:
        return torch.optim.Muon([p for p in self.parameters() if p.ndim == 2])


class Factors(Odd):
    def configure_optimizers(self) -> Any:
        return torch.optim.Adafactor(self.parameters())


class Quasi(Odd):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


class Redundant(Odd):
    def configure_optimizers(self) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            from torch.distributed.optim import ZeroRedundancyOptimizer
        return ZeroRedundancyOptimizer(self.parameters(), torch.optim.AdamW, lr=1e-2)


class Switched(torch.optim.SGD):
    """As optimizers without schedules: weights for training and weights for validation."""

    def train(self) -> None: ...

    def eval(self) -> None: ...


class Scheduleless(Odd):
    def configure_optimizers(self) -> Any:
        return Switched(self.parameters(), 1e-2)


@pytest.mark.parametrize(
    ("training", "message"),
    [
        pytest.param(Training(module=Matrices), "`Muon` updates elements of a", id="Muon"),
        pytest.param(Training(module=Factors), "`Adafactor` updates elements of a", id="Adafactor"),
        pytest.param(Training(module=Quasi), "`LBFGS`", id="LBFGS"),
        pytest.param(Training(module=Redundant), "`ZeroRedundancyOptimizer` shards its state itself", id="Zero"),
        pytest.param(Training(module=Scheduleless), "`Switched` changes weights between steps", id="eval"),
        pytest.param(Training(module=Reads, plugins=scaled), "under `16-mixed` unscales", id="16-mixed"),
    ],
)
def test_what_pieces_do_not_allow_is_refused(training: Training, message: str) -> None:
    """With the name and the remedy."""
    with pytest.raises(WorldFailed, match=rf"(?s){message}.*`shard_optimizer=False`"):
        run_world(2, lambda _: train(training, 2, shard=True), process_group=False, timeout=LIMIT)


def test_state_dicts_of_any_form_stay_where_nothing_is_sharded() -> None:
    """An optimizer may have a `state_dict` of its own, which the strategy neither reads nor changes then."""
    state, optimizer, groups = {"mine": 1}, torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))]), ParallelGroups()
    assert gather_optimizer_state(optimizer, gather_shards(state, optimizer, groups), (), groups) == state
    assert cut_shards(shard_optimizer_state(state, optimizer, (), groups), optimizer) == state
