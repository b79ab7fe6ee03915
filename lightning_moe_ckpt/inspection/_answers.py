"""Choose the generation of a command, make the JSON values of its answer, and tables from them."""

from __future__ import annotations

import json
import re
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console, JustifyMethod, RenderableType
from rich.table import Table
from typing_extensions import override

from lightning_moe_ckpt._units import size_text, time_text
from lightning_moe_ckpt.coordination import VERSIONS, in_words
from lightning_moe_ckpt.errors import Corrupt, NoUsableGeneration
from lightning_moe_ckpt.storage import (
    Commit,
    Garbage,
    GenerationId,
    JudgedGeneration,
    RankMarker,
    RecordEntry,
    RepairedLog,
    RunView,
    SegmentEntry,
    StoredGeneration,
)
from lightning_moe_ckpt.tiers import is_differential

Row = dict[str, Any]

_WRAPPED = 12
"""Least width of a column that breaks its lines."""
_PIPE_WIDTH = 10_000
"""Width for a file or a pipe, where no line breaks: names stay whole for whoever searches them."""
_ELSEWHERE = frozenset({"fingerprint", "sharding"})
"""Entries of a policy that are not among the facts of who wrote a generation."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Result of a command, as JSON values and as tables."""

    document: Mapping[str, Any]
    """JSON values."""
    tables: Callable[[], Sequence[RenderableType]]
    status: int = 0
    """Exit status."""


class Screen(Console):
    """Console on standard output."""

    def __init__(self) -> None:
        super().__init__(width=None if sys.stdout.isatty() else _PIPE_WIDTH, highlight=False, markup=False)

    @override
    def on_broken_pipe(self) -> None:
        """Leave a broken pipe to the program, whose exit status says more than the base class's 1."""
        raise BrokenPipeError


def plain_table(*titles: str, right: Iterable[str] = (), wraps: str | None = None, title: str | None = None) -> Table:
    """Return a table without a frame, readable at 80 columns: only the column `wraps` breaks its lines."""
    style: dict[str, Any] = {"box": box.SIMPLE_HEAD, "padding": (0, 0, 0, 1), "pad_edge": False, "show_edge": False}
    if title is not None:
        style |= {"title": f"\n{title}", "title_justify": "left", "title_style": "bold", "min_width": len(title)}
    table = Table(**style)
    for each in titles:
        justify: JustifyMethod = "right" if each in right else "left"
        least = _WRAPPED if each == wraps else None
        table.add_column(each, justify=justify, no_wrap=each != wraps, overflow="fold", min_width=least)
    return table


def kind_of(commit: Commit) -> str:
    """Return the kind of a generation's content, whatever the callback.

    `differential`: differences lead there step by step. `partial`: the generation references older files otherwise. `dense`: one
    segment per rank has everything. Else `sparse`.
    """
    if is_differential(commit.policy):
        return "differential"
    if commit.needs:
        return "partial"
    return "dense" if len(commit.steps) == 1 else "sparse"


def select(view: RunView, step: int | None) -> StoredGeneration:
    """Return the generation with this step, or the newest one that a restart would try.

    Of several with one step, usable ones come first, then those of newer incarnations. Raises `NoUsableGeneration` if there is no such
    generation with a readable manifest.
    """
    stored = view.generations()
    known = sorted({each.generation.step for each in stored if each.commit is not None})
    chosen = [each for each in stored if each.commit is not None and step in {None, each.generation.step}]
    chosen.sort(key=lambda each: each.usable, reverse=True)  # stable: newest first within each
    if not chosen or (step is None and not chosen[0].usable):
        wanted = "no generation that could be restored" if step is None else f"no committed generation of step {step}"
        raise NoUsableGeneration(f"{view.url} holds {wanted}. Committed steps: {known or 'none'}.")
    return chosen[0]


def generation_rows(view: RunView) -> list[Row]:
    """Return one row per generation, newest first."""
    return [_generation_row(stored) for stored in view.generations()]


def _generation_row(stored: StoredGeneration) -> Row:
    commit = stored.commit
    return {
        "step": stored.generation.step,
        "incarnation": stored.generation.incarnation,
        "kind": None if commit is None else kind_of(commit),
        "window": None if commit is None else len(commit.steps),
        "first_step": None if commit is None else commit.steps[0],
        "ranks": len(stored.ranks) if commit is None else commit.world_size,
        "needs": [_place(need) for need in stored.needs],
        "nbytes": stored.nbytes,
        "unix_time": None if commit is None else commit.unix_time,
        "committed": stored.committed,
        "usable": stored.usable,
        "why_not": stored.why_not,
    }


