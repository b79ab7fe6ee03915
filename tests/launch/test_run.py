"""`moe-ckpt run` keeps a job running: only the dead are replaced, and nothing is left behind. All kills are real."""

from __future__ import annotations

import os
import random
import re
import resource
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
from door import free_port
from launcher import exit_after

from launch._jobs import LIMIT_SECONDS, Ended, Job
from lightning_moe_ckpt.launch import Supervised, _spares, _supervised
from lightning_moe_ckpt.launch._members import NodeEvent, Switchboard
from lightning_moe_ckpt.launch._supervised import Heartbeat, RankFailure, address_of, encode

BEFORE_ARRIVING, BEFORE_JOINING, BEHIND_THE_END = -1, -2, -3
"""Steps of events, as the script knows them."""


def check(job: Job, replaced: dict[int, int], *, code: int = 0) -> Ended:
    """The job ends well, its sums are right, and every rank had as many processes as were replaced, and one."""
    ended = job.end()
    assert ended.code == code, ended.output
    total = sum(range(job.steps)) * job.ranks * (job.ranks + 1) // 2
    assert ended.totals() == dict.fromkeys(range(job.ranks), total), ended.output
    processes = {rank: len(ended.pids(rank)) for rank in range(job.ranks)}
    assert processes == {rank: 1 + replaced.get(rank, 0) for rank in range(job.ranks)}, ended.output
    return ended


def test_only_the_dead_is_replaced(tmp_path: Path) -> None:
    """SIGKILL of rank 0 between two collectives of gloo: the other raises in its own, stays, and meets the new one."""
    ended = check(Job(tmp_path / "job", 2, 40, "gloo", "kill:0:20:0"), {0: 1})
    first, new = ended.pids(0)
    sentence = f"rank 0 (pid {first}) was killed by SIGKILL; pid {new} takes its place, incarnation 1"
    assert sentence in ended.sentences()


@pytest.mark.soak
def test_a_survivor_that_joins_gloo_is_not_held_by_one_that_dies_there(tmp_path: Path) -> None:
    """It waits for the address of the dead one in the store, and the abort reaches it."""
    check(Job(tmp_path / "job", 3, 60, "gloo", "kill:0:30:0", f"kill:0:{BEFORE_JOINING}:1"), {0: 2})


def test_a_spare_takes_the_place(tmp_path: Path) -> None:
    """It waits where the script asks for its rank; when it is used up, another one comes. All write to the file of the rank.

    Two die in one step and there is one spare: the other one gets a new process. All are interpreters of their own.
    """
    files = ["--log-dir", str(tmp_path / "logs"), "--tee", "0:1", "--redirects", "1:1"]
    events = ("kill:0:40:0", "kill:2:40:0", "kill:0:240:2")
    ended = Job(tmp_path / "job", 3, 260, *events, spares=1, torchrun=files, forks=False).end()
    assert sorted("a spare" in sentence for sentence in ended.sentences() if "SIGKILL" in sentence) == [
        False,
        True,
        True,
    ]
    assert [len(ended.pids(rank)) for rank in range(3)] == [3, 0, 2]
    assert ended.totals() == dict.fromkeys((0, 2), sum(range(260)) * 6)
    written = [path.read_text() for path in sorted((tmp_path / "logs").glob("*/attempt_0/*/stdout.log"))]
    assert [text.count("begins") for text in written] == [3, 1]
    assert f"total {sum(range(260)) * 6}\n" in written[0]


def test_one_failure_after_another(tmp_path: Path) -> None:
    """At the start, while ranks rejoin (before they have arrived, and when all have), and in the last collective.

    Ranks die, new ones and one that had survived, or leave with an exception; steps are passed between two exceptions.
    """
    events = [
        *(f"kill:0:{BEFORE_ARRIVING}:0", "kill:1:20:1", f"kill:1:{BEFORE_ARRIVING}:2", f"kill:1:{BEFORE_JOINING}:3"),
        *(f"kill:2:{BEFORE_JOINING}:4", "raise:1:30:5", "raise:0:40:6", "kill:1:60:7"),
    ]
    check(Job(tmp_path / "job", 3, 60, *events), {0: 2, 1: 5, 2: 1})


