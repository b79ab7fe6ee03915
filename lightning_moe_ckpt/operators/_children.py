"""Direct children and own parameters of a module, including what `named_children` leaves out."""

from __future__ import annotations

from torch import nn


def child_slots(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return direct children by name: a module may appear under two names, and an empty place is `None`."""
    return dict(module._modules)  # noqa: SLF001  # named_children drops empty places and second names


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that the module owns itself, by attribute name."""
    return {name: param for name, param in module._parameters.items() if param is not None}  # noqa: SLF001  # as above
