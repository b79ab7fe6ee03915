"""Examine a job's nodes before it trains: every rank runs this, and rank 0 shows a row per node.

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
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from itertools import groupby
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
"""Limit for another node's answer, time to measure a bandwidth, and most difference between two clocks."""
_SLOW, _OTHER_FILES, _RANK_FILES = 0.3, 256, 8
"""Slow node's share of the median bandwidth; a training rank's descriptors, and for each other rank in process groups."""
_NUMBER = struct.Struct("d")
_FOUND = ("node", "name", "rank", "domain", "files", "free", "faults", "versions", "address", "interface")
_UNTRIED: Row = {"calls": {}, "rate": None, "ahead": 0.0, "storage": None}  # `calls`: an error or "", by node
_TITLES = ("node", "ranks", "address", "clock", "descriptors", "shared memory", "sends", "storage", "state")
_NO_RANK = """This process is no rank of a job: {} in its environment. Every rank runs the command, on the nodes of the training: \
`srun moe-ckpt doctor --cluster`, `torchrun ... --no-python moe-ckpt doctor --cluster`, or \
`moe-ckpt run ... -m lightning_moe_ckpt doctor --cluster`."""


class JobRank(NamedTuple):
    """This process among its job's ranks; rank 0 is at `host`."""

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
        try:
            if "RANK" not in said and "SLURM_PROCID" in said:
                names = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_NODEID", "SLURM_LOCALID", "MASTER_PORT")
                nodes = re.sub(r"\[(\d+)[^]]*\]", r"\1", said.get("SLURM_NODELIST", "")).split(",")  # `a[07-09],b3`
                where = {"MASTER_ADDR": nodes[0], "MASTER_PORT": f"{15000 + int(said['SLURM_JOB_ID'][-4:])}", **said}
            found = cls(where["MASTER_ADDR"], *(int(where[name]) for name in names))
        except (KeyError, ValueError) as lack:
            raise ConfigurationError(_NO_RANK.format(f"{'there is no ' * isinstance(lack, KeyError)}{lack}")) from lack
        if found.rank not in range(found.world_size):
            raise ConfigurationError(_NO_RANK.format(f"{names[0]} is {found.rank} and {names[1]} {found.world_size}"))
        return found


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
    with socket.create_connection((node["address"], node["port"]), _PEER_SECONDS) as peer:
        peer.sendall(what)
        while what == b"b" and not select.select([peer], [], [], 0)[0]:
            peer.sendall(bytes(2**16))
        if len(answer := peer.recv(_NUMBER.size)) < _NUMBER.size:
            raise ConnectionError("it ends without an answer")
        return float(_NUMBER.unpack(answer)[0])


class _Board:
    """Values that ranks leave for each other, in the launcher's store or rank 0's. Raises torch's `DistError` without it."""

    def __init__(self, place: JobRank, seconds: float) -> None:
        served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        options: Any = {"is_master": not served and not place.rank, "timeout": timedelta(seconds=seconds)}
        store = TCPStore(place.host, place.port, wait_for_workers=False, **options)
        self._store = PrefixStore(f"moe_ckpt/doctor/{os.environ.get('TORCHELASTIC_RESTART_COUNT')}", store)
        limit_silence(seconds)

    def say(self, key: str, value: object) -> None:
        self._store.set(key, json.dumps(value))

    def ask(self, key: str, seconds: float) -> Any:
        self._store.wait([key], timedelta(seconds=seconds))
        return json.loads(self._store.get(key))

    def gather(self, kind: str, ranks: Iterable[int], seconds: float) -> dict[int, Any]:
        """Return the values left in time, by rank."""
        keys = {rank: f"{kind}/{rank}" for rank in ranks}
        with contextlib.suppress(DistError):  # which is its time-out
            self._store.wait([*keys.values()], timedelta(seconds=seconds))
        return {rank: json.loads(self._store.get(key)) for rank, key in keys.items() if self._store.check([key])}


def examine_cluster(storage: Callable[[], Backend] | None, plan: Path | None, seconds: float) -> Answer:
    """Examine this job's nodes; called by all ranks. Only rank 0 has tables, and all ranks its status.

    `storage` opens the place for checkpoints, `plan` is what `moe-ckpt plan --json` writes. All ranks have `seconds` to come, and all nodes
    again to try. Raises `CheckpointError` without rank 0, and `ConfigurationError` without a job.
    """
    place = JobRank.from_environment()
    try:
        needed = 0 if plan is None else int(min(json.loads(plan.read_text())["node"].values()))
    except (OSError, LookupError, TypeError, ValueError) as error:
        raise ConfigurationError(f"`--plan {plan}` is not what `moe-ckpt plan --json` writes: {error!r}.") from error
    try:
        began, own, board = time.monotonic(), _found_here(place, needed), _Board(place, seconds)
        with contextlib.ExitStack() as stack:
            if place.local_rank == 0:
                server = stack.enter_context(socketserver.ThreadingTCPServer((own["address"], 0), _Calls))
                stack.enter_context(ThreadPoolExecutor(1)).submit(server.serve_forever, 0.05)
                stack.callback(server.shutdown)
                own["port"] = server.server_address[1]
            board.say(f"here/{place.rank}", own)
            if place.rank == 0:
                here = board.gather("here", range(place.world_size), seconds)
                firsts = {rank: each for rank, each in here.items() if "port" in each}
                board.say("all", [f"{PREFIX}{int(time.time())}-{os.urandom(8).hex()}/cluster", *firsts.values()])
            key, *nodes = board.ask("all", 2 * seconds)  # rank 0 may wait for others before
            if own in nodes:
                board.say(f"tried/{place.rank}", _tried(nodes.index(own), nodes, storage, key))
            if place.rank:
                status = board.ask("status", 2 * seconds)
                board.say(f"left/{place.rank}", 0)
                return Answer({}, list, status)
            tried = board.gather("tried", firsts, seconds)
            if storage is not None:
                with contextlib.suppress(CheckpointError), contextlib.closing(storage()) as backend:
                    backend.delete(key)
            silent = sorted({*range(place.world_size)} - here.keys() | firsts.keys() - tried.keys())
            answer = _judged([*here.values()], [*tried.values()], silent, time.monotonic() - began)
            board.say("status", answer.status)
            board.gather("left", here.keys() - {0, *silent}, _PEER_SECONDS)  # rank 0 may have the store
            return answer
    except DistError as error:
        name, where = f"rank {place.rank} on node {place.node} ({socket.gethostname()})", f"{place.host}:{place.port}"
        sees = "See whether rank 0 runs there and can listen, and whether this node reaches it."
        raise CheckpointError(f"{name} has no answer of the store at {where} in time. {sees}") from error


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
    if name and not address:
        faults.append(f"{INTERFACE} is {name}, which has no IPv4 address here: name an interface, or none")
    return _UNTRIED | dict(zip(_FOUND, (*values, address or "127.0.0.1", interface), strict=True))


