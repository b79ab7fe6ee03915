"""Show the progress of a run in a terminal, again and again."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from lightning_moe_ckpt._units import rate_text, size_text, time_text
from lightning_moe_ckpt.inspection._progress import Follower, Incarnation, NewestStep, RunProgress, by_rank
from lightning_moe_ckpt.inspection._report import Answer, Screen, plain_table
from lightning_moe_ckpt.storage import RunView

_MOST_RANKS, _MOST_STARTS = 16, 6
_STATES = {"training": "green", "finished": "cyan", "quiet": "yellow", "interrupted": "red"}
_TIERS = {"host": "own memory", "peer": "other nodes", "storage": "storage"}


def answer(view: RunView) -> Answer:
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
    """Return all of it, readable at 80 columns."""
    parts: list[RenderableType] = [_heading(found), _figures(found), _ranks(found.places)]
    if found.incarnations:
        parts.append(_starts(found.incarnations))
    return Group(*parts)


def _heading(found: RunProgress) -> Text:
    if not found.run_id:
        said = f"{found.url}\nthe log cannot be read: `moe-ckpt repair {found.url}` rebuilds it from generations"
        return Text(said, overflow="fold")
    text = Text(f"{found.url}\nrun {found.run_id}: ", overflow="fold")
    text.append(found.state, _STATES[found.state])
    number = found.incarnations[-1].number if found.incarnations else "?"
    text.append(f", incarnation {number}")
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
        done = min(found.step, found.last_step)
        grid.add_row("", ProgressBar(total=found.last_step, completed=done, width=50))
    return grid


def figures(found: RunProgress) -> dict[str, str]:
    """Return what is known in words, by name."""
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
        said["storage"] = (
            f"step {found.stored}, {found.lag_steps} behind" if found.lag_steps > 0 else f"step {found.stored}"
        )
    if found.overhead_share is not None:
        said["overhead"] = f"{found.overhead_share:.1%} of the time of the training thread"
    if found.goodput is not None:
        said["goodput"] = f"{found.goodput:.0%} of the time since the first start"
    starts = len(found.incarnations)
    if starts:
        lost = "1 step was" if found.lost_steps == 1 else f"{found.lost_steps} steps were"
        again = f", {lost} taken again" if found.lost_steps else ""
        said["starts"] = f"{starts}{again}"
    skipped = found.incarnations[-1].figures.get("skipped") if found.incarnations else None
    if isinstance(skipped, dict) and sum(skipped.values()):
        said["skipped"] = "generations: " + ", ".join(
            f"{number} by {tier}" for tier, number in skipped.items() if number
        )
    stored = sum(generation.nbytes for generation in found.generations)
    number = len(found.generations)
    said["stored"] = f"{number} generation{'s' * (number != 1)}, {size_text(stored)}"
    return said


def _ranks(places: Sequence[NewestStep]) -> Table:
    """Return the newest step of every rank by tier; of many ranks those that are furthest behind."""
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


def _starts(incarnations: Sequence[Incarnation]) -> Table:
    titles = ("incarnation", "began", "from step", "reached", "steps/s", "overhead", "restored in")
    table = plain_table(*titles, right=titles, title="Starts")
    for incarnation in incarnations[-_MOST_STARTS:]:
        table.add_row(*start_cells(incarnation))
    return table


def start_cells(each: Incarnation) -> list[str]:
    """Return the cells of one start, as text."""
    last = each.samples[-1] if each.samples else None
    began = "?" if each.opened is None else time.strftime("%m-%d %H:%M:%S", time.localtime(each.opened))
    resumed = "-" if each.resumed_from is None else str(each.resumed_from)
    rate = "" if last is None or not last.seconds else f"{last.steps / last.seconds:.2f}"
    overhead = "" if last is None or not last.seconds else f"{last.overhead_seconds / last.seconds:.1%}"
    restored = each.figures.get("restore_seconds")
    took = time_text(restored) if isinstance(restored, float) and each.resumed_from is not None else ""
    return [str(each.number), began, resumed, "?" if each.reached is None else str(each.reached), rate, overhead, took]