@pytest.mark.parametrize("stuck", [0, pytest.param(1, marks=pytest.mark.soak)])
def test_a_rank_that_hangs_is_ended(tmp_path: Path, stuck: int) -> None:
    """By SIGSTOP, or because its main thread waits for ever; the others wait for it, and are not taken for hung.

    One that is stuck between two steps is waited for as long as a recovery may take.
    """
    events = ["stop:1:20:0", "deadlock:0:30:1", *["stuck:2:40:3"] * stuck]
    job = Job(tmp_path / "job", 3, 60, *events, hang_timeout=0.8, recover_timeout=4.0)
    check(job, {0: 1, 1: 1, 2: stuck})


def test_ranks_call_an_incarnation_off(tmp_path: Path) -> None:
    """Two at the same moment end one of them; no process ends, and a third that waits for both is told."""
    events = ["off:0:20:0", "off:2:20:0", "kill:1:40:1", "off:1:50:2"]
    ended = check(Job(tmp_path / "job", 3, 60, *events), {1: 1})
    assert sum("calls it off" in sentence for sentence in ended.sentences()) == 2


def test_a_rank_at_fault_gives_way_to_a_process_on_an_idle_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While there is one; the other rank stays where it is, and so does its device."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    events = ["faulty:1:20:0", "kill:0:30:1", "where:0:35:2", "where:1:35:2"]
    ended = check(Job(tmp_path / "job", 2, 60, *events), {0: 1, 1: 1})
    first, new = ended.pids(1)
    aside = "device 5 is set aside, device 6 takes its place"
    said = f"rank 1 (pid {first}) is at fault, and was ended; {aside}; pid {new} takes its place, incarnation 1"
    assert said in ended.sentences()
    assert sorted(set(re.findall(r"^\[\d\] sees .*$", ended.output, re.MULTILINE))) == ["[0] sees 4,6", "[1] sees 4,6"]


def test_a_rank_that_is_at_fault_again_ends_the_job(tmp_path: Path) -> None:
    """No clean audit is in between: replacing it has not helped."""
    ended = Job(tmp_path / "job", 2, 60, "faulty:1:20:0", "faulty:1:20:1").end()
    assert ended.code != 0
    first, new = ended.pids(1)
    assert f"(pid {first}) is at fault, and was ended; pid {new} takes" in ended.output
    assert "rank 1 is at fault, as the process before it at the same place; the job is given up" in ended.sentences()


def test_an_aborted_step_is_no_measure_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """It took as long as a hang was not found; the next one would be found after five times that."""
    heartbeat = Heartbeat()
    for now, move in ((1.0, heartbeat.beat), (2.0, heartbeat.beat), (50.0, None), (60.0, heartbeat.beat)):
        monkeypatch.setattr(time, "monotonic", lambda now=now: now)
        heartbeat.pause(aborted=True) if move is None else move(1)
    assert heartbeat.read().longest == 1.0
    heartbeat.close()


class Told(Supervised):
    """Lives on when nobody tells it anything any more."""

    def _listen(self) -> None:
        for message in self._messages:
            self._take(message)


