"""A node's supervisor: torch's elastic agent, which replaces a dead rank instead of starting all ranks anew.

Torch's agent asks every tenth of a second whether any process has ended, and then ends and restarts all. Here that
question (`_monitor_workers`) waits for events instead, and answers "all are well" as long as it can help:

    a rank dies        the failure goes into the job's log, for all nodes' supervisors
    it is in the log   ranks of this node are told, and abort their collectives; a spare, or a new process, takes the place
    ranks arrive       they are counted; the one that completes the count adds that the incarnation is formed
    it is in the log   ranks of this node are told, and make their groups

If ranks do not come together in time, or one cannot be replaced, or ranks have said that they cannot join again, the answer is
that something is wrong, and the agent does what it always does: it ends all processes, meets the other nodes again, and starts
all anew.

Source: torch 2.13 `torch/distributed/elastic/agent/server`; the parts used here exist from torch 2.6 on.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from enum import IntEnum
from typing import Any, cast

from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]  # exported at run time only
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from typing_extensions import override

from lightning_moe_ckpt.launch._job_log import EventLog, FailureRate, JobEvent, Judge, NodeWatch, describe_exit
from lightning_moe_ckpt.launch._members import Clock, Member, NodeEvent, RankOutput, Switchboard
from lightning_moe_ckpt.launch._network import limit_silence
from lightning_moe_ckpt.launch._node_range import NodeRange
from lightning_moe_ckpt.launch._spares import DEVICES, Spares, close_streams, set_aside
from lightning_moe_ckpt.launch._supervised import SUPERVISOR, Line

_LOOK_SECONDS = 0.1
"""Seconds between two looks at beats and deadlines; events do not wait for a look."""

_STORE_TIMEOUT = timedelta(minutes=5)
_TELL_SECONDS, _MOST_TELL_SECONDS = 10.0, 60.0
"""Seconds between two sentences while this node waits for others."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SupervisorOptions:
    """Limits and means of a supervisor for failures."""

    spares: int = 0
    """Processes per node that wait for a place."""
    spare_command: tuple[str, ...] = ()
    """A spare's command; empty for the ranks' command."""
    max_failures: FailureRate = field(default_factory=lambda: FailureRate(10, 3600.0, "10 per 1h"))
    max_restarts: int | None = None
    """Most new starts of all ranks; None leaves the limit to `max_failures`."""
    recover_seconds: float = 300.0
    """Seconds from a failure until training must go on; after them all processes are started anew."""
    hang_seconds: float = 10.0
    """Least seconds of a rank's silence that count as a hang."""
    node_seconds: float = 10.0
    """Seconds of silence after which another node's supervisor counts as gone; as long as the rendezvous takes."""
    wait_seconds: float = 60.0
    """Seconds for which MIN nodes or more wait for another one."""
    grow_seconds: float = 300.0
    """Least seconds from a start of all ranks to the next one that lets nodes in."""
    say: Callable[[str], None] = print
    """Gets one sentence per decision."""
    left: dict[str, Line] = field(default_factory=dict)
    """Messages about runs that leave memory on this node, by URL; filled by the supervisor."""


class _Join(IntEnum):
    """Whether ranks of this node can join others in this round. The agent alone moves it, and only up."""

    AGAIN = 0
    """A rank that dies is replaced."""
    ONCE = 1
    """Ranks have said that they cannot join again: if one fails, all are started anew."""
    NEVER = 2
    """A process has failed, and the round ends."""


