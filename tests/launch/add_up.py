"""A training without Lightning: ranks add up numbers step by step, and resume in place from files of their own.

    add_up.py FOLDER STEPS [gloo] [event ...]      an event: <kind>:<rank>:<step>[:<incarnation>]

State is one line per rank, in a file after every step; all ranks resume from the oldest. An event happens in the
incarnation that it names (default: 0). Ranks meet through gloo, or through files, for which they need not import torch.
With `any`, state is rank 0's, of each STEPS-th step and of that at which ranks are asked to stop, and any number goes on from it.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

_, folder, steps, *script = sys.argv
sys.argv[0] = "moe-ckpt"  # for its command, the package does not import Lightning

from lightning_moe_ckpt.launch import Supervised, _supervised  # noqa: E402

FOLDER, STEPS = Path(folder), int(steps)
LIMIT = 60.0
Events = dict[str, Callable[[], object]]
BEFORE_ARRIVING, BEFORE_JOINING, BEHIND_THE_END = -1, -2, -3


class Files:
    """Collectives through files."""

    def __init__(self, supervised: Supervised, rank: int, world_size: int) -> None:
        self._rank, self._world_size = rank, world_size
        self._aborted = threading.Event()
        prefix = supervised.arrive(LIMIT)
        happen(supervised, rank, BEFORE_JOINING)
        self._folder = FOLDER / prefix.replace("/", "-")
        self._folder.mkdir(exist_ok=True)
        supervised.watch(self._aborted.set)
        self._count = 0

    def reduce(self, value: int, how: Callable[[list[int]], int]) -> int:
        self._count += 1
        paths = [self._folder / f"{self._count}.{rank}" for rank in range(self._world_size)]
        write(paths[self._rank], str(value))
        pause = 0.001
        while not all(path.exists() for path in paths):
            if self._aborted.wait(pause):
                raise RuntimeError("a peer is gone")
            pause = min(1.5 * pause, 0.02)
        return how([int(path.read_text()) for path in paths])

    def close(self) -> None:
        pass


class Gloo:
    """Collectives of torch."""

    def __init__(self, supervised: Supervised, rank: int, world_size: int) -> None:
        import torch.distributed as dist

        from lightning_moe_ckpt.parallel import GroupAbort

        with GroupAbort(world_size) as abort:
            store = supervised.rejoin(LIMIT)
            supervised.watch(abort.abort)
            happen(supervised, rank, BEFORE_JOINING)
            limit = timedelta(seconds=LIMIT)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=limit)

    def reduce(self, value: int, how: Callable[[list[int]], int]) -> int:
        import torch
        import torch.distributed as dist

        result = torch.tensor([value])
        dist.all_reduce(result, dist.ReduceOp.MIN if how is min else dist.ReduceOp.SUM)
        return int(result)

    def close(self) -> None:
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()


class Plain:
    """What stands for a supervisor in a script that does not ask for one: a peer that is silent for a second is gone."""

    incarnation = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))

    def arrive(self, timeout: float) -> str:
        return f"plain{self.incarnation}"

    def watch(self, abort: Callable[[], None]) -> None:
        self._abort = abort
        self.beat(0)

    def beat(self, step: int) -> None:
        self._last = time.monotonic()
        if step == 0:
            threading.Thread(target=self._wait, daemon=True).start()

    def _wait(self) -> None:
        while time.monotonic() < self._last + 1.0:
            time.sleep(0.01)
        self._abort()

    def pause(self) -> None:
        pass

    def confirm(self, timeout: float) -> None:
        return None


class Whole(Plain):
    """As plain, but the supervisor knows that its ranks do not join each other again, and how far they are."""

    def __init__(self) -> None:
        self._real = Supervised.from_environment()
        assert self._real is not None
        self._real.cannot_rejoin("it keeps its groups")

    def beat(self, step: int) -> None:
        assert self._real is not None
        self._real.beat(step)
        super().beat(step)


def write(path: Path, text: str) -> None:
    new = path.with_name(f"{path.name}.new")
    new.write_text(text)
    new.rename(path)


def happen(supervised: Supervised, rank: int, step: int, events: Events | None = None) -> None:
    """Do what the script says for this rank and step."""
    for kind, event in (EVENTS if events is None else events).items():
        if f"{kind}:{rank}:{step}:{supervised.incarnation}" in script:
            event()
    if f"off:{rank}:{step}:{supervised.incarnation}" in script:
        supervised.call_off("calls it off")
        raise RuntimeError("a peer may wait for this one")
    if f"faulty:{rank}:{step}:{supervised.incarnation}" in script:
        supervised.give_way("is at fault", 10)
    if f"bug:{step}" in script:
        raise ValueError(f"there is a bug in step {step}")


def fail() -> None:
    """Raise when the supervisor has heard of the steps that were passed: without any, all ranks are started anew."""
    time.sleep(0.5)
    raise ValueError("this goes wrong once")


def end_late() -> None:
    time.sleep(2.0)  # the others have gone by then, on a busy machine too
    os.kill(os.getpid(), signal.SIGKILL)


def turn_deaf() -> None:
    """Do not stop when asked to; that is not waited for as long as it usually is."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _supervised._LEAVE_SECONDS = 0.5


