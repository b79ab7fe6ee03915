"""Find the parameters of which forward and backward only need a low-precision copy.

Under autocast an fp32 master is often only read through a cast; then storing the cast is exact and half the size. Which
parameters these are depends on their use (a gate inside or outside autocast, an embedding that is added to something),
not on the type of the module. So a probe watches every operation that reads a parameter: views are neutral, a cast to
the autocast precision is evidence for, anything else is evidence against. Without any cast a parameter keeps its
precision.

A parameter is judged as a whole: one expert's use of a stacked tensor counts for all. Operations outside torch's
dispatcher (a Triton kernel given a raw pointer) are not seen; a parameter read only there keeps its precision.

Source: MoEvement (2026), Sec. 3.3, assumes fp16 weights throughout; we differ in watching.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import Self, override

from lightning_moe_ckpt.operators._parameters import byte_interval, storage_key

_CAST, _OTHER = 0, 1
_TO_COPY = torch.ops.aten._to_copy.default  # noqa: SLF001  # what `.to(dtype)` and autocast become
_METADATA_ONLY = frozenset(
    {
        "aten::empty_like",
        "aten::zeros_like",
        "aten::ones_like",
        "aten::full_like",
        "aten::new_empty",
        "aten::new_empty_strided",
        "aten::new_zeros",
        "aten::new_ones",
        "aten::new_full",
    }
)
"""Operations that read shape and dtype of their argument, never its values."""


class ComputeDtypeProbe(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves these untyped
    """Context manager that watches operations; evidence of several iterations adds up.

    It calls every operation unchanged: results, RNG and counters stay the same. Pause it around code that reads
    parameters outside of forward and backward: the optimizer step, snapshots, logging of weights.

    Args:
        module: the model. Parameters are looked up again whenever recording starts.
        autocast_dtype: `torch.bfloat16` or `torch.float16` under mixed precision; `None` without autocast, then
            nothing is watched.
    """

    def __init__(self, module: nn.Module, autocast_dtype: torch.dtype | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._params = dict(module.named_parameters())
        self._index = {fqn: i for i, fqn in enumerate(self._params)}
        self._low = autocast_dtype
        self._flags = torch.zeros(len(self._params), 2, dtype=torch.uint8)
        self._reasons: dict[str, set[str]] = defaultdict(set)
        self._memory: dict[tuple[str, int], list[tuple[int, int, str]]] = {}
        self._recording = False

    @override
    def __enter__(self) -> Self:
        self.resume()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    @override
    def __exit__(self, *exc: object) -> None:
        self.pause()
        super().__exit__(*exc)  # type: ignore[no-untyped-call]

    def pause(self) -> None:
        """Stop recording; operations still pass through."""
        self._recording = False

    def resume(self) -> None:
        """Start recording."""
        self._memory = self._locate()
        self._recording = bool(self._memory)

    def verdict(self) -> dict[str, torch.dtype]:
        """Return the dtype in which a COMPUTE record of each parameter is exact, by first name."""
        return {fqn: self._dtype(fqn, param) for fqn, param in self._params.items()}

    def reasons(self) -> Mapping[str, frozenset[str]]:
        """Return the operations that needed the full precision, by parameter."""
        return {fqn: frozenset(ops) for fqn, ops in self._reasons.items()}

    @override
    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if self._recording:
            for fqn in set(self._read([*args, *kwargs.values()])):
                self._record(func, fqn, out)
        return out

    def _dtype(self, fqn: str, param: Tensor) -> torch.dtype:
        cast, other = self._flags[self._index[fqn]].tolist()
        return self._low if self._low is not None and cast and not other else param.dtype

    def _locate(self) -> dict[tuple[str, int], list[tuple[int, int, str]]]:
        """Return the byte intervals of parameters that could be stored in less, by storage."""
        memory: dict[tuple[str, int], list[tuple[int, int, str]]] = defaultdict(list)
        for fqn, param in self._params.items():
            if self._low is not None and param.numel() and param.dtype in (torch.float32, torch.float64):
                memory[storage_key(param)].append((*byte_interval(param), fqn))
        return dict(memory)

    def _read(self, values: Sequence[Any]) -> Iterator[str]:
        """Yield the parameters whose bytes lie under any tensor among the arguments."""
        for value in values:
            if isinstance(value, list | tuple):
                yield from self._read(value)
            elif type(value) in (Tensor, nn.Parameter) and value.layout is torch.strided and value.numel():
                intervals = self._memory.get(storage_key(value))
                if intervals is not None:
                    start, stop = byte_interval(value)
                    yield from (fqn for first, last, fqn in intervals if first < stop and start < last)

    def _record(self, func: Any, fqn: str, out: Any) -> None:
        if _is_neutral(func):
            return
        if func is _TO_COPY and isinstance(out, Tensor) and out.dtype == self._low:
            self._flags[self._index[fqn], _CAST] = 1
            return
        self._flags[self._index[fqn], _OTHER] = 1
        self._reasons[fqn].add(str(func))


@cache
def _is_neutral(func: Callable[..., Any]) -> bool:
    """Whether an operation does not read values: a view, or one that reads only the shape."""
    schema = getattr(func, "_schema", None)
    if schema is None:
        return False
    aliased = [argument.alias_info for argument in schema.arguments if argument.alias_info is not None]
    return schema.name in _METADATA_ONLY or (bool(aliased) and not any(alias.is_write for alias in aliased))
