"""Small tensors on their way from a device to the host, while the training thread goes on.

A read (`item`, `cpu`) waits until the device has done all that was queued before. A copy into page-locked memory, on a
stream of its own, does not: whoever needs the values waits for the copy alone, behind work that gives the device
something to do meanwhile.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from lightning_moe_ckpt.session._codec import Unread

_cuda: Any = torch.cuda
"""Events and streams are partly untyped in torch."""
_ALIGNMENT = 64
"""Bytes; enough for an element of any type."""


class Arrival:
    """Values that were copied, or are being copied.

    Args:
        sources: what is copied; kept as long as this, so that nothing else gets its memory meanwhile.
        on_host: where to; a tensor that was on the host all along is its own copy.
        arrived: events behind the copies, one for each device.
    """

    def __init__(self, sources: Sequence[Tensor], on_host: Sequence[Tensor], arrived: Sequence[Any]) -> None:
        self._sources, self._on_host, self._arrived = list(sources), list(on_host), list(arrived)

    @property
    def is_under_way(self) -> bool:
        """Whether something was on a device when this began."""
        return bool(self._arrived)

    def wait(self) -> list[Tensor]:
        """The values on the host, in the order in which they were given."""
        for each in self._arrived:
            each.synchronize()
        return self._on_host

    def by_identity(self) -> dict[int, Tensor]:
        """What `wait` gives, by the `id` of the tensor that it was copied from."""
        return {id(source): value for source, value in zip(self._sources, self.wait(), strict=True)}


class Arrivals:
    """Starts copies to the host. Used by one thread."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, Any] = {}

    def start(self, tensors: Sequence[Tensor]) -> Arrival:
        """Copy what is on CUDA devices, as it is behind the work queued so far; it must not change until it has arrived.

        What is on a device is copied by a stream of that device: of another one's, torch takes the current stream instead,
        and no event here would be behind the copy.
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
    """A copy of dicts, lists, tuples and sets within each other, with the same leaves; appends those that are tensors."""
    if isinstance(value, Tensor | Unread):
        tensors.append(value if isinstance(value, Tensor) else value.tensor)
        return value
    if type(value) in {list, tuple}:
        return type(value)(held(each, tensors) for each in value)
    if isinstance(value, dict):
        own = copy.copy(value)  # of its own kind
        for key, each in own.items():
            own[key] = held(each, tensors)
        return own
    return value.copy() if type(value) is set else value


def _sent(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies under way, in one piece of page-locked memory: to make it anew can wait for the device, and sizes repeat."""
    begins = list(accumulate((-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in tensors), initial=0))
    memory_U8 = _page_locked(begins[-1])
    places = [memory_U8[begin : begin + tensor.nbytes] for tensor, begin in zip(tensors, begins, strict=False)]
    return [
        place.view(tensor.dtype).view(tensor.shape).copy_(tensor, non_blocking=True)
        for tensor, place in zip(tensors, places, strict=True)
    ]


def _page_locked(nbytes: int) -> Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
