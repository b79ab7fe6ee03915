"""Examine the nodes of a job before it trains: every rank runs this, and rank 0 shows a row per node.

Ranks talk through the launcher's store only, so one that does not answer is named, and nobody waits for it in a collective. Every
wait has a limit. The first rank of each node listens where gloo would, and calls the nodes 1, 2, 4, ... places after it, so that
each node is called too, by `log2` of the number of nodes. Clocks are compared with the first node's.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from statistics import median
from typing import Any, NamedTuple

from rich.console import RenderableType
from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]  # exported at run time only

from lightning_moe_ckpt._units import rate_text, size_text
from lightning_moe_ckpt.coordination import in_words, own_versions
from lightning_moe_ckpt.errors import CheckpointError, ConfigurationError, KeyExists
from lightning_moe_ckpt.inspection._answers import Answer, Row, plain_table
from lightning_moe_ckpt.inspection._conformance import PREFIX
from lightning_moe_ckpt.launch._network import INTERFACE, address_of_interface, address_towards, limit_silence
from lightning_moe_ckpt.native import explain
from lightning_moe_ckpt.storage import Backend
from lightning_moe_ckpt.tiers import shared_directory, this_domain

_PEER_SECONDS, _MEASURE_SECONDS = 3.0, 0.5
"""Limit for an answer of another node, and the time in which its bandwidth is measured."""
_CLOCK_SECONDS, _SLOW = 5.0, 0.3
"""Most difference of two clocks, and share of the median bandwidth below which a node is slow."""
_OTHER_FILES, _RANK_FILES = 256, 8
"""Descriptors of a training's rank, and those for each other rank in process groups."""
_NUMBER = struct.Struct("d")


class Place(NamedTuple):
    """This process among the ranks of its job."""

    rank: int
    world_size: int
    node: int
    local_rank: int
    port: int
    host: str
    """Where rank 0 is."""
    serves: bool
    """Whether rank 0 serves a store, since the launcher has none."""

    @classmethod
    def from_environment(cls, said: Mapping[str, str] = os.environ) -> Place:
        """Return the place that torchrun, `moe-ckpt run` or srun says. Raises `ConfigurationError` without one."""
        names, where = ("RANK", "WORLD_SIZE", "GROUP_RANK", "LOCAL_RANK", "MASTER_PORT"), dict(said)
        if "RANK" not in said and "SLURM_PROCID" in said:
            names = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_NODEID", "SLURM_LOCALID", "MASTER_PORT")
            first = re.sub(r"\[(\d+)[^]]*\]", r"\1", said.get("SLURM_NODELIST", "")).partition(",")[0]  # `a[07-09],b3`
            where = {"MASTER_ADDR": first, "MASTER_PORT": f"{15000 + int(said['SLURM_JOB_ID'][-4:])}", **said}
        try:
            serves = said.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
            return cls(*(int(where[name]) for name in names), where["MASTER_ADDR"], serves)
        except (KeyError, ValueError) as error:
            raise ConfigurationError(
                f"This process is no rank of a job: {error} in its environment. Every rank runs the command, on the nodes of the "
                "training: `srun moe-ckpt doctor --cluster`, `torchrun ... --no-python moe-ckpt doctor --cluster`, or "
                "`moe-ckpt run ... -m lightning_moe_ckpt doctor --cluster`."
            ) from error


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


@contextlib.contextmanager
def _listening(address: str) -> Iterator[int]:
    """Answer other nodes' calls, and yield the port."""
    socketserver.ThreadingTCPServer.daemon_threads = True
    with socketserver.ThreadingTCPServer((address, 0), _Calls) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


class Board:
    """Values that ranks leave for each other, in the launcher's store or rank 0's.

    Raises:
        CheckpointError: rank 0 does not answer within `seconds`.
    """

    def __init__(self, place: Place, seconds: float) -> None:
        self._place, self.seconds = place, seconds
        self._prefix = f"moe_ckpt/doctor/{os.environ.get('TORCHELASTIC_RESTART_COUNT')}"
        options: dict[str, Any] = {"is_master": place.serves and not place.rank, "timeout": timedelta(seconds=seconds)}
        with self._asking():
            self._store = TCPStore(place.host, place.port, wait_for_workers=False, **options)
        limit_silence(seconds)

    def say(self, key: str, value: object) -> None:
        """Leave a value."""
        with self._asking():
            self._store.set(f"{self._prefix}/{key}", json.dumps(value))

    def ask(self, key: str, seconds: float = 0.0) -> Any:
        """Return a value, for which this waits `seconds` longer than others wait for ranks."""
        with self._asking():
            self._store.wait([f"{self._prefix}/{key}"], timedelta(seconds=self.seconds + seconds))
            return json.loads(self._store.get(f"{self._prefix}/{key}"))

    def gather(self, kind: str, ranks: Sequence[int]) -> tuple[list[Any], list[int]]:
        """Return what ranks have left in time, and the ranks that have not."""
        keys = [f"{self._prefix}/{kind}/{rank}" for rank in ranks]
        with contextlib.suppress(DistError):  # which is its time-out
            self._store.wait(keys, timedelta(seconds=self.seconds))
        here = {rank: self._store.check([key]) for rank, key in zip(ranks, keys, strict=True)}
        return [self.ask(f"{kind}/{rank}") for rank in ranks if here[rank]], [rank for rank in ranks if not here[rank]]

    @contextlib.contextmanager
    def _asking(self) -> Iterator[None]:
        try:
            yield
        except DistError as error:
            place, own = self._place, f"rank {self._place.rank} on node {self._place.node} ({socket.gethostname()})"
            raise CheckpointError(
                f"{own} has no answer of rank 0 at {place.host}:{place.port} in time. See whether rank 0 runs, and whether this node "
                "reaches that address."
            ) from error


