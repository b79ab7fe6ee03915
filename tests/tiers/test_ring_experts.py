"""Of partial generations memory keeps the newest copy of each expert, at every moment, whatever order they come in."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from door import as_memoryview

from lightning_moe_ckpt.errors import RingFull
from lightning_moe_ckpt.storage import GenerationId, RecordEntry, RecordRows, SegmentLayout, TensorSpec, digest_of
from lightning_moe_ckpt.tiers import (
    HostTier,
    Markers,
    SealedFile,
    SealedSegment,
    SegmentRing,
    _ring_state,
    _shm,
    shared_name,
)
from lightning_moe_ckpt.tiers._ring_state import slot_classes
from tiers._segments import RUN, generation

EXPERTS = {f"moe/expert.{i}": 64 * (100 + 40 * (i % 2)) for i in range(6)}
DENSE = 3000
SLOT = 24 * 4096


def segment(ring: SegmentRing, name: GenerationId, experts: Mapping[str, int]) -> SealedSegment:
    """The dense part and some experts, in two files as where memory takes more than storage."""
    slot, start, files = ring.acquire(name, name.step), 0, []
    names = sorted(experts)
    for audience, chosen in (("durable", names[::2]), ("node", names[1::2])):
        sizes = {**({"dense": DENSE} if audience == "durable" else {}), **{each: experts[each] for each in chosen}}
        if not sizes:
            continue
        layout = SegmentLayout([TensorSpec(each, torch.uint8, (n,)) for each, n in sizes.items()], metadata={})
        view = slot.view[start : start + layout.nbytes]
        layout.write_header(view)
        for size in sizes:
            layout.view(view, size).fill_(name.step % 251)
        records = [
            RecordEntry(
                name=each, operator=each, kind="full", fqn=each, state_key="param", dtype="U8", global_shape=(span.nbytes,),
                global_start=0, numel=span.nbytes, offset=span.offset, nbytes=span.nbytes, digest="",
            )
            for each, span in layout.spans.items()
        ]  # fmt: skip
        files.append(
            SealedFile(
                generation=name,
                rank=0,
                step=name.step,
                view=as_memoryview(view),
                records=RecordRows(records),
                audience=audience,  # type: ignore[arg-type]
            )
        )
        start += layout.nbytes
    ring.seal(slot)
    return SealedSegment(files=files, view=as_memoryview(slot.view)[:start])


class Run:
    """Takes generations, and knows the newest copy of each expert that a later process has to find."""

    def __init__(self, directory: Path, draws: random.Random, *, copies: int = 1, readers: int = 1) -> None:
        small = slot_classes(nbytes for nbytes in EXPERTS.values() for _ in range(copies))
        self.directory, self.draws, self.step = directory, draws, 0
        self.ring = SegmentRing.create(shared_name(RUN, 0), SLOT, 3 + readers, directory, small=small)
        self.ring.experts = EXPERTS
        self.newest: dict[str, int] = {}
        self.pinned: list[GenerationId] = []

    def take(self, experts: Sequence[str] = ()) -> bool:
        """Another generation with some experts, drawn if none are named, complete on all ranks; `False` if there was no room."""
        name = generation(self.step + 1)
        drawn = self.draws.sample(sorted(EXPERTS), self.draws.choice([1, 1, 2, 5]))
        chosen = {expert: EXPERTS[expert] for expert in experts or drawn}
        self.ring.begin_window(name)
        try:
            entries = segment(self.ring, name, chosen).digested()
        except RingFull:
            self.ring.abort_window(name)
            return False
        self.step += 1
        self.ring.finish_window(name)
        marker = Markers(run_id=RUN, rank=0, world_size=1).of(name, entries, plan_hash="plan", plan_json="{}")
        self.ring.publish(name, marker)
        if self.draws.random() < 0.3:
            self.ring.pin(name)
            self.pinned.append(name)
        self.newest |= dict.fromkeys(chosen, name.step)
        self.ring.complete_everywhere(name)
        return True

    def unpin(self) -> None:
        """Nobody reads any generation any more."""
        while self.pinned:
            self.ring.unpin(self.pinned.pop())

    def free_small(self) -> list[int]:
        """Small slots that are free, of each size."""
        return [self.ring.free_small(nbytes) for nbytes in sorted(set(EXPERTS.values()))]

    def found(self) -> dict[str, int]:
        """By operator, the newest copy of which every byte is what was captured."""
        tier, newest = HostTier(RUN, self.directory), dict[str, int]()
        for holding in tier.holdings():
            for entry in tier.read_marker(holding).segments:
                for record in entry.records:
                    out = torch.zeros(record.nbytes, dtype=torch.uint8)
                    tier.read_into(holding, entry, record.offset, as_memoryview(out))
                    assert digest_of(as_memoryview(out)) == record.digest, (record.name, holding)
                    assert record.operator != "dense" or holding.whole
                    newest[record.operator] = max(newest.get(record.operator, -1), holding.generation.step)
        tier.close()
        return newest

    def check(self) -> None:
        assert self.found() == ({"dense": self.step, **self.newest} if self.step else {})

    def whole(self) -> list[int]:
        tier = HostTier(RUN, self.directory)
        return sorted(holding.generation.step for holding in tier.holdings() if holding.whole)


@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("seed", range(3))
def test_the_newest_copy_of_each_expert_is_found_at_every_moment(
    tmp_path: Path, seed: int, copies: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also between the removal of an older copy and the marker of the newer one, with readers that are slow or quick."""
    draws = random.Random(seed)
    run, moments = Run(tmp_path, draws, copies=copies), 0

    def looked_at(path: Path, *parts: bytes | memoryview) -> None:
        nonlocal moments
        moments += 1
        run.check()
        write_shared(path, *parts)
        run.check()

    write_shared = _shm.write_shared
    monkeypatch.setattr(_ring_state, "write_shared", looked_at)
    for _ in range(25):
        taken = run.take()
        if run.pinned and (not taken or len(run.pinned) > 1 or draws.random() < 0.4):
            run.ring.unpin(run.pinned.pop(draws.randrange(len(run.pinned))))
        if not taken or draws.random() < 0.8:
            run.ring.condense()
        run.check()
        if draws.random() < 0.1:  # a process dies, and the next one goes on with what it finds
            run.ring.close(unlink=False)
            adopted = SegmentRing.adopt(tmp_path / shared_name(RUN, 0))
            assert adopted is not None
            adopted.lay(1)  # as `RankMemory.make` does
            run.ring, run.pinned, adopted.experts = adopted, [], EXPERTS
            run.check()
    assert moments
    run.unpin()
    run.ring.condense()
    run.check()
    assert run.whole() == [run.step]
    assert run.ring.free_slots == run.ring.num_slots - 1
    run.ring.close()


