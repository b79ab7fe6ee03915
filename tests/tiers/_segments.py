"""Real segments and markers in rings, and processes that leave them behind."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from door import as_memoryview
from stored._segments import verify_records

from lightning_moe_ckpt.errors import Corrupt
from lightning_moe_ckpt.storage import (
    GenerationId,
    RankMarker,
    RecordEntry,
    RecordRows,
    SegmentLayout,
    TensorSpec,
    digest_of,
)
from lightning_moe_ckpt.tiers import Holding, HostTier, Markers, SealedFile, SealedSegment, SegmentRing

LAYOUT = SegmentLayout([TensorSpec("w", torch.float32, (1000,)), TensorSpec("b", torch.bfloat16, (3,))], metadata={})
RUN = "0123456789abcdef0123456789abcdef"
TIMEOUT = 30


def generation(step: int, incarnation: int = 1) -> GenerationId:
    return GenerationId(step=step, incarnation=incarnation, nonce="0123456789ab")


def value_of(name: GenerationId, rank: int, step: int) -> float:
    """What all tensors of a segment hold, different in every one."""
    return float(name.incarnation * 10_000 + name.step * 100 + rank * 10 + step % 10)


def _records() -> RecordRows:
    entries = [
        RecordEntry(
            name=name, operator="op", kind="full", fqn=name, state_key="param",
            dtype={"w": "F32", "b": "BF16"}[name], global_shape=span.shape, global_start=0, numel=span.shape[0],
            offset=span.offset, nbytes=span.nbytes, digest="",
        )
        for name, span in LAYOUT.spans.items()
    ]  # fmt: skip
    return RecordRows(entries)


def fill(ring: SegmentRing, name: GenerationId, step: int, *, rank: int = 0, nbytes: int = 0) -> SealedSegment:
    """The next segment of the window under way, sealed."""
    slot = ring.acquire(name, step, nbytes)
    LAYOUT.write_header(slot.view)
    for tensor in LAYOUT.spans:
        LAYOUT.view(slot.view, tensor).fill_(value_of(name, rank, step))
    ring.seal(slot)
    view = as_memoryview(slot.view)[: LAYOUT.nbytes]
    file = SealedFile(generation=name, rank=rank, step=step, view=view, records=_records())
    return SealedSegment(files=[file], view=view)


def seal(
    ring: SegmentRing,
    name: GenerationId,
    steps: Sequence[int],
    *,
    rank: int = 0,
    run_id: str = RUN,
    world_size: int = 1,
) -> RankMarker:
    """Fill and seal a window, without publishing it; the marker over it."""
    ring.begin_window(name)
    entries = [entry for step in steps for entry in fill(ring, name, step, rank=rank).digested()]
    ring.finish_window(name)
    markers = Markers(run_id=run_id, rank=rank, world_size=world_size)
    return markers.of(name, entries, plan_hash="plan", plan_json="{}")


def keep(ring: SegmentRing, name: GenerationId, steps: Sequence[int], *, rank: int = 0, run_id: str = RUN) -> None:
    """A whole generation, published."""
    ring.publish(name, seal(ring, name, steps, rank=rank, run_id=run_id))


def check(tier: HostTier, holding: Holding) -> None:
    """Every byte of a copy is what was captured, by its digests and by its values."""
    for entry in check_whole(tier, holding).segments:
        part = torch.zeros(40, dtype=torch.uint8)
        tier.read_into(holding, entry, LAYOUT.spans["w"].offset + 4, as_memoryview(part))
        wanted = value_of(holding.generation, holding.owner, entry.step)
        assert torch.equal(part.view(torch.float32), torch.full((10,), wanted))


def check_whole(tier: HostTier, holding: Holding) -> RankMarker:
    """What verifies is what was captured. Raises `Corrupt` if it does not verify, `KeyMissing` if it is gone."""
    marker = tier.read_marker(holding)
    assert (marker.generation, marker.rank, marker.plan_hash) == (holding.generation, holding.owner, "plan")
    for entry in marker.segments:
        out = torch.zeros(entry.nbytes, dtype=torch.uint8)
        tier.read_into(holding, entry, 0, as_memoryview(out))
        if digest_of(as_memoryview(out)) != entry.digest:
            raise Corrupt(f"{entry.key} does not verify")
        verify_records(entry, as_memoryview(out))
        wanted = value_of(holding.generation, holding.owner, entry.step)
        assert torch.equal(LAYOUT.view(out, "w"), torch.full((1000,), wanted))
    return marker


def readable(directory: Path, run_id: str = RUN) -> list[tuple[int, int]]:
    """Owner and step of everything in the host tier, newest first; each copy is read and checked."""
    tier = HostTier(run_id, directory)
    try:
        holdings = tier.holdings()
        for holding in holdings:
            check(tier, holding)
        return [*dict.fromkeys((holding.owner, holding.generation.step) for holding in holdings)]
    finally:
        tier.close()


class Child:
    """A forked process that runs something and then dies, or stands still until it is told to."""

    def __init__(self, action: Callable[[], object]) -> None:
        read, write = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            self._live(action, write)
        os.close(write)
        told = os.read(read, 1)
        os.close(read)
        assert told == b"+", "the child failed; see its output"

    def _live(self, action: Callable[[], object], write: int) -> None:
        try:
            kept = action()
            os.write(write, b"+")
            signal.pause()  # with all its memory and locks
            del kept
        finally:
            os._exit(1)

    def stop(self) -> None:
        """SIGSTOP, and wait until it has stopped."""
        os.kill(self.pid, signal.SIGSTOP)
        os.waitpid(self.pid, os.WUNTRACED)

    def kill(self) -> None:
        """SIGKILL, and wait for its end."""
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


def leave_behind(action: Callable[[], object]) -> None:
    """Run something in a process that is then killed."""
    Child(action).kill()
