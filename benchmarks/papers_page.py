"""The tables of `docs/papers.md`: what each figure says in the paper, what was measured here, when and on what, and what differs.

Rows are written by `python -m benchmarks papers --page docs/papers.md`, for the figures that it measures; rows of others stay.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from benchmarks.papers_figure import Figure, number
from benchmarks.papers_others import UNTOLD
from lightning_moe_ckpt.benchmarks._benchmark import Machine, rewritten

_BEGIN, _END = "<!-- figures of {paper}, written by `python -m benchmarks papers` -->", "<!-- end of figures -->"
_UNTOLD = "<!-- not repeated -->"
_HEAD = "| figure | the paper | here | measured | what differs |\n|---|---|---|---|---|\n"
_KEY = re.compile(r"`--only ([\w-]+)`")


def cells(figure: Figure, ours: Mapping[str, float], claims: Mapping[str, bool], machine: Machine) -> str:
    """Return the row of a figure."""
    missed = [text for text, holds in claims.items() if not holds]
    here = _listed(figure, ours) + (f"; **not so**: {'; '.join(missed)}" if missed else "")
    hardware = f"{machine.num_cores} cores, {machine.cpu}{f', {machine.devices}' if machine.devices else ''}"
    place = figure.source.partition(", ")[2]
    row = [
        f"{place}: {figure.title}",
        _listed(figure, figure.paper) or figure.says,
        here,
        f"`--only {figure.key}`, {machine.date[:10]}, {hardware}, load {machine.load:.0f}",
        figure.note,
    ]
    return "| " + " | ".join(cell.replace("|", "/").replace("\n", " ") for cell in row) + " |"


def _listed(figure: Figure, values: Mapping[str, float]) -> str:
    rows = [row for row in figure.rows_of_page if row in values]
    return "; ".join(f"{row}: {number(values[row], figure.unit_of(row))}" for row in rows)


def with_rows(text: str, rows: Mapping[str, str], figures: Mapping[str, Figure]) -> str:
    """Return a page with these rows by key; other rows of `figures` stay as they are.

    Raises:
        ConfigurationError: the page has no place for a paper's figures.
    """
    for paper in dict.fromkeys(figure.source.partition(" ")[0] for figure in figures.values()):
        keys = [key for key, figure in figures.items() if figure.source.startswith(paper)]

        def table(was: str, keys: Sequence[str] = keys) -> str:
            merged = {**dict(_by_key(was.splitlines())), **rows}
            found = "".join(f"{merged[key]}\n" for key in keys if key in merged)
            missing = ", ".join(f"`{key}`" for key in keys if key not in merged)
            return f"{_HEAD}{found}\n" * bool(found) + f"Not measured yet: {missing}." * bool(missing)

        text = rewritten(text, _BEGIN.format(paper=paper), _END, table)
    return text


def untold(text: str) -> str:
    """Return a page with the list of what is not repeated."""
    lines = "".join(f"* {source}: {reason}\n" for source, reason in UNTOLD.items())
    return rewritten(text, _UNTOLD, _END, lambda _: lines)


def keys_of(text: str) -> set[str]:
    """Return the figures that a page has rows of."""
    return {key for key, _ in _by_key(text.splitlines())}


def _by_key(lines: Iterable[str]) -> Iterable[tuple[str, str]]:
    for line in lines:
        if line.startswith("|") and (found := _KEY.search(line)):
            yield found[1], line


def update(path: Path, rows: Mapping[str, str], figures: Mapping[str, Figure]) -> None:
    """Put rows into the page at `path`."""
    path.write_text(untold(with_rows(path.read_text(encoding="utf-8"), rows, figures)), encoding="utf-8")
