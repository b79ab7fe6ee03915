"""Trainings for `moe-ckpt bench peers`, measured and killed, forked by each environment's process.

This process has imported everything and started nothing, so a training of any system begins with a fork. Orders come
through a pipe: begin a training, give a turn, kill and start again.

A turn has unmeasured steps, to fill the pipeline of saves, then measured steps, whole cadences. Then the training waits
until its saves are safe, to leave the machine to the next turn. A thread watches the last turn, whose steps do not count.
"""

from __future__ import annotations

import gc
import hashlib
import importlib
import logging
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from itertools import pairwise
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from typing_extensions import override

from benchmarks.peers_saving import SavingEvery
from benchmarks.peers_systems import (
    BESIDE_AGENT,
    SYSTEMS,
    LightningSaving,
    die_with_parent,
    dlrover_agent,
    forget,
    rests,
)
from lightning_moe_ckpt.benchmarks._fits import (
    BenchModel,
    HandOver,
    ModelSize,
    StorageGate,
    TurnFailed,
    TurnTaker,
    bench_trainer,
    one_thread,
    own_memory,
    patient_storage,
    quiet_lightning,
)
from lightning_moe_ckpt.callbacks._base import CheckpointCallback
from lightning_moe_ckpt.errors import CheckpointError
from lightning_moe_ckpt.snapshot._shards import as_memoryview
from lightning_moe_ckpt.storage import digest_of, wrapping_backends

_TURN = timedelta(minutes=2)
_SAFE_SECONDS = 20.0
"""Patience with the last save, until it is safe."""
_LOOK_SECONDS = 0.004
_MAX_STEPS = 100_000
_SAID = re.compile(r"corrupt|damage|digest|checksum|\bcrc|does not match", re.IGNORECASE)
_PATTERN_NBYTES = 64


@dataclass(frozen=True, kw_only=True)
class PeerFit:
    """A training with one system."""

    system: str
    folder: Path
    memory: Path
    """Folder on a tmpfs, in the place of the node's shared memory."""
    size: ModelSize
    every: int
    settle: int
    steps: int
    """Steps of a turn: `settle` are not measured, `steps` are."""
    turns: int = 0
    """Turns before the watched turn."""
    stops: tuple[int, ...] = ()
    """Last steps before each halt of a killed training; empty for a training in turns."""
    lost: bool = False
    """Whether the node's memory is lost before."""

    @property
    def name(self) -> str:
        """Name of this run among all on the machine."""
        return f"moe-ckpt-{hashlib.sha256(str(self.folder).encode()).hexdigest()[:16]}"

    def __call__(self, hand_over: HandOver[Any]) -> None:
        """Train, and hand over a `PeerTurn` at the end of each turn, or a `_Stopped` at each stop."""
        system, place = SYSTEMS[self.system], self.folder
        die_with_parent()
        own_memory(self.memory, lost=self.lost)
        if self.stops:
            os.environ.update(BESIDE_AGENT)
        else:
            gc.collect()  # writes to every object: who looks at them later would seem to need this memory
        if system.place == "memory" and not system.is_ours:
            place = self.memory
        place.mkdir(parents=True, exist_ok=True)
        checkpoint = system.make(place, self.every, self.name)
        gate = StorageGate()
        resting = system.is_ours and system.place == "memory" and not rests(self.system, system.place)
        tap: Callback = _Stops(self, checkpoint, hand_over) if self.stops else _Turns(self, checkpoint, hand_over)
        with ExitStack() as stack:
            for each in (one_thread(), quiet_lightning(), patient_storage()):
                stack.enter_context(each)
            if resting:
                stack.enter_context(wrapping_backends(gate.backend))
            callbacks = [_Resting(checkpoint, gate)] * resting + [tap] + [checkpoint] * (checkpoint is not None)
            trainer = bench_trainer(
                accelerator="cpu", strategy="auto", callbacks=callbacks, max_steps=_MAX_STEPS,
                enable_checkpointing=checkpoint is not None, plugins=[AsyncCheckpointIO()] if system.beside else None,
            )  # fmt: skip
            torch.manual_seed(0)
            found = checkpoint.found if isinstance(checkpoint, LightningSaving) else None
            loader = DataLoader(_Tokens(self.size, checkpoint), batch_size=self.size.batch_size)
            trainer.fit(BenchModel(self.size), loader, ckpt_path=None if found is None else str(found))


