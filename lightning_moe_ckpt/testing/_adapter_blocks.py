"""Manipulate a model for the contract of adapters: run a layer again with other experts or capacity, take and
restore operators, recompute activations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_moe_ckpt.operators import MoELayerSpec, OperatorSet, RecordKind, StateSchema
from lightning_moe_ckpt.parallel import ParallelGroups
from lightning_moe_ckpt.snapshot._lay_out import region_parts
from lightning_moe_ckpt.snapshot._layout import REGIONS, Field, StateView

_TRIES = 3
"""Numbers of other weights tried per expert: a unit that is off before and after would hide a token."""


@dataclass(frozen=True)
class _Call:
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    rng_state: Tensor


class BlockCalls:
    """Record how MoE blocks are called, until removed, and call them again in the same way.

    Args:
        model: the model, in training mode.
        layers: its MoE layers.
    """

    def __init__(self, model: nn.Module, layers: Sequence[MoELayerSpec]) -> None:
        self._model = model
        self._calls: dict[str, list[_Call]] = {layer.fqn: [] for layer in layers}
        self._handles = [
            model.get_submodule(fqn).register_forward_pre_hook(partial(self._record, calls), with_kwargs=True)
            for fqn, calls in self._calls.items()
        ]

    def remove(self) -> None:
        """Stop recording."""
        for handle in self._handles:
            handle.remove()

    def output(self, layer: MoELayerSpec) -> Tensor:
        """Return the rows of the block's output over all calls, `[T, ...]`."""
        return torch.cat([self._rows(layer, call) for call in self._calls[layer.fqn]])

    def processed(self, layer: MoELayerSpec) -> list[int]:
        """Return the number of rows that depend on each expert."""
        params = dict(self._model.named_parameters(remove_duplicate=False))
        usual, found = self.output(layer), []
        for expert in range(layer.num_experts):
            slices = [params[s.fqn].detach().view(-1)[s.start : s.stop] for s in layer.experts[expert]]
            weights = [piece.clone() for piece in slices]
            changed = torch.zeros(len(usual), dtype=torch.bool, device=usual.device)
            for _ in range(_TRIES):
                for piece in slices:
                    piece.normal_()
                changed |= (self.output(layer) != usual).flatten(1).any(1)
            for piece, weight in zip(slices, weights, strict=True):
                piece.copy_(weight)
            found.append(int(changed.sum()))
        return found

    def _record(self, calls: list[_Call], _block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.append(_Call(_cloned(args), _cloned(kwargs), torch.get_rng_state()))

    def _rows(self, layer: MoELayerSpec, call: _Call) -> Tensor:
        # Routers draw noise, and some change their input in place.
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.set_rng_state(call.rng_state)
            out = self._model.get_submodule(layer.fqn)(*_cloned(call.args), **_cloned(call.kwargs))
        rows = out[0] if isinstance(out, tuple | list) else out
        return cast("Tensor", rows).flatten(0, -2)


class OperatorCopies:
    """Copies of all operators with their optimizer state, by the slices that checkpoints take; and of all buffers."""

    def __init__(self, model: nn.Module, operators: OperatorSet, schema: StateSchema) -> None:
        self._model, self._layers = model, operators.layers
        self._view = StateView(model, operators, schema, {})
        groups = ParallelGroups()
        self._fields: dict[str, list[Field]] = {
            op.name: [
                field
                for region in REGIONS
                for part in region_parts({op.name: RecordKind.FULL}, region, self._view, groups)
                for field in self._view.fields(part)
                if field.key != "present"
            ]
            for op in operators
        }
        self._taken = {name: [self._copy(field) for field in fields] for name, fields in self._fields.items()}
        self._buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        self._extra = {each.fqn: _cloned(each.extra.get(model)) for each in self._layers if each.extra is not None}

    def restore(self, name: str) -> None:
        """Restore one operator."""
        for field, value in zip(self._fields[name], self._taken[name], strict=True):
            param, live = self._view.params[field.part.piece.fqn], self._view.live(field)
            if value is None:
                # An expert that had no token yet has no state yet.
                self._view.schema.drop_state(param)
                continue
            if live is None:
                self._view.schema.ensure_state(param)
                live = self._view.live(field)
            assert live is not None
            live.copy_(value)

    def restore_rest(self) -> None:
        """Restore state outside of operators: buffers and plain attributes."""
        for name, buffer in self._model.named_buffers():
            buffer.copy_(self._buffers[name])
        for layer in self._layers:
            if layer.extra is not None:
                layer.extra.set(self._model, self._extra[layer.fqn])

    def equal(self, name: str, *, own: bool = False) -> bool:
        """Return whether one operator is bitwise equal to its copy.

        Args:
            name: name of the operator.
            own: whether to leave out the step count that experts in one tensor share.
        """
        pairs = zip(self._fields[name], self._taken[name], strict=True)
        return all(equal(self._view.live(field), value) for field, value in pairs if field.per_element or not own)

    def _copy(self, field: Field) -> Tensor | None:
        live = self._view.live(field)
        return None if live is None else live.clone()


@contextmanager
def recomputing(model: nn.Module, layers: Sequence[MoELayerSpec], *, use_reentrant: bool) -> Iterator[None]:
    """Throw the activations of MoE blocks away within the context."""
    blocks = [model.get_submodule(layer.fqn) for layer in layers]
    for block in blocks:
        block.forward = partial(_recomputed, block.forward, use_reentrant)
    try:
        yield
    finally:
        for block in blocks:
            del block.forward


def _recomputed(forward: Callable[..., Any], use_reentrant: bool, *args: Any, **kwargs: Any) -> Any:
    """Run `forward` under activation checkpointing; the reentrant kind takes no keywords and needs inputs with gradients."""

    def run(*inputs: Any) -> Any:
        # Some routers change their input in place, which checkpointing would then begin with again.
        return forward(*(each.clone() if isinstance(each, Tensor) else each for each in inputs), **kwargs)

    return checkpoint(run, *(_requiring(arg) for arg in args), use_reentrant=use_reentrant)


def _requiring(value: Any) -> Any:
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.requires_grad:
        return value
    return value.detach().requires_grad_(mode=torch.is_grad_enabled())


def _cloned(values: Any) -> Any:
    if isinstance(values, Tensor):
        return values.detach().clone()
    if isinstance(values, Mapping):
        return {name: _cloned(value) for name, value in values.items()}
    if type(values) in {tuple, list}:
        return type(values)(_cloned(value) for value in values)
    return values


def equal(a: Tensor | None, b: Tensor | None) -> bool:
    """Return whether two tensors have the same bits, or both are missing."""
    if a is None or b is None:
        return a is b
    return torch.equal(a, b)