def _place(generation: GenerationId) -> Row:
    return {"step": generation.step, "incarnation": generation.incarnation}


def ls_tables(view: RunView, rows: Sequence[Row]) -> list[RenderableType]:
    """Return the rows as a table, with facts of the whole run above it."""
    refers = ["needs"] if any(row["needs"] for row in rows) else []
    titles = ("step", "age", "incarnation", "kind", "steps", "ranks", "size", *refers, "usable")
    table = plain_table(*titles, right=titles[:3] + titles[4:7], wraps="usable")
    for row in rows:
        steps = "?" if row["window"] is None else _steps(row["first_step"], row["step"])
        age = "?" if row["unix_time"] is None else time_text(max(0, round(time.time()) - row["unix_time"]))
        place = (str(row["step"]), age, str(row["incarnation"]), row["kind"] or "?", steps, str(row["ranks"]))
        needs = [_ranges([need["step"] for need in row["needs"]])] if refers else []
        table.add_row(*place, size_text(row["nbytes"]), *needs, row["why_not"] or "yes")
    num_usable = sum(row["usable"] for row in rows)
    history = view.history
    state = "its log cannot be read"
    if history is not None:
        state = f"newest incarnation {history.last_incarnation}, keeps what is at or after step {history.watermark}"
        state += f" and {len(history.kept)} older" * bool(history.kept)
    said = f"{view.url}\nrun {view.run_id or '?'}: {num_usable} of {len(rows)} generations usable\n{state}"
    return [said, table] if rows else [said, "nothing is stored yet"]


def _steps(first: int, last: int) -> str:
    return str(last) if first == last else f"{first}-{last}"


def describe(view: RunView, stored: StoredGeneration) -> Row:
    """Return all facts of one generation in manifest and markers, except single records. Raises `Corrupt` if a marker is not the
    committed one, or the plan cannot be read, `KeyMissing` if a marker is gone.
    """
    commit = stored.commit
    assert commit is not None, "`select` chooses among those with a manifest"
    markers = [view.read_marker(commit, rank) for rank in range(commit.world_size)]
    return {
        "url": view.url,
        "run_id": commit.run_id,
        **_generation_row(stored),
        "steps": list(commit.steps),
        "plan_hash": commit.plan_hash,
        "optimizer": None if markers[0].module is None else markers[0].module.read().optimizer,
        "policy": {key: value for key, value in commit.policy.items() if key not in {"plan", VERSIONS}},
        "versions": commit.policy.get(VERSIONS),
        "plan": _plan(commit.policy.get("plan"), str(commit.generation)),
        "kinds": _kinds(markers),
        "operators": _operators(commit.generation, markers),
        "segments": [_file_row(m.rank, {"step": each.step}, each.nbytes, each) for m in markers for each in m.segments],
        "referenced": [
            _file_row(m.rank, _place(entry.generation), sum(r.nbytes for r in entry.segment.records), entry.segment)
            for m in markers
            for entry in m.referenced
        ],
    }


def _plan(text: object, where: str) -> Row:
    """Return the facts of the stored plan, each short enough for a line. Raises `Corrupt` if the text is no plan."""
    plan = json.loads(str(text)) if text is not None else {}
    config, dtypes = plan.get("config", {}), plan.get("compute_dtypes", {})
    if not isinstance(config, dict) or not isinstance(dtypes, dict):
        raise Corrupt(f"{where}: its plan is none of this format. Read it with the release that wrote it.")
    window = plan.get("plan", {})
    found = {"interval": window["interval_steps"]} if isinstance(window, dict) and "interval_steps" in window else {}
    if not plan.get("stages"):  # each of which cuts operators in its own way
        found |= {key: plan[key] for key in ("split_nbytes",) if key in plan}
    return {"config": config, **found, "compute_dtypes": sorted({str(dtype) for dtype in dtypes.values()})}


def _kinds(markers: Iterable[RankMarker]) -> Row:
    """Return records and bytes by kind, over all ranks."""
    kinds: dict[str, dict[str, int]] = defaultdict(lambda: {"records": 0, "nbytes": 0})
    for record in (each for marker in markers for segment in marker.segments for each in segment.records):
        kinds[record.kind]["records"] += 1
        kinds[record.kind]["nbytes"] += record.nbytes
    return dict(sorted(kinds.items()))


