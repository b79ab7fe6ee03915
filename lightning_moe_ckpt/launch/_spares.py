"""Processes that wait for a place, so that a rank that dies is replaced in milliseconds and not in seconds of imports.

A spare is started like a rank, but without a rank in its environment. It runs the user's script up to where that asks for its
rank (`Supervised.from_environment`), and waits there. For scripts that read RANK earlier it runs this module instead, which
imports the slow packages, waits for its place, and then runs the script:

    python -m lightning_moe_ckpt.launch._spares [-m] script args

A spare is a process of its own, never a fork: it may have touched a device.
"""

from __future__ import annotations

import importlib
import os
import runpy
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing.subprocess_handler import get_subprocess_handler

from lightning_moe_ckpt.launch._job_log import describe_exit
from lightning_moe_ckpt.launch._members import Label, Member, RankOutput, Switchboard
from lightning_moe_ckpt.launch._supervised import SPARE, Supervised

_OF_ONE_RANK = ("RANK", "LOCAL_RANK", "ROLE_RANK")


class Spares:
    """A node's spares, started by `command`, or the ranks' command; `say` gets a sentence when no more are started."""

    def __init__(
        self, wanted: int, command: tuple[str, ...], output: RankOutput, board: Switchboard, say: Callable[[str], None]
    ) -> None:
        self._wanted, self._command = wanted, command
        self._output, self._board, self._say = output, board, say
        self._waiting: dict[int, Member] = {}
        self._taken: set[int] = set()

    def start(self, context: Any) -> None:
        """Start the missing spares in torch's `SubprocessContext` for ranks."""
        while len(self._waiting) < self._wanted:
            environment = {name: str(value) for name, value in context.envs[0].items() if name not in _OF_ONE_RANK}
            member = self.start_process(context, environment | {SPARE: "1"}, Label("spare"), self._command)
            self._waiting[member.pid] = member
            self._board.expect_exit(member.pid)

    def start_process(
        self, context: Any, environment: dict[str, str], label: Label, command: tuple[str, ...] = ()
    ) -> Member:
        """Start a process as torch's agent does, with `label` before its lines."""
        entrypoint, *arguments = command or (context.entrypoint, *context.args[0])
        options = [context._numa_options] if hasattr(context, "_numa_options") else []  # noqa: SLF001  # not in torch 2.6
        handler = get_subprocess_handler(
            entrypoint,
            tuple(arguments),
            environment,
            *self._output.pipes(label),
            int(environment.get("LOCAL_RANK", 0)),
            *options,
        )
        self._output.started()
        close_streams(handler)
        return Member(handler, label)

    def connect(self, pid: int, connection: socket.socket) -> bool:
        """Note that a spare waits for its place; return False if the process is no spare."""
        if pid in self._waiting:
            self._waiting[pid].connection = connection
        return pid in self._waiting

    def take(self, rank: int, local_rank: int) -> Member | None:
        """Return a spare for this rank, preferably one that waits already; None without spares."""
        usable = [member for member in self._waiting.values() if member.exit_code is None]
        if not usable:
            return None
        member = max(usable, key=lambda each: each.connection is not None)
        del self._waiting[member.pid]
        self._taken.add(member.pid)
        assert member.label is not None
        member.label.set(str(rank), self._output.files_of(local_rank))
        return member

    def was(self, member: Member) -> bool:
        """Return whether this process was a spare, whose end is waited for already."""
        return member.pid in self._taken

    def exited(self, pid: int) -> None:
        """Note the end of a spare before it was needed. If it left by itself, its script does not wait: no more are started."""
        member = self._waiting.pop(pid, None)
        if member is None:
            return
        code = member.exit_code or 0
        member.close()
        if code < 0:
            self._say(f"a spare (pid {pid}) {describe_exit(code)}")
            return
        self._wanted = 0
        self._say(
            f"a spare (pid {pid}) {describe_exit(code)} before it was needed, so there are none from now on. "
            "If the script reads RANK before the strategy does, use `--spare-at imports`"
        )

    def close(self) -> None:
        """End the unused spares."""
        for member in self._waiting.values():
            member.kill()
        for member in self._waiting.values():
            member.handler.proc.wait()
            member.close()
        self._waiting = {}


def close_streams(handler: Any) -> None:
    """Close this process's ends of a child's pipes; torch's handler would keep them open until the child's end."""
    for stream in (handler._stdout, handler._stderr):  # noqa: SLF001  # torch has no public way
        if stream is not None:
            stream.close()


DEVICES = "CUDA_VISIBLE_DEVICES"
"""Environment variable with the devices that a process sees; ranks use those of their local numbers."""


def set_aside(local_rank: int, ranks: int) -> str:
    """Give a rank's device to no later process of this node, if one of the others is idle, and return the consequence, in words.

    Only the environment of later processes changes: those that run keep their devices, since places of these stay.
    """
    listed = os.environ.get(DEVICES) or ",".join(map(str, range(importlib.import_module("torch").cuda.device_count())))
    devices = listed.split(",") if listed else []
    if len(devices) <= ranks:
        return "; this node has no idle device, so its place stays on the same" if devices else ""
    faulty, devices[local_rank] = devices[local_rank], devices.pop(ranks)
    os.environ[DEVICES] = ",".join(devices)
    return f"; device {faulty} is set aside, device {devices[local_rank]} takes its place"


_PACKAGES = ("torch", "lightning.pytorch", "lightning_moe_ckpt.callbacks", "lightning_moe_ckpt.strategy")


def main() -> None:
    """Import, wait, run."""
    _, script, *arguments = sys.argv
    is_module = script == "-m"
    if is_module:
        script, *arguments = arguments
    for name in _PACKAGES:
        importlib.import_module(name)
    Supervised.from_environment()
    # What Lightning prints on rank 0 only, it decides at import.
    rank_zero = importlib.import_module("lightning.fabric.utilities.rank_zero")
    rank_zero.rank_zero_only.rank = int(os.environ["RANK"])
    sys.argv = [script, *arguments]
    if is_module:
        sys.path[0] = ""
        runpy.run_module(script, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(script).resolve().parent)
        runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
