"""Live capacity of a layer: the tokens its experts accept before dropping, read and changed during training.

Libraries keep it in three places: per expert (Hugging Face Switch, our `MoELayer`), one value per layer (Tutel,
DeepSpeed, FastMoE), or one value for the whole model (Megatron's and MegaBlocks' shared config). A view hides the
difference. It holds names only, like the rest of a spec; each call gets the model.

Shape suffixes: E all experts of a layer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Literal, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from lightning_moe_ckpt.errors import ConfigurationError

CapacityScope = Literal["expert", "layer", "model"]
"""Range of one value: an expert, all experts of a layer, or all layers that share the owner."""

Capacity: TypeAlias = "float | tuple[Capacity, ...] | None"
"""A capacity in the library's own unit (a factor, or tokens): plain numbers, which a journal stores exactly."""

_PLACES = 9
"""Decimals that count when a product of floats is rounded up: `10 * 1.1` means 11 tokens, not 12."""


class CapacityView(Protocol):
    """Reads and sets the live capacity of one layer.

    To raise it for a while and put it back::

        before = view.get(model)
        view.set(model, view.scaled(before, factor_E))
        ...
        view.set(model, before)

    `get` returns plain numbers that a journal can store. `set` of such a value restores the live one exactly, also in
    a later process: store `before` to survive a crash. The library reads the value at every forward, so change it at
    step boundaries only; then a forward that activation checkpointing repeats sees the same value. No method
    communicates: every rank has to set the same value at the same boundary, because the sizes of all-to-alls depend
    on it. No method waits for the device.
    """

    @property
    def scope(self) -> CapacityScope:
        """Range of one value."""

    def owner(self, module: nn.Module) -> object:
        """Return the object that holds the value. Layers with the same owner (`is`) share the value: change it once."""

    def get(self, module: nn.Module) -> Capacity:
        """Return the live value."""

    def set(self, module: nn.Module, value: Capacity) -> None:
        """Make `value` the live one, from the next forward on.

        Raises:
            ConfigurationError: the layer cannot work with the value; the message says why.
        """

    def limited(self, module: nn.Module) -> bool:
        """Whether tokens can be dropped at all. If not, `scaled` changes nothing."""

    def scaled(self, value: Capacity, factor_E: Sequence[float]) -> Capacity:
        """Return `value` with expert e's capacity times `factor_E[e]`; the live value does not change.

        With scope `layer` or `model` the single value is multiplied by the largest factor: no expert gets less than its
        factor asks for, and smaller factors have no effect. For scope `model` the caller passes the largest factors
        over all layers of the owner. If all factors are one, the result is `value` itself.
        """


@dataclass(frozen=True)
class AttributeCapacity:
    """One value for a layer or for a model, in plain attributes that are read at every forward."""

    module: str
    """Name of a module."""
    attributes: tuple[str, ...]
    """Dotted paths from it, e.g. `gates.0.capacity_factor` or `config.moe_expert_capacity_factor`. Of a pair
    (training, evaluation) only the first is scaled."""
    scope: CapacityScope = "layer"
    enabled: str | None = None
    """Path of a flag; if it is false, nothing is dropped."""
    positive: str | None = None
    """Path of a flag; if it is true, the library needs values above zero."""

    def owner(self, module: nn.Module) -> object:
        """Return the object that has the first attribute."""
        return _holder(module.get_submodule(self.module), self.attributes[0])[0]

    def get(self, module: nn.Module) -> Capacity:
        """Return a tuple with one value per attribute."""
        root = module.get_submodule(self.module)
        return tuple(attrgetter(path)(root) for path in self.attributes)

    def set(self, module: nn.Module, value: Capacity) -> None:
        """Set each attribute."""
        root = module.get_submodule(self.module)
        if not isinstance(value, tuple) or len(value) != len(self.attributes):
            raise ConfigurationError(
                f"The capacity of `{self.module}` is a tuple of {len(self.attributes)}, got {value!r}. "
                "Give what `get` returned, or what `scaled` made of it."
            )
        if self.positive is not None and attrgetter(self.positive)(root) and any(_number(v) <= 0 for v in value):
            raise ConfigurationError(
                f"`{self.module}` drops almost all tokens with `{self.positive}` and a capacity of {value}: it counts "
                "demand wrongly there. Give a capacity factor above zero."
            )
        for path, each in zip(self.attributes, value, strict=True):
            holder, name = _holder(root, path)
            setattr(holder, name, each)

    def limited(self, module: nn.Module) -> bool:
        """Whether some value is set and not zero; zero means dropless in all libraries."""
        root, value = module.get_submodule(self.module), self.get(module)
        assert isinstance(value, tuple)
        return (self.enabled is None or bool(attrgetter(self.enabled)(root))) and any(_number(v) != 0 for v in value)

    def scaled(self, value: Capacity, factor_E: Sequence[float]) -> Capacity:
        """Return each value times the largest factor."""
        most = max(factor_E)
        assert isinstance(value, tuple)
        return value if _all_one(factor_E) else tuple(_scaled(each, most) for each in value)


