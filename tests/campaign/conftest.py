"""The warm parents of all lives, and the fixture that runs campaigns."""

from __future__ import annotations

import importlib
import os
import shutil
import sys
import tempfile
import uuid
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the modules of this folder are `campaign._x`

from campaign._campaign import SCRATCH_PREFIX, SHARED_MEMORY, Campaigns, remove_abandoned
from campaign._warm import WarmParents

NEEDED_BY_LIVES = [
    "lightning_moe_ckpt.callbacks",
    "lightning_moe_ckpt.moe",
    "lightning_moe_ckpt.strategy",
    "lightning.pytorch.strategies",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.mixtral.modeling_mixtral",
    "transformers.models.switch_transformers.modeling_switch_transformers",
    "torch.utils.tensorboard",
    *(["litgpt.model"] if find_spec("litgpt") else []),
    *(["tutel.moe"] if find_spec("tutel") else []),
    *(["deepspeed.moe.layer"] if find_spec("deepspeed") else []),
]
"""What a fork should find imported; a life takes a tenth of the time that importing these does."""

_warm: list[WarmParents] = []


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(session: pytest.Session, items: list[pytest.Item]) -> None:
    """Import what lives need before the heap is frozen."""
    if _has_campaigns(session, items):
        for name in NEEDED_BY_LIVES:
            importlib.import_module(name)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Fork the warm parents when all test modules are imported and no test has run."""
    if _has_campaigns(session, session.items):
        # Processes that share the tests run campaigns beside each other; one alone does so with two campaigns of a test.
        _warm.append(WarmParents(count=1 if "PYTEST_XDIST_WORKER" in os.environ else 2))


def _has_campaigns(session: pytest.Session, items: list[pytest.Item]) -> bool:
    mine = Path(__file__).parent
    return not session.config.option.collectonly and any(mine in item.path.parents for item in items)


@pytest.fixture(scope="session")
def warm() -> Iterator[WarmParents]:
    """The processes from which lives are forked."""
    yield _warm[0]
    _warm.pop().close()


@pytest.fixture(scope="session")
def scratch() -> Iterator[Path]:
    """A folder in memory, where there is one: a SIGKILL loses nothing that a page cache has, and disks are slow."""
    root = SHARED_MEMORY if SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())
    remove_abandoned(root)
    with tempfile.TemporaryDirectory(prefix=f"{SCRATCH_PREFIX}{os.getpid()}-", dir=root) as folder:
        yield Path(folder)


@pytest.fixture
def campaigns(warm: WarmParents, scratch: Path) -> Iterator[Campaigns]:
    """Campaigns of one test; fault-free references are shared by all tests of the session."""
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        campaigns = Campaigns(warm, scratch / "references", Path(folder))
        yield campaigns
        campaigns.remove_rings()


@pytest.fixture
def folder() -> Iterator[Path]:
    """Holds the memory of all nodes of a test."""
    folder = SHARED_MEMORY / f"test-peers-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder)
