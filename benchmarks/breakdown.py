"""Measure where the time of checkpoints goes: hook by hook on the training thread, thread by thread beside it; of a restart,
phase by phase.

A hook's time runs from its call to its return, and counts once where hooks call each other. Threads are measured by the CPU time
in Linux's tables; the time of ended threads is the rest of the process's time.
"""

from __future__ import annotations

import os
import pkgutil
import re
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import wraps
from operator import add
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from lightning.pytorch import Callback
from rich.console import Group, RenderableType

from benchmarks.costs import Cost, Goal
from benchmarks.peers_saving import OTHERS
from lightning_moe_ckpt.benchmarks import _overhead
from lightning_moe_ckpt.benchmarks._benchmark import Progress, table_of
from lightning_moe_ckpt.benchmarks._overhead import VARIANTS, OverheadFigure, Variant
from lightning_moe_ckpt.fit import FitSession

_PROCESSES = Path("/proc")
ENDED = "threads that ended"
_USUAL = ("sparse8", "dense1", "dense4", "partial1", "selective1")
_NOTHING = Cost(0.0, 0.0)
GOALS = {
    "sparse8-memory": Goal("sparse", "sparse, window 8, memory only", 2.0, "ms", at_least=False),
    "dense1-memory": Goal("dense", "dense at every step, memory only", 4.0, "ms", at_least=False),
    "dense4-memory": Goal("dense 4", "dense every 4 steps, memory only", 1.0, "ms", at_least=False),
}
"""Limits of the time added to a step."""
IDLE = Goal("idle", "steps at which nothing is taken", 0.3, "ms", at_least=False)
SHARE = Goal("share", "of a step, with storage", 0.03, "of a step", at_least=False)