class _Tokens(Dataset[tuple[Tensor]]):
    """Random tokens, from the restored step on if `checkpoint` saves no place in the data."""

    def __init__(self, size: ModelSize, checkpoint: Callback | None) -> None:
        generator = torch.Generator().manual_seed(0)
        self._tokens = torch.randint(size.vocabulary, (4096, size.context + 1), generator=generator)
        self._batch_size, self._checkpoint = size.batch_size, checkpoint

    def __len__(self) -> int:
        return _MAX_STEPS * self._batch_size

    @override
    def __getitem__(self, index: int) -> tuple[Tensor]:
        return (self._tokens[(first_of(self._checkpoint) * self._batch_size + index) % len(self._tokens)],)


def first_of(checkpoint: Callback | None) -> int:
    """Return the steps to add to the Trainer's count."""
    return checkpoint.first_step if isinstance(checkpoint, SavingEvery) else 0


class _Resting(Callback):
    """Let storage rest from generation 0 on: memory works alone, as with other systems."""

    def __init__(self, checkpoint: Callback | None, gate: StorageGate) -> None:
        self._checkpoint, self._gate = checkpoint, gate

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: object) -> None:
        if isinstance(self._checkpoint, CheckpointCallback) and trainer.global_step == 1:
            self._checkpoint.wait_committed()
            self._gate.close()

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.global_step:
            self._gate.close()


# -- turns


@dataclass(frozen=True)
class PeerTurn:
    """Means per step of a turn; the watched turn also has safety and memory."""

    seconds: float
    beside_seconds: float
    """CPU time of other threads and of child processes."""
    hook_seconds: float
    """Training-thread time in saves, waits included."""
    nbytes: float
    """Bytes taken."""
    safe_seconds: list[float] = field(default_factory=list)
    """Seconds from a step's end until a restart would go back no further, per safe save."""
    memory_nbytes: int = 0
    """Most memory of this process and its children, files in memory included."""


def cost_of(checkpoint: Callback | None) -> tuple[float, float]:
    """Return the seconds of the training thread in `checkpoint` so far, and the bytes taken."""
    if isinstance(checkpoint, CheckpointCallback):
        return checkpoint.report.overhead_seconds, checkpoint.report.nbytes_captured
    return getattr(checkpoint, "seconds", 0.0), getattr(checkpoint, "nbytes", 0.0)


def newest_of(checkpoint: Any, place: str) -> int:
    """Return the newest step in `place` for a restart."""
    if isinstance(checkpoint, CheckpointCallback):
        return checkpoint.report.generations.get("host" if place == "memory" else place, 0)
    return int(checkpoint.newest())


class _Turns(Callback):
    """Measure the last steps of every turn."""

    def __init__(self, fit: PeerFit, checkpoint: Callback | None, hand_over: HandOver[PeerTurn]) -> None:
        self._fit, self._checkpoint, self._hand_over = fit, checkpoint, hand_over
        self._place = SYSTEMS[fit.system].place
        self._watch: _Watch | None = None
        self._turns = 0
        self._before: tuple[float, ...]

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: object) -> None:
        fit, step = self._fit, trainer.global_step
        within = step % (fit.settle + fit.steps)
        if self._watch is not None and step % fit.every == 0:
            self._watch.due[step] = time.perf_counter()
        if within == fit.settle:
            self._before = self._read()
        elif within == 0:
            now, before = self._read(), self._before
            wall, beside, hooks, nbytes = ((after - was) / fit.steps for after, was in zip(now, before, strict=True))
            self._hand_over(PeerTurn(wall, beside, hooks, nbytes, **self._seen(step)))
            self._turns += 1
            if self._turns == fit.turns:
                self._watch = _Watch(self._checkpoint, self._place, [fit.memory, *_segments(fit.name)])

    def _read(self) -> tuple[float, ...]:
        cpu = time.process_time() - time.thread_time() + sum(map(_cpu_seconds, descendants(os.getpid())))
        return time.perf_counter(), cpu, *cost_of(self._checkpoint)

    def _seen(self, step: int) -> dict[str, Any]:
        """Wait until earlier saves are safe, without the step under way. Return the watch's figures, if any."""
        if isinstance(self._checkpoint, CheckpointCallback) and self._place == "storage":
            self._checkpoint.wait_committed(1.0)  # a batch of differences waits for more of them
        elif self._checkpoint is not None:
            limit, last = time.perf_counter() + _SAFE_SECONDS, (step - 1) // self._fit.every * self._fit.every
            while self._place == "storage" and newest_of(self._checkpoint, self._place) < last - self._fit.every:
                if time.perf_counter() > limit:
                    break
                time.sleep(_LOOK_SECONDS)
        return self._watch.end() if self._watch is not None else {}


