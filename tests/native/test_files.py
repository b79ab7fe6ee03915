"""Appending to files: the compiled part and its twin write the same, fail alike, and leave the caller's priority alone."""

from __future__ import annotations

import errno
import os
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pytest

from lightning_moe_ckpt.native import append
from lightning_moe_ckpt.native._host_memory import append_in_python
from lightning_moe_ckpt.native._library import cpu

Append: TypeAlias = Callable[[int, memoryview, int], None]
LARGE = 2**18
NICER = 10


@pytest.fixture(params=[append, append_in_python])
def write(request: pytest.FixtureRequest) -> Append:
    if request.param is append and cpu() is None:
        pytest.skip("without the compiled part")
    found: Append = request.param
    return found


@pytest.mark.parametrize("nbytes", [0, 1, LARGE - 1, LARGE, LARGE + 1, 3 * LARGE + 7])
def test_chunks_lie_one_behind_the_other(write: Append, tmp_path: Path, nbytes: int) -> None:
    chunks = [random.Random(turn).randbytes(nbytes) for turn in range(3)]
    with (tmp_path / "file").open("wb", buffering=0) as file:
        for turn, chunk in enumerate(chunks):
            write(file.fileno(), memoryview(chunk), turn * nbytes)
    assert (tmp_path / "file").read_bytes() == b"".join(chunks)


@pytest.mark.parametrize("nbytes", [1, LARGE])
def test_a_full_disk_is_an_os_error_with_its_number(write: Append, nbytes: int) -> None:
    with Path("/dev/full").open("wb", buffering=0) as file, pytest.raises(OSError, match="No space") as caught:
        write(file.fileno(), memoryview(bytes(nbytes)), 0)
    assert caught.value.errno == errno.ENOSPC


def test_large_chunks_are_written_at_a_lower_priority_and_the_caller_keeps_its_own() -> None:
    """A pipe holds up the writer until somebody reads; meanwhile the threads of the process tell their priorities."""
    if cpu() is None:
        pytest.skip("without the compiled part")
    reader, writer = os.pipe()
    data = random.Random(0).randbytes(2 * LARGE)
    before = _priorities()
    thread = threading.Thread(target=append, args=(writer, memoryview(data), 0))
    thread.start()
    try:
        found = os.read(reader, 1)  # it is being written
        own = before[threading.get_native_id()]
        new = {each: nice for each, nice in _priorities().items() if each not in before}
        assert new.pop(thread.native_id or 0) == own
        assert [*new.values()] == [min(own + NICER, 19)]
        while len(found) < len(data):
            found += os.read(reader, LARGE)
    finally:
        os.close(reader)
        thread.join()
        os.close(writer)
    assert found == data
    assert _priorities()[threading.get_native_id()] == own


def _priorities() -> dict[int, int]:
    return {
        int(each.name): os.getpriority(os.PRIO_PROCESS, int(each.name)) for each in Path("/proc/self/task").iterdir()
    }
