"""`moe-ckpt run --nnodes MIN:MAX` goes on with the nodes that are left, and lets others in. All kills are real."""

from __future__ import annotations

import os
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from door import free_port
from launcher import exit_after
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # exported at run time only
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout

from launch._jobs import LIMIT_SECONDS, Job
from lightning_moe_ckpt.launch import _agent
from lightning_moe_ckpt.launch._node_range import NodeRange

STEPS = 50
"""Steps from one that is stored to the next."""

HOST = "host"
"""Node at which nodes meet, which must not be lost."""

ADDRESSES = {"first": 1, HOST: 2, "last": 3, "back": 4}


class Nodes:
    """Nodes of one job on one machine, one rank each."""

    def __init__(self, folder: Path, nnodes: str, *script: str, conf: str = "", **options: Any) -> None:
        self._folder, self._script, self._options = folder / "job", script, options
        self._meeting = f"--nnodes {nnodes} --rdzv-endpoint 127.0.0.1:{free_port()} --rdzv-id range"
        self._conf = f"keep_alive_interval=1,keep_alive_max_attempt=5{conf}"

    def start(self, name: str) -> Job:
        """Start a node. Nodes are numbered by their addresses; the first has the store of a round's log."""
        address = f"127.0.0.{ADDRESSES[name]}"
        own = ["--local-addr", address, "--rdzv-conf", f"{self._conf},is_host={name == HOST}"]
        torchrun = [*self._meeting.split(), *own]
        return Job(self._folder, 1, STEPS, "any", *self._script, torchrun=torchrun, name=name, **self._options)

    def end(self) -> None:
        """Let ranks come to their end."""
        (self._folder / "end").touch()


def begun(job: Job) -> list[tuple[int, int]]:
    """Return (number of ranks, first step) of each start of a node's rank."""
    found = re.findall(r"is one of (\d+), from step (\d+)$", job.output, re.MULTILINE)
    return [(int(ranks), int(step)) for ranks, step in found]


def said(job: Job) -> list[str]:
    return re.findall(r"^moe-ckpt: (.*)$", job.output, re.MULTILINE)


def kill(job: Job) -> None:
    """Kill a whole node at once, as a power cut does: its supervisor and its rank."""
    pids = [job.pid, *map(int, re.findall(r"pid (\d+) begins", job.output))]
    for pid in pids:
        with suppress(ProcessLookupError):  # a rank of an earlier start
            os.kill(pid, signal.SIGKILL)
    os.waitpid(job.pid, 0)


@pytest.mark.soak  # four meetings with heartbeats of seconds: too tight where other tests have both cores
@pytest.mark.timeout(120)
def test_the_job_goes_on_with_the_nodes_that_are_left_and_lets_others_in(tmp_path: Path) -> None:
    """Three, two, three, two: without the last one, with another in its place, and without the first, which has the log.

    No step is lost when a node is let in, and that comes no sooner than it may. Each lost node is one failure.
    """
    nodes = Nodes(tmp_path, "2:3", node_timeout=3.0, grow_every=3.0, max_failures="2")
    first, host, last = (nodes.start(name) for name in ("first", HOST, "last"))
    host.wait_until(lambda: [ranks for ranks, _ in begun(host)][-1:] == [3])  # one that was slow is let in
    before = len(begun(host))

    def sizes() -> list[int]:
        """Numbers of ranks since then; a busy machine may start as many ranks anew."""
        return [size for size, _ in groupby(ranks for ranks, _ in begun(host)[before:])]

    first.wait_until_step(STEPS)
    kill(last)
    host.wait_until(lambda: sizes()[-1:] == [2])
    started, back = time.monotonic(), nodes.start("back")
    host.wait_until(lambda: sizes()[-2:] == [2, 3])
    assert time.monotonic() - started > 2.0
    kill(first)
    host.wait_until(lambda: sizes()[-3:] == [2, 3, 2])
    nodes.end()
    ended = [host.end(), back.end()]
    assert [each.code for each in ended] == [0, 0], ended
    groups = [[step for _, step in rows] for _, rows in groupby(begun(host)[before:], key=lambda row: row[0])][-3:]
    (killed, *_), (stopped, *_), _ = groups
    assert killed % STEPS == 0
    assert stopped % STEPS, "it had stopped where a step ends, not where it stores one anyway"
    assert begun(back)[0] == (3, stopped)
    # Behind each loss it says for whom it waits.
    sentences = said(host)
    with_two = "all ranks are started anew with 2 of 3 nodes, in 3 s unless it returns"
    gone = rf"node \d \(.*\) is gone: its supervisor has not been heard of for 5 s; {with_two}"
    assert any(re.fullmatch(gone, each) for each in sentences)
    assert "1 node has come, and SIGTERM stops ranks at their next step; all ranks are started anew" in sentences
    assert f"the first node is gone; {with_two}" in sentences
    assert {f"going on with {n} of 3 nodes, {n} ranks" for n in (2, 3)} <= {*sentences}


