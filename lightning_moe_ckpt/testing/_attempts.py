"""Run attempts of a job: real processes that run a user's fit, die by SIGKILL where a script says, and are started again.

An attempt is one start of the whole job. Each of its ranks is forked from the calling process, which should have imported
everything (torch, Lightning, the model) and started no process group and no thread of its own: a lock of theirs is held for
ever in a fork. OpenMP's threads do no harm. A fork costs milliseconds, a cold start seconds. Every attempt gets another seed,
so that state which is not restored cannot be right by chance.

Invariant: `run_attempts` returns or raises within the sum of its time-outs and leaves no process behind.

Example:
    def fit(attempt: Attempt) -> dict[str, object]:
        seed_everything(attempt.seed)
        checkpoint = DenseCheckpoint(attempt.url)
        trainer = Trainer(callbacks=attempt.callbacks(checkpoint), devices=attempt.world_size, ...)
        trainer.fit(MyModule(), my_loader())
        return {}

    reference = run_attempts(fit, url=clean_url, workdir=tmp / "clean")
    killed = run_attempts(fit, url=url, workdir=tmp / "killed", kills=[Kill(phase="forward", step=3)])
    assert_same_end(reference, killed)
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import json
import logging
import os
import random
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial, reduce
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NoReturn

import torch
from lightning.pytorch import Callback

from lightning_moe_ckpt.process import compute_alone
from lightning_moe_ckpt.testing._fault import FATAL
from lightning_moe_ckpt.testing._fault_record import read_ranks
from lightning_moe_ckpt.testing._kill import Kill, Killer, LatePhase, StorageKiller, strike
from lightning_moe_ckpt.testing._records import Record, Recorder, differences, read_lines, record_differences

FIRST_SEED = 1234
"""Seed for the first attempt, hence for the fault-free run."""

DETECTION_DELAY = 0.02
"""Seconds between a rank's death and the others' SIGKILL; torchrun polls at 0.1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Seam:
    """Replacement in every process of an attempt, to show the failures without the original."""

    module: str
    attribute: str
    """Dotted path inside the module, e.g. `Session.seal`."""
    replacement: Any

    def apply(self) -> Callable[[], None]:
        """Replace the attribute and return a function to undo it. Raises `AttributeError` if the attribute does not exist."""
        *path, name = self.attribute.split(".")
        owner = reduce(getattr, path, importlib.import_module(self.module))
        original = getattr(owner, name)
        setattr(owner, name, self.replacement)
        return partial(setattr, owner, name, original)


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """Facts about the running attempt, for a user's fit function."""

    index: int
    rank: int
    world_size: int
    seed: int
    """Seed, which differs in each attempt."""
    url: str
    """URL of the checkpoints, the same in each attempt."""
    workdir: Path
    kill: Kill | None
    """Kill that is scripted for this rank, if any."""

    @property
    def records(self) -> Path:
        """Path of the lines that this rank writes while it runs."""
        return attempt_path(self.workdir, self.index, self.rank, "jsonl")

    @property
    def end(self) -> Path:
        """Path of the state that this rank writes when training ends."""
        return attempt_path(self.workdir, self.index, self.rank, "end")

    def callbacks(self, *own: Callback) -> list[Callback]:
        """Return callbacks for the Trainer: the user's, between the callbacks that kill and record. Call it once per attempt."""
        recorder = Recorder(self.records, self.end)
        if self.kill is None:
            return [*own, recorder]
        die = partial(strike, recorder.write, self.kill)
        if self.kill.phase == "storage":
            StorageKiller(self.kill, die).install()
        killer = Killer(self.kill, die)
        return [killer, *own, recorder, LatePhase(killer)]


def attempt_path(workdir: Path, index: int, rank: int, kind: str) -> Path:
    """Return the path to a file that a rank leaves in an attempt; `kind` is the ending."""
    return workdir / f"attempt{index}.rank{rank}.{kind}"


Fit = Callable[[Attempt], Mapping[str, Any]]
Outcome = Literal["finished", "killed", "stopped"]
"""`stopped`: by a scripted signal that is not SIGKILL, after which all ranks ended by themselves."""