class _Watch:
    """A thread to note times of safe saves, and memory held."""

    def __init__(self, checkpoint: Callback | None, place: str, tmpfs: list[Path]) -> None:
        self._checkpoint, self._place, self._tmpfs = checkpoint, place, tmpfs
        self.due: dict[int, float] = {}
        """End times for saved steps not known to be safe, by step."""
        self._safe, self._memory, self._over = list[float](), 0, threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def end(self) -> dict[str, Any]:
        """Stop, and return the figures."""
        limit = time.perf_counter() + _SAFE_SECONDS / 4  # some become safe only as training goes on
        while len(self.due) > 1 and time.perf_counter() < limit:  # the last one is not saved yet
            time.sleep(_LOOK_SECONDS)
        self._over.set()
        self._thread.join()
        return {"safe_seconds": self._safe, "memory_nbytes": self._memory}

    def _look(self) -> None:
        looked = 0.0
        while not self._over.wait(_LOOK_SECONDS):
            newest = newest_of(self._checkpoint, self._place) if self._checkpoint else _MAX_STEPS
            now = time.perf_counter()
            for step in [step for step in [*self.due] if step <= newest]:
                self._safe.append(now - self.due.pop(step))
            if now - looked > 0.05:
                looked = now
                self._memory = max(self._memory, _held_nbytes(self._tmpfs))


def descendants(pid: int) -> list[int]:
    """Return the children of process `pid`, and theirs."""
    parents: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # gone
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    found, new = list[int](), [pid]
    while new:
        new = [child for child, parent in parents.items() if parent in new]
        found += new
    return found


def _cpu_seconds(pid: int) -> float:
    with suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0


def _held_nbytes(tmpfs: list[Path]) -> int:
    """Return the bytes of anonymous and shared memory, and of unmapped files on a tmpfs."""
    own = shared = 0
    for pid in [os.getpid(), *descendants(os.getpid())]:
        with suppress(OSError):
            lines = dict(re.findall(r"(?m)^(Pss_\w+):\s+(\d+)", Path(f"/proc/{pid}/smaps_rollup").read_text()))
            own, shared = own + 1024 * int(lines["Pss_Anon"]), shared + 1024 * int(lines["Pss_Shmem"])
    return own + max(shared, sum(512 * each.stat().st_blocks for place in tmpfs for each in _files(place)))


def _segments(name: str) -> list[Path]:
    return [*Path("/dev/shm").glob(f"*{name}*")]  # noqa: S108


def _files(place: Path) -> Iterator[Path]:
    yield from ([place] if place.is_file() else (path for path in place.rglob("*") if path.is_file()))


# -- kills


class _Stopped(NamedTuple):
    """A halted training's state."""

    at: float  # when its last step ended, by the clock that processes share
    first: int  # step that it went on from; 0 for a fresh start
    digests: dict[int, str]  # of all weights and of the optimizer, by step
    patterns: dict[int, bytes]  # in the middle of a weight, by step
    said: str  # what the process has warned of


