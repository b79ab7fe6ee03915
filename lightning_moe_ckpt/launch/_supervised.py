"""A rank's side of `moe-ckpt run`: failures of other ranks, joining them again, and messages to and from the supervisor.

    supervised = Supervised.from_environment()          # None under other launchers; a spare waits here for its place
    while training:
        with GroupAbort(world_size) as abort:
            store = supervised.rejoin(timeout)          # all ranks have arrived
            supervised.watch(abort.abort)
            init_process_group(store=store, ...)
        try:
            train()                                     # supervised.beat(step) after each step
        except Exception:
            if supervised.confirm(10.0) is None:
                raise                                   # nobody has failed: an error of ours
            destroy_process_group()

Nothing is ever raised into the main thread from outside, where it could tear an optimizer's step: `abort` makes the
collective raise in which it waits, or which it begins next.

A supervisor and a rank of its node exchange lines of JSON over a socket, and map one page for heartbeats:

    rank -> supervisor    {"arrived": incarnation}
                          {"called_off": incarnation, "why": ...}                           it is to end, and nobody has
                          {"gives_way": why, "since": step}                                 it is to be ended, and another one takes its place
                          {"cannot_rejoin": why}                                            ranks start together or not at all
                          {"over": why}                                                     the job is to end
                          {"leaves": prefix of files, "url": ..., "storage_option": ...}    memory that the job's end must not lose
    supervisor -> rank    {"place": environment, "incarnation": ..., "replacement": ..., "noticed": ...}    first, with the page
                          {"failed": incarnation, "rank": ..., "why": ..., "at": seconds since 1970}
                          {"formed": incarnation, "prefix": ...}                            all ranks have arrived

The socket's name is in the ranks' environment, in Linux's abstract namespace: nothing is left in the file system.
The supervisor knows who connects by the process id, which the kernel tells.
"""

from __future__ import annotations

import json
import mmap
import os
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, NoReturn

from typing_extensions import override

from lightning_moe_ckpt.errors import CheckpointError

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]  # exported at run time only


_OUTLAST_SECONDS = 1.0
"""Seconds for which collectives may outlast a failure: ranks that hang are looked for two seconds after it."""
_LEAVE_SECONDS = 30.0
"""Seconds for a process without its supervisor to save and leave; as long as launchers wait."""


class RankFailure(NamedTuple):
    """Failure that ended an incarnation."""

    incarnation: int
    """Incarnation that the failure ended."""
    rank: int
    why: str
    """Predicate of a sentence about the rank, for messages."""

    @override
    def __str__(self) -> str:
        return f"rank {self.rank} {self.why}"