def test_with_too_few_nodes_one_waits_says_so_and_gives_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is torch's."""
    monkeypatch.setattr(_agent, "_TELL_SECONDS", 1.0)
    ended = Nodes(tmp_path, "2:3", conf=",join_timeout=3", node_timeout=1.0).start(HOST).end()
    assert ended.code == 1
    *waits, last = ended.sentences()
    wait = r"waiting for other nodes, \d s: 1 of 3 nodes here, and `--nnodes` asks for 2"
    assert any(re.fullmatch(wait, each) for each in waits), waits
    assert last.endswith("fewer nodes than `--nnodes` asks for came within `join_timeout` of --rdzv-conf")


@pytest.mark.soak  # as above
@pytest.mark.timeout(120)
def test_a_node_that_is_told_to_leave_stops_all_where_a_step_ends(tmp_path: Path) -> None:
    """What is left goes on from there, with ranks that cannot join again, too."""
    nodes = Nodes(tmp_path, "1:2", "whole", node_timeout=1.0, grow_every=3.0, max_failures="1")
    host, leaves = nodes.start(HOST), nodes.start("last")
    host.wait_until(lambda: 2 in [ranks for ranks, _ in begun(host)])
    host.wait_until_step(STEPS)
    os.kill(leaves.pid, signal.SIGTERM)
    left = leaves.end()
    host.wait_until(lambda: [each for each, _ in begun(host)][-1:] == [1])
    nodes.end()
    ended = host.end()
    assert (left.code, ended.code) == (128 + signal.SIGTERM, 0), ended
    assert begun(host)[-1][1] % STEPS
    assert ended.sentences()[-1] == "going on with 1 of 2 nodes, 1 rank"


def test_a_range_needs_a_place_to_meet_again(tmp_path: Path) -> None:
    """Nodes with fixed numbers meet once."""
    job = Job(tmp_path / "job", 1, 5, torchrun=["--nnodes", "1:2", "--node-rank", "0", "--master-addr", "127.0.0.1"])
    _, status = os.waitpid(job.pid, 0)
    assert status != 0
    assert "--rdzv-endpoint HOST:PORT instead of --node-rank" in job.output


def test_a_meeting_waits_for_nobody_but_those_that_are_known() -> None:
    """In a process of its own, since torch's store has threads, which do not survive a fork."""
    pid = os.fork()
    if pid == 0:
        exit_after(meet)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def meet() -> None:
    """Two of three had been there, and meet again at once. One without a sign of life for 2 s finds that the other went on."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    limit = RendezvousTimeout(last_call=timedelta(seconds=LIMIT_SECONDS))
    handlers = []
    for _ in range(2):
        own = TCPStore("127.0.0.1", store.port, is_master=False)
        backend = C10dRendezvousBackend(own, "x")
        handlers.append(DynamicRendezvousHandler.from_backend("x", own, backend, 1, 3, "127.0.0.1", limit, 1, 2))
    ranges = [NodeRange(handler, 0.0) for handler in handlers]
    for each in ranges:
        each.expect(2)
    began = time.monotonic()
    with ThreadPoolExecutor(2) as pool:
        met = list(pool.map(lambda handler: handler.next_rendezvous(), handlers))
    assert {(each.rank, each.world_size) for each in met} == {(0, 2), (1, 2)}
    assert [each.met(None, 2, 2) for each in ranges] == ["going on with 2 of 3 nodes, 2 ranks"] * 2
    assert handlers[1].num_nodes_waiting() == 0
    assert [each.look(lets_in=True) for each in ranges] == ["", ""]
    handlers[1]._stop_heartbeats()
    ranges[0].expect(1)
    assert handlers[0].next_rendezvous().world_size == 1
    assert time.monotonic() < began + LIMIT_SECONDS / 2
    while ranges[1].look(lets_in=True) != "other nodes have met without this one":
        assert time.monotonic() < began + LIMIT_SECONDS / 2
        time.sleep(0.1)
    ranges[0].met(2, 1, 1)
    assert ranges[0].look(lets_in=True) == ""
    assert ranges[0].after_loss(2) == ""
    ranges[0].gone = "node 1"
    assert ranges[0].after_loss(2) == f" with 1 of 3 nodes, in {LIMIT_SECONDS:g} s unless it returns"
    assert ranges[0].after_loss(1) == " when it returns: 0 of 3 nodes left, and `--nnodes` asks for 1"
