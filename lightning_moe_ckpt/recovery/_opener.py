"""Open a run: find what to resume from, whole and verified, and begin an incarnation, which fences earlier ones.

The search for it is in `_search.py`. If the log moved between the search and the opening of the incarnation, another process
has started meanwhile or an earlier one still commits, and the search begins again.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Mapping
from contextlib import closing
from typing import Any

from lightning_moe_ckpt.coordination import Exchange, warn_of_other_versions
from lightning_moe_ckpt.errors import ConfigurationError, NoUsableGeneration
from lightning_moe_ckpt.parallel import ParallelGroups
from lightning_moe_ckpt.recovery._found import RestoreSource
from lightning_moe_ckpt.recovery._search import ResumeRequest, Search
from lightning_moe_ckpt.storage import Backend, GenerationId, Resume, RunStore, open_backend
from lightning_moe_ckpt.tiers import HostTier, MemoryClaim

log = logging.getLogger(__name__)

_RESTART_COUNTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
"""In which launchers say how often they have started a job before."""


class RunOpener:
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
        with exchange.raise_together():  # a package can be missing on one machine only
            self._backend: Backend = open_backend(url, storage_options=storage_options, bandwidth=bandwidth)
            _refuse_process_memory(self._backend.url, groups.world_size)
        self.store: RunStore
        self._incarnation, self._nonce = 0, ""
        self._tag = ""
        self.claim: MemoryClaim
        """On its memory, once it is open."""

    @property
    def run_id(self) -> str:
        """Identity of the run in storage."""
        return self.store.run_id

    def name(self, step: int) -> GenerationId:
        """A generation of this incarnation, once it is open."""
        return GenerationId(step=step, incarnation=self._incarnation, nonce=self._nonce)

    def open(self, *, resume: Resume, job: ResumeRequest) -> RestoreSource | None:
        """Find what to resume from and open a new incarnation.

        Raises:
            NoUsableGeneration: generations are there, but none could be read, or `resume='must'` found none.
            IdentityMismatch: the run was written by another model, optimizer or world.
        """
        self._open_store(resume)
        any_memory = resume == "memory"
        with closing(HostTier(self._tag)) as memory:
            while True:
                search = Search(self.store, self._exchange, [memory], job, any_memory=any_memory)
                found = search.run()
                if found is None and (search.reasons or resume == "must"):
                    raise NoUsableGeneration(self._no_generation(resume, search))
                resumed = None if found is None else found.generation
                if self._open_incarnation(resumed, search.volatile, foreign=any_memory):
                    stored = [version.generation for version in search.committed]
                    self.claim = MemoryClaim(
                        tag=self._tag,
                        run_id=self.run_id,
                        url=self.store.place,
                        offered=search.foreign,
                        seen=max((each for each in stored if resumed is None or each <= resumed), default=None),
                    )
                    if found is None and self._exchange.is_coordinator:
                        _warn_of_a_restart(self._backend.url)
                    if found is not None and self._exchange.is_coordinator:
                        warn_of_other_versions(found.policy, found.generation, job.identity.versions)
                    return found

    def close(self) -> None:
        """Release the backend."""
        self._backend.close()

    # -- private

    def _open_store(self, resume: Resume) -> None:
        told = self._exchange.run_on_coordinator(lambda: self._open_as_coordinator(resume))
        assert isinstance(told, list)
        run_id, self._tag = told
        if not self._exchange.is_coordinator:
            self.store = RunStore.join(self._backend, run_id=run_id)

    def _open_as_coordinator(self, resume: Resume) -> object:
        self.store = RunStore.open(self._backend, resume=resume)
        return [self.store.run_id, self.store.memory_tag]

    def _open_incarnation(
        self, resumed: GenerationId | None, volatile: Collection[GenerationId], *, foreign: bool
    ) -> bool:
        """Whether the incarnation was opened; if not, the log moved meanwhile and the pick has to be made again."""

        def open_incarnation() -> object:
            incarnation = self.store.open_incarnation(resumed, volatile=volatile, foreign=foreign)
            return [incarnation, self.store.nonce, self.store.memory_tag]

        opened = self._exchange.run_on_coordinator(open_incarnation)
        assert isinstance(opened, list)
        incarnation, self._nonce, self._tag = opened
        self._incarnation = incarnation or 0
        return incarnation is not None

    def _no_generation(self, resume: Resume, search: Search) -> str:
        if not search.reasons:
            return (
                f"`resume={resume!r}`: {self._backend.url} holds no committed generation. "
                "Use resume='auto' to start a new run there."
            )
        lines = "\n".join(f"  - {reason}" for reason in search.reasons)
        instead = ""
        if search.missing:
            instead = (
                f" With `allow_missing_experts=True` everything else is restored, and {', '.join(sorted(search.missing))} "
                "begin anew, with the weights that the model starts with."
            )
        return (
            f"{self._backend.url} holds generations, but none can be restored:\n{lines}\n"
            "Put back what is missing (`moe-ckpt repair URL` rebuilds a lost log), begin anew beside what is there with "
            f"resume='never', or give another URL.{instead}"
        )


def _warn_of_a_restart(url: str) -> None:
    """A run begins: strange, where the launcher has started this job before."""
    for name in _RESTART_COUNTS:
        count = os.environ.get(name, "")
        if count.isdigit() and int(count) > 0:
            log.warning(
                "%s: training begins from nothing, although %s=%s says that this job was started before. If it had stored "
                "anything, check the URL",
                *(url, name, count),
            )
            return


def _refuse_process_memory(url: str, world_size: int) -> None:
    if url.startswith("memory:") and world_size > 1:
        raise ConfigurationError(
            f"`{url}` is the memory of one process, and this run has {world_size}: none would see what the others store. "
            "Give a path or URL that all of them reach."
        )
