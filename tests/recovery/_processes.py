"""Ranks as forked processes over gloo, of which some may be killed."""

from __future__ import annotations

import json
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]  # exported at run time only

_FORK = multiprocessing.get_context("fork")
_LIMIT = timedelta(seconds=90)


def in_processes(world_size: int, work: Callable[[int], object]) -> list[object]:
    """Run `work(rank)` in every rank at once.

    Returns:
        What each rank returned, a JSON value; the exit code of those that were killed.

    Raises:
        AssertionError: a rank raised, or was too late.
    """
    with tempfile.TemporaryDirectory() as folder:
        results = [Path(folder) / f"result-{rank}" for rank in range(world_size)]
        store = Path(folder) / "store"
        processes = [_FORK.Process(target=_serve, args=(rank, results, store, work)) for rank in range(world_size)]
        for process in processes:
            process.start()
        try:
            for process in processes:
                process.join(_LIMIT.total_seconds())
            return [_result(path, process.exitcode) for path, process in zip(results, processes, strict=True)]
        finally:
            for process in processes:
                process.kill()
                process.join()


def _result(path: Path, status: int | None) -> object:
    assert status is not None, "too late"
    if not path.exists():
        return status
    succeeded, result = json.loads(path.read_text())
    assert succeeded, result
    return result


def _serve(rank: int, results: list[Path], store: Path, work: Callable[[int], object]) -> None:
    try:
        dist.init_process_group(
            "gloo", store=FileStore(str(store), len(results)), rank=rank, world_size=len(results), timeout=_LIMIT
        )
        said = [True, work(rank)]
    except BaseException:  # noqa: BLE001  # process entry: the parent reports it
        said = [False, f"rank {rank}: {traceback.format_exc()}"]
    results[rank].write_text(json.dumps(said))
    os._exit(0)  # without waiting for ranks that may be dead
