"""Live state of a layer that is neither weight nor optimizer state: capacity, selection-only bias, plain attributes.

*Capacity*: the tokens that experts accept before dropping. Libraries keep it in three places: per expert (Hugging Face
Switch, our `MoELayer`), one value per layer (Tutel, DeepSpeed, FastMoE), or one value for the whole model (Megatron's
and MegaBlocks' shared config). A view hides the difference.

*Selection-only bias*: DeepSeek-V3, torchtitan, Megatron, LitGPT's grouped router and nanochat balance load by a value
per expert that they add to the scores used for choosing, not to the weights, and train it outside of forward. A view
adds a second, temporary term and leaves the trained bias unchanged. Source: Wang et al. (2024), auxiliary-loss-free
load balancing.

*Plain attributes*, such as a running load or a gate's noise, are captured with the step journal between two batches,
and restored before the first batch of a resumed run. Buffers do not need this: all of them are captured, including
non-persistent ones.

Views hold names only, like the rest of a spec; each call gets the model.

Shape suffixes: E all experts of a layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Literal, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from lightning_moe_ckpt.errors import ConfigurationError
from lightning_moe_ckpt.operators._copies import fits
from lightning_moe_ckpt.operators._parameters import own_parameters

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
    """A value for a layer or for a model, in plain attributes that are read at every forward."""

    module: str
    """Name of a module."""
    attributes: tuple[str, ...]
    """Dotted paths from the module, e.g. `gates.0.capacity_factor` or `config.moe_expert_capacity_factor`. Of a pair
    (training, evaluation) only the first is scaled."""
    scope: CapacityScope = "layer"
    enabled: str | None = None
    """Path of a flag; if it is false, nothing is dropped."""
    positive: str | None = None
    """Path of a flag; if it is true, the library needs values above zero."""

    @property
    def places(self) -> tuple[tuple[str, str], ...]:
        """(name of the module, attribute) of each value."""
        return tuple((self.module, path) for path in self.attributes)

    def owner(self, module: nn.Module) -> object:
        """Return the object that has the first attribute."""
        return _holder(module.get_submodule(self.module), self.attributes[0])[0]

    def get(self, module: nn.Module) -> Capacity:
        """Return a tuple with one value per attribute."""
        return tuple(attrgetter(path)(module.get_submodule(self.module)) for path in self.attributes)

    def set(self, module: nn.Module, value: Capacity) -> None:
        """Set each attribute. Raises `ConfigurationError` for another number of values, or a value that the layer cannot take."""
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
        for path, item in zip(self.attributes, value, strict=True):
            holder, name = _holder(root, path)
            setattr(holder, name, item)

    def limited(self, module: nn.Module) -> bool:
        """Whether some value is set and not zero; zero means dropless in all libraries."""
        root, value = module.get_submodule(self.module), self.get(module)
        assert isinstance(value, tuple)
        return (self.enabled is None or bool(attrgetter(self.enabled)(root))) and any(_number(v) != 0 for v in value)

    def scaled(self, value: Capacity, factor_E: Sequence[float]) -> Capacity:
        """Return each value times the largest factor."""
        most = max(factor_E)
        assert isinstance(value, tuple)
        return value if set(factor_E) == {1} else tuple(_scaled(item, most) for item in value)


@dataclass(frozen=True)
class ExpertCapacity:
    """Capacity per expert, or for all experts, in a plain attribute that every forward reads."""

    module: str
    """Name of a module."""
    attribute: str
    """Number for all experts, or one per expert."""
    num_experts: int
    form: Literal["tuple", "tensor"] = "tuple"
    """Form of one value per expert: a tuple, or a tensor `[E]` on the device of the module's parameters."""
    scope: CapacityScope = "expert"

    @property
    def places(self) -> tuple[tuple[str, str], ...]:
        """(name of the module, attribute) of the value."""
        return ((self.module, self.attribute),)

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
        """Set a number as it is, a tuple in the library's form. Raises `ConfigurationError` unless every expert gets more than zero."""
        owner = module.get_submodule(self.module)
        live: object = value
        if isinstance(value, tuple):
            if len(value) != self.num_experts or any(_number(v) <= 0 for v in value):
                raise ConfigurationError(
                    f"`{self.module}` takes one capacity above zero for each of {self.num_experts} experts, "
                    f"got {value}."
                )
            live = _as_tensor(value, owner) if self.form == "tensor" else value
        setattr(owner, self.attribute, live)

    def limited(self, module: nn.Module) -> bool:
        """Whether a capacity is set and not zero."""
        value = self.get(module)
        return isinstance(value, tuple) or _number(value) != 0

    def scaled(self, value: Capacity, factor_E: Sequence[float]) -> Capacity:
        """Return a tuple; integers count tokens and are rounded up. Raises `ValueError` unless there is one factor per expert."""
        if len(factor_E) != self.num_experts:
            raise ValueError(f"`scaled` got {len(factor_E)} factors for {self.num_experts} experts.")
        if set(factor_E) == {1} or (not isinstance(value, tuple) and _number(value) == 0):
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


