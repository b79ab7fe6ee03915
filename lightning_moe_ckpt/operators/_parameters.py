"""Index of a module's parameters by first name; refuses those that cannot be captured slice by slice.

Also reads one level of a module: its children and own parameters, including what `named_children` leaves out.

A slice is a flat interval of a contiguous tensor. A parameter without such intervals is refused before training starts,
with its name and the reason. Parameters that share bytes are found by storage, not by module type.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from lightning_moe_ckpt.errors import UnknownLayout

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)
_FROZEN_DTYPES = (*_DTYPES, torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool)
"""Types of parameters that do not train, such as quantised weights."""
_MAX_NAMED = 8


class ParameterIndex:
    """The parameters of `module`, validated.

    Args:
        module: the model as it will train.

    Raises:
        UnknownLayout: a parameter is no flat interval of memory; the message has its name and the reason.
    """

    def __init__(self, module: nn.Module) -> None:
        self.params: dict[str, nn.Parameter] = {}
        """Parameters by first name, in the order of `named_parameters()`."""
        self._names: dict[int, str] = {}
        for fqn, param in module.named_parameters(remove_duplicate=False):
            if id(param) not in self._names:
                self._names[id(param)] = fqn
                self.params[fqn] = param
        _refuse({fqn: reason for fqn, param in self.params.items() if (reason := _refusal(param))})

    def name(self, param: Tensor) -> str:
        """Return the first name of a parameter. Raises `KeyError` if it is not the module's."""
        return self._names[id(param)]

    def under(self, prefix: str) -> dict[str, nn.Parameter]:
        """Return the parameters whose first name lies in the module `prefix`."""
        head = join(prefix, "")
        return {fqn: param for fqn, param in self.params.items() if fqn.startswith(head)}

    def sharing(self) -> Iterator[tuple[str, ...]]:
        """Yield groups of two or more parameters whose bytes overlap, e.g. two `nn.Parameter` over one tensor.

        Disjoint pieces of one storage (a flattened RNN) do not share. A parameter with two names appears once in
        `params` and forms no group.
        """
        by_storage: dict[tuple[str, int], list[tuple[int, int, str]]] = defaultdict(list)
        for fqn, param in self.params.items():
            if param.numel():
                by_storage[storage_key(param)].append((*byte_interval(param), fqn))
        for intervals in by_storage.values():
            yield from _overlapping(sorted(intervals))


def storage_key(tensor: Tensor) -> tuple[str, int]:
    """Return a key of the memory under a tensor. Tensors without memory (meta) never share."""
    storage = tensor.untyped_storage()
    if tensor.device.type == "meta":
        return "meta", int(storage._cdata)  # noqa: SLF001  # the storage object itself: it has no address
    return str(tensor.device), storage.data_ptr()


def byte_interval(tensor: Tensor) -> tuple[int, int]:
    """Return first and one past the last byte of a tensor in its storage; the tensor must have elements."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = int(tensor.storage_offset())
    return start * tensor.element_size(), (start + int(last) + 1) * tensor.element_size()


def child_slots(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return direct children by name: a module may appear under two names, and an empty place is `None`."""
    return dict(module._modules)  # noqa: SLF001  # named_children drops empty places and second names


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that the module owns itself, by attribute name."""
    return {name: param for name, param in module._parameters.items() if param is not None}  # noqa: SLF001  # as above


def join(prefix: str, name: str) -> str:
    """Return the name in the model of `name` in the module `prefix`, which is empty for the model itself."""
    return f"{prefix}.{name}" if prefix else name


def _refuse(reasons: dict[str, str]) -> None:
    if not reasons:
        return
    named = [f"`{fqn}` {reason}" for fqn, reason in list(reasons.items())[:_MAX_NAMED]]
    more = f" (and {len(reasons) - _MAX_NAMED} more)" if len(reasons) > _MAX_NAMED else ""
    raise UnknownLayout(
        f"These parameters cannot be captured exactly, slice by slice: {'; '.join(named)}{more}. Convert them before "
        "fit, or keep what is not trained in buffers."
    )


def _refusal(param: nn.Parameter) -> str | None:
    if type(param).__name__ == "UninitializedParameter":
        return "has no shape yet; run one forward before fit"
    if getattr(param, "_is_flat_param", False) or getattr(param, "_fsdp_flattened", False):
        return "belongs to FSDP's flat parameter, whose shards cut through operators; FSDP is not supported"
    if type(param).__name__ == "DTensor":
        return "is a DTensor (FSDP2 or tensor parallel), whose slices live on several ranks; not supported"
    if type(param) is not nn.Parameter:
        return f"is a tensor subclass ({type(param).__name__}), whose bytes are not one flat interval; not supported"
    return _layout_refusal(param)


def _layout_refusal(param: nn.Parameter) -> str | None:
    if param.layout is not torch.strided:
        return f"has layout {param.layout}; only strided tensors are supported"
    if param.dtype not in (_DTYPES if param.requires_grad else _FROZEN_DTYPES):
        return f"has dtype {param.dtype} (quantised or complex); supported are float32, float64, bfloat16, float16, float8_e4m3fn, float8_e5m2"
    if not param.is_contiguous():
        return "is not contiguous (channels_last?); make it so with `.contiguous()` before fit"
    return None


def _overlapping(intervals: list[tuple[int, int, str]]) -> Iterator[tuple[str, ...]]:
    group, reach = [intervals[0][2]], intervals[0][1]
    for start, stop, fqn in intervals[1:]:
        if start >= reach:
            if len(group) > 1:
                yield tuple(group)
            group = []
        group.append(fqn)
        reach = max(reach, stop)
    if len(group) > 1:
        yield tuple(group)
