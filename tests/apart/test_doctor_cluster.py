"""`moe-ckpt doctor --cluster`: every rank runs it, bad nodes are named, and nobody waits for one that says nothing."""

from __future__ import annotations

import io
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr, redirect_stdout
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
from door import free_port
from launcher import exit_after, run_world
from torch.distributed import DistError

from apart._cluster import Cluster, Node, needs_namespaces
from lightning_moe_ckpt.cli import main
from lightning_moe_ckpt.errors import ConfigurationError
from lightning_moe_ckpt.inspection import _cluster
from lightning_moe_ckpt.inspection._answers import Row
from lightning_moe_ckpt.inspection._cluster import JobRank

Said = tuple[int, str, str]


def doctor(*arguments: str) -> Said:
    """Return exit status and both outputs."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        status = main(["doctor", "--cluster", *arguments])
    return status, out.getvalue(), err.getvalue()


def three(*arguments: str, before: Callable[[int], object] = lambda _: None) -> list[Said]:
    """Run it as three ranks, each on a node of its own by what the launcher says, though all are on loopback."""

    def work(rank: int) -> Said:
        os.environ.update({"GROUP_RANK": str(rank), "LOCAL_RANK": "0", "MOE_CKPT_NODE": f"machine{rank}"})
        before(rank)
        return doctor("--wait", "5s", *arguments)

    return run_world(3, work, process_group=False, timeout=timedelta(seconds=40))


def faults(said: list[Said]) -> Mapping[str, str]:
    """Return what rank 0 says of each node, by the node's number; all ranks leave with status 1."""
    assert [status for status, _, _ in said] == [1] * 3, said
    found: dict[str, str] = {}
    for each in json.loads(said[0][1])["faults"]:
        number = each["node"].partition(" ")[0]
        found[number] = f"{found.get(number, '')} {each['fault']}".strip()
    return found


def test_three_good_ranks_have_a_row_for_each_node(tmp_path: Path) -> None:
    """Rank 0 shows them; the others say nothing. Storage is left as it was."""
    said = three(f"{tmp_path / 'store'}")
    assert [status for status, _, _ in said] == [0] * 3, said
    assert [(out, err) for _, out, err in said[1:]] == [("", "")] * 2
    rows = said[0][1].splitlines()
    assert rows[0].split() == [
        "node",
        "ranks",
        "address",
        "clock",
        "descriptors",
        "shared",
        "memory",
        "sends",
        "storage",
        "state",
    ]
    assert [(row.split()[0], row.split()[2], row.split()[-1]) for row in rows[2:5]] == [
        (f"{n}", f"{n}", "good") for n in range(3)
    ]
    assert rows[5].startswith("good: 3 ranks on 3 nodes, in ")
    assert not [path for path in (tmp_path / "store").rglob("*") if path.is_file()]


def test_each_bad_node_is_named_with_what_is_wrong(tmp_path: Path) -> None:
    """Of what a node finds by itself, and of what only a comparison shows."""
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps({"node": {"2": 2**60, "3": 2**61}}))

    def before(rank: int) -> None:
        if rank == 1:
            late = SimpleNamespace(time=lambda: time.time() - 3600, monotonic=time.monotonic)
            vars(_cluster)["time"] = late
            resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))
        if rank == 2:
            vars(_cluster)["own_versions"] = lambda: {"torch": "1.0"}
            os.environ["MOE_CKPT_NODE"] = "machine0"

    found = faults(three("--json", "--plan", str(plan), before=before))
    assert [text.count("of shared memory are free, and the plan takes") for text in found.values()] == [1] * 3
    assert "its clock is -3600.0 s from that of the first node" in found["1"]
    assert "200 descriptors, of which ranks may take 280: `ulimit -n 280`" in found["1"]
    assert "has torch 1.0, and rank 0 lightning " in found["2"]
    assert "is one machine with node 0 (" in found["2"]
    assert "one machine" not in found["0"] + found["1"]


