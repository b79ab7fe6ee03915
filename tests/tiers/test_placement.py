"""Copies leave the node and the rack, stay in the data-parallel group, and are spread evenly."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lightning_moe_ckpt.errors import ConfigurationError
from lightning_moe_ckpt.tiers import FailureDomain, ReplicaPlacement, place_replicas


@dataclass(frozen=True)
class World:
    """A small cluster: `nodes` gives the ranks of each node, `racks` the rack of each."""

    nodes: tuple[tuple[int, ...], ...]
    racks: tuple[str, ...]
    groups: tuple[tuple[int, ...], ...]
    nbytes: tuple[int, ...]
    replicas: int

    @property
    def domains(self) -> list[FailureDomain]:
        node_of = {rank: n for n, ranks in enumerate(self.nodes) for rank in ranks}
        return [FailureDomain(node=f"n{node_of[r]}", rack=self.racks[node_of[r]]) for r in sorted(node_of)]

    def place(self) -> ReplicaPlacement:
        return place_replicas(self.domains, self.groups, self.nbytes, self.replicas)


@st.composite
def worlds(draw: st.DrawFn, max_nodes: int = 6, max_ranks: int = 3, *, equal_nodes: bool = False) -> World:
    """Ranks in any order over nodes of one or of different sizes, in any racks and groups."""
    num_nodes = draw(st.integers(2, max_nodes))
    size = st.integers(1, max_ranks)
    sizes = [draw(size)] * num_nodes if equal_nodes else draw(st.lists(size, min_size=num_nodes, max_size=num_nodes))
    ranks = draw(st.permutations(range(sum(sizes))))
    starts = [sum(sizes[:i]) for i in range(num_nodes)]
    colours = draw(st.lists(st.integers(0, 2), min_size=len(ranks), max_size=len(ranks)))
    return World(
        nodes=tuple(tuple(sorted(ranks[s : s + n])) for s, n in zip(starts, sizes, strict=True)),
        racks=tuple(draw(st.lists(st.sampled_from("abcd"), min_size=num_nodes, max_size=num_nodes))),
        groups=tuple(tuple(r for r in range(len(ranks)) if colours[r] == c) for c in sorted(set(colours))),
        nbytes=tuple(draw(st.lists(st.integers(1, 9), min_size=len(ranks), max_size=len(ranks)))),
        replicas=draw(st.integers(1, num_nodes - 1)),
    )


def most_held(placement: ReplicaPlacement) -> int:
    return max(placement.held_nbytes(rank) for rank in range(len(placement.domains)))


def least_possible(world: World) -> int:
    """Bytes of the fullest rank in the best of all placements that leave the node, by trying all of them."""
    node_of = {rank: n for n, ranks in enumerate(world.nodes) for rank in ranks}
    owners = sorted(node_of, key=lambda owner: -world.nbytes[owner])
    best = sum(world.nbytes) * world.replicas
    load: Counter[int] = Counter()

    def place(index: int) -> None:
        nonlocal best
        if index == len(owners):
            best = min(best, max(load.values()))
            return
        owner = owners[index]
        able = [r for r in node_of if node_of[r] != node_of[owner] and load[r] + world.nbytes[owner] < best]
        for chosen in combinations(able, world.replicas):
            if len({node_of[r] for r in chosen}) == world.replicas:
                load.update(dict.fromkeys(chosen, world.nbytes[owner]))
                place(index + 1)
                load.subtract(dict.fromkeys(chosen, world.nbytes[owner]))

    place(0)
    return best


@settings(max_examples=100)
@given(worlds())
def test_every_copy_is_on_a_node_of_its_own(world: World) -> None:
    """Exactly `replicas` holders, never on the owner's node, never two on one."""
    placement = world.place()
    for owner, holders in enumerate(placement.holders):
        nodes = {world.domains[rank].node for rank in (owner, *holders)}
        assert len(holders) == world.replicas
        assert len(nodes) == world.replicas + 1


