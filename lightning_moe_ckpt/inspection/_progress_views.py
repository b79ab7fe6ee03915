"""Show the progress of a run: in a terminal, again and again, or as one HTML page.

The page has its plots in it and needs nothing else to be shown.
"""

from __future__ import annotations

import html
import io
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from lightning_moe_ckpt._units import rate_text, size_text, time_text
from lightning_moe_ckpt.errors import ConfigurationError
from lightning_moe_ckpt.goodput import PARTS, Goodput
from lightning_moe_ckpt.inspection._answers import Answer, Screen, kind_of, plain_table
from lightning_moe_ckpt.inspection._run_progress import Follower, Incarnation, NewestStep, RunProgress, Sample, by_rank
from lightning_moe_ckpt.inspection._transformers import write_text, write_whole
from lightning_moe_ckpt.storage import RunView, StoredGeneration

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #1d2433; background: #fff; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
table { border-collapse: collapse; } td, th { padding: .2rem .8rem .2rem 0; text-align: right; border-bottom: 1px solid #e3e6ec; }
td:first-child, th:first-child, .facts td { text-align: left; } code { overflow-wrap: anywhere; }
svg { width: 100%; height: auto; } figcaption { color: #5a6472; } figure { margin: 1rem 0; }
"""
_COLOURS = ("#2b6cb0", "#c05621", "#2f855a", "#805ad5", "#b83280", "#718096")
_PART_COLOURS = ("#2f855a", "#2b6cb0", "#63b3ed", "#c05621", "#d69e2e", "#805ad5", "#b83280", "#9b2c2c", "#a0aec0")
_START_TITLES = ("incarnation", "began", "from step", "reached", "steps/s", "goodput", "restored in")
_MOST_ROWS = 50
_MOST_RANKS, _MOST_STARTS = 16, 6
_MOST_NAMED = 8
"""Incarnations of one colour that a legend names."""

_STATES = {"training": "green", "finished": "cyan", "quiet": "yellow", "interrupted": "red"}

_TIERS = {"host": "own memory", "peer": "other nodes", "storage": "storage"}


def write_page(view: RunView, out: Path, *, force: bool) -> Answer:
    """Write the page and return the run's figures. Raises `ConfigurationError` if the file exists or cannot be written."""
    if out.is_dir():
        raise ConfigurationError(f"{out} is a folder. Give the name of a file in it, such as {out / 'report.html'}.")
    if out.exists() and not force:
        raise ConfigurationError(f"{out} exists. Give another name, or --force to replace it.")
    if not out.parent.is_dir():
        raise ConfigurationError(f"{out.parent} is not a folder. Make it, or give another name.")
    found = Follower(view).look()
    page = page_of(found)
    write_whole(out, partial(write_text, page))
    document = {"out": str(out), "nbytes": len(page.encode()), **found.document()}
    return Answer(document, lambda: [f"{out}: {size_text(len(page.encode()))}, {len(found.incarnations)} starts"])


def page_of(found: RunProgress) -> str:
    """Return the page, as HTML."""
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(found.now))
    facts = {"state": found.state, **figures(found)}
    parts = [
        f"<h1>{html.escape(found.url)}</h1>",
        f"<p>run <code>{html.escape(found.run_id)}</code>, as of {when}</p>",
        _table((), list(facts.items()), kind="facts"),
        *_plots(found),
        "<h2>Starts</h2>",
        _table(_START_TITLES, map(start_cells, found.incarnations[-_MOST_ROWS:])),
        "<h2>Newest step by rank and tier</h2>",
        _table(("rank", "own memory", "other nodes", "storage"), _rank_rows(found.places)),
        "<h2>Generations in storage</h2>",
        _table(
            ("step", "age", "incarnation", "kind", "size", "usable"),
            (_generation(each, found.now) for each in found.generations[:_MOST_ROWS]),
        ),
    ]
    title = html.escape(f"{found.url}: {found.state}")
    head = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style>'
    return f"{head}<body>{''.join(parts)}</body></html>\n"


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]], *, kind: str = "rows") -> str:
    head = "".join(f"<th>{html.escape(title)}</th>" for title in titles)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<table class="{kind}">' + f"{f'<tr>{head}</tr>' if titles else ''}{body}</table>"


