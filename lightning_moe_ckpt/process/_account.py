"""Keep the account of a run's wall time, from its first process to the newest step, over all restarts.

    birth of a process ... begin ... first batch ... a step ... a step | killed        the next one ... begin
    startup                restore   repeated        lost       productive    detection   startup      restore

Time goes to the part under way, by the step: up to the restored generation steps are repeated, up to the newest
step of before they were lost, and behind it they count. Of productive time hooks and slower steps are taken away. So parts meet
without gaps, and their sum is wall time.

The account is written at every step, into a few bytes left by a kill of the process: then the next process goes on from the newest account
of all ranks. The time since is divided by the starts of processes and launchers, see `gap`. Times are seconds since 1970.
"""

from __future__ import annotations

import math
import os
import struct
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, astuple
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

from lightning_moe_ckpt.errors import ConfigurationError
from lightning_moe_ckpt.goodput import PARTS, Goodput
from lightning_moe_ckpt.process._stall import HookClock

ACCOUNT_NBYTES = 256
"""An account's bytes."""

_COLD_STEPS, _WARM_STEPS = 5, 10
"""First steps of a start, which are slower, and steps behind these to compare them with."""
_LOOK_STEPS = 50
"""Steps from one writing of what a later start can presume to the next."""
_MAGIC = b"goodput2"
_PHASE = struct.Struct(f"<8sqqddd{len(PARTS)}d")
"""Part under way, newest step of before, when it began, hooks and slower steps then, and all parts then."""
_STEP = struct.Struct("<qddd")
"""Behind it, of the newest sign of life: step, time, hooks, slower steps."""
_PRESUMED = struct.Struct("<dd")
"""Behind that, for later starts: `Balance.share` and `Balance.warm_up`, not a number if unknown."""


class Balance(NamedTuple):
    """State of an account."""

    at: float
    """Last sign of life."""
    step: int
    """Newest step taken in any incarnation."""
    goodput: Goodput
    share: float | None = None
    """Part of steps by which they were longer with background work beside them; `None` if no steps could be compared."""
    warm_up: float | None = None
    """Seconds by which the first steps of a start were longer than those behind; `None` if unknown."""

    @classmethod
    def read(cls, page: bytes) -> Balance | None:
        """Return the state left by a process in these bytes; `None` without any."""
        magic, index, reached, began, hooks, slowed, *parts = _PHASE.unpack_from(page)
        step, at, hooks_now, slowed_now = _STEP.unpack_from(page, _PHASE.size)
        if magic != _MAGIC or not math.isfinite(began + at):
            return None
        with suppress(ConfigurationError, IndexError, OverflowError):  # torn by a kill
            before = Goodput(**dict(zip(PARTS, parts, strict=True)))
            found = before + _divided(PARTS[index], max(0.0, at - began), hooks_now - hooks, slowed_now - slowed)
            known = map(_possible, _PRESUMED.unpack_from(page, _PHASE.size + _STEP.size))
            return cls(max(at, began), max(reached, step), found, *known)
        return None

    def plain(self) -> list[Any]:
        """Return plain values for an exchange, and for `of`."""
        return [self.at, self.step, self.share, self.warm_up, *astuple(self.goodput)]

    @classmethod
    def of(cls, plain: Sequence[Any]) -> Balance:
        """Return the state from `plain`."""
        at, step, share, warm_up, *parts = plain
        return cls(at, step, Goodput(**dict(zip(PARTS, parts, strict=True))), share, warm_up)


class Origin(NamedTuple):
    """Times of a rank's start."""

    birth: float
    """Start of the process; end of the account before, if this process has kept one."""
    launcher: float
    """Start of the launcher, or of the process itself if nothing looks after it."""
    noticed: float
    """Time of a supervisor's act on the newest failure; 0 for never."""
    again: bool
    """Whether this process has kept an account before."""

    @classmethod
    def here(cls, noticed: float) -> Origin:
        """Return the origin of this process."""
        own, ended = _started(os.getpid()), RunAccount.ended.get(os.getpid())
        launched = _started(os.getppid()) if "TORCHELASTIC_RUN_ID" in os.environ else own
        return cls(max(own, ended or 0.0), min(launched, own), noticed, ended is not None)


def _started(pid: int) -> float:
    """Return the start of a process; this moment for an ended or invisible process."""
    with suppress(OSError, ValueError):
        ticks = int(Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19])
        return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK")
    return time.time()


def gap(last: float, ranks: Sequence[Origin], now: float) -> Goodput:
    """Divide the time from the last sign of life to `now`, the begin of restoring.

    Somebody has acted on the failure when a supervisor says so, or else when a process was started. A launcher younger than the
    last sign of life was waited for; if all are, nobody could have acted.
    """
    launchers = [each.launcher for each in ranks]
    acts = [at for each in ranks for at in (each.noticed, each.birth) if at > last]
    acted = last if min(launchers) > last else min(acts, default=last)
    acted = min(acted, max(last, now))
    ready = max(acted, min(now, max(launchers)))
    return Goodput(detection=acted - last, idle=ready - acted, startup=max(0.0, now - ready))


