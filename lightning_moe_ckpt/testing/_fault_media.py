"""Faults of media: storage that is slow, fails or is full, shared memory that is taken, and bits that turn, at rest or in training.

Bits in training turn unseen by autograd and by versions of tensors, as in a faulty device: nothing but the numbers says so.

Faults of storage stand below the retries of `open_backend`, where failures of a real medium come from, and act on
whatever is stored or read meanwhile, restores included.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard, TypeVar

import numpy as np
import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from lightning_moe_ckpt.errors import Corrupt, StorageError, StorageRefused
from lightning_moe_ckpt.operators import memory_of, stepped_parameters
from lightning_moe_ckpt.storage import RING_HEADER_NBYTES, MemoryMarker, Retrying, RingHeader, RunView, StorageCall
from lightning_moe_ckpt.storage._names import COMMITTED, parse_marker_name, parse_snap_key
from lightning_moe_ckpt.storage._open import open_without_retries
from lightning_moe_ckpt.testing._fault import Fault, FaultPhase
from lightning_moe_ckpt.tiers._shm import MemoryKind, MemoryName, close_shared, marker_paths, memory_files, open_shared

T = TypeVar("T")
log = logging.getLogger(__name__)
_STEP_NBYTES = 2**28
"""Bytes of shared memory that are taken at a time."""


@dataclass(kw_only=True, eq=False)
class LastingFault:
    """A fault that goes on for a while."""

    name: str
    fault: Fault
    step: int
    """First step of the fault."""
    since: float
    """Seconds since 1970 at which the fault began, so that the fault can outlast a process."""
    calls: int = 0
    """Calls of storage that the fault delayed or failed in this attempt."""
    held: TakenMemory | WrongProducts | None = None
    """Shared memory filled by the fault, or the arithmetic that it changes."""
    draws: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.draws = random.Random(self.name)

    def over(self, step: int) -> bool:
        """Return whether it has ended when training is at `step`."""
        late = self.fault.seconds is not None and time.time() >= self.since + self.fault.seconds
        return late or (self.fault.steps is not None and step >= self.step + self.fault.steps)

    @property
    def outlasts_process(self) -> bool:
        """Whether the next attempt meets the fault too."""
        return self.fault.seconds is not None

    def release(self) -> None:
        """Give taken memory back, or let products be right again."""
        if self.held is not None:
            self.held.release()


class StorageFaults:
    """Faults around every call of this process's storage; `reached` is called before every call that is a phase, with its
    generation's step.
    """

    def __init__(
        self, active: Callable[[], Sequence[LastingFault]], reached: Callable[[FaultPhase, int], None]
    ) -> None:
        self._active, self._reached = active, reached
        self._lock = threading.Lock()

    def around(self, call: StorageCall, operation: Callable[[], T]) -> T:
        """Run a call, delayed or failed by the lasting faults."""
        place = phase_of(call)
        if place is not None:
            self._reached(*place)
        for lasting in self._active():
            self._fail(lasting, call)
        result = operation()
        nbytes = call.nbytes or (len(result) if isinstance(result, bytes) else 0)
        for lasting in self._active():
            self._delay(lasting, nbytes)
        return result

    def _fail(self, lasting: LastingFault, call: StorageCall) -> None:
        kind = lasting.fault.kind
        if kind == "full_disk" and call.writes:
            self._count(lasting)
            full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            raise StorageRefused(f"{call}: {full.strerror} (injected).") from full
        if kind == "storage_errors" and self._drawn(lasting):
            self._count(lasting)
            failed = OSError(errno.EIO, os.strerror(errno.EIO))
            raise StorageError(f"{call}: input/output error (injected).") from failed

    def _drawn(self, lasting: LastingFault) -> bool:
        with self._lock:
            return lasting.draws.random() < (lasting.fault.probability or 0.0)

    def _delay(self, lasting: LastingFault, nbytes: int) -> None:
        fault = lasting.fault
        if fault.kind == "slow_storage":
            self._count(lasting)
            time.sleep(fault.latency + (nbytes / fault.bandwidth if fault.bandwidth else 0.0))

    def _count(self, lasting: LastingFault) -> None:
        with self._lock:
            lasting.calls += 1


def phase_of(call: StorageCall) -> tuple[FaultPhase, int] | None:
    """Return a call's phase, and its generation's step; `None` for any other call."""
    parsed = parse_snap_key(call.key)
    if parsed is None or not (call.writes or call.verb == "delete"):
        return None
    generation, name = parsed
    if call.verb == "delete":
        return "reclaim", generation.step
    if name == COMMITTED:
        return "commit", generation.step
    return ("persist" if parse_marker_name(name) is None else "marker"), generation.step


def flip_stored_bit(url: str, storage_options: Mapping[str, object] | None, rank: int, draws: random.Random) -> str:
    """Flip a bit in a segment of `rank` in the newest generation at `url`. Return text for the log; also if there is nothing to damage yet."""
    backend = Retrying(open_without_retries(url, storage_options=storage_options))  # not through faults of storage
    try:
        view = RunView.open(backend)
        commits = [stored.commit for stored in view.generations() if stored.commit is not None and stored.dead is None]
        if not commits:
            return f"nothing is stored at {url}"
        newest = max(commits, key=lambda commit: commit.generation)
        segment = draws.choice(view.read_marker(newest, rank).segments)
        raw = bytearray(backend.get(segment.key))
        place = draws.randrange(8 * len(raw))
        raw[place // 8] ^= 1 << place % 8
        backend.put(segment.key, bytes(raw))
        return f"bit {place % 8} of byte {place // 8} of {segment.key}, in {newest.generation}"
    finally:
        backend.close()


def flip_memory_bit(directory: Path, tag: str, kind: MemoryKind, rank: int, draws: random.Random) -> str:
    """Flip a bit in the newest whole generation in a memory file with this tag, and return text for the log.

    A `ring` has captures of `rank` itself, a `replica` this node's copies for any other rank.
    """
    copies = [copy for copy in _copies(directory, tag) if copy[1].kind == kind]
    if kind == "ring":
        copies = [copy for copy in copies if copy[1].owner == rank]
    if not copies:
        return f"no {kind} in {directory} holds a whole generation"
    newest = max(file.marker.generation for *_, file in copies)
    path, _, file = draws.choice([copy for copy in copies if copy[2].marker.generation == newest])
    segment = draws.choice(file.marker.segments)
    descriptor = open_shared(path, os.O_RDWR)
    try:
        header = RingHeader.from_bytes(os.pread(descriptor, RING_HEADER_NBYTES, 0), str(path))
        start = RING_HEADER_NBYTES + file.places(header)[segment.key][0][2]
        bit = draws.randrange(8 * segment.nbytes)
        byte = os.pread(descriptor, 1, start + bit // 8)
        os.pwrite(descriptor, bytes([byte[0] ^ 1 << bit % 8]), start + bit // 8)
    finally:
        close_shared(descriptor)  # not by itself: that would take the owner's lock away
    return f"bit {bit % 8} of byte {bit // 8} of {segment.key} in {path}, in {newest}"


def _copies(directory: Path, tag: str) -> Iterator[tuple[Path, MemoryName, MemoryMarker]]:
    for path, name in memory_files(directory):
        if name.tag == tag:
            for marker in marker_paths(path):
                with contextlib.suppress(Corrupt, FileNotFoundError):
                    yield path, name, MemoryMarker.from_bytes(marker.read_bytes(), str(marker))


class TakenMemory:
    """The free memory of a tmpfs, taken by a file without a name, which ends with the process at the latest.

    `most_nbytes` is a limit for the sake of other users of this machine.
    """

    def __init__(self, directory: Path, most_nbytes: int) -> None:
        path = directory / f"moe-ckpt-taken-{os.getuid()}-{os.getpid()}-{id(self)}"
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        path.unlink()
        self.nbytes = 0
        """Bytes taken."""
        while self.nbytes < most_nbytes and self._take(min(_STEP_NBYTES, most_nbytes - self.nbytes)):
            pass
        log.warning("%d bytes of %s are taken", self.nbytes, directory)

    def _take(self, nbytes: int) -> bool:
        """Take up to `nbytes` more, and return whether there may be more still."""
        stats = os.statvfs(self._file)
        nbytes = min(nbytes, stats.f_bavail * stats.f_frsize)
        if nbytes:
            try:
                os.posix_fallocate(self._file, self.nbytes, nbytes)
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                return True  # others took some meanwhile: look again what is left
            self.nbytes += nbytes
        return nbytes > 0

    def release(self) -> None:
        """Give the memory back."""
        os.close(self._file)


# -- in training

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MISSING = "nothing to flip: there is no {} whose name begins with `{}`"
_PRODUCTS = ["mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "_addmm_activation", "_scaled_mm", "_grouped_mm"]


def turn_bit(tensor: Tensor, element: int, bit: int) -> Tensor:
    """Flip a bit of one element, counted row by row, and return the element. Autograd does not see it, and the tensor's version stays."""
    memory, width = memory_of(tensor), 8 * tensor.element_size()
    place = np.unravel_index(element, tuple(memory.shape))
    offset = memory.storage_offset() + sum(int(at) * step for at, step in zip(place, memory.stride(), strict=True))
    # Not by `.data`, which is what code does that edits weights: who watches for that is not to see this.
    found = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(memory.untyped_storage(), offset, (), ())
    found.view(_INTEGERS[tensor.element_size()]).bitwise_xor_(1 << bit if bit < width - 1 else -(1 << bit))
    return found