def _operators(generation: GenerationId, markers: Sequence[RankMarker]) -> list[Row]:
    """Return each operator's records and their places, by name."""
    rows: dict[str, Row] = {}
    for supplier, rank, step, record in _records(generation, markers):
        if not record.operator:
            continue
        fresh: Row = {"operator": record.operator, "supplied_by": _place(supplier)}
        fresh |= {"steps_old": generation.step - supplier.step, "kinds": {}, "ranks": set(), "parameters": set()}
        row = rows.setdefault(record.operator, {**fresh, "no_state_yet": False})
        kind = row["kinds"].setdefault(record.kind, {"nbytes": 0, "steps": set()})
        kind["nbytes"] += record.nbytes
        kind["steps"].add(step)
        row["ranks"].add(rank)
        row["parameters"].add(record.fqn)
        row["no_state_yet"] |= not record.present
    return [_sorted(row) for _, row in sorted(rows.items(), key=lambda each: _natural(each[0]))]


def _natural(name: str) -> list[tuple[int, str]]:
    """Return a sort key of names: `expert.10` comes after `expert.9`."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def _sorted(row: Row) -> Row:
    kinds = {name: {**kind, "steps": sorted(kind["steps"])} for name, kind in row["kinds"].items()}
    return {**row, "kinds": kinds, "ranks": sorted(row["ranks"]), "parameters": len(row["parameters"])}


def _records(
    generation: GenerationId, markers: Sequence[RankMarker]
) -> Iterator[tuple[GenerationId, int, int, RecordEntry]]:
    """Yield each record with its generation, rank and step, the generation's own records first."""
    own = [(generation, marker.rank, each) for marker in markers for each in marker.segments]
    older = [(entry.generation, marker.rank, entry.segment) for marker in markers for entry in marker.referenced]
    for supplier, rank, segment in own + older:
        yield from ((supplier, rank, segment.step, record) for record in segment.records)


def _file_row(rank: int, place: Row, nbytes: int, segment: SegmentEntry) -> Row:
    operators = {record.operator for record in segment.records if record.operator}
    counts = {"records": len(segment.records), "operators": len(operators)}
    return {"rank": rank, **place, "nbytes": nbytes, **counts, "key": segment.key}


def inspect_tables(document: Row) -> list[RenderableType]:
    """Return the description of one generation as tables."""
    return [_heading(document), _kind_table(document), _operator_table(document), *_segment_tables(document)]


def _heading(document: Row) -> str:
    policy, plan = document["policy"], document["plan"]
    facts = {**plan["config"], **{key: value for key, value in plan.items() if key != "config"}}
    usable = document["why_not"] or "usable"
    steps = _steps(document["first_step"], document["step"])
    window, ranks = _count(document["window"], "segment"), _count(document["ranks"], "rank")
    size = f"{window} per rank, {ranks}, {size_text(document['nbytes'])}"
    if document["needs"]:
        referenced = sum(row["nbytes"] for row in document["referenced"])
        size += (
            f"; references {size_text(referenced)} from steps {_ranges([need['step'] for need in document['needs']])}"
        )
    lines = [
        f"{document['url']}",
        f"step {document['step']} (incarnation {document['incarnation']}) of run {document['run_id']}: {usable}",
        f"{document['kind']}, {'step' if document['window'] == 1 else 'steps'} {steps}, {size}",
        "written by: "
        + _facts({**{k: v for k, v in policy.items() if k not in _ELSEWHERE}, "optimizer": document["optimizer"]}),
        *([f"parameters in shards: {policy['sharding']}"] if "sharding" in policy else []),
        f"written with: {in_words(document['versions'])}",
        "plan: " + _facts(facts),
    ]
    return "\n".join(lines)


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _facts(facts: Mapping[str, Any]) -> str:
    """Return the facts with a value, as `key=value`; nested facts as `key(key=value)`."""
    said = {key: value for key, value in facts.items() if value not in ([], {}, None)}
    return ", ".join(f"{k}({_facts(v)})" if isinstance(v, Mapping) else f"{k}={v}" for k, v in said.items())


def _kind_table(document: Row) -> Table:
    table = plain_table("kind", "records", "size", right=("records", "size"), title="What it is made of")
    for name, kind in document["kinds"].items():
        table.add_row(name, str(kind["records"]), size_text(kind["nbytes"]))
    return table


