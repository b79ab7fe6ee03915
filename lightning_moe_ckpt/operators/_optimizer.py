"""Access to an optimizer's state by parameter and key: its layout, reading, creating, dropping.

The layout is known before any state exists, so that space can be reserved. "No state yet" is a state of its own:
capture records it, and restore drops the live state.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor
from torch.optim import Optimizer
from xxhash import xxh3_128_hexdigest

from lightning_moe_ckpt.errors import UnsupportedOptimizer
from lightning_moe_ckpt.operators._optimizer_layouts import AdamLayout, Group, StateEntry, StateLayout, layout_of


class StateSchema:
    """Layout of and access to one optimizer's state. Make it with `StateSchema.of`."""

    def __init__(self, optimizer: Optimizer, layout: StateLayout) -> None:
        self.optimizer = optimizer
        self._layout = layout
        self._groups: dict[int, Group] = {}
        self._grouped: tuple[int, int] | None = None

    @classmethod
    def of(cls, optimizer: Optimizer) -> StateSchema:
        """Return the schema of a torch optimizer.

        Raises:
            UnsupportedOptimizer: its state cannot be captured exactly slice by slice; the message says why.
        """
        return cls(optimizer, layout_of(optimizer))

    def entries(self, param: Tensor) -> tuple[StateEntry, ...]:
        """Return all state entries that `param` can have, in a fixed order; none if it is in no group."""
        group = self._group(param)
        return () if group is None else self._layout.entries(group, param)

    def adam_group(self, param: Tensor) -> Group | None:
        """Return the options of the group of `param` if the optimizer is Adam or AdamW, else `None`."""
        return self._group(param) if isinstance(self._layout, AdamLayout) else None

    def has_state(self, param: Tensor) -> bool:
        """Whether the optimizer has state of `param` yet.

        Raises:
            UnsupportedOptimizer: the state is not what the schema says.
        """
        state = self._present(param)
        expected = {entry.key for entry in self.entries(param)}
        if not expected or not state:
            return False
        if set(state) != expected:
            raise UnsupportedOptimizer(
                f"`{type(self.optimizer).__qualname__}` keeps {sorted(state)} for a parameter instead of "
                f"{sorted(expected)}; state beyond the schema would be lost. Do not add to `optimizer.state`."
            )
        return True

    def tensors(self, param: Tensor) -> list[Tensor]:
        """Return the live state tensors of `param`, unchecked; cheap enough for every step."""
        return [v for v in self.optimizer.state.get(param, {}).values() if v is not None]

    def get_state(self, param: Tensor, key: str) -> Tensor | None:
        """Return the live tensor of state `key`, or `None` if there is none yet.

        Raises:
            KeyError: the schema has no such entry for this parameter.
            UnsupportedOptimizer: the tensor is not of the schema's dtype or shape.
        """
        entry = next((each for each in self.entries(param) if each.key == key), None)
        if entry is None:
            raise KeyError(key)
        # Not `state[param]`, which would create an entry.
        value: Tensor | None = self.optimizer.state.get(param, {}).get(key)
        if value is None:
            return None
        shape = param.shape if entry.per_element else ()
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
        group = self._group(param)
        if group is None or self.has_state(param):
            return
        created = self._layout.create(group, param.detach())
        if created:
            self.optimizer.state[param] = created

    def drop_state(self, param: Tensor) -> None:
        """Return to "no state yet": the next step is like the first one."""
        self.optimizer.state.pop(param, None)

    def fingerprint(self) -> str:
        """Digest of class and layout, without learning rates. Optimizers with equal digests can exchange records."""
        lines = [type(self.optimizer).__qualname__]
        for group in self.optimizer.param_groups:
            lines.append(f"group of {len(group['params'])}")
            lines += [str(self._layout.entries(group, param)) for param in group["params"]]
        return xxh3_128_hexdigest("\n".join(lines).encode())

    def _present(self, param: Tensor) -> Mapping[str, Tensor]:
        # A momentum buffer may be there and be None.
        return {k: v for k, v in self.optimizer.state.get(param, {}).items() if v is not None}

    def _group(self, param: Tensor) -> Group | None:
        """Return the group with `param`. Groups can be added or replaced during training (gradual unfreezing)."""
        groups = self.optimizer.param_groups
        found = id(groups), sum(len(group["params"]) for group in groups)
        if found != self._grouped:
            self._groups = {id(p): group for group in groups for p in group["params"]}
            self._grouped = found
        return self._groups.get(id(param))
