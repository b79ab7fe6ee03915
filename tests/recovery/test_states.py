"""Every state of (host, peer, storage) for two ranks, over real shared memory and real files, in one process."""

from __future__ import annotations

from itertools import product

import pytest

from recovery._world import World, require

NEW, OLD = 20, 10
KINDS = ("host", "peer", "storage")
STATES = list(product([False, True], repeat=3))


@pytest.mark.parametrize("states", list(product(STATES, repeat=2)), ids=str)
def test_every_state_resolves_to_the_cheapest_source_or_the_older_step(
    world: World, states: tuple[tuple[bool, bool, bool], ...]
) -> None:
    """64 cases. What storage lacks is found out while restoring: the manifest still says that it is there."""
    world.commit(OLD)
    world.commit(NEW)
    for rank, (host, peer, storage) in enumerate(states):
        own, other = world.nodes[rank], world.nodes[1 - rank]
        if host:
            world.keep(NEW, rank, own)
        if peer:
            world.keep(NEW, rank, other)
        if not storage:
            world.file_in_storage(world.part(NEW, rank)[0].segments[0]).unlink()
    if all(any(state) for state in states):
        require(world, NEW, [{KINDS[state.index(True)]} for state in states])
    else:
        require(world, OLD, [{"storage"}, {"storage"}])
        assert world.reasons[0] == world.reasons[1]
        assert len(world.reasons[0]) == sum(not any(state) for state in states)


def test_segments_in_memory_are_not_read_from_storage(world: World) -> None:
    """Storage is asked for its listing and manifests, never for a segment."""
    world.commit(NEW)
    for rank in range(2):
        world.keep(NEW, rank, world.nodes[rank])
        for entry in world.part(NEW, rank)[0].segments:
            world.file_in_storage(entry).unlink()
    require(world, NEW, [{"host"}, {"host"}])


def test_memory_may_be_ahead_of_storage(world: World) -> None:
    """A generation that was never committed is taken when both ranks' parts survived, and not when one did not."""
    world.commit(OLD)
    world.keep(NEW, 0, world.nodes[0])
    require(world, OLD, [{"storage"}, {"storage"}])
    world.keep(NEW, 1, world.nodes[0])
    require(world, NEW, [{"host"}, {"peer"}])