EVENTS: Events = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "deadlock": signal.pause,
    "slow": lambda: time.sleep(0.5),
    "raise": fail,
    "late": end_late,
    "where": lambda: print(f"sees {os.environ['CUDA_VISIBLE_DEVICES']}"),
    "silent": lambda: time.sleep(1.2),
    "deaf": turn_deaf,
}
BETWEEN: Events = {"busy": lambda: time.sleep(1.2), "stuck": signal.pause}
"""Between two steps, as validation and saving are."""


def train(supervised: Supervised, rank: int, world_size: int) -> None:
    happen(supervised, rank, BEFORE_ARRIVING)
    group = (Gloo if "gloo" in script else Files)(supervised, rank, world_size)
    try:
        state = FOLDER / f"rank{rank}"
        step = group.reduce(int(state.read_text().split()[0]) if state.exists() else 0, min)
        total = sum(range(step)) * world_size * (world_size + 1) // 2
        while step < STEPS:
            happen(supervised, rank, step, BETWEEN)
            supervised.beat(step)
            happen(supervised, rank, step)
            total += group.reduce(step * (rank + 1), sum)
            supervised.pause()
            step += 1
            write(state, f"{step} {total}")
            time.sleep(0.002)
        happen(supervised, rank, STEPS)
        group.reduce(0, sum)
    finally:
        group.close()
    happen(supervised, rank, BEHIND_THE_END)
    print(f"pid {os.getpid()} total {total}")


def train_any(supervised: Supervised, rank: int, world_size: int) -> None:
    """Count steps, with whatever ranks there are; all stop together when one is asked to, or at the end."""
    asked = list[int]()
    signal.signal(signal.SIGTERM, lambda number, _: asked.append(number))
    group, state, end = Files(supervised, rank, world_size), FOLDER / "rank0", FOLDER / "end"
    step = group.reduce(int(state.read_text()) if state.exists() else 0, min)
    print(f"pid {os.getpid()} is one of {world_size}, from step {step}")
    stops = 0
    while stops == 0:
        supervised.beat(step)
        stops = group.reduce(2 if end.exists() else min(1, len(asked)), max)
        supervised.pause()
        step += 1
        if rank == 0 and (stops or step % STEPS == 0):
            write(state, str(step))
        time.sleep(0.01)
    group.reduce(0, max)
    if stops == 1:
        sys.exit(128 + signal.SIGTERM)


def main() -> None:
    if "early" in script:
        print(f"rank {os.environ['RANK']} reads it before it waits")
    supervised: Any = Whole() if "whole" in script else Plain() if "plain" in script else Supervised.from_environment()
    assert supervised is not None
    print(f"pid {os.getpid()} begins")
    while not trained(supervised):
        pass


def trained(supervised: Supervised) -> bool:
    """Train, and return whether that came to its end; False when somebody has failed."""
    try:
        (train_any if "any" in script else train)(supervised, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    except RuntimeError:
        if supervised.confirm(10.0) is None:
            raise
        return False
    return True


if __name__ == "__main__":
    main()
