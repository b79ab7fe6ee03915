"""Copies in host memory, and digests, of what crosses the borders of a pipeline stage, made without waiting for its device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from xxhash import xxh3_64_digest

_WORD_NBYTES = 8
_ROW = 1024
"""Words that are summed up at once."""


class HostCopies:
    """Makes copies, on a device beside what it computes: pinned memory, and a stream of their own."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def take(self, tensor: Tensor) -> Tensor:
        """Return a copy on the host, which is complete after `wait`. What is computed next must not write into `tensor`."""
        own = tensor.detach()
        if not own.is_cuda:
            return own.to("cpu", copy=True)
        if own.device not in self._streams:
            self._streams[own.device] = torch.cuda.Stream(own.device)  # type: ignore[no-untyped-call]
        stream, copy = self._streams[own.device], torch.empty(own.shape, dtype=own.dtype, pin_memory=True)
        stream.wait_stream(torch.cuda.current_stream(own.device))
        with torch.cuda.stream(stream):
            copy.copy_(own, non_blocking=True)
        own.record_stream(stream)  # its memory is no other tensor's before that
        return copy

    def wait(self) -> None:
        """Wait until all copies are complete."""
        for stream in self._streams.values():
            stream.synchronize()


def digest_of(tensors: Sequence[Tensor]) -> Tensor:
    """Return digests of types, shapes and every bit of tensors on one device: int64 `[n]`, there, the same on every kind of device.

    A digest is the sum of all words, each times an odd number of its place, modulo 2**64: two that differ in one word do.
    """
    return torch.stack([_digest(tensor.detach()) for tensor in tensors])


def _digest(tensor: Tensor) -> Tensor:
    kind = f"{tensor.dtype}{tuple(tensor.shape)}".encode()
    flat = tensor.contiguous().view(-1).view(torch.uint8)
    if flat.storage_offset() % _WORD_NBYTES:
        flat = flat.clone()
    whole = len(flat) // _WORD_NBYTES * _WORD_NBYTES
    words, rest = flat[:whole].view(torch.int64), flat[whole:].to(torch.int64)
    odd = 2 * torch.arange(_ROW, device=tensor.device) + 1
    rows = len(words) // _ROW
    sums = [
        (words[: rows * _ROW].view(rows, _ROW) * odd).sum(1),
        *((each * odd[: len(each)]).sum()[None] for each in (words[rows * _ROW :], rest)),
    ]
    by_row = torch.cat(sums)
    places = 2 * torch.arange(len(by_row), device=tensor.device) + 1
    return (by_row * places).sum() + int.from_bytes(xxh3_64_digest(kind), "little", signed=True)
