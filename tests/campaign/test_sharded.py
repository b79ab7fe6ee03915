"""Parameters in shards, on ranks that divide no shape: killed anywhere, the job ends the same on every rank.

`MOE_CKPT_SHARDED_CASE='{...}' pytest tests/campaign/test_sharded.py -m soak -k drawn` repeats the line that a drawn run prints.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, get_args

import pytest
import torch
import torch.distributed as dist
from operators._families import SPREAD
from typing_extensions import override

from campaign._campaign import Campaigns, kill_at_every_step, lose_memory
from campaign._draw_sharded import LAYOUTS, ShardedCase, draw_sharded, placed
from campaign._pairs import Row, name, pairwise
from campaign._sharded import Edits, Experts, Sharded, ShardedModule
from campaign._training import Checkpointing, Module, train
from campaign.test_configurations import failure
from lightning_moe_ckpt.operators import memory_of
from lightning_moe_ckpt.recovery._replay import Replay
from lightning_moe_ckpt.testing import Attempt, Kill, Seam

SPARSE, DENSE = Checkpointing(policy="sparse", window=3), Checkpointing(policy="dense")
SHORT = Sharded(batches=4, validate_every=3, optimizer="adamw_foreach", checkpointing=SPARSE)
EMPTY = replace(SHORT, world_size=3, num_experts=2, checkpointing=replace(SPARSE, order="popularity"))
"""Two experts for three ranks, one of which has no row of any; and one parameter of one element."""
BOTH = replace(SHORT, world_size=4, sharding="fsdp2+tp", clip=None)
REPLICAS = replace(SHORT, world_size=4, sharding="hsdp", optimizer="sgd", checkpointing=DENSE)
EDITED = replace(
    EMPTY,
    edits="batch_end",
    optimizer="adamw",
    checkpointing=Checkpointing(policy="differential", every_n_steps=4, batch=2),
)
SPREAD_SPARSE = replace(
    SHORT, sharding="hf+ep", world_size=2, num_experts=2, checkpointing=replace(SPARSE, order="popularity")
)
SPREAD_DENSE = replace(
    SPREAD_SPARSE, world_size=3, family="gpt_oss", num_experts=1, recompute=True, checkpointing=DENSE
)
"""Experts of Hugging Face; of the latter each rank has one in a layer."""
ZERO = replace(EMPTY, sharding="moe+zero1")
"""Ranks with a piece of each parameter in the optimizer, two of which have none of the parameter of one element."""
LATE = Kill(phase="after_batch_end", step=6, settle=10.0)


@pytest.mark.parametrize(
    ("setup", "kill"),
    [
        pytest.param(EMPTY, Kill(phase="forward", step=6, rank=1, settle=10.0), id="fsdp2"),
        pytest.param(BOTH, replace(LATE, rank=3), id="fsdp2+tp"),
        pytest.param(SPREAD_SPARSE, replace(LATE, rank=1), id="hf+ep"),
        pytest.param(
            SPREAD_DENSE,
            Kill(phase="forward", step=6, rank=2, settle=10.0),
            id="hf+ep dense",
            marks=pytest.mark.soak,  # an example of three ranks with experts of Hugging Face is killed in `test_examples.py`
        ),
        pytest.param(REPLICAS, Kill(phase="validation", step=7, rank=2), id="hsdp"),
        pytest.param(EDITED, LATE, id="edited without a trace"),
        pytest.param(
            ZERO,
            Kill(phase="forward", step=6, rank=1, settle=10.0),
            id="moe+zero1",
            marks=pytest.mark.soak,  # `test_expert_parallel.py` kills sharded optimizers
        ),
    ],
)
def test_killed_once_the_job_ends_the_same(campaigns: Campaigns, setup: Sharded, kill: Kill) -> None:
    """Rows of every kind are in `make soak`."""
    lives = campaigns.check(setup, kill)
    assert lives[-1].steps()[0] > 1, "it started over"


# -- what a comparison has to see


def from_the_neighbour(replay: Replay, load: Any = Replay._load_records) -> None:
    """Load, and take the neighbour's rows of a matrix."""
    load(replay)
    name = next(name for name in replay._view.params if name.endswith("blocks.1.down.weight"))
    own = memory_of(replay._view.params[name]).data
    every = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(every, own)
    own.copy_(every[dist.get_rank() - 1])


