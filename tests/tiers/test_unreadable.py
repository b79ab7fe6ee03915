"""What is wrong with files beside a ring is said, and ends nothing."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from lightning_moe_ckpt.tiers import _shm
from lightning_moe_ckpt.tiers._shm import remove_shared, write_shared


def test_a_folder_that_refuses_to_remove_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Training goes on with what is taken of memory."""
    path = tmp_path / "a.done"
    write_shared(path, b"x")

    def refuse(self: Path, missing_ok: bool = False) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted", str(self))

    with monkeypatch.context() as refusing:
        refusing.setattr(Path, "unlink", refuse)
        remove_shared(path)
        _shm.unlink_shared_file(path)
    assert path.exists()
    assert "a.done cannot be removed and stays: Operation not permitted" in caplog.text
    remove_shared(path)
    assert not path.exists()
