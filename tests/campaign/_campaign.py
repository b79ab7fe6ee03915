"""Runs a training many times with kills and compares each end with that of a run that never met a checkpoint."""

from __future__ import annotations

import itertools
import os
import re
import shutil
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from door import Phase

from campaign._faults import Breaking, memory_of, record_of
from campaign._overlap import Overlap, run_overlapping
from campaign._training import Checkpointing, Setup, train_in_stages
from campaign._warm import WarmParents
from lightning_moe_ckpt.planning._budgets import MEASURED_STEPS
from lightning_moe_ckpt.storage._open import memory_tag
from lightning_moe_ckpt.testing import AttemptResult, Kill, assert_same_end, run_attempts

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  # where rings live

COMPLAINTS = ("ERROR:lightning_moe_ckpt", "WARNING:lightning_moe_ckpt")
HARMLESS = (
    "checkpoints are taken again: ",
    "checkpoints need",
    " is gone; ",
    " are gone; ",
    "another rank is gone, or does not answer; ",
    "WARNING:lightning_moe_ckpt.fit.in_place._survivor:",
    "input/output error (injected). Trying again",
    "; the next plan reserves more",
    "training begins from nothing, although",  # nothing was stored: `_origin` checks that
    "are stored whole at every step, since",
    "restarts are not exact if items draw random numbers",
    "these settings differ from those of the stored run:",  # `changed_settings` has which
    ": nothing to train, since",
    "training ends in the middle of an accumulation",  # so does the fault-free run
    ". It is kept to, and tiers rest longer",
    "by a forward or backward pass, while they were copied; from here on it waits for copies",  # as drawn hooks do
    "was not known to be kept from step to step",  # it costs the windows in which a gradient is first kept, as it says
)
"""Storage of a busy machine lets generations pass it by, which memory has; a drawn run may be short, and its callbacks may
come to say more than twice what they said at first; its items may draw no random numbers, and each life has a seed
of its own."""
SCRATCH_PREFIX = "moe-ckpt-campaigns-"
"""Scratch folders are called so, followed by the process id of the tests."""

BEFORE_STEP: tuple[Phase, ...] = ("batch_start", "forward", "before_optimizer_step")
AFTER_STEP: tuple[Phase, ...] = ("batch_end", "after_batch_end")


