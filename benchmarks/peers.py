"""Measure checkpoints of this package beside those of other systems: steps, CPU, memory, kills, and a flipped bit.

All train one model under Lightning's Trainer and save the same state every so many steps. Each system lives in an environment of its own.
A shared machine's speed drifts by a fifth within minutes, so a round is four turns: the system, no checkpoints, no checkpoints,
the system. Their difference is one number; systems take turns round by round. The figure is the median over the rounds,
with the interval between two of the ordered numbers: the true median lies within in 95 % of all cases, or in as many as so few numbers
allow. Where the interval is wider than the median is large, the row says so. `none` stands in a row too: its difference to itself
shows the method's error.

In rows of memory a copy survives a process, and the process is killed; in rows of storage it survives the node, whose memory
is lost with the process.
"""

from __future__ import annotations

import math
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rich.console import RenderableType

from benchmarks.peers_environments import Environment, default_place, interpreter_of
from benchmarks.peers_fits import PeerFit, PeerKills, PeerTurn
from benchmarks.peers_systems import REQUIREMENTS, SYSTEMS
from lightning_moe_ckpt.benchmarks._benchmark import Machine, Progress, rewritten, rounds_of, table_of
from lightning_moe_ckpt.benchmarks._fits import ModelSize, bench_folders
from lightning_moe_ckpt.errors import CheckpointError, ConfigurationError

_BASE = "none"
_COVERAGE = 0.95


@dataclass(frozen=True, kw_only=True, slots=True)
class Paired:
    """Differences within rounds: their median, and the true median's interval."""

    median: float
    low: float
    high: float
    coverage: float
    """Probability of the true median within the interval, whatever the differences' distribution."""

    @classmethod
    def of(cls, differences: Sequence[float]) -> Paired:
        """Return the figure, with the narrowest symmetric pair of ordered numbers to cover 95 %."""
        ordered, num = sorted(differences), len(differences)
        covered = [1 - 2 * sum(math.comb(num, k) for k in range(rank + 1)) / 2**num for rank in range(-(-num // 2))]
        rank = max((rank for rank, share in enumerate(covered) if share >= _COVERAGE), default=0)
        low, high = ordered[rank], ordered[num - 1 - rank]
        return cls(median=statistics.median(ordered), low=low, high=high, coverage=max(0.0, covered[rank]))

    @property
    def is_resolved(self) -> bool:
        """Whether the interval is no wider than the median is large; nothing is by fewer than three numbers."""
        return self.coverage > 0.5 and self.high - self.low <= abs(self.median)


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerFigure:
    """A row."""

    system: str
    label: str
    place: str
    versions: tuple[str, ...]
    """Requirements of its environment."""
    step_seconds: float = 0.0
    """Median step of the turns without checkpoints in its rounds."""
    added: Paired | None = None
    """Seconds added to a step; `None` where the row was not measured."""
    beside: Paired | None = None
    """CPU seconds per step, added by other threads and processes."""
    hook_seconds: float = 0.0
    """Seconds of the training thread in saves, per step, waits included."""
    safe_seconds: float | None = None
    """Median time from a step's end until a restart would go back no further; `None` where no save became safe."""
    nbytes_per_step: float = 0.0
    """Taken, mean."""
    memory_nbytes: int | None = None
    """Most host memory, less a training's without checkpoints; `None` where no turn was watched."""
    kills: PeerKills | None = None
    missing: str = ""
    """Why something was not measured; empty if all was."""
    behind: tuple[str, ...] = ()
    """Columns of our row worse than the best other system's in the same place."""


def measure(options: SimpleNamespace, progress: Progress) -> list[PeerFigure]:
    """Run the benchmark; write page and picture if asked for."""
    names, machine = chosen(options.peers), Machine.read()
    if options.accelerator == "gpu":
        raise ConfigurationError(
            "`--accelerator gpu`: `bench peers` trains on the CPU, which two of the systems are adapted to."
        )
    if options.steps % options.every or options.settle % options.every:
        raise ConfigurationError(
            f"`--steps {options.steps} --settle {options.settle}` must be multiples of `--every {options.every}`: a turn has "
            "whole cadences."
        )
    with bench_folders(options.peers_folder) as folders, ExitStack() as stack:
        rows = {name: _Row(name, options, folders) for name in names}
        _enter_environments(rows, options.envs or default_place(), stack, progress)
        bare = rows[_BASE]
        num_rounds = options.rounds * len(names)
        bare.bare_turn()
        for index, (_, name) in enumerate(rounds_of(options.rounds, names)):
            progress(f"training, checkpoints: {name}", index, num_rounds)
            rows[name].take_round(bare.bare_turn)
            if index % len(names) == len(names) - 1:
                _write(rows, machine, options)  # what is known, in case somebody ends this
        for index, name in enumerate(names):
            _write(rows, machine, options)
            progress(f"watching, then killing: {name}", index, len(names))
            rows[name].take_rest(options.peer_kills)
        return _write(rows, machine, options)


def _write(rows: Mapping[str, _Row], machine: Machine, options: SimpleNamespace) -> list[PeerFigure]:
    """Write page and picture if asked for; return the figures."""
    figures = ranked([row.figure() for row in rows.values()])
    if options.page is not None:
        write_page(options.page, figures, machine, options)
    if options.png is not None:
        draw(figures, options.png)
    return figures


def _enter_environments(rows: Mapping[str, _Row], place: Path, stack: ExitStack, progress: Progress) -> None:
    """Start each environment's process for the rows; a row without process says why."""
    for index, name in enumerate(["", *REQUIREMENTS]):
        if not (own := [row for row in rows.values() if SYSTEMS[row.name].environment == name]):
            continue
        progress(f"environment of {', '.join(row.name for row in own)}", index, 1 + len(REQUIREMENTS))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="moe-ckpt-peers-")))
        try:
            made = Environment(interpreter_of(name, place), [row.name for row in own], folder)
        except CheckpointError as error:
            if not name:
                raise
            for row in own:
                row.missing = str(error)
            continue
        stack.callback(made.close)
        for row in own:
            row.environment, row.missing = made, made.missing.get(row.name, "")


