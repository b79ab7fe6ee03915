"""Differences between steps: killed anywhere, the run ends as if nothing had happened, from memory and from storage."""

from __future__ import annotations

import os
import random
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from door import Phase, marker_paths

from campaign._campaign import SHARED_MEMORY, Campaigns, checkpoints, lose_memory, memory_of_run, two_chains
from campaign._draw import Case, draw
from campaign._nodes import AwaitsCopies, Nodes, leave_only_copies
from campaign._training import Checkpointing, Setup, train
from campaign.test_configurations import failure
from campaign.test_in_place import check_killed
from campaign.test_peers import train_on_nodes, two_nodes
from lightning_moe_ckpt.storage import RING_HEADER_NBYTES, RingHeader
from lightning_moe_ckpt.testing import Attempt, AttemptResult, Kill
from lightning_moe_ckpt.tiers._ring_state import read_statement

CHAINED = Checkpointing(policy="differential", every_n_steps=6, batch=2)
PLAIN = Setup(checkpointing=CHAINED, validate_every=None, batches=10, epochs=1)
EXPERTS = replace(PLAIN, world_size=3, model="stacked", options=(("num_experts", 6),), expert_parallel=3)

ROWS: dict[str, Setup] = {
    "overflows": replace(PLAIN, precision="16-mixed", overflow_steps=(3, 6)),
    "experts": EXPERTS,
}
MORE_ROWS: dict[str, Setup] = {
    **{f"{name}, every step": setup for name, setup in ROWS.items()},
    "validated": replace(PLAIN, validate_every=3, batches=5, epochs=2),
    "value_clipped": replace(PLAIN, clip=0.1, clip_algorithm="value", scheduler="none"),
    "accumulated": replace(PLAIN, accumulate=2, batches=16),
    "stacked": replace(PLAIN, model="stacked", optimizer="adam"),
    "sgd": replace(PLAIN, optimizer="sgd"),
    "fused": replace(PLAIN, optimizer="adamw_fused", clip=None),
    "fused, overflows": replace(PLAIN, optimizer="adamw_fused", clip=None, precision="16-mixed", overflow_steps=(3, 6)),
    "foreach": replace(PLAIN, optimizer="adamw_foreach"),
    "bf16": replace(PLAIN, precision="bf16-true"),
    "bf16, fused": replace(PLAIN, precision="bf16-true", optimizer="adamw_fused", clip=None),
    "averaged": replace(PLAIN, averaged="ema"),
    "batch_norm": replace(PLAIN, model="batch_norm", options=(("never_routed", True),)),
    "ranks": replace(PLAIN, world_size=3),
}

SEEDS, SOAK_SEEDS = (6, 11, 72, 76), range(400)


def chained(seed: int) -> Case:
    """The drawn case of a number, with differences; the length of chains and batches is drawn too."""
    case = draw(seed)
    checkpointing = replace(CHAINED, every_n_steps=2 + seed % 7, batch=1 + seed % 4, keep=1 + seed % 2)
    hooks = case.setup.hooks if seed % 2 else tuple({*case.setup.hooks, "after_step"})  # whose order is that of `HOOKS`
    return replace(case, setup=replace(case.setup, checkpointing=checkpointing, hooks=hooks))


def applied(lives: list[AttemptResult]) -> list[int]:
    """How many differences each life began with, as rank 0 says; lives that began with none are left out."""
    lines = [line for life in lives for line in life.log().splitlines() if " differences were applied to " in line]
    return [int(line.partition(" differences were applied to ")[0].split()[-1].split(":")[-1]) for line in lines]


def begun_at(life: AttemptResult) -> int:
    """The step that a life resumed from."""
    (line,) = (line for line in life.log().splitlines() if re.search(r"[:\]] ?resumes from step", line))
    return int(line.split(" at step ")[1].split(" ")[0])


@pytest.mark.parametrize("row", [*ROWS, *(pytest.param(each, marks=pytest.mark.soak) for each in MORE_ROWS)])
def test_killed_at_every_other_step_the_run_ends_the_same(campaigns: Campaigns, row: str) -> None:
    """Each life resumes from the newest difference that memory has, or from the base before it.

    At some of the steps only, in an ordinary run.
    """
    setup = {**ROWS, **MORE_ROWS}[row]
    scripts = two_chains(setup) if row in MORE_ROWS else [two_chains(setup)[0][1::2]]
    runs = campaigns.check_all(setup, scripts)
    assert len(runs) == len(scripts)
    assert any(max(applied(lives), default=0) >= 1 for lives in runs), runs[0][-1].log()


@pytest.mark.parametrize(
    "seed", [*SEEDS, *(pytest.param(each, marks=pytest.mark.soak) for each in SOAK_SEEDS if each not in SEEDS)]
)
def test_a_drawn_run_ends_as_if_nothing_had_happened(campaigns: Campaigns, seed: int) -> None:
    """Whatever a user may vary, and whenever it dies."""
    found = failure(campaigns, chained(seed))
    assert found is None, found


