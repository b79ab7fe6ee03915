"""Faults that users inject: each does to real processes what it says, and the run still ends in the same bits."""

from __future__ import annotations

import os
import re
import signal
import threading
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest

from campaign._campaign import Campaigns
from campaign._faults import Breaking, lines_of, memory_of, record_of
from campaign._training import Checkpointing
from campaign._warm import WarmParents
from lightning_moe_ckpt.testing import AttemptResult, Fault, RandomFaults, fail_at, summarize_faults
from lightning_moe_ckpt.testing._fault import FaultKind, FaultPhase
from lightning_moe_ckpt.testing._fault_injector import stop

SPARSE = Checkpointing(policy="sparse", window=2)
DENSE = Checkpointing(policy="dense", keep=3)
PATIENCE = 60.0
"""Seconds for what storage has been given; not how long a test should take."""


def strikes(lives: list[AttemptResult]) -> list[tuple[int, str, int, str]]:
    """Rank, kind, step and phase of what happened, in order of time."""
    faults = lines_of(lives[0].workdir, "fault")
    return [(line["rank"], line["kind"], line["step"], line["phase"]) for line in faults]


def wait_for_storage(step: int, phase: FaultPhase = "batch_start") -> Fault:
    """A stop that harms nothing, before which storage has got all that it was given."""
    return fail_at(0, step, phase, kind="sigstop", seconds=0.01, settle=PATIENCE)


# -- processes


def test_a_script_strikes_every_phase_at_its_step(campaigns: Campaigns) -> None:
    """A process that stands still for a moment wherever there is a name for it goes on as if nothing had been."""
    places = dict.fromkeys(get_args(FaultPhase), 4) | {"epoch_end": 5, "epoch_start": 5}
    stops = [fail_at(0, step, phase, kind="sigstop", seconds=0.01) for phase, step in places.items()]
    # So that storage is idle whenever a window begins: it takes each, and deletes the one of step 4 after that of 8.
    waits = [wait_for_storage(step, phase="after_backward") for step in (2, 4, 6, 8)]
    (life,) = campaigns.check_faults(Breaking(checkpointing=SPARSE, faults=(*stops, *waits)))
    struck = [(phase, step) for _, _, step, phase in strikes([life])]
    assert sorted(struck) == sorted([*places.items(), *(("after_backward", step) for step in (2, 4, 6, 8))])


@pytest.mark.parametrize("world_size", [1, pytest.param(3, marks=pytest.mark.soak)])
def test_scripted_kills_strike_once_each(campaigns: Campaigns, world_size: int) -> None:
    """By SIGKILL; the next life finds in the record what has struck already, whichever rank it was."""
    last = world_size - 1
    faults = (fail_at(last, 3, "forward"), fail_at(0, 7, "seal"), fail_at("all", 9, "after_backward"))
    setup = Breaking(world_size=world_size, checkpointing=SPARSE, faults=faults)
    lives = campaigns.check_faults(setup)
    assert lives[0].exit_codes[last] == -signal.SIGKILL
    assert [life.outcome for life in lives] == ["killed"] * 3 + ["finished"]
    places = dict.fromkeys((kind, step, phase) for _, kind, step, phase in strikes(lives))
    assert list(places) == [("sigkill", 3, "forward"), ("sigkill", 7, "seal"), ("sigkill", 9, "after_backward")]
    assert "fault injected at step 3, forward: `Fault(" in lives[0].log(last)


def _stop_and_watch() -> list[str]:
    """What the parent of a process sees that stops itself for a while."""
    wait, seen_all = os.pipe()
    pid = os.fork()
    if pid == 0:
        stop(0.05)
        os.read(wait, 1)
        os._exit(0)
    seen = []
    for expected in ("WIFSTOPPED", "WIFCONTINUED"):
        _, status = os.waitpid(pid, os.WUNTRACED | os.WCONTINUED)
        seen.append(expected if getattr(os, expected)(status) else str(status))
    os.write(seen_all, b"!")
    _, status = os.waitpid(pid, 0)
    return [*seen, f"ended with {os.waitstatus_to_exitcode(status)}"]


def test_a_stopped_process_stands_still_and_goes_on(warm: WarmParents) -> None:
    """By SIGSTOP, and SIGCONT from a process of its own."""
    assert warm.call(_stop_and_watch, patience=PATIENCE) == ["WIFSTOPPED", "WIFCONTINUED", "ended with 0"]


def _stop_often() -> None:
    for _ in range(8):
        stop(0.001)