def examine_cluster(place: Place, storage: Callable[[], Backend] | None, needed: int, seconds: float) -> Answer:
    """Examine the job's nodes; called by all its ranks. Only the answer of rank 0 has tables, and all have its status.

    Args:
        place: this rank's place.
        storage: opens the place of checkpoints; None leaves it out.
        needed: bytes of shared memory that a node needs.
        seconds: limit for all ranks to come, and again for all nodes to try.

    Raises:
        CheckpointError: rank 0 does not answer in time.
    """
    began, board, own = time.monotonic(), Board(place, seconds), _found_here(place, needed)
    with contextlib.ExitStack() as stack:
        if place.local_rank == 0:
            own["port"] = stack.enter_context(_listening(own["address"] or "127.0.0.1"))
        board.say(f"here/{place.rank}", own)
        if place.rank == 0:
            ranks, silent = board.gather("here", range(place.world_size))
            firsts = [each for each in ranks if "port" in each]
            board.say("all", {"firsts": firsts, "key": f"{PREFIX}{int(time.time())}-{uuid.uuid4().hex}/cluster"})
        met = board.ask("all", seconds)
        if own in met["firsts"]:
            board.say(f"tried/{place.rank}", _tried(met["firsts"].index(own), met["firsts"], storage, met["key"]))
        if place.rank:
            status = board.ask("status", seconds)
            board.say(f"left/{place.rank}", 0)
            return Answer({}, list, status)
        tried, late = board.gather("tried", [each["rank"] for each in firsts])
        for row in tried:  # joins what the node's first rank found alone
            row |= next(each for each in firsts if each["rank"] == row["rank"]) | {"faults": row["faults"]}
        answer = _judged(ranks, tried, sorted({*silent, *late}), place.world_size, time.monotonic() - began)
        board.say("status", answer.status)
        board.seconds = _PEER_SECONDS
        board.gather("left", [each["rank"] for each in ranks[1:]])  # rank 0 may have the store
        return answer


def _found_here(place: Place, needed: int) -> Row:
    """Return what a rank finds by itself, and in `faults` what is not as it should be."""
    domain, memory, faults = this_domain(), os.statvfs(shared_directory()), list[str]()
    name, (address, by_route) = os.environ.get(INTERFACE, "").partition(",")[0], address_towards(place.host)
    try:
        address = address_of_interface(name) if name else address
    except OSError as error:
        faults.append(f"{INTERFACE}={name} names no interface with an address: {error.strerror}")
    part, free = explain()[0].library, memory.f_bavail * memory.f_frsize
    compiled = "none" if part is None else part.moe_cpu_source_digest().decode()[:12]
    files, least = resource.getrlimit(resource.RLIMIT_NOFILE)[0], _OTHER_FILES + _RANK_FILES * place.world_size
    if files < least:
        faults.append(
            f"{files} descriptors, and {place.world_size} ranks may take {least}: `ulimit -n {least}` before the launcher"
        )
    if free < needed:
        faults.append(
            f"{size_text(free)} of shared memory are free, and the plan takes {size_text(needed)}: make {shared_directory()} larger, or "
            "see `moe-ckpt shm`"
        )
    found: Row = {
        "node": place.node,
        "name": f"{place.node} ({domain.host})",
        "rank": place.rank,
        "domain": domain.node,
    }
    found |= {"address": address, "interface": name or by_route, "files": files, "free": free, "faults": faults}
    return found | {"versions": own_versions() | {"python": platform.python_version(), "compiled part": compiled}}


