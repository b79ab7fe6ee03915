"""Play the part of training for `TierContract`: fill memory with random bytes, hand it over, and check what is read.

Memory that a tier releases is overwritten at once. A tier that reads it later, or keeps a view of it, is found out by
the bytes that its readers see.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from datetime import timedelta

import torch
from door import as_memoryview
from torch import Tensor
from typing_extensions import override

from benchmarks.segments import records_of
from lightning_moe_ckpt.errors import CheckpointError
from lightning_moe_ckpt.native import Ticket
from lightning_moe_ckpt.policies import AUDIENCES
from lightning_moe_ckpt.storage import (
    GenerationId,
    SegmentEntry,
    SegmentLayout,
    TensorSpec,
    digest_of,
    segment_key,
)
from lightning_moe_ckpt.tiers import Holding, SealedFile, SealedSegment, SegmentRing, Tier, TierWorker, WriteRequest

TIMEOUT = 30.0
"""Most seconds that a test waits for anything."""
PLAN_HASH, PLAN = "plan", '{"of": "the contract"}'
"""Plan of all generations in tests."""
_LAYOUT = SegmentLayout([TensorSpec("w", torch.float32, (1000,)), TensorSpec("b", torch.bfloat16, (3,))], metadata={})
"""Layout of every file."""
SLOT_NBYTES = len(AUDIENCES) * _LAYOUT.nbytes
"""Bytes of a segment."""
_GARBAGE = 0xEE
"""Byte that released memory is filled with."""


def _generation(step: int) -> GenerationId:
    return GenerationId(step=step, incarnation=1, nonce="0" * 12)


@dataclass(frozen=True, kw_only=True)
class TierHalves:
    """Both halves of an empty tier of rank 0."""

    worker: TierWorker
    """Writing half; the test closes it."""
    make_reader: Callable[[], Tier]
    """Returns a new reader of everything that `worker` has written so far, as a later process makes it."""
    lose: Callable[[], None]
    """Removes everything in the tier without telling either half."""
    name: Callable[[int], GenerationId] = _generation
    """Returns the generation of this process at a step."""
    ring: SegmentRing | None = None
    """Memory for segments, where the tier keeps them in place; has room for `TierContract.num_slots` of `slot_nbytes`."""


class HeldCopy(Ticket):
    """Copy to a segment that arrives when the test calls `arrive`."""

    def __init__(self) -> None:
        self._ended = threading.Event()
        self._error: CheckpointError | None = None
        self.write: Callable[[], object] = lambda: None
        """Function that writes the bytes on arrival."""

    @classmethod
    def failed(cls) -> HeldCopy:
        """Return a copy that fails."""
        copy = cls()
        copy._error = CheckpointError("the copy failed")
        copy._ended.set()
        return copy

    def arrive(self) -> None:
        """Let all bytes arrive; may be called once."""
        if not self.done:
            self.write()
            self._ended.set()

    @property
    @override
    def done(self) -> bool:
        return self._ended.is_set()

    @override
    def wait(self, timeout: timedelta | None = None) -> None:
        if not self._ended.wait(None if timeout is None else timeout.total_seconds()):
            raise TimeoutError
        if self._error is not None:
            raise self._error


class TierCapture:
    """Act as a session: fill memory with random bytes, hand it over, and overwrite it when it is released."""

    def __init__(self, tier: TierHalves) -> None:
        self.tier, self.worker = tier, tier.worker
        self.released: list[GenerationId] = []
        self.files: dict[GenerationId, dict[str, bytes]] = {}
        """Files of the tier's audiences, by key, in order."""
        self._segments: dict[GenerationId, list[SealedSegment]] = {}
        self._memory: dict[GenerationId, list[Tensor]] = {}
        self._copies: list[HeldCopy] = []
        self._open: GenerationId | None = None
        self._changed = threading.Condition()
        self._random = torch.Generator().manual_seed(0)
        self._num_overwritten = 0

    # -- writing

    def begin(self, step: int, *, num_segments: int) -> GenerationId:
        """Begin a window of `num_segments` segments."""
        name = self._open = self.tier.name(step)
        self.files[name], self._segments[name] = {}, []
        if self.tier.ring is not None:
            self.tier.ring.begin_window(name)
            self.tier.ring.pin(name)
        self.worker.begin(
            WriteRequest(
                generation=name,
                plan_hash=PLAN_HASH,
                plan_json=PLAN,
                num_segments=num_segments,
                on_released=self._released,
            )
        )
        return name

    def add(self, name: GenerationId, step: int, *, copy: HeldCopy | None = None) -> None:
        """Seal a segment and hand it over."""
        self.worker.add(name, self.seal(name, step, copy=copy))

    def seal(self, name: GenerationId, step: int, *, copy: HeldCopy | None = None) -> SealedSegment:
        """Return the window's next segment, with a file per audience. Its bytes are there, or arrive with `copy`."""
        memory_U8, bytes_U8 = self._take(name, step), self._draw()
        if copy is None:
            memory_U8.copy_(bytes_U8)
        else:
            copy.write = lambda: memory_U8.copy_(bytes_U8)
            self._copies.append(copy)
        if self.tier.ring is None:
            self._memory.setdefault(name, []).append(memory_U8)
        segment = _segment(name, step, as_memoryview(memory_U8), copy)
        self._segments[name].append(segment)
        for index, file in enumerate(segment.files):
            if file.audience in self.worker.audiences:
                part = as_memoryview(bytes_U8)[index * _LAYOUT.nbytes : (index + 1) * _LAYOUT.nbytes]
                self.files[name][segment_key(name, 0, step, file.audience)] = bytes(part)
        return segment

    def finish(self, name: GenerationId) -> None:
        """Finish the window, all of whose segments are sealed."""
        self._open = None
        if self.tier.ring is not None:
            self.tier.ring.finish_window(name)

    def abandon(self, name: GenerationId) -> None:
        """Abandon the window."""
        self._open = None
        self.worker.abandon(name)
        if self.tier.ring is not None:
            self.tier.ring.abort_window(name)

    def whole(
        self, step: int, *, num_segments: int = 1, copy: HeldCopy | None = None, wait: bool = True
    ) -> GenerationId:
        """Hand over a whole generation at `step`; with `wait`, return when the tier has completed it."""
        name = self.begin(step, num_segments=num_segments)
        for each in range(step - num_segments + 1, step + 1):
            self.add(name, each, copy=copy)
        self.finish(name)
        if wait:
            assert self.worker.drain(TIMEOUT)
            assert self.worker.holds(name), self.worker.take_failures()
        return name

    def two(self) -> tuple[GenerationId, GenerationId]:
        """Store two generations, of which the older one is complete everywhere."""
        older = self.whole(1)
        self.worker.complete_everywhere(older)
        return older, self.whole(3, num_segments=2)

    def wait_released(self, name: GenerationId) -> None:
        """Wait until the generation's memory is released."""
        with self._changed:
            assert self._changed.wait_for(lambda: name in self.released, TIMEOUT)

    def end(self) -> None:
        """Check that nothing is under way any more."""
        for copy in self._copies:
            copy.arrive()
        self.worker.close()

    # -- reading

    def readable(self) -> list[GenerationId]:
        """Check every byte that a new reader lists, and return the listed generations, newest first."""
        self._overwrite_free()
        with closing(self.tier.make_reader()) as reader:
            found = reader.holdings()
            for holding in found:
                self.check(reader, holding)
        return [holding.generation for holding in found]

    def check(self, reader: Tier, holding: Holding) -> None:
        """Check that a copy has all files as sealed, and no others."""
        marker, wanted = reader.read_marker(holding), self.files[holding.generation]
        assert [entry.key for entry in marker.segments] == list(wanted)
        for entry in marker.segments:
            out = bytearray(entry.nbytes)
            reader.read_into(holding, entry, 0, memoryview(out))
            assert out == wanted[entry.key], f"{entry.key} is not as it was sealed"
            assert digest_of(memoryview(out)) == entry.digest

    def entries(self, name: GenerationId) -> list[SegmentEntry]:
        """Return the marker's entries for the files."""
        segments = [segment.of(self.worker.audiences) for segment in self._segments[name]]
        return [entry for segment in segments for entry in segment.digested()]

    def nbytes(self, name: GenerationId) -> int:
        """Return the bytes of the files."""
        return sum(map(len, self.files[name].values()))

    def ranges(self, found: list[Holding], seed: int) -> Iterator[tuple[Holding, SegmentEntry, int, int]]:
        """Yield ranges of all files, including those at the ends: first byte, and the byte after the last."""
        draw = random.Random(seed)
        for holding in found:
            for entry in self.entries(holding.generation):
                size = entry.nbytes
                drawn = [sorted(draw.choices(range(size + 1), k=2)) for _ in range(4)]
                for start, stop in [(0, 0), (0, 1), (0, size), (size - 1, size), *drawn]:
                    yield holding, entry, start, stop

    # -- private

    def _take(self, name: GenerationId, step: int) -> Tensor:
        if self.tier.ring is None:
            return torch.zeros(SLOT_NBYTES, dtype=torch.uint8)
        slot = self.tier.ring.acquire(name, step)
        self.tier.ring.seal(slot)
        return slot.view[:SLOT_NBYTES]

    def _draw(self) -> Tensor:
        bytes_U8 = torch.randint(0, 256, (SLOT_NBYTES,), dtype=torch.uint8, generator=self._random)
        for file_U8 in torch.split(bytes_U8, _LAYOUT.nbytes):
            _LAYOUT.write_header(file_U8)
        return bytes_U8

    def _released(self, name: GenerationId) -> None:
        for memory_U8 in self._memory.pop(name, []):
            memory_U8.fill_(_GARBAGE)
        if self.tier.ring is not None:
            self.tier.ring.unpin(name)
        with self._changed:
            self.released.append(name)
            self._changed.notify_all()

    def _overwrite_free(self) -> None:
        """Fill every slot that the ring would give to the next window."""
        ring = self.tier.ring
        if ring is None or self._open is not None:
            return
        self._num_overwritten += 1
        window = f"overwritten {self._num_overwritten}"
        ring.begin_window(window)
        for step in range(ring.free_slots):
            ring.acquire(window, step).view.fill_(_GARBAGE)
        ring.abort_window(window)


def _segment(name: GenerationId, step: int, view: memoryview, copy: HeldCopy | None) -> SealedSegment:
    parts = [view[index * _LAYOUT.nbytes : (index + 1) * _LAYOUT.nbytes] for index in range(len(AUDIENCES))]
    files = [
        SealedFile(
            generation=name, rank=0, step=step, view=part, records=records_of(_LAYOUT), ticket=copy, audience=audience
        )
        for part, audience in zip(parts, AUDIENCES, strict=True)
    ]
    return SealedSegment(files=files, view=view)
