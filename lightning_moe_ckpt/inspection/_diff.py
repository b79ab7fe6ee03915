"""Compare two stored states, of two runs or of one: operators that differ in any bit, by how much, and since when.

Tensors of all ranks are put together, so runs on other ranks, in other layouts and under other policies can be compared.
Records with equal digests are equal: only records that may differ are read. Where operators are of different steps, in sparse and
partial generations, an operator is compared if both generations have it equally many steps old.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import torch
from rich.console import RenderableType
from torch import Tensor

from lightning_moe_ckpt.errors import Corrupt, NoUsableGeneration
from lightning_moe_ckpt.inspection._answers import Answer, Row, kind_of, plain_table, select
from lightning_moe_ckpt.inspection._assemble import BUFFER, Assembler, StoredTensor, identity_of
from lightning_moe_ckpt.journal import decode_journal, differs
from lightning_moe_ckpt.recovery import Replicas, stored_losses
from lightning_moe_ckpt.snapshot import JOURNAL, PARAM, PRESENT
from lightning_moe_ckpt.storage import CONSTANTS, Backend, Bounds, RankMarker, RunView

_AT_ONCE = 2**24
"""Elements whose differences are in memory at once."""
_SHOWN = 12
"""Most tensors in a table."""

OpenedRun = tuple[Backend, RunView]
"""A run's storage and view."""
Part = tuple[str, str]
"""Operator, and tensor: a parameter, `parameter/key` for the optimizer's state of it, or a buffer."""


class StoredState:
    """A generation's state, each operator as of its own step; with or without parameters that do not train."""

    def __init__(self, run: OpenedRun, step: int, *, constants: bool = True) -> None:
        backend, view = run
        commit = select(view, step).commit
        assert commit is not None, "`select` chooses among those with a manifest"
        self.url, self.commit, self.step, kind = view.url, commit, step, kind_of(commit)
        with _of(self.url):
            markers = [view.read_marker(commit, rank) for rank in range(commit.world_size)]
        optimizer = None if markers[0].module is None else markers[0].module.read().optimizer
        steps: dict[str, int] = {}
        if kind == "sparse":
            files = chain(*(marker.segments for marker in markers))
            steps = {record.operator: file.step for file in files for record in file.records if record.kind == "full"}
            markers = [_as_one_step(marker) for marker in markers]
        if not constants:
            markers = [replace(each, policy=_without(each.policy, CONSTANTS)) for each in markers]
        with _of(self.url):
            self.tensors = Assembler(backend, markers)
            self.scalars = self.tensors.shared_scalars() if kind == "partial" else {}
            """Optimizer state that experts in a partial generation share, not in any record."""
        self.steps = steps | self.tensors.older
        """Steps of operators older than the generation; perhaps of others too."""
        told = _without(commit.policy, "plan", "fingerprint", CONSTANTS)
        self.told = {"ranks": commit.world_size, "kind": kind, "optimizer": optimizer, **told}
        """Facts that may explain why states differ."""

    def parts(self, num_ranks: int) -> dict[Part, list[Replicas]]:
        """Return every tensor's records by operator; buffers on each of the first ranks are an operator."""
        found: dict[Part, list[Replicas]] = defaultdict(list)
        for each in self.tensors.full:
            record = each.record
            if record.present and record.state_key != PRESENT:
                name = record.fqn if record.state_key == PARAM else f"{record.fqn}/{record.state_key}"
                found[record.operator, name].append(each)
        for rank, row in enumerate(self.tensors.boundary[:num_ranks]):
            for each in (each for each in row if each.record.kind == BUFFER):
                found[f"buffers of rank {rank}", each.record.fqn].append(each)
        return found

    def step_of(self, operator: str) -> int:
        """Return the step for an operator's state."""
        return self.steps.get(operator, self.step)

    def starts(self) -> list[dict[str, Any]]:
        """Read the journals' start halves, rank by rank."""
        own = [each for row in self.tensors.boundary for each in row if each.record.kind == JOURNAL]
        with _of(self.url):
            return [decode_journal(self.tensors.record(each)).get("start") or {} for each in own]

    def read(self, name: str, records: list[Replicas], others: Sequence[Replicas]) -> Tensor:
        """Read a tensor, as far as there are records; of one that each writer wrote whole, a copy that `others` lack."""
        first = records[0].record
        known = {each.record.digest for each in others}
        odd = next((each for each in records if each.record.digest not in known), records[0])
        with _of(self.url):
            if _is_whole(records):
                return self.tensors.record(odd).view(first.global_shape)
            return self.tensors.whole(name, StoredTensor(first.dtype, first.global_shape, records), partly=True)