class _Stops(Callback):
    """Hand over after some steps."""

    def __init__(self, fit: PeerFit, checkpoint: Callback | None, hand_over: HandOver[_Stopped]) -> None:
        self._fit, self._checkpoint, self._hand_over = fit, checkpoint, hand_over
        self._digests, self._patterns = dict[int, str](), dict[int, bytes]()
        self._said, self._first = _Said(), 0
        logging.getLogger().addHandler(self._said)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._first = self._step(trainer)
        if self._first:
            self._note(self._first, trainer, pl_module)

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: object) -> None:
        step, at = self._step(trainer), time.monotonic()
        self._note(step, trainer, pl_module)
        if step in self._fit.stops:
            self._hand_over(_Stopped(at, self._first, self._digests, self._patterns, self._said.text))

    def _step(self, trainer: Trainer) -> int:
        return first_of(self._checkpoint) + trainer.global_step

    def _note(self, step: int, trainer: Trainer, module: LightningModule) -> None:
        held = [*module.parameters(), *_tensors(trainer.optimizers[0])]
        self._digests[step] = " ".join(str(digest_of(as_memoryview(each.detach()))) for each in held)
        weight = as_memoryview(next(module.parameters()).detach())
        middle = len(weight) // 2
        self._patterns[step] = bytes(weight[middle : middle + _PATTERN_NBYTES])


def _tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    states = (optimizer.state[each] for group in optimizer.param_groups for each in group["params"])
    return [each for state in states for _, each in sorted(state.items()) if isinstance(each, Tensor)]


class _Said(logging.Handler):
    """Keep warnings."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.text = ""

    @override
    def emit(self, record: logging.LogRecord) -> None:
        self.text += f"{record.getMessage()}\n"


@dataclass(frozen=True, kw_only=True)
class PeerKills:
    """Costs when a system's trainings are killed, and a flipped bit's fate."""

    killed_at: list[int]
    resumed_from: list[int]
    """Steps; 0 where training began anew."""
    seconds: list[float]
    """Seconds from each SIGKILL to the end of the first step never taken before, in forked processes, without imports."""
    state_equal: bool
    """Whether weights and optimizer after each kill equalled the saved step's, bit by bit."""
    steps_equal: bool
    """Whether weights and optimizer also equalled the killed training's at the step of the kill."""
    flip: str
    """Fate of a flipped bit of a weight: `noticed`, `not noticed`, `no effect` or `none flipped`."""
    flip_said: str
    """Words or act by which a system noticed the bit, or the reason why none was flipped."""


class _Node:
    """A killed training's node: nothing is left if storage has the copies, else all but the process."""

    def __init__(self, fit: PeerFit) -> None:
        self._fit, self._spared = fit, SYSTEMS[fit.system].place == "memory"
        self._orphans, self._agent = list[int](), self._new_agent()

    def start(self, *stops: int) -> TurnTaker[_Stopped]:
        """Begin a training with halts after these steps."""
        return TurnTaker(replace(self._fit, stops=stops, lost=not self._spared), _TURN)

    def kill(self, training: TurnTaker[_Stopped]) -> float:
        """Kill the training by SIGKILL and return the time, by the clock of all processes."""
        self._orphans += descendants(training.pid)
        at = time.monotonic()
        training.kill()
        if not self._spared:
            self._clear()
            self._agent = self._new_agent()
        return at

    def close(self) -> None:
        """Leave nothing behind."""
        self._clear()
        forget(self._fit.name)

    def _new_agent(self) -> Any:
        return dlrover_agent(self._fit.name) if self._fit.system.startswith("dlrover") else None

    def _clear(self) -> None:
        if self._agent is not None:
            self._agent.kill()
            self._agent.join()
            forget(self._fit.name)
        _kill_all(self._orphans)
        self._orphans.clear()


