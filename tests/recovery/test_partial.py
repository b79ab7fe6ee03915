"""What a partial generation is put together from: each expert from where it is newest, whatever tiers and nodes that takes."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import product

import pytest

from lightning_moe_ckpt.operators import OperatorSet
from lightning_moe_ckpt.recovery._attempt import RestorePlan
from lightning_moe_ckpt.recovery._loading import note_recovery
from lightning_moe_ckpt.storage import RING_HEADER_NBYTES, Commit, GenerationId, RankMarker, RunStore
from recovery._partial_world import EXPERTS, TAKEN, PartialWorld, Taken, experts_found
from recovery.conftest import MakePartial
from recovery.test_fallbacks import flip


def kept(world: PartialWorld, steps: Sequence[int], *ranks: int, replicas: bool = False) -> None:
    """Memory of each rank's node, and with `replicas` of every node, has these generations of those ranks."""
    for rank in ranks or range(world.world_size):
        for node in world.tiers if replicas else [world.nodes[rank]]:
            world.remember(steps, rank, node)


def committed(world: PartialWorld, *steps: int) -> None:
    for step in steps:
        world.commit(step)


def restored(world: PartialWorld, dead: Sequence[int] = ()) -> tuple[int, list[int]]:
    """The step, and the step of each expert in order."""
    step, sources = experts_found(world, world.restore_partial(dead))
    return step, [sources[expert] for expert in EXPERTS]


def test_a_smaller_copy_on_the_same_node_is_tried_too(make_partial: MakePartial) -> None:
    """The ring has the files of memory too, the replica those of every tier: what is bad in one comes from the other."""
    world = make_partial("a", "b")
    committed(world, 0)
    kept(world, [3, 4])
    flip_in_memory(world, 0, 4, "dense")
    world.remember([3, 4], 0, world.nodes[0], level="storage")
    assert restored(world) == (4, [3, 3, 4, 4])


def test_memory_gives_every_expert_from_its_newest_turn(make_partial: MakePartial) -> None:
    """Storage has nothing but the start, and is not needed."""
    world = make_partial("a", "b", "c")
    committed(world, 0)
    kept(world, [2, 3, 4])
    assert restored(world) == (4, [3, 3, 4, 4])


def test_storage_alone_gives_what_it_took(make_partial: MakePartial) -> None:
    """One expert per generation, each from its own turn; how the dense generation cuts experts does not matter."""
    world = make_partial("a", "b", "c")
    committed(world, 0, 1, 2, 4)
    assert restored(world) == (4, [1, 0, 2, 4])


def test_what_was_not_counted_is_noted_without_its_cost(caplog: pytest.LogCaptureFixture) -> None:
    """A generation of a version that counted no tokens has nothing of them in its journal."""
    at = GenerationId(step=4, incarnation=1, nonce="0123456789ab")
    chosen = RestorePlan(generations={"expert": at}, shards={}, levels={"expert": frozenset({"memory"})})
    with caplog.at_level(logging.INFO):
        note_recovery(at, chosen, {}, {}, OperatorSet(operators=(), layers=(), dtypes={}))
    assert "1 of 0 steps ago; from memory: 1); its tokens were not counted" in caplog.text


def test_memory_of_surviving_nodes_gives_newer_experts_than_storage(make_partial: MakePartial) -> None:
    """Two ranks hold experts in pieces: one that lost its memory brings an expert down to what storage has of it."""
    world = make_partial("a", "b", "c")
    committed(world, 0, 1, 2, 3, 4)
    kept(world, [3, 4], 0, 1)
    assert restored(world) == (4, [1, 3, 2, 4])
    kept(world, [3, 4], 2)
    assert restored(world) == (4, [3, 3, 4, 4])


def test_replicas_of_a_lost_node_keep_its_experts_as_new(make_partial: MakePartial) -> None:
    """The ranks of the lost node pull from the other one, markers and records alike."""
    world = make_partial("a", "b")
    committed(world, 0, 1)
    kept(world, [3, 4], replicas=True)
    for rank in range(2):
        world.tiers[world.nodes[0]].lose(rank)
    assert restored(world) == (4, [3, 3, 4, 4])
    assert world.wire.nbytes[1, 0] > world.wire.nbytes[0, 1]


def test_a_generation_that_one_rank_lost_in_memory_comes_from_what_storage_has_of_it(make_partial: MakePartial) -> None:
    """Ranks resume from one generation, of which they hold different files."""
    world = make_partial("a", "b")
    committed(world, 0, 4)
    kept(world, [4], 0)
    assert restored(world) == (4, [0, 0, 0, 4])


def test_what_the_log_forbids_supplies_nothing(make_partial: MakePartial) -> None:
    """Neither the generation nor any expert."""
    world = make_partial("a", "b")
    committed(world, 0, 1, 2)
    kept(world, [3, 4])
    assert restored(world, dead=[4]) == (3, [3, 3, 2, 0])
    assert restored(world, dead=[3]) == (4, [1, 0, 4, 4])


