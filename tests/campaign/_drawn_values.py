"""State in plain places: values of many kinds that training moves and reads, each an attribute of one of the user's objects."""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from lightning_moe_ckpt.moe import MoELayer

Place = Literal["module", "part", "layer", "object", "callback", "stated", "data"]
"""Whose attribute it is: the module's, that of the model in it or of an MoE layer, of an object in a list, of a callback, or of the data set."""


@dataclass
class Box:
    """A number of its own."""

    number: float = 1.0


class Numbers(list[float]):
    """A list of the user's."""


def _put(value: Any, key: Any, number: Any) -> Any:
    value[key] = number
    return value


def _grown(value: Any, number: float) -> Any:
    value.append(number)
    return value


def _boxed(value: Box, number: float) -> Box:
    value.number = number
    return value


Kind = tuple[Callable[[], Any], Callable[[Any, float], Any], Callable[[Any], float]]
VALUES: Mapping[str, Kind] = {
    "late": (lambda: None, lambda _, number: number, lambda value: value or 0.0),
    "decimal": (lambda: Decimal(1), lambda _, number: Decimal(number), float),
    "tensor": (lambda: torch.ones(2), lambda value, number: 0.5 * value + number, lambda value: value.sum().item()),
    "in_place": (
        lambda: torch.ones(2),
        lambda value, number: value.mul_(0.5).add_(number),
        lambda value: value[0].item(),
    ),
    "unseen": (
        lambda: torch.ones(2),
        lambda value, number: (value.data.fill_(number), value)[1],
        lambda value: value[0].item(),
    ),
    "array": (lambda: np.ones(3), lambda value, number: _put(value, 1, number), lambda value: float(value.sum())),
    "list": (lambda: [1.0, 1.0], lambda value, number: _put(value, 1, number), sum),
    "grows": (list, _grown, lambda value: sum(value[-3:])),
    "dict": (
        lambda: {"a": {"b": 1.0}},
        lambda value, number: _put(value, "a", {"b": number}),
        lambda value: value["a"]["b"],
    ),
    "deque": (lambda: deque([1.0] * 3, maxlen=3), _grown, sum),
    "counter": (
        Counter,
        lambda value, number: _put(value, "n", value["n"] + int(number > 0)),
        lambda value: value["n"] % 5,
    ),
    "set": (lambda: {1.0}, lambda _, number: {number, 0.5}, lambda value: sum(sorted(value))),
    "dataclass": (Box, _boxed, lambda value: value.number),
    "tuple": (
        lambda: (Box(), 1.0),
        lambda value, number: (_boxed(value[0], number), number),
        lambda value: value[0].number + value[1],
    ),
    "fresh": (
        lambda: None,
        lambda _, number: {"box": Box(number)},
        lambda value: value["box"].number if value else 0.0,
    ),
    "own_list": (Numbers, _grown, lambda value: sum(value[-3:])),
    "validated": (
        lambda: None,
        lambda value, number: value if value is None else _put(value, "train", _grown(value["train"], number)),
        lambda value: sum(value["train"][-3:]) + 0.1 * len(value["seen"]) if value is not None else 0.0,
    ),
}
"""What makes each, moves it by the number of a step, and reads it."""


class Remembering(Callback):
    """Holds what others move."""


class Stated(Callback):
    """Holds the same beside a state of its own, which has none of it."""

    def __init__(self) -> None:
        self.batches = 0

    @override
    def on_train_batch_end(self, *args: Any) -> None:
        self.batches += 1

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.batches}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.batches = state_dict["batches"]


class Remembers(LightningModule):
    """Scales its loss by what it remembers of earlier ones."""

    remembered: tuple[tuple[str, Place], ...] = ()

    @override
    def on_fit_start(self) -> None:
        super().on_fit_start()
        self._objects = [SimpleNamespace()]
        for at, (kind, _) in enumerate(self.remembered):
            for owner in self._owners(at):
                if not hasattr(owner, f"value{at}"):
                    object.__setattr__(owner, f"value{at}", VALUES[kind][0]())

    @override
    def on_validation_start(self) -> None:
        """Make what only validation does, the sanity check first; what it notes does not depend on weights."""
        super().on_validation_start()
        for at, (kind, _) in enumerate(self.remembered):
            for owner in self._owners(at) if kind == "validated" else ():
                if getattr(owner, f"value{at}", None) is None:
                    object.__setattr__(owner, f"value{at}", defaultdict[str, list[float]](list))
                getattr(owner, f"value{at}")["seen"].append(1.0)

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        found = super().training_step(batch, batch_idx)
        loss: Any = found["loss"] if isinstance(found, dict) else found
        if loss is None:
            return found
        scale = 1.0
        for at, (kind, _) in enumerate(self.remembered):
            _, move, read = VALUES[kind]
            for owner in self._owners(at):
                if not hasattr(owner, f"value{at}"):  # of data that Lightning has loaded anew
                    object.__setattr__(owner, f"value{at}", VALUES[kind][0]())
                scale += 0.01 * math.tanh(read(getattr(owner, f"value{at}")))
                number = loss.item() if math.isfinite(loss.item()) else 1.0
                object.__setattr__(owner, f"value{at}", move(getattr(owner, f"value{at}"), number))
        scaled = loss * scale
        return {**found, "loss": scaled} if isinstance(found, dict) else scaled

    def _owners(self, at: int) -> list[Any]:
        trainer: Trainer = self.trainer
        place = self.remembered[at][1]
        if place == "callback":
            return [callback for callback in trainer.callbacks if isinstance(callback, Remembering)]  # type: ignore[attr-defined]
        if place == "stated":
            return [callback for callback in trainer.callbacks if isinstance(callback, Stated)]  # type: ignore[attr-defined]
        if place == "data":
            return [trainer.train_dataloader.dataset] if trainer.train_dataloader is not None else []
        parts = self.modules() if self.model is not None else ()
        layers = [part for part in parts if hasattr(part, "experts") and not isinstance(part, MoELayer)]
        owners: dict[str, list[Any]] = {"module": [self], "part": [self.model], "object": self._objects}
        owners["layer"] = layers[:1]
        return owners[place]
