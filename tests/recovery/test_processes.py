"""Ranks as processes over gloo, on two nodes: what each kind of loss leaves is enough, and a loss on the way ends all."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from stored._segments import LAYOUT

from lightning_moe_ckpt.coordination import Exchange
from lightning_moe_ckpt.parallel import build_groups
from lightning_moe_ckpt.storage import SegmentEntry
from lightning_moe_ckpt.tiers import Holding
from recovery._partial_world import EXPERTS, experts_found
from recovery._processes import in_processes
from recovery._world import Node, World, require_part, sources
from recovery.conftest import MakePartial, MakeWorld
from recovery.test_fallbacks import NEW, OLD, flip
from recovery.test_partial import committed, kept

PLACEMENTS = [("a", "a", "b"), ("a", "b", "b", "a")]


@pytest.fixture(params=PLACEMENTS, ids=" ".join)
def spread(request: pytest.FixtureRequest, make_world: MakeWorld) -> World:
    """Three or four ranks on two nodes, each rank with a replica on the other node; storage is one generation behind."""
    world = make_world(*request.param)
    world.commit(OLD)
    for rank in range(world.world_size):
        for node in world.tiers:
            world.keep(NEW, rank, node)
    return world


def restart(world: World, step: int) -> list[set[str]]:
    """Every rank as a process: it has the bytes of that step. Returns where they came from, by rank."""
    run_id, commits = world.offered()

    def work(rank: int) -> list[str]:
        found, reasons = world.life(Exchange(build_groups()), run_id, commits)
        assert found is not None, reasons
        require_part(world, step, rank, found)
        return sorted(sources(found[1]))

    said = in_processes(world.world_size, work)
    assert all(isinstance(each, list) for each in said), said
    return [set(each) for each in said if isinstance(each, list)]


def lose(world: World, nodes: Sequence[str]) -> None:
    for directory in world.tiers:
        if directory.name in nodes:
            for path in directory.iterdir():
                path.unlink()


def test_after_the_loss_of_all_processes_memory_of_the_own_node_is_enough(spread: World) -> None:
    """Nothing travels, nothing is read from storage."""
    assert restart(spread, NEW) == [{"host"}] * spread.world_size


@pytest.mark.parametrize("lost", ["a", "b"])
def test_after_the_loss_of_a_node_its_ranks_pull_from_the_other(spread: World, lost: str) -> None:
    """The others do not notice."""
    lose(spread, [lost])
    assert restart(spread, NEW) == [{"peer"} if node.name == lost else {"host"} for node in spread.nodes]


def test_after_the_loss_of_all_nodes_storage_is_enough(spread: World) -> None:
    """With what it had."""
    lose(spread, ["a", "b"])
    assert restart(spread, OLD) == [{"storage"}] * spread.world_size


def test_a_bad_record_of_a_replica_sends_all_back_together(spread: World) -> None:
    """Storage does not have that step, so the older one is used, by every rank."""
    lose(spread, ["a"])
    flip(replica_of_rank_0(spread), LAYOUT.spans["m"].offset)
    assert restart(spread, OLD) == [{"storage"}] * spread.world_size


def test_a_bad_record_of_a_replica_comes_from_storage(spread: World) -> None:
    """As soon as storage has that step."""
    spread.commit(NEW)
    lose(spread, ["a"])
    flip(replica_of_rank_0(spread), LAYOUT.spans["m"].offset)
    expected = [{"peer"} if node.name == "a" else {"host"} for node in spread.nodes]
    assert restart(spread, NEW) == [{"peer", "storage"}, *expected[1:]]


def replica_of_rank_0(world: World) -> Path:
    return world.tiers[next(node for node in world.nodes if node.name == "b")].file_of(0)


class Fatal(Node):
    """Reading it ends the process."""

    def read_into(self, holding: Holding, entry: SegmentEntry, offset: int, out: memoryview) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_process_that_dies_while_it_sends_is_an_error_for_the_others(make_world: MakeWorld) -> None:
    """Nobody waits for it: the job ends and is started again."""
    world = make_world("a", "b", "c")
    for rank in range(3):
        world.keep(NEW, rank, world.nodes[1])
    run_id, commits = world.offered()

    def work(rank: int) -> bool:
        if rank == 1:
            node = world.tiers[world.nodes[1]]
            world.tiers[world.nodes[1]] = Fatal(node.run_id, node.directory)
        try:
            world.life(Exchange(build_groups()), run_id, commits)
        except RuntimeError:
            return True
        return False

    assert in_processes(3, work) == [True, -signal.SIGKILL, True]


@pytest.mark.parametrize("placement", PLACEMENTS, ids=" ".join)
def test_a_partial_generation_is_put_together_by_processes(
    make_partial: MakePartial, tmp_path: Path, placement: tuple[str, ...]
) -> None:
    """One node is lost; its ranks take experts from the other's copies, and what nobody's memory has from storage."""
    world = make_partial(*placement)
    committed(world, 0, 1, 2)
    kept(world, [3, 4], replicas=True)
    lose(world, ["a"])
    run_id, commits = world.offered()

    def work(rank: int) -> list[int]:
        found, reasons = world.partial_life(Exchange(build_groups()), run_id, commits)
        assert found is not None, reasons
        torch.save(found[1].segments[0], tmp_path / f"{rank}.pt")
        return [found[0].step, *(found[1].chosen.generations[expert].step for expert in EXPERTS)]

    assert in_processes(world.world_size, work) == [[4, 3, 3, 4, 4]] * world.world_size
    in_threads_too = world.restore_partial()
    for rank, each in enumerate(in_threads_too):
        assert each is not None
        assert torch.equal(each[1].segments[0], torch.load(tmp_path / f"{rank}.pt"))
    assert experts_found(world, in_threads_too)[0] == 4