def test_without_a_copy_of_two_experts_older_generations_are_tried(make_partial: MakePartial) -> None:
    """Here in vain: the start is what they are missing from."""
    world = make_partial("a", "b")
    committed(world, 0)
    kept(world, [4])
    world.stored(0, 1).unlink()
    assert world.restore_partial() == [None, None]
    lossy, dense = world.reasons[0]
    assert lossy.startswith("no whole copy is left of 2 experts: e0 (")
    assert "rank 1: records of step 0: dense is nowhere" in dense


# -- bad records


def flip_in_memory(world: PartialWorld, rank: int, step: int, what: str) -> None:
    """A bit of a record in a rank's own memory, which holds steps up to 4."""
    ring = world.tiers[world.nodes[rank]].file_of(rank)
    nbytes = len(world.partial_part(step, rank, "memory")[1])
    slots = (ring.stat().st_size - RING_HEADER_NBYTES) // -(-nbytes // 4096 * 4096)
    slot_nbytes = (ring.stat().st_size - RING_HEADER_NBYTES) // slots
    flip(ring, (slots - 1 - (4 - step)) * slot_nbytes + world.span(step, rank, "memory", what))


def test_a_bad_record_of_the_dense_part_comes_from_storage(make_partial: MakePartial) -> None:
    """Which holds fewer files of the generation than memory."""
    world = make_partial("a", "b")
    committed(world, 0, 4)
    kept(world, [3, 4])
    flip_in_memory(world, 0, 4, "dense")
    assert restored(world) == (4, [3, 3, 4, 4])


def test_a_bad_expert_falls_to_its_next_older_copy_alone(
    make_partial: MakePartial, caplog: pytest.LogCaptureFixture
) -> None:
    """On one rank; the others bring the older one too, and other experts stay as they are."""
    world = make_partial("a", "b", "c")
    committed(world, 0, 1, 2, 3, 4)
    flip(world.stored(3, 1), world.span(3, 1, "storage", "e1"))
    with caplog.at_level(logging.ERROR):
        assert restored(world) == (4, [1, 0, 2, 4])
    assert "e1 of step 3" in caplog.text
    assert "an older copy of the expert is used" in caplog.text
    flip(world.stored(1, 2), world.span(1, 2, "storage", "e0") + 8)
    assert restored(world) == (4, [0, 0, 2, 4])


def test_a_bad_expert_with_another_copy_costs_nothing(make_partial: MakePartial) -> None:
    """Memory and storage both have it; a replica too."""
    world = make_partial("a", "b")
    committed(world, 0, 1, 2, 3, 4)
    kept(world, [3, 4])
    flip(world.stored(3, 1), world.span(3, 1, "storage", "e1"))
    assert restored(world) == (4, [3, 3, 4, 4])


def test_an_expert_that_is_bad_everywhere_costs_the_generation(make_partial: MakePartial) -> None:
    """Back to the older one, by all ranks together, without a restart."""
    world = make_partial("a", "b", taken={**TAKEN, 2: Taken(dense=True)})
    committed(world, 0, 2)
    kept(world, [3, 4])
    assert restored(world) == (4, [3, 3, 4, 4])
    for step in (0, 2):
        flip(world.stored(step, 1), world.span(step, 1, "dense", "e3"))
    flip_in_memory(world, 0, 4, "e3")
    assert world.restore_partial() == [None, None]
    assert world.reasons[0] == world.reasons[1]
    assert world.reasons[0][0].startswith("no whole copy is left of 1 experts: e3 (rank 0: e3 of step 4")
    assert all(world.stored(step, 1).name in world.reasons[0][0] for step in (0, 2)), "all its files are named"