def _rank_rows(places: Sequence[NewestStep]) -> list[list[str]]:
    rows = []
    for rank, tiers in list(by_rank(places).items())[: _MOST_ROWS + 1]:
        cells = [tiers.get(tier) for tier in ("host", "peer", "storage")]
        said = ["-" if cell is None else f"{cell.step}, {time_text(cell.age_seconds)} ago" for cell in cells]
        rows.append(["all, committed" if rank < 0 else str(rank), *said])
    return rows


def _generation(each: StoredGeneration, now: float) -> list[str]:
    commit, name = each.commit, each.generation
    age = "?" if commit is None else time_text(now - commit.unix_time)
    kind = "?" if commit is None else kind_of(commit)
    return [str(name.step), age, str(name.incarnation), kind, size_text(each.nbytes), each.why_not or "yes"]


# -- plots

_Draw = Callable[[Any, "_Axis"], None]


class _Axis:
    """Samples over the time since the first start."""

    def __init__(self, incarnations: Sequence[Incarnation]) -> None:
        self.incarnations = [incarnation for incarnation in incarnations if incarnation.samples]
        opened = [incarnation.opened for incarnation in incarnations if incarnation.opened is not None]
        first = [sample.unix_time for incarnation in self.incarnations for sample in incarnation.samples]
        self.began = min([*opened, *first], default=0.0)
        span = max(first, default=self.began) - self.began
        self.unit, self.name = next(
            ((s, n) for s, n in ((86400, "days"), (3600, "hours"), (60, "minutes")) if span > 2 * s), (1, "s")
        )
        self.starts = [(each - self.began) / self.unit for each in opened[1:]]

    def times(self, samples: Sequence[Sample]) -> list[float]:
        return [(sample.unix_time - self.began) / self.unit for sample in samples]


def _plots(found: RunProgress) -> list[str]:
    axis = _Axis(found.incarnations)
    if not axis.incarnations:
        return ["<p>There are no plots: the log of this run has no figures yet, or an older release wrote it.</p>"]
    steps = partial(_lines, values=lambda samples: [sample.step for sample in samples], what="step")
    lag = partial(_lines, values=lambda those: [each.step - (each.stored or 0) for each in those], what="steps")
    drawn: list[tuple[str, str, _Draw]] = [
        ("Steps", "Steps that training had reached; each colour is a start, dashed lines are restarts.", steps),
        ("Lag of storage", "Steps between training and the newest generation in storage.", lag),
        ("Speed", "Steps per second between two entries of the log, replayed steps included.", _speed),
        ("Goodput", "Where the time has gone: parts of the wall time since the first process began.", _goodput),
    ]
    return [f"<h2>{title}</h2>{_figure(draw, axis, title, caption)}" for title, caption, draw in drawn]


def _figure(draw: _Draw, axis: _Axis, title: str, caption: str) -> str:
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 2.8), layout="constrained")
    axes = figure.add_subplot()
    draw(axes, axis)
    figure.legend(
        title="part" if draw is _goodput else "incarnation", loc="outside right upper", frameon=False, fontsize="small"
    )
    for at in axis.starts:
        axes.axvline(at, color="#a0aec0", linestyle="--", linewidth=1)
    axes.set_xlim(left=0)
    axes.set_xlabel(f"{axis.name} since the first start")
    axes.grid(visible=True, color="#edf0f4")
    axes.spines[["top", "right"]].set_visible(False)
    text = io.StringIO()
    canvas: Any = FigureCanvasSVG(figure)
    canvas.print_svg(text, metadata={"Date": None, "Creator": None})
    svg = text.getvalue()[text.getvalue().index("<svg") :]
    return f'<figure role="img" aria-label="{html.escape(title)}">{svg}<figcaption>{html.escape(caption)}</figcaption></figure>'


def _lines(
    axes: Any,
    axis: _Axis,
    values: Callable[[Sequence[Sample]], list[float]],
    what: str,
    kept: Callable[[Sequence[Sample]], Sequence[Sample]] = list,
) -> None:
    """Draw a line for each incarnation; for the legend, a colour's first line has the numbers of all its incarnations."""
    alike: dict[int, list[int]] = {}
    for incarnation in axis.incarnations:
        alike.setdefault(incarnation.number % len(_COLOURS), []).append(incarnation.number)
    for each in axis.incarnations:
        numbers, samples = alike[each.number % len(_COLOURS)], kept(each.samples)
        named = ", ".join(map(str, numbers[:_MOST_NAMED])) + ", ..." * (len(numbers) > _MOST_NAMED)
        marks = {"label": named if each.number == numbers[0] else "", "color": _COLOURS[each.number % len(_COLOURS)]}
        axes.plot(axis.times(samples), values(samples), ".-", markersize=3, linewidth=1.2, **marks)
    axes.set_ylabel(what)
    axes.set_ylim(bottom=0)