@settings(max_examples=150)
@given(worlds(max_nodes=4, max_ranks=2))
def test_no_rank_keeps_more_than_the_stated_multiple_of_the_least_possible(world: World) -> None:
    """Against every placement there is, on nodes of one or two ranks."""
    assume(sum(map(len, world.nodes)) <= 6)
    sizes = [len(ranks) for ranks in world.nodes]
    bound = world.replicas * -(-max(sizes) // min(sizes))
    assert most_held(world.place()) <= bound * max(world.nbytes)
    assert most_held(world.place()) <= bound * least_possible(world)


@settings(max_examples=100)
@given(worlds(max_nodes=4, max_ranks=3, equal_nodes=True))
def test_one_replica_on_equal_nodes_is_placed_best(world: World) -> None:
    """Whatever the bytes of each rank, and for any number of replicas if those are equal."""
    assume(sum(map(len, world.nodes)) <= 6)
    one = World(world.nodes, world.racks, world.groups, world.nbytes, 1)
    assert most_held(one.place()) == least_possible(one)
    alike = World(world.nodes, world.racks, world.groups, (1,) * len(world.nbytes), world.replicas)
    assert {alike.place().held_nbytes(rank) for rank in range(len(world.nbytes))} == {world.replicas}


@settings(max_examples=100)
@given(worlds(max_nodes=9, equal_nodes=True))
def test_copies_leave_the_rack_where_equal_loads_allow_it(world: World) -> None:
    """Every copy in another rack if no rack is larger than the number of groups; one of them if smaller racks suffice."""
    num_groups, rest = divmod(len(world.nodes), world.replicas + 1)
    assume(rest == 0)
    placement, largest = world.place(), max(Counter(world.racks).values())
    racks = [[world.domains[r].rack for r in (o, *holders)] for o, holders in enumerate(placement.holders)]
    if largest <= num_groups:
        assert all(len(set(rack)) == world.replicas + 1 for rack in racks)
    if largest <= len(world.nodes) - num_groups:
        assert all(placement.leaves_rack(owner) for owner in range(len(world.nbytes)))
    assert [placement.leaves_rack(o) for o in range(len(racks))] == [len(set(rack)) > 1 for rack in racks]


@settings(max_examples=100)
@given(worlds())
def test_a_holder_of_another_group_means_that_no_peer_there_had_room(world: World) -> None:
    """Room is an equal share of what comes from the owner's node."""
    placement = world.place()
    group_of = {rank: index for index, group in enumerate(world.groups) for rank in group}
    for ranks in world.nodes:
        for place in world.nodes:
            pairs = [(o, h) for o in ranks for h in placement.holders[o] if h in place]
            taken = Counter(holder for _, holder in pairs)
            room = -(-len(ranks) // len(place))
            assert all(count <= room for count in taken.values())
            strangers = [owner for owner, holder in pairs if group_of[owner] != group_of[holder]]
            assert all(taken[peer] == room for o in strangers for peer in place if group_of[peer] == group_of[o])


@settings(max_examples=100)
@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.randoms(use_true_random=False))
def test_copies_stay_in_the_data_parallel_group_where_it_is_on_enough_nodes(
    replicas: int, ranks_per_node: int, nodes_per_group: int, times: int, rng: random.Random
) -> None:
    """Experts over several nodes: a node's copies go to nodes with the same experts, whatever the order of nodes."""
    num_nodes = (replicas + 1) * times * nodes_per_group
    order = rng.sample(range(num_nodes), num_nodes)
    world_size, expert_parallel = num_nodes * ranks_per_node, nodes_per_group * ranks_per_node
    domains = [FailureDomain(node=str(order[rank // ranks_per_node])) for rank in range(world_size)]
    groups = [range(first, world_size, expert_parallel) for first in range(expert_parallel)]
    placement = place_replicas(domains, groups, [1] * world_size, replicas)
    assert all(h % expert_parallel == o % expert_parallel for o, hs in enumerate(placement.holders) for h in hs)


def cluster(num_nodes: int, ranks_per_node: int = 1, racks: str = "") -> list[FailureDomain]:
    names = racks or "-" * num_nodes
    return [FailureDomain(node=f"n{n}", rack=names[n]) for n in range(num_nodes) for _ in range(ranks_per_node)]


def test_large_copies_of_different_nodes_go_to_different_ranks() -> None:
    """The second node's largest goes where the first node's did not."""
    placement = place_replicas(cluster(3, 2), [range(6)], [9, 1, 1, 1, 9, 1], 2)
    assert [placement.held_nbytes(rank) for rank in (2, 3)] == [10, 10]


def test_no_replicas_place_nothing() -> None:
    """Even on one node."""
    placement = place_replicas(cluster(1, 3), [range(3)], [1] * 3, 0)
    assert placement.holders == ((), (), ())
    assert (placement.num_nodes, placement.num_racks) == (1, 1)


def test_too_few_nodes_are_an_error_that_names_both_numbers() -> None:
    """And what to do."""
    with pytest.raises(ConfigurationError, match=r"`replicas=2` needs 3 nodes.* 4 ranks .* on 2\. Use `replicas=1`"):
        place_replicas(cluster(2, 2), [range(4)], [1] * 4, 2)


def test_a_node_in_two_racks_is_an_error() -> None:
    """Somebody has set a variable on some ranks only."""
    domains = [
        FailureDomain(node="n0", rack="a"),
        FailureDomain(node="n0", rack="b"),
        FailureDomain(node="n1", rack="b"),
    ]
    with pytest.raises(ConfigurationError, match=r"'n0' is said to be in racks \['a', 'b'\], by its ranks \[0, 1\]"):
        place_replicas(domains, [range(3)], [1] * 3, 1)


@pytest.mark.parametrize("groups", [[[0]], [[0, 1], [1]], [[0, 1, 2]]])
def test_groups_name_each_rank_once(groups: Sequence[Sequence[int]]) -> None:
    """A rank without a group, in two, or that does not exist."""
    with pytest.raises(ValueError, match="each rank in every argument once"):
        place_replicas(cluster(2), groups, [1, 1], 1)


@settings(max_examples=100)
@given(worlds(), st.randoms(use_true_random=False))
def test_equal_facts_are_placed_equally(world: World, rng: random.Random) -> None:
    """Every rank computes it apart; the order of groups and of their ranks decides nothing."""
    groups = [rng.sample(group, len(group)) for group in rng.sample(world.groups, len(world.groups))]
    assert world.place() == place_replicas(world.domains, groups, world.nbytes, world.replicas)
