"""A run goes on with other numbers of ranks and in other layouts, bit for bit as from a whole file of Lightning's."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from campaign._campaign import SHARED_MEMORY, Campaigns, checkpoints, lose_memory, memory_of_run
from campaign._draw_topologies import draw_journey
from campaign._partial_damage import stored_markers
from campaign._topologies import (
    NUM_EXPERTS,
    Journey,
    Layout,
    Leg,
    Trip,
    check_trip,
    compared,
    kept_file,
    reference,
    run_trip,
    state_by_name,
)
from campaign._training import Checkpointing
from lightning_moe_ckpt.testing import AttemptFailed, Kill, differences

DENSE = Trip(checkpointing=Checkpointing(policy="dense"))
FIRST, SECOND = 3, 10
"""Steps in which a run is killed: in the midst of an epoch, and the first one of an epoch."""


def ranks(number: int, **options: Any) -> Layout:
    return Layout(ranks=number, **options)


FSDP2_4, FSDP2_3, FSDP2_2 = (ranks(number, sharding="fsdp2") for number in (4, 3, 2))
WAYS: dict[str, tuple[Layout, ...]] = {
    "4 to 2 to 4": (ranks(4), ranks(2), ranks(4)),
    "2 to 1 to 3": (ranks(2), ranks(1), ranks(3)),
    "ep 2 to 1 to 2": (ranks(2, experts=2), ranks(2), ranks(2, experts=2)),
    "ep 4 to 2 of 4": (ranks(4, experts=4), ranks(4, experts=2), ranks(2, experts=2)),
    "pp 2 to 1 to 2": (ranks(2, stages=2), ranks(1), ranks(2, stages=2)),
    "pp 3 to 2": (ranks(3, stages=3), ranks(4, stages=2, experts=2), ranks(2)),
    "fsdp2 4 to 3": (FSDP2_4, FSDP2_3, FSDP2_4),
    "moe to fsdp2": (ranks(2), FSDP2_2, ranks(2)),
    "ep to fsdp2": (ranks(4, experts=2), FSDP2_3, ranks(2, experts=2)),
    "fsdp2 to pp": (FSDP2_2, ranks(2, stages=2), FSDP2_3),
    "zero 3 to 4 to 1": (ranks(3, zero=True), ranks(4, zero=True), ranks(1)),
    "zero with ep": (ranks(4, experts=2, zero=True), ranks(3, zero=True), ranks(2, zero=True, experts=2)),
}
PROOFS = ("4 to 2 to 4", "ep 2 to 1 to 2", "pp 2 to 1 to 2", "fsdp2 4 to 3", "moe to fsdp2", "zero 3 to 4 to 1")
ELSEWHERE = {"4 to 2 to 4", "pp 2 to 1 to 2"}
"""Ways of an ordinary run under other policies: partial and from memory alone the first, in differences the second."""
SINGLE = [ranks(1), ranks(2), ranks(4, experts=2), ranks(2, stages=2), ranks(3, zero=True), FSDP2_3]


def legs(way: tuple[Layout, ...], *kills: Kill) -> list[Leg]:
    """Return a life in each layout; all but the last are killed, if nothing else is said when the step before is durable."""
    usual = [Kill(phase="forward", step=step, settle=10.0) for step in (FIRST, SECOND)][: len(way) - 1]
    return [Leg(layout=layout, kill=kill) for layout, kill in zip(way, [*(kills or usual), None], strict=True)]


def check(campaigns: Campaigns, trip: Trip, way: str, **options: Any) -> Journey:
    journey = check_trip(campaigns, trip, *legs(WAYS[way]), **options)
    assert journey.begun == [0, FIRST, SECOND]
    return journey


# -- the reference, and the harness


@pytest.mark.parametrize("layout", [pytest.param(layout, marks=pytest.mark.soak) for layout in SINGLE], ids=str)
def test_the_reference_is_the_uninterrupted_run_where_nothing_changes(campaigns: Campaigns, layout: Layout) -> None:
    """Lightning's file before the first step, in the midst of an epoch and at its end, and the samples that are left, add up to one run."""
    whole = reference(campaigns, DENSE, [layout], [])
    cut = reference(campaigns, DENSE, [layout] * 4, [0, FIRST, SECOND])
    for rank in range(layout.ranks):
        assert not differences(*[compared(life.end(rank)) for life in (whole, cut)])
        lines = {line["step"]: line for line in whole.records(rank, "train")}
        found = cut.records(rank, "train")
        assert [line["step"] for line in found] == [*range(SECOND + 1, DENSE.steps + 1)]
        assert all(line[key] == lines[line["step"]][key] for line in found for key in ("loss", "data", "lr"))


