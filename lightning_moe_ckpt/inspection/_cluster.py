"""Examine the nodes of a job before it trains: every rank runs this, and rank 0 shows a row per node.

Ranks talk through the launcher's store, so no rank waits for another in a collective, and a silent one is named. Every wait has a
limit. The first rank of each node listens where gloo would, and calls the nodes 1, 2, 4, ... places after it.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import resource
import select
import socket
import socketserver
import struct
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from rich.console import RenderableType
from torch.distributed import DistError, PrefixStore, TCPStore  # type: ignore[attr-defined]  # exported at run time only

from lightning_moe_ckpt._units import rate_text, size_text
from lightning_moe_ckpt.coordination import in_words, own_versions
from lightning_moe_ckpt.errors import CheckpointError, ConfigurationError, KeyExists
from lightning_moe_ckpt.inspection._answers import Answer, Row, plain_table
from lightning_moe_ckpt.inspection._conformance import PREFIX
from lightning_moe_ckpt.launch._network import INTERFACE, address_of_interface, address_towards, limit_silence
from lightning_moe_ckpt.native import explain
from lightning_moe_ckpt.storage import Backend
from lightning_moe_ckpt.tiers import shared_directory, this_domain

_PEER_SECONDS, _MEASURE_SECONDS, _CLOCK_SECONDS = 3.0, 0.5, 5.0
"""Limit for an answer of another node, time of a bandwidth's measurement, and most difference of two clocks."""
_SLOW, _OTHER_FILES, _RANK_FILES = 0.3, 256, 8
"""Slow node's share of the median bandwidth; descriptors of a training's rank, and for each other rank in process groups."""
_NUMBER = struct.Struct("d")
_FOUND = ("node", "name", "rank", "domain", "files", "free", "faults", "versions", "address", "interface")
_TITLES = ("node", "ranks", "address", "clock", "descriptors", "shared memory", "sends", "storage", "state")
_NO_RANK = """This process is no rank of a job: {} in its environment. Every rank runs the command, on the nodes of the training: \
`srun moe-ckpt doctor --cluster`, `torchrun ... --no-python moe-ckpt doctor --cluster`, or \
`moe-ckpt run ... -m lightning_moe_ckpt doctor --cluster`."""


class JobRank(NamedTuple):
    """This process among the ranks of its job; rank 0 is at `host`."""

    host: str
    rank: int
    world_size: int
    node: int
    local_rank: int
    port: int

    @classmethod
    def from_environment(cls, said: Mapping[str, str] = os.environ) -> JobRank:
        """Return the place that torchrun, `moe-ckpt run` or srun says. Raises `ConfigurationError` without one."""
        names, where = ("RANK", "WORLD_SIZE", "GROUP_RANK", "LOCAL_RANK", "MASTER_PORT"), dict(said)
        if "RANK" not in said and "SLURM_PROCID" in said:
            names = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_NODEID", "SLURM_LOCALID", "MASTER_PORT")
            first = re.sub(r"\[(\d+)[^]]*\]", r"\1", said.get("SLURM_NODELIST", "")).partition(",")[0]  # `a[07-09],b3`
            where = {"MASTER_ADDR": first, "MASTER_PORT": f"{15000 + int(said['SLURM_JOB_ID'][-4:])}", **said}
        try:
            return cls(where["MASTER_ADDR"], *(int(where[name]) for name in names))
        except (KeyError, ValueError) as error:
            raise ConfigurationError(_NO_RANK.format(error)) from error


class _Calls(socketserver.BaseRequestHandler):
    """Another node's call: the first byte asks for the time, or says that bytes follow until their rate is answered."""

    def handle(self) -> None:
        peer: socket.socket = self.request
        peer.settimeout(_PEER_SECONDS)
        with contextlib.suppress(OSError):
            answer = time.time()
            if peer.recv(1) == b"b":
                began, nbytes, block = time.monotonic(), 0, bytearray(2**20)
                while (passed := time.monotonic() - began) < _MEASURE_SECONDS and (came := peer.recv_into(block)):
                    nbytes += came
                answer = nbytes / passed
            peer.sendall(_NUMBER.pack(answer))
            while peer.recv(2**20):  # to close now would take the answer back
                pass