@dataclass(frozen=True, kw_only=True)
class AttemptResult:
    """Result of one attempt. Its ranks' state stays in files until read."""

    index: int
    outcome: Outcome
    seconds: float
    world_size: int
    workdir: Path
    exit_codes: Mapping[int, int] = field(default_factory=dict)
    """Exit codes by rank; negative for a signal."""

    def records(self, rank: int = 0, kind: str | None = None) -> list[Record]:
        """Return a rank's lines in the order of writing; only lines of `kind`, if given."""
        return [line for line in read_lines(self._path(rank, "jsonl")) if kind is None or line["kind"] == kind]

    def steps(self, rank: int = 0) -> list[int]:
        """Return `global_step` after each trained batch of this attempt."""
        return [line["step"] for line in self.records(rank, "train")]

    def end(self, rank: int = 0) -> dict[str, Any]:
        """Return a rank's state at the end of training; only a finished attempt has a state."""
        return dict(torch.load(self._path(rank, "end"), weights_only=True))

    def returned(self, rank: int = 0) -> dict[str, Any]:
        """Return the result of the fit function on one rank."""
        return dict(json.loads(self._path(rank, "returned").read_text(encoding="utf-8")))

    def log(self, rank: int = 0) -> str:
        """Return standard output and error of one rank."""
        return self._path(rank, "log").read_text(encoding="utf-8", errors="replace")

    def _path(self, rank: int, kind: str) -> Path:
        return attempt_path(self.workdir, self.index, rank, kind)


class AttemptFailed(AssertionError):
    """An attempt hung, died otherwise than scripted, or outlived its kill; the message ends with the logs of its ranks."""

    @classmethod
    def of(cls, why: str, workdir: Path, index: int, world_size: int) -> AttemptFailed:
        """Return an attempt's failure, with the ends of its logs."""
        logs = [attempt_path(workdir, index, rank, "log") for rank in range(world_size)]
        tails = [f"--- rank {rank} ---\n{_tail(path)}" for rank, path in enumerate(logs)]
        return cls("\n".join([f"attempt {index} {why}", *tails]))


def run_attempts(
    fit: Fit,
    *,
    url: str,
    workdir: Path,
    world_size: int = 1,
    kills: Sequence[Kill | None] = (),
    timeout: float = 60.0,
    seams: Sequence[Seam] = (),
    must_strike: bool = True,
    first_index: int = 0,
    faults: Path | None = None,
    max_attempts: int = 100,
) -> list[AttemptResult]:
    """Run one attempt per kill, then a last attempt that must finish.

    With a `FaultInjector` in `fit` nothing is scripted here: name its folder. Attempts ended by the injector are followed by
    others until one finishes.

    Args:
        fit: function to run in every rank process; its result must be JSON.
        url: place for every attempt's checkpoints.
        workdir: folder for records, logs and ends, of this call only.
        world_size: processes per attempt. With more than one, each gets torchrun's environment.
        kills: the scripted end of each attempt; `None` scripts none, so the attempt must finish.
        timeout: seconds per attempt; then its threads are dumped to its log, and it is killed.
        seams: replacements in every process.
        must_strike: whether outliving a scripted kill is a failure; else the campaign ends there.
        first_index: number of the first attempt, which decides about its seed.
        faults: folder of the `FaultInjector` that ends attempts.
        max_attempts: most attempts until one finishes.

    Raises:
        AttemptFailed: an attempt did not end as scripted.
    """
    workdir.mkdir(parents=True, exist_ok=True)
    script = _Script(
        fit=fit, url=url, workdir=workdir, world_size=world_size, timeout=timeout, seams=tuple(seams), faults=faults
    )
    results: list[AttemptResult] = []
    for index, kill in enumerate([*kills, None] if faults is None else [None] * max_attempts, first_index):
        results.append(_RunningAttempt(script, index, kill).run())
        if results[-1].outcome != "finished":
            continue
        if kill is not None and must_strike:
            raise AttemptFailed.of(f"outlived {kill}", workdir, index, world_size)
        if kill is not None or faults is not None:
            return results
    if faults is not None:
        raise AttemptFailed.of(f"was the last of {max_attempts}, and none finished", workdir, index, world_size)
    return results


