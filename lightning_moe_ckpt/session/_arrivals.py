"""Small tensors on their way from a device to the host, while the training thread goes on.

A read (`item`, `cpu`) waits until the device has done all that was queued before. A copy into page-locked memory, on a
stream of its own, does not: whoever needs the values waits for the copy alone, behind work that gives the device
something to do meanwhile.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_moe_ckpt.session._codec import Unread

_cuda: Any = torch.cuda
"""Events and streams are partly untyped in torch."""


class Arrival:
    """Values that were copied, or are being copied.

    Args:
        sources: what is copied; kept as long as this, so that nothing else gets its memory meanwhile.
        on_host: where to; a tensor that was on the host all along is its own copy.
        arrived: event behind the copies; `None` if there are none.
    """

    def __init__(self, sources: Sequence[Tensor], on_host: Sequence[Tensor], arrived: Any = None) -> None:
        self._sources, self._on_host, self._arrived = list(sources), list(on_host), arrived

    @property
    def is_under_way(self) -> bool:
        """Whether something was on a device when this began."""
        return self._arrived is not None

    def wait(self) -> list[Tensor]:
        """The values on the host, in the order in which they were given."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._on_host

    def by_identity(self) -> dict[int, Tensor]:
        """What `wait` gives, by the `id` of the tensor that it was copied from."""
        return {id(source): value for source, value in zip(self._sources, self.wait(), strict=True)}


class Arrivals:
    """Starts copies to the host. Used by one thread."""

    def __init__(self) -> None:
        self._stream: Any = None

    def start(self, tensors: Sequence[Tensor]) -> Arrival:
        """Copy what is on a CUDA device, as it is behind the work queued so far; it must not change until it has arrived."""
        device = next((tensor.device for tensor in tensors if tensor.is_cuda), None)
        if device is None:
            return Arrival(tensors, tensors)
        if self._stream is None:
            self._stream = _cuda.Stream(device)
        self._stream.wait_stream(_cuda.current_stream(device))
        with _cuda.stream(self._stream):
            on_host = [_sent(tensor) for tensor in tensors]
            arrived = _cuda.Event(blocking=True)
            arrived.record(self._stream)
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


def _sent(tensor: Tensor) -> Tensor:
    if not tensor.is_cuda:
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