def test_a_bad_expert_falls_to_its_spare_where_no_other_marker_is_read(
    make_partial: MakePartial, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    """The newest marker names both copies; those between may be gone."""
    if "searching" in request.node.name:
        pytest.skip("nothing references there")
    world = make_partial("a", "b", "c", taken={**TAKEN, 3: Taken(frozenset({"e0", "e1"}), frozenset({"e0"}))})
    world.spares = True
    committed(world, 0, 1, 2, 3, 4)
    for step in (0, 1, 2, 3):
        world.marker_in_storage(step, 0).unlink()
    flip(world.stored(3, 1), world.span(3, 1, "storage", "e0"))
    assert restored(world) == (4, [1, 0, 2, 4])
    assert "e0 of step 3" in caplog.text


def test_generations_that_are_only_there_for_others_lend_what_they_have(make_partial: MakePartial) -> None:
    """The first one lost its manifest, so those that refer to it are no candidates; memory has one that is newer."""
    world = make_partial("a", "b")
    committed(world, 0, 1, 3)
    kept(world, [4])
    world.forget(0)
    if not world.sources():
        pytest.skip("nothing references there")
    assert [source.generation.step for source in world.sources()] == [3, 1]
    assert restored(world) == (4, [1, 3, 4, 4])


def test_experts_that_are_bad_everywhere_are_left_out_if_that_is_allowed(make_partial: MakePartial) -> None:
    """Three ranks, of which one finds two bad copies: all others are as new as before, and all ranks say the same."""
    world = make_partial("a", "b", "c")
    world.allow_missing = True
    committed(world, 0, 1, 2, 3, 4)
    flip(world.stored(3, 1), world.span(3, 1, "storage", "e1"))
    flip(world.stored(0, 2), world.span(0, 2, "dense", "e1"))
    found = world.restore_partial()
    assert experts_found(world, found) == (4, {"e0": 1, "e2": 2, "e3": 4})
    chosen = [part.chosen for each in found if each is not None for _, part in [each]]
    assert chosen[0] == chosen[1] == chosen[2]
    assert list(chosen[0].missing) == ["e1"]
    assert world.stored(0, 2).name in chosen[0].missing["e1"]
    assert [each.step for each in chosen[0].bad["e1"]] == [3, 0]
    assert all(chosen[0].bad["e1"].values()), "storage had them"


def test_a_copy_that_is_bad_in_storage_on_one_rank_is_bad_there(
    make_partial: MakePartial, request: pytest.FixtureRequest
) -> None:
    """Whatever the others know of it: the last of three has lost its markers, and finds its own bad in memory."""
    if "searching" in request.node.name:
        pytest.skip("what storage has of it is not known there before it is asked for")
    world = make_partial("a", "b", "c")
    committed(world, 0, 1, 2, 3, 4)
    kept(world, [3, 4])
    flip(world.stored(3, 0), world.span(3, 0, "storage", "e1"))
    for rank in (0, 2):
        flip_in_memory(world, rank, 3, "e1")
    for step in (3, 4):
        world.marker_in_storage(step, 2).unlink()
    found = world.restore_partial()
    assert experts_found(world, found) == (4, {"e0": 3, "e1": 0, "e2": 4, "e3": 4})
    for each in found:
        assert each is not None
        assert {at.step: stored for at, stored in each[1].chosen.bad["e1"].items()} == {3: True}


# -- what is read


def test_one_commit_says_where_everything_older_is(
    make_partial: MakePartial, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A marker that references names the files; without that, markers are read as far back as needed, and no further."""
    world = make_partial("a", "b")
    committed(world, 0, 1, 2, 3, 4)
    read: list[int] = []
    original = RunStore.read_marker

    def counted(store: RunStore, commit: Commit, rank: int) -> RankMarker:
        read.append(commit.generation.step)
        return original(store, commit, rank)

    monkeypatch.setattr(RunStore, "read_marker", counted)
    assert restored(world) == (4, [1, 3, 2, 4])
    borrowing = "references" in request.node.name
    assert sorted(read) == ([4, 4] if borrowing else [1, 1, 2, 2, 3, 3, 4, 4])


def test_ranks_tell_each_other_what_a_generation_says(make_partial: MakePartial) -> None:
    """The first that can read its own record of it, past one whose copy is bad; nothing of what nobody can read."""
    world = make_partial("a", "b")
    committed(world, 0, 1, 2, 3)
    flip(world.stored(3, 0), world.span(3, 0, "storage", "journal"))
    for rank in range(2):
        flip(world.stored(2, rank), world.span(2, rank, "storage", "journal"))
    kept(world, [4])
    told = world.told(4, [1, 2, 3])
    assert told[0] == told[1]
    assert {generation.step: bytes(value) for generation, value in told[0].items()} == {
        1: world.journal(1, 0),
        3: world.journal(3, 1),
    }


# -- every state


STATES = list(product([(), (3, 4), (2, 3, 4)], [(), (3, 4)], [(0,), (0, 1, 2), (0, 1, 2, 3, 4)]))


@pytest.mark.parametrize("state", STATES, ids=str)
def test_every_state_gives_what_trying_everything_gives(
    make_partial: MakePartial, state: tuple[tuple[int, ...], ...]
) -> None:
    """The model: the newest generation with something of everybody, and per expert the newest one that all can be given."""
    world = make_partial("a", "b")
    memories, stored = state[:2], state[2]
    committed(world, *stored)
    for rank, steps in enumerate(memories):
        if steps:
            kept(world, steps, rank)
    step = max(step for step in TAKEN if all(step in stored or step in steps for steps in memories))
    expected = [max(s for s in TAKEN if s <= step and has(expert, s, memories, stored)) for expert in EXPERTS]
    assert restored(world) == (step, expected)


def has(expert: str, step: int, memories: Sequence[Sequence[int]], stored: Sequence[int]) -> bool:
    """Whether all ranks can be given their piece of an expert from a generation."""
    taken = TAKEN[step]
    in_storage = step in stored and (taken.dense or expert in taken.storage)
    return all(in_storage or (step in steps and expert in taken.memory) for steps in memories)
