"""Ranks of a supervisor that are forks of this process, where all is imported, and not interpreters that import it again.

Torch's agent starts them, waits for them and ends them as it does others: they are its children, with process ids,
sessions, environments and streams of their own. What forks them is a process without threads, which is told what to run.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import random
import runpy
import signal
import socket
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from launcher import exit_after
from lightning.pytorch.utilities import rank_zero_only
from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import SubprocessHandler

from lightning_moe_ckpt.process import compute_alone

_ADOPT_ORPHANS = 36
"""PR_SET_CHILD_SUBREAPER."""
_RENAME = 15
"""PR_SET_NAME."""
_MOST_NBYTES = 2**17
_SEED = 67280421310721
"""Torch's, of a process that has drawn nothing."""


class _Forked(subprocess.Popen[bytes]):
    """A process that was forked, to those that expect what `Popen` starts."""

    def __init__(self, start: Callable[[], int], command: Sequence[str]) -> None:
        self._start = start
        super().__init__(command)

    def _execute_child(self, *_: object) -> None:
        self.pid = self._start()
        self._child_created = True


def fork_ranks(name: str) -> None:
    """Let torch's agent in this process, which must have no thread, fork its ranks; `name` is what the kernel calls them."""
    _tell_kernel(_ADOPT_ORPHANS, 1)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        ours.close()
        _serve(theirs, name)
    theirs.close()

    def start(handler: Any, command: tuple[str, ...], environment: dict[str, str]) -> _Forked:
        def ask() -> int:
            streams = [stream.fileno() for stream in (handler._stdout, handler._stderr)]
            socket.send_fds(ours, [json.dumps([command, environment]).encode()], streams)
            return int(ours.recv(_MOST_NBYTES))

        return _Forked(ask, command)

    vars(sys.modules[SubprocessHandler.__module__])["SubprocessHandler"]._popen = start


def _tell_kernel(what: int, value: int | bytes) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(what, value, 0, 0, 0) == 0, os.strerror(ctypes.get_errno())


def _serve(asked: socket.socket, name: str) -> NoReturn:
    while True:
        message, streams, _, _ = socket.recv_fds(asked, _MOST_NBYTES, 2)
        if not message:
            os._exit(0)
        command, environment = json.loads(message)
        asked.send(str(_fork_orphan(partial(_run, name, command, environment, streams))).encode())
        for descriptor in streams:
            os.close(descriptor)


def _fork_orphan(work: Callable[[], object]) -> int:
    """Fork a process that does some work, as a child of the one above us that adopts orphans; return its id."""
    told, tell = os.pipe()
    adopted, adopt = os.pipe()
    between = os.fork()
    if between == 0:
        if os.fork():
            os._exit(0)
        os.setsid()  # before anybody knows of it, who might end its group
        os.write(tell, str(os.getpid()).encode())
        os.close(adopt)
        os.read(adopted, 1)  # its supervisor talks to its own children only
        for descriptor in (told, tell, adopted):
            os.close(descriptor)
        exit_after(work)
    os.waitpid(between, 0)
    pid = int(os.read(told, 64))
    for descriptor in (told, tell, adopted, adopt):
        os.close(descriptor)
    return pid


def _run(name: str, command: Sequence[str], environment: dict[str, str], streams: Sequence[int]) -> None:
    """Do what the interpreter does that `command` starts."""
    _tell_kernel(_RENAME, name.encode())
    for number, descriptor in zip((1, 2), streams, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
    os.environ.clear()
    os.environ.update(environment)
    _forget_tests()
    _, _, *arguments = command
    assert list(command[:2]) == [sys.executable, "-u"], command
    sys.argv, sys.path[0] = arguments, str(Path(arguments[0]).parent)
    runpy.run_path(arguments[0], run_name="__main__")


def _forget_tests() -> None:
    """Undo what tests have set in this process."""
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    warnings.resetwarnings()
    logging.root.handlers.clear()
    random.seed()
    torch.manual_seed(_SEED)
    compute_alone()
    vars(rank_zero_only)["rank"] = int(os.environ.get("RANK", "0"))  # Lightning decides that as it is imported