def _tried(at: int, nodes: Sequence[Row], storage: Callable[[], Backend] | None, key: str) -> Row:
    """Return what the first rank of a node finds together with other nodes."""
    found: Row = {"rank": nodes[at]["rank"], "rate": None, "ahead": 0.0, "storage": None, "faults": nodes[at]["faults"]}
    steps = [2**power for power in range(len(nodes).bit_length()) if 2**power < len(nodes)]
    others = [nodes[(at + step) % len(nodes)] for step in steps]
    for each in others:
        try:
            _call(each, b"t")
            found["rate"] = _call(each, b"b") if each is others[0] else found["rate"]
        except OSError as error:  # noqa: PERF203  # every other one is tried
            hint = "" if each["address"] else f", as its host name leads nowhere else: set {INTERFACE} there"
            where = each["address"] or "a loopback address"
            found["faults"].append(f"does not reach node {each['name']} at {where}{hint} ({error})")
    with contextlib.suppress(OSError):  # a fault of its own
        sent = time.time()
        theirs = _call(nodes[0], b"t")
        found["ahead"] = (sent + time.time()) / 2 - theirs if at else 0.0
    if abs(found["ahead"]) > _CLOCK_SECONDS:
        found["faults"].append(f"its clock is {_offset(found['ahead'])} from that of the first node: synchronise it")
    try:
        if storage is not None:
            with contextlib.closing(storage()) as backend:
                began, made = time.monotonic(), True
                try:
                    backend.create(key, str(at).encode())
                except KeyExists:
                    made = False
                found["storage"] = [
                    made,
                    backend.get(key).decode(),
                    backend.creates_exclusively,
                    time.monotonic() - began,
                ]
    except CheckpointError as error:
        found["faults"].append(f"storage: {error}")
    return found


def _judged(
    ranks: Sequence[Row], rows: Sequence[Row], silent: Sequence[int], world_size: int, seconds: float
) -> Answer:
    """Return a row per node, and in sentences what is wrong, with the name of the node."""
    faults = [(row["name"], fault) for row in rows for fault in row["faults"]]
    if silent:
        faults.append(("", f"no answer in time from ranks {', '.join(map(str, silent))}: see whether they run"))
    nodes_of, others = (
        defaultdict[str, set[str]](set),
        [each for each in ranks if each["versions"] != ranks[0]["versions"]],
    )
    for each in ranks:
        nodes_of[each["domain"]].add(each["name"])
    for each in {each["name"]: each for each in others}.values():
        pairs = [(a["versions"], b["versions"]) for a, b in ((each, ranks[0]), (ranks[0], each))]
        here, there = (in_words({name: said for name, said in a.items() if said != b.get(name)}) for a, b in pairs)
        faults.append(
            (each["name"], f"rank {each['rank']} has {here}, and rank 0 {there}: install the same everywhere")
        )
    for names in nodes_of.values():
        alike = f"are one machine to copies ({', '.join(sorted(names))}), which then protect nothing: set MOE_CKPT_NODE if they are several"
        faults += [(max(names), f"these {alike}")] if len(names) > 1 else []
    rates = [row["rate"] for row in rows if row["rate"] is not None]
    for row in rows:
        if row["rate"] is not None and row["rate"] < _SLOW * median(rates):
            faults.append(
                (row["name"], f"sends {rate_text(row['rate'])}, half of all nodes {rate_text(median(rates))} or more")
            )
    kept = [row["storage"] for row in rows if row["storage"]]
    if not all(exclusive for _, _, exclusive, _ in kept):
        faults.append(("", "storage ignores the condition of a create: `moe-ckpt doctor URL` says what that means"))
    elif kept and (sum(made for made, *_ in kept) != 1 or len({holds for _, holds, *_ in kept}) != 1):
        made = ", ".join(row["name"] for row in rows if row["storage"] and row["storage"][0])
        faults.append(
            (
                made,
                "each was told that it made a key which all tried to make at once: they do not have the same storage",
            )
        )
    for row in rows:
        row["ranks"] = [each["rank"] for each in ranks if each["node"] == row["node"]]
        row["good"] = not any(row["name"] in name for name, _ in faults)
    told = [{"node": name, "fault": fault} for name, fault in faults]
    return Answer(
        {"nodes": rows, "faults": told, "silent": silent, "seconds": seconds},
        lambda: _tables(rows, faults, world_size, seconds),
        bool(told),
    )


def _tables(
    rows: Sequence[Row], faults: Sequence[tuple[str, str]], world_size: int, seconds: float
) -> list[RenderableType]:
    titles = ("node", "ranks", "address", "clock", "descriptors", "shared memory", "sends", "storage", "state")
    table = plain_table(*titles, right=titles[3:8])
    for row in rows:
        first, last, storage = row["ranks"][0], row["ranks"][-1], row["storage"]
        ranks, address = (
            f"{first}-{last}" if last > first else str(first),
            f"{row['address']} {row['interface']}".strip(),
        )
        rate = "-" if row["rate"] is None else rate_text(row["rate"])
        cells = (_offset(row["ahead"]), str(row["files"]), size_text(row["free"]), rate)
        table.add_row(
            row["name"],
            ranks,
            address or "loopback",
            *cells,
            _offset(storage[3])[1:] if storage else "-",
            "good" if row["good"] else "BAD",
        )
    said = [f"{f'node {name}: ' if name else ''}{fault}" for name, fault in faults]
    count = sum(len(row["ranks"]) for row in rows)
    return [
        table,
        *said,
        f"{'NOT GOOD' if said else 'good'}: {count} of {world_size} ranks on {len(rows)} nodes, {seconds:.1f} s",
    ]


def _offset(seconds: float) -> str:
    return f"{1000 * seconds:+.1f} ms" if abs(seconds) < 1 else f"{seconds:+.1f} s"