class Slower(Protocol):
    """Measurement of slower steps."""

    slowed: float
    """Seconds by which steps were longer while copies and tiers worked beside them."""
    share: float | None
    """See `Balance.share`; set to that of earlier starts before the first step."""


class _NotSlower:
    slowed = 0.0
    share: float | None = None


class RunAccount:
    """Account of a run on this rank, in this incarnation; read from any thread, written on the training thread.

    Args:
        clock: time in hooks.
        known: accounts of earlier incarnations.
        ranks: origins of all ranks.
        began: `time.monotonic()` at the begin of restoring.
    """

    ended: ClassVar[dict[int, float]] = {}
    """End of the newest account of a process, by process id: a fork has none."""

    def __init__(self, clock: HookClock, known: Sequence[Balance], ranks: Sequence[Origin], began: float) -> None:
        self._clock = clock
        self.beside: Slower = _NotSlower()
        """Measurement of slower steps, from `begin` on."""
        self.offset = time.time() - time.monotonic()
        """Seconds to add to `time.monotonic()`: setting the wall clock changes no measurement."""
        # The one with most wall time is the newest, whatever the clocks say.
        now, past = began + self.offset, max(known, key=lambda each: each.goodput.wall, default=None)
        if past is None:
            first = min(each.birth if each.again else each.launcher for each in ranks)
            past = Balance(min(first, now), 0, Goodput())
            between = Goodput(startup=now - past.at)
        else:
            between = gap(past.at, ranks, now)
        self._before, self._presumed = past.goodput, past
        self.reached = max((each.step for each in known), default=0)
        """Newest step of earlier incarnations."""
        self.covered = self.first = self.step = 0
        """Last step of the restored generation's coverage, first step of training, and newest step since."""
        self.until = float("inf")
        """Step at the end of the part under way; negative until the first batch."""
        self._cold: list[float] = []
        """Clock without hooks, validation and slower steps, at the begin and the end of the first steps."""
        self.warm_up: float | None = None
        """Seconds by which first steps were longer than those behind them; `None` as long as unknown, or if they did not count."""
        self._moved = 0.0
        """Seconds of productive time moved to the start's for it, as many as in an earlier start until they are known."""
        self._page: Any = bytearray(ACCOUNT_NBYTES)
        self._under_way = ("startup", now, 0.0, 0.0, past.goodput + between)
        """Part under way, when it began, hooks and slower steps then, and all parts then."""
        self.move(bytearray(ACCOUNT_NBYTES))

    def move(self, page: Any) -> None:
        """Go on in another writable place of `ACCOUNT_NBYTES`."""
        page[:ACCOUNT_NBYTES] = bytes(self._page[:ACCOUNT_NBYTES])
        self._page = page
        self.note = partial(_STEP.pack_into, page, _PHASE.size)
        """Writes a sign of life: step, `time.monotonic()` and `offset`, seconds of hooks, seconds of slower steps."""

    def begin(self, covered: int | None, first: int, beside: Slower) -> None:
        """Note the begin of loading a generation with steps up to `covered`, for training from `first` on; `None` for a fresh start."""
        self.beside, self.until = beside, -1
        beside.share = self._presumed.share
        self.covered, self.first, self.step = covered or 0, first, first
        self._write(first)
        if covered is not None:
            self._under_way = ("restore", *self._under_way[1:])
            self._write(first)

    def waits(self) -> None:
        """Note a wait for other ranks' repeated steps until the next batch."""
        self.first = self.step = self.reached
        self._enter("repeated", self.reached)

    def passed(self, step: int) -> None:
        """Note the begin of training behind `step`."""
        if self._under_way[0] == "productive" and (self.warm_up is not None or not self._cold):
            self._presume()  # nothing else will change
            self.until = step + _LOOK_STEPS
            return
        part = "repeated" if step < self.covered else "lost" if step < self.reached else "productive"
        self._enter(part, step)
        ends = {"repeated": self.covered, "lost": self.reached}
        self.until = ends[part] if part in ends else self._warmed(step)

    def stepped(self, step: int) -> None:
        """Note a boundary of training."""
        if step >= self.until:
            self.passed(step)
        self.step = step
        self.sign()

    def sign(self) -> None:
        """Note a sign of life."""
        self.note(self.step, time.monotonic() + self.offset, self._clock.seconds, self.beside.slowed)

    def close(self) -> None:
        """Let go of the account's place."""
        self.move(bytearray(ACCOUNT_NBYTES))
        RunAccount.ended = {os.getpid(): time.time()}

    def balance(self) -> Balance:
        """Return the state now."""
        part, began, hooks, slowed, before = self._under_way
        now = max(began, time.monotonic() + self.offset)
        own = _divided(part, now - began, self._clock.seconds - hooks, self.beside.slowed - slowed)
        return Balance(now, max(self.reached, self.step), before + own)

    def signed(self) -> Balance:
        """Return the state at the newest sign of life: a wait for a lost rank may follow."""
        found = Balance.read(bytes(self._page))
        assert found is not None
        return found

    def document(self) -> dict[str, Any]:
        """Return the state at the newest sign of life for the run's log, see `read_account`."""
        now = self.signed()
        return {
            "at": round(now.at, 3),
            "step": now.step,
            "share": now.share,
            "warm_up": now.warm_up,
            **rounded(now.goodput),
        }

    def own(self) -> Goodput:
        """Return the parts of this incarnation up to then, with the time since the last sign of life of the incarnation before."""
        now, before = asdict(self.signed().goodput), asdict(self._before)
        return Goodput(**{name: max(0.0, now[name] - before[name]) for name in PARTS})

    def taken_again(self) -> dict[str, int]:
        """Return the numbers of repeated and lost steps."""
        repeated = min(self.step, self.covered)
        lost = min(self.step, self.reached) - max(self.first, self.covered)
        return {"repeated": max(0, repeated - self.first), "lost": max(0, lost)}

    # -- private

    def _warmed(self, step: int) -> float:
        """Move the seconds by which first steps were longer from productive time to the start's; return the step to look again at.

        First steps compile, allocate and fill caches: without the start they would have been as long as those behind them.
        """
        beside, steps = self._clock.seconds + self._clock.validated + self.beside.slowed, step - self.first
        at = time.monotonic() - beside
        if len(self._cold) < 2 and steps == len(self._cold) * _COLD_STEPS:
            self._cold.append(at)
            if steps:
                self._start_took(step, self._presumed.warm_up or 0.0)
            return step + (_WARM_STEPS if steps else _COLD_STEPS)
        if len(self._cold) == 2:
            usual = (at - self._cold[1]) / (steps - _COLD_STEPS)
            self._start_took(step, max(0.0, self._cold[1] - self._cold[0] - _COLD_STEPS * usual))
            self.warm_up = self._moved
        return step + _LOOK_STEPS

    def _start_took(self, step: int, longer: float) -> None:
        """Move so many seconds of productive time to the start's in all."""
        part, began, hooks, slowed, before = self._under_way
        more = min(longer - self._moved, before.productive)
        self._moved += more
        parts = {**asdict(before), "productive": before.productive - more, "startup": before.startup + more}
        self._under_way = (part, began, hooks, slowed, Goodput(**parts))
        self._write(step)

    def _presume(self) -> None:
        """Write what later starts can presume."""
        warm_up = self._presumed.warm_up if self.warm_up is None else self.warm_up
        known = (math.nan if each is None else each for each in (self.beside.share, warm_up))
        _PRESUMED.pack_into(self._page, _PHASE.size + _STEP.size, *known)

    def _enter(self, part: str, step: int) -> None:
        now = self.balance()
        self._under_way = (part, now.at, self._clock.seconds, self.beside.slowed, now.goodput)
        self._write(step)

    def _write(self, step: int) -> None:
        part, began, hooks, slowed, parts = self._under_way
        fields = (PARTS.index(part), self.reached, began, hooks, slowed, *astuple(parts))
        self.note(step, began, hooks, slowed)
        _PHASE.pack_into(self._page, 0, _MAGIC, *fields)
        self._presume()