@contextmanager
def _of(url: str) -> Iterator[None]:
    """Let damage that the body meets name the run's URL, which says which side it is."""
    try:
        yield
    except Corrupt as error:
        raise Corrupt(f"{url}: {error}") from error


def _without(policy: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in policy.items() if key not in keys}


def _as_one_step(marker: RankMarker) -> RankMarker:
    """Return a sparse window's marker as if all full states were of its last step."""
    last = marker.generation.step
    segments = [
        replace(file, step=last, records=tuple(r for r in file.records if r.kind == "full" or file.step == last))
        for file in reversed(marker.segments)
    ]
    return replace(marker, segments=tuple(segments))


def _is_whole(records: Sequence[Replicas]) -> bool:
    """Return whether each writer wrote the whole tensor, as of a step count."""
    return all(each.record.numel == math.prod(each.record.global_shape) for each in records)


class Comparison:
    """Comparison of the states `a` and `b`, of those operators that are in `a` so many `steps` newer than in `b`: by default as many
    as the generations are apart.
    """

    def __init__(self, a: StoredState, b: StoredState, steps: int | None = None) -> None:
        self._a, self._b = a, b
        same = a.commit.world_size == b.commit.world_size  # else only rank 0 is the same in both
        self._left, self._right = (each.parts(each.commit.world_size if same else 1) for each in (a, b))
        apart = a.step - b.step if steps is None else steps
        operators = {operator for operator, _ in self._left.keys() & self._right.keys()}
        self.apart = sorted(each for each in operators if a.step_of(each) - b.step_of(each) != apart)
        """Operators that are not compared, as they are of different steps."""
        shared = a.scalars.keys() | b.scalars.keys()
        self.notes = [
            f"only in {'AB'[(operator, name) in self._right]}: `{name}` of {operator}"
            for operator, name in sorted(self._left.keys() ^ self._right.keys())
            if name not in shared and operator not in self.apart
        ]
        """Tensors that one side lacks or has in another shape or type, in words."""
        for name in a.scalars.keys() & b.scalars.keys():
            if differs(a.scalars[name], b.scalars[name]):
                self.notes.append(f"`{name}`: {a.scalars[name].item()} in A, {b.scalars[name].item()} in B")
        self.compared = operators.difference(self.apart)
        """Operators that are compared."""
        both = [part for part in self._left if part in self._right and part[0] in self.compared]
        self._open = [part for part in both if self._may_differ(part)]

    def _may_differ(self, part: Part) -> bool:
        """Return whether digests leave open that a part differs; note other shapes and types."""
        (left, *_), (right, *_) = ([each.record for each in parts[part]] for parts in (self._left, self._right))
        for what, a, b in (("shape", left.global_shape, right.global_shape), ("type", left.dtype, right.dtype)):
            if a != b:
                self.notes.append(f"another {what}: `{part[1]}` of {part[0]}, {a} in A, {b} in B")
        if left.global_shape != right.global_shape:
            return False
        return left.dtype != right.dtype or _identities(self._left[part]) != _identities(self._right[part])

    def equal(self) -> bool:
        """Return whether nothing differs. Where both have cut a tensor alike digests tell, and nothing is read."""
        cuts = (
            [{i[:3] for i in _identities(parts[part])} for parts in (self._left, self._right)] for part in self._open
        )
        return not self.notes and not any(a == b for a, b in cuts) and not any(True for _ in self.differences())

    def differences(self) -> Iterator[Row]:
        """Read tensors and yield differences: the elements with another bit, and the place of the largest difference."""
        groups: dict[Part, list[str]] = defaultdict(list)
        for operator, name in self._open:  # parts of one tensor are read at once
            whole = _is_whole(self._left[operator, name] + self._right[operator, name])
            groups[operator if whole else "", name].append(operator)
        for (own, name), operators in groups.items():
            left, right = ([*chain(*(parts[each, name] for each in operators))] for parts in (self._left, self._right))
            tensors = self._a.read(name, left, right), self._b.read(name, right, left)
            for operator in operators:
                boxes = [box for each in self._left[operator, name] for box in each.record.boxes()]
                everything = [((0,) * tensors[0].ndim, tuple(tensors[0].shape))]
                yield from _difference(operator, name, *tensors, everything if own else boxes)

    def beside(self) -> list[str]:
        """Return other differences in words: facts on the runs, and, if steps and ranks are the same, parts of the journals."""
        a, b = self._a, self._b
        found = [
            f"{key}: {_text(a.told.get(key))} in A, {_text(b.told.get(key))} in B"
            for key in dict.fromkeys(chain(a.told, b.told))
            if a.told.get(key) != b.told.get(key)
        ]
        ranks: dict[str, list[str]] = defaultdict(list)
        if (a.step, a.commit.world_size) == (b.step, b.commit.world_size):
            for rank, (left, right) in enumerate(zip(a.starts(), b.starts(), strict=True)):
                for key in (key for key in left if key in right and differs(left[key], right[key])):
                    ranks[key].append(str(rank))
        return found + [f"`{key}` of the journal, ranks {', '.join(of)}" for key, of in ranks.items()]