def chosen(text: str | None) -> list[str]:
    """Return the systems to measure, no checkpoints first. Raises `ConfigurationError` for an unknown name."""
    names = [name for name in (text or ",".join(SYSTEMS)).split(",") if name not in ("", _BASE)]
    if unknown := [name for name in names if name not in SYSTEMS]:
        raise ConfigurationError(f"`--peers {','.join(unknown)}`: there are {', '.join(SYSTEMS)}.")
    return [_BASE, *dict.fromkeys(names)]


class _Row:
    """A system with its measurements so far. After a failure none is tried again."""

    environment: Environment

    def __init__(self, name: str, options: SimpleNamespace, folders: tuple[Path, Path]) -> None:
        self.name, self.missing = name, ""
        folder, memory = (each / name for each in folders)
        size = ModelSize(
            num_blocks=options.blocks, model_dim=options.dim, num_experts=options.experts,
            expert_dim=4 * options.dim, batch_size=options.batch_size,
        )  # fmt: skip
        self._fit = PeerFit(
            system=name, folder=folder / "turns", memory=memory / "turns", size=size, every=options.every,
            settle=options.settle, steps=options.steps, turns=1 + 2 * options.rounds,
        )  # fmt: skip
        self._killed = replace(self._fit, folder=folder / "kills", memory=memory / "kills")
        self._bare = replace(self._fit, system=_BASE, folder=folder / "bare", memory=memory / "bare", turns=0)
        self._rounds, self._kills = list[tuple[PeerTurn, PeerTurn, PeerTurn, PeerTurn]](), list[PeerKills]()
        self._watched, self._bare_nbytes = list[PeerTurn](), 0

    @contextmanager
    def _trying(self) -> Iterator[None]:
        try:
            yield
        except CheckpointError as error:
            self.missing = str(error).strip().splitlines()[-1]

    def bare_turn(self) -> PeerTurn:
        """Give the training without checkpoints a turn."""
        return self.environment.turn(self._bare)

    def take_round(self, bare_turn: Callable[[], PeerTurn]) -> None:
        """Take four turns, the middle two without checkpoints."""
        if not self.missing:
            with self._trying():
                if not self._rounds:
                    self.environment.turn(self._fit)  # whose first save makes what later ones have
                first = self.environment.turn(self._fit)
                self._rounds.append((first, bare_turn(), bare_turn(), self.environment.turn(self._fit)))

    def take_rest(self, num_kills: int) -> None:
        """Watch a turn, and kill trainings."""
        if not self.missing:
            with self._trying():
                self._watched.append(self.environment.turn(self._fit))
                alike = replace(self._bare, folder=self._fit.folder.with_name("beside"), turns=1)
                self._bare_nbytes = self.environment.bare_nbytes(alike)
        if not self.missing and num_kills:
            with self._trying():
                self._kills.append(self.environment.kill(self._killed, num_kills))

    def figure(self) -> PeerFigure:
        """Return the row."""
        system = SYSTEMS[self.name]
        facts: dict[str, Any] = {"versions": REQUIREMENTS.get(system.environment, ()), "missing": self.missing}
        if self._rounds:
            own = [turn for first, _, _, last in self._rounds for turn in (first, last)]
            facts |= {
                "step_seconds": statistics.median(turn.seconds for _, *bare, _ in self._rounds for turn in bare),
                "added": self._paired("seconds"),
                "beside": self._paired("beside_seconds"),
                "hook_seconds": statistics.median(turn.hook_seconds for turn in own),
                "nbytes_per_step": statistics.fmean(turn.nbytes for turn in own),
            }
        if self._watched:
            safe = self._watched[0].safe_seconds
            facts["safe_seconds"] = statistics.median(safe) if safe else None
            facts["memory_nbytes"] = self._watched[0].memory_nbytes - self._bare_nbytes
        kills = self._kills[0] if self._kills else None
        return PeerFigure(system=self.name, label=system.label, place=system.place, kills=kills, **facts)

    def _paired(self, name: str) -> Paired:
        turns = [[getattr(turn, name) for turn in each] for each in self._rounds]
        return Paired.of([(first + last - one - other) / 2 for first, one, other, last in turns])