def _tried(at: int, nodes: Sequence[Row], storage: Callable[[], Backend] | None, key: str) -> Row:
    """Return the findings when a node's first rank calls other nodes."""
    found = nodes[at]
    for power in range((len(nodes) - 1).bit_length()):
        node = nodes[(at + 2**power) % len(nodes)]
        try:
            said = _call(node, b"t" if power else b"b")
            found["calls"][node["name"]], found["rate"] = "", found["rate"] if power else said
        except OSError as error:
            hint = f", where its host name leads (set {INTERFACE} there)" * (node["address"] == "127.0.0.1")
            found["calls"][node["name"]] = f"{node['address']}{hint * (not node['interface'])}: {error}"
    with contextlib.suppress(OSError):  # a fault of its own
        sent, theirs = time.time(), _call(nodes[0], b"t")
        found["ahead"] = at and (sent + time.time()) / 2 - theirs
    if abs(found["ahead"]) > _CLOCK_SECONDS:
        found["faults"].append(f"its clock is {_offset(found['ahead'])} from that of the first node: synchronise it")
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
        found["faults"].append(f"storage: {error}")
    return found


def _judged(ranks: Sequence[Row], tried: Sequence[Row], silent: Sequence[int], seconds: float) -> Answer:
    """Return a row per node, silent ones too, and a sentence for each fault, with the name of its node."""
    places = {each["node"]: each for each in (*reversed(ranks), *tried)}
    rows, names = [places[node] for node in sorted(places)], {each["rank"]: each["name"] for each in ranks}
    faults = [(row["name"], fault) for row in (*ranks, *rows) for fault in row["faults"]]
    for name, them in groupby(silent, lambda rank: names.get(rank, "")):
        faults.append((name, f"no answer in time from ranks {', '.join(map(str, them))}: see whether they run"))
    for name in (row["name"] for row in rows):
        errors = {row["name"]: row["calls"][name] for row in rows if name in row["calls"]}
        if errors and all(errors.values()):  # else others reach it, and callers that do not are bad
            faults.append((name, f"is not reached from nodes {', '.join(errors)} at {min(errors.values())}"))
        else:
            faults += [(caller, f"does not reach node {name} at {error}") for caller, error in errors.items() if error]
    nodes_of, expected = defaultdict[str, set[str]](set), ranks[0]["versions"]
    for each in ranks:
        nodes_of[each["domain"]].add(each["name"])
        if each["versions"] != expected:
            pairs = ((each["versions"], expected), (expected, each["versions"]))
            own, first = (in_words({name: said for name, said in a.items() if said != b.get(name)}) for a, b in pairs)
            faults.append((each["name"], f"has {own}, and rank 0 {first}: install the same everywhere"))
    for machine in (sorted(each) for each in nodes_of.values() if len(each) > 1):
        alike = f"is one machine with node {machine[0]} to copies, which protect nothing then: set MOE_CKPT_NODE"
        faults += [(name, f"{alike} if these are two") for name in machine[1:]]
    # The better of what a node sends and what comes to it: one alone may be another node's fault.
    came = {next(iter(row["calls"])): row["rate"] or 0.0 for row in rows if row["calls"]}
    rates = {row["name"]: max(row["rate"] or 0.0, came.get(row["name"], 0.0)) for row in rows}
    usual, kept = median([*filter(None, rates.values())] or [0.0]), [row for row in rows if row["storage"]]
    least = f"at most, half of all nodes {rate_text(usual)} or more"
    faults += [(name, f"has {rate_text(rate)} {least}") for name, rate in rates.items() if 0 < rate < _SLOW * usual]
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
        first, last, address = row["ranks"][0], row["ranks"][-1], f"{row['address']} {row['interface']}"
        cells = row["name"], f"{first}-{last}" if last > first else str(first), address.strip(), _offset(row["ahead"])
        rate, asked = row["rate"] and rate_text(row["rate"]), row["storage"] and _offset(row["storage"]["seconds"])[1:]
        more = str(row["files"]), size_text(row["free"]), rate or "-", asked or "-"
        table.add_row(*cells, *more, "good" if row["good"] else "BAD")
    said = [f"{f'node {name}: ' if name else ''}{fault}" for name, fault in faults]
    count = sum(len(row["ranks"]) for row in rows)
    return [table, *said, f"{'NOT GOOD' if said else 'good'}: {count} ranks on {len(rows)} nodes, in {seconds:.1f} s"]


def _offset(seconds: float) -> str:
    return f"{1000 * seconds:+.1f} ms" if abs(seconds) < 1 else f"{seconds:+.1f} s"
