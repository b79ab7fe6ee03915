"""The figure of a restore from memory is taken on a real death, and leaves nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.recovery import host_restore_seconds


def test_a_killed_process_state_is_read_back_and_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny; what is measured is checked by its digests."""
    monkeypatch.setenv("MOE_CKPT_SHARED_MEMORY", str(tmp_path))
    assert 0 < host_restore_seconds(256_000) < 60
    assert list(tmp_path.iterdir()) == []