class Campaigns:
    """Everything one test needs: fault-free references, kept for the session, and killed runs."""

    def __init__(self, warm: WarmParents, references: Path, scratch: Path) -> None:
        self._warm, self._references, self._scratch = warm, references, scratch
        self._count = 0

    def reference(self, setup: Setup, index: int = 0, *, timeout: float = 60.0) -> list[AttemptResult]:
        """One fault-free life without any checkpoint callback, with the seed of life `index`."""
        plain = setup.fault_free()
        folder = self._references / f"{type(plain).__name__}-{abs(hash(plain)):x}"  # equal fields have equal hashes
        if not (folder / f"attempt{index}.rank0.returned").exists():
            arguments = {**_arguments(plain, folder), "first_index": index, "timeout": timeout}
            self._warm.call(run_attempts, plain.fit, **arguments)
        return [
            AttemptResult(index=index, outcome="finished", seconds=0.0, world_size=plain.world_size, workdir=folder)
        ]

    def run(self, setup: Setup, *kills: Kill | None, **options: Any) -> list[AttemptResult]:
        """Lives of one run, the last of which finished."""
        (lives,) = self.run_all(setup, [kills], **options)
        return lives

    def run_all(
        self, setup: Setup, scripts: Iterable[Sequence[Kill | None]], **options: Any
    ) -> list[list[AttemptResult]]:
        """Independent runs of the same setup, one per script."""
        fit = options.pop("fit", setup.fit)
        patience = options.pop("patience", 280.0)
        folders = [self._folder() for _ in scripts]
        calls = [
            ((fit,), {**_arguments(setup, folder), "kills": kills, **options})
            for folder, kills in zip(folders, scripts, strict=True)
        ]
        return self._warm.map(run_attempts, calls, patience=patience)

    def run_each(self, setups: Iterable[Setup], *, timeout: float = 60.0) -> list[AttemptResult]:
        """One life of each setup, which has to finish."""
        setups = list(setups)
        calls = [((each.fit,), {**_arguments(each, self._folder()), "timeout": timeout}) for each in setups]
        return [lives[-1] for lives in self._warm.map(run_attempts, calls, patience=30.0 + timeout * len(setups))]

    def require_same_end(self, setup: Setup, lives: list[AttemptResult], **options: Any) -> None:
        """Require of lives that ran `setup` the end of the fault-free run."""
        _require_same_end(self.reference(setup, _origin(lives), **options), lives, [])

    def check(self, setup: Setup, *kills: Kill | None, **options: Any) -> list[AttemptResult]:
        """Run, and require the end of the fault-free run."""
        (lives,) = self.check_all(setup, [kills], **options)
        return lives

    def check_all(
        self, setup: Setup, scripts: Iterable[Sequence[Kill | None]], *, may_complain: bool = False, **options: Any
    ) -> list[list[AttemptResult]]:
        """Run every script, and require of each the end of the fault-free run and no shared memory left behind.

        Args:
            setup: the run.
            scripts: kills of one campaign each.
            may_complain: whether warnings and errors of the package are expected; else they are failures too.
            options: for `run_attempts`.
        """
        scripts = list(scripts)
        campaigns = self.run_all(setup, scripts, **options)
        for kills, lives in zip(scripts, campaigns, strict=True):
            reference = self.reference(setup, _origin(lives), timeout=options.get("timeout", 60.0))
            _require_same_end(reference, _of_the_run(lives), kills, edited=setup.edits_weights)
            require_near(lives, setup.checkpointing)
            if not may_complain:
                harmless = (*HARMLESS, *getattr(setup, "complaints", ()))
                _require_silence(lives, kills, changed=getattr(setup, "changed", ()), harmless=harmless)
            rings = _rings(lives[0].workdir)
            if "was not stored after" in lives[-1].log():  # memory has what is newer than storage, and says so
                for name in rings:
                    (SHARED_MEMORY / name).unlink(missing_ok=True)
                continue
            assert not rings, f"{kills}: the finished run left {rings} behind\n{lives[-1].log()}"
        return campaigns

    def check_faults(self, setup: Breaking, *, plant: Sequence[str] = (), **options: Any) -> list[AttemptResult]:
        """Run a training that breaks itself until a life finishes, and require the end of the fault-free run.

        Args:
            setup: the run.
            plant: names of files to be in the shared memory of every node beforehand.
            options: for `run_attempts`.
        """
        folder = self._folder()
        folder.mkdir()
        for node in set(setup.nodes):
            for name in plant:
                (memory_of(folder, node) / name).touch()
        options = {**_arguments(setup, folder), "faults": record_of(folder), **options}
        lives = self._warm.call(run_attempts, setup.fit, **options)
        reference = self.reference(setup, _origin(lives), timeout=options.get("timeout", 60.0))
        _require_same_end(reference, _of_the_run(lives), [])
        return lives

    def check_overlap(self, setup: Setup, overlap: Overlap) -> AttemptResult:
        """Two starts at once, of which the second must end as if it had been alone; how the first ended."""
        arguments = _arguments(setup, self._folder())
        first, second = self._warm.call(run_overlapping, setup.fit, overlap, **arguments)
        assert second.outcome == "finished", f"{overlap}: {second.exit_codes}\n{second.log()}"
        _require_same_end(self.reference(setup, 0), [first, second], [overlap.asleep_at])
        assert first.outcome == "stopped", f"{overlap}: the first start went on to its end\n{first.log()}"
        return first

    def check_stages(self, *setups: Setup) -> list[AttemptResult]:
        """Each life runs the next setup to its end; the last must end as if it had been alone."""
        lives = self.run_stages(*setups)
        _require_same_end(self.reference(setups[-1]), lives, [])
        return lives

    def run_stages(self, *setups: Setup) -> list[AttemptResult]:
        """Each life runs the next setup to its end."""
        fit = partial(train_in_stages, setups)
        kills = [None] * (len(setups) - 1)
        return self._warm.call(run_attempts, fit, **_arguments(setups[-1], self._folder()), kills=kills)

    def remove_rings(self) -> None:
        """Remove what runs that never finished have left in shared memory."""
        for folder in self._scratch.iterdir():
            for name in _rings(folder):
                (SHARED_MEMORY / name).unlink(missing_ok=True)

    def _folder(self) -> Path:
        self._count += 1
        return self._scratch / f"campaign{self._count}"