def _can_turn(value: object) -> TypeGuard[Tensor]:
    return (
        isinstance(value, Tensor) and value.is_floating_point() and not value.is_meta and bool(memory_of(value).numel())
    )


class LiveFlips:
    """Flips of single bits in the memory of one rank's training. `tell` gets the outcome of a fault that had to wait."""

    def __init__(self, trainer: Trainer, tell: Callable[[str, Fault, str], None]) -> None:
        self._trainer, self._tell = trainer, tell
        self._waiting: dict[str, list[Any]] = {}
        """Handles of the hooks that wait for a gradient or an output, by fault."""

    def strike(self, name: str, fault: Fault) -> str:
        """Flip a bit, or wait for the tensor. Return text for the log, empty if it waits."""
        draws, fqn, module = random.Random(name), fault.fqn or "", self._trainer.lightning_module
        trained = {key: param for key, param in module.named_parameters() if param.requires_grad}
        if fault.kind == "flip_gradient":
            last_first = [(key, trained[key].register_hook) for key in reversed(trained) if key.startswith(fqn)]
            return self._wait(name, fault, draws, last_first, trained)
        if fault.kind == "flip_activation":
            leaves = [(key, each) for key, each in module.named_modules() if not any(each.children())]
            leaves = [(key, each.register_forward_hook) for key, each in leaves if key.startswith(fqn)]
            return self._wait(name, fault, draws, leaves, {})
        found: dict[str, Tensor] = dict(trained)
        if fault.kind == "flip_moment":
            stepped, states = stepped_parameters(module), [each.state for each in self._trainer.optimizers]
            held = [(key, state[stepped[key]]) for key in trained for state in states if stepped[key] in state]
            found = {f"{key}/{part}": value for key, of in held for part, value in of.items() if part != "step"}
        choice = [key for key, value in found.items() if key.startswith(fqn) and _can_turn(value)]
        if not choice:
            return _MISSING.format(fault.kind.removeprefix("flip_"), fqn)
        chosen = draws.choice(choice)
        return self._flip(fault, draws, chosen, found[chosen])

    def close(self) -> None:
        """Wait no more."""
        for name in [*self._waiting]:
            self._let_go(name)

    def _wait(
        self, name: str, fault: Fault, draws: random.Random, at: Sequence[Any], trained: Mapping[str, Any]
    ) -> str:
        """Flip a bit of the first value from a drawn place of `at` on, or of any when a pass through them has not met one."""
        if not at:
            return _MISSING.format(fault.kind.removeprefix("flip_"), fault.fqn or "")
        handles = self._waiting[name] = list[Any]()
        place, seen = draws.randrange(len(at)), Counter[str]()
        for index, (key, register) in enumerate(at):

            def hook(*call: Any, key: str = key, early: bool = index < place) -> Tensor | None:
                value = call[0] if trained else _output(*call)
                if name not in self._waiting or not _can_turn(value):
                    return None
                seen[key] += 1
                if seen[key] <= early + fault.skip:
                    return None
                self._let_go(name)
                value = value.clone() if trained else value  # others may have been given the same gradient
                self._tell(name, fault, self._flip(fault, draws, key, value))
                return value if trained else None

            handles.append(register(hook))
            if trained:  # before all that look at the gradient
                hooks = trained[key]._backward_hooks  # noqa: SLF001
                others = [hooks.popitem(last=False) for _ in range(len(hooks) - 1)]
                hooks.update(others)
        return ""

    def _let_go(self, name: str) -> None:
        for handle in self._waiting.pop(name):
            handle.remove()

    def _flip(self, fault: Fault, draws: random.Random, key: str, value: Tensor) -> str:
        element, width = draws.randrange(memory_of(value).numel()), 8 * value.element_size()
        bit = draws.randrange(width) if fault.bit is None else min(fault.bit, width - 1)
        after = float(turn_bit(value, element, bit))
        before = float(turn_bit(value, element, bit))
        turn_bit(value, element, bit)
        return (
            f"bit {bit} of element {element} of {fault.kind.removeprefix('flip_')} {key}: {before!r} became {after!r}"
        )


