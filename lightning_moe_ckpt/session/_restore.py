"""Finding the generation to resume from: every rank verifies its own part, and one that is good everywhere wins.

The coordinator lists what is committed, newest first. Each rank reads its segments of a candidate and checks every
byte against the digests; only if all ranks succeed is the candidate taken, otherwise the next older one is tried and
the reason is kept. Then the coordinator opens a new epoch, which fences earlier lives.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_moe_ckpt.errors import CheckpointError, ConfigurationError, Corrupt, IdentityMismatch, NoUsableGeneration
from lightning_moe_ckpt.operators import OperatorSet, StateSchema
from lightning_moe_ckpt.parallel import ParallelGroups
from lightning_moe_ckpt.session._exchange import Exchange
from lightning_moe_ckpt.session._identity import (
    Facts,
    Identity,
    live_facts,
    live_optimizer,
    model_differences,
    stored_facts,
)
from lightning_moe_ckpt.session._layout import JOURNAL, as_memoryview
from lightning_moe_ckpt.storage import (
    Backend,
    Commit,
    GenerationId,
    Resume,
    RunStore,
    SegmentLayout,
    open_backend,
    verify_records,
)

log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Found:
    """A generation that every rank could read, with this rank's bytes."""

    generation: GenerationId
    policy: Mapping[str, Any]
    steps: Sequence[int]
    segments: list[Tensor]
    """One uint8 tensor per step; the bytes of the file."""
    layouts: list[SegmentLayout]

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


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is to be resumed, as far as a run must have been written by the same."""

    identity: Identity
    operators: OperatorSet
    schema: StateSchema
    params: Mapping[str, Tensor]


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
        self._exchange, self._groups = exchange, groups
        with exchange.together():  # a package can be missing on one machine only
            self._backend: Backend = open_backend(url, storage_options=storage_options, bandwidth=bandwidth)
            _refuse_process_memory(self._backend.url, groups.world_size)
        self.store: RunStore
        self.epoch = 0
        self._reasons: list[str] = []

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
        while True:
            found = self._find(job)
            if found is None and (self._reasons or resume == "must"):
                raise NoUsableGeneration(self._no_generation(resume))
            if self._open_epoch(found.generation if found is not None else None):
                return found

    def close(self) -> None:
        """Release the backend."""
        self._backend.close()

    # -- private

    def _open_store(self, resume: Resume) -> None:
        identity: object = None
        if self._exchange.is_coordinator:
            identity = self._attempt(lambda: self._open_as_coordinator(resume))
        identity = _raised(self._exchange.broadcast(identity))
        if not self._exchange.is_coordinator:
            self.store = RunStore.join(self._backend, run_id=str(identity))

    def _open_as_coordinator(self, resume: Resume) -> str:
        self.store = RunStore.open(self._backend, resume=resume)
        return self.store.run_id

    def _open_epoch(self, resumed: GenerationId | None) -> bool:
        """Whether the epoch was opened; if not, the log moved meanwhile and the pick has to be made again."""
        opened: object = None
        if self._exchange.is_coordinator:
            opened = self._attempt(lambda: self.store.open_epoch(resumed) or 0)
        epoch = _raised(self._exchange.broadcast(opened))
        assert isinstance(epoch, int)
        self.epoch = epoch
        return epoch > 0

    def _attempt(self, action: Any) -> object:
        """The action's result, or its error as a value that the other ranks can be told."""
        try:
            return action()
        except CheckpointError as error:
            self._error = error
            return ("error", type(error).__name__, str(error))

    def _find(self, job: Job) -> Found | None:
        self._reasons = []
        listed = self._attempt(self._list) if self._exchange.is_coordinator else None
        for stored in _as_list(_raised(self._exchange.broadcast(listed))):
            commit = Commit.from_bytes(stored, "commit of the coordinator")
            self._check_identity(commit, job)
            found = self._try(commit)
            if found is not None:
                return found
        self._reasons = [str(reason) for reason in _as_list(self._exchange.broadcast(self._reasons))]
        return None

    def _list(self) -> list[bytes]:
        """On the coordinator: committed generations, newest first, as they are stored."""
        self.store.promote()
        candidates = self.store.candidates()
        self._reasons += [f"{where}: {why}" for where, why in self.store.unreadable]
        return [commit.to_bytes() for commit in candidates]

    def _check_identity(self, commit: Commit, job: Job) -> None:
        stored = Identity.of_commit(commit)
        if self._exchange.all_agree(job.identity == stored):
            return
        facts: Facts = {}
        for each in self._exchange.gather_values(live_facts(job.operators)):
            assert isinstance(each, dict)
            facts |= each  # ranks may hold different experts
        told = None
        if self._exchange.is_coordinator:
            told = self._attempt(lambda: self._differences(commit, job, facts))
        differences = _raised(self._exchange.broadcast(told))
        raise IdentityMismatch(
            f"{self._backend.url} was written by a run that differs from this one: {differences}. Resume with what "
            "wrote it, give another URL, or start anew with resume='never'. Weights alone are carried over by "
            "`moe-ckpt export`. Nothing stored was lost."
        )

    def _differences(self, commit: Commit, job: Job, facts: Facts) -> str:
        lines = list(job.identity.job_differences(Identity.of_commit(commit)))
        if job.identity.fingerprint != commit.policy["fingerprint"]:
            markers = [self.store.read_marker(commit, rank) for rank in range(commit.world_size)]
            optimizer = live_optimizer(job.operators, job.schema, job.params)
            lines += model_differences(stored_facts(markers), (facts, optimizer))
        return "; ".join(lines) or "the order of parameters, or settings of the optimizer's state"

    def _try(self, commit: Commit) -> Found | None:
        """This commit with this rank's bytes, if every rank could read its own."""
        found, reason = None, ""
        try:
            found = self._read(commit)
        except (CheckpointError, OSError) as error:
            reason = str(error)
        reasons = self._exchange.gather_values(reason)
        bad = [f"{commit.generation}, rank {rank}: {why}" for rank, why in enumerate(reasons) if why]
        for why in bad:
            log.error("cannot resume from %s; trying an older generation", why)
        self._reasons += bad
        return found if not bad else None

    def _read(self, commit: Commit) -> Found:
        marker = self.store.read_marker(commit, self._groups.rank)
        segments, layouts = [], []
        for entry in marker.segments:
            segment = torch.empty(entry.nbytes, dtype=torch.uint8)
            view = as_memoryview(segment)
            self.store.read_segment(entry, view)
            verify_records(entry, view)
            segments.append(segment)
            layouts.append(SegmentLayout.parse(view))
        if not segments:
            raise Corrupt(f"{commit.generation}: rank {self._groups.rank} has no segments.")
        return Found(
            generation=commit.generation,
            policy=commit.policy,
            steps=[entry.step for entry in marker.segments],
            segments=segments,
            layouts=layouts,
        )

    def _no_generation(self, resume: Resume) -> str:
        if not self._reasons:
            return (
                f"`resume={resume!r}`: {self._backend.url} holds no committed generation. "
                "Use resume='auto' to start a new run there."
            )
        lines = "\n".join(f"  - {reason}" for reason in self._reasons)
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


def _raised(value: object) -> object:
    """Raise on every rank what failed on the coordinator."""
    if isinstance(value, tuple) and len(value) == 3 and value[0] == "error":
        from lightning_moe_ckpt import errors

        raise getattr(errors, str(value[1]), CheckpointError)(value[2])
    return value


def _as_list(value: object) -> list[Any]:
    assert isinstance(value, list)
    return value