def changed_settings(log: str) -> list[str]:
    """Names in the tables of settings that differ, but for the seed and the callbacks, which say who kills."""
    tables = [part.split("\n") for part in log.split("these settings differ from those of the stored run:\n")[1:]]
    rows = [row.split() for table in tables for row in itertools.takewhile(lambda row: row.startswith("  "), table)]
    return [row[0] for row in rows if row[0] not in ("setting", "seed", "callbacks") and not _KILLERS.issuperset(row)]


_KILLERS = {"callbacks", "Killer,", "Killer", "LatePhase", "none", "yours"}


def _require_silence(
    lives: Sequence[AttemptResult],
    kills: Sequence[Kill | None],
    *,
    changed: Sequence[str] = (),
    harmless: Sequence[str] = HARMLESS,
) -> None:
    """No life reported a checkpoint that was not taken or a replay that was not exact: exactness may be luck then."""
    for life in lives:
        for rank in range(life.world_size):
            complaints = (line for line in life.log(rank).splitlines() if line.startswith(COMPLAINTS))
            said = [line for line in complaints if not any(each in line for each in harmless)]
            said += [name for name in changed_settings(life.log(rank)) if name not in changed]
            assert not said, f"{kills}: life {life.index}, rank {rank} said: {said}"


def require_near(lives: Sequence[AttemptResult], checkpointing: Checkpointing | None) -> None:
    """No restart repeats more steps than the numbers that the user gave allow, where every window was taken and memory was left."""
    most = None if checkpointing is None else checkpointing.most_repeated
    logs = [life.log(rank) for life in lives for rank in range(life.world_size)]
    if most is None or any(each in log for log in logs for each in _FARTHER):
        return
    trained = [life for life in lives if all(life.steps(rank) for rank in range(life.world_size))]
    for before, after in itertools.pairwise(trained):
        ended, begun = min(before.steps(rank)[-1] for rank in range(before.world_size)), after.steps()[0] - 1
        allowed = most + (0 if before.steps()[0] > 1 else MEASURED_STEPS)  # a fresh start plans after these
        assert ended - begun <= allowed, (
            f"life {before.index} ended at step {ended}, and the next began at {begun}\n{before.log()}\n{after.log()}"
        )


_FARTHER = ("not taken", "spoiled", "in a row", "damaged")
"""Words of lives that told why a restart may be farther back."""


def _origin(lives: Sequence[AttemptResult]) -> int:
    """The life whose seed the run has: the last one that began from nothing.

    Training goes on while its start is being stored. A life that is killed before that leaves nothing but what memory
    has, and the next one may begin anew. None may do so once something was stored.
    """
    begun = [life.index for life in lives if "begins from nothing" in life.log()]
    last = begun[-1] if begun else lives[0].index
    stored = [life.index for life in lives if " is durable: " in life.log()]
    assert last <= min(stored, default=last), f"life {last} began anew although life {stored[0]} had stored something"
    return last


def _of_the_run(lives: Sequence[AttemptResult]) -> list[AttemptResult]:
    """Lives from the one on in which the run began."""
    origin = _origin(lives)
    return [life for life in lives if life.index >= origin]


def _require_same_end(
    reference: list[AttemptResult], lives: list[AttemptResult], kills: Sequence[Kill | None], *, edited: bool = False
) -> None:
    """As `assert_same_end`; `edited` where a hook at the start of an epoch edits weights.

    Between repeated steps it is edited weights that wait to thaw, and a validation there sees them.
    """
    try:
        assert_same_end(reference, lives, repeats_may_differ={"validation", "validation 1", "epoch"} if edited else ())
    except AssertionError as error:
        steps = [life.steps() for life in lives]
        said = "".join(f"--- life {life.index} ---\n{life.log()}" for life in lives)
        raise AssertionError(f"{kills}\n{error}\nsteps of each life: {steps}\n{said}") from None


