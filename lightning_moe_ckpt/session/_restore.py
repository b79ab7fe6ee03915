"""Opening a run: what this life resumes from, whole and verified, and the epoch that fences earlier lives.

The search for it is in `_search.py`. If the log moved between the search and the opening of the epoch, another process
has started meanwhile or an earlier one still commits, and the search begins again.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lightning_moe_ckpt.errors import ConfigurationError, IdentityMismatch, NoUsableGeneration
from lightning_moe_ckpt.parallel import ParallelGroups
from lightning_moe_ckpt.recovery import Part, SourceName, Version
from lightning_moe_ckpt.session._exchange import Exchange
from lightning_moe_ckpt.session._layout import JOURNAL
from lightning_moe_ckpt.session._search import Job, Search
from lightning_moe_ckpt.storage import Backend, GenerationId, Resume, RunStore, SegmentLayout, open_backend
from lightning_moe_ckpt.tiers import HostTier


@dataclass(kw_only=True)
class Found:
    """A generation that every rank could read, with this rank's bytes."""

    generation: GenerationId
    policy: Mapping[str, Any]
    steps: Sequence[int]
    segments: list[Tensor]
    """One uint8 tensor per step; the bytes of the file."""
    layouts: list[SegmentLayout]
    nbytes: Mapping[SourceName, int]
    """Bytes of this rank, by where they were read."""
    committed: bool
    """Whether it is in storage; if not, it is in memory only."""

    @classmethod
    def of(cls, version: Version, part: Part, *, committed: bool) -> Found:
        """What a search brought."""
        nbytes = Counter[SourceName]()
        for copy, count in part.nbytes.items():
            nbytes[copy.source] += count
        return cls(
            generation=version.generation,
            policy=part.marker.policy,
            steps=part.marker.steps,
            segments=part.segments,
            layouts=part.layouts,
            nbytes=nbytes,
            committed=committed,
        )

    @property
    def restored_from(self) -> dict[str, int]:
        """Bytes of this rank, by the name of where they were read."""
        return {str(source): count for source, count in self.nbytes.items()}

    @property
    def tiers(self) -> dict[str, int]:
        """Its step, by the tiers that are known to hold this rank's part of it."""
        return dict.fromkeys([*self.nbytes, *(["storage"] if self.committed else [])], self.generation.step)

    @property
    def plan(self) -> dict[str, Any]:
        """The stored plan, see `lay_out`."""
        plan: dict[str, Any] = json.loads(self.policy["plan"])
        return plan

    @property
    def first_step(self) -> int:
        """The boundary of slot 0."""
        return self.steps[0]

    @property
    def journal_nbytes(self) -> int:
        """Capacity of the journal record."""
        return self.layouts[0].spans[JOURNAL].nbytes

    def check_headers(self, expected: Sequence[SegmentLayout]) -> None:
        """The bytes must lie where this model, plan and world put them.

        Raises:
            IdentityMismatch: they do not.
        """
        for step, found, wanted in zip(self.steps, self.layouts, expected, strict=True):
            if found.header != wanted.header:
                raise IdentityMismatch(
                    f"{self.generation}, segment of step {step}: its records are not those this model, optimizer and "
                    "world give. Resume with the code that wrote it, or start anew with resume='never'."
                )


class Runs:
    """This rank's access to the run under a URL.

    Args:
        url: where the run lives.
        storage_options: for the backend.
        exchange: control exchange between ranks.
        groups: this rank's place.
        bandwidth: bytes per second that this rank may write; `None` for no cap.
    """

    def __init__(
        self,
        url: str,
        storage_options: Mapping[str, Any] | None,
        exchange: Exchange,
        groups: ParallelGroups,
        *,
        bandwidth: int | None = None,
    ) -> None:
        self._exchange = exchange
        with exchange.together():  # a package can be missing on one machine only
            self._backend: Backend = open_backend(url, storage_options=storage_options, bandwidth=bandwidth)
            _refuse_process_memory(self._backend.url, groups.world_size)
        self.store: RunStore
        self.epoch = 0

    @property
    def run_id(self) -> str:
        """Identity of the run in storage."""
        return self.store.run_id

    def open(self, *, resume: Resume, job: Job) -> Found | None:
        """Find what to resume from and open a new epoch.

        Raises:
            NoUsableGeneration: generations are there, but none could be read, or `resume='must'` found none.
            IdentityMismatch: the run was written by another model, optimizer or world.
        """
        self._open_store(resume)
        with closing(HostTier(self.run_id)) as memory:
            while True:
                search = Search(self.store, self._exchange, [memory], job)
                found = search.run()
                if found is None and (search.reasons or resume == "must"):
                    raise NoUsableGeneration(self._no_generation(resume, search.reasons))
                if self._open_epoch(None if found is None else found[0].generation, search.volatile):
                    return None if found is None else Found.of(*found, committed=found[0] in search.committed)

    def close(self) -> None:
        """Release the backend."""
        self._backend.close()

    # -- private

    def _open_store(self, resume: Resume) -> None:
        identity = self._exchange.told(lambda: self._open_as_coordinator(resume))
        if not self._exchange.is_coordinator:
            self.store = RunStore.join(self._backend, run_id=str(identity))

    def _open_as_coordinator(self, resume: Resume) -> str:
        self.store = RunStore.open(self._backend, resume=resume)
        return self.store.run_id

    def _open_epoch(self, resumed: GenerationId | None, volatile: Collection[GenerationId]) -> bool:
        """Whether the epoch was opened; if not, the log moved meanwhile and the pick has to be made again."""
        epoch = self._exchange.told(lambda: self.store.open_epoch(resumed, volatile=volatile))
        if epoch is None:
            return False
        assert isinstance(epoch, int)
        self.epoch = epoch
        return True

    def _no_generation(self, resume: Resume, reasons: Sequence[str]) -> str:
        if not reasons:
            return (
                f"`resume={resume!r}`: {self._backend.url} holds no committed generation. "
                "Use resume='auto' to start a new run there."
            )
        lines = "\n".join(f"  - {reason}" for reason in reasons)
        return (
            f"{self._backend.url} holds generations, but none can be restored:\n{lines}\n"
            "Repair one of them, or start anew with resume='never'."
        )


def _refuse_process_memory(url: str, world_size: int) -> None:
    if url.startswith("memory:") and world_size > 1:
        raise ConfigurationError(
            f"`{url}` is the memory of one process, and this run has {world_size}: none would see what the others store. "
            "Give a path or URL that all of them reach."
        )
