"""A device that only seems to be one: tensors on the CPU that say they are on CUDA, and a note of who waits for them.

Values spread as on a device: what is computed from a tensor there is there. What brings a value to the host (`item`,
`cpu`, a copy into memory that is not page-locked) is noted if a hook of ours asked for it on the training thread. Streams
do nothing, since all is done at once.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_iter
from typing_extensions import override

_READS = {
    getattr(Tensor, name)
    for name in ("item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__float__", "__int__", "__index__", "equal")
} | {torch.equal, torch.allclose, torch.nonzero, torch.isclose}
_IS_CUDA: Any = Tensor.is_cuda.__get__  # type: ignore[attr-defined]  # of an instance it is a bool
_HOOK = "/process/_stall.py"
"""Every hook that is on the clock passes through it."""


class Wait(NamedTuple):
    """The host has waited for the device, or would have."""

    hook: str
    what: str
    place: str


def waits_of_hooks(what: str) -> list[Wait]:
    """The wait that this call is, if a hook of ours has called."""
    stack = traceback.extract_stack()
    hooks = [after.name for frame, after in pairwise(stack) if frame.filename.endswith(_HOOK)]
    ours = [frame for frame in stack if "lightning_moe_ckpt" in frame.filename]
    return [Wait(hook, what, f"{ours[-1].filename.rpartition('/')[2]}: {ours[-1].line}") for hook in hooks[:1]]


class SeemingDevice(TorchFunctionMode):
    """While it is entered, `put` tensors and what comes of them seem to be on CUDA."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[Wait] = []
        self.num_copies = 0
        """To the host, without waiting."""
        self._there: dict[int, object] = {}
        self._pinned: dict[int, object] = {}

    def put(self, tensors: Iterator[Tensor]) -> None:
        """They are on the device from here on."""
        for tensor in tensors:
            self._note(self._there, tensor)

    def has(self, tensor: Tensor) -> bool:
        """Whether it seems to be there."""
        return _identity(tensor) in self._there

    def waited(self, what: str) -> None:
        """The host waits for the device."""
        self.waits += waits_of_hooks(what)

    @override
    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func == _IS_CUDA:
            return self.has(args[0])
        pinned = kwargs.pop("pin_memory", False) if func is torch.empty else False
        given = [each for each in tree_iter((args, kwargs)) if isinstance(each, Tensor)]
        there = [generation for generation in given if self.has(generation)]
        out = func(*args, **kwargs)
        if pinned:
            self._note(self._pinned, out)
        if func is Tensor.copy_ and not self.has(args[0]):
            self._copied(args[0], args[1], kwargs)
        elif func in _READS and there:
            self.waited(f"`{func.__name__}`")
        elif there and func.__name__.startswith("_amp_"):
            self.put(iter(given))  # a gradient scaler's, which change in place
        elif there:
            self.put(each for each in tree_iter(out) if isinstance(each, Tensor))
        return out

    def _copied(self, dst: Tensor, src: Tensor, kwargs: Mapping[str, Any]) -> None:
        if not self.has(src):
            return
        if kwargs.get("non_blocking") and _identity(dst) in self._pinned:
            self.num_copies += 1
        else:
            self.waited("`copy_` to the host")

    @staticmethod
    def _note(kept: dict[int, object], tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        kept[storage._cdata] = storage  # kept, so that no other gets its identity


def _identity(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else -1


@contextmanager
def seeming_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[SeemingDevice]:
    """With the streams and events of CUDA that this package asks for."""
    device = SeemingDevice()

    @contextmanager
    def inside(_: object) -> Iterator[None]:
        yield

    def nothing(*_: object) -> None:
        """All is done already."""

    make: Callable[..., Any] = SimpleNamespace
    stream = make(wait_stream=nothing, wait_event=nothing)
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: stream)
    monkeypatch.setattr(torch.cuda, "stream", inside)
    monkeypatch.setattr(
        torch.cuda, "Event", lambda **_: make(record=nothing, synchronize=lambda: device.waited("`synchronize`"))
    )
    with device:
        yield device
