"""What stays in memory at the end of an incarnation: what storage does not have, or will not say in time."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from typing_extensions import override

from lightning_moe_ckpt.errors import StorageError
from lightning_moe_ckpt.recovery import _inventory as _leftovers
from lightning_moe_ckpt.recovery import is_superseded
from lightning_moe_ckpt.storage import Entry, GenerationId, PosixBackend, RunStore
from lightning_moe_ckpt.tiers import RankMemory

RUN = "0" * 32
NEWEST = GenerationId(step=6, incarnation=1, nonce="0123456789ab")


class Holding(RankMemory):
    """Memory that says what it holds."""

    @property
    @override
    def published(self) -> list[GenerationId]:
        return [GenerationId(step=4, incarnation=1, nonce="0123456789ab"), NEWEST]


@pytest.fixture
def memory(tmp_path: Path) -> Holding:
    return Holding(RUN, 0, url=tmp_path.as_uri(), directory=tmp_path)


class Slow(PosixBackend):
    """Does not answer until it is closed."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.closed = threading.Event()

    @override
    def list(self, prefix: str, after: str = "", most: int | None = None) -> list[Entry]:
        assert self.closed.wait(30)
        raise StorageError("closed")

    @override
    def close(self) -> None:
        self.closed.set()


def test_something_durable_as_new_supersedes(memory: Holding) -> None:
    """Of what is known without asking, the newest counts; nothing held needs nothing."""
    older = GenerationId(step=5, incarnation=1, nonce="0123456789ab")
    assert is_superseded(memory, [None, older, NEWEST])
    assert not is_superseded(memory, [None, older])
    assert is_superseded(RankMemory(RUN, 1, url="file:///run", directory=memory._directory), [None])


def test_storage_without_the_run_has_no_use_for_memory(memory: Holding, tmp_path: Path) -> None:
    """The log is empty: no start finds this run."""
    assert is_superseded(memory, [], RunStore.join(PosixBackend(tmp_path), run_id=RUN))


def test_memory_stays_where_storage_does_not_answer(
    memory: Holding, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call is cut short by closing the store, and no thread is left."""
    monkeypatch.setattr(_leftovers, "_PATIENCE_SECONDS", 0.05)
    backend, threads = Slow(tmp_path), threading.enumerate()
    assert not is_superseded(memory, [], RunStore.join(backend, run_id=RUN))
    assert backend.closed.is_set()
    assert threading.enumerate() == threads