class Supervised:
    """This process's side of its node's supervisor. One per process; methods are for its main thread."""

    _current: ClassVar[Supervised | None] = None

    def __init__(self, connection: socket.socket, heartbeat: Heartbeat) -> None:
        self._connection, self._heartbeat = connection, heartbeat
        self.pid = os.getpid()
        """Id of the connected process; its forks are not connected."""
        self._changed = threading.Condition()
        self._abort: Callable[[], None] | None = None
        self._outlasts: Callable[[int], bool] = lambda _: False
        self._failures: dict[int, RankFailure] = {}
        self._formed: dict[int, str] = {}
        self._arrived = -1
        self._uses = 0
        self._lost = False
        self._messages = read_messages(connection)
        place = next(self._messages, None)
        if place is None:
            raise _lost()
        os.environ.update(place["place"])
        os.environ.pop(SPARE, None)
        self.noticed: float = place["noticed"]
        """Time at which the supervisor has noticed the newest failure, in seconds since 1970; 0 for none."""
        self._newest: int = place["incarnation"]
        self.incarnation = self._newest
        """Incarnation that this process has joined, or is to join first."""
        self.replacement: bool = place["replacement"]
        """Whether this process replaces one that had joined an incarnation."""
        self.fits = 0
        """Number of fits that this process has begun; ranks join each other in the same fit only."""
        threading.Thread(target=self._listen, name="moe-ckpt-supervised", daemon=True).start()

    @classmethod
    def from_environment(cls) -> Supervised | None:
        """Return this process's connection to its supervisor; None without one.

        A spare waits here until it gets a place. Only then does its environment have `RANK`, `LOCAL_RANK` and so on.
        """
        if cls._current is not None and cls._current.pid == os.getpid():
            return cls._current
        name = os.environ.get(SUPERVISOR)
        if not name:
            return None
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(address_of(name))
            hello, descriptors, _, _ = socket.recv_fds(connection, len(HELLO), 1)
        except OSError as error:
            raise _lost() from error
        if not hello:
            connection.close()
            if SPARE in os.environ:
                sys.exit(0)  # the job has ended without needing it
            return None  # a process that a rank has started
        cls._current = cls(connection, Heartbeat(descriptors[0]))
        return cls._current

    # -- groups

    @property
    def failed(self) -> bool:
        """Whether the incarnation that this process has joined has failed."""
        return bool(self._newest > self.incarnation)

    def rejoin(self, timeout: float) -> Store:
        """Arrive at the newest incarnation, wait `timeout` seconds for all other ranks there, and return an empty store for process
        groups.

        If that incarnation fails meanwhile, all ranks arrive at the next one. Raises `TimeoutError` if not all ranks have arrived:
        let the error end the process, and the supervisor starts all ranks anew.
        """
        prefix = self.arrive(timeout)
        # A spare may wait for its place before it has imported torch.
        from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # as above

        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        return PrefixStore(prefix, TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout)))

    def arrive(self, timeout: float) -> str:
        """Do what `rejoin` does, and return the prefix of the store's keys."""
        self.pause(aborted=True)
        deadline = time.monotonic() + timeout
        with self._changed:
            self._abort = None
            while self.incarnation < self._newest or self.incarnation not in self._formed:
                self.incarnation = self._newest
                if self._arrived < self.incarnation:
                    self._arrived, self._uses = self.incarnation, 0
                    self._connection.sendall(encode({"arrived": self.incarnation}))
                if not self._changed.wait_for(self._has_arrived, deadline - time.monotonic()):
                    raise TimeoutError(
                        f"Not all ranks have come to incarnation {self.incarnation} in {timeout:g} s. When this process ends, "
                        "the supervisor starts all ranks anew."
                    )
            self._uses += 1
            return f"{self._formed[self.incarnation]}/{self._uses}"

    def watch(self, abort: Callable[[], None], outlasts: Callable[[int], bool] = lambda _: False) -> None:
        """Call `abort` on a thread of its own when this process's incarnation fails, at once if the incarnation has failed.

        If `outlasts` of the failed rank, `abort` waits until `confirm` tells of it, for a second at most. `watch` and `rejoin` forget both.
        """
        with self._changed:
            self._abort, self._outlasts = abort, outlasts
            if self.failed:
                self._call_abort()

    def confirm(self, timeout: float) -> RankFailure | None:
        """Return the failure that ended this process's incarnation, behind an exception here; None if no rank has failed.

        The supervisor has `timeout` seconds to learn of the failure. A connection may end before its process has.
        """
        with self._changed:
            self._changed.wait_for(lambda: self.failed or self._lost, timeout)
            if self.failed:
                self._call_abort()
            return self._failures.get(self.incarnation)

    def call_off(self, why: str) -> None:
        """Let the supervisors end this incarnation although all its ranks live, because this rank `why`: they meet again in the
        next one.
        """
        self._connection.sendall(encode({"called_off": self.incarnation, "why": why}))

    def give_way(self, why: str, since: int) -> NoReturn:
        """Let the supervisor end this process and put another one in its place, on an idle device if the node has one, because this
        rank `why`, for the first time since step `since`. Does not return.
        """
        self._connection.sendall(encode({"gives_way": why, "since": since}))
        time.sleep(_LEAVE_SECONDS)
        raise CheckpointError(f"This rank {why}, and its supervisor has not ended it.")

    def cannot_rejoin(self, why: str) -> None:
        """Let the supervisor start all ranks anew when one fails: this one cannot join others in new process groups."""
        self._connection.sendall(encode({"cannot_rejoin": why}))

    def end_job(self, why: str) -> None:
        """Let the supervisors end the job, unless a failure ends this incarnation; `why` is a predicate about this rank."""
        if not self.failed:
            with suppress(OSError):  # it has ended itself
                self._connection.sendall(encode({"over": why}))

    def leaves(self, memory: str, url: str, storage_options: Mapping[str, Any] | None) -> None:
        """Let the supervisor store what the run at `url` has in files that begin with `memory`, if the job ends in failure."""
        with suppress(TypeError):  # options without words cannot be handed on; `moe-ckpt flush` is left
            option = [*(storage_options or {}).items()]
            self._connection.sendall(encode({"leaves": memory, "url": url, "storage_option": option}))

    # -- beats

    def beat(self, step: int) -> None:
        """Note that the main thread has come to `step`, such as `trainer.global_step`.

        From then until the next `pause` or `rejoin`, too long a silence counts as a hang. A process that leaves with an exception
        is only replaced if steps were passed since the last failure.
        """
        self._heartbeat.beat(step)

    def pause(self, *, aborted: bool = False) -> None:
        """Note that no beats follow for any time: during validation, saving, the user's own code.

        An `aborted` step is no measure of a step's length, since it may have waited for a hung rank.
        """
        self._heartbeat.pause(aborted=aborted)

    # -- the thread that listens

    def _listen(self) -> None:
        for message in self._messages:
            self._take(message)
        with self._changed:
            self._lost = True
            self._changed.notify_all()
        # Nobody is left to end this process when the others do: stop as if asked to.
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(_LEAVE_SECONDS)
        os.kill(os.getpid(), signal.SIGKILL)  # the main thread waits in a collective, perhaps for ever

    def _take(self, message: Line) -> None:
        with self._changed:
            if "formed" in message:
                self._formed[message["formed"]] = message["prefix"]
            else:
                failure = RankFailure(message["failed"], message["rank"], message["why"])
                self._failures[failure.incarnation] = failure
                self._newest, self.noticed = max(self._newest, failure.incarnation + 1), message["at"]
                if self._abort is not None and self._outlasts(failure.rank):
                    threading.Thread(target=self._abort_late, args=(self._abort,), daemon=True).start()
                else:
                    self._call_abort()
            self._changed.notify_all()

    def _abort_late(self, abort: Callable[[], None]) -> None:
        time.sleep(_OUTLAST_SECONDS)
        with self._changed:
            if self._abort == abort:
                self._call_abort()

    def _call_abort(self) -> None:
        abort, self._abort = self._abort, None
        if abort is not None:
            # Not from here: while groups are made, it waits for the main thread, which may wait for a message.
            threading.Thread(target=abort, name="moe-ckpt-abort", daemon=True).start()

    def _has_arrived(self) -> bool:
        """Return whether all ranks have arrived or the incarnation has failed. Raises `CheckpointError` without a supervisor."""
        if self._lost:
            raise _lost()
        return self.failed or self.incarnation in self._formed


