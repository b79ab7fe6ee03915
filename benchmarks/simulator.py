"""Compare goodput that is simulated with goodput that is measured: policies by mean steps between failures.

Every cell is a training under `moe-ckpt run` that dies by SIGKILL at random times. Beside the cells, before and after them, each policy has a run
of its own with other failures, from whose log `moe-ckpt profile` makes its profile; starts are pooled over policies. All cells of a policy are simulated with that one profile and
the failures that they had, as seconds of training in their own steps. Nothing is fitted to a cell.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

from rich.table import Table

from benchmarks.costs import Goal
from benchmarks.simulator_fit import DENSE_EVERY, FULL_EVERY, WINDOW, Cell
from benchmarks.simulator_runs import Run, read_run, run_cell
from lightning_moe_ckpt.benchmarks._benchmark import Progress, table_of
from lightning_moe_ckpt.goodput import PARTS, Goodput
from lightning_moe_ckpt.inspection._run_profile import Document, profile_of
from lightning_moe_ckpt.native import measure_bandwidth
from lightning_moe_ckpt.simulation import Failures, Ours, Profile, Scope, Simulated, System, expected, simulate
from lightning_moe_ckpt.storage import RunView, open_backend
from lightning_moe_ckpt.testing import RandomFaults

SYSTEMS: dict[str, System] = {
    "sparse": Ours(policy="sparse", window=WINDOW),
    "dense": Ours(policy="dense", every_n_steps=DENSE_EVERY),
    "differential": Ours(policy="differential", every_n_steps=FULL_EVERY),
}
_OWN_MTBF, _OWN_FAULTS = 70, 3
"""Steps between failures of the runs that profiles are made of, and their number."""
_OF_STARTS = ("detection", "startup", "startup_all")
_BANDWIDTH_NBYTES = 2**26
_GOALS = (
    Goal("worst", "largest difference of a cell", 1.5, "points", at_least=False),
    Goal("mean", "mean difference", 1.0, "points", at_least=False),
)
_COLUMNS = ("policy", "MTBF", "failures", "steps", "goodput", "simulated", "points", *PARTS[1:8])


@dataclass(frozen=True, kw_only=True, slots=True)
class CellFigure:
    """A cell, measured and simulated."""

    policy: str
    mtbf_steps: int
    failures: int
    steps: int
    step_seconds: float
    """Mean ordinary step of the cell, without hooks."""
    measured: Goodput
    """By lines that the training wrote."""
    accounted: Goodput | None
    """By the run's own account, in the newest entry of its log."""
    simulated: Goodput
    simulated_steps: float
    chosen: str
    """Policy of the grid that is expected to be best at this MTBF, by this policy's profile alone."""

    @property
    def points(self) -> float:
        """Simulated less measured goodput, in points."""
        return 100 * (self.simulated.share - self.measured.share)


