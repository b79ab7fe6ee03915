"""Show simulations of a described run side by side, and the choice of `simulation.choose`."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]  # it has no types, and stubs are not a dependency
from rich.console import RenderableType

from lightning_moe_ckpt._units import rate_text, read_duration, size_text, time_text
from lightning_moe_ckpt.errors import ConfigurationError
from lightning_moe_ckpt.goodput import PARTS, Goodput
from lightning_moe_ckpt.inspection._answers import Answer, plain_table
from lightning_moe_ckpt.simulation import (
    EVERY_MEMORY,
    SYSTEMS,
    Failures,
    PlannedRun,
    Profile,
    Scope,
    Simulated,
    System,
    choose,
    expected,
    reasons,
    simulate,
)


@dataclass(frozen=True, kw_only=True)
class _Row:
    """A system over all seeds."""

    name: str
    runs: Sequence[Simulated]
    expected: Goodput | None
    """Shares in closed form; `None` for a trace, whose failures have no rate."""

    @property
    def shares(self) -> list[float]:
        return [run.goodput.share for run in self.runs]

    def mean(self, value: str) -> float:
        return statistics.fmean(getattr(run, value) for run in self.runs)

    @property
    def goodput(self) -> Goodput:
        """All seeds' runs, one after the other."""
        return sum((run.goodput for run in self.runs), Goodput())

    @property
    def rates(self) -> dict[str, float]:
        """Bytes per second by place."""
        wall = self.goodput.wall
        return {name: sum(run.nbytes[name] for run in self.runs) / wall for name in self.runs[0].nbytes}

    @property
    def finish(self) -> float | None:
        known = [run.finish_seconds for run in self.runs if run.finish_seconds is not None]
        return statistics.fmean(known) if len(known) == len(self.runs) else None

    def document(self) -> dict[str, Any]:
        found = {name: self.mean(name) for name in ("steps", "failures", "host_memory", "lost_tokens", "lost_portion")}
        spread = statistics.stdev(self.shares) if len(self.shares) > 1 else 0.0
        shares = {"goodput": statistics.fmean(self.shares), "deviation": spread, "parts": self.goodput.shares()}
        known = self.expected
        closed = {"expected": known and known.share, "expected_parts": known and known.shares()}
        more = {"finish_seconds": self.finish, "nbytes_per_second": self.rates, "settings": dict(self.runs[0].notes)}
        return {"system": self.name} | shares | closed | found | more


def simulation_answer(
    *, path: Path, mtbf: float | None, trace: Path | None, scope: Scope | None, chosen: Sequence[str], hours: float, seeds: int, plot: Path | None
) -> Answer:  # fmt: skip
    """Return every chosen system's goodput, as simulated from several seeds and in closed form; also drawn if `plot` names a file.
    Raises `ConfigurationError` if the profile, the trace or a system is none, options contradict each other, or failures are closer than a
    step.
    """
    if not 0 < hours < math.inf:
        raise ConfigurationError(f"`--hours {hours:g}` must be above 0, and finite.")
    if trace is not None and (mtbf is not None or scope is not None):
        raise ConfigurationError("`--trace` has times and scopes of failures: leave out `--mtbf` and `--scope`.")
    profile, wall = Profile.read(path), hours * 3600
    mtbf, scope = 7200.0 if mtbf is None else mtbf, scope or "node"
    failures = Failures(mtbf=mtbf, scope=scope) if trace is None else Failures.read(trace)
    mean, rows = failures.mean_seconds(wall), list[_Row]()
    for name in chosen or SYSTEMS:
        system = system_of(name)
        runs = [simulate(profile, system, failures, until_seconds=wall, seed=seed) for seed in range(seeds)]
        rows.append(_Row(name=name, runs=runs, expected=None if trace else expected(profile, system, mean, scope)))
    if plot is not None:
        _draw(plot, rows)
    facts = {"profile": str(path), "mtbf": None if trace else mtbf, "trace": str(trace) if trace else None}
    facts |= {"hours": hours, "seeds": seeds, "step_seconds": profile.step_seconds, "ranks": profile.ranks}
    document = facts | {"systems": [row.document() for row in rows]}
    steps = f"{profile.ranks} ranks, steps of {profile.step_seconds:.3g} s"
    heading = f"{steps}, {hours:g} h, failures every {time_text(mean)}"
    return Answer(document, lambda: [heading, *_tables(rows, profile)])


def system_of(text: str) -> System:
    """Return the system that `NAME` or `NAME:SETTING=VALUE,...` says. Raises `ConfigurationError` for an unknown system or setting."""
    name, _, settings = text.partition(":")
    if name not in SYSTEMS:
        raise ConfigurationError(f"`--system {text}`: there are {', '.join(SYSTEMS)}.")
    known = [field.name for field in fields(SYSTEMS[name])]  # type: ignore[arg-type]
    given = dict(each.partition("=")[::2] for each in settings.split(",") if each)
    if wrong := [key for key in given if key not in known]:
        has = ", ".join(known) or "no settings"
        raise ConfigurationError(f"`--system {text}`: {name} has no `{wrong[0]}`, but {has}.")
    try:
        values = {key: json.loads(value) for key, value in given.items()}
        found: System = replace(SYSTEMS[name], **values)  # type: ignore[type-var]
    except (ValueError, TypeError) as error:
        like = "settings are as in ours-sparse:window=4,localized=true"
        raise ConfigurationError(f"`--system {text}`: {like}. {error}") from error
    return found