def _stop_in_all_threads() -> int:
    pid = os.fork()
    if pid == 0:
        threads = [threading.Thread(target=_stop_often) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_threads_that_stop_their_process_at_once_do_not_stop_it_for_good(warm: WarmParents) -> None:
    """Training and storage reach places of faults at the same time: each SIGCONT comes after the SIGSTOP it is for."""
    assert warm.call(_stop_in_all_threads, patience=PATIENCE) == 0


def test_a_rank_that_stands_still_holds_up_the_others_only(campaigns: Campaigns) -> None:
    """Three ranks wait for one, and nothing is lost."""
    stopped = fail_at(1, 4, "before_optimizer_step", kind="sigstop", seconds=0.3)
    (life,) = campaigns.check_faults(Breaking(world_size=3, checkpointing=SPARSE, faults=(stopped,)))
    (fault,) = lines_of(life.workdir, "fault")
    after = [line for line in lines_of(life.workdir, "step") if line["step"] == 6]
    assert len(after) == 3
    assert all(line["time"] - fault["time"] >= 0.3 for line in after)


# -- nodes


FOUR = Breaking(world_size=4, checkpointing=SPARSE)


def test_a_lost_node_takes_its_processes_and_its_memory(campaigns: Campaigns) -> None:
    """And nothing else: not the other node's, not that of another run."""
    setup = replace(FOUR, nodes=(0, 0, 1, 1), faults=(fail_at(3, 5, kind="node_loss"),))
    lives = campaigns.check_faults(setup, plant=["moe-ckpt-0-another-2.ring"])
    workdir = lives[0].workdir
    joined = {line["rank"]: line for line in lines_of(workdir, "join")[:4]}
    (removed,) = lines_of(workdir, "removed")
    assert set(removed["processes"]) == {joined[2]["pid"], joined[3]["pid"]}
    names = [Path(path).name for path in removed["files"]]
    assert {Path(path).parent for path in removed["files"]} == {memory_of(workdir, 1)}
    assert {name.split(".")[0].split("-")[-1] for name in names if ".ring" in name} == {"2", "3"}
    for node in (0, 1):
        assert (memory_of(workdir, node) / "moe-ckpt-0-another-2.ring").exists()
    assert strikes(lives) == [(2, "node_loss", 5, "batch_start")], "the first rank of the node ends it"
    assert [life.outcome for life in lives] == ["killed", "finished"]


@pytest.mark.soak
def test_a_lost_rack_takes_all_its_nodes_at_once(campaigns: Campaigns) -> None:
    """Two nodes of three; each is ended by a process of its own, and none before both have lost their memory."""
    setup = replace(
        FOUR, nodes=(0, 1, 1, 2), racks=("a", "a", "a", "b"), faults=(fail_at(2, 5, "batch_end", kind="rack_loss"),)
    )
    lives = campaigns.check_faults(setup)
    workdir = lives[0].workdir
    removed = lines_of(workdir, "removed")
    joined = {line["rank"]: line["pid"] for line in lines_of(workdir, "join")[:4]}
    assert sorted(sorted(line["processes"]) for line in removed) == sorted(
        [[joined[0]], sorted([joined[1], joined[2]])]
    )
    assert {Path(path).parent for line in removed for path in line["files"]} == {memory_of(workdir, n) for n in (0, 1)}
    assert [life.outcome for life in lives] == ["killed", "finished"]
    later = [line for line in lines_of(workdir, "start") if line["time"] > removed[0]["time"]]
    assert min(line["time"] for line in later) > max(line["time"] for line in removed)


# -- storage


def test_slow_and_failing_storage_holds_up_checkpoints_not_training(campaigns: Campaigns) -> None:
    """Calls are delayed and failed, and counted; training meets nothing of it."""
    # Idle at step 3, storage gets the generation of step 4 after that, and has got it at the batch of step 6.
    faults = (
        fail_at(0, 2, kind="slow_storage", latency=0.02, bandwidth=1e8, steps=4),
        fail_at(0, 3, kind="storage_errors", probability=0.4, steps=4, settle=PATIENCE),
        wait_for_storage(5),
    )
    (life,) = campaigns.check_faults(Breaking(checkpointing=SPARSE, faults=faults))
    over = {line["name"].split()[2]: line for line in lines_of(life.workdir, "over")}
    assert over["slow_storage"]["step"] == 6
    assert over["storage_errors"]["step"] == 7
    assert all(line["calls"] > 0 for line in over.values())
    assert "(injected). Trying again" in life.log()


def test_a_full_disk_is_reported_and_training_goes_on(campaigns: Campaigns) -> None:
    """Older generations stay; when there is room again, checkpoints go on and the next life resumes from one of them."""
    faults = (
        fail_at(0, 3, kind="full_disk", steps=4, settle=PATIENCE),
        wait_for_storage(6),
        fail_at(0, 9, "after_batch_end", settle=PATIENCE),
    )
    lives = campaigns.check_faults(Breaking(checkpointing=DENSE, faults=faults))
    assert "No space left on device" in lives[0].log()
    (over,) = lines_of(lives[0].workdir, "over")
    assert over["step"] == 7
    assert over["calls"] > 0
    assert lives[1].steps()[0] > 4, lives[1].log()


def test_taken_memory_is_given_back(campaigns: Campaigns) -> None:
    """For as long as the fault lasts, and no longer."""
    fault = fail_at(0, 3, kind="full_shared_memory", nbytes=2**20, steps=2)
    (life,) = campaigns.check_faults(Breaking(checkpointing=SPARSE, faults=(fault,)))
    assert "1048576 bytes of" in life.log()
    assert [line["step"] for line in lines_of(life.workdir, "over")] == [5]


FLIP = fail_at(0, 6, "after_batch_end", kind="bit_flip", settle=PATIENCE)
FLIP_IN_RING = replace(FLIP, at_rest="ring")


def _flip_and_die(
    campaigns: Campaigns, flips: tuple[Fault, ...], end: FaultKind, checkpointing: Checkpointing = DENSE
) -> tuple[list[int], AttemptResult]:
    """Steps of the generations that were damaged, and the life that had to do without."""
    faults = (*flips, fail_at(0, 6, "after_batch_end", kind=end))
    setup = Breaking(checkpointing=checkpointing, nodes=(0,), faults=faults)
    _, second = campaigns.check_faults(setup)
    struck = lines_of(second.workdir, "struck")
    assert len(struck) == len(flips)
    return [int(line["outcome"].split("in step ")[1].split()[0]) for line in struck], second


def test_a_bit_flipped_in_memory_is_found_and_storage_has_the_record(campaigns: Campaigns) -> None:
    """The restart names what it passed over, and loses nothing by it."""
    seldom = replace(DENSE, every_n_steps=3)  # so that storage skips none
    (damaged,), second = _flip_and_die(campaigns, (FLIP_IN_RING,), "sigkill", seldom)
    assert second.steps()[0] == damaged + 1, second.log()
    assert "host: snap/" in second.log()
    assert "another copy is tried" in second.log()
    assert " from storage" in second.log()


def test_a_bit_flipped_in_storage_is_found_where_memory_is_lost(campaigns: Campaigns) -> None:
    """With nothing else to take the record from, an older generation is taken, and the log says why."""
    (damaged,), second = _flip_and_die(campaigns, (FLIP,), "node_loss")
    assert f"step {damaged} (incarnation 1)" in second.log()
    assert second.steps()[0] <= damaged, second.log()
    assert re.search(r"WARNING:.* is resumed from, an older generation, since newer ones cannot", second.log())


def test_a_record_that_is_bad_everywhere_costs_its_generation_only(campaigns: Campaigns) -> None:
    """In memory and in storage, in bits that need not be of the same record: whatever is left, the end is the same."""
    damaged, second = _flip_and_die(campaigns, (FLIP_IN_RING, FLIP), "sigkill")
    assert second.steps()[0] <= max(damaged) + 1, second.log()
    assert "another copy is tried" in second.log()


# -- campaigns


def test_the_same_seed_gives_the_same_campaign(campaigns: Campaigns, capsys: pytest.CaptureFixture[str]) -> None:
    """A random campaign by steps dies where its seed says before it runs; another seed gives another one."""
    random = RandomFaults(mtbf=2.5, unit="steps", seed=1, kinds=[Fault(), Fault(kind="sigstop", seconds=0.02)], most=3)
    setup = Breaking(world_size=3, checkpointing=SPARSE, random=random)
    lives = campaigns.check_faults(setup)
    drawn = [(each.fault.rank, each.fault.kind, each.fault.step, each.fault.phase) for each in random.draw(3)]
    assert sorted(strikes(lives)) == sorted(drawn)
    other = replace(random, seed=2)
    assert drawn != [(each.fault.rank, each.fault.kind, each.fault.step, each.fault.phase) for each in other.draw(3)]

    summary = summarize_faults(record_of(lives[0].workdir))
    deaths = sum(life.outcome == "killed" for life in lives)
    assert (summary.lives, summary.finished, summary.steps, summary.injected) == (deaths + 1, True, setup.steps, 3)
    lost = sum(len(life.steps()) for life in lives) - setup.steps
    # Rank 0 may be killed, because another was, after it has noted a step and before the harness does.
    assert lost <= summary.steps_lost <= lost + deaths
    (kills,) = (tally for tally in summary.kinds if tally.kind == "sigkill")
    assert (kills.deaths, kills.survived) == (deaths, deaths)
    assert 0.0 < summary.ettr < 1.0


def test_faults_at_random_moments(campaigns: Campaigns) -> None:
    """With a mean time between failures in seconds of training; each strikes once, until there are no more."""
    random = RandomFaults(mtbf=0.06, seed=2, most=3)
    lives = campaigns.check_faults(Breaking(world_size=2, checkpointing=SPARSE, epochs=5, random=random))
    faults = lines_of(lives[0].workdir, "fault")
    assert sorted(line["name"] for line in faults) == [f"random 2:{index}" for index in range(3)]
    assert {line["phase"] for line in faults} == {"any_time"}
    assert 2 <= len(lives) <= 4, "two that are close to each other may end one life"
