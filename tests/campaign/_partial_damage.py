"""What is left of a partial run between two incarnations: markers in memory and in storage, and a bit that turns in either."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch
from door import marker_paths, memory_files

from campaign._campaign import checkpoints
from lightning_moe_ckpt.errors import Corrupt
from lightning_moe_ckpt.policies import Audience
from lightning_moe_ckpt.snapshot import PlanRecord
from lightning_moe_ckpt.storage import (
    RING_HEADER_NBYTES,
    GenerationId,
    MemoryMarker,
    RankMarker,
    RingHeader,
    RunStore,
    open_backend,
)
from lightning_moe_ckpt.tiers._readers import _read_marker

Damage = Literal["ring", "replica", "storage"]
"""Whose newest generation loses a bit of an expert: one that memory alone has of it, or one that storage has."""


@dataclass(frozen=True, kw_only=True)
class Spoilt:
    """A record that has other bytes than were written."""

    place: Damage
    owner: int
    """Rank whose piece it is."""
    step: int
    incarnation: int
    nonce: str
    expert: str

    @property
    def generation(self) -> GenerationId:
        """Whose it is."""
        return GenerationId(step=self.step, incarnation=self.incarnation, nonce=self.nonce)

    @classmethod
    def read(cls, workdir: Path) -> Spoilt | None:
        """What was spoilt in a run, if anything was."""
        path = workdir / "spoilt"
        return cls(**json.loads(path.read_text())) if path.exists() else None

    def hits(self, place: str, marker: RankMarker, expert: str) -> bool:
        """Whether this is the copy."""
        return (place, marker.rank, marker.generation, expert) == (self.place, self.owner, self.generation, self.expert)


@dataclass(frozen=True)
class _Held:
    """A whole generation in a memory file."""

    kind: Damage
    path: Path
    header: RingHeader
    file: MemoryMarker

    @property
    def start(self) -> int:
        """Where its one segment begins in the file."""
        (step,) = self.file.marker.steps
        return RING_HEADER_NBYTES + self.header.extent(self.file.slots[step])[0]


def list_memory(memory: Path, out: Path) -> None:
    """Write down which markers are in the memory of a node, by kind of file."""
    torch.save([(each.kind, each.file.marker.to_bytes()) for each in _held(memory)], out)


def _held(memory: Path) -> Iterator[_Held]:
    for path, name in memory_files(memory):
        with path.open("rb") as file:
            header = RingHeader.from_bytes(file.read(RING_HEADER_NBYTES), str(path))
        for marker in marker_paths(path):
            with suppress(Corrupt):  # of an earlier ring
                yield _Held(name.kind, path, header, _read_marker(marker, header))


def stored_markers(workdir: Path) -> Iterator[RankMarker]:
    """Markers of all committed generations."""
    backend = open_backend(checkpoints(workdir).as_uri())
    store = RunStore.open(backend, resume="must")
    for commit in store.candidates():
        for rank in range(commit.world_size):
            yield store.read_marker(commit, rank)
    backend.close()


def damage(place: Damage, memories: Sequence[Path], workdir: Path) -> None:
    """Turn a bit in a record of an expert in the newest generation that a place has, and write down which."""
    if place == "storage":
        marker = max(stored_markers(workdir), key=lambda each: each.generation)
        spoilt = _turn(place, marker, checkpoints(workdir) / marker.segments[0].key, 0, _experts(marker, "durable"))
    else:
        there = [memory for memory in memories if memory.exists()]  # those of a new machine may not be yet
        held = [each for memory in there for each in _held(memory) if each.kind == place]
        newest = max(held, key=lambda each: each.file.marker.generation)
        marker = newest.file.marker
        in_memory_alone = _experts(marker, "node")
        spoilt = _turn(place, marker, newest.path, newest.start, in_memory_alone)
    (workdir / "spoilt").write_text(json.dumps(asdict(spoilt)))


def _experts(marker: RankMarker, audience: Audience) -> set[str]:
    """Operators of the experts that the file of an audience has."""
    (step,) = PlanRecord.from_json(str(marker.policy["plan"])).plan.steps
    return {name for name in step.files.get(audience, ()) if "/expert." in name}


def _turn(place: Damage, marker: RankMarker, path: Path, start: int, among: set[str]) -> Spoilt:
    files = [
        (r, file) for file in marker.segments for r in file.records if r.operator in among and r.state_key == "param"
    ]
    record, file = max(files, key=lambda each: (each[0].operator, each[0].name))
    at = start + marker.slot_offset(file) + record.offset + record.nbytes // 2
    descriptor = os.open(path, os.O_RDWR)
    byte = os.pread(descriptor, 1, at)
    os.pwrite(descriptor, bytes([byte[0] ^ 16]), at)
    os.close(descriptor)
    return Spoilt(place=place, owner=marker.rank, **asdict(marker.generation), expert=record.operator)