def _goodput(axes: Any, axis: _Axis) -> None:
    samples = [sample for each in axis.incarnations for sample in each.samples if sample.goodput.wall]
    parts = [part for part in PARTS if any(getattr(sample.goodput, part) for sample in samples)]
    values = [[getattr(sample.goodput, part) / axis.unit for sample in samples] for part in parts]
    if parts:
        colours = [_PART_COLOURS[PARTS.index(part)] for part in parts]
        axes.stackplot(axis.times(samples), *values, labels=parts, colors=colours)
    axes.set_ylabel(axis.name)
    axes.set_ylim(bottom=0)


def _speed(axes: Any, axis: _Axis) -> None:
    def values(samples: Sequence[Sample]) -> list[float]:
        before = [(0, 0.0), *((sample.steps, sample.seconds) for sample in samples)]
        return [(sample.steps - n) / (sample.seconds - s) for sample, (n, s) in zip(samples, before, strict=False)]

    _lines(axes, axis, values, "steps per second", _advancing)


def _advancing(samples: Sequence[Sample]) -> list[Sample]:
    """Return the samples that tell the speed: not log entries that follow in the same step, nor one behind the last."""
    found: list[Sample] = []
    for sample in samples:
        last = found[-1] if found else None
        if sample.steps > (last.steps if last else 0) and sample.seconds > (last.seconds if last else 0.0):
            found.append(sample)
    return found


def progress_now(view: RunView) -> Answer:
    """Return how the run is now."""
    found = Follower(view).look()
    return Answer(found.document(), lambda: [screen_of(found)])


def follow(view: RunView, every_seconds: float) -> int:
    """Show the run until the user interrupts; returns the exit status."""
    follower = Follower(view)
    with Live(console=Screen(), auto_refresh=False, screen=sys.stdout.isatty()) as live:
        try:
            while True:
                live.update(screen_of(follower.look()), refresh=True)
                time.sleep(every_seconds)
        except KeyboardInterrupt:
            return 0


def screen_of(found: RunProgress) -> RenderableType:
    """Return the whole screen, readable at 80 columns."""
    starts = plain_table(*_START_TITLES, right=_START_TITLES, title="Starts")
    for incarnation in found.incarnations[-_MOST_STARTS:]:
        starts.add_row(*start_cells(incarnation))
    shown = [starts] if found.incarnations else []
    return Group(_heading(found), _figures(found), _ranks(found.places), *shown)


def _heading(found: RunProgress) -> Text:
    if not found.run_id:
        said = f"{found.url}\nthe log cannot be read: `moe-ckpt repair {found.url}` rebuilds it from generations"
        return Text(said, overflow="fold")
    text = Text(f"{found.url}\nrun {found.run_id}: ", overflow="fold")
    text.append(found.state, _STATES[found.state])
    text.append(f", incarnation {found.incarnations[-1].number if found.incarnations else '?'}")
    if found.silent_seconds is not None:
        text.append(f", changed {time_text(found.silent_seconds)} ago")
    return text


def _figures(found: RunProgress) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column()
    for name, value in figures(found).items():
        grid.add_row(name, value)
    if found.step is not None and found.last_step:
        grid.add_row("", ProgressBar(total=found.last_step, completed=min(found.step, found.last_step), width=50))
    return grid