def rounded(goodput: Goodput) -> dict[str, float]:
    """Return the parts for people."""
    return {name: round(seconds, 4) for name, seconds in asdict(goodput).items()}


def read_account(figures: object) -> Balance | None:
    """Return the account in a log entry's figures; `None` without one that can be."""
    said = figures.get("goodput") if isinstance(figures, dict) else None
    if isinstance(said, dict) and isinstance(at := said.get("at"), int | float):
        with suppress(ConfigurationError, OverflowError):
            step, goodput = said.get("step"), Goodput.read(said)
            known = (_possible(said.get(name)) for name in ("share", "warm_up"))
            if math.isfinite(at):
                return Balance(float(at), step if isinstance(step, int) else 0, goodput, *known)
    return None


def _possible(seconds: object) -> float | None:
    return seconds if isinstance(seconds, float) and 0 <= seconds < math.inf else None


def _divided(part: str, seconds: float, hooks: float, slowed: float) -> Goodput:
    """Return the parts of `seconds` in one part, less hooks and slower steps if productive."""
    if part != "productive":
        return Goodput(**{part: seconds})
    hooks = min(max(0.0, hooks), seconds)
    slowed = min(max(0.0, slowed), seconds - hooks)
    return Goodput(productive=seconds - hooks - slowed, hooks=hooks, slowed=slowed)