def test_storage_that_is_not_one_place_is_found(tmp_path: Path) -> None:
    """A path that means another folder on each node: every one is told that it has made the key."""

    def work(rank: int) -> Said:
        os.environ.update({"GROUP_RANK": str(rank), "LOCAL_RANK": "0", "MOE_CKPT_NODE": f"machine{rank}"})
        return doctor("--wait", "5s", "--json", str(tmp_path / f"disk{rank}"))

    found = faults(run_world(3, work, process_group=False))
    assert set(found) == {"1", "2"}
    assert all("has made a key that node 0 (" in each for each in found.values())


@pytest.mark.parametrize("silent", ["absent", "later"])
def test_a_rank_that_says_nothing_is_named_in_time(silent: str) -> None:
    """Before others come, and behind that, where it was to call others."""

    def fall_silent(*_: object) -> Row:
        time.sleep(2.0)
        raise DistError("gone")

    def work(rank: int) -> Said:
        os.environ.update({"GROUP_RANK": str(rank), "LOCAL_RANK": "0", "MOE_CKPT_NODE": f"machine{rank}"})
        if rank == 2:
            if silent == "absent":
                return 1, "", ""
            vars(_cluster)["_tried"] = fall_silent
        status, out, err = doctor("--wait", "1s", "--json")
        return 1 if rank == 2 else status, out, err

    began, said = time.monotonic(), run_world(3, work, process_group=False)
    place = "" if silent == "absent" else "2"
    assert faults(said) == {place: "no answer in time from ranks 2: see whether they run"}
    good = {row["name"][0]: row["good"] for row in json.loads(said[0][1])["nodes"]}
    assert good == {"0": True, "1": True} | ({} if silent == "absent" else {"2": False})
    assert time.monotonic() < began + 10


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_node_that_dies_or_stops_is_the_bad_one(tmp_path: Path, number: signal.Signals) -> None:
    """It has a row, and those that do not reach it are good."""
    over = tmp_path / "over"

    def hurt(*_: object) -> NoReturn:
        os.kill(os.getpid(), number)
        raise DistError("gone")

    def work(rank: int) -> Said:
        os.environ.update({"GROUP_RANK": str(rank), "LOCAL_RANK": "0", "MOE_CKPT_NODE": f"machine{rank}"})
        vars(_cluster)["_PEER_SECONDS"] = 1.0
        if rank == 1 and not (child := os.fork()):
            vars(_cluster)["_tried"] = hurt
            exit_after(lambda: doctor("--wait", "3s"))
        if rank != 1:
            said = doctor("--wait", "3s", "--json")
            over.touch()
            return said
        os.waitpid(child, os.WUNTRACED)
        while number == signal.SIGSTOP and not over.exists():
            time.sleep(0.1)
        if number == signal.SIGSTOP:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        return 1, "", ""

    said = run_world(3, work, process_group=False)
    found = faults(said)
    assert set(found) == {"1"}
    assert "no answer in time from ranks 1: see whether they run is not reached from nodes 0 (" in found["1"]
    assert [row["good"] for row in json.loads(said[0][1])["nodes"]] == [True, False, True]


def test_a_call_that_others_can_make_is_the_callers_fault() -> None:
    """Else it is the called node's; rates of nodes without any count nowhere."""
    each = {
        "versions": {},
        "faults": [],
        "files": 1,
        "free": 1,
        "ahead": 0.0,
        "storage": None,
        "address": "",
        "interface": "",
    }
    ranks = [
        {**each, "node": n, "name": f"{n}", "rank": n, "domain": f"{n}", "calls": {}, "rate": None} for n in range(4)
    ]
    tried = [
        ranks[0] | {"calls": {"1": "", "2": ""}, "rate": 1e9},
        ranks[1] | {"calls": {"2": "a: cut", "3": "b: cut"}},
        ranks[2] | {"calls": {"3": "b: cut", "0": ""}},
    ]
    answer = _cluster._judged(ranks, tried, [3], 1.0)
    assert [(found["node"], found["fault"]) for found in answer.document["faults"]] == [
        ("3", "no answer in time from ranks 3: see whether they run"),
        ("1", "does not reach node 2 at a: cut"),
        ("3", "is not reached from nodes 1, 2 at b: cut"),
    ]
    assert [row["good"] for row in answer.document["nodes"]] == [True, False, True, False]