@pytest.mark.soak
@pytest.mark.parametrize("way", [way for way, layouts in WAYS.items() if layouts[0] == layouts[-1]])
def test_the_reference_is_near_the_run_where_nothing_changes(campaigns: Campaigns, way: str) -> None:
    """Other orders of sums are all that differs: moments of another parameter would be seen."""
    trip = replace(DENSE, auxiliary=0.0)
    ends = [reference(campaigns, trip, *where).end() for where in ((WAYS[way][:1], []), (WAYS[way], [FIRST, SECOND]))]
    for name, value in ends[0].items():
        if isinstance(value, Tensor) and value.is_floating_point():
            assert torch.allclose(value, ends[1][name], atol=1e-6, rtol=1e-4), name


@pytest.mark.soak
@pytest.mark.parametrize("layout", SINGLE, ids=str)
def test_where_nothing_changes_the_run_is_that_of_the_reference(campaigns: Campaigns, layout: Layout) -> None:
    check_trip(campaigns, DENSE, *legs((layout,) * 3))


# -- proofs


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=[pytest.mark.soak] * (way not in PROOFS or way in ELSEWHERE)) for way in WAYS]
)
def test_dense(campaigns: Campaigns, way: str) -> None:
    journey = check(campaigns, DENSE, way)
    said = re.search(r"resumes on (\d+) rank.* what (\d+) rank.* wrote", journey.log)
    assert said is not None
    assert [int(number) for number in said.groups()] == [layout.ranks for layout in WAYS[way][:0:-1]]


WHOLE = {
    "partial": Checkpointing(policy="partial", k=NUM_EXPERTS),
    "selective": Checkpointing(policy="selective", local_budget=10**8, remote_budget=10**8),
    "differential": Checkpointing(policy="differential", every_n_steps=4, batch=2),
    "sparse": Checkpointing(policy="sparse", window=1),
}


@pytest.mark.parametrize(
    ("policy", "way"),
    [
        pytest.param(policy, way, marks=[pytest.mark.soak] * (i > 2 or i % 2 or PROOFS[i] != way))
        for i, policy in enumerate(WHOLE)
        for way in WAYS
    ],
)
def test_other_policies(campaigns: Campaigns, policy: str, way: str) -> None:
    """Of which every generation has all experts: so it is whole. Differences lead to the step before the kill."""
    check(campaigns, replace(DENSE, checkpointing=WHOLE[policy]), way)


AGED = (
    (ranks(4), ranks(2)),
    (ranks(4, experts=2), ranks(1)),
    (ranks(2), ranks(4, experts=4)),
    (ranks(2), FSDP2_3),
    (FSDP2_3, ranks(2)),
    (ranks(3, zero=True), ranks(2, experts=2)),
    (ranks(2, stages=2), ranks(2)),
)


@pytest.mark.parametrize(
    "way",
    [pytest.param(way, marks=[pytest.mark.soak] * (way != AGED[0])) for way in AGED],
    ids=lambda way: " to ".join(map(str, way)),
)
def test_each_expert_is_as_of_its_newest_copy(campaigns: Campaigns, way: tuple[Layout, ...]) -> None:
    """With one expert per layer and generation: a life goes on with each expert from one file of the life before, none older
    than its newest copy in storage, and all else from the newest file.
    """
    trip = Trip(checkpointing=Checkpointing(policy="partial", k=1, plt_budget=None, keep=99), keeps_files=True)
    journey = run_trip(campaigns, trip, *legs(way, Kill(phase="forward", step=7, settle=10.0)))
    workdir, reached = journey.lives[0].workdir, journey.begun[1]
    before = {s: state_by_name(trip, kept_file(workdir, 0, s), way[0]) for s in range(1, reached + 1)}
    now = state_by_name(trip, kept_file(workdir, 1, reached), way[1])
    assert now.keys() == before[reached].keys()
    ages: dict[tuple[str, int], set[int]] = {}
    for name, value in now.items():
        if not re.search(r"\.moe\.[wb][12]( exp_avg.*)?$", name):
            assert torch.equal(value, before[reached][name]), name
            continue
        for expert in range(NUM_EXPERTS):
            same = {step for step, state in before.items() if torch.equal(value[expert], state[name][expert])}
            layer = name.partition(".moe.")[0]
            ages[layer, expert] = ages.get((layer, expert), same) & same
    odd = {where: steps for where, steps in ages.items() if len(steps) != 1}
    assert not odd, odd
    newest = newest_stored_copies(workdir)
    assert all(max(steps) >= newest[where] for where, steps in ages.items()), (ages, newest)
    assert len({step for steps in ages.values() for step in steps}) >= NUM_EXPERTS, "of different ages"


