"""Tests of storage that need servers find them as `servers._x`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import pytest
from stored._lives import name_lives


@pytest.fixture(autouse=True)
def _named_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Generations are named literally here."""
    name_lives(monkeypatch)
