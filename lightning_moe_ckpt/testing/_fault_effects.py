"""Apply each kind of fault to this process, its node, its memory and its storage."""

from __future__ import annotations

import json
import logging
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from lightning_moe_ckpt.callbacks._base import CheckpointCallback
from lightning_moe_ckpt.testing import _fault_process
from lightning_moe_ckpt.testing._fault import LASTING, NODE_LOSSES, OF_STORAGE, Fault
from lightning_moe_ckpt.testing._fault_media import LastingFault, TakenMemory, flip_memory_bit, flip_stored_bit
from lightning_moe_ckpt.testing._fault_record import FaultRecord, read_ranks
from lightning_moe_ckpt.testing._kill import send_signal
from lightning_moe_ckpt.testing._records import Record
from lightning_moe_ckpt.tiers import shared_directory, shared_name, this_domain

log = logging.getLogger(__name__)
_NODE_PATIENCE = 30.0
"""Seconds that nodes which are lost together wait for each other."""
_one_stop = threading.Lock()


class Effects:
    """Carry out faults, and end those that last for a time.

    Args:
        record: record of this rank's faults.
        checkpoints: callback whose storage and memory are damaged.
    """

    def __init__(self, record: FaultRecord, checkpoints: CheckpointCallback | None) -> None:
        self._record, self._checkpoints = record, checkpoints
        self._lasting: list[LastingFault] = []
        self._lock = threading.Lock()

    # -- who is here

    def join(self) -> Record:
        """Return the line by which other ranks can end this process and its node.

        Its `files` are patterns of the run's files in this node's shared memory: this rank's rings, and replicas for others.
        """
        domain, own = this_domain(), os.getpid()
        tag, files = None if self._checkpoints is None else self._checkpoints.memory_tag, list[str]()
        if tag is not None:
            prefix = shared_name(tag, 0).removesuffix("0.ring")
            patterns = (f"{prefix}{self._record.rank}.*", f"{prefix}*.replica*")
            files = [str(shared_directory() / pattern) for pattern in patterns]
        began = _fault_process.start_time(own)
        return {"pid": own, "began": began, "node": domain.node, "rack": domain.rack, "files": files}

    # -- striking

    def concerns(self, fault: Fault) -> bool:
        """Return whether this process carries out the fault. For nodes and racks, one rank of each lost node does."""
        if fault.kind not in NODE_LOSSES:
            return True
        lost = self._lost(fault)
        own = self._own_node(lost)
        return own is not None and _leader_of(lost, own) == self._record.rank

    def strike(self, name: str, fault: Fault, step: int) -> str:
        """Carry out the fault. Does not return if the fault ends this process.

        Returns:
            Its outcome as text; empty if the kind says everything.
        """
        if fault.kind in LASTING:
            self._begin(LastingFault(name=name, fault=fault, step=step, since=time.time()))
        elif fault.kind == "sigkill":
            send_signal(signal.SIGKILL)
        elif fault.kind == "sigstop":
            stop(fault.seconds)
        elif fault.kind == "bit_flip":
            return self._flip(name, fault)
        else:
            lost = self._lost(fault)
            self._lose_node(name, lost, self._own_node(lost) or "")
        return ""

    def _flip(self, name: str, fault: Fault) -> str:
        draws, rank = random.Random(name), self._record.rank
        if self._checkpoints is None:
            return "nothing is stored: there is no checkpoint callback"
        if fault.at_rest == "storage":
            return flip_stored_bit(self._checkpoints.url, self._checkpoints.storage_options, rank, draws)
        tag = self._checkpoints.memory_tag or ""
        return flip_memory_bit(shared_directory(), tag, fault.at_rest, rank, draws)

    def _lost(self, fault: Fault) -> list[Record]:
        """Return the lines of the processes that are lost, as they joined last."""
        joins = ([line for line in lines if line["event"] == "join"] for _, lines in read_ranks(self._record.folder))
        everybody = [own[-1] for own in joins if own]
        if fault.rank == "all":
            return everybody
        (struck,) = (member for member in everybody if member["rank"] == fault.rank)
        place = "node" if fault.kind == "node_loss" else "rack"
        return [member for member in everybody if member[place] == struck[place]]

    def _own_node(self, lost: Sequence[Record]) -> str | None:
        return next((member["node"] for member in lost if member["rank"] == self._record.rank), None)

    def _lose_node(self, name: str, lost: Sequence[Record], node: str) -> None:
        """End all processes of `node`, this one among them, and remove its files. Does not return."""
        here, folder = [member for member in lost if member["node"] == node], self._record.folder
        ready = {
            each: folder / f"{re.sub('[^0-9A-Za-z]', '-', name)}.node{_leader_of(lost, each):05d}.lost"
            for each in sorted({member["node"] for member in lost})
        }
        order = {
            "processes": [[member["pid"], member["began"]] for member in here],
            "files": sorted({pattern for member in here for pattern in member["files"]}),
            "ready": str(ready[node]),
            "others": [str(path) for other, path in ready.items() if other != node],
            "record": str(self._record.path),
            "patience": _NODE_PATIENCE,
        }
        helper = _start("lose", json.dumps(order))
        raise RuntimeError(f"the helper that should have ended node {node!r} ended with {helper.wait()}")

    # -- what lasts

    def _begin(self, lasting: LastingFault) -> None:
        if lasting.fault.kind == "full_shared_memory":
            lasting.memory = TakenMemory(shared_directory(), lasting.fault.nbytes or 0)
        with self._lock:
            self._lasting.append(lasting)

    def go_on(self, lines: Sequence[Record]) -> None:
        """Continue faults that began in an earlier process of this rank and have not ended."""
        over = {line["name"] for line in lines if line["event"] == "over"}
        for line in lines:
            if line["event"] == "fault" and line["kind"] in LASTING and line["name"] not in over:
                lasting = LastingFault(
                    name=line["name"], fault=Fault(**line["fault"]), step=line["step"], since=line["time"]
                )
                if lasting.outlasts_process and not lasting.over(0):
                    self._begin(lasting)

    def expire(self, step: int) -> None:
        """End the faults whose time is over when training is at `step`."""
        with self._lock:
            over = [each for each in self._lasting if each.over(step)]
            for each in over:
                self._lasting.remove(each)
                each.release()
        for each in over:
            log.warning("%s is over at step %d; it hit %d calls", each.fault, step, each.calls)
            self._record.write("over", name=each.name, step=step, calls=each.calls)

    def of_storage(self) -> list[LastingFault]:
        """Return the faults of storage that are active now."""
        with self._lock:
            return [each for each in self._lasting if each.fault.kind in OF_STORAGE and not each.over(-1)]

    def close(self) -> None:
        """End all active faults."""
        with self._lock:
            ended, self._lasting = self._lasting, []
        for each in ended:
            self._record.write("struck", name=each.name, outcome=f"it hit {each.calls} calls", calls=each.calls)
            each.release()


def stop(seconds: float | None) -> None:
    """SIGSTOP this process; returns when it goes on.

    Stops in several threads come one after the other, each for as long as it should.

    Args:
        seconds: after which a helper process sends SIGCONT; `None` leaves that to others.
    """
    own = os.getpid()
    with _one_stop:
        if seconds is None:
            os.kill(own, signal.SIGSTOP)
        else:
            _start("stop", str(own), str(seconds)).wait()


def _leader_of(lost: Sequence[Record], node: str) -> int:
    """Return the rank that ends its node."""
    return min(int(member["rank"]) for member in lost if member["node"] == node)


def _start(*command: str) -> subprocess.Popen[bytes]:
    script = Path(_fault_process.__file__)
    return subprocess.Popen([sys.executable, "-I", "-S", str(script), *command], start_new_session=True)  # noqa: S603