def fewer(faults: int, mtbf: int) -> int:
    """Return the failures of a cell: fewer where they are far apart, at least a half."""
    return max(-(-faults // 2), round(faults * min(1.0, 60 / max(1, mtbf))))


def seed_of(faults: int, first: int = 0) -> int:
    """Return the first seed from `first` on whose failures come as often as they should, within a tenth."""
    for seed in range(first, first + 1000):
        *_, last = RandomFaults(mtbf=1.0, seed=seed, most=faults).draw(1)
        if abs((last.seconds or 0.0) / faults - 1) < 0.1:
            return seed
    raise AssertionError


def cell_of(policy: str, mtbf_steps: float, faults: int, step: float, seed: int) -> Cell:
    """Return a cell that trains on for an MTBF behind its last failure."""
    mtbf = mtbf_steps * step
    *_, last = RandomFaults(mtbf=mtbf, seed=seed, most=faults).draw(1)
    return Cell(policy=policy, mtbf=mtbf, faults=faults, seed=seed, seconds=(last.seconds or 0.0) + mtbf)


def measure(options: SimpleNamespace, progress: Progress) -> list[CellFigure]:
    """Run the benchmark; runs that `--simulator-out` has already are taken from there."""
    out: Path = options.simulator_out
    worlds = [int(text) for text in options.simulator_mtbf.split(",")]
    policies, faults = list(options.simulator_policies), int(options.simulator_faults)
    own = [("none", 0, "a"), *((policy, 0, "a") for policy in policies)]
    cells = [(policy, mtbf, "cell") for mtbf in worlds for policy in policies]
    last = [*((policy, 0, "b") for policy in reversed(policies)), ("none", 0, "b")]
    runs: dict[tuple[str, int, str], Run] = {}
    middle = len(policies) * (len(worlds) + 1) // 2
    step, todo = options.simulator_step, [*own, *cells[:middle], *last, *cells[middle:]]
    for done, (policy, mtbf, which) in enumerate(todo):
        progress(f"{policy}, MTBF {mtbf or _OWN_MTBF} steps", done, len(todo))
        keep = out / f"{policy}-{mtbf}-{which}"
        number = fewer(faults, mtbf)
        if policy == "none":
            cell = Cell(policy=policy, mtbf=1e9, faults=0, seed=0, seconds=80 * step)
        elif mtbf:
            cell = cell_of(policy, mtbf, number, step, seed_of(number))
        else:
            cell = cell_of(policy, _OWN_MTBF, _OWN_FAULTS, step, seed_of(_OWN_FAULTS, {"a": 100, "b": 200}[which]))
        runs[policy, mtbf, which] = (
            read_run(keep) if (keep / "cell.json").exists() else run_cell(cell, options.simulator_folder, keep)
        )
    return [*compared(out, runs, worlds, policies)]


def compared(
    out: Path, runs: dict[tuple[str, int, str], Run], worlds: Sequence[int], policies: Sequence[str]
) -> Iterator[CellFigure]:
    """Yield every cell with its simulation."""
    bare = statistics.mean(runs["none", 0, which].step_seconds for which in "ab")
    measured = {
        policy: [profile_of(view_of(out / f"{policy}-0-{which}" / "run"))[0] for which in "ab"] for policy in policies
    }
    everything = [each["costs"] for both in measured.values() for each in both]
    # No policy changes how long processes take to start. The more starts, the less of other load is in the figure.
    starts = {name: statistics.median(costs[name] for costs in everything if name in costs) for name in _OF_STARTS}
    for policy in policies:
        step = statistics.mean(runs[policy, 0, which].step_seconds for which in "ab")
        profile = profile_for(measured[policy], starts, SYSTEMS[policy], min(1.0, bare / step))
        profile.write(out / f"{policy}.yaml")
        for mtbf in worlds:
            seconds = mtbf * profile.step_seconds
            best = max(policies, key=lambda each: expected(profile, SYSTEMS[each], seconds, "process").share)
            run = runs[policy, mtbf, "cell"]
            found = simulated(profile, SYSTEMS[policy], run, step / run.step_seconds)
            yield CellFigure(
                policy=policy,
                mtbf_steps=mtbf,
                failures=len(run.detection),
                steps=run.steps,
                step_seconds=run.step_seconds,
                measured=run.goodput_of(run.step_seconds * min(1.0, bare / step)),
                accounted=account_of(out / f"{policy}-{mtbf}-cell" / "run"),
                simulated=found.goodput,
                simulated_steps=found.steps,
                chosen=best,
            )


def view_of(folder: Path) -> RunView:
    """Return the run in a folder."""
    return RunView.open(open_backend(folder.as_uri()))


def account_of(folder: Path) -> Goodput | None:
    """Return the goodput in the newest entry of a run's log."""
    events = [*view_of(folder).events().values()]
    said = [figures for each in events if isinstance(figures := each.event.get("figures"), dict)]
    return Goodput.read(said[-1]["goodput"]) if said else None


def profile_for(found: Sequence[Document], starts: dict[str, float], system: System, bare: float) -> Profile:
    """Return a policy's profile: means of its two runs. A step without checkpoints is `bare` of their steps; the rest is what slows them."""
    document: Document = {section: {} for section in found[0]}
    for section, names in document.items():
        for name in dict.fromkeys(name for each in found for name in each[section]):
            values = [each[section][name] for each in found if name in each[section]]
            names[name] = statistics.mean(values) if all(isinstance(value, float) for value in values) else values[0]
    training, costs = document["training"], document["costs"] | starts
    document["costs"] = costs
    document["speeds"]["device_host"] = measure_bandwidth(_BANDWIDTH_NBYTES)
    costs["slowed_per_nbyte"], per_nbyte = 1.0, costs.get("slowed_per_nbyte", 0.0)
    nbytes = system.behaviour(Profile.of(document), 1e9).slowed
    costs["slowed_per_nbyte"] = per_nbyte + training["step_seconds"] * (1 - bare) / nbytes
    training["step_seconds"] *= bare
    return Profile.of(document)


def simulated(profile: Profile, system: System, run: Run, scale: float) -> Simulated:
    """Return the simulation of a cell: its failures come after as much training, times `scale`."""
    costs, place = profile.costs, system.behaviour(profile, 1e9).places[0]
    first = (costs.startup_all or costs.startup) + costs.warm_up
    now, trace = first - costs.warm_up, list[tuple[float, Scope]]()
    for gap in run.gaps[:-1]:
        now += gap * scale
        trace.append((now, "process"))
        now += costs.detection + costs.startup + place.restore
    end = now + run.gaps[-1] * scale
    return simulate(profile, system, Failures(trace=tuple(trace)), until_seconds=end, first_start=first)


def table(figures: Sequence[CellFigure]) -> Table:
    """Return the figures for people: shares of wall time, measured / simulated."""
    rows = []
    for each in figures:
        ours, theirs = each.measured.shares(), each.simulated.shares()
        parts = [f"{100 * ours[part]:.1f} / {100 * theirs[part]:.1f}" for part in PARTS[1:8]]
        rows.append(
            [
                *(each.policy, str(each.mtbf_steps), str(each.failures), f"{each.steps} / {each.simulated_steps:.0f}"),
                *(f"{100 * each.measured.share:.2f}", f"{100 * each.simulated.share:.2f}", f"{each.points:+.2f}"),
                *parts,
            ]
        )
    points = [abs(each.points) for each in figures]
    values = {"worst": max(points), "mean": statistics.mean(points)}
    regrets = [_regret(each, figures) for each in figures]
    near = sum(regret <= 1.0 for regret in regrets)
    said = [
        f"policy chosen by each profile for each MTBF: {near} of {len(figures)} within 1 point of the best measured"
    ]
    said += [f"{goal.what}: {values[goal.name]:.2f}, goal {goal}: {goal.outcome(values[goal.name])}" for goal in _GOALS]
    title = "Shares of wall time in percent, measured / simulated; MTBF in steps of training"
    return table_of(title, _COLUMNS, rows, "\n".join(said))


def _regret(cell: CellFigure, figures: Sequence[CellFigure]) -> float:
    """Return the points by which the chosen policy's measured goodput is below the best one's at the same MTBF."""
    found = {each.policy: 100 * each.measured.share for each in figures if each.mtbf_steps == cell.mtbf_steps}
    return max(found.values()) - found[cell.chosen]