def newest_stored_copies(workdir: Path) -> dict[tuple[str, int], int]:
    """Return the step of the newest copy of each expert in storage that the first life took."""
    newest: dict[tuple[str, int], int] = {}
    for marker in stored_markers(workdir):
        names = {record.operator for entry in marker.segments for record in entry.records}
        for found in filter(None, (re.fullmatch(r"(.*)\.moe/expert\.(\d+)", name) for name in names)):
            where, step = (found[1], int(found[2])), marker.generation.step
            if marker.generation.incarnation == 1:
                newest[where] = max(newest.get(where, 0), step)
    return newest


def test_a_sparse_window_is_replayed_on_other_ranks(campaigns: Campaigns) -> None:
    """Repeated steps add gradients in another order, so that they are right to rounding, and are said to be."""
    trip = replace(DENSE, auxiliary=0.0, checkpointing=Checkpointing(policy="sparse", window=3))
    journey = run_trip(campaigns, trip, *legs((ranks(4), ranks(2)), Kill(phase="forward", step=9, settle=10.0)))
    assert journey.begun[1] > 0, "it did not start over"
    wanted = reference(campaigns, trip, (ranks(4), ranks(2)), [journey.begun[1]])
    for name, value in wanted.end().items():
        if name.startswith("param/"):
            assert torch.allclose(value, journey.lives[-1].end()[name], atol=1e-5), name
    assert "not exact" in journey.log or "to rounding" in journey.log, journey.log


# -- bytes


def read_by_rank(log: str, number: int) -> list[float]:
    """Return the bytes that each rank read, as rank 0 says."""
    read = [0.0] * number
    for of, text in re.findall(r": ranks? ([\d, ]+): ((?:[\d.]+ \wiB from .*)+)", log):
        for size, unit in re.findall(r"([\d.]+) (\wiB) from", text):
            for rank in of.split(","):
                read[int(rank)] += float(size) * {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}[unit]
    return read


def own_state(end: dict[str, Any]) -> int:
    """Return the bytes of a rank's weights and optimizer state."""
    kept = (value for name, value in end.items() if name.startswith(("param/", "optimizer/0/state/")))
    return sum(value.nbytes for value in kept if isinstance(value, Tensor))


@pytest.mark.parametrize("lost", [True, pytest.param(False, marks=pytest.mark.soak)], ids=["storage", "memory"])
@pytest.mark.parametrize(
    "way",
    [
        (ranks(4), ranks(2)),
        *(
            pytest.param(way, marks=pytest.mark.soak)
            for way in (
                (FSDP2_4, FSDP2_3),
                (ranks(2), ranks(4, experts=4)),
                (ranks(4, experts=4), ranks(2, experts=2)),
                (ranks(2, stages=2), ranks(2)),
                (ranks(3, zero=True), ranks(4, zero=True)),
                (ranks(2), FSDP2_4),
            )
        ),
    ],
    ids=lambda way: " to ".join(map(str, way)) if isinstance(way, tuple) else None,
)
def test_no_rank_reads_much_more_than_it_has(campaigns: Campaigns, way: tuple[Layout, ...], lost: bool) -> None:
    """At most 1.3 times its own state, or that of an average rank: the third of three has no row of four experts."""
    trip = replace(DENSE, hidden=1024, epochs=1)
    options = {"between": lose} if lost else {}
    journey = check_trip(campaigns, trip, *legs(way), **options)
    last = journey.lives[-1]
    read = read_by_rank(journey.log, last.world_size)
    state = [own_state(last.end(rank)) for rank in range(last.world_size)]
    print([f"{100 * r / s:.0f} %" for r, s in zip(read, state, strict=True)])
    assert sum(read) > 0
    mean = sum(state) / len(state)
    assert all(r <= 1.3 * max(s, mean) for r, s in zip(read, state, strict=True)), (read, state)


