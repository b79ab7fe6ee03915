"""What follows from a failure: killed is replaced, what comes again is a bug, and too many are too many."""

from __future__ import annotations

import signal
import socket
from types import SimpleNamespace
from typing import Any, cast

import pytest

from lightning_moe_ckpt.errors import ConfigurationError
from lightning_moe_ckpt.launch import run_command
from lightning_moe_ckpt.launch._job_log import FailureRate, Judge, Sequel, describe_exit
from lightning_moe_ckpt.launch._supervised import Supervised, encode

KILLED, ERROR = -signal.SIGKILL, 1


def judge(*ends: tuple[int, bool, int]) -> list[Sequel]:
    """Return what follows from (exit code, whether others recover, step) one after another."""
    one = Judge(FailureRate(100))
    return [one.judge(code, formed=True, recovering=recovering, step=step) for code, recovering, step in ends]


def test_a_killed_process_is_replaced_however_often() -> None:
    """The rate bounds that, nothing else."""
    assert judge(*[(KILLED, each, 5) for each in (False, True, True, False)]) == ["replace"] * 4


def test_an_error_that_comes_again_without_a_new_step_is_a_bug() -> None:
    """Replaced, started anew, given up; a step in between begins the count anew."""
    assert judge((ERROR, False, 5), (ERROR, False, 5), (ERROR, False, 5)) == ["replace", "restart", "over"]
    assert judge((ERROR, False, 5), (ERROR, False, 5), (ERROR, False, 6)) == ["replace", "restart", "replace"]


def test_a_bug_of_all_ranks_is_not_replaced_by_every_one_of_them() -> None:
    """The second comes while the first is replaced."""
    assert judge((ERROR, False, 5), (ERROR, True, 5), (ERROR, False, 5)) == ["replace", "restart", "over"]


def test_a_script_that_knows_nothing_of_recovery_is_started_anew_after_every_kill() -> None:
    """Its ranks leave when a peer is gone, and tell no steps."""
    kill = [(KILLED, False, -1), (ERROR, True, -1)]
    assert judge(*kill, *kill, *kill) == ["replace", "restart"] * 3


def test_before_ranks_have_come_together_an_error_ends_the_job() -> None:
    """But not if it follows from the death of another."""
    assert Judge(FailureRate(100)).judge(ERROR, formed=False, recovering=False, step=-1) == "over"
    assert Judge(FailureRate(100)).judge(ERROR, formed=False, recovering=True, step=-1) == "restart"


@pytest.mark.parametrize("code", [-signal.SIGTERM, 128 + signal.SIGTERM])
def test_a_rank_that_was_asked_to_stop_stops_all(code: int) -> None:
    """They agree on that and save, so none is replaced."""
    assert judge((code, False, 5)) == ["restart"]


def test_failures_are_counted_within_their_time() -> None:
    """The third within an hour is one too many; an hour later it is not."""
    rate = FailureRate.parse("2 per 1h")
    assert [Judge(rate).count(0.0)] == [False]
    one = Judge(rate)
    assert [one.count(now) for now in (0.0, 10.0, 20.0)] == [False, False, True]
    one = Judge(rate)
    assert [one.count(now) for now in (0.0, 10.0, 3605.0, 3606.0)] == [False, False, False, True]


@pytest.mark.parametrize(
    ("text", "most", "seconds"),
    [
        ("10 per 1h", 10, 3600),
        ("3 per 10min", 3, 600),
        ("5 per s", 5, 1),
        ("0", 0, float("inf")),
        ("7 per 2 d", 7, 172800),
    ],
)
def test_a_rate_is_read_as_written(text: str, most: int, seconds: float) -> None:
    """A number, or a number per time."""
    rate = FailureRate.parse(text)
    assert (rate.most, rate.seconds) == (most, seconds)


@pytest.mark.parametrize("text", ["", "ten", "10 per", "10 per week", "10 per 0h", "-1", "1 per 0.5h"])
def test_what_is_no_rate_is_refused(text: str) -> None:
    """With what was written."""
    with pytest.raises(ConfigurationError, match="--max-failures"):
        FailureRate.parse(text)


def test_an_end_is_described_in_words() -> None:
    """Signals by name, also those without one."""
    assert describe_exit(3) == "left with status 3"
    assert describe_exit(-9) == "was killed by SIGKILL"
    assert describe_exit(-40) == "was killed by signal 40"


def test_a_supervisor_that_has_ended_is_told_nothing() -> None:
    """A rank that finds a later start says that, whether or not its supervisor is still there."""
    own, supervisor = socket.socketpair()
    rank: Any = SimpleNamespace(failed=False, _connection=own)
    with own:
        with supervisor:
            Supervised.end_job(rank, "is first")
            assert supervisor.recv(100) == encode({"over": "is first"})
        Supervised.end_job(rank, "is second")


@pytest.mark.parametrize("endpoint", ["node7", "node7:29400", "[fe80::7]:29400", "[fe80::7]"])
def test_an_endpoint_has_a_host_without_a_port_too(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """This node's address is the one towards it."""
    asked: list[str] = []

    def towards(host: str) -> tuple[str, str]:
        asked.append(host)
        return "", ""

    monkeypatch.setattr(run_command, "address_towards", towards)
    run_command._own_address(cast(Any, SimpleNamespace(rdzv_endpoint=endpoint, local_addr=None)))
    assert asked == ["fe80::7" if "[" in endpoint else "node7"]
