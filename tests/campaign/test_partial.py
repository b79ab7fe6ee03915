"""What partial generations hold: the dense part and the chosen experts as they were, in turns, with their tokens counted."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

import pytest
import torch

from campaign._campaign import Campaigns
from campaign._partial_runs import NUM_EXPERTS, partial_setup
from campaign._states import Taken, in_memory, in_storage, recorded, require_recorded, states, tokens
from campaign._training import Setup
from lightning_moe_ckpt.policies import AUDIENCES, Audience, TokenLedger

ROWS = [
    (1, 1, 3, True),
    (3, 1, None, False),
    pytest.param(3, 3, 3, True, marks=pytest.mark.soak),
    pytest.param(4, 2, None, True, marks=pytest.mark.soak),
]
"""Ranks, over how many of them experts are spread, K of memory, and whether training waits for storage at each step."""


def run(campaigns: Campaigns, setup: Setup, *, wait: bool = True) -> Path:
    """The folder of one run to its end."""
    (life,) = campaigns.run(setup, fit=recorded(setup, wait=wait))
    assert life.outcome == "finished", life.log()
    return life.workdir


@pytest.mark.parametrize(("world_size", "expert_parallel", "snapshot_k", "wait"), ROWS)
def test_generations_hold_what_the_state_was(
    campaigns: Campaigns, world_size: int, expert_parallel: int, snapshot_k: int | None, wait: bool
) -> None:
    """In storage and in memory, on every rank; what they take adds up to the plan, and references complete it."""
    setup = partial_setup(world_size, expert_parallel, snapshot_k=snapshot_k)
    folder = run(campaigns, setup, wait=wait)
    known, counted = [states(folder, rank) for rank in range(world_size)], tokens(folder, world_size)
    stored = in_storage(folder)
    if wait:
        assert [commit.generation.step for commit, _ in stored] == list(range(setup.steps + 1))
    everything = {name for name, *_ in known[0][0]} | {name for state in known for name, *_ in state[0]}
    experts = {name for name in everything if "/expert." in name}
    for commit, parts in stored:
        for part in parts:
            require_recorded(part, known[part.rank][part.step])
            accounting = TokenLedger.from_journal(part.journal["outcome"]["accounting"])
            assert torch.equal(accounting.alive, counted[part.step])
            assert torch.equal(accounting.processed, counted[part.step])
        taken = {record.operator for part in parts for record, _ in part.records}
        referenced = {r.operator for part in parts for b in part.marker.referenced for r in b.segment.records}
        assert taken | referenced == everything
        assert not taken & referenced
        assert set(commit.needs) == {b.generation for part in parts for b in part.marker.referenced}
        if 0 < commit.generation.step < setup.steps:
            assert everything - experts <= taken
            assert {name for part in parts for name in part.experts} == named(parts[0], {"durable"})
            require_newest(parts, stored)
        is_last = commit.generation.step == setup.steps
        require_second_newest(parts, stored, experts, may_pass_one=is_last and not wait)
    held = [list(in_memory(folder, rank)) for rank in range(world_size)]
    for rank, generations in enumerate(held):
        local = {name for name, *_ in known[rank][0]}
        assert {name for generation in generations for name in generation.experts} >= experts & local
        require_newest_in_memory(generations, [parts[rank] for _, parts in stored], experts & local)
        for generation in generations:
            require_recorded(generation, known[rank][generation.step])
            if generation.whole:
                assert generation.experts == named(generation, AUDIENCES) & local
                require_file_within(generation, [parts[rank] for _, parts in stored])
            else:
                assert generation.experts == {record.operator for record, _ in generation.records}
                assert generation.experts <= named(generation, AUDIENCES) & local


def require_newest_in_memory(held: Sequence[Taken], stored: Sequence[Taken], experts: Collection[str]) -> None:
    """Memory has a whole generation, and of each expert a copy no older than the newest that any generation took.

    Args:
        held: what one rank's memory has, newest first.
        stored: what it has in storage; plans there also name what was taken to memory alone.
        experts: of this rank.
    """
    assert held[0].whole
    for name in experts:
        taken = [each.step for each in stored if each.step <= held[0].step and name in named(each, AUDIENCES)]
        found = [each.step for each in held if name in each.experts]
        assert max(found) >= max(taken, default=0), name


def named(part: Taken, audiences: Collection[Audience]) -> set[str]:
    """Operators of the experts that a plan names for these files."""
    (step,) = part.plan.steps
    return {name for audience in audiences for name in step.files.get(audience, ()) if "/expert." in name}


def require_newest(parts: Sequence[Taken], stored: Sequence[tuple[object, Sequence[Taken]]]) -> None:
    """Each referenced expert is from the newest older generation that has it."""
    older = [each for _, each in stored if each[0].step < parts[0].step]
    for part in parts:
        for referenced in part.marker.referenced:
            for name in {record.operator for record in referenced.segment.records}:
                having = [each[0].step for each in older if any(name in p.experts for p in each)]
                assert referenced.generation.step == having[-1]


def require_second_newest(
    parts: Sequence[Taken],
    stored: Sequence[tuple[object, Sequence[Taken]]],
    experts: Collection[str],
    *,
    may_pass_one: bool,
) -> None:
    """Spares are the copy before the newest one of every expert, with all of its pieces on all ranks.

    Args:
        parts: of the generation that names them, by rank.
        stored: all generations, oldest first.
        experts: names of their operators.
        may_pass_one: whether it may have been built on the generation before the newest, as a commit right before the end
            is voted on no more. On all ranks then, and for all experts.
    """
    older = [each for _, each in stored if each[0].step < parts[0].step]
    spares = {
        (part.rank, spare.generation.step, record.name)
        for part in parts
        for spare in part.marker.spares
        for record in spare.segment.records
        if record.operator in experts
    }
    bases = [older, older[:-1]] if may_pass_one else [older]
    assert spares in [second_newest([*base, parts], experts) for base in bases], parts[0].step


def second_newest(generations: Sequence[Sequence[Taken]], experts: Collection[str]) -> set[tuple[int, int, str]]:
    """Rank, step and name of every record of the last copy but one of each expert that has two."""
    found = set()
    for name in experts:
        having = [generation for generation in generations if any(name in part.experts for part in generation)]
        for part in having[-2] if len(having) > 1 else []:
            records = part.marker.segments[0].records
            found |= {(part.rank, part.step, record.name) for record in records if record.operator == name}
    return found


def require_file_within(held: Taken, stored: Sequence[Taken]) -> None:
    """The file in storage is a part of the memory of the same generation, or all of it, byte for byte."""
    for file in [each.file for each in stored if each.step == held.step and each.plan.partial]:
        assert (len(held.marker.segments) == 2) == ("node" in held.plan.steps[0].files)
        assert torch.equal(held.file[: file.numel()], file)


def test_without_skips_experts_come_in_turns(campaigns: Campaigns) -> None:
    """PEC's sequential schedule: K experts after the other, each ranks' own in turn."""
    folder = run(campaigns, partial_setup(3, 3))
    names = [named(parts[0], {"durable"}) for _, parts in in_storage(folder)[1:-1]]
    assert all(len(name) == 1 for name in names)
    chosen = [int(min(name).rpartition(".")[2]) for name in names]
    firsts = chosen[:NUM_EXPERTS]
    assert sorted(firsts) == list(range(NUM_EXPERTS))
    assert chosen[NUM_EXPERTS:] == chosen[: len(chosen) - NUM_EXPERTS]
    ranks = [expert // 2 for expert in firsts]
    assert ranks[:3] == ranks[3:]
    assert len(set(ranks[:3])) == 3, "ranks take turns"