def _lost() -> CheckpointError:
    return CheckpointError("The supervisor of this node has ended. Start the job again.")


SUPERVISOR = "MOE_CKPT_SUPERVISOR"
"""Environment variable with the name of the supervisor's socket."""

SPARE = "MOE_CKPT_SPARE"
"""Environment variable of a process that waits for a place."""

DENSIFY = "MOE_CKPT_DENSIFY"
"""Environment variable with the tag of the run that `moe-ckpt densify` names, whose fit ends once the state is dense."""

RERUN = "MOE_CKPT_RERUN"
"""Environment variable with a `RerunRequest`. Processes that have it write nothing to any URL."""


@dataclass(frozen=True, kw_only=True)
class RerunRequest:
    """Steps of a stored run to run again. In step N `trainer.global_step` is N."""

    tag: str
    """Tag, as of shared memory, of the only run that may be resumed."""
    name: str
    """Name of this replay, 32 hexadecimal digits: it replaces the tag."""
    results: str
    """File for the losses, written by rank 0."""
    step: int
    """First step that is looked at; the newest generation at or before it is restored."""
    until: int
    """Last step; all processes end with it."""
    hook: str = ""
    """Function called at each step that is looked at, as `module:function`; empty for none."""
    dump: tuple[str, ...] = ()
    """Parts of each step to store: `gradients`, `activations`, `batch`."""
    out: str = ""
    """Folder for them."""
    store: str = ""
    """Folder for a run with the states of boundaries as its generations; empty for none."""
    store_from: int = 0
    """First of these boundaries."""
    given: Mapping[str, Any] = field(default_factory=dict)
    """Values for the optimizer's groups, or the trainer's clipping, from `step` on."""

    def to_environment(self) -> dict[str, str]:
        """Return the variable for the processes to start."""
        return {RERUN: json.dumps(asdict(self))}

    @classmethod
    def from_environment(cls) -> RerunRequest | None:
        """Return this process's request; `None` where it trains as ever."""
        text = os.environ.get(RERUN)
        return cls(**{**(found := json.loads(text)), "dump": tuple(found["dump"])}) if text else None