def kill(fit: PeerFit, num_kills: int) -> PeerKills:
    """Kill trainings, each a step before a save, and start them again; then flip a bit of a weight, and start once more.

    Raises the system's `CheckpointError` before the flip, and `TurnFailed` for other errors.
    """
    stops = [(4 + 2 * i) * fit.every - 1 for i in range(num_kills + 1)]
    node, after = _Node(fit), list[_Stopped]()
    training = node.start(stops[0])
    try:
        before, found = [training.take()], list[tuple[float, bool, bool]]()
        for stop, until in pairwise(stops):
            at = node.kill(training)
            training = node.start(stop + 1, until)
            new, old = training.take(), before[-1]
            after.append(new)
            state = not new.first or new.digests[new.first] == old.digests.get(new.first)
            found.append((new.at - at, state, new.digests[stop] == old.digests[stop]))
            before.append(training.take())
        node.kill(training)
        training, (flip, said) = _after_flip(fit, node, before[-1], stops[-1])
    finally:
        node.kill(training)
        node.close()
    seconds, state_equal, steps_equal = zip(*found, strict=True)
    return PeerKills(
        killed_at=stops[:-1], resumed_from=[each.first for each in after], seconds=[*seconds],
        state_equal=all(state_equal), steps_equal=all(steps_equal), flip=flip, flip_said=said,
    )  # fmt: skip


def _after_flip(fit: PeerFit, node: _Node, before: _Stopped, stop: int) -> tuple[TurnTaker[_Stopped], tuple[str, str]]:
    """Flip a bit in every copy of a weight at steps of the last process, start a training, and return both with the bit's fate."""
    places = [fit.memory, *_segments(fit.name)] if SYSTEMS[fit.system].place == "memory" else [fit.folder]
    flipped = {step for step, pattern in before.patterns.items() if _flip(places, pattern)}
    training = node.start(stop)
    if not flipped:
        return training, ("none flipped", "nothing that was saved has the bytes of the weight")
    try:
        new = training.take()
    except (CheckpointError, TurnFailed):
        return training, ("noticed", "refused")
    if new.first not in flipped or _SAID.search(new.said):
        return training, ("noticed", f"went on from step {new.first}" if new.first else "began anew")
    same = new.patterns[new.first] == before.patterns[new.first] or new.digests[stop] == before.digests[stop]
    return training, ("no effect" if same else "not noticed", "")  # it may have had the weight from another copy


def _flip(places: list[Path], pattern: bytes) -> bool:
    """Flip a bit of every copy of `pattern` in files."""
    found = False
    for path in {each for place in places if place.exists() for each in _files(place)}:
        with path.open("r+b") as file:
            at = file.read().find(pattern) if path.stat().st_size else -1
            if at >= 0:
                found = True
                file.seek(at + _PATTERN_NBYTES // 2)
                file.write(bytes([pattern[_PATTERN_NBYTES // 2] ^ 0x10]))
    return found


# -- the process of an environment


def serve(address: str) -> None:
    """Import an environment's modules, and follow orders from `address` until the pipe closes."""
    die_with_parent()
    with Client(address) as pipe, ExitStack() as stack:
        names: list[str] = pipe.recv()
        pipe.send(_imported(names))
        takers = dict[PeerFit, TurnTaker[PeerTurn]]()
        with suppress(EOFError):
            while True:
                what, fit, *more = pipe.recv()
                try:
                    if what == "turn" and fit not in takers:
                        takers[fit] = TurnTaker(fit, _TURN)
                        stack.callback(_end, takers[fit], fit)
                    pipe.send(takers[fit].take() if what == "turn" else kill(fit, *more))
                except (CheckpointError, TurnFailed) as error:
                    pipe.send(CheckpointError(str(error)))


def _end(taker: TurnTaker[PeerTurn], fit: PeerFit) -> None:
    orphans = descendants(taker.pid)
    taker.kill()
    _kill_all(orphans)
    forget(fit.name)


def _kill_all(pids: list[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _imported(names: list[str]) -> dict[str, str]:
    """Return the reason for every system without an import here, by name."""
    found = dict[str, str]()
    for name in names:
        try:
            for module in SYSTEMS[name].modules:
                importlib.import_module(module)
        except Exception as error:  # noqa: BLE001, PERF203  # other people's modules raise what they like
            found[name] = f"{type(error).__name__}: {error}"
    return found