@dataclass(frozen=True)
class ExpertCapacity:
    """One value per expert, or one for all of them, in a plain attribute that is read at every forward."""

    module: str
    """Name of a module."""
    attribute: str
    """A number, or one per expert."""
    num_experts: int
    form: Literal["tuple", "tensor"] = "tuple"
    """Form of one value per expert: a tuple, or a tensor `[E]` on the device of the module's parameters."""
    scope: CapacityScope = "expert"

    def owner(self, module: nn.Module) -> object:
        """Return the module."""
        return module.get_submodule(self.module)

    def get(self, module: nn.Module) -> Capacity:
        """Return a number, or a tuple of E numbers."""
        value = getattr(module.get_submodule(self.module), self.attribute)
        if isinstance(value, Tensor):
            # A tensor from `set` carries its numbers; reading the tensor would wait for the device.
            value = getattr(value, "numbers", None) or tuple(value.tolist())
        return value if value is None or isinstance(value, int | float) else tuple(value)

    def set(self, module: nn.Module, value: Capacity) -> None:
        """Set a number as it is, a tuple in the library's form."""
        owner = module.get_submodule(self.module)
        live: object = value
        if isinstance(value, tuple):
            if len(value) != self.num_experts or any(_number(v) <= 0 for v in value):
                raise ConfigurationError(
                    f"`{self.module}` takes one capacity above zero for each of {self.num_experts} experts, got {value}."
                )
            live = _as_tensor(value, owner) if self.form == "tensor" else value
        setattr(owner, self.attribute, live)

    def limited(self, module: nn.Module) -> bool:
        """Whether a capacity is set and not zero."""
        value = self.get(module)
        return isinstance(value, tuple) or _number(value) != 0

    def scaled(self, value: Capacity, factor_E: Sequence[float]) -> Capacity:
        """Return a tuple; integers count tokens and are rounded up."""
        if len(factor_E) != self.num_experts:
            raise ValueError(f"`scaled` got {len(factor_E)} factors for {self.num_experts} experts.")
        if _all_one(factor_E) or (not isinstance(value, tuple) and _number(value) == 0):
            return value
        value_E = value if isinstance(value, tuple) else (value,) * self.num_experts
        return tuple(_scaled(each, factor) for each, factor in zip(value_E, factor_E, strict=True))


def _holder(root: object, path: str) -> tuple[object, str]:
    around, _, name = path.rpartition(".")
    return (attrgetter(around)(root) if around else root), name


def _number(value: Capacity) -> float:
    """Return the number that applies in training; `None` becomes zero, which drops nothing."""
    if isinstance(value, tuple):
        return _number(value[0])
    return 0 if value is None else value


def _scaled(value: Capacity, factor: float) -> Capacity:
    if isinstance(value, tuple):
        return (_scaled(value[0], factor), *value[1:])
    if value is None:
        return None
    return math.ceil(round(value * factor, _PLACES)) if isinstance(value, int) else value * factor


def _all_one(factor_E: Sequence[float]) -> bool:
    return all(factor == 1 for factor in factor_E)


def _as_tensor(value: tuple[Capacity, ...], owner: nn.Module) -> Tensor:
    device = next((p.device for p in owner.parameters()), None)
    tensor = torch.tensor(value, device=device)
    tensor.numbers = value  # type: ignore[attr-defined]  # for `get`
    return tensor