HELLO = b"!"
"""Byte sent with the page's descriptor."""

Line = dict[str, Any]


def encode(message: Line) -> bytes:
    """Return a message's bytes."""
    return json.dumps(message).encode() + b"\n"


def read_messages(connection: socket.socket) -> Iterator[Line]:
    """Yield messages until the other side is gone."""
    with suppress(OSError), connection.makefile("rb") as lines:
        for line in lines:
            if line.endswith(b"\n"):  # else the other side died within it
                yield json.loads(line)


def address_of(name: str) -> str:
    """Return a socket's address."""
    return f"\0{name}"


class Beats(NamedTuple):
    """Values of a heartbeat."""

    beats: int
    step: int
    """Newest step; -1 before the first beat."""
    longest: float
    """Seconds that the longest step took: from a beat to the next one, or to a pause."""
    moves: int
    """Beats and pauses."""
    watched: bool
    """Whether silence means a hang."""


class Heartbeat:
    """Page of memory in which a rank's main thread counts its steps; writing there needs no system call. Without `descriptor`, a
    new page.
    """

    _LAYOUT = struct.Struct("<qqdqq")

    def __init__(self, descriptor: int | None = None) -> None:
        if descriptor is None:
            descriptor = os.memfd_create("moe-ckpt-heartbeat")
            os.ftruncate(descriptor, mmap.PAGESIZE)
        self.descriptor = descriptor
        self._page = mmap.mmap(descriptor, mmap.PAGESIZE)
        self._last = 0.0
        self._beats, self._moves, self._step, self._longest = 0, 0, -1, 0.0

    def beat(self, step: int) -> None:
        """Note that the main thread has come to `step`."""
        self._end_step()
        self._last, self._beats, self._step = time.monotonic(), self._beats + 1, step
        self._write(watched=True)

    def pause(self, *, aborted: bool = False) -> None:
        """Note that no beats come for a while, without a hang. An aborted step does not count as the longest."""
        if not aborted:
            self._end_step()
        self._last = 0.0
        self._write(watched=False)

    def read(self) -> Beats:
        """Return the values written last, by whichever process maps the page."""
        beats, step, longest, moves, watched = self._LAYOUT.unpack_from(self._page)
        return Beats(beats, step if beats else -1, longest, moves, bool(watched))

    def close(self) -> None:
        """Unmap the page."""
        self._page.close()
        os.close(self.descriptor)

    def _end_step(self) -> None:
        if self._last:
            self._longest = max(self._longest, time.monotonic() - self._last)

    def _write(self, *, watched: bool) -> None:
        self._moves += 1
        # One step, such as that of a first batch, is no measure yet of how long steps take.
        watched = watched and self._beats > 1
        self._LAYOUT.pack_into(self._page, 0, self._beats, self._step, self._longest, self._moves, watched)