def figures(found: RunProgress) -> dict[str, str]:
    """Return the known figures in words, by name."""
    said: dict[str, str] = {}
    if found.step is not None:
        of = f" of {found.last_step} ({found.step / found.last_step:.0%})" if found.last_step else ""
        said["step"] = f"{found.step}{of}"
    if found.eta_seconds is not None:
        said["ETA"] = time_text(found.eta_seconds)
    if found.steps_per_second is not None:
        said["rate"] = f"{found.steps_per_second:.2f} steps/s"
        if found.nbytes_per_second is not None:
            said["rate"] += f", {rate_text(found.nbytes_per_second)} captured"
    if found.lag_steps is not None:
        said["storage"] = f"step {found.stored}" + f", {found.lag_steps} behind" * (found.lag_steps > 0)
    if found.goodput is not None and found.goodput.wall:
        said["goodput"] = f"{found.goodput.share:.1%} of {time_text(found.goodput.wall)}{_losses(found.goodput)}"
    if starts := len(found.incarnations):
        lost = "1 step was" if found.lost_steps == 1 else f"{found.lost_steps} steps were"
        again = f", {lost} taken again" if found.lost_steps else ""
        said["starts"] = f"{starts}{again}"
    skipped = found.incarnations[-1].figures.get("skipped") if found.incarnations else None
    if isinstance(skipped, dict) and sum(skipped.values()):
        said["skipped"] = "generations: " + ", ".join(f"{each} by {tier}" for tier, each in skipped.items() if each)
    if found.incarnations and (slow := found.incarnations[-1].figures.get("slow_ranks")):
        said["slow"] = f"{slow}: the others wait for it"
    if void := [f"incarnation {each.number}: {each.void}" for each in found.incarnations if each.void]:
        said["void"] = void[-1]
    if found.incarnations and (audits := found.incarnations[-1].figures.get("audits")):
        faults = "; ".join(audits["found"]) or "nothing found"
        said["audits"] = f"{audits['number']}, the newest clean one at step {audits['clean']}: {faults}"
    stored = sum(generation.nbytes for generation in found.generations)
    number = len(found.generations)
    said["stored"] = f"{number} generation{'s' * (number != 1)}, {size_text(stored)}"
    return said


def _losses(goodput: Goodput) -> str:
    """Return the parts that are lost, the largest first, in words."""
    shares = sorted(goodput.shares().items(), key=lambda each: -each[1])
    lost = [f"{name} {share:.1%}" for name, share in shares if name != "productive" and share >= 5e-4]
    return f"; {', '.join(lost)}" if lost else ""


def _ranks(places: Sequence[NewestStep]) -> Table:
    """Return every rank's newest step by tier; with many ranks, only the ranks that are furthest behind."""
    rows = by_rank(places)
    committed = rows.pop(-1, {}).get("storage")
    tiers = [tier for tier in _TIERS if any(tier in row for row in rows.values()) or tier == "storage"]
    ages = any(place.held is not None for place in places)
    titles = ["rank", *(title for tier in tiers for title in (_TIERS[tier], "age")), *(["process"] if ages else [])]
    table = plain_table(*titles, right=titles[:-1] if ages else titles, title="Newest step by rank and tier")
    shown = sorted(sorted(rows, key=lambda rank: min(each.step for each in rows[rank].values()))[:_MOST_RANKS])
    for rank in shown:
        held = [each.held for each in rows[rank].values() if each.held is not None and each.tier == "host"]
        process = ["" if not held else "lives" if held[0] else "gone"] if ages else []
        table.add_row(str(rank), *(cell for tier in tiers for cell in _cells(rows[rank].get(tier))), *process)
    if committed is not None:
        cells = (cell for tier in tiers for cell in _cells(committed if tier == "storage" else None))
        table.add_row("all", *cells, *([""] if ages else []))
    if len(rows) > len(shown):
        table.caption = f"and {len(rows) - len(shown)} ranks that are not further behind"
    return table


def _cells(place: NewestStep | None) -> tuple[str, str]:
    return ("-", "") if place is None else (str(place.step), time_text(place.age_seconds))


def start_cells(each: Incarnation) -> list[str]:
    """Return the cells of one start, as text."""
    last = each.samples[-1] if each.samples else None
    began = "?" if each.opened is None else time.strftime("%m-%d %H:%M:%S", time.localtime(each.opened))
    resumed = "-" if each.resumed_from is None else str(each.resumed_from)
    rate = "" if last is None or not last.seconds else f"{last.steps / last.seconds:.2f}"
    goodput = f"{each.goodput.share:.1%}" if each.goodput.wall else ""
    restored = each.figures.get("restore_seconds")
    took = time_text(restored) if isinstance(restored, float) and each.resumed_from is not None else ""
    return [str(each.number), began, resumed, "?" if each.reached is None else str(each.reached), rate, goodput, took]
