"""Lives whose names are known beforehand, for tests that name generations literally."""

from __future__ import annotations

import pytest

from lightning_moe_ckpt.storage import GenerationId, _commit

LIFE = "00112233aabb"


def name_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    """All lives of this process have one name."""
    monkeypatch.setattr(_commit, "new_nonce", lambda: LIFE)


def named(*, step: int, incarnation: int) -> GenerationId:
    """A generation of one of them."""
    return GenerationId(step=step, incarnation=incarnation, nonce=LIFE)
