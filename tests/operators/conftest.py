"""What a test registers is gone behind it."""

from __future__ import annotations

import pytest

from lightning_moe_ckpt.operators import _optimizer_classes


@pytest.fixture(autouse=True)
def nothing_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests of the same process use the same classes."""
    monkeypatch.setattr(_optimizer_classes, "_known", dict(_optimizer_classes._known))
