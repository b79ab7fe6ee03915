"""Settings that every test shares: one thread, no GPU or Tutel tests where there is none, no campaigns by default."""

from __future__ import annotations

import os

# Before torch is imported. The CUDA check through NVML leaves the driver alone, so that tests may still fork.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

import gc
import importlib.util
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import hypothesis
import pytest

sys.path.append(str(Path(__file__).parent))  # what folders of tests share is `stored._x`, `tiers._x`

from _heap import JoinedPages, freeze_heap
from servers._s3 import S3Server, running
from tqdm.std import TqdmDefaultWriteLock  # type: ignore[import-untyped]

# Its first bar makes a lock that forks share: one that is killed while it writes a line above a bar would keep it for ever.
TqdmDefaultWriteLock.mp_lock = None

# Nearly all that importing makes stays: to look for garbage in it takes a quarter of the time. Until tests are collected.
gc.disable()

# How long an example takes depends on what else the machine does.
hypothesis.settings.register_profile("shared", deadline=None)
LEAST_EXAMPLES = 10
"""Of a property, in an ordinary run."""
# For `make sanitize`: instrumented code is five to fifteen times slower, and sees in few examples what others see in many.
hypothesis.settings.register_profile("sanitized", deadline=None, max_examples=15)
hypothesis.settings.load_profile("shared")


def pytest_configure(config: pytest.Config) -> None:
    """One thread where tests run; and up to date libraries, else tests of a checkout would meet the twins in their place.

    What hands tests out to several processes runs none: they start seconds earlier because it imports no torch.
    """
    is_worker = hasattr(config, "workerinput")
    if is_worker or not config.getoption("numprocesses", None):
        import torch

        torch.set_num_threads(1)
    if not (is_worker or os.environ.keys() & {"MOE_CKPT_NATIVE", "MOE_CKPT_NATIVE_PATH"}):  # workers must not all build
        _rebuild_stale()


def _rebuild_stale() -> None:
    script = Path(__file__).parents[1] / "ext" / "build_native.py"
    package = importlib.util.find_spec("lightning_moe_ckpt")
    assert package is not None
    assert package.origin is not None
    folder = Path(package.origin).resolve().parent
    if folder.parent != script.parents[1]:
        return  # what is installed is not built from here
    cpu, cuda = (folder / "native" / f"libmoe_ckpt_{part}.so" for part in ("cpu", "cuda"))
    digest = runpy.run_path(str(script))["source_digest"]().encode()
    if any(path.exists() and digest not in path.read_bytes() for path in (cpu, cuda)):
        wanted = os.environ | {"MOE_CKPT_CUDA": "1" if cuda.exists() else "0"}
        subprocess.run([sys.executable, script], env=wanted, check=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what this machine cannot run, with the reason, and campaigns that nobody asked for."""
    _require_stable_names(items)
    _skip(items, "tutel", "Tutel is not installed", missing=lambda: importlib.util.find_spec("tutel") is None)
    _skip(items, "gpu", "torch sees no CUDA device", missing=_no_gpu)
    if "soak" not in config.option.markexpr:
        campaigns = {item: bool(item.get_closest_marker("soak")) for item in items}
        config.hook.pytest_deselected(items=[item for item in items if campaigns[item]])
        items[:] = [item for item in items if not campaigns[item]]
        _draw_fewer(items)
    # The longest first: at the end, one would wait for them alone.
    items.sort(key=lambda item: not _has_several_processes(item))


def _has_several_processes(item: pytest.Item) -> bool:
    """Whether a test is one of those that take most: jobs of several ranks, stages, and what is built."""
    return any(
        name in item.path.as_posix() for name in ("/launch/", "stage", "pipeline", "test_packaging", "test_docs")
    )


def _draw_fewer(items: list[pytest.Item]) -> None:
    """Draw a sixth of the examples that a property asks for, others in every run; `make soak` draws all."""
    for item in items:
        owner, name = getattr(item, "obj", None), "_hypothesis_internal_use_settings"
        if not hasattr(owner, name):  # a state machine has them for all to see
            owner, name = getattr(item, "cls", None), "settings"
        asked = getattr(owner, name, None)
        if item.get_closest_marker("hypothesis") and isinstance(asked, hypothesis.settings) and not asked.derandomize:
            number = max(min(asked.max_examples, LEAST_EXAMPLES), asked.max_examples // 6)
            setattr(owner, name, hypothesis.settings(asked, max_examples=number))


def _no_gpu() -> bool:
    import torch

    return not torch.cuda.is_available()


def _skip(items: list[pytest.Item], marker: str, reason: str, missing: Callable[[], bool]) -> None:
    marked = [item for item in items if item.get_closest_marker(marker)]
    if marked and missing():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=reason))


def _require_stable_names(items: list[pytest.Item]) -> None:
    """The processes of `make test` must collect the same tests, by name."""
    unstable = [item.nodeid for item in items if " at 0x" in item.nodeid]
    if unstable:
        raise pytest.UsageError(f"give these tests ids without addresses: {unstable}")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_finish() -> None:
    """A fit and each of its forked ranks collects garbage by itself, and forks copy what this process has.

    A test that thaws the heap freezes it again. No fixture looks: that counts all objects, for a twentieth of a second.
    """
    if (registry := sys.modules.get("lightning.fabric.utilities.registry")) is not None:
        # Every trainer looks through all that is installed for callbacks of others, and so does that of each forked rank.
        vars(registry)["entry_points"] = cache(vars(registry)["entry_points"])
    freeze_heap()
    gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """A mode that a test leaves on torch's stacks sees every operation of the tests behind it, which take up to 60 times as long."""
    if "torch" not in sys.modules:
        return
    from torch.overrides import _get_current_function_mode_stack
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    left = [*_get_current_dispatch_mode_stack(), *_get_current_function_mode_stack()]  # type: ignore[no-untyped-call]
    for mode in reversed(left):
        mode.__exit__(None, None, None)
    assert not left, f"{item.nodeid} leaves {left} behind"


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], S3Server]]:
    """Servers by name that tests share, each under a prefix of its own; who stops or pauses one starts another."""
    from botocore import session

    # Each client reads what services there are: a tenth of a second of JSON.
    vars(session)["create_loader"] = cache(session.create_loader)
    with ExitStack() as stack:
        yield cache(lambda name: stack.enter_context(running(name, tmp_path_factory.mktemp(name))))


@pytest.fixture(scope="session")
def moto(s3: Callable[[str], S3Server]) -> S3Server:
    """The one of them that does what S3 does."""
    return s3("moto")


@pytest.fixture
def shared_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A node's, empty; whoever leaves something in it on purpose removes it."""
    from lightning_moe_ckpt.tiers import shared_directory
    from lightning_moe_ckpt.tiers._shm import DIRECTORY_VARIABLE

    with tempfile.TemporaryDirectory(prefix="moe-ckpt-test-", dir=shared_directory()) as folder:
        monkeypatch.setenv(DIRECTORY_VARIABLE, folder)
        yield Path(folder)
        left = sorted(path.name for path in Path(folder).iterdir())
        assert not left, f"left in shared memory: {left}"


_pages = JoinedPages()


@pytest.fixture(autouse=True, scope="module")
def _pages_are_joined() -> None:
    """Tests that fork leave small pages to those of the next module, whose forks would take twice the time."""
    _pages.split()


@pytest.fixture(autouse=True)
def _no_process_group_is_left() -> Iterator[None]:
    """A test that leaves one behind would break those that fork after it, so it is the one that fails."""
    import torch

    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
        pytest.fail("this test leaves a default process group in pytest's own process: run it in a process of its own")
