"""Groups are looked up by name, and every rank finds its place."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from launcher import WorldFailed, run_world

from lightning_moe_ckpt.errors import ConfigurationError
from lightning_moe_ckpt.parallel import ParallelGroups, build_groups, current_groups, set_current_groups
from lightning_moe_ckpt.parallel._groups import GroupName, check_ep_size


def test_without_a_strategy_the_world_has_one_rank() -> None:
    """A layer built anywhere finds a place."""
    groups = current_groups()
    assert (groups.world_size, groups.ep_size, groups.dp_size) == (1, 1, 1)
    assert groups.group("expert") is None


def test_installed_groups_are_current_until_reset() -> None:
    """`None` restores the world of one."""
    set_current_groups(ParallelGroups(rank=5, world_size=6, ep_rank=2, ep_size=3))
    try:
        assert current_groups().dp_rank == 1
        assert current_groups().ranks("expert") == [3, 4, 5]
        assert current_groups().ranks("expert_data") == [2, 5]
    finally:
        set_current_groups(None)
    assert current_groups().world_size == 1


@pytest.mark.parametrize(("ep_size", "world_size"), [(2, 3), (3, 4), (0, 4), (4, 1)])
def test_an_expert_parallel_size_that_does_not_divide_the_world_is_refused(ep_size: int, world_size: int) -> None:
    """The error names both numbers."""
    with pytest.raises(ConfigurationError, match=rf"expert_parallel={ep_size}.*{world_size} processes"):
        check_ep_size(ep_size, world_size)


@pytest.mark.parametrize("ep_size", [1, 2, 4])
def test_groups_hold_the_ranks_they_promise(ep_size: int) -> None:
    """A sum over each group equals the sum of the ranks that `ranks` lists."""
    names: tuple[GroupName, ...] = ("world", "reduce", "control", "expert", "expert_data")

    def work(rank: int) -> list[tuple[float, int]]:
        groups = build_groups(ep_size, timedelta(seconds=20))
        sums = []
        for name in names:
            total = torch.tensor(float(rank))
            dist.all_reduce(total, group=groups.groups[name])
            sums.append((total.item(), sum(groups.ranks(name))))
        return sums

    for results in run_world(4, work):
        assert all(got == want for got, want in results)


def test_the_reduction_has_a_group_of_its_own() -> None:
    """Its collectives run beside those of backward, so no other name may share it."""

    def work(rank: int) -> bool:
        groups = build_groups(1).groups
        return all(group is not groups["reduce"] for name, group in groups.items() if name != "reduce")

    assert all(run_world(3, work))


def test_build_groups_refuses_a_bad_size_on_every_rank() -> None:
    """It fails before any collective, so no rank waits."""
    with pytest.raises(WorldFailed, match="does not divide the 3 processes"):
        run_world(3, lambda _: build_groups(2))


@pytest.mark.parametrize("num_stages", [1, 2])
def test_ranks_that_hold_the_same_shards_find_their_group(num_stages: int) -> None:
    """Replicas on ranks 0 and 2, and 1 and 3; ranks 0 and 1 hold a third part; all have the rest, a stage at a time."""
    own: list[list[tuple[int, ...]]] = [[(0, 1), (0, 2)], [(0, 1), (1, 3)], [(0, 2), (2,)], [(1, 3), (3,)]]

    def work(rank: int) -> list[tuple[float, int]]:
        groups = build_groups(1, timedelta(seconds=20), num_stages=num_stages)
        groups.join([[*regions, tuple(range(4))] for regions in own] if num_stages == 1 else own)
        sums = []
        for region in [*own[rank], tuple(groups.ranks("stage"))]:
            if len(region) > 1:
                total = torch.tensor(float(rank))
                dist.all_reduce(total, group=groups.among(region))
                sums.append((total.item(), sum(region)))
        assert groups.peers() == [[0], [1], [2], [3]]
        return sums

    for results in run_world(4, work):
        assert all(got == want for got, want in results)