def _text(value: object) -> str:
    return ", ".join(f"{key} {each}" for key, each in value.items()) if isinstance(value, Mapping) else str(value)


def _identities(records: Sequence[Replicas]) -> set[tuple[object, ...]]:
    return {identity_of(each.record) for each in records}


def _difference(operator: str, name: str, a: Tensor, b: Tensor, boxes: Sequence[Bounds]) -> Iterator[Row]:
    """Yield the difference within boxes of two tensors, if there is one."""
    differing, numel, worst = 0, 0, list[tuple[float, list[int], float, float]]()
    for offset, size in boxes:
        place = tuple(slice(first, first + length) for first, length in zip(offset, size, strict=True))
        left, right = a[place].reshape(-1), b[place].reshape(-1)
        numel += left.numel()
        for start in range(0, left.numel(), _AT_ONCE):
            x, y = left[start : start + _AT_ONCE], right[start : start + _AT_ONCE]
            (unequal,) = torch.nonzero(_unequal(x, y), as_tuple=True)
            if unequal.numel():
                differing += unequal.numel()
                x, y = x[unequal].double(), y[unequal].double()
                best = int((x - y).abs().argmax())  # what is no number counts as the largest
                index = np.unravel_index(start + int(unequal[best]), size)
                at = [int(each) + first for each, first in zip(index, offset, strict=True)]
                worst.append((float((x - y)[best].abs()), at, float(x[best]), float(y[best])))
    if worst:
        largest, at, in_a, in_b = max(worst, key=lambda each: _rank(each[0]))
        figures = {"differing": differing, "numel": numel, "largest": largest, "at": at, "a": in_a, "b": in_b}
        yield {"operator": operator, "tensor": name, **figures}


def _rank(largest: float) -> tuple[bool, float]:
    return math.isnan(largest), largest


def worst_first(rows: Iterable[Row]) -> list[Row]:
    """Return differences as JSON values: the largest first, and counts of steps, which differ by more than any weight, last."""
    ordered = sorted(rows, key=lambda row: (not row["tensor"].endswith("/step"), *_rank(row["largest"])), reverse=True)
    return [plain(row) for row in ordered]


