"""Generations are named literally in tests of storage."""

from __future__ import annotations

import pytest
from stored._lives import name_lives


@pytest.fixture(autouse=True)
def _named_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    name_lives(monkeypatch)
