"""The emulated device, for tests that need one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lightning_moe_ckpt.native import _choice
from native.emulator.build import unavailable
from native.emulator.device import Emulator, install, load


@pytest.fixture(scope="session")
def loaded_emulator() -> Emulator:
    reason = unavailable()
    if reason is not None:
        pytest.skip(reason)
    return load()


@pytest.fixture
def emulator(loaded_emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> Iterator[Emulator]:
    """Two emulated CUDA devices in the place of real ones; nothing may stay registered, nor may a failure go unseen."""
    install(loaded_emulator, monkeypatch.setattr)
    monkeypatch.setattr(_choice, "_verdicts", {})
    loaded_emulator.heal()
    loaded_emulator.forget_registered()
    yield loaded_emulator
    loaded_emulator.release()
    loaded_emulator.heal()
    assert loaded_emulator.num_registered() == 0, "page-locked memory was not given back"