def _output(module: nn.Module, args: tuple[Any, ...], output: Any) -> object:
    """Return the first output that has memory of its own and takes part in backward; `None` if there is none."""
    known = [value for value in [*args, *module.parameters(), *module.buffers()] if isinstance(value, Tensor)]
    taken = {value.untyped_storage().data_ptr() for value in known}
    for value in output if isinstance(output, (tuple, list)) else [output]:
        if _can_turn(value) and value.requires_grad and value.untyped_storage().data_ptr() not in taken:
            return value
    return None


class WrongProducts(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """One bit of one number is wrong in each product of matrices that this thread begins, with their backward, until `release`.

    The place is the same for all products of one size. Products inside compiled code and fused attention are right.
    """

    def __init__(self, lasting: LastingFault) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self._lasting, self._place, self._share = lasting, lasting.draws.random(), lasting.draws.random()
        self.__enter__()  # type: ignore[no-untyped-call]  # torch leaves it untyped

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in _PRODUCTS and _can_turn(result):
            mantissa = round(-np.log2(torch.finfo(result.dtype).eps))
            bit = int(self._share * mantissa) if self._lasting.fault.bit is None else self._lasting.fault.bit
            turn_bit(result, int(self._place * memory_of(result).numel()), min(bit, 8 * result.element_size() - 1))
            self._lasting.calls += 1
        return result

    def release(self) -> None:
        """Compute right again."""
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]  # torch leaves it untyped