def _arguments(setup: Setup, folder: Path) -> dict[str, Any]:
    return {"url": checkpoints(folder).as_uri(), "workdir": folder, "world_size": setup.world_size}


def checkpoints(folder: Path) -> Path:
    """Where the run in `folder` keeps its checkpoints."""
    return folder / "checkpoints"


def _rings(folder: Path) -> list[str]:
    """What the run in `folder` has in shared memory; other runs on this machine have theirs."""
    return memory_of_run(checkpoints(folder))


def memory_of_run(root: Path) -> list[str]:
    """Names in shared memory of the run whose checkpoints are in `root`."""
    logged = "".join(path.read_text(encoding="utf-8") for path in root.glob("_log/*.json"))
    tags = [memory_tag(key, root.as_uri()) for key in set(re.findall(r'"key": ?"([0-9a-f]{16,})"', logged))]
    return [entry.name for entry in os.scandir(SHARED_MEMORY) if any(f"-{tag}-" in entry.name for tag in tags)]


def lose_memory(folder: Path) -> None:
    """What the loss of the machine does to the run in `folder`, besides the loss of its processes."""
    for name in _rings(folder):
        (SHARED_MEMORY / name).unlink(missing_ok=True)


def remove_abandoned(root: Path) -> None:
    """Remove scratch folders whose tests were killed."""
    for folder in root.glob(f"{SCRATCH_PREFIX}*"):
        pid = int(folder.name.removeprefix(SCRATCH_PREFIX).split("-")[0])
        if not Path(f"/proc/{pid}").exists():
            shutil.rmtree(folder, ignore_errors=True)


def one_kill_per_step(setup: Setup, *, offset: int = 0, every: int = 1) -> list[list[Kill]]:
    """One script per optimizer step, each with one kill; the phases rotate so that every step meets another one.

    Args:
        setup: the run.
        offset: shifts the phases, and with `every` the steps.
        every: takes only every n-th step.
    """
    return [[kill] for kill in kill_at_every_step(setup, offset=offset)[offset % every :: every]]


def two_chains(setup: Setup, *, offset: int = 0) -> list[list[Kill]]:
    """Every optimizer step is killed in one of two scripts, which may run side by side."""
    kills = kill_at_every_step(setup, offset=offset)
    return [kills[::2], kills[1::2]]


def kill_at_every_step(setup: Setup, *, offset: int = 0) -> list[Kill]:
    """One kill per optimizer step, in rising order: before, in or after the step, in turn."""
    phases: list[Phase] = [*BEFORE_STEP, *AFTER_STEP]
    kills = []
    for step in range(1, setup.steps + 1):
        phase = phases[(step + offset) % len(phases)]
        # A kill "before" step s strikes when s - 1 steps are done, so that the kills of a script never meet.
        done = step - 1 if phase in BEFORE_STEP else step
        # Every other kill lets storage finish first; the rest come while it is at work.
        kills.append(Kill(phase=phase, step=done, settle=10.0 if (step + offset) % 2 else 0.0))
    return kills


def require_resumed(
    campaigns: Sequence[Sequence[AttemptResult]], scripts: Sequence[Sequence[Kill]], after: int
) -> None:
    """Where the first life of a script lived long enough and storage could finish, the second did not start over.

    Without this a policy that never gets a generation stored would pass every comparison.

    Args:
        campaigns: the lives of each script.
        scripts: kills by script.
        after: number of steps by which a generation must have been complete.
    """
    long_lived = [i for i, kills in enumerate(scripts) if kills[0].settle and (kills[0].step or 0) >= after]
    for index in long_lived:
        assert campaigns[index][1].steps()[0] > 1, f"{scripts[index]} started over\n{campaigns[index][1].log()}"