@pytest.mark.parametrize(
    ("gone", "seconds", "confirms"),
    [(1, 3600.0, False), (2, 3600.0, True), (2, 0.0, False)],
    ids=["own", "asks", "late"],
)
def test_collectives_outlast_a_failure_elsewhere(
    monkeypatch: pytest.MonkeyPatch, gone: int, seconds: float, confirms: bool
) -> None:
    """Until their rank hears of it, or too much time has passed; that of a rank that they need ends them at once."""
    monkeypatch.setattr(_supervised, "_OUTLAST_SECONDS", seconds)
    ours, theirs = socket.socketpair()
    theirs.sendall(encode({"place": {}, "noticed": 0.0, "incarnation": 0, "replacement": False}))
    heartbeat, aborted = Heartbeat(), threading.Event()
    supervised = Told(ours, heartbeat)
    supervised.watch(aborted.set, lambda rank: rank == 2)
    assert supervised.confirm(0.0) is None
    theirs.sendall(encode({"failed": 0, "rank": gone, "why": "was killed", "at": 1.0}))
    while not supervised.failed:
        time.sleep(0.001)
    if confirms:
        assert not aborted.is_set()
        assert supervised.confirm(0.0) == RankFailure(0, gone, "was killed")
    assert aborted.wait(LIMIT_SECONDS)
    theirs.close()
    ours.close()
    heartbeat.close()


def test_a_slow_step_is_no_hang(tmp_path: Path) -> None:
    """Nor is what a rank does between two steps, while others wait for it in theirs.

    The second slow step takes longer than the least silence, and less than five times the first.
    """
    events = ["slow:1:20:0", "silent:0:40:0", "busy:0:10:0"]
    ended = check(Job(tmp_path / "job", 2, 60, *events, hang_timeout=0.6), {})
    assert ended.sentences() == []


def test_a_spare_whose_script_does_not_wait_says_so(tmp_path: Path) -> None:
    """It reads RANK and fails; the job goes on without spares."""
    ended = check(Job(tmp_path / "job", 2, 200, "early", "kill:1:190:0", spares=1), {1: 1})
    told = [sentence for sentence in ended.sentences() if "--spare-at imports" in sentence]
    assert len(told) == 1
    assert "before it was needed" in told[0]


def test_a_script_behind_imports_finds_its_arguments_and_folder(tmp_path: Path) -> None:
    """As if it had been started; what Lightning prints on one rank only goes by the rank that it has by now."""
    (tmp_path / "beside.py").write_text("there = True")
    script, told = tmp_path / "script.py", tmp_path / "told"
    script.write_text(
        "import sys; from pathlib import Path; from lightning.fabric.utilities.rank_zero import rank_zero_only; import beside\n"
        "Path(sys.argv[1]).write_text(f'{sys.argv} {rank_zero_only.rank} {__name__}')"
    )

    def work() -> None:
        os.environ["RANK"] = "3"
        sys.argv = ["_spares", str(script), str(told)]
        _spares.main()

    pid = os.fork()
    if pid == 0:
        exit_after(work)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert told.read_text() == f"{[str(script), str(told)]} 3 __main__"


@pytest.mark.soak
def test_a_spare_can_wait_before_the_script(tmp_path: Path) -> None:
    """It has imported what takes long; the script then finds its rank, its arguments and its own folder to import from."""
    job = Job(tmp_path / "job", 2, 40, "early", "kill:1:20:0", spares=1, spare_at="imports", forks=False)
    ended = check(job, {1: 1})
    assert "a spare takes its place, incarnation 1" in ended.sentences()[0]
    assert ended.output.count("[1] rank 1 reads it before it waits") == 2


def test_one_rank_is_replaced_as_well(tmp_path: Path) -> None:
    """It has nobody to wait for, and goes on from its file, whether or not its script knows of supervisors."""
    check(Job(tmp_path / "job", 1, 40, "kill:0:20:0"), {0: 1})
    job = Job(tmp_path / "plain", 1, 150, "plain", recover_timeout=0.2)
    job.wait_until_step(20)
    os.kill(job.left()[0], signal.SIGKILL)
    ended = check(job, {0: 1})
    assert len(ended.sentences()) == 1, ended.output