@dataclass(frozen=True, kw_only=True, slots=True)
class _Script:
    """Arguments that the attempts of one campaign share."""

    fit: Fit
    url: str
    workdir: Path
    world_size: int
    timeout: float
    seams: tuple[Seam, ...]
    faults: Path | None = None

    def attempt(self, index: int, rank: int, kill: Kill | None) -> Attempt:
        return Attempt(
            index=index,
            rank=rank,
            world_size=self.world_size,
            seed=FIRST_SEED + 7919 * index,
            url=self.url,
            workdir=self.workdir,
            kill=kill if kill is not None and (kill.everyone or kill.rank == rank) else None,
        )


class _RunningAttempt:
    """Processes of one attempt, as their parent sees them."""

    def __init__(self, script: _Script, index: int, kill: Kill | None) -> None:
        self._script, self._index, self._kill = script, index, kill
        self._attempts = [script.attempt(index, rank, kill) for rank in range(script.world_size)]
        self._pids: dict[int, int] = {}
        self._codes: dict[int, int] = {}
        self._faults_before = self._fatal_faults()

    def run(self) -> AttemptResult:
        """Start the ranks, wait for the end of all, and judge the outcome."""
        started, port = time.monotonic(), free_port()
        try:
            for attempt in self._attempts:
                self._pids[attempt.rank] = _fork_rank(self._script, attempt, port)
            self._wait(started + self._script.timeout)
        finally:
            self._kill_all()
        return AttemptResult(
            index=self._index,
            outcome=self._outcome(),
            seconds=time.monotonic() - started,
            world_size=self._script.world_size,
            workdir=self._script.workdir,
            exit_codes=dict(self._codes),
        )

    def _wait(self, deadline: float) -> None:
        """Wait until all ranks have ended, or a rank has ended badly: then all other ranks get a moment, as under torchrun."""
        while len(self._codes) < len(self._pids):
            self._reap(os.WNOHANG)
            if any(self._codes.values()) and not self._asked_to_stop:
                time.sleep(DETECTION_DELAY)
                return
            if time.monotonic() > deadline:
                for rank in self._pids.keys() - self._codes.keys():
                    os.killpg(self._pids[rank], signal.SIGUSR1)  # loader workers inherited the handler
                time.sleep(0.5)  # the dump is written by a signal handler of the other process
                raise self._failed(f"hung: not ended after {self._script.timeout:g} s")
            time.sleep(0.002)

    @property
    def _asked_to_stop(self) -> bool:
        """Whether the script lets the ranks end by themselves."""
        return self._kill is not None and self._kill.signal != signal.SIGKILL

    def _reap(self, options: int) -> None:
        for rank, pid in self._pids.items():
            if rank in self._codes:
                continue
            ended, status = os.waitpid(pid, options)
            if ended:
                self._codes[rank] = os.waitstatus_to_exitcode(status)

    def _kill_all(self) -> None:
        """SIGKILL every rank with its process group, so that no loader worker outlives its rank, and reap."""
        self._reap(os.WNOHANG)
        for pid in self._pids.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        self._reap(0)

    def _outcome(self) -> Outcome:
        if all(code == 0 for code in self._codes.values()):
            return "finished"
        if self._fatal_faults() > self._faults_before:
            return "killed"
        records = [] if self._kill is None else read_lines(self._attempts[self._kill.rank].records)
        if not any(line["kind"] == "killed" for line in records):
            raise self._failed(f"ended with exit codes {self._codes} (by rank) and no scripted kill")
        return "stopped" if self._asked_to_stop else "killed"

    def _fatal_faults(self) -> int:
        """Count the attempt-ending faults in an injector's records so far."""
        if self._script.faults is None:
            return 0
        lines = chain.from_iterable(own for _, own in read_ranks(self._script.faults))
        return sum(line["event"] == "fault" and line["kind"] in FATAL for line in lines)

    def _failed(self, why: str) -> AttemptFailed:
        return AttemptFailed.of(why, self._script.workdir, self._index, self._script.world_size)


