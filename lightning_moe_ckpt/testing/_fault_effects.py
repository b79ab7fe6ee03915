"""Apply each kind of fault to this process, its node, its memory and its storage."""

from __future__ import annotations

import logging
import os
import random
import signal
import threading
import time
from collections.abc import Sequence

from lightning_moe_ckpt.callbacks._base import CheckpointCallback
from lightning_moe_ckpt.testing._fault import LASTING, OF_STORAGE, Fault
from lightning_moe_ckpt.testing._fault_media import TakenMemory, flip_memory_bit, flip_stored_bit
from lightning_moe_ckpt.testing._fault_process import start_time
from lightning_moe_ckpt.testing._fault_record import FaultRecord, Line
from lightning_moe_ckpt.testing._fault_signals import Member, leader_of, lose_node, members, stop
from lightning_moe_ckpt.testing._fault_storage import LastingFault
from lightning_moe_ckpt.testing._lives_kill import send_signal
from lightning_moe_ckpt.tiers import shared_directory, shared_name, this_domain

log = logging.getLogger(__name__)


class Effects:
    """Carry out faults, and end those that last for a time."""

    def __init__(self, record: FaultRecord, checkpoints: CheckpointCallback | None) -> None:
        """Do nothing yet.

        Args:
            record: record of this rank's faults.
            checkpoints: callback whose storage and memory are damaged.
        """
        self._record, self._checkpoints = record, checkpoints
        self._lasting: list[LastingFault] = []
        self._taken: dict[str, TakenMemory] = {}
        self._lock = threading.Lock()

    # -- who is here

    def join(self) -> Line:
        """Return the line by which other ranks can end this process and its node."""
        domain, own = this_domain(), os.getpid()
        return {
            "pid": own,
            "began": start_time(own),
            "node": domain.node,
            "rack": domain.rack,
            "files": self._own_files(),
        }

    def _own_files(self) -> list[str]:
        """Return patterns of the run's files in this node's shared memory: this rank's rings, and replicas for others."""
        tag = None if self._checkpoints is None else self._checkpoints.memory_tag
        if tag is None:
            return []
        prefix = shared_name(tag, 0).removesuffix("0.ring")
        return [
            str(shared_directory() / pattern) for pattern in (f"{prefix}{self._record.rank}.*", f"{prefix}*.replica*")
        ]

    # -- striking

    def concerns(self, fault: Fault) -> bool:
        """Return whether this process carries out the fault. For nodes and racks, one rank of each lost node does."""
        if fault.kind not in {"node_loss", "rack_loss"}:
            return True
        lost = self._lost(fault)
        own = self._own_node(lost)
        return own is not None and leader_of(lost, own) == self._record.rank

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
            lose_node(self._record, name, lost, self._own_node(lost) or "")
        return ""

    def _flip(self, name: str, fault: Fault) -> str:
        draws, rank = random.Random(name), self._record.rank
        if self._checkpoints is None:
            return "nothing is stored: there is no checkpoint callback"
        if fault.at_rest == "storage":
            return flip_stored_bit(self._checkpoints.url, self._checkpoints.storage_options, rank, draws)
        tag = self._checkpoints.memory_tag or ""
        return flip_memory_bit(shared_directory(), tag, fault.at_rest, rank, draws)

    def _lost(self, fault: Fault) -> Sequence[Member]:
        everybody = members(self._record)
        if fault.rank == "all":
            return everybody
        (struck,) = (member for member in everybody if member.rank == fault.rank)
        if fault.kind == "node_loss":
            return [member for member in everybody if member.node == struck.node]
        return [member for member in everybody if member.rack == struck.rack]

    def _own_node(self, lost: Sequence[Member]) -> str | None:
        return next((member.node for member in lost if member.rank == self._record.rank), None)

    # -- what lasts

    def _begin(self, lasting: LastingFault) -> None:
        if lasting.fault.kind == "full_shared_memory":
            memory = TakenMemory(shared_directory(), lasting.fault.nbytes or 0)
            with self._lock:
                self._taken[lasting.name] = memory
        with self._lock:
            self._lasting.append(lasting)

    def go_on(self, lines: Sequence[Line]) -> None:
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
                if each.name in self._taken:
                    self._taken.pop(each.name).release()
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
            for each in self._lasting:
                self._record.write("struck", name=each.name, outcome=f"it hit {each.calls} calls", calls=each.calls)
            self._lasting.clear()
            taken, self._taken = list(self._taken.values()), {}
        for memory in taken:
            memory.release()