def train_on_a_new_machine(setup: Setup, life: Attempt) -> Mapping[str, Any]:
    """Train; but for the first life, nothing is left in memory."""
    if life.index > 0:
        lose_memory(life.workdir)
    return train(setup, life)


@pytest.mark.parametrize("setup", [PLAIN, pytest.param(EXPERTS, marks=pytest.mark.soak)], ids=["1", "3"])
def test_where_memory_is_lost_storage_has_whole_batches(campaigns: Campaigns, setup: Setup) -> None:
    """The base of step 10 is 7, unless a batch was let pass by. When it begins, storage gets the batch of 8 and 9."""
    kill = Kill(phase="forward", step=10, settle=20.0)
    _, last = campaigns.check(
        replace(setup, batches=14), kill, fit=partial(train_on_a_new_machine, replace(setup, batches=14))
    )
    assert "MiB from storage" in last.log()
    assert "from host" not in last.log()
    length = sum(applied([last]))
    assert length in {0, 2, 4, 5}, "whole batches: two steps, or what the next base ends"
    assert begun_at(last) - length < 10, "where storage, slower than steps, lets a batch pass by, a base comes sooner"


def test_what_memory_has_dropped_comes_from_storage(campaigns: Campaigns) -> None:
    """Of a long chain memory has the base and the newest steps; those between are in batches."""
    long = replace(PLAIN, batches=24, checkpointing=replace(CHAINED, every_n_steps=30, batch=3))
    _, last = campaigns.check(long, Kill(phase="before_optimizer_step", step=23, settle=20.0))
    assert applied([last]) == [begun_at(last) - 1]
    assert begun_at(last) >= 22
    (told,) = (line for line in last.log().splitlines() if " MiB from " in line)
    assert "from storage" in told
    assert "from host" in told


def train_with_a_bad_link(setup: Setup, step: int, life: Attempt) -> Mapping[str, Any]:
    """Train; the second life finds a bit turned in what leads to `step`, which only memory has."""
    if life.index == 1 and life.rank == 0:
        root = checkpoints(life.workdir)
        names = [name for name in memory_of_run(root) if name.endswith(".ring")]
        turned = sum(_turn(SHARED_MEMORY / name, step) for name in names)
        assert turned == 1, names
    return train(setup, life)


def _turn(path: Any, step: int) -> int:
    """Turn a bit of a gradient in a memory file; return how many."""
    turned = 0
    with path.open("r+b") as file:
        header = RingHeader.from_bytes(file.read(RING_HEADER_NBYTES), str(path))
        for each in marker_paths(path):
            said = read_statement(each)
            if said is not None and step in said.slots:
                record = max(
                    said.marker.segments[0].records, key=lambda record: record.nbytes * (record.kind == "delta")
                )
                at = RING_HEADER_NBYTES + header.extent(said.slots[step])[0] + record.offset + record.nbytes // 2
                byte = os.pread(file.fileno(), 1, at)
                os.pwrite(file.fileno(), bytes([byte[0] ^ 16]), at)
                turned += 1
    return turned


@pytest.mark.parametrize("bad", [3, pytest.param(6, marks=pytest.mark.soak)])
def test_a_chain_with_a_bad_link_ends_at_the_step_before_it(campaigns: Campaigns, bad: int) -> None:
    """A warning says which; the steps behind it are trained again, and the end is the same."""
    setup = replace(PLAIN, checkpointing=replace(CHAINED, every_n_steps=20, batch=20))
    kill = Kill(phase="before_optimizer_step", step=8, settle=20.0)
    _, last = campaigns.check(setup, kill, fit=partial(train_with_a_bad_link, setup, bad), may_complain=True)
    assert begun_at(last) == bad - 1
    assert applied([last]) == [bad - 2]
    assert f"step {bad} is bad, and what follows on it of no use" in last.log()


BASE_STEPS = 3
WAITED: list[int] = []
"""Steps that this process has held up, which it may come to again."""
NODES = replace(EXPERTS, batches=16, checkpointing=replace(CHAINED, batch=10))
"""Three machines with a rank each; bases of 1, 7 and 13 are on their way to another one for three steps."""


def train_until_links_are_copied(setup: Setup, nodes: Nodes, step: int, newest: int, life: Attempt) -> Any:
    """In the first life storage has the start alone, and a step waits until differences up to `newest` are on another node."""

    def due(now: int) -> int | None:
        if now != step or WAITED:
            return None
        WAITED.append(step)
        return newest

    if life.index == 0:
        leave_only_copies(0, AwaitsCopies(due))
    return train_on_nodes(setup, nodes, life)