def without_count(replay: Replay, load: Any = Replay._load_records) -> None:
    """Load, and let ranks count no steps of a parameter of which they hold nothing."""
    load(replay)
    for param in replay._view.params.values():
        count = replay._view.schema.get_state(param, "step")
        if memory_of(param).numel() == 0 and count is not None:
            count.data.zero_()


@pytest.mark.soak
@pytest.mark.parametrize(
    ("replacement", "seen"), [(from_the_neighbour, "param/"), (without_count, r"rank 2: optimizer/.*/step: ")]
)
def test_a_misplaced_shard_and_a_forgotten_count_are_seen(campaigns: Campaigns, replacement: Any, seen: str) -> None:
    """On three ranks, whose shards of the matrix have eight rows each."""
    setup = replace(EMPTY, checkpointing=DENSE)
    seams = [
        Seam(module="lightning_moe_ckpt.recovery._replay", attribute="Replay._load_records", replacement=replacement)
    ]
    with pytest.raises(AssertionError, match=rf"differences from the fault-free run(.|\n)*{seen}"):
        campaigns.check(setup, LATE, seams=seams)


# -- at length

FACTORS: dict[str, list[Any]] = {
    "layout": [*LAYOUTS],
    "taken": [("dense", 1), ("dense", 2), *(("sparse", window) for window in (1, 2, 3, 6)), ("differential", 4)],
    "order": ["popularity", "fixed", "back_to_front"],
    "experts": [*get_args(Experts)],
    "num_experts": [2, 5],
    "precision": ["32-true", "bf16-mixed", "bf16-true", "fsdp2's own"],
    "optimizer": ["adamw", "adamw_foreach", "adamw_amsgrad", "adam", "sgd"],
    "clip": [("norm", 0.5), ("value", 0.02), ("norm", None)],
    "accumulate": [1, 2],
    "scheduler": ["none", "cosine", "epoch", "plateau"],
    "validate_every": [None, 2],
    "sanity": [0, 2],
    "tied": [False, True],
    "frozen": [(), ("block",), ("bias",)],
    "recompute": [False, True],
    "kept": [False, True],
    "edits": [*get_args(Edits)],
}


def allowed(row: Row) -> bool:
    sharding = row["layout"][0]
    if row["precision"] == "fsdp2's own" and sharding not in {"fsdp2", "hsdp", "fsdp2+tp"}:
        return False
    if row["scheduler"] == "plateau" and row["validate_every"] is None:
        return False
    return not (sharding == "tp" and row["optimizer"] == "adamw_foreach")  # torch takes no mixed list of tensors


def sharded_setup(row: Row) -> Sharded:
    rest = {
        key: value
        for key, value in row.items()
        if key not in {"layout", "taken", "order", "clip", "sanity", "precision"}
    }
    policy, every = row["taken"]
    checkpointing = Checkpointing(policy=policy, every_n_steps=every, window=every, order=row["order"], batch=2)
    low = row["precision"] == "fsdp2's own"
    return Sharded(
        **rest,
        sharding=row["layout"][0],
        world_size=row["layout"][1],
        clip=row["clip"][1],
        clip_algorithm=row["clip"][0],
        precision="32-true" if low else row["precision"],
        low=low,
        epochs=2 * row["accumulate"],
        trainer=(("num_sanity_val_steps", row["sanity"]),),
        checkpointing=checkpointing,
    )


ROWS = pairwise(FACTORS, allowed=allowed)


@pytest.mark.soak
@pytest.mark.parametrize("row", ROWS, ids=name)
def test_killed_at_some_steps_the_job_ends_the_same(campaigns: Campaigns, row: Row) -> None:
    """Every third step, other ones in each of three neighbouring rows; every rank is killed in some."""
    setup, turn = sharded_setup(row), ROWS.index(row)
    kills = [placed(kill, (kill.step or 0) % setup.world_size) for kill in kill_at_every_step(setup, offset=turn)]
    campaigns.check(setup, *kills[turn % 3 :: 3])


@pytest.mark.soak
@pytest.mark.parametrize(
    "policy",
    [SPARSE, DENSE, Checkpointing(policy="differential", every_n_steps=4, batch=2)],
    ids=lambda each: each.policy,
)
@pytest.mark.parametrize("family", SPREAD.values())
def test_every_family_of_hugging_face_ends_the_same(campaigns: Campaigns, family: str, policy: Checkpointing) -> None:
    """Two groups of two, each of which has all experts; a rank of each is killed."""
    setup = replace(SPREAD_SPARSE, world_size=4, family=family, num_experts=2, checkpointing=policy)
    campaigns.check(
        setup, Kill(phase="forward", step=5, rank=1, settle=10.0), Kill(phase="after_batch_end", step=7, rank=2)
    )