def _as_tensor(value: tuple[Capacity, ...], owner: nn.Module) -> Tensor:
    device = next((p.device for p in owner.parameters()), None)
    tensor = torch.tensor(value, device=device)
    tensor.numbers = value  # type: ignore[attr-defined]  # for `get`
    return tensor


@dataclass(frozen=True)
class BiasView:
    """Place of a layer's selection-only bias; `add` adds a temporary term to it."""

    layer: str
    """Name of the module within whose forward the bias is read: the MoE block."""
    owner: str
    """Name of the module that owns the bias."""
    attribute: str
    """A buffer or parameter of E elements."""

    def trained(self, module: nn.Module) -> Tensor:
        """Return the live trained bias in its own shape, without a copy. Do not change the tensor."""
        bias: Tensor = getattr(module.get_submodule(self.owner), self.attribute)
        return bias

    def add(self, module: nn.Module, term_E: Tensor) -> Callable[[], None]:
        """Add `term_E` to the bias in every forward of the layer until the function returned is called.

        Before and after each forward the trained bias is the same tensor with the same bits and version. So updates,
        broadcasts and snapshots never see the term, and nothing of it stays after removal.

        Args:
            module: the model.
            term_E: shape `[E]`, on the device of the bias, read at every forward. To change it, write to it in place,
                at step boundaries only and equally on all ranks: a forward that activation checkpointing repeats must
                choose the same experts again.

        Returns:
            A function that removes the term.
        """
        restore: list[Callable[[], None]] = []
        owner = module.get_submodule(self.owner)

        def before(_called: nn.Module, _args: tuple[Any, ...]) -> None:
            restore.append(_replace(owner, self.attribute, term_E))

        def after(_called: nn.Module, _args: tuple[Any, ...], _out: object) -> None:
            if restore:
                restore.pop()()

        layer = module.get_submodule(self.layer)
        # Other hooks, before and after the forward, see the trained bias.
        ending = layer.register_forward_hook(after, always_call=True, prepend=True)
        beginning = layer.register_forward_pre_hook(before)

        def remove() -> None:
            beginning.remove()
            ending.remove()

        return remove


def _replace(owner: nn.Module, attribute: str, term_E: Tensor) -> Callable[[], None]:
    """Replace the bias by its sum with `term_E`; return a function that puts the bias back."""
    # Not by `setattr`, which refuses a tensor in place of a parameter and would unregister a buffer.
    slots: dict[str, Any] = (
        owner._parameters if attribute in own_parameters(owner) else owner._buffers  # noqa: SLF001
    )
    trained = slots[attribute]
    with torch.no_grad():
        total = trained + term_E.to(trained.dtype).view_as(trained)
    slots[attribute] = nn.Parameter(total, requires_grad=False) if isinstance(trained, nn.Parameter) else total

    def back() -> None:
        slots[attribute] = trained

    return back


class ExtraState(Protocol):
    """Gets and sets the plain attributes of a layer."""

    def get(self, module: nn.Module) -> Mapping[str, Any]:
        """Return the state at a step boundary: numbers, strings, tensors, `None`, and lists or dicts of them.

        The caller copies it. Each rank gets its own state back.
        """

    def set(self, module: nn.Module, state: Mapping[str, Any]) -> None:
        """Restore `get`'s result, possibly of another process; tensors are on the CPU."""


@dataclass(frozen=True)
class AttributeState:
    """State in plain attributes of modules. `get` leaves an absent attribute out, and `set` removes the attribute again."""

    places: tuple[tuple[str, str], ...]
    """(name of a module, attribute)."""

    def get(self, module: nn.Module) -> dict[str, Any]:
        """Return values by `module.attribute`."""
        found = {f"{fqn}.{name}": (module.get_submodule(fqn), name) for fqn, name in self.places}
        return {key: getattr(owner, name) for key, (owner, name) in found.items() if hasattr(owner, name)}

    def set(self, module: nn.Module, state: Mapping[str, Any]) -> None:
        """Write in place into tensors of the same form, so that other references see the values; assign all other values."""
        for fqn, name in self.places:
            owner, key = module.get_submodule(fqn), f"{fqn}.{name}"
            live = getattr(owner, name, None)
            if key not in state:
                if hasattr(owner, name):
                    delattr(owner, name)
            elif fits(live, state[key]):
                with torch.no_grad():
                    live.copy_(state[key])
            else:
                setattr(owner, name, _placed(state[key], owner))


def _placed(value: Any, owner: nn.Module) -> Any:
    """Copy a tensor to the device of the module's tensors; return other values as they are."""
    if not isinstance(value, Tensor):
        return value
    near = next(iter([*owner.parameters(), *owner.buffers()]), None)
    return value.clone() if near is None else value.to(near.device, copy=True)
