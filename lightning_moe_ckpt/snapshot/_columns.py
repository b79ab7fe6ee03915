"""Columns of numbers for one boundary's copies: everything that is the same at every step and in every slot.

Records are slices of *bases*: a parameter, an average, or a tensor of the optimizer's state. A base's address can
change from step to step, and some bases do not exist yet. Everything else is known from the layout. Constant bytes are
copied like the rest, whatever lay in the slot before: headers, gaps, and the flags for existing state.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from lightning_moe_ckpt.native import Column, CopyTable
from lightning_moe_ckpt.snapshot._layout import GRADIENT, PRESENT, FileLayout, StepLayout
from lightning_moe_ckpt.snapshot._parts import PACKED, FieldForm, PartColumns, numel_of

_ZEROS_U8 = torch.zeros(2**20, dtype=torch.uint8)
_STATE_U8 = torch.zeros(4096, dtype=torch.uint8)
"""Flag for existing state, and the gap behind it."""
_STATE_U8[0] = 1

_known: WeakKeyDictionary[StepLayout, StepColumns] = WeakKeyDictionary()


def columns_of(layout: StepLayout) -> StepColumns:
    """Return a boundary's columns, made once while its layout is in use; from any thread."""
    found = _known.get(layout)
    if found is None:
        found = _known[layout] = StepColumns([*layout.files, *layout.mirrors.values()])
    return found


class StepColumns:
    """Tensors of one boundary by column, one row per field in its files.

    Args:
        files: files of the boundary, and mirrors of other ranks' files.
    """

    def __init__(self, files: Sequence[FileLayout]) -> None:
        self._view = files[0].view
        self._bases: list[tuple[str, str]] = []
        """Parameter and tensor key, by base."""
        self._dtypes = [torch.uint8]
        first_base: list[int] = []
        first_row: list[int] = []
        rows: list[tuple[int, bool, bool, bool]] = []
        known: dict[tuple[FieldForm, ...], int] = {}
        parts = PartColumns.of([part for file in files for part in file.table.parts])
        for fqn, forms in parts.kinds:
            first_base.append(len(self._bases))
            self._bases += [(fqn, key) for key, *_ in forms]
            first_row.append(known.setdefault(tuple(forms), len(rows)))
            if first_row[-1] == len(rows):
                self._dtypes += [dtype for _, dtype, _ in forms if dtype not in self._dtypes]
                rows += [
                    (self._dtypes.index(dtype), whole, key == PRESENT, key == PACKED) for key, dtype, whole in forms
                ]
        self.fqns = tuple(dict.fromkeys(fqn for fqn, _ in parts.kinds))
        """Parameters with at least one record."""
        self.gradients = tuple(fqn for fqn, key in self._bases if key in (GRADIENT, PACKED))
        """Parameters whose record is the gradient."""
        # From here on by part, then by tensor, in C.
        count = parts.tensors
        number = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
        self._base = np.repeat(_column(first_base)[parts.kind], count) + number
        row = np.repeat(_column(first_row)[parts.kind], count) + number
        self._dtype, per_element, *is_of = np.array(rows, np.int64).reshape(-1, 4).T[:, row]
        flags, packed = (each.astype(bool) for each in is_of)
        self._start = np.repeat(parts.start, count) * per_element
        self._numel = np.where(per_element, np.repeat(parts.numel, count), 1)
        if packed.any():
            self._pack(packed, np.repeat(parts.numel, count))
        self._itemsize = _column(dtype.itemsize for dtype in self._dtypes)[self._dtype]
        self._headers = [torch.frombuffer(bytearray(file.segment.header), dtype=torch.uint8) for file in files]
        self._header_offset = _column(file.start for file in files)
        places = [_places(file) for file in files]
        own = [place[:, : len(file.table.names)] for place, file in zip(places, files, strict=True)]
        self._offset, _, own_gap = np.concatenate(own, axis=1)
        self._numel[flags] += own_gap[flags]
        offset, nbytes, gap = np.concatenate(places, axis=1)
        has_gap = (gap > 0) & ~np.isin(offset, self._offset[flags])
        self._gap_offset, self._gap = (offset + nbytes)[has_gap], gap[has_gap]

    def _pack(self, packed: Column, numel: Column) -> None:
        """Let a parameter's compressed parts follow each other in its base, in stored order."""
        form: FieldForm = (PACKED, torch.uint8, False)
        self._numel[packed] = _column(numel_of(form, int(each)) for each in numel[packed])
        ends: dict[int, int] = {}
        for i in np.flatnonzero(packed).tolist():
            base = int(self._base[i])
            self._start[i] = ends.get(base, 0)
            ends[base] = int(self._start[i] + self._numel[i])

    def has_state(self) -> dict[str, bool]:
        """Return whether the optimizer has state yet, by parameter."""
        return {fqn: self._view.schema.has_state(self._view.params[fqn]) for fqn in self.fqns}

    def table(self, has_state: dict[str, bool]) -> CopyTable:
        """Return the copies from the current live tensors.

        Missing tensors are stored as zeros: a slot's old bytes would differ from the bytes in a copy on another node.
        """
        bases: list[Tensor | None] = [
            (_STATE_U8 if has_state[fqn] else _ZEROS_U8) if key == PRESENT else self._view.tensor(fqn, key)
            for fqn, key in self._bases
        ]
        there = np.array([base is not None for base in bases], bool)[self._base]
        absent = ~there
        zero_offset, zero_nbytes = _in_pieces(
            np.concatenate([self._gap_offset, self._offset[absent]]),
            np.concatenate([self._gap, (self._numel * self._itemsize)[absent]]),
        )
        zeros, headers = len(bases), _column(map(len, self._headers))
        source = [self._base[there], np.full(len(zero_offset), zeros), zeros + 1 + np.arange(len(headers))]
        begin = [self._start[there], np.zeros(len(zero_offset) + len(headers), np.int64)]
        dtype = [self._dtype[there], np.zeros(len(zero_offset) + len(headers), np.int64)]
        offset = np.concatenate([self._offset[there], zero_offset, self._header_offset])
        order = np.argsort(offset, kind="stable")
        return CopyTable(
            sources=[*(_ZEROS_U8 if base is None else base for base in bases), _ZEROS_U8, *self._headers],
            source=np.concatenate(source)[order],
            start=np.concatenate(begin)[order],
            numel=np.concatenate([self._numel[there], zero_nbytes, headers])[order],
            dtypes=self._dtypes,
            dtype=np.concatenate(dtype)[order],
            offset=offset[order],
        )


def _column(numbers: Iterable[int]) -> Column:
    return np.fromiter(numbers, np.int64)


def _places(file: FileLayout) -> Column:
    """Return offset and bytes of each tensor in the boundary's memory, and the bytes of the gap behind it."""
    segment = file.segment
    return np.stack([segment.offsets + file.start, segment.sizes, -segment.sizes % segment.align])


def _in_pieces(offset: Column, nbytes: Column) -> tuple[Column, Column]:
    """Cut ranges to the size of `_ZEROS_U8`, their source."""
    most = len(_ZEROS_U8)
    number = -(-nbytes // most)
    done = most * (np.arange(number.sum()) - np.repeat(np.cumsum(number) - number, number))
    return np.repeat(offset, number) + done, np.minimum(np.repeat(nbytes, number) - done, most)