def test_copies_that_complete_a_generation_that_others_have_stay_where_there_is_room(tmp_path: Path) -> None:
    """A pinned generation can be resumed from with the copies that were the newest at its step."""
    draws = random.Random(1)
    run = Run(tmp_path, draws, copies=2)
    while len(run.newest) < len(EXPERTS) or run.pinned:
        run.take()
        run.unpin()
        run.ring.condense()
    then, pinned = dict(run.newest), generation(run.step)
    run.ring.pin(pinned)
    for _ in range(20):
        run.take()
        run.unpin()
        run.ring.condense()
        tier = HostTier(RUN, tmp_path)
        older = [holding for holding in tier.holdings() if holding.generation <= pinned]
        held = {
            (record.operator, each.generation.step)
            for each in older
            for entry in tier.read_marker(each).segments
            for record in entry.records
        }
        assert set(then.items()) <= held
    run.ring.close()


def test_what_is_given_up_while_it_is_brought_away_leaves_no_slot_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All generations are discarded, as where the ring's name is gone, in the middle."""
    run = Run(tmp_path, random.Random(2))
    for _ in range(3):
        assert run.take()
    write_shared = _shm.write_shared

    def given_up(path: Path, *parts: bytes | memoryview) -> None:
        write_shared(path, *parts)
        for each in run.ring.published:
            run.ring.discard(each)

    monkeypatch.setattr(_ring_state, "write_shared", given_up)
    run.unpin()
    run.ring.condense()
    assert run.ring.free_slots == run.ring.num_slots
    assert run.free_small() == [3, 3]
    assert run.found() == {}
    run.ring.close()


def test_experts_that_a_newer_generation_has_on_all_ranks_are_not_copied(tmp_path: Path) -> None:
    """Of those that are taken again and again there is no copy in a slot of their own."""
    run = Run(tmp_path, random.Random(1))
    for _ in range(3):
        assert run.take(sorted(EXPERTS)[:2])
        run.unpin()
        run.ring.condense()
        run.check()
    assert run.free_small() == [3, 3]
    run.ring.close()


def test_a_marker_for_which_there_is_no_room_costs_one_generation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slots are free afterwards, and what follows is kept."""
    run = Run(tmp_path, random.Random(5))
    for _ in range(2):
        assert run.take()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    run.unpin()
    monkeypatch.setattr(_ring_state, "write_shared", full)
    with pytest.raises(OSError, match="No space"):
        run.ring.condense()
    assert run.ring.free_slots == run.ring.num_slots - 1
    assert run.free_small() == [3, 3]
    assert run.whole() == [run.step]
    run.ring.close()