class SupervisingAgent(LocalElasticAgent):
    """A node's agent. The ranks' console is `output`; further arguments are for torch's agent."""

    def __init__(self, spec: WorkerSpec, output: RankOutput, options: SupervisorOptions, **of_torch: Any) -> None:
        super().__init__(spec, output, **of_torch)
        # Waiting is in `_monitor_workers`; the loop around it would only sleep.
        spec.monitor_interval = 1e-6
        self._output, self._options = output, options
        self._judge = Judge(options.max_failures)
        self._board = Switchboard()
        os.environ[SUPERVISOR] = self._board.name
        self._members: dict[int, Member] = {}
        """Ranks of this node by process id."""
        self._unknown: dict[int, Any] = {}
        """Connections of processes that are not entered yet, by process id."""
        self._spares = Spares(options.spares, options.spare_command, output, self._board, options.say)
        self._clock = Clock(5 * _LOOK_SECONDS)
        self._rounds = 0
        self._incarnation = 0
        self._formed = -1
        """Newest incarnation that has come together; -1 before the first of a round."""
        self._deadline = self._suspicion = float("inf")
        """Time at which a recovery takes too long, and at which ranks that have not arrived count as hung."""
        self._silent = False
        """Whether the log counts all ranks of this node as silent."""
        self._join = _Join.AGAIN
        self._verdict = ""
        self._range = NodeRange(spec.rdzv_handler, options.grow_seconds)
        self._log: EventLog | None = None
        self._nodes: NodeWatch

    # -- torch's questions

    @override
    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        group = cast("Any", worker_group)
        before = group.group_world_size
        self._range.expect(before)
        met = threading.Event()
        teller = threading.Thread(target=self._tell_waiting, args=(met,), name="moe-ckpt-rendezvous", daemon=True)
        teller.start()
        handler: Any = worker_group.spec.rdzv_handler
        if hasattr(handler, "_bootstrap_store_info"):
            # A node that was in an earlier round does not tell a new one where the store is, which waits for that for ever.
            handler._bootstrap_store_info = None  # noqa: SLF001  # torch has no public way
        try:
            super()._rendezvous(worker_group)
        finally:
            met.set()
            teller.join()
        if said := self._range.met(before, group.group_world_size, group.workers[0].world_size):
            self._options.say(said)

    def _tell_waiting(self, met: threading.Event) -> None:
        """Log for whom this node waits, and for how long so far."""
        began, pause = time.monotonic(), _TELL_SECONDS
        whom = f"{self._range.gone} to come back" if self._range.gone else "other nodes"
        if self._range.gone:
            self._options.say(f"waiting for {whom}")
        while not met.wait(pause):
            standing = self._range.standing()
            self._options.say(f"waiting for {whom}, {time.monotonic() - began:.0f} s{standing}")
            pause = pause if standing else min(2 * pause, _MOST_TELL_SECONDS)

    @override
    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._begin_round(worker_group)
        pids: dict[int, Any] = super()._start_workers(worker_group)
        self._output.started()
        for local_rank, handler in self._context.subprocess_handlers.items():
            close_streams(handler)
            self._enter(Member(handler), local_rank, worker_group)
        self._spares.start(self._context)
        return pids

    @override
    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        give_up = time.monotonic() + _LOOK_SECONDS
        while not self._verdict and (event := self._board.take(give_up - time.monotonic())) is not None:
            self._consider(event, worker_group)
        if not self._verdict:
            self._look()
        if self._verdict == "restart":
            return RunResult(state=WorkerState.UNHEALTHY)
        if self._verdict == "over" or all(member.exit_code == 0 for member in self._members.values()):
            self._nodes.end()
            return self._last_result(worker_group)
        return RunResult(state=WorkerState.HEALTHY)

    @override
    def _shutdown(self, *arguments: Any, **keywords: Any) -> None:
        super()._shutdown(*arguments, **keywords)
        for member in self._members.values():
            member.close()
        self._members = {}
        if self._log is not None:
            # Others do not go on without this node: what they do next, the rendezvous decides.
            name = self._nodes.name if self._range.varies and not self._verdict else ""
            why = f"{name} was told to leave" if name else "ranks of another node were ended"
            self._log.append("over" if self._verdict == "over" else "restart", why=why, node=name)
            self._log.close(2.0)
            self._log = None

    def close(self) -> None:
        """End spares, threads and connections, after `run`, and ranks if their end was interrupted."""
        for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(each, signal.SIG_IGN)
        for member in self._members.values():
            member.close()
        self._spares.close()
        self._board.close()
        self._output.close()

    def _last_result(self, worker_group: WorkerGroup) -> RunResult:
        """Return torch's result, with the rank that has failed; the job ends."""
        self._remaining_restarts = 0
        if all(member.exit_code is None for member in self._members.values()):
            return RunResult(state=WorkerState.FAILED)  # it was on another node
        return cast("RunResult", super()._monitor_workers(worker_group))

    @property
    def _context(self) -> Any:
        """Torch's `SubprocessContext`."""
        assert self._pcontext is not None
        return self._pcontext

    # -- rounds: from the start of all ranks to their end

    def _begin_round(self, worker_group: WorkerGroup) -> None:
        """Begin a log agreed by all nodes, with a new incarnation."""
        group = cast("Any", worker_group)  # torch declares some of it as None
        store, host, port = group.store, str(group.master_addr), int(group.master_port)
        key = "moe_ckpt/round"
        if self._worker_group.spec.rdzv_handler.get_backend() == "static":
            key += f"/{self._rounds}"  # its store is the same in every round
        self._rounds += 1
        store.set(f"{key}/{group.group_rank}", str(self._incarnation))
        if group.group_rank == 0:
            newest = max(int(store.get(f"{key}/{node}")) for node in range(group.group_world_size))
            fresh = {"prefix": f"moe_ckpt/{uuid.uuid4()}", "incarnation": newest}
            store.set(key, json.dumps(fresh))
        agreed = json.loads(store.get(key))
        self._incarnation, self._formed, self._silent = agreed["incarnation"], -1, False
        self._verdict, self._deadline, self._suspicion = "", float("inf"), float("inf")
        self._join = _Join.AGAIN
        if self._incarnation:  # of a job that this node has joined later
            self._rounds = max(self._rounds, 2)
        prefix = agreed["prefix"]

        def connect() -> Store:
            return TCPStore(host, port, is_master=False, timeout=_STORE_TIMEOUT)

        self._log = EventLog(connect, prefix, lambda event: self._board.queue.put(("logged", prefix, event)))
        limit_silence(self._options.node_seconds)  # of the rendezvous, too: this node may be the one that is cut off
        nodes = int(group.group_world_size)
        self._nodes = NodeWatch(
            self._log, int(group.group_rank), nodes, socket.gethostname(), self._options.node_seconds
        )

    def _enter(self, member: Member, local_rank: int, worker_group: WorkerGroup) -> None:
        """Enter a process as a rank of this node."""
        worker = worker_group.workers[local_rank]
        self._context.subprocess_handlers[local_rank] = member.handler
        worker.id = member.pid
        member.handler.local_rank_id = member.local_rank = local_rank
        member.rank = worker.global_rank
        self._members[member.pid] = member
        if not self._spares.was(member):
            self._board.expect_exit(member.pid)
            member.connection = self._unknown.pop(member.pid, None)
        self._place(member)

    def _place(self, member: Member) -> None:
        if member.connection is not None:
            self._board.serve(member.pid, member.connection)
            environment = {name: str(value) for name, value in self._context.envs[member.local_rank].items()}
            environment |= {DEVICES: os.environ[DEVICES]} if DEVICES in os.environ else {}
            member.place(environment, self._incarnation, self._judge.noticed)

    # -- what happens

    def _consider(self, event: NodeEvent, worker_group: WorkerGroup) -> None:
        kind, key, what = event
        if kind == "logged":
            if self._log is not None and key == self._log.prefix:
                self._follow(what, worker_group)
        elif kind == "connected":
            self._connect(key, what)
        elif key in self._members:
            if kind == "exited":
                self._exited(self._members[key])
            else:
                self._said(self._members[key], what)
        elif kind == "exited":
            self._spares.exited(key)

    def _connect(self, pid: int, connection: Any) -> None:
        member = self._members.get(pid)
        if member is None:
            if not self._spares.connect(pid, connection):
                self._unknown[pid] = connection
            return
        member.connection = connection
        self._place(member)

    def _said(self, member: Member, message: Line) -> None:
        if (ends := message.get("called_off")) is not None:
            self._now.append("failed", rank=member.rank, pid=-1, why=message["why"], only=ends)
        elif "gives_way" in message:
            self._give_way(member, message["gives_way"], message["since"])
        elif "cannot_rejoin" in message:
            self._join = max(self._join, _Join.ONCE)
            if member.rank == 0 and self._rounds == 1:
                self._options.say(f"if a rank fails, all ranks are started anew: {message['cannot_rejoin']}")
        elif "over" in message:
            self._now.append("over", why=f"rank {member.rank} {message['over']}")
        elif "leaves" in message:
            self._options.left[message["url"]] = message
        elif message["arrived"] == self._incarnation:
            member.arrived = self._incarnation
            if self._now.count(f"arrived/{self._incarnation}") == self._world_size:
                self._now.append("formed", incarnation=self._incarnation)

    def _give_way(self, member: Member, why: str, since: int) -> None:
        """End a rank whose device is at fault. If the next one fails likewise before it has passed an audit, the job ends."""
        if self._judge.gives_way_again(member.rank, since):
            self._now.append("over", why=f"rank {member.rank} {why}, as the process before it at the same place")
            return
        member.kill(f"{why}, and was ended{set_aside(member.local_rank, len(self._members))}")

    def _exited(self, member: Member) -> None:
        code = member.exit_code
        if code == 0 or code is None or self._join is _Join.NEVER:
            return
        why = member.why or describe_exit(code)
        who = f"rank {member.rank} (pid {member.pid})"
        once = self._join is _Join.ONCE
        formed = once or self._rounds > 1 or self._formed >= 0
        recovering = self._deadline < float("inf")
        verdict = self._judge.judge(code, formed=formed, recovering=recovering, step=self._step)
        if verdict == "replace" and any(each.exit_code == 0 for each in self._members.values()):
            verdict, why = "restart", f"{why} after others had finished"
        if once:
            self._join, verdict = _Join.NEVER, "restart" if verdict == "replace" else verdict
        # An error while others recover comes from the failure that is counted already, such as a lost node.
        if verdict != "over" and not (recovering and code > 0) and self._judge.count():
            verdict, why = "over", f"{why}; more than {self._options.max_failures.text} failures"
        if verdict == "replace":
            self._now.append("failed", rank=member.rank, pid=member.pid, why=why)
        else:
            self._now.append(verdict, why=f"{who} {why}")

    @property
    def _now(self) -> EventLog:
        """This round's log."""
        assert self._log is not None
        return self._log

    @property
    def _world_size(self) -> int:
        return int(self._worker_group.workers[0].world_size)

    @property
    def _step(self) -> int:
        return max(member.heartbeat.read().step for member in self._members.values())

    # -- what follows

    def _follow(self, event: JobEvent, worker_group: WorkerGroup) -> None:
        """Carry out an event of the log on this node."""
        if event["kind"] == "lost" and self._range.varies and not self._judge.count():
            # The log is lost with the first node of this round; where nodes meet is another store.
            event = JobEvent(kind="restart", why="the first node is gone", node="the first node")
        kind = event["kind"]
        if kind == "failed":
            self._failed(event, worker_group)
        elif kind == "formed":
            if event["incarnation"] == self._incarnation:
                self._form()
        elif kind == "restart":
            self._range.gone = event.get("node", "")
            self._range.grown += bool(event.get("grows"))
            most, rounds = self._options.max_restarts, self._rounds - self._range.grown  # the same on all nodes
            if most is not None and rounds > most:
                why = f"{event['why']}; all ranks were started {rounds} times, `--max-restarts {most}` allows no more"
                self._end_round("over", f"{why}; the job is given up")
            else:
                when = self._range.after_loss(cast("int", worker_group.group_world_size))
                self._end_round("restart", f"{event['why']}; all ranks are started anew{when}")
        else:
            why = event.get("why", "the supervisor of the first node is gone")
            self._end_round("over", f"{why}; the job is given up")

    def _failed(self, event: JobEvent, worker_group: WorkerGroup) -> None:
        failed, rank = self._incarnation, event["rank"]
        if event.get("only", failed) != failed:
            return  # several ranks have called it off, or another one has failed before
        self._judge.noticed = time.time()
        self._incarnation += 1
        self._silent = False
        for member in self._members.values():
            member.send({"failed": failed, "rank": rank, "why": event["why"], "at": self._judge.noticed})
        now, dead = time.monotonic(), self._members.get(event["pid"])
        if self._world_size > 1 or dead is None or dead.connection is not None:  # else nobody ever comes together
            self._deadline = min(self._deadline, now + self._options.recover_seconds)
        self._suspicion = now + max(member.patience(self._options.hang_seconds) for member in self._members.values())
        if event.get("hang"):
            self._suspicion = now + self._options.hang_seconds / 5
        if dead is not None and dead.rank == rank:  # another node has its own process ids
            del self._members[dead.pid]
            how = self._replace(dead, worker_group)
            self._options.say(f"rank {rank} (pid {dead.pid}) {event['why']}; {how}, incarnation {self._incarnation}")
        else:
            self._options.say(f"rank {rank} {event['why']}, incarnation {self._incarnation}")

    def _replace(self, dead: Member, worker_group: WorkerGroup) -> str:
        spare = self._spares.take(dead.rank, dead.local_rank)
        member = spare or self._spares.start_process(
            self._context,
            {name: str(value) for name, value in self._context.envs[dead.local_rank].items()},
            self._output.label(dead.rank, dead.local_rank),
        )
        member.replacement = dead.replacement or self._formed >= 0
        self._enter(member, dead.local_rank, worker_group)
        dead.close()
        return "a spare takes its place" if spare is not None else f"pid {member.pid} takes its place"

    def _form(self) -> None:
        self._formed, self._suspicion = self._incarnation, float("inf")
        prefix = f"{self._now.prefix}/{self._formed}"
        for member in self._members.values():
            member.moves_then = member.heartbeat.read().moves
            member.send({"formed": self._formed, "prefix": prefix})
        if self._deadline < float("inf"):
            self._options.say(f"incarnation {self._formed} has come together")

    def _end_round(self, verdict: str, why: str) -> None:
        self._verdict, self._judge.noticed = verdict, time.time()
        self._options.say(why)
        self._incarnation += 1
        if verdict == "restart" and "SIGTERM" not in why:
            for member in self._members.values():
                member.kill()  # their peers are gone: there is nothing to say goodbye to

    # -- looks

    def _look(self) -> None:
        """Look for ranks and recoveries that hang."""
        seconds, now, options = self._clock.tick(), time.monotonic(), self._options
        running = [member for member in self._members.values() if member.exit_code is None]
        for member in running:
            member.watch(seconds)
            if member.stopped_seconds > member.patience(options.hang_seconds):
                member.kill(f"was stopped for {member.stopped_seconds:.0f} s, and ended")
        self._look_for_silence(running)
        gone = self._nodes.look(seconds)
        if gone is not None:
            why = f"{gone} is gone: its supervisor has not been heard of for {options.node_seconds:g} s"
            # While others recover, a rank has left already because of it, and was counted.
            over = self._range.varies and self._deadline == float("inf") and self._judge.count()
            why += f"; more than {options.max_failures.text} failures" if over else ""
            self._now.append("over" if over else "restart", why=why, node=gone)
        first = cast("int", self._worker_group.group_rank) == 0
        if why := self._range.look(lets_in=first and self._deadline == float("inf")):
            self._now.append("restart", why=why, grows=True)
        if now > self._suspicion:
            self._suspicion = float("inf")
            for member in running:
                if 0 <= member.arrived < self._incarnation:
                    member.kill("did not come when others had failed, and was ended")
        self._recovered(running)
        if now > self._deadline:
            self._deadline = float("inf")
            self._now.append("restart", why=f"ranks did not come together within {options.recover_seconds:g} s")

    def _look_for_silence(self, running: list[Member]) -> None:
        """Report a failure if all ranks of all nodes are silent, or one rank for as long as a recovery may take.

        A rank between two steps may take its time, and other ranks wait for it within their step, so silence of some ranks is no
        hang. The hung rank is found afterwards: a rank that arrives when told of the failure does not hang.
        """
        options = self._options
        formed = self._join is _Join.ONCE or self._formed == self._incarnation
        formed = formed and not any(member.stopped_seconds for member in running)
        # Of a rank that has died, the event may still be to come.
        formed = formed and all(member.exit_code in (None, 0) for member in self._members.values())
        silent = formed and all(member.is_silent(options.hang_seconds) for member in running)
        waited = [member for member in running if formed and member.is_silent(options.recover_seconds)]
        all_silent = False
        if silent != self._silent:
            self._silent = silent
            silent_nodes = self._now.count(f"silent/{self._incarnation}", 1 if silent else -1)
            all_silent = silent_nodes == self._worker_group.group_world_size
        if all_silent or waited:
            first = next(iter(waited or running or self._members.values()))
            why = f"has not passed a step for {first.quiet_seconds:.0f} s"
            if self._join is _Join.ONCE:
                self._join = _Join.NEVER
                self._now.append("over" if self._judge.count() else "restart", why=f"rank {first.rank} {why}")
            else:
                self._now.append("failed", rank=first.rank, pid=-1, why=why, hang=True)
            for member in running:
                member.quiet_seconds = 0.0

    def _recovered(self, running: list[Member]) -> None:
        """Clear the deadline when training goes on: all ranks have arrived, and have moved since."""
        if self._formed < self._incarnation or self._deadline == float("inf"):
            return
        if all(member.goes_on for member in running):
            self._deadline = float("inf")
            self._spares.start(self._context)