@pytest.mark.soak
def test_more_failures_than_allowed_end_the_job(tmp_path: Path) -> None:
    """The second of one that is allowed: all are ended, and the sentence says why."""
    ended = Job(tmp_path / "job", 2, 60, "kill:1:20:0", "kill:0:40:1", max_failures="1 per 1h").end()
    assert ended.code == 1
    assert ended.sentences()[-1].endswith("was killed by SIGKILL; more than 1 per 1h failures; the job is given up")


def test_what_follows_from_a_failure_is_no_other_one(tmp_path: Path) -> None:
    """A rank that leaves with an error while it joins the others again: one failure, of one that is allowed."""
    job = Job(tmp_path / "job", 2, 60, "kill:1:20:0", f"raise:0:{BEFORE_JOINING}:1", max_failures="1")
    check(job, {0: 1, 1: 2})


def test_a_bug_ends_the_job_and_shows_its_traceback(tmp_path: Path) -> None:
    """Replaced once, started anew once, and given up: no step was passed meanwhile."""
    ended = Job(tmp_path / "job", 2, 60, "bug:30").end()
    assert ended.code == 1
    assert "ValueError: there is a bug in step 30" in ended.output
    assert len(ended.pids(0)) <= 3
    assert "given up" in ended.sentences()[-1]


@pytest.mark.soak
def test_a_script_that_fails_at_once_is_not_started_again(tmp_path: Path) -> None:
    """Before ranks have ever come together."""
    ended = Job(tmp_path / "job", 2, 60, f"bug:{BEFORE_ARRIVING}").end()
    assert ended.code == 1
    assert len(ended.pids(0) + ended.pids(1)) <= 2


def test_ranks_that_do_not_come_together_are_all_started_anew(tmp_path: Path) -> None:
    """A new process does not arrive in time: everybody begins again, and goes on from its file."""
    job = Job(tmp_path / "job", 2, 60, "kill:1:30:0", f"deadlock:1:{BEFORE_ARRIVING}:1", recover_timeout=1.0)
    ended = check(job, {0: 1, 1: 2})
    assert "ranks did not come together within 1 s; all ranks are started anew" in ended.sentences()


def test_who_dies_behind_the_end_is_not_replaced_alone(tmp_path: Path) -> None:
    """Others have left with 0, and nobody could join it: all are started anew, as often as `--max-restarts` allows."""
    script = [f"late:0:{BEHIND_THE_END}:{incarnation}" for incarnation in range(2)]
    ended = Job(tmp_path / "job", 2, 20, *script, torchrun=["--max-restarts", "1"]).end()
    assert ended.code == 1
    first, second = ended.sentences()
    assert first.endswith("was killed by SIGKILL after others had finished; all ranks are started anew")
    assert second.endswith("all ranks were started 2 times, `--max-restarts 1` allows no more; the job is given up")
    assert [len(ended.pids(rank)) for rank in range(2)] == [2, 2]


