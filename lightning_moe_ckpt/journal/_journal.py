"""Write and read the journal record of a segment: a length, then one codec value, in a record of fixed capacity.

The capacity is fixed because a segment's header is written once per plan. A larger journal makes one
window useless, and the next plan reserves twice what was needed; one that fills two thirds makes the next plan reserve
three times as much, before there is too little.

Its tensors on a device are copied to the host while the training thread goes on. A read (`item`, `cpu`) waits until the
device has done all queued work. A copy into page-locked memory, on a stream of its own, does not: a later reader waits
for the copy alone, after it has queued work that keeps the device busy.
"""

from __future__ import annotations

import copy
import struct
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from lightning_moe_ckpt.errors import Corrupt
from lightning_moe_ckpt.journal._codec import Constant, Unread, decode, encode, refusals

Journal = dict[str, Any]
UNFIT = "unfit"
"""Key of a start half that says why no run can go on from it."""

_PAGE = 4096

_LENGTH = struct.Struct("<Q")
_cuda: Any = torch.cuda
"""Events and streams are partly untyped in torch."""
_ALIGNMENT = 64
"""Alignment in bytes, enough for any element type."""


class JournalOverflow(Exception):
    """A journal needs `nbytes`, more than its record has. The session catches this error and reports it."""

    def __init__(self, nbytes: int, capacity: int) -> None:
        super().__init__(
            f"the step journal takes {nbytes} bytes, its record holds {capacity}; the next plan reserves more"
        )
        self.nbytes = nbytes


class JournalCapacity:
    """Capacity of journal records: twice the largest journal seen."""

    def __init__(self) -> None:
        self.nbytes = _PAGE
        """Bytes of the record."""

    def needs(self, nbytes: int) -> None:
        """Note a journal of `nbytes`."""
        self.had(2 * nbytes)

    def had(self, nbytes: int) -> None:
        """Use at least the `nbytes` of an earlier process, since they were enough."""
        self.nbytes = max(self.nbytes, -(-nbytes // _PAGE) * _PAGE)


def encode_journal(journal: Journal, capacity: int, on_host: Mapping[int, Tensor] | None = None) -> bytes:
    """Encode a journal to bytes for the start of a record with `capacity` bytes. Raises `JournalOverflow` if the bytes
    do not fit. For `on_host`, and for `CodecError`, see `encode`.
    """
    payload = encode(journal, on_host)
    if (nbytes := _LENGTH.size + len(payload)) > capacity:
        raise JournalOverflow(nbytes, capacity)
    return _LENGTH.pack(len(payload)) + payload


def decode_journal(record_U8: Tensor) -> Journal:
    """Decode the journal in a record. Raises `Corrupt` if the length or the value is not what was written."""
    data = record_U8.numpy().tobytes()
    (length,) = _LENGTH.unpack_from(data)
    if length > len(data) - _LENGTH.size:
        raise Corrupt(f"journal: its length {length} exceeds its record of {len(data)} bytes. Use an older generation.")
    journal = decode(data[_LENGTH.size : _LENGTH.size + length])
    if not isinstance(journal, dict):
        raise Corrupt(f"journal: found a {type(journal).__name__}, wanted a dict. Use an older generation.")
    return journal


def differs(stored: object, found: object) -> bool:
    """Return whether a value differs in any bit from one that a journal has stored."""
    return stored is not found and (bool(refusals(found)) or encode(stored) != encode(found))


# -- tensors on their way to the host


class Arrival:
    """Values whose copies are complete or under way; a tensor on the host is its own copy.

    The sources are kept alive, so that nothing else gets their memory meanwhile. `arrived` are events after the copies,
    one for each device.
    """

    def __init__(self, sources: Sequence[Tensor], on_host: Sequence[Tensor], arrived: Sequence[Any]) -> None:
        self._sources, self._on_host, self._arrived = list(sources), list(on_host), list(arrived)

    @property
    def is_under_way(self) -> bool:
        """Whether some source was on a device."""
        return bool(self._arrived)

    def wait(self) -> list[Tensor]:
        """Wait for the copies and return the values on the host, in the order of the sources."""
        for each in self._arrived:
            each.synchronize()
        return self._on_host

    def by_identity(self) -> dict[int, Tensor]:
        """Wait for the copies and return them by the `id` of their source."""
        return {id(source): value for source, value in zip(self._sources, self.wait(), strict=True)}


class Arrivals:
    """Start copies to the host. One thread uses it."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, Any] = {}

    def start(self, tensors: Sequence[Tensor]) -> Arrival:
        """Copy tensors on CUDA devices as they are after all queued work. They must not change until the copies arrive.

        What is on a device is copied by a stream of that device: of another one's, torch takes the current stream
        instead, and no event here would be behind the copy.
        """
        on_host, arrived = list(tensors), []
        for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
            if device not in self._streams:
                self._streams[device] = _cuda.Stream(device)
            self._streams[device].wait_stream(_cuda.current_stream(device))
            with _cuda.stream(self._streams[device]):
                there = [index for index, each in enumerate(tensors) if each.is_cuda and each.device == device]
                for index, arriving in zip(there, _sent([tensors[index] for index in there]), strict=True):
                    on_host[index] = arriving
                arrived.append(_cuda.Event(blocking=True))
                arrived[-1].record(self._streams[device])
        return Arrival(tensors, on_host, arrived)


def held(value: Any, tensors: list[Tensor]) -> Any:
    """Return a copy of nested dicts, lists, tuples and sets, with the same leaves; append their tensors to the list `tensors`."""
    if isinstance(value, Tensor | Unread):
        tensors.append(value if isinstance(value, Tensor) else value.tensor)
    if isinstance(value, Tensor | Unread | Constant):
        return value
    if type(value) in {list, tuple}:
        return type(value)(held(item, tensors) for item in value)
    if isinstance(value, dict):
        own = copy.copy(value)  # of its own kind
        for key, each in own.items():
            own[key] = held(each, tensors)
        return own
    return value.copy() if type(value) is set else value


def _sent(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Start copies of tensors, into one piece of page-locked memory. Torch keeps such memory by size, and sizes repeat: making new
    memory can wait for the device.
    """
    begins = list(accumulate((-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in tensors), initial=0))
    memory_U8 = _page_locked(begins[-1])
    places = [memory_U8[begin : begin + tensor.nbytes] for tensor, begin in zip(tensors, begins, strict=False)]
    rows = zip(tensors, places, strict=True)
    return [place.view(each.dtype).view(each.shape).copy_(each, non_blocking=True) for each, place in rows]


def _page_locked(nbytes: int) -> Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