def _call(node: Row, what: bytes) -> float:
    """Return a node's answer. Raises `OSError` if there is none in time."""
    block = bytes(2**16)
    with socket.create_connection((node["address"] or "127.0.0.1", node["port"]), _PEER_SECONDS) as peer:
        peer.sendall(what)
        while what == b"b" and not select.select([peer], [], [], 0)[0]:
            peer.sendall(block)
        if len(answer := peer.recv(_NUMBER.size)) < _NUMBER.size:
            raise ConnectionError("it ends without an answer")
        return float(_NUMBER.unpack(answer)[0])


class _Board:
    """Values that ranks leave for each other, in the launcher's store or rank 0's. Raises torch's `DistError` without it."""

    def __init__(self, place: JobRank, seconds: float) -> None:
        self.seconds, served = seconds, os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        options: Any = {"is_master": not served and not place.rank, "timeout": timedelta(seconds=seconds)}
        store = TCPStore(place.host, place.port, wait_for_workers=False, **options)
        self._store = PrefixStore(f"moe_ckpt/doctor/{os.environ.get('TORCHELASTIC_RESTART_COUNT')}", store)
        limit_silence(seconds)

    def say(self, key: str, value: object) -> None:
        self._store.set(key, json.dumps(value))

    def ask(self, key: str) -> Any:
        """Return a value; rank 0 may wait for others before it has it."""
        self._store.wait([key], timedelta(seconds=2 * self.seconds))
        return json.loads(self._store.get(key))

    def gather(self, kind: str, ranks: Iterable[int]) -> dict[int, Any]:
        """Return the values left in time, by rank."""
        keys = {rank: f"{kind}/{rank}" for rank in ranks}
        with contextlib.suppress(DistError):  # which is its time-out
            self._store.wait([*keys.values()], timedelta(seconds=self.seconds))
        return {rank: json.loads(self._store.get(key)) for rank, key in keys.items() if self._store.check([key])}


def examine_cluster(storage: Callable[[], Backend] | None, plan: Path | None, seconds: float) -> Answer:
    """Examine the nodes of the job of this process; called by all ranks. Only rank 0 has tables, and all ranks its status.

    `storage` opens the place of checkpoints, `plan` is a file of `moe-ckpt plan --json`; both may be left out. All ranks have
    `seconds` to come, and all nodes again to try. Raises `CheckpointError` without rank 0, and `ConfigurationError` without a job.
    """
    place = JobRank.from_environment()
    try:
        needed = 0 if plan is None else int(min(json.loads(plan.read_text())["node"].values()))
    except (OSError, LookupError, TypeError, ValueError) as error:
        raise ConfigurationError(f"`--plan {plan}` is not what `moe-ckpt plan --json` writes: {error!r}.") from error
    try:
        return _examine(place, _Board(place, seconds), storage, needed)
    except DistError as error:
        own, where = f"rank {place.rank} on node {place.node} ({socket.gethostname()})", f"{place.host}:{place.port}"
        sees = "See whether rank 0 runs, and whether this node reaches its address."
        raise CheckpointError(f"{own} has no answer of rank 0 at {where} in time. {sees}") from error


