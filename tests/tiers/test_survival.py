"""The probability of survival is that of a count over all choices, and Gemini's where that is exact."""

from __future__ import annotations

import math
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_moe_ckpt.tiers import (
    FailureDomain,
    ReplicaPlacement,
    _holders,
    percent,
    place_replicas,
    survival_probability,
)
from lightning_moe_ckpt.tiers._holders import survival_summary


def nodes_of(num_nodes: int, replicas: int, racks: int = 1) -> ReplicaPlacement:
    domains = [FailureDomain(node=f"n{n:03}", rack=f"r{n * racks // num_nodes}") for n in range(num_nodes)]
    return place_replicas(domains, [range(num_nodes)], [1] * num_nodes, replicas)


def scattered(holders: list[tuple[int, ...]], racks: list[str]) -> ReplicaPlacement:
    """Any holders, whether `place_replicas` would choose them or not."""
    domains = tuple(FailureDomain(node=f"n{n}", rack=rack) for n, rack in enumerate(racks))
    chosen = tuple(holders)
    return ReplicaPlacement(domains=domains, nbytes=(1,) * len(domains), holders=chosen)


def gemini(n: int, m: int, k: int) -> float:
    """Corollary 1: n machines in groups of m, k of them lost."""
    return 1.0 if k < m else max(0.0, 1 - n / m * math.comb(n - m, k - m) / math.comb(n, k))


@st.composite
def placements(draw: st.DrawFn) -> ReplicaPlacement:
    num_nodes = draw(st.integers(2, 8))
    others = [
        draw(st.lists(st.sampled_from([x for x in range(num_nodes) if x != n]), max_size=3, unique=True))
        for n in range(num_nodes)
    ]
    racks = draw(st.lists(st.sampled_from("abcde"), min_size=num_nodes, max_size=num_nodes))
    return scattered([tuple(each) for each in others], racks)


@settings(max_examples=150)
@given(placements(), st.sampled_from(["node", "rack"]))
def test_it_is_the_share_of_choices_that_leave_a_copy_of_everyone(
    placement: ReplicaPlacement, level: _holders.Level
) -> None:
    """For every number of nodes or racks lost, against all choices."""
    place = [domain.node if level == "node" else domain.rack for domain in placement.domains]
    names = sorted(set(place))
    for lost in range(len(names) + 1):
        choices = [set(combination) for combination in combinations(names, lost)]
        good = sum(
            all(any(place[rank] not in gone for rank in (o, *hs)) for o, hs in enumerate(placement.holders))
            for gone in choices
        )
        found = survival_probability(placement, lost, level=level)
        assert (found.probability, found.error, found.of) == (good / len(choices), 0, len(names))


def test_published_values() -> None:
    """Gemini's own: 16 machines with two copies each survive two losses with 93.3 %, three with 80 %."""
    placement = nodes_of(16, 1)
    assert survival_probability(placement, 2).probability == pytest.approx(0.933, abs=5e-4)
    assert survival_probability(placement, 3).probability == pytest.approx(0.8)


@pytest.mark.parametrize(("num_nodes", "replicas"), [(16, 1), (12, 2), (128, 1), (300, 2), (128, 3)])
def test_groups_survive_as_gemini_says(num_nodes: int, replicas: int) -> None:
    """Exactly below twice the size of a group; from there on Gemini's formula is a lower bound."""
    placement, size = nodes_of(num_nodes, replicas), replicas + 1
    for lost in range(1, 2 * size):
        assert survival_probability(placement, lost).probability == pytest.approx(gemini(num_nodes, size, lost), 1e-12)
    for lost in range(2 * size, 2 * size + 2):
        assert survival_probability(placement, lost).probability > gemini(num_nodes, size, lost)


@pytest.mark.parametrize(("num_nodes", "replicas"), [(8, 1), (9, 1), (9, 2), (10, 2), (11, 2)])
def test_no_ring_survives_better(num_nodes: int, replicas: int) -> None:
    """The usual neighbour placement has a fatal set per node, groups have one per group."""
    ring = scattered(
        [tuple((n + step) % num_nodes for step in range(1, replicas + 1)) for n in range(num_nodes)], ["-"] * num_nodes
    )
    for lost in range(replicas + 1, num_nodes - replicas):
        ours, theirs = (survival_probability(each, lost).probability for each in (nodes_of(num_nodes, replicas), ring))
        assert ours > theirs or ours == theirs == 0
    assert survival_probability(nodes_of(num_nodes, replicas), replicas + 1).probability > 0


def test_racks_are_survived_where_copies_leave_them() -> None:
    """Four racks of four nodes; without racks known, a rack may hold a whole group."""
    known = nodes_of(16, 1, racks=4)
    assert survival_probability(known, 1, level="rack").probability == 1
    assert survival_probability(known, 4, level="rack").probability == 0
    blind = nodes_of(16, 1)
    domains = tuple(FailureDomain(node=d.node, rack=k.rack) for d, k in zip(blind.domains, known.domains, strict=True))
    told = ReplicaPlacement(domains=domains, nbytes=blind.nbytes, holders=blind.holders)
    assert survival_probability(told, 1, level="rack").probability == 0


def test_an_estimate_says_how_far_off_it_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where counting would take too long; the same on every rank."""
    ring = scattered([((n + 1) % 40,) for n in range(40)], ["-"] * 40)
    exact = survival_probability(ring, 3)
    monkeypatch.setattr(_holders, "_EXACT_CHOICES", 0)
    estimate = survival_probability(ring, 3)
    assert exact.error == 0
    assert 0 < estimate.error <= 0.0025
    assert abs(estimate.probability - exact.probability) < 4 * estimate.error
    assert estimate == survival_probability(ring, 3)


def test_more_than_there_are_cannot_be_lost() -> None:
    """A mistake of the caller."""
    with pytest.raises(ValueError, match="there are 4 nodes to lose"):
        survival_probability(nodes_of(4, 1), 5)


def test_the_line_for_the_log_never_rounds_to_certainty() -> None:
    """Three nines are not a hundred percent."""
    assert survival_summary(nodes_of(16, 1, racks=4)) == (
        "once all was copied, memory holds every rank's state after the loss of "
        "1 node: 100%, 2 nodes: 93.33%, 3 nodes: 80.00%, 4 nodes: 61.54%, 1 rack: 100%"
    )
    assert "3 nodes: > 99.99%" in survival_summary(nodes_of(300, 2))
    assert [percent(p) for p in (0, 1e-9, 0.5, 1 - 1e-9, 1)] == ["0%", "< 0.01%", "50.00%", "> 99.99%", "100%"]