def test_a_death_that_is_told_late_is_no_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A look between a death and its event finds nobody who runs; under load that is what happens."""
    tell = Switchboard._wait

    def tell_late(board: Switchboard, pid: int) -> None:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        time.sleep(0.3)
        tell(board, pid)

    monkeypatch.setattr(Switchboard, "_wait", tell_late)
    ended = check(Job(tmp_path / "job", 1, 40, "kill:0:20:0"), {0: 1})
    first, new = ended.pids(0)
    death = f"rank 0 (pid {first}) was killed by SIGKILL; pid {new} takes its place, incarnation 1"
    assert ended.sentences() == [death, "incarnation 1 has come together"]


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), pytest.param(signal.SIGINT, 130, marks=pytest.mark.soak)]
)
def test_a_signal_ends_all(tmp_path: Path, number: signal.Signals, code: int) -> None:
    """It goes to all ranks; spares and stopped ranks end, too."""
    job = Job(tmp_path / "job", 2, 10**6, spares=1, torchrun=["--shutdown-timeout", "5"])
    job.wait_until_step(20)
    os.kill(job.pid, number)
    assert job.end().code == code


def test_a_script_without_recovery_is_started_anew(tmp_path: Path) -> None:
    """It knows nothing of supervisors: its ranks leave when a peer is gone, as under torchrun.

    They notice it after a second, in which a replacement dies as often as a machine is fast.
    """
    ended = Job(tmp_path / "job", 2, 40, "plain", "kill:1:20:0", max_failures="1000").end()
    assert ended.code == 0, ended.output
    assert ended.totals() == dict.fromkeys(range(2), sum(range(40)) * 3)
    assert "all ranks are started anew" in ended.sentences()[-1]


def test_ranks_that_cannot_join_again_are_started_anew_at_once(tmp_path: Path) -> None:
    """They have said so: no process takes the place of the dead alone, and nobody waits for the others to notice."""
    ended = Job(tmp_path / "job", 2, 40, "whole", "kill:1:20:0", "stop:0:30:1", hang_timeout=1.0).end()
    assert ended.code == 0, ended.output
    assert ended.totals() == dict.fromkeys(range(2), sum(range(40)) * 3)
    assert [len(ended.pids(rank)) for rank in range(2)] == [3, 3]
    first, *deaths = ended.sentences()
    assert first == "if a rank fails, all ranks are started anew: it keeps its groups"
    killed, stopped = (re.sub(r".*pid \d+\) ", "", each) for each in deaths)
    assert killed == "was killed by SIGKILL; all ranks are started anew"
    # Whether the supervisor or the other rank notices first is a matter of load.
    assert re.fullmatch(r"(was stopped for \d+ s, and ended|left with status 1); all ranks are started anew", stopped)


@pytest.mark.soak
def test_a_bug_of_ranks_that_cannot_join_again_ends_the_job(tmp_path: Path) -> None:
    """Tests of the verdict and of each of both say the same. They are started anew twice: it may have been the machine. Then no step has been passed."""
    ended = Job(tmp_path / "job", 2, 60, "whole", "bug:30").end()
    assert ended.code == 1
    assert [len(ended.pids(rank)) for rank in range(2)] == [3, 3]
    assert "given up" in ended.sentences()[-1]


def test_ranks_end_when_their_supervisor_is_killed(tmp_path: Path) -> None:
    """Nobody would end them otherwise; so do spares, and a rank that does not stop when it is asked to."""
    job = Job(tmp_path / "job", 2, 10**6, "deaf:0:10:0", spares=1)
    job.wait_until_step(20)
    os.kill(job.pid, signal.SIGKILL)
    os.waitpid(job.pid, 0)
    give_up = time.monotonic() + LIMIT_SECONDS
    while job.left():
        assert time.monotonic() < give_up
        time.sleep(0.01)


def test_two_nodes_replace_the_dead_of_one(tmp_path: Path) -> None:
    """Each has its supervisor; the one that had no failure tells its ranks, too.

    A node whose supervisor is killed is waited for, and takes part again when it is back. So does one that was asked to
    leave, as by a scheduler that wants its machine: it says goodbye, and nobody has to notice.
    """
    port = free_port()
    meeting = ["--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "two", "--local-addr", "127.0.0.1"]
    events = ("kill:1:20:0", "kill:2:40:1", "slow:0:60:2", "slow:2:60:2", "slow:0:90:3", "slow:2:90:3")

    def node(name: str) -> Job:
        # On one machine any node could be the one at which nodes meet, and that one must not be lost.
        own = [*meeting, "--rdzv-conf", f"keep_alive_interval=1,keep_alive_max_attempt=2,is_host={name == 'console0'}"]
        return Job(tmp_path / "job", 2, 200, *events, torchrun=own, name=name)

    first, lost = node("console0"), node("console1")
    first.wait_until_step(60)
    os.kill(lost.pid, signal.SIGKILL)
    os.waitpid(lost.pid, 0)
    first.wait_until(lambda: " to come back" in first.output)
    asked = node("console2")
    first.wait_until_step(90)
    os.kill(asked.pid, signal.SIGTERM)
    left = asked.end()
    assert left.code == 128 + signal.SIGTERM
    first.wait_until(lambda: first.output.count("all ranks are started anew") == 2)
    back = node("console3")
    ended = [first.end(), back.end()]
    assert [each.code for each in ended] == [0, 0], "\n".join(each.output for each in ended)
    found = Ended(0, "".join([lost.output, left.output, *(each.output for each in ended)]))
    assert found.totals() == dict.fromkeys(range(4), sum(range(200)) * 10)
    assert sum(len(found.pids(rank)) for rank in range(4)) == 4 + 2 + 4 + 4
    said = ended[0].sentences()
    assert [
        each for each in said if re.fullmatch(r"node \d \(.*\) is gone: .* for 2 s; all ranks are started anew", each)
    ]
    assert [each for each in said if re.fullmatch(r"waiting for node \d \(.*\) to come back", each)]


def test_who_connects_while_there_is_no_descriptor_waits_for_one() -> None:
    """The supervisor goes on listening."""
    board, limits = Switchboard(), resource.getrlimit(resource.RLIMIT_NOFILE)
    gate, opened = os.pipe()
    children, came = [], list[NodeEvent]()
    for _ in range(2):
        children.append(os.fork())
        if children[-1] == 0:
            exit_after(lambda: _connect(board.name, gate, opened))
    try:
        lowest = os.dup(gate)
        os.close(lowest)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, limits[1]))
        os.close(opened)
        found = [board.take(0.3) for _ in range(3)]
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        found += [board.take(10.0) for _ in range(2 - sum(each is not None for each in found))]
        came = [each for each in found if each is not None]
        assert None in found, "there were descriptors"
        assert {pid for _, pid, _ in came} == set(children)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for _, _, connection in came:
            connection.close()
        board.close()
        os.close(gate)
        for pid in children:
            os.waitpid(pid, 0)


def _connect(name: str, gate: int, opened: int) -> None:
    """Connect when the gate is closed, and wait until the other side is."""
    os.close(opened)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        os.read(gate, 1)
        connection.connect(address_of(name))
        connection.recv(1)


@pytest.mark.parametrize(
    "options",
    [
        "--master-addr 127.0.0.1 --master-port {}",
        "--rdzv-endpoint 127.0.0.1:{} --rdzv-conf read_timeout=1",
        "--nnodes 2 --node-rank 1 --master-addr 127.0.0.1 --master-port {} --rdzv-conf timeout=1",
    ],
    ids=["first node", "any node", "second node"],
)
def test_a_port_that_somebody_else_has_ends_in_a_sentence(tmp_path: Path, options: str) -> None:
    """It is in use, or takes connections and says nothing, for which torch waits without end."""
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        torchrun = options.format(stranger.getsockname()[1]).split()
        job = Job(tmp_path / "job", 1, 5, torchrun=torchrun)
        _, status = os.waitpid(job.pid, 0)
    assert status != 0
    assert "give another port" in job.output, job.output


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(5))
def test_random_failures_from_outside(tmp_path: Path, seed: int) -> None:
    """Sixty SIGKILLs and SIGSTOPs of ranks and spares at random times, in the midst of recoveries too; one job."""
    draw = random.Random(seed)
    job = Job(tmp_path / "job", 4, 3000, spares=seed % 3, max_failures="1000", hang_timeout=1.0, recover_timeout=20.0)
    job.wait_until_step(5)
    for _ in range(60):
        time.sleep(draw.choice([0.0, 0.02, 0.1, 0.3, 0.8]) * 2 * draw.random())
        others = [pid for pid in job.left() if pid != job.pid]
        if not others:
            break
        with suppress(ProcessLookupError):
            os.kill(draw.choice(others), draw.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP]))
    ended = job.end()
    assert ended.code == 0, ended.output
    assert ended.totals() == dict.fromkeys(range(4), sum(range(3000)) * 10), ended.output
