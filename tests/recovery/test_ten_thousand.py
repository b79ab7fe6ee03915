"""Ten thousand ranks agree on what to resume from: the product's exchanges and search, over a simulated network."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from door import Inventory, Item, Stock

from benchmarks.ranks_agree import EXPERTS, NEW, PER_NODE, Network, World, agreement, choose, marker_of, start_seconds
from lightning_moe_ckpt.parallel import ROUTE, packed, routing, spreading, summing, uniting
from lightning_moe_ckpt.parallel._groups import tree, unpacked
from lightning_moe_ckpt.recovery import Version
from lightning_moe_ckpt.recovery._attempt import RestoreAttempt
from lightning_moe_ckpt.recovery._index import newest_whole
from lightning_moe_ckpt.recovery._transfer import agreed_inventory
from lightning_moe_ckpt.storage import GenerationId

MANY = 10_000
CPU_SECONDS = 60.0
"""Generous: an agreement takes five here, and one that grows with the square hundreds."""
sizes = pytest.mark.parametrize("size", [1_000, pytest.param(MANY, marks=pytest.mark.soak)])
"""Ranks of an ordinary run, in which the next test says how things grow, and of a soak."""


@sizes
def test_ten_thousand_ranks_agree_within_a_second(size: int) -> None:
    """A node has lost its memory: its ranks get their markers from the next. Few messages, few peers, few bytes."""
    began = time.process_time()
    network, markers = agreement(size)
    assert time.process_time() - began < CPU_SECONDS
    assert markers == [marker_of(NEW, rank, size) for rank in range(4 * PER_NODE)]
    assert max(network.clocks) < 1.0
    depth = size.bit_length()
    assert max(map(len, network.peers)) <= depth + 2  # and for a marker on another node
    assert sum(map(len, network.peers)) < 2.1 * size
    assert max(network.messages) <= depth * 16
    assert sum(network.messages) < 2.1 * 11 * size
    assert max(network.nbytes) < 2**24


@pytest.mark.parametrize(("few", "many"), [(128, 2048), pytest.param(256, 4096, marks=pytest.mark.soak)])
def test_what_agreement_takes_grows_with_the_logarithm_of_ranks(few: int, many: int) -> None:
    """Sixteen times as many ranks: not twice the time, messages and peers of a rank; its bytes grow with the commit's digests."""
    small, large = agreement(few)[0], agreement(many)[0]
    assert max(large.messages) <= 2 * max(small.messages)
    assert max(map(len, large.peers)) <= 2 * max(map(len, small.peers))
    assert max(large.nbytes) <= 1.5 * 16 * max(small.nbytes)


@sizes
def test_ten_thousand_ranks_choose_the_versions_of_experts(size: int) -> None:
    """3,840 experts, each cut among an eighth of the ranks, of which every second has a newer version."""
    world = World(size, choose)
    found = world.run()
    assert max(world.network.clocks) < 1.0
    assert len(found[0]) == EXPERTS * PER_NODE
    assert all(each == found[0] for each in found)
    assert Counter(found[0].values())[NEW] == EXPERTS * PER_NODE // 2


def test_a_start_of_ten_thousand_ranks_is_computed_in_seconds() -> None:
    """What a rank computes about all others when a run starts: holders, mirrors, survival, its share of the plan."""
    assert sum(start_seconds(MANY).values()) < 10.0


# -- the same answers as before


def all_seen(stocks: Sequence[Stock]) -> dict[Version, GenerationId]:
    found: dict[Version, GenerationId] = {}
    for stock in stocks:
        for version, commit in stock.seen.items():
            found[version] = max(commit, found.get(version, commit))
    return found


def number_of_writers(stocks: Sequence[Stock], wrote: dict[Version, int], version: Version) -> int:
    items = (item for stock in stocks for item in stock.items if item.version == version and item.world_size)
    return wrote.get(version) or next((item.world_size for item in items), len(stocks))


def usable_pairwise(
    stocks: Sequence[Stock], committed: Iterable[Version], wrote: dict[Version, int], alive: Iterable[Version]
) -> list[Version]:
    """Every rank looks at every rank's stock, as it was."""
    owners: dict[Version, set[int]] = {}
    for item in (item for stock in stocks for item in stock.items if item.whole):
        owners.setdefault(item.version, set()).add(item.owner)
    whole = {v for v, own in owners.items() if own.issuperset(range(number_of_writers(stocks, wrote, v)))}
    return sorted(whole.union(committed).intersection(alive), reverse=True)


def versions(draw: random.Random, number: int) -> list[Version]:
    return [
        Version(GenerationId(step=draw.randrange(4), incarnation=draw.randrange(1, 3)), draw.choice("ab"))
        for _ in range(number)
    ]