def lose(workdir: Path, index: int) -> None:
    lose_memory(workdir)


# -- where records come from


def test_from_the_memory_of_the_node_alone(campaigns: Campaigns) -> None:
    """Storage has only what training began from; ranks that are gone leave memory, which the end removes."""
    first, second, last = legs((ranks(4), ranks(2), ranks(4)))
    journey = check_trip(campaigns, DENSE, replace(first, stores_until=0), replace(second, stores_until=0), last)
    assert journey.begun == [0, FIRST, SECOND]


def spoil(path: Path, start: int = 0) -> None:
    """Turn a bit in every kibibyte."""
    raw = bytearray(path.read_bytes())
    for at in range(start + 512, len(raw), 1024):
        raw[at] ^= 1
    path.chmod(0o600)
    path.write_bytes(raw)


def rings_of(workdir: Path) -> Iterator[tuple[int, Path]]:
    """Yield the file of each rank that memory has."""
    for name in memory_of_run(checkpoints(workdir)):
        path = SHARED_MEMORY / name
        if name.endswith(".ring"):
            yield int(name.removesuffix(".ring").rpartition("-")[2]), path


def newest_stored(workdir: Path) -> Path:
    """Return the folder of the newest generation in storage."""
    return max(checkpoints(workdir).glob("snap/*/*/_COMMITTED")).parent


def spoil_a_ring(workdir: Path, index: int) -> None:
    spoil(dict(rings_of(workdir))[1], 4096)


def spoil_storage(workdir: Path, index: int) -> None:
    for path in newest_stored(workdir).glob("*.safetensors"):
        spoil(path)


def spoil_all_of_the_newest(workdir: Path, index: int) -> None:
    lose_memory(workdir)
    spoil(max(newest_stored(workdir).glob("*.safetensors")))


@pytest.mark.parametrize(
    ("between", "newest"),
    [
        pytest.param(spoil_a_ring, 1, marks=pytest.mark.soak),
        pytest.param(spoil_storage, 0, marks=pytest.mark.soak),
        (spoil_all_of_the_newest, 2),
    ],
    ids=["memory", "storage", "both"],
)
def test_bad_records(campaigns: Campaigns, between: Any, newest: int) -> None:
    """Another copy is taken, or an older generation if there is none. Storage of a busy machine passes generations by."""
    journey = check_trip(campaigns, DENSE, *legs((ranks(4), ranks(2))), between=between)
    stored = [int(step) for step in re.findall(r"step (\d+) \(incarnation 1\) is durable", journey.lives[0].log())]
    assert journey.begun == [0, [*stored, FIRST][-1] if not newest else stored[-newest]], journey.log


# -- what is refused


def refused(campaigns: Campaigns, trip: Trip, *legs: Leg) -> str:
    with pytest.raises(AttemptFailed) as failure:
        run_trip(campaigns, trip, *legs)
    return str(failure.value)


def test_elastic_refuse_names_both_topologies(campaigns: Campaigns) -> None:
    strict = replace(DENSE.checkpointing, arguments=(("elastic", "refuse"),))
    said = refused(campaigns, replace(DENSE, checkpointing=strict), *legs((ranks(4, experts=2), ranks(2))))
    assert "IdentityMismatch" in said
    for words in ("processes: 4 in the run, 2 now", "expert_parallel: 2 in the run, 1 now", "elastic='auto'"):
        assert words in said


def test_another_model_is_refused_on_any_number_of_ranks(campaigns: Campaigns) -> None:
    first, last = legs((ranks(4), ranks(2)))
    said = refused(campaigns, DENSE, first, replace(last, changes=(("hidden", 16),)))
    assert "IdentityMismatch" in said
    assert "w1" in said


# -- at random


@pytest.mark.parametrize(
    "seed", [10, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(144) if seed != 10)]
)
def test_drawn(campaigns: Campaigns, seed: int) -> None:
    """Layouts, policies, kills and losses of memory that are drawn."""
    case = draw_journey(seed)
    check_trip(campaigns, case.trip, *case.legs, between=case.between)