class MovesWeights(ShardedModule):
    """Gives all weights other memory behind an odd step."""

    @override
    def on_train_batch_end(self, *args: Any) -> None:
        super().on_train_batch_end(*args)
        for param in self.parameters() if self.global_step % 2 else ():
            param.data = param.data * 0.999


@dataclass(frozen=True, kw_only=True)
class Moved(Sharded):
    """A run of a `MovesWeights`."""

    @override
    def make_module(self, life: Attempt) -> Module:
        return self.module_of(MovesWeights, life)


@pytest.mark.soak
@pytest.mark.parametrize("policy", [SPARSE, DENSE], ids=["sparse", "dense"])
@pytest.mark.parametrize("sharding", ["moe", "moe+zero1"])
def test_weights_in_other_memory_are_those_that_are_stored(
    campaigns: Campaigns, sharding: Any, policy: Checkpointing
) -> None:
    """An optimizer's pieces follow them, where they are stored and where they are loaded."""
    setup = Moved(world_size=3, sharding=sharding, batches=4, validate_every=3, checkpointing=policy)
    campaigns.check(
        setup, Kill(phase="after_batch_end", step=5, settle=10.0), Kill(phase="forward", step=7, rank=1, settle=10.0)
    )


EIGHT = replace(SHORT, world_size=8, num_experts=5)


@pytest.mark.soak
@pytest.mark.parametrize(
    "setup",
    [
        pytest.param(EIGHT, id="fsdp2"),
        pytest.param(replace(EIGHT, experts="columns", checkpointing=DENSE), id="columns"),
        pytest.param(replace(EIGHT, sharding="fsdp2+tp"), id="fsdp2+tp"),
        pytest.param(replace(EIGHT, sharding="hsdp", precision="bf16-mixed"), id="hsdp"),
        pytest.param(replace(SHORT, world_size=2, compiled=True), id="compiled"),
    ],
)
def test_eight_ranks_and_compiled_blocks_end_the_same(campaigns: Campaigns, setup: Sharded) -> None:
    """More ranks than rows of most parameters: half of all shards are empty."""
    campaigns.check(setup, replace(LATE, rank=1), Kill(phase="forward", batches=2), timeout=120.0)


def train_elsewhere(setup: Sharded, life: Attempt) -> Mapping[str, Any]:
    """Train; but for the first life, on a machine that has nothing in memory."""
    if life.index > 0 and life.rank == 0:
        lose_memory(life.workdir)
    return train(setup, life)


@pytest.mark.soak
@pytest.mark.parametrize("policy", [SPARSE, DENSE], ids=["sparse", "dense"])
@pytest.mark.parametrize(("sharding", "ranks"), [("fsdp2", 3), ("fsdp2+tp", 4), ("hsdp", 4)])
def test_from_storage_alone_the_job_ends_the_same(
    campaigns: Campaigns, sharding: Any, ranks: int, policy: Checkpointing
) -> None:
    """Every rank reads its shards, and only these."""
    setup = replace(SHORT, sharding=sharding, world_size=ranks, checkpointing=policy)
    lives = campaigns.check(setup, LATE, fit=partial(train_elsewhere, setup))
    assert " MiB from storage" in lives[-1].log()
    assert lives[-1].steps()[0] > 1, "it started over"


GIVEN = os.environ.get("MOE_CKPT_SHARDED_CASE")
CASES = [ShardedCase.parse(GIVEN)] if GIVEN else [draw_sharded(seed) for seed in range(10 * len(LAYOUTS))]


@pytest.mark.soak
@pytest.mark.parametrize("case", CASES, ids=[f"{i}-{case.setup.sharding}" for i, case in enumerate(CASES)])  # type: ignore[attr-defined]
def test_a_drawn_run_ends_as_if_nothing_had_happened(campaigns: Campaigns, case: ShardedCase) -> None:
    """As in `test_configurations.py`, under every sharding in turn."""
    found = failure(campaigns, case)
    assert found is None, found.replace("MOE_CKPT_CASE", "MOE_CKPT_SHARDED_CASE", 1)
