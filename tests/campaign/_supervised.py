"""A supervisor that forks its ranks, so that a replacement costs milliseconds; to ranks it says what `moe-ckpt run` says.

Ranks die by SIGKILL where a script says. Those that stay must be the same processes at the end.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import selectors
import shutil
import signal
import socket
import struct
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from door import Fit, free_port, read_lines
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # exported at run time only

from lightning_moe_ckpt.launch._supervised import HELLO, SUPERVISOR, Heartbeat, address_of, encode
from lightning_moe_ckpt.testing import AttemptFailed, AttemptResult, Kill
from lightning_moe_ckpt.testing._attempts import FIRST_SEED, _run_rank, _Script, attempt_path, elastic_environment

_CREDENTIALS = struct.Struct("3i")
_HANG_SECONDS = 0.2
"""How long a rank may be stopped until it is ended, as after ten seconds by the real supervisor."""
_LOOK_SECONDS = 0.05
"""How often it is looked whether a rank is stopped; more often, that takes a twentieth of a core."""


@dataclass(frozen=True, kw_only=True)
class Storm:
    """Failures from outside, at random."""

    failures: int
    seed: int = 0
    most_moves: int = 8
    """Beats and pauses of a rank, two in a step, from the last failure until it is struck, at most; none is in a recovery."""
    victims: tuple[int, ...] = ()
    """Ranks; all by default."""
    stops: float = 0.25
    """Share of ranks that are stopped and do not die by themselves."""


def nothing(workdir: Path) -> None:
    """Does nothing when a rank dies."""


def shots_of(workdir: Path) -> Path:
    """Where ranks write down who else is to end: `rank`, after how many `seconds`, and whether it `stops`."""
    return workdir / "shots"


@dataclass
class _Rank:
    """The process of one rank."""

    rank: int
    index: int = 0
    """How many have died before it."""
    pid: int = 0
    connection: socket.socket | None = None
    arrived: int = -1
    ended: bool = False
    heartbeat: Heartbeat = field(default_factory=Heartbeat)
    replacement: bool = False
    shot: bool = False
    """Whether this process was ended from outside."""
    stopped_at: float | None = None

    @property
    def stopped(self) -> bool:
        """Whether it has been stopped for too long."""
        with contextlib.suppress(OSError):  # it has just ended
            state = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
            self.stopped_at = None if state != "T" else self.stopped_at or time.monotonic()
        return self.stopped_at is not None and time.monotonic() - self.stopped_at > _HANG_SECONDS


class _Job:
    def __init__(
        self,
        script: _Script,
        kills: Sequence[Kill],
        port: int,
        *,
        same_seed: bool,
        storm: Storm | None,
        restarts: int,
        on_death: Callable[[Path], None],
        whole: bool,
        most_failures: int,
    ) -> None:
        self._script, self._kills, self._port, self._same_seed = script, list(kills), port, same_seed
        self._left, self.restarts_left, self._on_death = most_failures, restarts, on_death
        self._storm, self._whole = storm, whole
        self._draw = random.Random(0 if storm is None else storm.seed)
        self._next: tuple[_Rank, int, float] | None = None
        self._moves: dict[int, int] = {}
        self._pids: list[int] = []
        self._shots, self._look_at = 0, 0.0
        self._asked_nbytes = 0
        """Of the file of shots that ranks have asked for, what was read."""
        self._asked: list[tuple[float, dict[str, Any]]] = []
        """Those that are left, and when each is due."""
        self._incarnation, self._noticed = 0, 0.0
        self._ranks = [_Rank(rank) for rank in range(script.world_size)]
        self._selector = selectors.DefaultSelector()
        name = f"test-{uuid.uuid4()}"
        os.environ[SUPERVISOR] = name
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(address_of(name))
        self._listener.listen(64)
        self._selector.register(self._listener, selectors.EVENT_READ)

    def run(self) -> list[int]:
        """Run to the end, and return how often each rank was replaced."""
        deadline = time.monotonic() + self._script.timeout
        for rank in self._ranks:
            self._fork(rank)
        try:
            while not all(rank.ended for rank in self._ranks):
                for key, _ in self._selector.select(0.002):
                    self._accept() if key.data is None else self._hear(*key.data)
                self._shoot()
                self._reap()
                self._strike()
                if time.monotonic() > deadline:
                    self._dump_threads()
                    raise self._failed("hung")
        finally:
            for rank in self._ranks:
                if not rank.ended:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(rank.pid, signal.SIGKILL)
                    os.waitpid(rank.pid, 0)
        assert not self._left_behind(), f"processes {self._left_behind()} are left"
        return [rank.index for rank in self._ranks]

    def _left_behind(self) -> list[int]:
        """Processes that ranks have started; the ranks themselves were waited for, and others may have their numbers by now."""
        found = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):  # it has just ended
                group = int(stat.read_text().rpartition(")")[2].split()[2])
                if group in self._pids and not Path(f"/proc/{group}").exists():
                    found.append(int(stat.parent.name))
        return found

    def _shoot(self) -> None:
        """End ranks as others have asked for."""
        path, now = shots_of(self._script.workdir), time.monotonic()
        if path.exists() and path.stat().st_size > self._asked_nbytes:
            text = path.read_bytes()[self._asked_nbytes :]
            text = text[: text.rfind(b"\n") + 1]  # the last line may be under way
            self._asked_nbytes += len(text)
            asked = [json.loads(line) for line in text.splitlines()]
            self._asked += [(now + each["seconds"], each) for each in asked]
        for due in [each for each in self._asked if each[0] <= now]:
            self._asked.remove(due)
            victim = self._ranks[due[1]["rank"]]
            assert not victim.ended, f"rank {victim.rank} has finished before it is shot"
            victim.shot = True
            os.kill(victim.pid, signal.SIGSTOP if due[1]["stops"] else signal.SIGKILL)

    def _strike(self) -> None:
        """End ranks that are stopped, and others if there is a storm."""
        running = [rank for rank in self._ranks if not rank.ended]
        if time.monotonic() >= self._look_at:
            self._look_at = time.monotonic() + _LOOK_SECONDS
            for each in running:
                if each.stopped:
                    os.killpg(each.pid, signal.SIGKILL)
        if self._storm is None or self._shots == self._storm.failures:
            return
        if self._next is None:
            victims = [each for each in running if not self._storm.victims or each.rank in self._storm.victims]
            if victims:
                moves, seconds = self._draw.randint(0, self._storm.most_moves), self._draw.uniform(0.0, 0.3)
                self._next = self._draw.choice(victims), moves, time.monotonic() + (0.0 if moves else seconds)
                self._moves = {}
            return
        victim, moves, at = self._next
        seen = victim.heartbeat.read().moves
        if seen != self._moves.get(-1):
            self._moves = {-1: seen, 0: self._moves.get(0, -1) + 1}
        if victim.ended:
            self._next = None
        elif time.monotonic() >= at and self._moves[0] >= moves and not victim.shot:
            victim.shot, self._next, self._shots = True, None, self._shots + 1
            os.kill(victim.pid, signal.SIGSTOP if self._draw.random() < self._storm.stops else signal.SIGKILL)

    def _fork(self, each: _Rank) -> None:
        attempt = self._script.attempt(each.index, each.rank, None)
        own = [kill for kill in self._kills if kill.rank == each.rank]
        attempt = replace(attempt, kill=own[each.index] if each.index < len(own) else None)
        if self._same_seed:
            attempt = replace(attempt, seed=FIRST_SEED)
        each.pid = os.fork()
        self._pids.append(each.pid)
        each.shot, each.stopped_at = False, None
        if each.pid == 0:
            self._listener.close()
            for other in self._ranks:
                if other.connection is not None:
                    other.connection.close()
            if attempt.world_size == 1:  # which otherwise starts as plain `python train.py` would
                alone = {"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
                os.environ.update(elastic_environment(0, 2, self._port) | alone)
            _run_rank(self._script, attempt, self._port)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.setpgid(each.pid, each.pid)

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        pid, *_ = _CREDENTIALS.unpack(credentials)
        each = next(rank for rank in self._ranks if rank.pid == pid)
        each.connection = connection
        self._selector.register(connection, selectors.EVENT_READ, (each, connection))
        socket.send_fds(connection, [HELLO], [each.heartbeat.descriptor])
        place = {"place": {}, "incarnation": self._incarnation, "replacement": each.replacement}
        place["noticed"] = self._noticed
        connection.sendall(encode(place))

    def _hear(self, each: _Rank, connection: socket.socket) -> None:
        try:
            said = connection.recv(65536)
        except ConnectionError:
            said = b""
        if not said:
            self._selector.unregister(connection)
            connection.close()
        if each.connection is not connection:
            return  # that process has ended, and another one is there
        if not said:
            each.connection = None
        for line in map(json.loads, said.splitlines()):
            each.arrived = line.get("arrived", each.arrived)
            if "gives_way" in line:
                each.shot = True
                os.killpg(each.pid, signal.SIGKILL)
            if line.get("called_off") == self._incarnation:
                self._tell_of(each.rank, line["why"])
                self._incarnation += 1
        if said and all(other.arrived == self._incarnation for other in self._ranks):
            self._tell({"formed": self._incarnation, "prefix": f"test/{self._incarnation}"})

    def _tell_of(self, rank: int, why: str) -> None:
        self._noticed = time.time()
        self._tell({"failed": self._incarnation, "rank": rank, "why": why, "at": self._noticed})

    def _tell(self, message: dict[str, Any]) -> None:
        for rank in self._ranks:
            if rank.connection is not None:
                with contextlib.suppress(ConnectionError):
                    rank.connection.sendall(encode(message))

    def _reap(self) -> None:
        for rank in self._ranks:
            if rank.ended:
                continue
            ended, status = os.waitpid(rank.pid, os.WNOHANG)
            if not ended:
                continue
            code = os.waitstatus_to_exitcode(status)
            if code == 0:
                rank.ended = True
                continue
            with contextlib.suppress(ProcessLookupError):
                os.killpg(
                    rank.pid, signal.SIGKILL
                )  # workers of its loader, which find out for themselves in 5 s at most
            struck = rank.shot or any(line["kind"] == "killed" for line in self._lines(rank))
            if not struck and self.restarts_left:
                self._restart()
                return
            self._left -= 1
            if not struck or self._left < 0:
                rank.ended = True
                raise self._failed(f"rank {rank.rank}, process {rank.index}, ended with {code}")
            self._on_death(self._script.workdir)
            if self._whole:
                self._restart()
                return
            self._tell_of(rank.rank, f"ended with {code}")
            self._incarnation += 1
            rank.replacement = True
            self._replace(rank)

    def _replace(self, each: _Rank) -> None:
        each.index += 1
        each.arrived, each.connection = -1, None
        self._fork(each)

    def _restart(self) -> None:
        """End all processes and start them anew, as the supervisor does when a rank leaves by itself in a recovery."""
        self.restarts_left -= 1
        for rank in self._ranks:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):  # one has ended already
                os.killpg(rank.pid, signal.SIGKILL)
                os.waitpid(rank.pid, 0)
        self._incarnation += 1
        for rank in self._ranks:
            rank.replacement = False
            self._replace(rank)

    def _lines(self, each: _Rank) -> list[dict[str, Any]]:
        return read_lines(attempt_path(self._script.workdir, each.index, each.rank, "jsonl"))

    def _dump_threads(self) -> None:
        for rank in self._ranks:
            if not rank.ended:
                os.killpg(rank.pid, signal.SIGUSR1)
        time.sleep(0.5)

    def _failed(self, why: str) -> AttemptFailed:
        logs = sorted(self._script.workdir.glob("attempt*.log"))
        tails = [f"--- {log.name}\n{log.read_text(errors='replace')[-6000:]}" for log in logs]
        return AttemptFailed("\n".join([why, *tails]))


@contextmanager
def _store() -> Iterator[int]:
    """A store in a process of its own, and its port: no rank may take it along when it dies."""
    port = free_port()
    pid = os.fork()
    if pid == 0:
        os.setpgid(0, 0)
        store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
        while store is not None:
            signal.pause()
    try:
        yield port
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def run_supervised(
    fit: Fit,
    *,
    url: str,
    workdir: Path,
    world_size: int,
    kills: Sequence[Kill],
    timeout: float = 60.0,
    same_seed: bool = False,
    must_strike: bool = True,
    storm: Storm | None = None,
    restarts: int = 0,
    on_death: Callable[[Path], None] = nothing,
    whole: bool = False,
    deaths: int = 0,
) -> list[AttemptResult]:
    """Run one job of which ranks die and are replaced, until all have finished.

    Kills of one rank strike it in their order. With `same_seed` a replacement has the seed of the process before it.
    When a rank leaves by itself, all are started anew as often as `restarts` says. `on_death` is called when a kill has
    struck, before the rank is replaced, and `deaths` are those that `fit` scripts by itself; with `whole` that is a restart, too.

    Returns:
        The processes: those of index `i` are the ones before which `i` of their rank have died. The last result has
        the end of every rank.
    """
    workdir.mkdir(parents=True, exist_ok=True)
    script = _Script(fit=fit, url=url, workdir=workdir, world_size=world_size, timeout=timeout, seams=())
    with _store() as port:
        most = len(kills) + deaths if storm is None else storm.failures
        job = _Job(
            *(script, kills, port),
            same_seed=same_seed,
            storm=storm,
            restarts=restarts,
            on_death=on_death,
            whole=whole,
            most_failures=most,
        )
        died = job.run()
    last = max(died) + 1
    for rank, index in enumerate(died):
        for kind in ("end", "returned", "jsonl", "log"):
            shutil.copy(attempt_path(workdir, index, rank, kind), attempt_path(workdir, last, rank, kind))
        if not any(
            key.startswith("rng/") for key in torch.load(attempt_path(workdir, last, rank, "end"), weights_only=True)
        ):
            attempt_path(workdir, last, rank, "jsonl").write_text("")  # it was found finished
    for index in range(last):
        attempt_path(workdir, index, 0, "log").touch()
    struck = sum(died) - (restarts - job.restarts_left) * world_size
    assert not must_strike or struck == (len(kills) + deaths) * (not whole), f"{kills} did not all strike: {died}"
    return [
        AttemptResult(index=index, outcome="finished", seconds=0.0, world_size=world_size, workdir=workdir)
        for index in range(last + 1)
    ]
