"""Parameters that are watched: constants for changes, copies on several ranks for differences, `.data` for accesses.

A parameter without gradient and without optimizer state is taken for a constant, such as the base of LoRA adapters. A later
start digests the parameters made by the user's script, and reads only those that differ from the stored ones. A constant
that changes after all (version counters, accesses to `.data` and digests tell) becomes an ordinary parameter.

Invariant: a generation taken while a constant differed from the stored one is not whole.

One rank writes the bytes that all ranks get at a restart, so the ranks' copies are compared.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, groupby
from operator import attrgetter
from typing import Any, ClassVar, cast

import torch
import xxhash
from torch import Tensor, nn

from lightning_moe_ckpt._logging import rank_logger
from lightning_moe_ckpt._units import size_text
from lightning_moe_ckpt.coordination import Exchange
from lightning_moe_ckpt.errors import CheckpointError, ConfigurationError, Corrupt, NoUsableGeneration
from lightning_moe_ckpt.operators import ParameterIndex, Region, memory_of
from lightning_moe_ckpt.parallel import ParallelGroups
from lightning_moe_ckpt.process import odd_holders
from lightning_moe_ckpt.snapshot._layout import PARAM, SEGMENT_METADATA, OperatorSlice, StateView
from lightning_moe_ckpt.snapshot._shards import as_memoryview
from lightning_moe_ckpt.storage import (
    CONSTANTS,
    GenerationId,
    KindColumns,
    NameColumns,
    RecordEntry,
    RecordRows,
    RunStore,
    SegmentEntry,
    SegmentLayout,
    digest_of,
    dtype_code,
)

log = rank_logger(__name__)

_FILE_NBYTES = 256 * 2**20
"""Bytes per file of constants, roughly; a larger parameter has its own file."""

_CHUNK_NBYTES = 16 * 2**20
_THREADED_NBYTES = 256 * 2**20
"""Least bytes for which threads are started."""
_THREADS = 4
_NAMED = 4

_version = attrgetter("_version")


class DataAccess:
    """Count accesses to `.data` of some parameters, until `close`; `before` is called before each, from whichever thread."""

    _all: ClassVar[list[DataAccess]] = []

    def __init__(self, params: Iterable[Tensor], before: Callable[[], None] | None = None) -> None:
        self.count, self.touched = 0, set[int]()
        """Number of accesses, and identities of accessed parameters."""
        self._ids, self._before, self._pid = set(map(id, params)), before, os.getpid()
        self._all.append(self)
        nn.Parameter.data = property(_get_data, _set_data)  # type: ignore[assignment]

    def close(self) -> None:
        """Stop counting."""
        if self in self._all:
            self._all.remove(self)
            if not self._all:
                del nn.Parameter.data  # uncovers `Tensor.data`

    def accessed(self, param: Tensor) -> None:
        """Count an access to `.data` if `param` is one of the counted parameters."""
        if id(param) in self._ids:
            self.count += 1
            self.touched.add(id(param))
            if self._before is not None and self._pid == os.getpid():  # a fork copies nothing
                self._before()

    @classmethod
    def note(cls, param: Tensor) -> None:
        """Report an access to all counters."""
        for each in cls._all:
            each.accessed(param)


_DATA: Any = Tensor.data


def _get_data(param: Tensor) -> Tensor:
    DataAccess.note(param)
    data: Tensor = _DATA.__get__(param)
    return data


def _set_data(param: Tensor, data: Tensor) -> None:
    DataAccess.note(param)
    _DATA.__set__(param, data)


class Constants:
    """Constants, the same on all ranks: parameters that look like them leave the view's operators, which name them.
    Pipeline stages and sharded experts have no constants; nor has a module with averages.
    """

    def __init__(self, view: StateView, groups: ParallelGroups) -> None:
        self._view = view
        self.policy: Mapping[str, object] = {}
        """Reference to the stored constants, an entry of each generation's policy."""
        self._digests: dict[str, str] = {}
        self._watched: list[Tensor] = []
        self._versions: list[int] = []
        self._access: DataAccess | None = None
        if groups.num_stages == 1 and not view.averages.names:
            view.operators = view.operators.without(_candidates(view))

    @property
    def _params(self) -> dict[str, Tensor]:
        return {fqn: self._view.params[fqn] for fqn in self._view.operators.constants}

    # -- start

    def settle(
        self,
        store: RunStore,
        own: GenerationId,
        resumed: Mapping[str, object] | None,
        exchange: Exchange,
        *,
        load: bool,
    ) -> None:
        """Store a new run's constants, or make the live constants equal to those of `resumed`, if these may differ
        (`load`). Collective. Raises `NoUsableGeneration`, on all ranks, if some rank lacks the stored bytes and cannot
        read them.
        """
        if resumed is None:
            if not exchange.all_agree(not self._view.operators.constants):
                self._store(store, own, exchange)
        elif CONSTANTS in resumed:
            self.policy = {CONSTANTS: resumed[CONSTANTS]}
            with exchange.raise_together(NoUsableGeneration):
                self._take_up(store.read_constants(resumed), store, load=load)

    def _store(self, store: RunStore, own: GenerationId, exchange: Exchange) -> None:
        """Store the constants equal on all ranks. If storage fails there are none: generations have everything. Collective."""
        self._digests = digests = digested(self._params)
        if len(set(exchange.gather_values(digest_of(repr(digests).encode())))) > 1:
            rows = cast("list[dict[str, str]]", exchange.gather_values(digests))
            equal = [fqn for fqn, digest in digests.items() if all(row.get(fqn) == digest for row in rows)]
            self._view.operators = self._view.operators.without(equal)
        described: bytes | None = None
        try:
            own_chunks = [*self._chunks()][exchange.rank :: exchange.world_size]
            described = store.described([self._put(store, own, names) for names in own_chunks])
        except (CheckpointError, RuntimeError) as error:  # a RuntimeError is torch's, for lack of memory
            log.warning("parameters that do not train cannot be stored once, so each generation has them: %s", error)
        parts = exchange.gather_values(described)
        if None in parts or not self._params:
            self._view.operators = self._view.operators.without(())
            return
        key = exchange.run_on_coordinator(lambda: store.describe_constants(own, cast("list[bytes]", parts)))
        self.policy = {CONSTANTS: key}
        told = (len(self._params), self._size_text(self._params))
        log.info(
            "%d parameters do not train: their %s are stored once, and generations refer to them", *told, alike=True
        )
        self._watch(digests)

    def _take_up(self, files: Sequence[SegmentEntry], store: RunStore, *, load: bool) -> None:
        """Read the stored constants that differ from the live ones. Raises `Corrupt` and `StorageError`."""
        params, places = self._params, {record.fqn: (file, record) for file in files for record in file.records}
        if missing := [fqn for fqn in params if fqn not in places]:
            raise Corrupt(f"what describes constants lacks {missing[:_NAMED]}. Start anew with resume='never'.")
        digests = {fqn: places[fqn][1].digest for fqn in params}
        if load:
            for param in params.values():  # left by a process that has trained further
                self._view.schema.drop_state(param)
            live = digested(params)
            differing = {fqn: param for fqn, param in params.items() if live[fqn] != digests[fqn]}
            for fqn, param in differing.items():
                self._load(store, param, *places[fqn])
            told = self._size_text(params), self._size_text(differing)
            log.info("parameters that do not train: %s, of which %s were read", *told)
        self._watch(digests)

    # -- changes

    def _watch(self, digests: Mapping[str, str]) -> None:
        self._digests = {fqn: digests[fqn] for fqn in self._params}
        self._watched = list(self._params.values())
        self._versions = list(map(_version, self._watched))
        self.close()
        self._access = DataAccess(self._watched)

    def edited(self, *, thoroughly: bool = False) -> list[str]:
        """Return the constants with changed bytes; looks at those with a trace of change, or (`thoroughly`) at all."""
        versions = list(map(_version, self._watched))
        touched = set[int]() if self._access is None else self._access.touched
        if versions == self._versions and not (touched or thoroughly):
            return []
        rows = zip(self._params.items(), versions, self._versions, strict=True)
        suspects = {fqn: param for (fqn, param), now, was in rows if thoroughly or now != was or id(param) in touched}
        changed = [fqn for fqn, digest in digested(suspects).items() if digest != self._digests[fqn]]
        if not changed:  # written to, with the same bytes
            self._versions = versions
            touched.clear()
        return changed

    def thaw(self, exchange: Exchange, *, thoroughly: bool = False) -> bool:
        """Make ordinary parameters of constants that some rank changed or trains; return whether any. Collective."""
        operators = self._view.operators
        if not operators.constants:
            return False
        state = self._view.schema.optimizer.state
        trains = [fqn for fqn, param in self._params.items() if param.requires_grad or param in state]
        own = {*trains, *self.edited(thoroughly=thoroughly)}
        if exchange.all_agree(not own):
            return False
        rows = cast("list[list[str]]", exchange.gather_values(sorted(own)))
        names = {name for row in rows for name in row}
        thawed = [fqn for fqn in operators.constants if fqn in names]
        rest = [fqn for fqn in operators.constants if fqn not in names]
        log.info(
            "%d parameters that did not train change by now (%s): generations have them from here on",
            *(len(thawed), ", ".join(thawed[:_NAMED])),
            alike=True,
        )
        self._view.operators = operators.without(rest, [*operators.thawed, *thawed])
        self._watch(self._digests)
        return True

    def close(self) -> None:
        """Stop watching."""
        if self._access is not None:
            self._access.close()

    # -- private

    @staticmethod
    def _size_text(params: Mapping[str, Tensor]) -> str:
        return size_text(sum(param.nbytes for param in params.values()))

    def _chunks(self) -> Iterator[list[str]]:
        """Yield the constants' names by file, the same on all ranks."""
        params, ends = self._params, accumulate(param.nbytes for param in self._params.values())
        for _, pairs in groupby(zip(params, ends, strict=True), key=lambda pair: pair[1] // _FILE_NBYTES):
            yield [fqn for fqn, _ in pairs]

    def _put(self, store: RunStore, generation: GenerationId, names: Sequence[str]) -> SegmentEntry:
        params = [self._params[fqn].detach() for fqn in names]
        records = [f"full/{fqn}/0+{param.numel()}/{PARAM}" for fqn, param in zip(names, params, strict=True)]
        kinds = [(param.dtype, (param.numel(),)) for param in params]
        layout = SegmentLayout.of_columns([NameColumns.of(records)], KindColumns.of(kinds), metadata=SEGMENT_METADATA)
        file_U8 = torch.empty(layout.nbytes, dtype=torch.uint8)
        layout.write_header(file_U8)
        rows: list[RecordEntry] = []
        for fqn, param, name in zip(names, params, records, strict=True):
            layout.view(file_U8, name).copy_(param.view(-1))
            offset, nbytes, dtype, _ = layout.span(name)
            whole = {"global_shape": tuple(param.shape), "global_start": 0, "numel": param.numel()}
            place = {"dtype": dtype_code(dtype), "offset": offset, "nbytes": nbytes, "digest": ""}
            facts = {"name": name, "operator": f"{fqn}/constant", "kind": "full", "fqn": fqn, "state_key": PARAM}
            rows.append(RecordEntry(**facts, **whole, **place))  # type: ignore[arg-type]
        view = as_memoryview(file_U8)
        table, digest = RecordRows(rows).digested_with_file(view)
        key = store.put_constants(generation, digest, view)
        return SegmentEntry(step=generation.step, key=key, nbytes=layout.nbytes, digest=digest, records=table)

    @staticmethod
    def _load(store: RunStore, param: Tensor, file: SegmentEntry, record: RecordEntry) -> None:
        stored_U8 = torch.empty(record.nbytes, dtype=torch.uint8)
        view = as_memoryview(stored_U8)
        store.read_range(file, record.offset, view)
        if digest_of(view) != record.digest:
            raise Corrupt(
                f"{file.key}: `{record.fqn}` is not what was written, and what this script makes of it is not what the run had. "
                "Put the file back from a copy, or load the weights that the run began with before `fit`."
            )
        with torch.no_grad():
            param.copy_(stored_U8.view(param.dtype).view(param.shape))


def _candidates(view: StateView) -> list[str]:
    """Return the parameters that look like constants and that every rank has whole, each in memory of its own.

    Experts of a layer are equal in size: either all have a constant in the same place, or none has.
    """
    operators, params, schema = view.operators, view.params, view.schema
    frozen = {fqn for fqn, param in params.items() if not param.requires_grad}
    if len(frozen) in {0, len(params)}:
        return []
    shared = {fqn for group in ParameterIndex(view.module).sharing() for fqn in group}
    elsewhere = {piece.fqn for op in operators if op.holders != "stage" for piece in op.slices} | view.boxes.keys()
    found = {fqn for fqn in frozen - shared - elsewhere if not schema.has_state(params[fqn])}
    for layer in operators.layers:
        for column in zip(*layer.experts.values(), strict=True):
            if not found.issuperset(piece.fqn for piece in column):
                found -= {piece.fqn for piece in column}
    return [fqn for fqn in params if fqn in found]


def digested(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the digests of tensors' bytes, by name."""
    return dict(zip(tensors, digests_of([*tensors.values()]), strict=True))


def digests_of(tensors: Sequence[Tensor]) -> list[str]:
    """Return the digests of tensors' bytes, with DTensors this rank's."""
    if sum(each.nbytes for each in map(memory_of, tensors)) < _THREADED_NBYTES:
        return list(map(_digest, tensors))
    with ThreadPoolExecutor(_THREADS, "moe-ckpt-constants") as pool:
        return list(pool.map(_digest, tensors))


def _digest(tensor: Tensor) -> str:
    """Return the digest of a tensor's bytes, read piece by piece from a device."""
    bytes_U8 = memory_of(tensor).detach().view(-1).view(torch.uint8)
    digest = xxhash.xxh3_128()
    for start in range(0, bytes_U8.numel(), _CHUNK_NBYTES):
        digest.update(as_memoryview(bytes_U8[start : start + _CHUNK_NBYTES].cpu()))
    return str(digest.hexdigest())


class Copies:
    """Compare replicated state among ranks; says once where training has made it differ."""

    def __init__(self, view: StateView, groups: ParallelGroups, exchange: Exchange) -> None:
        self._view, self._groups, self._exchange = view, groups, exchange
        self._told = groups.world_size == 1

    def compare(self, *, first: bool) -> None:
        """Raise `ConfigurationError` on all ranks (`first`), with the names, if parameters or optimizer state differ
        among ranks; later log parameters that differ. Collective.
        """
        lines = list[str]()
        for (fqn, key), digests in {} if self._told else self._differing(states=first).items():
            like: dict[str, list[int]] = {}
            for rank, digest in digests.items():
                like.setdefault(digest, []).append(rank)
            name = f"`{fqn}`" if key == PARAM else f"`{key}` of `{fqn}`"
            lines.append(f"{name} (ranks {' and '.join(map(str, like.values()))} have different ones)")
        if lines and first:
            raise ConfigurationError(_text(lines, self._view))
        if lines:
            self._told = True
            log.error("a restart will not give what training has now: %s", _text(lines, self._view), alike=True)

    def odd(self) -> dict[str, tuple[int, ...]]:
        """Return the ranks whose copy of an operator's state is not the majority's, by operator in order; all its holders if there
        is no majority. Collective.
        """
        if self._groups.world_size == 1 or not (differing := self._differing(states=True)):
            return {}
        own: dict[str, str] = {}
        for slices in self._slices().values():
            for operator, piece in slices:
                for fqn, key in differing:
                    if fqn == piece.fqn and (found := self._view.tensor(fqn, key)) is not None:
                        flat = found.detach().reshape(-1)
                        part = flat[piece.start : piece.stop] if len(flat) >= piece.stop else flat
                        own[operator.name] = digest_of(f"{own.get(operator.name)}{digests_of([part])}".encode())
        rows = cast("list[dict[str, str]]", self._exchange.gather_values(own))
        names = dict.fromkeys(name for row in rows for name in row)
        odd = {name: odd_holders({rank: row[name] for rank, row in enumerate(rows) if name in row}) for name in names}
        return {name: ranks for name, ranks in odd.items() if ranks}

    def _slices(self) -> dict[Region, list[OperatorSlice]]:
        return self._view.by_region(self._view.operators.operators, self._groups)

    def _differing(self, *, states: bool) -> dict[tuple[str, str], dict[int, str]]:
        """Return the state that differs among ranks that should hold equal copies: digests by rank, by name and key. Collective.

        All bytes count, of parameters and (with `states`) of optimizer state. Buffers may differ by rank, and constants
        were compared when stored.
        """
        view, own = self._view, dict[str, dict[tuple[str, str], str]]()
        for region, slices in self._slices().items():
            fqns = dict.fromkeys(piece.fqn for _, piece in slices)
            forms = [(fqn, entry.key) for fqn in fqns if states for entry in view.schema.entries(view.params[fqn])]
            found = {(fqn, key): view.tensor(fqn, key) for fqn, key in [*((fqn, PARAM) for fqn in fqns), *forms]}
            there = {name: each for name, each in found.items() if each is not None}
            own[str(region)] = dict(zip(there, digests_of([*there.values()]), strict=True))
        # Usually all copies are equal: then one digest per region decides.
        parts = {key: digest_of(repr(digests).encode()) for key, digests in own.items()}
        said = cast("list[dict[str, str]]", self._exchange.gather_values(parts))
        if all(row[key] == other.get(key, row[key]) for row in said for other in said for key in row):
            return {}
        rows = cast("list[dict[str, dict[tuple[str, str], str]]]", self._exchange.gather_values(own))
        differing: dict[tuple[str, str], dict[int, str]] = {}
        for key in dict.fromkeys(key for row in rows for key in row):
            of_ranks = {rank: row[key] for rank, row in enumerate(rows) if key in row}
            for name in dict.fromkeys(name for digests in of_ranks.values() for name in digests):
                digests = {rank: each.get(name, "") for rank, each in of_ranks.items()}
                if len(set(digests.values())) > 1:
                    differing[name] = digests
        return differing


def _text(lines: list[str], view: StateView) -> str:
    """Return the message for such lines, with effect and remedy."""
    plain = (
        " Nobody reduces gradients of plain parameters beside shards: shard these too, with `fully_shard` on the module that has them, "
        "or reduce their gradients in `on_after_backward`."
    )
    more = f" and {len(lines) - _NAMED} more" if len(lines) > _NAMED else ""
    return (
        f"{', '.join(lines[:_NAMED])}{more}: ranks should hold these as equal copies, of which one is stored, so that a restart "
        "would give it to all of them. Initialise them alike, or broadcast them before `fit`, and let all ranks apply the same "
        "gradients. Experts that differ by rank belong to `MoEStrategy(expert_parallel=...)`; other parameters that each rank owns, "
        f"by parallelism written by hand or as adapters per rank, are not supported yet.{plain if view.boxes else ''}"
    )