def _fork_rank(script: _Script, attempt: Attempt, port: int) -> int:
    """Return the process id of a new rank; the new process never returns from here."""
    sys.stdout.flush()
    sys.stderr.flush()
    if (pid := os.fork()) == 0:
        _run_rank(script, attempt, port)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.setpgid(pid, pid)  # the child does the same; whoever comes first
    return pid


def _run_rank(script: _Script, attempt: Attempt, port: int) -> NoReturn:
    """Run a rank process from begin to end. The process leaves by `os._exit`: the parent's exit handlers must not run in it."""
    code = 1
    try:
        _set_up_process(attempt, port)
        for seam in script.seams:
            seam.apply()
        attempt.end.with_suffix(".returned").write_text(json.dumps(dict(script.fit(attempt))), encoding="utf-8")
        code = 0
    except SystemExit as exit_:
        code = exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)  # as the interpreter does
    except BaseException:  # noqa: BLE001  # process entry: nothing above would see it
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _set_up_process(attempt: Attempt, port: int) -> None:
    """Give this process its own group, output file, signal handlers and environment, and one thread, as torchrun does."""
    compute_alone()
    os.setpgid(0, 0)
    log_file = os.open(attempt.end.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log_file, 1)
    os.dup2(log_file, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, force=True)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    faulthandler.enable(file=2)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
    os.environ.update(elastic_environment(attempt.rank, attempt.world_size, port, attempt.index))


def elastic_environment(rank: int, world_size: int, port: int, restarts: int = 0) -> dict[str, str]:
    """Return torchrun's environment; empty for a single process, started like plain `python train.py`."""
    if world_size == 1:
        return {}
    return {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "GROUP_WORLD_SIZE": "1",
        "TORCHELASTIC_RUN_ID": "attempts",
        "TORCHELASTIC_RESTART_COUNT": str(restarts),
        "TORCHELASTIC_MAX_RESTARTS": "1000",
        "TORCHELASTIC_USE_AGENT_STORE": "False",  # whoever started the caller may have one
        "GLOO_SOCKET_IFNAME": "lo",
    }


def free_port() -> int:
    """Return a port without a listener, below the kernel's range for outgoing connections."""
    draw = random.SystemRandom()
    while True:
        port = draw.randrange(20_000, 30_000)
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) != 0:
                return port


def _tail(path: Path, lines: int = 60) -> str:
    if not path.exists():
        return "(no log)"
    return "\n".join(path.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])


def assert_same_end(
    reference: Sequence[AttemptResult], results: Sequence[AttemptResult], *, repeats_may_differ: Collection[str] = ()
) -> None:
    """Raise unless the last attempt of `results` ended bitwise like that of `reference`, and all attempts trained on the same.

    Compared on every rank: parameters, buffers, optimizer state and groups, schedulers, precision plugin, RNG, progress, and the
    result of the fit function; and for every batch of every attempt its loss, data and learning rates. Every batch of a step must
    have been seen.

    Args:
        reference: the fault-free run.
        results: the attempts to compare.
        repeats_may_differ: kinds of lines for which only the first attempt to see them has to be right.

    Raises:
        AssertionError: lists every difference.
    """
    want, got = reference[-1], results[-1]
    lines: list[str] = []
    for rank in range(want.world_size):
        reference_records = want.records(rank)
        unseen: tuple[str, ...] = ()
        if not got.steps(rank):  # it found the run finished: hooks of an epoch that was cut short do not come any more
            unseen = ("rng/", "epoch_end/", "progress/current_epoch")
            last = want.steps(rank)[-1]
            reference_records = [line for line in reference_records if (line["kind"], line["step"]) != ("epoch", last)]
        ends = [{**each.end(rank), **each.returned(rank)} for each in (want, got)]
        found = differences(*({k: v for k, v in end.items() if not k.startswith(unseen)} for end in ends))
        records = [attempt.records(rank) for attempt in results]
        found += record_differences(reference_records, records, want.records(rank), repeats_may_differ)
        lines += [f"rank {rank}: {line}" for line in found]
    if lines:
        shown = lines[:150] + ([f"... and {len(lines) - 150} more"] if len(lines) > 150 else [])
        raise AssertionError("\n".join([f"{len(lines)} differences from the fault-free run:", *shown]))