def _operator_table(document: Row) -> Table:
    """Return the operators by name. A kind without records, an age shared by all, and a single rank have no column."""
    rows = document["operators"]
    kinds = [kind for kind in ("full", "compute", "delta") if any(kind in row["kinds"] for row in rows)]
    ages = ["steps old"] if document["needs"] else []
    figures = [*(title for kind in kinds for title in (f"{kind} at", "size")), *ages]
    ranks = ["ranks"] if any(row["ranks"] != [0] for row in rows) else []
    table = plain_table("operator", *figures, *ranks, right=figures, wraps="operator", title="Operators")
    for row in rows:
        name = row["operator"] + (" (no optimizer state yet)" if row["no_state_yet"] else "")
        cells = [cell for kind in kinds for cell in _kind_cells(row["kinds"].get(kind))]
        cells += [str(row["steps_old"])] * len(ages) + [_ranges(row["ranks"])] * len(ranks)
        table.add_row(name, *cells)
    return table


def _kind_cells(kind: Row | None) -> tuple[str, str]:
    return ("", "") if kind is None else (_ranges(kind["steps"]), size_text(kind["nbytes"]))


def _ranges(numbers: Sequence[int]) -> str:
    """Format numbers as ranges, such as `0-3, 7` for 0, 1, 2, 3, 7."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(_steps(first, last) for first, last in runs)


def _segment_tables(document: Row) -> list[Table]:
    """Return the files, one table for each folder: the generation's own, then the folders of referenced files."""
    tables: dict[str, Table] = {}
    for row in [*document["segments"], *document["referenced"]]:
        folder, _, name = row["key"].rpartition("/")
        if folder not in tables:
            titles = ("rank", "step", "size", "records", "file")
            tables[folder] = plain_table(*titles, right=titles[:4], wraps="file", title=f"Files in {folder}")
        tables[folder].add_row(str(row["rank"]), str(row["step"]), size_text(row["nbytes"]), str(row["records"]), name)
    return list(tables.values())


def repair_document(found: RepairedLog) -> dict[str, Any]:
    """Return the repaired log as JSON values."""
    return {
        "url": found.url,
        "run_id": found.run_id,
        "written": found.written,
        "usable": [_place(each) for each in found.usable],
        "mended": [_place(each) for each in found.mended],
        "left_out": [{**_place(each), "reason": reason} for each, reason in found.left_out.items()],
    }


def repair_tables(found: RepairedLog) -> list[RenderableType]:
    """Return a table of the generations that a restart would try, and of all others."""
    table = plain_table("step", "incarnation", "", "why", right=("step", "incarnation"), wraps="why")
    mended = "its manifest cannot be read; markers of all ranks say the same"
    rows = [(each, "usable", mended if each in found.mended else "") for each in found.usable]
    rows += [(each, "left out", reason) for each, reason in found.left_out.items()]
    for each, fate, why in sorted(rows, reverse=True):
        table.add_row(str(each.step), str(each.incarnation), fate, why)
    said = "the log is written" if found.written else "nothing is written yet: say --yes to write the log"
    return [f"{found.url}\nrun {found.run_id}", table, said]


def gc_document(found: Garbage) -> dict[str, Any]:
    """Return the result as JSON values."""
    return {
        "url": found.url,
        "run_id": found.run_id,
        "watermark": found.watermark,
        "deleted": found.deleted,
        "nbytes": found.nbytes,
        "goes": [_judged_row(generation) for generation in found.goes],
        "stays": [_judged_row(generation) for generation in found.stays],
    }


def _judged_row(each: JudgedGeneration) -> dict[str, Any]:
    counts = {"objects": each.num_objects, "unfinished": each.num_unfinished, "nbytes": each.nbytes}
    return {**_place(each.generation), **counts, "reason": each.reason}


def gc_tables(found: Garbage) -> list[RenderableType]:
    """Return a table of generations, newest first as in `ls`, and the sum."""
    goes = "deleted" if found.deleted else "would go"
    titles = ("step", "incarnation", "objects", "size", "", "why")
    table = plain_table(*titles, right=titles[:4], wraps="why")
    rows = [(generation, goes) for generation in found.goes] + [(generation, "stays") for generation in found.stays]
    for each, fate in sorted(rows, key=lambda row: row[0].generation, reverse=True):
        objects = str(each.num_objects) + (f" + {each.num_unfinished} unfinished" if each.num_unfinished else "")
        place = (str(each.generation.step), str(each.generation.incarnation), objects)
        table.add_row(*place, size_text(each.nbytes), fate, each.reason)
    said = f"{goes}: {_sum(found.goes)}; stays: {_sum(found.stays)}"
    return [f"{found.url}\nrun {found.run_id}", table, said]


def _sum(those: Sequence[JudgedGeneration]) -> str:
    return f"{len(those)} generations, {size_text(sum(each.nbytes for each in those))}"
