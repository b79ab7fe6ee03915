"""Opening a run: what this life resumes from, whole and verified, and the epoch that fences earlier lives.

The search for it is in `_search.py`. If the log moved between the search and the opening of the epoch, another process
has started meanwhile or an earlier one still commits, and the search begins again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import closing
from typing import Any

from lightning_moe_ckpt.errors import ConfigurationError, NoUsableGeneration
from lightning_moe_ckpt.parallel import ParallelGroups
from lightning_moe_ckpt.session._exchange import Exchange
from lightning_moe_ckpt.session._found import Found
from lightning_moe_ckpt.session._search import Job, Search
from lightning_moe_ckpt.session._versions import warn_of_other_versions
from lightning_moe_ckpt.storage import Backend, GenerationId, Resume, RunStore, open_backend
from lightning_moe_ckpt.tiers import HostTier


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
        self._epoch, self._life = 0, ""

    @property
    def run_id(self) -> str:
        """Identity of the run in storage."""
        return self.store.run_id

    def name(self, step: int) -> GenerationId:
        """A generation of this life, once it is open."""
        return GenerationId(step=step, epoch=self._epoch, life=self._life)

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
                    raise NoUsableGeneration(self._no_generation(resume, search))
                if self._open_epoch(None if found is None else found.generation, search.volatile):
                    if found is not None and self._exchange.is_coordinator:
                        warn_of_other_versions(found.policy, found.generation, job.identity.versions)
                    return found

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
        opened = self._exchange.told(lambda: [self.store.open_epoch(resumed, volatile=volatile), self.store.life])
        assert isinstance(opened, list)
        epoch, self._life = opened
        self._epoch = epoch or 0
        return epoch is not None

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
            f"Repair one of them, or start anew with resume='never'.{instead}"
        )


def _refuse_process_memory(url: str, world_size: int) -> None:
    if url.startswith("memory:") and world_size > 1:
        raise ConfigurationError(
            f"`{url}` is the memory of one process, and this run has {world_size}: none would see what the others store. "
            "Give a path or URL that all of them reach."
        )