def plain(value: Any) -> Any:
    """Return a number that is not finite as text, since JSON has none, also within lists and mappings."""
    if isinstance(value, Mapping):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, list):
        return [plain(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _unequal(a: Tensor, b: Tensor) -> Tensor:
    """Return by element whether any bit differs; of different types, whether the value does."""
    if a.dtype != b.dtype:
        return a.double() != b.double()
    return (a.contiguous().view(torch.uint8) != b.contiguous().view(torch.uint8)).view(len(a), -1).any(dim=1)


# -- since when


def find_parting(runs: Sequence[OpenedRun], until: int) -> Row | None:
    """Return where two runs part, at the boundary `until` at the latest; `None` if no generation that both keep differs.

    Halves the row of generations that both keep: states that have differed once are not equal again.
    """
    common = [step for step in common_steps(runs) if step <= until]
    low, high, looked = -1, len(common), 0
    while high - low > 1:
        middle, looked = (low + high) // 2, looked + 1
        a, b = (StoredState(run, common[middle]) for run in runs)
        comparison = Comparison(a, b)
        if not comparison.compared:
            del common[middle]
            high -= 1
        elif comparison.equal():
            low = middle
        else:
            high = middle
    if high == len(common):
        return None
    equal_at = common[low] if low >= 0 else None
    first = _first_between(runs, -1 if equal_at is None else equal_at, common[high])
    return {"equal": equal_at, "differs": common[high], "looked": looked, "of": len(common), "first": first}


def common_steps(runs: Sequence[OpenedRun]) -> list[int]:
    """Return the steps of generations that both runs have, and a restart would try, in order."""
    kept = [{stored.generation.step for stored in view.generations() if stored.usable} for _, view in runs]
    return sorted(kept[0] & kept[1])


def _first_between(runs: Sequence[OpenedRun], low: int, high: int) -> str:
    """Return the first loss or record of the boundaries behind `low` that differs, in words; empty if there is none."""
    left, right = (_by_boundary(run, low, high) for run in runs)
    for boundary, rank, name in sorted(left.keys() & right.keys()):
        a, b = left[boundary, rank, name], right[boundary, rank, name]
        if a != b and name:
            return f"`{name}` of rank {rank}, as step {boundary - 1} has left it"
        if a != b:
            return f"the loss of step {boundary - 1}, rank {rank}: {losses_text(a)} in A, {losses_text(b)} in B"
    return ""


def losses_text(losses: Sequence[float]) -> str:
    """Return a step's losses, each precise enough to tell float32 apart."""
    return ", ".join(_figure(loss, 9) for loss in losses) or "none"


def _by_boundary(run: OpenedRun, low: int, high: int) -> dict[tuple[int, int, str], Any]:
    """Return digests of records by boundary, rank and name, and losses under an empty name."""
    (backend, view), found = run, dict[tuple[int, int, str], Any]()
    for commit in (stored.commit for stored in view.generations() if stored.usable):
        if commit is None or commit.generation.step <= low or commit.steps[0] > high:
            continue
        for marker in (view.read_marker(commit, rank) for rank in range(commit.world_size)):
            for file in [*marker.segments, *(entry.segment for entry in marker.referenced)]:
                for record in file.records if low < file.step <= high else ():
                    if record.kind == JOURNAL:
                        with suppress(Corrupt):
                            found[file.step, marker.rank, ""] = [loss.item() for loss in stored_losses(backend, file)]
                    elif record.kind != BUFFER:
                        found[file.step, marker.rank, record.name] = record.digest
    return found


# -- the command


def diff(sides: Sequence[tuple[Backend, int | None]]) -> Answer:
    """Compare A's state with B's. Without steps it is the newest that both have.

    Raises:
        NoUsableGeneration: there is no such generation.
        Corrupt: bytes that would have to be compared are damaged.
    """
    runs = [(backend, RunView.open(backend)) for backend, _ in sides]
    steps = _steps([step for _, step in sides], runs)
    a, b = (StoredState(run, step) for run, step in zip(runs, steps, strict=True))
    comparison = Comparison(a, b)
    if not comparison.compared:
        raise NoUsableGeneration(f"No operator of step {a.step} of A is of the same step as in step {b.step} of B.")
    rows = worst_first(comparison.differences())
    different = bool(rows or comparison.notes)
    document = {
        "a": _place(a),
        "b": _place(b),
        "equal": not different,
        "compared": len(comparison.compared),
        "different": sorted({row["operator"] for row in rows}),
        "not_compared": comparison.apart,
        "tensors": rows,
        "notes": comparison.notes,
        "beside": comparison.beside(),
        "parting": find_parting(runs, a.step) if different and a.step == b.step and a.url != b.url else None,
    }
    return Answer(document, lambda: _tables(document), status=1 if different else 0)


def _steps(wanted: Sequence[int | None], runs: Sequence[OpenedRun]) -> Sequence[int]:
    known = [step for step in wanted if step is not None]
    if not known and not (known := common_steps(runs)[-1:]):
        kept = [sorted({each.generation.step for each in view.generations() if each.usable}) for _, view in runs]
        raise NoUsableGeneration(
            f"There is no step of which both keep a generation: A has {kept[0] or 'none'}, B has {kept[1] or 'none'}. "
            "Name two, as in URL_A@100 URL_B@120."
        )
    return known if len(known) == len(runs) else known * len(runs)


def _place(state: StoredState) -> Row:
    incarnation = state.commit.generation.incarnation
    told = {"kind": state.told["kind"], "ranks": state.commit.world_size}
    return {"url": state.url, "run_id": state.commit.run_id, "step": state.step, "incarnation": incarnation, **told}


def _figure(value: Any, digits: int) -> str:
    return value if isinstance(value, str) else f"{value:.{digits}g}"


def differences_shown(document: Row, a: str, b: str) -> list[RenderableType]:
    """Return a table of differing tensors, if any, and a sentence on operators that are not compared; `a` and `b` are the titles of the
    values at the largest difference.
    """
    rows, apart = document["tensors"], document["not_compared"]
    titles = ("operator", "tensor", "differ", "of", "largest", "at", a, b)
    table = plain_table(*titles, right=(*titles[2:5], *titles[6:]), wraps="tensor")
    for row in rows[:_SHOWN]:
        values = (_figure(row["largest"], 3), str(row["at"]), _figure(row["a"], 9), _figure(row["b"], 9))
        table.add_row(row["operator"], row["tensor"], str(row["differing"]), str(row["numel"]), *values)
    if len(rows) > _SHOWN:
        table.add_row("...", f"{len(rows) - _SHOWN} more, see --json")
    skipped = [f"not compared, as of different steps: {len(apart)} operators, first {apart[0]}"] if apart else []
    return [*([table] if rows else []), *skipped]


def _tables(document: Row) -> list[RenderableType]:
    """Return a table of the differing tensors, worst first, and sentences on the reason."""
    said: list[RenderableType] = [
        f"{side.upper()}: step {each['step']} (incarnation {each['incarnation']}) of {each['url']}, {each['kind']}, ranks: {each['ranks']}"
        for side, each in ((side, document[side]) for side in "ab")
    ]
    said += [*differences_shown(document, "in A", "in B"), *document["notes"]]
    said += [f"beside the state: {each}" for each in document["beside"]]
    said.append(f"{len(document['different'])} of {document['compared']} operators differ")
    if (parting := document["parting"]) is not None:
        equal = "" if parting["equal"] is None else f"equal at step {parting['equal']}, "
        looked = f"({parting['looked']} of {parting['of']} generations of both compared)"
        said.append(f"{equal}different at step {parting['differs']} {looked}")
        said += [f"first to differ: {parting['first']}"] if parting["first"] else []
    return said