def test_an_interface_that_is_not_there_is_named() -> None:
    """Also on one node, which nobody calls, and without the advice to name one."""

    def before(rank: int) -> None:
        if rank == 1:
            os.environ["GLOO_SOCKET_IFNAME"] = "nosuch0"

    found = faults(three("--json", before=before))
    assert set(found) == {"1"}
    assert found["1"].startswith("GLOO_SOCKET_IFNAME is nosuch0, which has no IPv4 address here")
    assert "(set GLOO_SOCKET_IFNAME there)" not in found["1"]


PLACE = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "GROUP_RANK": "0", "LOCAL_RANK": "0"}


@pytest.mark.parametrize(
    ("variables", "lack"),
    [
        ({}, "there is no 'MASTER_ADDR'"),
        ({"RANK": "0"}, "there is no 'MASTER_ADDR'"),
        ({"SLURM_PROCID": "0"}, "there is no 'SLURM_JOB_ID'"),
        ({**PLACE, "RANK": "x", "WORLD_SIZE": "1"}, "invalid literal for int() with base 10: 'x'"),
        ({**PLACE, "RANK": "0", "WORLD_SIZE": "0"}, "RANK is 0 and WORLD_SIZE 0"),
        ({**PLACE, "RANK": "1", "WORLD_SIZE": "1"}, "RANK is 1 and WORLD_SIZE 1"),
        ({**PLACE, "RANK": "-1", "WORLD_SIZE": "1"}, "RANK is -1 and WORLD_SIZE 1"),
    ],
)
def test_without_a_job_it_says_how_it_is_run(
    variables: dict[str, str], lack: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With status 2, and as a document where one was asked for."""
    for name in (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "GROUP_RANK",
        "MASTER_ADDR",
        "MASTER_PORT",
        "SLURM_PROCID",
        "SLURM_JOB_ID",
    ):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    status, out, err = doctor("--json")
    assert status == 2
    assert f"This process is no rank of a job: {lack} in its environment. " in err
    assert "srun moe-ckpt doctor --cluster" in err
    if variables.get("RANK", "0") == "0":
        assert json.loads(out)["error"]["message"].startswith("This process is no rank of a job: ")


def test_a_file_that_is_no_plan_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is wrong with it."""
    place = {
        "RANK": 0,
        "WORLD_SIZE": 1,
        "GROUP_RANK": 0,
        "LOCAL_RANK": 0,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": free_port(),
    }
    for name, value in place.items():
        monkeypatch.setenv(name, str(value))
    (tmp_path / "plan").write_text("[]")
    for name in ("plan", "none"):
        status, _, err = doctor("--plan", str(tmp_path / name))
        assert status == 2
        assert err.startswith("moe-ckpt doctor --cluster: ")
        assert "is not what `moe-ckpt plan --json` writes" in err
    with redirect_stderr(io.StringIO()) as told:
        assert main(["doctor", "--plan", str(tmp_path / "plan")]) == 2
    assert "add `--cluster`, or leave it out" in told.getvalue()


@pytest.mark.parametrize(
    ("nodes", "first"), [("a[07-09,12],b3", "a07"), ("gpu-1", "gpu-1"), ("n1,n2", "n1"), ("rack[1]n[3]", "rack1n3")]
)
def test_srun_says_who_is_first(nodes: str, first: str) -> None:
    """By the list of nodes, unless MASTER_ADDR does; the port comes from the job's number."""
    said = {
        "SLURM_PROCID": "5",
        "SLURM_NTASKS": "8",
        "SLURM_NODEID": "1",
        "SLURM_LOCALID": "1",
        "SLURM_NODELIST": nodes,
    }
    place = JobRank.from_environment(said | {"SLURM_JOB_ID": "1234567"})
    assert place == JobRank(first, 5, 8, 1, 1, 19567)
    assert JobRank.from_environment(said | {"SLURM_JOB_ID": "1", "MASTER_ADDR": "x", "MASTER_PORT": "7"}).host == "x"
    with pytest.raises(ConfigurationError, match="MASTER_ADDR"):
        JobRank.from_environment(dict.fromkeys(("RANK", "WORLD_SIZE", "GROUP_RANK", "LOCAL_RANK", "MASTER_PORT"), "1"))


def rank_of(node: Node, rank: int, size: int, *arguments: str, **more: Any) -> None:
    """Be a rank there, alone on its node."""
    place = {"RANK": rank, "WORLD_SIZE": size, "GROUP_RANK": rank, "LOCAL_RANK": 0, "MASTER_ADDR": "10.77.0.1"}
    os.environ.update({name: str(value) for name, value in {**place, "MASTER_PORT": 29500, **more}.items()})
    sys.exit(main(["doctor", "--cluster", "--wait", "3s", *arguments]))


@needs_namespaces
def test_nodes_that_are_really_apart_are_told_apart_and_reach_each_other(tmp_path: Path) -> None:
    """Host names lead to loopback, as Debian writes it; then a cut cable, and a slow one among three."""
    with Cluster(tmp_path / "nodes", 3, names="own") as cluster:
        nodes = cluster.nodes

        def seen(*arguments: str) -> list[tuple[int, str]]:
            jobs = [node.fork(partial(rank_of, node, n, 3, *arguments)) for n, node in enumerate(nodes)]
            return [(job.wait(20), job.output) for job in jobs]

        good = seen(str(tmp_path / "store"))
        assert [code for code, _ in good] == [0] * 3, good
        assert all(f"{n} (node{n})" in good[0][1] and f"10.77.0.{n + 1} cable" in good[0][1] for n in range(3))
        nodes[1].slow("8mbit")
        slow = seen("--json")
        assert [code for code, _ in slow] == [1] * 3, slow
        (fault,) = json.loads(slow[0][1][slow[0][1].index("{") :])["faults"]
        assert fault["node"] == "1 (node1)"
        assert "MiB/s at most, half of all nodes " in fault["fault"]
        nodes[1].mend()
        nodes[2].mute()
        began, cut = time.monotonic(), seen()
        assert [code for code, _ in cut] == [1, 1, 2], cut
        assert time.monotonic() < began + 15
        assert "no answer in time from ranks 2: see whether they run" in cut[0][1]
        assert "rank 2 on node 2 (node2) has no answer of the store at 10.77.0.1:29500" in cut[2][1]


@needs_namespaces
@pytest.mark.soak  # interpreters that import torch
@pytest.mark.timeout(200)
@pytest.mark.parametrize("launcher", ["run", "torchrun"])
def test_launchers_of_several_nodes_start_it(tmp_path: Path, launcher: str) -> None:
    """Two ranks on each of two nodes, whose host names lead to loopback; torchrun has to be told addresses then."""
    with Cluster(tmp_path / "nodes", 2, names="own") as cluster:
        jobs = []
        for node in cluster.nodes:
            meeting = "--nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint 10.77.0.1:29400 --rdzv-id a"
            start = {
                "run": ["lightning_moe_ckpt", "run", *meeting.split(), "-m", "lightning_moe_ckpt"],
                "torchrun": [
                    "torch.distributed.run",
                    *meeting.split(),
                    *("--local-addr", node.address, "--rdzv-conf", f"is_host={node is cluster.nodes[0]}"),
                    *("-m", "lightning_moe_ckpt"),
                ],
            }[launcher]
            jobs.append(node.run(sys.executable, "-m", *start, "doctor", "--cluster", str(tmp_path / "store")))
        assert [job.wait(90) for job in jobs] == [0, 0], [job.output for job in jobs]
        told = next(job.output for job in jobs if "good: 4 ranks on 2 nodes" in job.output)
        assert {line.split()[-1] for line in told.splitlines() if "(node" in line} == {"good"}
        print(told)