def _examine(place: JobRank, board: _Board, storage: Callable[[], Backend] | None, needed: int) -> Answer:
    began, own = time.monotonic(), _found_here(place, needed)
    with contextlib.ExitStack() as stack:
        if place.local_rank == 0:
            where = own["address"] or "127.0.0.1"
            server = stack.enter_context(socketserver.ThreadingTCPServer((where, 0), _Calls))
            threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
            stack.callback(server.shutdown)
            own["port"] = server.server_address[1]
        board.say(f"here/{place.rank}", own)
        if place.rank == 0:
            here = board.gather("here", range(place.world_size))
            firsts = {rank: each for rank, each in here.items() if "port" in each}
            board.say("all", [f"{PREFIX}{int(time.time())}-{uuid.uuid4().hex}/cluster", *firsts.values()])
        key, *nodes = board.ask("all")
        if own in nodes:
            board.say(f"tried/{place.rank}", _tried(nodes.index(own), nodes, storage, key))
        if place.rank:
            status = board.ask("status")
            board.say(f"left/{place.rank}", 0)
            return Answer({}, list, status)
        tried = board.gather("tried", firsts)
        if storage is not None:
            with contextlib.suppress(CheckpointError), contextlib.closing(storage()) as backend:
                backend.delete(key)
        silent = sorted({*range(place.world_size)} - here.keys() | firsts.keys() - tried.keys())
        answer = _judged([*here.values()], [*tried.values()], silent, time.monotonic() - began)
        board.say("status", answer.status)
        board.seconds = _PEER_SECONDS
        board.gather("left", [*here][1:])  # rank 0 may have the store
        return answer


def _found_here(place: JobRank, needed: int) -> Row:
    """Return a rank's findings without others, and in `faults` sentences about bad ones."""
    domain, memory, part, faults = this_domain(), os.statvfs(shared_directory()), explain()[0].library, list[str]()
    name, (address, by_route) = os.environ.get(INTERFACE, "").partition(",")[0], address_towards(place.host)
    files, least = resource.getrlimit(resource.RLIMIT_NOFILE)[0], _OTHER_FILES + _RANK_FILES * place.world_size
    if files < least:
        faults.append(f"{files} descriptors, of which ranks may take {least}: `ulimit -n {least}` before the launcher")
    if (free := memory.f_bavail * memory.f_frsize) < needed:
        room = f"{size_text(free)} of shared memory are free, and the plan takes {size_text(needed)}"
        faults.append(f"{room}: make {shared_directory()} larger, or see `moe-ckpt shm`")
    compiled = "none" if part is None else part.moe_cpu_source_digest().decode()[:12]
    versions = own_versions() | {"python": platform.python_version(), "compiled part": compiled}
    values = (place.node, f"{place.node} ({domain.host})", place.rank, domain.node, files, free, faults, versions)
    address, interface = (address_of_interface(name), name) if name else (address, by_route)
    return dict(zip(_FOUND, (*values, address, interface), strict=True))


def _tried(at: int, nodes: Sequence[Row], storage: Callable[[], Backend] | None, key: str) -> Row:
    """Return the findings of a node's first rank together with other nodes."""
    found, faults = {"rate": None, "ahead": 0.0, "storage": None, **nodes[at]}, list[str]()
    for each in (others := [nodes[(at + 2**power) % len(nodes)] for power in range((len(nodes) - 1).bit_length())]):
        try:
            _call(each, b"t")
            found["rate"] = _call(each, b"b") if each is others[0] else found["rate"]
        except OSError as error:  # noqa: PERF203  # every other one is tried
            where = each["address"] or f"127.0.0.1, where its host name leads (set {INTERFACE} there)"
            faults.append(f"does not reach node {each['name']} at {where}: {error}")
    with contextlib.suppress(OSError):  # a fault of its own
        sent, theirs = time.time(), _call(nodes[0], b"t")
        found["ahead"] = at and (sent + time.time()) / 2 - theirs
    if abs(found["ahead"]) > _CLOCK_SECONDS:
        faults.append(f"its clock is {_offset(found['ahead'])} from that of the first node: synchronise it")
    try:
        if storage is not None:
            with contextlib.closing(storage()) as backend:
                began, made = time.monotonic(), False
                with contextlib.suppress(KeyExists):
                    backend.create(key, str(at).encode())
                    made = True
                seconds, exclusive = time.monotonic() - began, backend.creates_exclusively
                found["storage"] = {"made": made, "exclusive": exclusive, "seconds": seconds}
    except CheckpointError as error:
        faults.append(f"storage: {error}")
    return found | {"faults": faults}


