"""Every test has shared memory of its own, and leaves nothing in it."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightning_moe_ckpt.tiers import shared_directory
from lightning_moe_ckpt.tiers._shm import DIRECTORY_VARIABLE

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # modules of other folders of tests are `stored._x`


@pytest.fixture(autouse=True)
def shared_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A node's, empty; whoever leaves something in it on purpose removes it."""
    with tempfile.TemporaryDirectory(prefix="moe-ckpt-test-", dir=shared_directory()) as folder:
        monkeypatch.setenv(DIRECTORY_VARIABLE, folder)
        yield Path(folder)
        left = sorted(path.name for path in Path(folder).iterdir())
        assert not left, f"left in shared memory: {left}"