def ranked(figures: Sequence[PeerFigure]) -> list[PeerFigure]:
    """Return the rows; `behind` of ours names the columns worse than the best other system's in the same place."""
    peers = [each for each in figures if each.system != _BASE and not SYSTEMS[each.system].is_ours]
    return [replace(each, behind=_behind(each, peers)) if SYSTEMS[each.system].is_ours else each for each in figures]


def _behind(figure: PeerFigure, peers: Sequence[PeerFigure]) -> tuple[str, ...]:
    said, others = [], [peer for peer in peers if peer.place == figure.place]
    for column, worth in _WORTH.items():
        known = {value: each for each in others if (value := worth(each)) is not None}
        if (own := worth(figure)) is not None and known and own > (best := min(known)):
            said.append(f"{column} ({known[best].label})")
    if (added := figure.added) is not None:
        slower = [each for each in others if each.added is not None and each.added.high < added.low]
        best_added = min(slower, key=lambda each: each.added.median if each.added else 0.0, default=None)
        said = [*([f"step ({best_added.label})"] if best_added is not None else []), *said]
    return tuple(said)


def _recovery(figure: PeerFigure) -> float | None:
    """Return the median seconds after kills; `None` if a kill left nothing."""
    kills = figure.kills
    return statistics.median(kills.seconds) if kills is not None and all(kills.resumed_from) else None


_WORTH: dict[str, Callable[[PeerFigure], float | None]] = {
    "stall": lambda figure: figure.hook_seconds if figure.added else None,
    "safe after": lambda figure: figure.safe_seconds,
    "host memory": lambda figure: figure.memory_nbytes or None,
    "after SIGKILL": _recovery,
}
"""Columns without an interval; less is better."""


# -- tables

_COLUMNS = (
    *("checkpoints", "+ms/step", "interval", "CPU beside +ms/step", "stall ms/step", "safe after ms", "MiB/step"),
    *("host memory +MiB", "after SIGKILL s", "steps repeated", "bits equal", "flipped bit", "behind in"),
)
_OTHER_DATA = "those saved; later steps got other data"
_NOTE = """+ms/step: longer than without checkpoints, median of rounds of four turns, and its interval; CPU beside: of other threads and processes; stall: of the training thread in saves; safe after: from a step's end until a restart goes back no further; MiB/step: bytes taken; host memory: the most, files in memory included; after SIGKILL: to the end of the first new step, processes forked, imports not in it; bits equal: of weights and optimizer, where training went on and at the step of the kill; behind in: worse than the best of the others in that place"""


def table(figures: Sequence[PeerFigure]) -> RenderableType:
    """Return the figures for people."""
    steps = [figure.step_seconds for figure in figures if figure.added]
    step = f", a step of {statistics.median(steps) * 1e3:.1f} ms" if steps else ""
    return table_of(f"Checkpoints of other systems, and ours{step}", _COLUMNS, [*map(row_of, figures)], _NOTE)


