"""Every test has shared memory of its own, and leaves nothing in it."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _own_memory(shared_memory: Path) -> None:
    """See `shared_memory`."""