def newest_on_others(step: int) -> int:
    """The newest boundary that other nodes have whole when step `step` + 1 begins."""
    base = (step - 2) // 6 * 6 + 1
    return step - 1 if step - base >= BASE_STEPS - 1 else base - 1


SHARED = replace(NODES, model="lists", options=(), expert_parallel=1)
"""All ranks hold the same state, of which each writes a third."""


@pytest.mark.soak
@pytest.mark.parametrize("step", [6, 10, 14])
def test_what_data_parallel_ranks_share_is_where_it_was_too(campaigns: Campaigns, folder: Path, step: int) -> None:
    """Rank 1 dies with its memory: what it wrote of shared state is in memory elsewhere, without `replicas=`."""
    nodes, newest = Nodes(folder, (0, 1, 2), dies=1), newest_on_others(step)
    kill = Kill(phase="forward", step=step, rank=1)
    fit = partial(train_until_links_are_copied, SHARED, nodes, step, newest)
    _, last = campaigns.check(SHARED, kill, may_complain=True, fit=fit)
    assert begun_at(last) == newest
    assert "from storage" not in last.log()


@pytest.mark.parametrize("step", [10, *(pytest.param(n, marks=pytest.mark.soak) for n in range(2, 15) if n != 10)])
def test_a_lost_node_is_where_it_was_from_what_another_one_has(campaigns: Campaigns, folder: Path, step: int) -> None:
    """Rank 1 dies with its memory: base and differences come from the node beside it, and nothing from storage."""
    nodes, newest = Nodes(folder, (0, 1, 2), dies=1), newest_on_others(step)
    kill = Kill(phase="forward", step=step, rank=1)
    fit = partial(train_until_links_are_copied, NODES, nodes, step, newest)
    _, last = campaigns.check(NODES, kill, may_complain=True, fit=fit)
    assert begun_at(last) == newest
    assert re.search(r"rank 1: [^\n]* MiB from peer", last.log()) or newest == 0, last.log()
    assert nodes.files() == []


@pytest.mark.soak
def test_where_a_node_dies_its_ranks_come_back_with_the_others(campaigns: Campaigns, folder: Path) -> None:
    """The base is on the other node too, batches are in storage; the ranks of the node that lives use what it has."""
    setup = replace(
        two_nodes("dense"), checkpointing=replace(CHAINED, every_n_steps=20, batch=2), validate_every=None, batches=12
    )
    nodes = Nodes(folder, (0, 0, 1, 1), dies=1)
    kill = Kill(phase="forward", step=10, rank=2, settle=20.0)
    fit = partial(train_on_nodes, setup, nodes)
    lives = campaigns.check(setup, kill, may_complain=True, fit=fit)
    assert begun_at(lives[-1]) > 1
    assert applied([lives[-1]]) == [begun_at(lives[-1]) - 1]


@pytest.mark.soak
@pytest.mark.parametrize("step", [5, 9, 10, 12])
def test_a_replacement_gets_base_and_differences_from_another_node(
    campaigns: Campaigns, folder: Path, step: int
) -> None:
    """The others stay in their processes."""
    nodes, newest = Nodes(folder, (0, 1, 2), dies=1), newest_on_others(step)
    fit = partial(train_until_links_are_copied, NODES, nodes, step, newest)
    lives = check_killed(campaigns, NODES, Kill(phase="forward", step=step, rank=1), fit=fit, same_seed=True)
    assert re.search(f"from peer[^$]* at step {newest} in ", lives[1].log(1)), lives[1].log(1)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(100))
def test_a_node_is_lost_at_any_time(campaigns: Campaigns, folder: Path, seed: int) -> None:
    """With differences, or a base, on their way to another node; later processes die once more."""
    draw = random.Random(seed)
    checkpointing = replace(
        CHAINED,
        every_n_steps=draw.randint(2, 9),
        batch=draw.randint(1, 5),
        arguments=(("redundancy", draw.choice((True, False))), ("replicas", draw.choice((1, 1, 2)))),
    )
    setup = replace(
        EXPERTS,
        checkpointing=checkpointing,
        batches=16,
        expert_parallel=draw.choice((1, 3)),
        validate_every=draw.choice((None, 4)),
        optimizer=draw.choice(("adamw", "adamw_amsgrad", "adamw_foreach")),
    )
    if draw.random() < 0.3:
        setup = replace(setup, precision="16-mixed", overflow_steps=(3, 6, 11))
    phases: list[Phase] = ["batch_start", "forward", "before_optimizer_step", "batch_end", "after_batch_end"]
    steps = sorted(draw.sample(range(2, 15), 2))
    kills = [Kill(phase=draw.choice(phases), step=step, rank=draw.randrange(3)) for step in steps]
    nodes = Nodes(folder, (0, 1, 2), dies=kills[0].rank)
    campaigns.check(setup, *kills, may_complain=True, fit=partial(train_on_nodes, setup, nodes))
    assert nodes.files() == []
