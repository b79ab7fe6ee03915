"""Which version all ranks resume from, against a model that tries everything."""

from __future__ import annotations

from itertools import product

from door import History, Inventory, Item, Stock
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_moe_ckpt.recovery import Version
from lightning_moe_ckpt.storage import GenerationId


def version(step: int, incarnation: int = 1, plan_hash: str = "a") -> Version:
    return Version(GenerationId(step=step, incarnation=incarnation), plan_hash)


def inventory(*stocks: tuple[str, set[tuple[Version, int]]], committed: set[Version] | None = None) -> Inventory:
    """By rank: the name of its memory, and what is in it."""
    rows = [Stock(memory, tuple(Item(v, owner, "host") for v, owner in sorted(held))) for memory, held in stocks]
    return Inventory(dict(enumerate(rows)), frozenset(committed or ()))


def usable(world: Inventory, history: History | None = None) -> list[Version]:
    """Versions that every rank can be given its part of and that the log allows, newest first."""
    alive = [each for each in world.all_versions if history is None or history.why_dead(each.generation) is None]
    return world.usable(alive)


def test_the_smallest_of_the_newest_is_not_taken_when_somebody_lacks_it() -> None:
    """Rank 0 has 30 and 10, rank 1 has 20 and 10: the newest of each are 30 and 20, and neither is everywhere."""
    world = inventory(
        ("a", {(version(30), 0), (version(10), 0)}),
        ("b", {(version(20), 1), (version(10), 1)}),
    )
    assert usable(world) == [version(10)]


def test_tiers_are_combined_per_rank() -> None:
    """Rank 0 from its node, rank 1 from the other node; what only storage has whole comes after."""
    world = inventory(
        ("a", {(version(30), 0), (version(30), 1)}),
        ("b", set()),
        committed={version(20)},
    )
    assert usable(world) == [version(30), version(20)]
    assert [copy.source for copy in world.copies(version(30), 0)] == ["host"]
    assert [(copy.source, copy.readers) for copy in world.copies(version(30), 1)] == [("peer", (0,))]


def test_one_step_of_two_lives_or_plans_is_two_versions() -> None:
    """Equal steps do not make equal bits."""
    world = inventory(
        ("a", {(version(30, incarnation=1), 0), (version(30, incarnation=2), 1), (version(20), 0), (version(20), 1)}),
        ("b", {(version(40, plan_hash="a"), 0), (version(40, plan_hash="b"), 1)}),
    )
    assert usable(world) == [version(20)]


def test_a_copy_counts_once_however_many_processes_of_its_node_read_it() -> None:
    """Ranks 1 and 2 share a node, so there is one copy with two readers, and the owner begins with its own."""
    held = {(version(30), owner) for owner in range(4)}
    world = inventory(("a", held), ("b", held), ("b", held), ("c", held), committed={version(30)})
    copies = world.copies(version(30), 3)
    assert [copy.source for copy in copies] == ["host", "peer", "peer", "storage"]
    assert sorted(copy.readers for copy in copies[1:3]) == [(0,), (2, 1)]


versions = st.builds(version, st.integers(0, 4), st.integers(1, 3), st.sampled_from("ab"))
memories = st.sampled_from(["n0", "n1", "n2"])


@st.composite
def inventories(draw: st.DrawFn) -> Inventory:
    """Any holdings in any memory; ranks that name one memory find the same there."""
    world_size = draw(st.integers(1, 4))
    holdings = st.sets(st.tuples(versions, st.integers(0, world_size - 1)), max_size=12)
    held = {memory: draw(holdings) for memory in ("n0", "n1", "n2")}
    ranks = [(memory, held[memory]) for memory in draw(st.lists(memories, min_size=world_size, max_size=world_size))]
    return inventory(*ranks, committed=draw(st.sets(versions, max_size=2)))


@st.composite
def histories(draw: st.DrawFn) -> History:
    history = History(run_id="r", first_incarnation=1, last_incarnation=0)
    for incarnation in range(1, 1 + draw(st.integers(0, 3))):
        floor = draw(st.none() | st.integers(0, 4))
        resumed = None if floor is None else GenerationId(step=floor, incarnation=incarnation - 1)
        history = history.opened(incarnation, resumed, nonce="")
    return history.advanced(draw(st.integers(0, 2)))


@settings(deadline=None, max_examples=200)
@given(inventories(), histories())
def test_agreement_is_what_trying_every_version_gives(world: Inventory, history: History) -> None:
    """The model: of every version that could exist, ask each rank's part of every place, one by one."""

    def somewhere(wanted: Version, owner: int) -> bool:
        return wanted in world.committed or any(
            (item.version, item.owner) == (wanted, owner) for stock in world.stocks.values() for item in stock.items
        )

    expected = [
        each
        for each in (version(s, e, p) for s, e, p in product(range(5), range(1, 4), "ab"))
        if all(somewhere(each, owner) for owner in range(len(world.stocks)))
        and history.why_dead(each.generation) is None
    ]
    found = usable(world, history)
    assert (
        found
        == sorted(expected, key=lambda each: (each.generation.step, each.generation.incarnation, each.plan_hash))[::-1]
    )
    for each, owner in product(found, range(len(world.stocks))):
        copies = world.copies(each, owner)
        order = [("host", "peer", "storage").index(copy.source) for copy in copies]
        assert copies
        assert order == sorted(order)
        assert len(set(copies)) == len(copies)


@settings(deadline=None)
@given(inventories())
def test_stocks_survive_the_exchange(world: Inventory) -> None:
    """What ranks tell each other in plain values is what they hold."""
    assert Inventory.of([stock.plain() for stock in world.stocks.values()], world.committed) == world
