"""Nodes that are lost, cut off, slow, or come back, in namespaces of their own: what is left goes on with the same bits.

Connections of a node that has lost its power or its cable are not reset. Every limit that is stated here is of the product.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

from apart._cluster import Cluster, Started, needs_namespaces
from apart._jobs import TRAINING, begun, copied_of, ended, step_of, supervised, unsupervised
from lightning_moe_ckpt.storage import RunView, open_backend

pytestmark = needs_namespaces
STEPS = 60


def undisturbed(folder: Path, steps: int) -> str:
    """Return the digest of the state with which two ranks end that nothing happens to."""
    with Cluster(folder / "undisturbed", 2) as cluster:
        (folder / "undisturbed" / "room").touch()
        ranks = unsupervised(cluster, folder / "undisturbed", steps, seconds=0.0)
        assert [rank.wait(60) for rank in ranks] == [0, 0], [rank.output for rank in ranks]
        (digest,) = {digest for rank in ranks for digest in ended(rank)}
    return digest


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> str:
    return undisturbed(tmp_path_factory.mktemp("apart"), STEPS)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path / "nodes", 2) as made:
        yield made


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "job").mkdir()
    return tmp_path / "job"


def commits(folder: Path) -> list[tuple[int, int]]:
    """Return (incarnation, step) of all that a restart could use, the newest first."""
    with closing(open_backend((folder / "run").as_uri())) as backend:
        found = [each for each in RunView.open(backend).generations() if each.usable]
        return [(each.generation.incarnation, each.generation.step) for each in found]


@pytest.mark.timeout(60)
def test_a_node_without_power_is_replaced_by_one_that_knows_nothing(
    tmp_path: Path, cluster: Cluster, folder: Path
) -> None:
    """Its state comes from its copy on the other node, which had it newer than storage; the bits are those of a run in peace."""
    steps = 14
    first = unsupervised(cluster, folder, steps)
    first[0].wait_until(lambda: min(copied_of(folder), copied_of(folder, 1)) > 7, 30)
    cluster.nodes[1].lose()
    os.kill(first[0].pid, signal.SIGTERM)  # it waits for a peer that says nothing
    first[0].wait(20)
    cluster.replace(1)
    second = unsupervised(cluster, folder, steps, port=29401)
    assert [each.wait(30) for each in second] == [0, 0], [each.output for each in second]
    ((_, step, here),), ((_, same, there),) = map(begun, second)
    assert step == same > 6
    assert "'host'" in here
    assert "'peer'" in there
    assert {*ended(second[0]), *ended(second[1])} == {undisturbed(tmp_path, steps)}


@pytest.mark.soak
@pytest.mark.timeout(240)
@pytest.mark.parametrize("how", ["lose", "cut", "mute", "deafen"])
def test_the_supervisor_of_a_node_that_is_left_waits_for_another(
    cluster: Cluster, folder: Path, expected: str, how: str
) -> None:
    """It knows after 15 s. A node that is cut off ends within 90 s, of which it waits 30 s to flush its memory with others."""
    jobs = [supervised(node, folder, STEPS) for node in cluster.nodes]
    jobs[0].wait_until(lambda: copied_of(folder, 1) >= 20, 60)
    getattr(cluster.nodes[1], how)()
    jobs[0].wait_for("node 1 (node1) is gone", 15)
    if how == "lose":
        cluster.replace(1)
    else:
        assert jobs[1].wait(90) == 1
        cluster.nodes[1].join()
        cluster.nodes[1].mend()
    again = supervised(cluster.nodes[1], folder, STEPS)
    assert [jobs[0].wait(60), again.wait(10)] == [0, 0], (jobs[0].output, again.output)
    assert begun(jobs[0])[-1][1] >= 19
    assert ("'peer'" if how == "lose" else "'host'") in begun(again)[-1][2]
    assert {ended(jobs[0])[-1], ended(again)[-1]} == {expected}


@pytest.mark.soak
@pytest.mark.timeout(240)
def test_two_of_three_nodes_go_on_and_the_third_half_commits_nothing(tmp_path: Path, folder: Path) -> None:
    """The one that is cut off finds that others have begun again, though it reaches storage. Plugged in and started, it is let in."""
    (folder / "room").touch()
    with Cluster(tmp_path / "nodes", 3) as cluster:
        options: dict[str, Any] = {"nnodes": "2:3", "node_timeout": 3.0, "grow_every": 3.0}
        jobs = [supervised(node, folder, 10_000, **options) for node in cluster.nodes]
        jobs[2].wait_until(
            lambda: begun(jobs[0])[-1:] and begun(jobs[0])[-1][0] == 3, 60
        )  # one that was slow is let in
        jobs[2].wait_until(lambda: copied_of(folder, 2) >= begun(jobs[2])[-1][1] + 5, 60)
        cluster.nodes[2].cut()
        before = len(begun(jobs[0]))
        jobs[0].wait_until(lambda: begun(jobs[0])[before:], 60)
        assert begun(jobs[0])[-1][0] == 2
        old = {each for each in commits(folder) if each[0] < commits(folder)[0][0]}
        assert jobs[2].wait(120) == 1
        assert {each for each in commits(folder) if each[0] <= max(old, default=(0, 0))[0]} <= old, jobs[2].output
        cluster.nodes[2].join()
        again = supervised(cluster.nodes[2], folder, 10_000, **options)
        jobs[0].wait_until(lambda: begun(jobs[0])[-1][0] == 3, 60)
        again.wait_until(lambda: begun(again), 30)
        assert begun(again)[-1][1] >= begun(jobs[0])[before][1]
        for each in (jobs[0], jobs[1], again):
            os.kill(each.pid, signal.SIGTERM)
        assert [each.wait(60) for each in (jobs[0], jobs[1], again)] == [128 + signal.SIGTERM] * 3
        assert commits(folder)[0][1] >= begun(again)[-1][1]


@pytest.mark.soak
@pytest.mark.timeout(120)
def test_two_halves_that_both_reach_storage_do_not_both_commit(cluster: Cluster, folder: Path) -> None:
    """Somebody starts the job again behind a cut, on the half that is cut off; the older start stops at what it would write next."""
    (folder / "room").touch()
    first = supervised(cluster.nodes[0], folder, 10_000, "--local-addr", "10.77.0.1", nnodes="1")
    first.wait_until(lambda: step_of(folder) >= 5, 60)
    cluster.nodes[1].cut()
    second = supervised(cluster.nodes[1], folder, 10_000, "--rdzv-endpoint", "10.77.0.2:29400", nnodes="1")
    second.wait_until(lambda: begun(second), 60)
    assert first.wait(60) == 1
    assert "found that a later start of the run has taken over; the job is given up" in first.output
    before, began = commits(folder)[0], time.monotonic()
    second.wait_until(lambda: commits(folder)[0] > before, 30)
    assert time.monotonic() < began + 30
    assert commits(folder)[0][0] == 2
    os.kill(second.pid, signal.SIGTERM)
    assert second.wait(60) == 128 + signal.SIGTERM


@pytest.mark.soak
@pytest.mark.timeout(240)
def test_torchrun_goes_on_when_the_cable_is_plugged_in_again(tmp_path: Path, folder: Path, expected: str) -> None:
    """No host name leads anywhere: gloo takes the interface towards the first node. Ranks leave a peer that says nothing for 5 s here."""
    with Cluster(tmp_path / "nodes", 2, names="none") as cluster:
        jobs = list[Started]()
        for number, node in enumerate(cluster.nodes):
            meeting = f"--nnodes 2 --nproc-per-node 1 --node-rank {number} --master-addr 10.77.0.1 --master-port 29400 --max-restarts 9"
            command = [
                sys.executable,
                "-m",
                "torch.distributed.run",
                *meeting.split(),
                str(TRAINING),
                str(folder),
                str(STEPS),
            ]
            jobs.append(node.run(*command, SILENCE="5"))
        jobs[0].wait_until(lambda: copied_of(folder, 1) >= 20, 90)
        cluster.nodes[1].cut()
        for job in jobs:
            job.wait_for("gloo/", 20)
        cluster.nodes[1].join()
        assert [job.wait(90) for job in jobs] == [0, 0], [job.output for job in jobs]
        assert begun(jobs[0])[-1][1] >= 19
        assert {ended(job)[-1] for job in jobs} == {expected}


@pytest.mark.soak
@pytest.mark.timeout(120)
def test_a_slow_link_costs_time_and_no_copy(cluster: Cluster, folder: Path, expected: str) -> None:
    """Of 1 MB/s, and then of 8 kB/s for 3 s, in which nothing is lost that the kernel does not send again."""
    for node in cluster.nodes:
        node.slow("8mbit")
    ranks = unsupervised(cluster, folder, STEPS)
    ranks[0].wait_until(lambda: copied_of(folder) >= 10, 60)
    cluster.nodes[1].slow("64kbit")
    time.sleep(3.0)
    cluster.nodes[1].slow("8mbit")
    assert [rank.wait(60) for rank in ranks] == [0, 0], [rank.output for rank in ranks]
    assert {*ended(ranks[0]), *ended(ranks[1])} == {expected}
    with suppress(FileNotFoundError):
        assert copied_of(folder) > STEPS - 20