def drawn_stocks(draw: random.Random, size: int) -> list[Stock]:
    """Ranks of one node find the same; there are parts of fewer and of more writers than ranks."""
    held: dict[str, Stock] = {}
    some = versions(draw, 4)
    writers = {each: draw.choice([size, size, size, max(1, size - 2), size + 3]) for each in some}
    for node in range(-(-size // 3)):
        missing = 0.0 if draw.random() < 0.7 else 0.3
        items = {
            Item(v, owner, f"{owner}.{kind}", draw.random() > 0.05, draw.choice([writers[v], writers[v], 0]))
            for v in some
            for owner in range(writers[v])
            for kind, of in (("ring", owner % size // 3), ("replica", owner % size // 3 + 1))
            if of == node and draw.random() >= missing
        }
        ordered = sorted(items, key=lambda each: (each.version, each.owner, each.file))
        seen = {v: GenerationId(step=draw.randrange(3), incarnation=1) for v in {each.version for each in ordered}}
        held[f"n{node}"] = Stock(f"n{node}", tuple(ordered), {v: s for v, s in seen.items() if draw.random() < 0.5})
    return [held[f"n{rank // 3}"] for rank in range(size)]


@pytest.mark.parametrize("seed", [*range(15), *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(15, 60))])
def test_each_rank_is_told_what_comparing_all_offers_gives(seed: int) -> None:
    """Random offers of up to forty ranks."""
    draw = random.Random(seed)
    size = draw.randrange(2, 41)
    stocks = drawn_stocks(draw, size)
    committed, sources = frozenset(versions(draw, 1)), frozenset(versions(draw, 1))
    wrote = {each: draw.choice([size, size + 1]) for each in committed | sources}
    known = Inventory.of([each.plain() for each in stocks], committed, sources, wrote)
    found = World(size, lambda rank: agreed_inventory(rank, stocks[rank.rank], committed, sources, wrote)).run()
    for rank, each in enumerate(found):
        assert each.usable(each.all_versions) == usable_pairwise(stocks, committed, wrote, each.all_versions)
        assert each.all_versions == known.all_versions
        assert each.offers.seen == all_seen(stocks)
        for version in known.all_versions:
            assert each.writers(version) == number_of_writers(stocks, wrote, version) == known.writers(version)
            for owner in range(rank, each.writers(version), size):
                assert each.copies(version, owner, rank) == known.copies(version, owner, rank)
                assert each.files(version, owner) == known.files(version, owner)


@pytest.mark.parametrize("seed", [*range(6), *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(6, 20))])
def test_experts_are_chosen_as_by_comparing_all_offers(seed: int) -> None:
    """Random parts of random versions, of ranks with different experts."""
    draw = random.Random(seed)
    size, names = draw.randrange(2, 30), [f"expert.{number}" for number in range(6)]
    experts = [{name: 100 for name in names if draw.random() < 0.7} for _ in range(size)]
    own = [
        {name: [(v, draw.choice([10, 20, 50, 100])) for v in dict.fromkeys(versions(draw, 3))] for name in each}
        for each in experts
    ]

    def life(rank: Any) -> Any:
        inventory = Inventory({}, frozenset())
        attempt = RestoreAttempt(rank, cast("Any", None), inventory, NEW, [NEW], digests={})
        attempt._index = cast("Any", SimpleNamespace(offered=lambda _: own[rank.rank]))
        return attempt._newest_whole(experts[rank.rank])

    offered: dict[str, Counter[Version]] = {}
    sizes: dict[str, int] = {}
    for rank in range(size):
        sizes |= experts[rank]
        for name, rows in own[rank].items():
            counts = offered.setdefault(name, Counter())
            for source, numel in rows:
                counts[source] += numel
    expected = newest_whole(offered, dict(sorted(sizes.items())))
    assert World(size, life).run() == [expected] * size


@pytest.mark.parametrize("size", [2, 3, 8, 9, 16, 33, 100])
def test_exchanges_reach_every_rank_in_order(size: int) -> None:
    """All ranks' payloads once, sums, one rank's payload, and routed ones."""
    draw = random.Random(size)
    network = Network(size)
    said = [bytes([draw.randrange(3)]) * draw.randrange(1, 3) for _ in range(size)]
    assert network.take([uniting(r, size, said[r]) for r in range(size)]) == [[*dict.fromkeys(said)]] * size
    numbers = [np.array([r, draw.randrange(9)], np.int64) for r in range(size)]
    total = sum(numbers[1:], start=numbers[0]).tobytes()
    assert network.take([summing(r, size, numbers[r].tobytes()) for r in range(size)]) == [total] * size
    assert network.take([spreading(r, size, b"it" if r == 0 else b"") for r in range(size)]) == [b"it"] * size
    rows = [[ROUTE.pack(draw.randrange(size), r) + bytes([n]) for n in range(draw.randrange(4))] for r in range(size)]
    everything = [row for own in rows for row in own]
    expected = [[row for row in everything if ROUTE.unpack_from(row)[0] == r] for r in range(size)]
    assert network.take([routing(r, size, packed(rows[r])) for r in range(size)]) == expected
    assert unpacked(packed(everything)) == everything
    assert max(map(len, network.peers)) <= size.bit_length()
    assert sum(len(tree(r, size)[1]) for r in range(size)) == size - 1