def _judged(ranks: Sequence[Row], rows: Sequence[Row], silent: Sequence[int], seconds: float) -> Answer:
    """Return a row per node, and a sentence for each fault, with the name of its node."""
    faults = [(row["name"], fault) for row in (*ranks, *rows) for fault in row["faults"]]
    faults += [("", f"no answer in time from ranks {', '.join(map(str, silent))}: see whether they run")] * bool(silent)
    nodes_of, expected = defaultdict[str, set[str]](set), ranks[0]["versions"]
    for each in ranks:
        nodes_of[each["domain"]].add(each["name"])
        if each["versions"] != expected:
            pairs = ((each["versions"], expected), (expected, each["versions"]))
            own, first = (in_words({name: said for name, said in a.items() if said != b.get(name)}) for a, b in pairs)
            faults.append((each["name"], f"has {own}, and rank 0 {first}: install the same everywhere"))
    for names in (sorted(names) for names in nodes_of.values() if len(names) > 1):
        alike = f"is one machine with node {names[0]} to copies, which protect nothing then: set MOE_CKPT_NODE"
        faults += [(name, f"{alike} if these are two") for name in names[1:]]
    sent, kept = [row["rate"] or 0.0 for row in rows], [row for row in rows if row["storage"]]
    # The better of what a node sends and what comes to it: one alone may be another node's fault.
    rates = [max(rate, sent[at - 1]) for at, rate in enumerate(sent)]
    for row, rate in zip(rows, rates, strict=True):
        if rate < _SLOW * (usual := median(rates)):
            faults.append((row["name"], f"has {rate_text(rate)} at most, half of all nodes {rate_text(usual)} or more"))
    made = [row["name"] for row in kept if row["storage"]["made"]]
    if not all(row["storage"]["exclusive"] for row in kept):
        faults.append(("", "storage ignores the condition of a create: `moe-ckpt doctor URL` says what that means"))
    faults += [(name, f"has made a key that node {made[0]} has made: storage is not one place") for name in made[1:]]
    faults = list(dict.fromkeys(faults))  # ranks of a node find the same
    for row in rows:
        here = [each for each in ranks if each["node"] == row["node"]]
        row |= {name: min(each[name] for each in here) for name in ("files", "free")}
        row |= {"ranks": [each["rank"] for each in here], "good": row["name"] not in {name for name, _ in faults}}
    document = {"nodes": rows, "faults": [{"node": name, "fault": fault} for name, fault in faults], "silent": silent}
    return Answer(document | {"seconds": seconds}, lambda: _tables(rows, faults, seconds), int(bool(faults)))


def _tables(rows: Sequence[Row], faults: Sequence[tuple[str, str]], seconds: float) -> list[RenderableType]:
    table = plain_table(*_TITLES, right=_TITLES[3:8])
    for row in rows:
        first, last, address = row["ranks"][0], row["ranks"][-1], f"{row['address'] or '127.0.0.1'} {row['interface']}"
        cells = row["name"], f"{first}-{last}" if last > first else str(first), address.strip(), _offset(row["ahead"])
        rate, asked = row["rate"] and rate_text(row["rate"]), row["storage"] and _offset(row["storage"]["seconds"])[1:]
        state = "good" if row["good"] else "BAD"
        table.add_row(*cells, str(row["files"]), size_text(row["free"]), rate or "-", asked or "-", state)
    said = [f"{f'node {name}: ' if name else ''}{fault}" for name, fault in faults]
    count = sum(len(row["ranks"]) for row in rows)
    return [table, *said, f"{'NOT GOOD' if said else 'good'}: {count} ranks on {len(rows)} nodes, in {seconds:.1f} s"]


def _offset(seconds: float) -> str:
    return f"{1000 * seconds:+.1f} ms" if abs(seconds) < 1 else f"{seconds:+.1f} s"