class CostMeter:
    """Measure functions by name, each without the others inside, on the calling thread until `stop`.

    Nothing is undone: the process is the measurement's own.
    """

    def __init__(self, functions: Mapping[str, Sequence[str]]) -> None:
        self._costs, self.calls = defaultdict[str, Cost](lambda: _NOTHING), Counter[str]()
        self._thread, self._inside = threading.get_ident(), [_NOTHING]
        for name, places in functions.items():
            for place, *attributes in map(str.split, places):
                owner = pkgutil.resolve_name(place)
                for attribute in attributes:
                    setattr(owner, attribute, self._metered(name, getattr(owner, attribute)))

    def costs(self) -> dict[str, Cost]:
        """Return the costs so far, by name."""
        return dict(self._costs)

    def stop(self) -> None:
        """Count nothing from here on."""
        self._thread = -1

    def _metered(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def metered(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != self._thread:
                return function(*args, **kwargs)
            self._inside.append(_NOTHING)
            self.calls[name] += 1
            wall, cpu = time.perf_counter(), time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                cost = Cost(time.perf_counter() - wall, time.thread_time() - cpu)
                shares = zip(self._costs[name], cost, self._inside.pop(), strict=True)
                self._costs[name] = Cost(*(before + own - inside for before, own, inside in shares))
                self._inside[-1] = Cost(*map(add, self._inside[-1], cost))

        return metered


class HookMeter(CostMeter):
    """Measure the hooks of `peer`, or without a peer this package's."""

    def __init__(self, peer: Callback | None) -> None:
        owner, hooks = (FitSession, _own_hooks()) if peer is None else (type(peer), _overridden(type(peer)))
        super().__init__({name: [f"{owner.__module__}:{owner.__qualname__} {name}"] for name in hooks})


def _own_hooks() -> list[str]:
    """Return the methods that `Report.overhead_seconds` times."""
    return [name for name, hook in vars(FitSession).items() if hasattr(hook, "__wrapped__")]


def _overridden(kind: type[Callback]) -> list[str]:
    hooks = (name for name in dir(Callback) if name.startswith("on_"))
    return [name for name in hooks if getattr(kind, name) is not getattr(Callback, name)]


class ThreadTimes(NamedTuple):
    """CPU seconds so far."""

    process: float
    """All threads of this process."""
    training: float
    """The calling thread."""
    beside: dict[tuple[int, str], float]
    """Other threads and processes below this one, by number and name."""

    @classmethod
    def now(cls) -> ThreadTimes:
        """Read them; only on Linux there is something beside."""
        names = {thread.native_id: thread.name for thread in threading.enumerate()}
        own, beside = threading.get_native_id(), dict[tuple[int, str], float]()
        for number, name, seconds in _tasks(os.getpid()):
            if number != own:
                beside[number, names.get(number, f"native {name}")] = seconds
        for child in _below(os.getpid()):
            tasks = [*_tasks(child)]
            beside[child, f"process {tasks[0][1]}" if tasks else ""] = sum(seconds for *_, seconds in tasks)
        return cls(time.process_time(), time.thread_time(), beside)

    def since(self, earlier: ThreadTimes, count: float) -> dict[str, float]:
        """Return the seconds since `earlier`, divided by `count`, by name without numbers."""
        found = defaultdict[str, float](float)
        for (number, name), seconds in self.beside.items():
            found[re.sub(r"[-_ ]*\d+(\W.*)?$", "", name)] += seconds - earlier.beside.get((number, name), 0.0)
        here = sum(seconds for name, seconds in found.items() if not name.startswith("process "))
        found[ENDED] = self.process - earlier.process - (self.training - earlier.training) - here
        return {name: seconds / count for name, seconds in found.items() if seconds / count >= 1e-6}


def _tasks(process: int) -> Iterator[tuple[int, str, float]]:
    """Yield number, name and CPU seconds for every thread in a process, its first thread first."""
    with suppress(OSError):  # no Linux, or it has ended
        for task in sorted((_PROCESSES / str(process) / "task").iterdir(), key=lambda path: int(path.name)):
            with suppress(OSError):
                nanoseconds = int((task / "schedstat").read_text().split()[0])
                yield int(task.name), (task / "comm").read_text().strip(), nanoseconds / 1e9


def _below(process: int) -> Iterator[int]:
    with suppress(OSError):
        for path in (_PROCESSES / str(process) / "task").glob("*/children"):
            for child in map(int, path.read_text().split()):
                yield child
                yield from _below(child)


def per_step(before: Mapping[str, Cost], after: Mapping[str, Cost], num_steps: int) -> dict[str, Cost]:
    """Return the cost of every hook per step in between."""
    earlier = {name: before.get(name, _NOTHING) for name in after}
    return {
        name: Cost((cost.wall - earlier[name].wall) / num_steps, (cost.cpu - earlier[name].cpu) / num_steps)
        for name, cost in after.items()
    }


class TurnMeter:
    """Measure the steps of a turn: functions by `meter`, and threads beside."""

    def __init__(self, meter: CostMeter) -> None:
        self._meter = meter

    def begin(self) -> None:
        """Begin with the next step."""
        self._costs, self._threads = self._meter.costs(), ThreadTimes.now()

    def end(self, num_steps: int) -> dict[str, dict[str, float]]:
        """Return mean seconds per step since `begin`, by name: `wall` and `cpu` of functions, `threads`."""
        costs = per_step(self._costs, self._meter.costs(), num_steps)
        return {
            "wall": {name: cost.wall for name, cost in costs.items()},
            "cpu": {name: cost.cpu for name, cost in costs.items()},
            "threads": ThreadTimes.now().since(self._threads, num_steps),
        }


def _meter_of(variant: Variant, checkpoint: Callback | None) -> TurnMeter | None:
    return None if checkpoint is None else TurnMeter(HookMeter(checkpoint if variant.make is not None else None))


def measure(options: SimpleNamespace, progress: Progress) -> list[OverheadFigure]:
    """Run the benchmark."""
    chosen = {"variants": options.variants or ",".join([*_USUAL, *OTHERS])}
    return _overhead.measure(
        SimpleNamespace(**{**vars(options), **chosen, "others": OTHERS, "meter": _meter_of}), progress
    )


def table(figures: Sequence[OverheadFigure]) -> RenderableType:
    """Return a table with our policies, per step, and a table with other systems, per save."""
    title, every = _overhead.title_of(figures), {name: max(1, variant.every) for name, variant in OTHERS.items()}
    peers = [figure for figure in figures if figure.variant in OTHERS]
    ours = [figure for figure in figures[1:] if figure.variant not in OTHERS]
    own = _table(f"{title}: microseconds per step", ours, dict.fromkeys(VARIANTS, 1))
    others = [_table("The same of other systems: microseconds per save", peers, every)] if peers else []
    return Group(own, *others, *judged(figures))


def judged(figures: Sequence[OverheadFigure]) -> list[str]:
    """Return a line per goal that something was measured for."""
    by_name, lines = {figure.variant: figure for figure in figures}, list[str]()

    def judge(goal: Goal, measured: float) -> None:
        lines.append(f"{goal.what}: {measured:+.2f} ms, goal {goal}: {goal.outcome(measured)}")

    for name, goal in GOALS.items():
        if (figure := by_name.get(name)) is None:
            continue
        judge(goal, figure.added_seconds * 1e3)
        if figure.added_idle_seconds is not None:
            judge(IDLE, figure.added_idle_seconds * 1e3)
    for name, figure in by_name.items():
        variant = VARIANTS.get(name)
        if variant is not None and variant.system in ("sparse", "dense") and not variant.memory_only:
            share = figure.added_seconds / figures[0].mean_seconds
            lines.append(f"{name}, with storage: {share:.1%} of a step, goal at most 3%: {SHARE.outcome(share)}")
    return lines


def _table(title: str, figures: Sequence[OverheadFigure], per: Mapping[str, int]) -> RenderableType:
    def row(name: str, values: Sequence[float]) -> list[str]:
        scaled = zip(figures, values, strict=True)
        return [name, *("" if not value else f"{value * per[each.variant] * 1e6:,.0f}" for each, value in scaled)]

    def rows(kind: str, form: str) -> list[list[str]]:
        columns = [figure.metered[kind] for figure in figures]
        return [row(form.format(name), [column.get(name, 0.0) for column in columns]) for name in _by_size(columns)]

    def total(name: str, kind: str) -> list[str]:
        return row(name, [sum(figure.metered[kind].values()) for figure in figures])

    shown = [*rows("wall", "{}"), total("= in hooks", "wall"), total("  of it CPU", "cpu")]
    shown += [*rows("threads", "beside: {}"), total("= CPU beside", "threads")]
    shown.append(row("longer by", [figure.added_seconds for figure in figures]))
    note = "hooks: time of the training thread between call and return; beside: CPU time of other threads and processes"
    return table_of(title, ("", *(figure.variant for figure in figures)), shown, note)


def _by_size(columns: Sequence[Mapping[str, float]]) -> list[str]:
    """Return the names with a microsecond in some column, largest first."""
    most = {name: max(column.get(name, 0.0) for column in columns) for column in columns for name in column}
    return sorted((name for name, seconds in most.items() if seconds >= 1e-6), key=lambda name: -most[name])
