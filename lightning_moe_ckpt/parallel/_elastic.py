"""A fresh process group for each incarnation of a job that torchrun restarts.

From torch 2.4 on all incarnations of a torchrun job share the agent's store. A restarted one then finds the addresses
of dead processes in it, and gloo fails to connect ("Connection refused", pytorch issue 135712), unless
`TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1` is set for torchrun. Restart counts do not help: they differ between nodes. So
rank 0 serves a fresh store, and the other ranks ask for its address through the shared one. Each question contains a
random word, so that an answer is never that of an earlier incarnation.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterator
from contextlib import nullcontext
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # exported at run time only

from lightning_moe_ckpt.errors import CheckpointError
from lightning_moe_ckpt.parallel._listeners import closed_listeners

_PREFIX = "lightning_moe_ckpt/incarnation"
_POLL_SECONDS = 0.01


def shares_agent_store() -> bool:
    """Whether torchrun offers this process a store that earlier incarnations have used."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def restart_is_likely(error: BaseException) -> bool:
    """Whether the job will probably restart at once after `error` on this rank.

    It will if torchrun has restarts left, or if a collective failed: then another process died, and launchers restart
    such jobs.
    """
    return restarts_left() or is_of_collective(error)


def restarts_left() -> bool:
    """Whether torchrun started this process and would start it again."""
    restarts, most = (os.environ.get(f"TORCHELASTIC_{name}", "0") for name in ("RESTART_COUNT", "MAX_RESTARTS"))
    return int(restarts) < int(most)


def is_of_collective(error: BaseException) -> bool:
    """Whether a collective failed, now or behind this error."""
    return any(map(_is_of_collective, _chain(error)))


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and its causes."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _is_of_collective(error: BaseException) -> bool:
    # NCCL and the store have classes of their own; gloo raises a RuntimeError with its file name in it.
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo/" in str(error))


def init_fresh_process_group(backend: str, *, rank: int, world_size: int, timeout: timedelta) -> None:
    """Initialise the default process group over a store that no other incarnation has used.

    Args:
        backend: name of the backend, e.g. `gloo`.
        rank: rank of this process.
        world_size: number of processes of the job.
        timeout: limit for joining, and for each collective.

    Raises:
        CheckpointError: not all ranks joined in time.
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    shared = PrefixStore(_PREFIX, TCPStore(host, port, is_master=False, timeout=timeout))
    store = _serve(shared, host, world_size, timeout) if rank == 0 else _ask(shared, rank, timeout)
    with closed_listeners() if backend == "gloo" else nullcontext():
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)


def _serve(shared: Store, host: str, world_size: int, timeout: timedelta) -> Store:
    """Start a store and answer questions for its address until all ranks have joined."""
    store = TCPStore(host, 0, is_master=True, timeout=timeout, wait_for_workers=False)
    address, answered = f"{host}:{store.port}", set[str]()
    give_up = time.monotonic() + timeout.total_seconds()
    while store.add("joined", 0) < world_size - 1:
        for rank in range(1, world_size):
            if shared.check([_question(rank)]):
                word = shared.get(_question(rank)).decode()
                if word not in answered:  # the first word may be of an earlier incarnation, which does not wait
                    shared.set(f"answer/{word}", address)
                    answered.add(word)
        if time.monotonic() > give_up:
            raise CheckpointError(
                f"{store.add('joined', 0)} of {world_size - 1} other ranks joined within {timeout}. "
                "See whether all processes of the job were started."
            )
        time.sleep(_POLL_SECONDS)
    return store


def _ask(shared: Store, rank: int, timeout: timedelta) -> Store:
    word = uuid.uuid4().hex
    shared.set(_question(rank), word)
    shared.wait([f"answer/{word}"], timeout)
    host, _, port = shared.get(f"answer/{word}").decode().rpartition(":")
    store = TCPStore(host, int(port), is_master=False, timeout=timeout)
    store.add("joined", 1)
    return store


def _question(rank: int) -> str:
    return f"question/{rank}"