def _tables(rows: Sequence[_Row], profile: Profile) -> list[RenderableType]:
    shown = [part for part in PARTS if part != "productive" and any(row.goodput.shares()[part] >= 5e-5 for row in rows)]
    titles = ("system", "goodput", "+-", "closed form", *shown)
    goodput = plain_table(*titles, right=titles[1:])
    titles = ("system", "settings", "all steps in", "to storage", "to other nodes", "memory of a node", "lost tokens")
    costs = plain_table(*titles, right=titles[2:])
    for row in rows:
        said, parts, rates = row.document(), row.goodput.shares(), row.rates
        shares = [said["goodput"], said["deviation"], said["expected"], *(parts[part] for part in shown)]
        goodput.add_row(row.name, *("" if share is None else f"{100 * share:.2f} %" for share in shares))
        settings = ", ".join(f"{name} {value:g}" for name, value in said["settings"].items())
        finish = "" if row.finish is None else time_text(row.finish)
        sent = [rate_text(rates[place]) if place in rates else "" for place in ("storage", "other nodes")]
        lost = f"{100 * said['lost_portion']:.3g} %" if said["lost_portion"] else ""
        costs.add_row(row.name, settings, finish, *sent, size_text(said["host_memory"]), lost)
    if profile.training.steps is None:
        return [goodput, costs, "The time of all steps needs `training.steps` in the profile."]
    return [goodput, costs]


_COLOURS = ["#3c8d5a", "#e0a030", "#f0cf80", "#8064a2", "#a08bc0", "#4f81bd", "#c05048", "#7a2f2a", "#b0b0b0"]


def _draw(path: Path, rows: Sequence[_Row]) -> None:
    """Write a figure with each system's wall time by part."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 1.2 + 0.35 * len(rows)), layout="constrained")
    axes, left = figure.add_subplot(), [0.0] * len(rows)
    for part, colour in zip(PARTS, _COLOURS, strict=True):
        widths = [100 * row.goodput.shares()[part] for row in rows]
        axes.barh([row.name for row in rows], widths, left=left, color=colour, label=part)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    axes.set(xlim=(0, 100), xlabel="% of wall time")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right upper", frameon=False, fontsize="small")
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"`--plot {path}`: no figure can be written there. {error}") from error


# -- choices


def planned(profile: Path, *, mtbf: object, url: str, as_yaml: bool, **limits: Any) -> Answer:
    """Choose for a profile, see `choose`. Raises `ConfigurationError` if the profile cannot be read, or nothing can work."""
    if mtbf is None:
        raise ConfigurationError(
            "`--profile` says what things cost, and the choice depends on how often they fail: add `--mtbf`, the mean time "
            "between failures of the whole run, such as `--mtbf 2h`."
        )
    found = choose(read := Profile.read(profile), read_duration(mtbf).total_seconds(), **limits)
    if as_yaml:
        entry = found[0].document()["callback"]
        entry["init_args"] = {"url": url, **entry["init_args"]}
        text = yaml.safe_dump({"trainer": {"callbacks": [entry]}}, sort_keys=False).rstrip()
        return Answer(entry, lambda: [text])
    best, *others = [each.document() for each in found]
    return Answer({**best, "why": reasons(found), "alternatives": others}, lambda: _choices(read, found))


def _choices(profile: Profile, found: Sequence[PlannedRun]) -> list[RenderableType]:
    best, titles = found[0], [each.label for each in found]
    table = plain_table("", *titles, right=titles)
    step = profile.step_seconds
    rows = {
        "steps between generations": [str(each.every) for each in found],
        "that is": [time_text(float(each.every * step)) for each in found],
        "copies on other nodes": [str(each.system.replicas) for each in found],
        "storage gets one every": [time_text(float(each.storage_seconds)) for each in found],
        "storage per hour": [size_text(each.storage_nbytes_per_hour) for each in found],
        "shared memory of a node": [size_text(each.host_nbytes) for each in found],
        "expected goodput": [f"{each.goodput.share:.2%}" for each in found],
    }
    shares = [each.goodput.shares() for each in found]
    lost = [part for part in PARTS[1:] if any(each[part] >= 5e-5 for each in shares)]
    rows |= {f"  {part}": [f"{each[part]:.2%}" for each in shares] for part in lost}
    if any(each.lost_portion for each in found):
        rows["lost tokens"] = [f"{each.lost_portion:.2%}" if each.lost_portion else "none" for each in found]
    for name, cells in rows.items():
        table.add_row(name, *cells)
    name, given = best.callback()
    arguments = ", ".join(["url", *(f"{key}={value!r}" for key, value in given.items())])
    said: list[RenderableType] = [table, "why:", *(f"  {text}" for text in reasons(found)), f"{name}({arguments})"]
    if best.spares < best.spares_needed:
        said.append(f"spares: {best.spares} of the profile are too few, see idle: {best.spares_needed} hardly ever are")
    elif best.spares:
        said.append(f"spares: {best.spares}, since a lost one is away for {time_text(float(profile.costs.repair))}")
    return [
        *said,
        f"taken for granted: one failure in {1 / EVERY_MEMORY:.0f} reaches the memory of every node, and takes no machine away",
    ]
