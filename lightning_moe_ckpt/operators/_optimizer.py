"""Access to an optimizer's state by parameter and key, and to the options of its parameter groups.

The layout of the state is known before any state exists, so that space can be reserved: from a table, or from a copy of the
optimizer that takes two steps. "No state yet" is a state of its own: capture records it, and restore drops the live state.

Records have the tensors in a parameter's state: by element, as scalars, and of other shapes, such as statistics of rows. Other
state of a class without a table, such as numbers and histories, is in the journal, whole (`DiscoveredSchema.rest`).

A policy that takes everything of one step supports any optimizer. Others restore from different steps only what the optimizer
updates apart: elements, matrices or parameters, which then, replayed alone, get the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import chain, compress
from operator import methodcaller
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Adam, AdamW, Optimizer
from typing_extensions import override
from xxhash import xxh3_128_hexdigest

from lightning_moe_ckpt._logging import rank_logger
from lightning_moe_ckpt.coordination import Exchange
from lightning_moe_ckpt.errors import IdentityMismatch, UnsupportedOptimizer
from lightning_moe_ckpt.operators._copies import Beyond, copied_state, fits, inner_optimizers, is_same, opened, put_back
from lightning_moe_ckpt.operators._coupling import IDENTITY, Group, Reach, wideness
from lightning_moe_ckpt.operators._optimizer_classes import (
    FoundLayout,
    Layout,
    StateEntry,
    layout_of,
    reach_of,
    recorded_value,
)
from lightning_moe_ckpt.parallel import stepped_of

log = rank_logger(__name__)


class StateSchema:
    """Layout of and access to one optimizer's state. Make it with `StateSchema.of`."""

    has_rest = False
    """Whether the optimizer may keep state without a place in records."""
    keeps_whole = False
    """Whether there is state for a parameter as a whole beside scalars."""

    def __init__(self, optimizer: Optimizer, layout: Layout, default_dtype: torch.dtype) -> None:
        self.optimizer = optimizer
        self._layout, self._default = layout, default_dtype
        self.reach = Reach("element")
        """How far the update of an element reaches; not asked about, and `element`, if nothing is restored in parts."""
        self._groups: dict[int, Group] = {}
        self._grouped: tuple[int, int] | None = None

    @classmethod
    def of(
        cls,
        optimizer: Optimizer,
        *,
        in_parts: bool = False,
        mixed: bool = False,
        default_dtype: torch.dtype | None = None,
    ) -> StateSchema:
        """Return the schema of a torch optimizer; the state of a class without a table is found out with a copy. Raises
        `UnsupportedOptimizer` if the state cannot be captured exactly; the message says why.

        `in_parts` says whether parts of the state may be restored from different steps (classes without a table are
        tried then), and `mixed` whether training may go on from such parts. `default_dtype` is torch's default type
        where the optimizer steps; `None` for what it is now.
        """
        layout, default = layout_of(optimizer), default_dtype or torch.get_default_dtype()
        if layout is not None:
            schema = cls(optimizer, layout, default)
        else:
            schema = DiscoveredSchema(optimizer, default, mixed=mixed)
        if in_parts:
            schema.find_reach()
        return schema

    def find_reach(self) -> None:
        """Find out how far the update of an element reaches, as parts of the state are to be restored from different steps.

        Classes of torch in the table are known; all others are tried. Raises `UnsupportedOptimizer` if the update reaches other parameters
        or further than declared, or the class could not be tried.
        """
        name, self.reach = type(self.optimizer).__qualname__, reach_of(self.optimizer)
        if self.reach.coupling == "global":
            raise UnsupportedOptimizer(
                f"`{name}` updates an element by others: {self.reach.shown}. A part of the state cannot be restored without the rest of "
                "it. Use `DenseCheckpoint`, which takes everything at once."
            )

    def rest(self, params: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return copies of all state without a place in records, in types of the journal; empty if there is none."""
        return {}

    def load_rest(self, rest: Mapping[str, Any], params: Mapping[str, Tensor]) -> None:
        """Restore a result of `rest`; call behind `ensure_state` and `drop_state`. No other state beyond records stays."""

    def entries(self, param: Tensor) -> tuple[StateEntry, ...]:
        """Return all state entries that `param` can have, in a fixed order; none if it is in no group."""
        group = self._group(param)
        return () if group is None else self._layout(group, param, self._default)

    def adam_group(self, param: Tensor) -> Group | None:
        """Return the options of the group of `param` if the optimizer is torch's Adam or AdamW, else `None`.

        A registered class keeps the same state, but may step in another way.
        """
        return self._group(param) if type(self.optimizer) in {Adam, AdamW} else None

    def has_state(self, param: Tensor) -> bool:
        """Return whether the optimizer has state of `param` yet. Raises `UnsupportedOptimizer` if the schema says otherwise."""
        # A momentum buffer may be there and be None.
        state = {key for key, value in self.optimizer.state.get(param, {}).items() if value is not None}
        if not (expected := {entry.key for entry in self.entries(param)}) or not state:
            return False
        if state != expected:
            raise UnsupportedOptimizer(
                f"`{type(self.optimizer).__qualname__}` keeps {sorted(state)} for a parameter instead of "
                f"{sorted(expected)}; state beyond the schema would be lost. Do not add to `optimizer.state`."
            )
        return True

    def watch(self, params: Iterable[Tensor]) -> StateWatch:
        """Return a watch over the tensors that make up the state of these parameters."""
        return StateWatch(self.optimizer, params)

    def get_state(self, param: Tensor, key: str) -> Tensor | None:
        """Return the live tensor of state `key`, or `None` if there is none yet, or the optimizer does not train the
        parameter. Raises `KeyError` if the schema has no such entry for this parameter; `UnsupportedOptimizer` if the
        tensor is not of the schema's dtype or shape.
        """
        if (entry := next((each for each in self.entries(param) if each.key == key), None)) is None:
            if self._group(param) is None:
                return None  # it has left the optimizer
            raise KeyError(key)
        # Not `state[param]`, which would create an entry.
        value: Tensor | None = self.optimizer.state.get(param, {}).get(key)
        if value is None:
            return None
        shape = param.shape if entry.per_element else entry.shape
        if value.dtype != entry.dtype or value.shape != shape or not value.is_contiguous():
            raise UnsupportedOptimizer(
                f"State `{key}` is {value.dtype} {tuple(value.shape)}; only {entry.dtype} {tuple(shape)}, contiguous, "
                "can be captured. Leave the optimizer's state as the optimizer makes it."
            )
        return value

    def ensure_state(self, param: Tensor) -> None:
        """Create zero state where there is none, laid out as the optimizer does, before a restore fills slices of it.

        Zero state differs from no state: see `drop_state`.
        """
        if (group := self._group(param)) is None or self.has_state(param):
            return
        fused = group.get("fused")
        created = {
            entry.key: torch.zeros_like(param.detach(), dtype=entry.dtype, memory_format=torch.preserve_format)
            if entry.per_element
            else torch.zeros(entry.shape, dtype=entry.dtype, device=param.device if fused or entry.on_device else "cpu")
            for entry in self.entries(param)
        }
        if created:
            self.optimizer.state[param] = created

    def drop_state(self, param: Tensor) -> None:
        """Return to "no state yet": the next step is like the first one."""
        self.optimizer.state.pop(param, None)

    def fingerprint(self) -> str:
        """Return a digest of class and layout, without learning rates. With equal digests records can be exchanged."""
        lines = [type(self.optimizer).__qualname__]
        for group in self.optimizer.param_groups:
            lines.append(f"group of {len(group['params'])}")
            for param in group["params"]:
                entries = self._layout(group, param, self._default)
                lines += [str(entries), *(f"{entry.key} {entry.shape}" for entry in entries if entry.shape)]
        return xxh3_128_hexdigest("\n".join(lines).encode())

    def _group(self, param: Tensor) -> Group | None:
        """Return the group with `param`. Groups can be added or replaced during training (gradual unfreezing)."""
        groups = self.optimizer.param_groups
        found = id(groups), sum(len(group["params"]) for group in groups)
        if found != self._grouped:
            self._groups = {id(p): group for group in groups for p in group["params"]}
            self._grouped = found
        return self._groups.get(id(param))


def agreed_schema(make: Callable[[], StateSchema], module: nn.Module, exchange: Exchange) -> StateSchema:
    """Return a schema with the widest reach that any rank has found by `make`. Collective over `exchange`, all ranks.

    Ranks must find the same state for parameters with the same name and shape. Raises `UnsupportedOptimizer`, on all ranks, if they do
    not, or if `make` raised it on some rank.
    """
    with exchange.raise_together(UnsupportedOptimizer) as rows:
        schema = make()
        rows.append([schema.reach.coupling, schema.reach.shown, _found_states(schema, module)])
    first = dict[str, tuple[int, str]]()
    for rank, (_, _, states) in enumerate(rows):
        for of, state in states.items():
            other, known = first.setdefault(of, (rank, state))
            if state != known:
                raise UnsupportedOptimizer(
                    f"`{type(schema.optimizer).__qualname__}` keeps {known} for {of} on rank {other}, and {state} on rank {rank}. "
                    "Configure the optimizer alike on all ranks."
                )
    schema.reach = max((Reach(coupling, shown) for coupling, shown, _ in rows), key=wideness)
    return schema


def _found_states(schema: StateSchema, module: nn.Module) -> dict[str, str]:
    """Return the state found for the first parameter of each shape and type in a group, in words; nothing for classes with a table."""
    if not isinstance(schema, DiscoveredSchema):
        return {}
    groups = {id(param): i for i, group in enumerate(schema.optimizer.param_groups) for param in group["params"]}
    firsts = dict[object, tuple[str, Tensor]]()
    for name, param in module.named_parameters():
        key = groups.get(id(stepped_of(param))), param.shape, param.dtype
        firsts.setdefault(key, (f"`{name}` {list(param.shape)}", stepped_of(param)))
    return {
        name: ", ".join(
            f"`{entry.key}` ({str(entry.dtype).removeprefix('torch.')} {'as the parameter' if entry.per_element else list(entry.shape)})"
            for entry in schema.entries(param)
        )
        or "nothing in records"
        for name, param in firsts.values()
    }


class DiscoveredSchema(StateSchema):
    """Schema of an optimizer whose class is in no table. Make it with `StateSchema.of`."""

    has_rest = True

    def __init__(self, optimizer: Optimizer, default_dtype: torch.dtype, *, mixed: bool) -> None:
        self._found, self._mixed = FoundLayout(optimizer), mixed
        super().__init__(optimizer, self._found, default_dtype)
        self._beyond = Beyond(optimizer, self._recorded)
        name, others = type(optimizer).__qualname__, sorted({*self._found.others, *self._found.attributes})
        kept = f", of it whole {', '.join(others)}" if others else ""
        if others and mixed:
            raise UnsupportedOptimizer(
                f"`{name}` keeps {', '.join(others)} beside tensors of the parameter's shape, of which experts of different steps would "
                "need different ones. Use `SparseCheckpoint` or `DenseCheckpoint`, which restore one step."
            )
        log.info("`%s`: state found by trying%s", name, kept, alike=True)

    @property
    def keeps_whole(self) -> bool:  # type: ignore[override]  # kinds of parameters may come later
        return self._found.by_parameter

    @override
    def find_reach(self) -> None:
        if inner := inner_optimizers(self.optimizer):
            raise UnsupportedOptimizer(
                f"`{type(self.optimizer).__qualname__}` keeps state in another optimizer, `{next(iter(inner))}`, which cannot be taken "
                "in parts. Use `DenseCheckpoint`, which takes everything at once."
            )
        if not self._mixed and callable(getattr(self.optimizer, "eval", None)):
            raise UnsupportedOptimizer(
                f"`{type(self.optimizer).__qualname__}.eval` gives validation other weights by state that a repeated step may lack. Use "
                "`DenseCheckpoint`, which repeats none without it."
            )
        super().find_reach()
        if self._found.by_parameter:
            self.reach = max(
                self.reach, Reach("parameter", "it keeps tensors for a parameter as a whole"), key=wideness
            )

    @override
    def has_state(self, param: Tensor) -> bool:
        state = self._opened(param)
        whole = {key for key, value in state.items() if isinstance(value, Tensor)}
        if self._mixed and not whole.issubset(self._recorded(param)):
            raise UnsupportedOptimizer(
                f"`{type(self.optimizer).__qualname__}` keeps {sorted(state)} for a parameter instead of "
                f"{sorted(entry.key for entry in self.entries(param))}, which is what a copy kept; experts of different steps would need different ones."
            )
        return bool(self._recorded(param))

    @override
    def get_state(self, param: Tensor, key: str) -> Tensor | None:
        entry = next((each for each in self.entries(param) if each.key == key), None)
        return None if entry is None else recorded_value(entry, self._opened(param).get(key), param)

    @override
    def watch(self, params: Iterable[Tensor]) -> StateWatch:
        return MixedWatch(self.optimizer, params, wrappers=bool(self._found.wrappers))

    @override
    def rest(self, params: Mapping[str, Tensor]) -> dict[str, Any]:
        inner = {
            name: {"state": Beyond(each).take(params), "groups": groups_state(each)}
            for name, each in inner_optimizers(self.optimizer).items()
        }
        attributes = {name: copied_state(vars(self.optimizer)[name]) for name in self._found.attributes}
        return {"state": self._beyond.take(params), "inner": inner, "attributes": attributes}

    @override
    def load_rest(self, rest: Mapping[str, Any], params: Mapping[str, Tensor]) -> None:
        if not rest:
            return
        wrappers = self._found.wrappers
        put_back(self.optimizer, rest["state"], params, wrappers, self._recorded)
        for name, each in inner_optimizers(self.optimizer).items():
            put_back(each, rest["inner"][name]["state"], params, wrappers)
            load_groups_state(each, rest["inner"][name]["groups"])
        for name, value in rest["attributes"].items():
            setattr(self.optimizer, name, copied_state(value))

    def _opened(self, param: Tensor) -> Mapping[str, Any]:
        state = self.optimizer.state.get(param) or {}
        return opened(state) if self._found.wrappers else state

    def _recorded(self, param: Tensor) -> Collection[str]:
        """Return the keys of a parameter's state that its record has: all entries or none."""
        state, entries = self._opened(param), self.entries(param)
        if state and all(recorded_value(entry, state.get(entry.key), param) is not None for entry in entries):
            return [entry.key for entry in entries]
        return ()


_VALUES = methodcaller("values")


class StateWatch:
    """Tells whether an optimizer's state of some parameters is still made of the same tensors.

    Built-in functions loop over the optimizer's state, without bytecode per parameter, because every step asks.
    """

    def __init__(self, optimizer: Optimizer, params: Iterable[Tensor]) -> None:
        self._optimizer, state = optimizer, optimizer.state
        self._keys, self._states = list(state), list(state.values())
        self._own = [state[param] for param in params if param in state]
        self._values = list(chain.from_iterable(map(_VALUES, self._own)))

    @property
    def tensors(self) -> list[Tensor]:
        """The state's tensors, unchecked; a momentum buffer may be there and be None."""
        return [value for value in self._values if value is not None]

    @property
    def holds(self) -> bool:
        """Return whether the tensors are still the same. New or lost state counts as a change, also of other parameters."""
        state = self._optimizer.state
        return (
            is_same(state, self._keys)
            and is_same(state.values(), self._states)
            and is_same(list(chain.from_iterable(map(_VALUES, self._own))), self._values)
        )


class MixedWatch(StateWatch):
    """Watch over state with tensors of others, and with other values, free to change."""

    def __init__(self, optimizer: Optimizer, params: Iterable[Tensor], *, wrappers: bool) -> None:
        super().__init__(optimizer, params)
        self._wrappers = wrappers
        self._values = self._now()
        self._types = list(map(type, self._values))
        self._are_tensors = [isinstance(value, Tensor) for value in self._values]
        self._tensors: list[Tensor] = list(compress(self._values, self._are_tensors))

    @property
    @override
    def tensors(self) -> list[Tensor]:
        return self._tensors

    @property
    @override
    def holds(self) -> bool:
        state = self._optimizer.state
        if not (is_same(state, self._keys) and is_same(state.values(), self._states)):
            return False
        values = self._now()
        return is_same(list(map(type, values)), self._types) and is_same(
            list(compress(values, self._are_tensors)), self._tensors
        )

    def _now(self) -> list[Any]:
        return list(chain.from_iterable(map(_VALUES, map(opened, self._own) if self._wrappers else self._own)))


def groups_state(optimizer: Optimizer) -> list[dict[str, object]]:
    """Return all fields except the parameters, one mapping per group; tensors are copied."""
    return [{k: copied_state(v) for k, v in group.items() if k not in IDENTITY} for group in optimizer.param_groups]


def load_groups_state(optimizer: Optimizer, state: Sequence[dict[str, object]]) -> None:
    """Set the fields that `groups_state` returned. Live tensors are written in place. Raises `IdentityMismatch` if the optimizer has
    another number of groups.
    """
    groups = optimizer.param_groups
    if len(groups) != len(state):
        raise IdentityMismatch(f"The optimizer has {len(groups)} parameter groups, the checkpoint {len(state)}.")
    for group, fields in zip(groups, state, strict=True):
        for key, value in fields.items():
            group[key] = _restore(group.get(key), value)


def _restore(live: object, value: Any) -> object:
    if not fits(live, value):
        return copied_state(value)
    with torch.no_grad():
        return live.copy_(value)