def row_of(figure: PeerFigure) -> list[str]:
    """Return the cells of a row."""
    name = f"{figure.label}, {figure.place}" if figure.system != _BASE else figure.label
    if figure.added is None or figure.beside is None:
        return [name, f"not measured: {figure.missing}", *[""] * (len(_COLUMNS) - 2)]
    added, kills = figure.added, figure.kills
    row = [
        name,
        f"{added.median * 1e3:+.2f}" if added.is_resolved else f"{added.median * 1e3:+.2f}, not resolved",
        f"{added.low * 1e3:.1f} to {added.high * 1e3:.1f}",
        f"{figure.beside.median * 1e3:+.2f}",
        f"{figure.hook_seconds * 1e3:.2f}",
        _safe(figure),
        f"{figure.nbytes_per_step / 2**20:.1f}" if figure.nbytes_per_step or figure.system == _BASE else "not seen",
        "" if figure.memory_nbytes is None else f"{figure.memory_nbytes / 2**20:+.0f}",
    ]
    if kills is None:
        return [*row, f"failed: {figure.missing}" if figure.missing else "", *[""] * 3, ", ".join(figure.behind)]
    low, high = min(kills.seconds), max(kills.seconds)
    repeated = {stop - first for stop, first in zip(kills.killed_at, kills.resumed_from, strict=True)}
    return [
        *row,
        f"{statistics.median(kills.seconds):.2f}{f' ({low:.2f} to {high:.2f})' if low < high else ''}",
        "all: no copy is left" if not all(kills.resumed_from) else " or ".join(map(str, sorted(repeated))),
        _bits(kills),
        "" if figure.system == _BASE else f"{kills.flip}{f': {kills.flip_said}' if kills.flip == 'noticed' else ''}",
        ", ".join(figure.behind),
    ]


def _safe(figure: PeerFigure) -> str:
    if figure.memory_nbytes is None or figure.system == _BASE:
        return ""
    return "not seen" if figure.safe_seconds is None else f"{figure.safe_seconds * 1e3:.0f}"


def _bits(kills: PeerKills) -> str:
    if not all(kills.resumed_from):
        return ""
    return "yes" if kills.steps_equal else _OTHER_DATA if kills.state_equal else "no"


_BEGIN, _END = "<!-- written by `moe-ckpt bench peers` -->", "<!-- end of peers -->"


def write_page(path: Path, figures: Sequence[PeerFigure], machine: Machine, options: SimpleNamespace) -> None:
    """Put the table into the page at `path`, in its marked place. Raises `ConfigurationError` if the page has none."""
    page = path.read_text(encoding="utf-8")
    path.write_text(rewritten(page, _BEGIN, _END, lambda _: page_of(figures, machine, options)), encoding="utf-8")


def page_of(figures: Sequence[PeerFigure], machine: Machine, options: SimpleNamespace) -> str:
    """Return the table in Markdown, under its machine."""
    params = ModelSize(
        num_blocks=options.blocks, model_dim=options.dim, num_experts=options.experts, expert_dim=4 * options.dim
    ).num_params()
    coverage = min((figure.added.coverage for figure in figures if figure.added), default=0.0)
    systems = "; ".join(sorted({each for figure in figures for each in figure.versions}))
    head = (
        f"{params / 1e6:.1f} million parameters in float32, a save every {options.every} steps, {options.rounds} rounds, intervals that hold the "
        f"median in {coverage:.1%} of all cases. {machine}{f'; {systems}' if systems else ''}."
    )
    lines = ["| " + " | ".join(_COLUMNS) + " |", "|---" * len(_COLUMNS) + "|"]
    lines += ["| " + " | ".join(cell.replace("|", "/") for cell in row_of(figure)) + " |" for figure in figures]
    return "\n".join([head, "", *lines, "", f"{_NOTE}.", ""])


def draw(figures: Sequence[PeerFigure], path: Path) -> None:
    """Draw the time added to a step, with intervals. Raises `ModuleNotFoundError` without matplotlib."""
    from matplotlib.figure import Figure

    shown = [(figure, figure.added) for figure in figures if figure.added is not None][::-1]
    picture = Figure(figsize=(7, 0.8 + 0.24 * len(shown)), layout="constrained")
    axes = picture.add_subplot()
    for at, (figure, added) in enumerate(shown):
        colour = "0.6" if figure.system == _BASE else "#2b6cb0" if SYSTEMS[figure.system].is_ours else "#c05621"
        axes.barh(at, added.median * 1e3, color=colour, alpha=1.0 if added.is_resolved else 0.35)
        axes.plot([added.low * 1e3, added.high * 1e3], [at, at], color="black", linewidth=1)
    axes.set_yticks(range(len(shown)), [row_of(figure)[0] for figure, _ in shown], fontsize=7)
    axes.set_xlabel("ms added to a step, with the interval of the median; pale: not resolved", fontsize=8)
    axes.grid(visible=True, axis="x", color="#edf0f4")
    axes.set_axisbelow(True)
    widest = max([1e-3, *(abs(added.median) for _, added in shown)]) * 1e3
    axes.set_xlim(-widest / 3, 1.6 * widest)  # an interval may be far longer
    picture.savefig(path, dpi=80, format="png")
