"""A module's direct children and parameters, with the empty places that `named_children` leaves out."""

from __future__ import annotations

from torch import nn


def child_slots(module: nn.Module) -> dict[str, nn.Module | None]:
    """Direct children by name, also one module under two names, and `None` where a place is kept empty."""
    return dict(module._modules)  # noqa: SLF001  # named_children drops empty places and second names


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters that the module owns itself, by attribute name."""
    return {name: param for name, param in module._parameters.items() if param is not None}  # noqa: SLF001  # as above
