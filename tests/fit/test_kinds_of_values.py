"""Values of every kind, in every place, are what they were, in place, in a life that begins with the same code."""

from __future__ import annotations

import random
from array import array
from collections import Counter, OrderedDict, UserDict, UserList, defaultdict, deque, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from enum import Enum, IntEnum
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Sampler, Subset
from torchmetrics import MeanMetric

from lightning_moe_ckpt.fit._owners import MovedAttributes
from lightning_moe_ckpt.journal import decode, encode


class Colour(Enum):
    RED, GREEN = 1, 2


class Level(IntEnum):
    LOW, HIGH = 1, 2


class Metre(float):
    pass


class Ring(list[float]):
    def __init__(self, items: list[float]) -> None:
        super().__init__(items)
        self.turns = 0


Pair = namedtuple("Pair", "left right")  # noqa: PYI024  # as users write it


@dataclass
class Box:
    weight: float = 1.0


@dataclass(frozen=True)
class Key:
    name: str


class Slotted:
    __slots__ = ("weight",)

    def __init__(self) -> None:
        self.weight = 1.0


class Stateful:
    def __init__(self) -> None:
        self.weight, self.loads = [1.0], 0

    def state_dict(self) -> dict[str, Any]:
        return {"weight": self.weight}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weight, self.loads = state["weight"], self.loads + 1


class Half(Stateful):
    """Has something that its state does not name."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = list[float]()


def _inner() -> dict[str, Any]:
    param = nn.Parameter(torch.ones(2))
    return {"param": param, "optimizer": torch.optim.SGD([param], 0.1, momentum=0.9)}


def _steps(each: dict[str, Any]) -> None:
    each["param"].grad = torch.full((2,), 0.3)
    each["optimizer"].step()
    each["param"].grad = None


class Unseen:
    """What lets nobody look at it, as proxies of nothing do."""

    @property
    def __class__(self) -> Any:
        raise RuntimeError("unbound")

    @__class__.setter
    def __class__(self, kind: Any) -> None:
        raise RuntimeError("unbound")


class Wrapper(Tensor):
    """A tensor without memory of its own."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise RuntimeError(f"no {func}")


def _sets(name: str, value: Any) -> Callable[[Any], Any]:
    return lambda each: setattr(each, name, value)


def _turns(ring: Ring) -> None:
    ring.append(2.0)
    ring.turns = 3


KINDS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "none_to_float": (lambda: None, lambda _: 0.1),
    "float_to_tensor": (lambda: 1.0, lambda _: torch.tensor([0.1, float("nan")])),
    "float_to_none": (lambda: 1.0, lambda _: None),
    "int_to_float": (lambda: 1, lambda _: 1.0),
    "zero": (lambda: 0.0, lambda _: -0.0),
    "complex": (lambda: 1j, lambda _: complex(-0.0, 0.1)),
    "bytes": (lambda: b"", lambda _: b"\x00\xff"),
    "long_text": (lambda: "", lambda _: "x" * 5000),
    "decimal": (lambda: Decimal(1), lambda _: Decimal("0.10")),
    "enum": (lambda: Colour.RED, lambda _: Colour.GREEN),
    "int_enum": (lambda: Level.LOW, lambda _: Level.HIGH),
    "own_float": (lambda: Metre(1), lambda _: Metre(0.1)),
    "numpy_scalar": (lambda: np.float32(1), lambda _: np.float32(0.1)),
    "function": (lambda: max, lambda _: min),
    "tuple": (lambda: (1.0,), lambda _: (0.1, torch.ones(2))),
    "named_tuple": (lambda: Pair(1, 2), lambda _: Pair(2, [3])),
    "frozenset": (frozenset, lambda _: frozenset({0.1, Colour.RED})),
    "list_item": (lambda: [1.0, 2.0], lambda each: each.__setitem__(0, 0.1)),
    "own_list": (lambda: Ring([1.0]), _turns),
    "nested": (lambda: {"a": {"b": [1.0]}}, lambda each: each["a"]["b"].append(Box(0.1))),
    "keys": (dict, lambda each: each.update({Colour.RED: 1, (1, "a"): 2, Key("x"): 3})),
    "order": (lambda: OrderedDict(a=1, b=2), lambda each: each.move_to_end("a")),
    "set": (lambda: {1.0}, lambda each: each.symmetric_difference_update({1.0, 0.1})),
    "deque_full": (lambda: deque([1.0, 2.0], maxlen=2), lambda each: each.append(0.1)),
    "new_deque": (lambda: None, lambda _: deque([0.1], maxlen=2)),
    "counter": (lambda: Counter(a=1), lambda each: each.update(a=3, b=1)),
    "defaultdict": (lambda: defaultdict(list), lambda each: each["a"].append(0.1)),
    "user_dict": (lambda: UserDict(a=1.0), lambda each: each.update(a=0.1)),
    "user_list": (lambda: UserList([1.0]), lambda each: each.append(0.1)),
    "machine_values": (lambda: array("f", [1.0]), lambda each: each.extend([0.1])),
    "new_machine_values": (lambda: None, lambda _: array("q", [2**40])),
    "optimizer": (_inner, _steps),
    "bytearray": (lambda: bytearray(2), lambda each: each.extend(b"\x01")),
    "array": (lambda: np.ones((2, 2)), lambda each: each.__setitem__((0, 1), 0.1)),
    "array_view": (lambda: np.ones((4, 4), np.int16)[::2, 1:], lambda each: each.__setitem__((1, 2), 7)),
    "new_array": (lambda: None, lambda _: np.arange(3.0)),
    "tensor": (lambda: torch.ones(2), lambda each: (each.mul_(0.1), None)[1]),
    "tensor_data": (lambda: torch.ones(2), lambda each: (each.data.mul_(0.1), None)[1]),
    "bfloat16": (lambda: torch.ones(2, dtype=torch.bfloat16), lambda each: (each.mul_(0.1), None)[1]),
    "averages": (
        lambda: {"a": torch.ones(2), "b": torch.ones(3)},
        lambda each: [tensor.mul_(0.1) for tensor in each.values()] and None,
    ),
    "loss": (lambda: None, lambda _: (torch.ones(1, requires_grad=True) * 2).sum()),
    "dataclass": (Box, _sets("weight", 0.1)),
    "slots": (Slotted, _sets("weight", 0.1)),
    "namespace": (lambda: SimpleNamespace(weight=1.0), _sets("weight", [0.1])),
    "new_object": (lambda: None, lambda _: Box(0.1)),
    "stateful": (Stateful, lambda each: each.weight.append(0.1)),
    "half_stateful": (Half, lambda each: (each.weight.append(0.1), each.seen.append(0.2))[1]),
    "otherwise_stateful": (Half, lambda each: each.seen.append(0.2)),
    "module": (lambda: [nn.LayerNorm(2)], lambda each: (each[0].weight.data.mul_(0.1), None)[1]),
    "metric": (MeanMetric, lambda each: each.update(0.1)),
    "new_generator": (lambda: None, lambda _: np.random.default_rng(3)),
    "new_python_generator": (lambda: None, lambda _: random.Random(3)),
}
"""How the user's code makes a value, and what training does to it: what that returns takes its place, unless it is `None`."""


class Holder:
    """An object within an object."""


class Items(Dataset[int]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return index


class Turns(Sampler[int]):
    def __iter__(self) -> Any:
        return iter(range(4))

    def __len__(self) -> int:
        return 4


class Collate:
    def __call__(self, items: Any) -> Any:
        return items


class Life:
    """What a process makes, with values of all kinds in all places."""

    def __init__(self, kinds: dict[str, Any]) -> None:
        items, other, sampler, collate = Items(), Items(), Turns(), Collate()
        made: Any = LightningModule()
        self.callback: Any = Callback()
        made.part, made.helper, datamodule = nn.Linear(2, 2), Holder(), LightningDataModule()
        loader: Any = DataLoader(ConcatDataset([Subset(items, [0, 1]), other]), sampler=sampler, collate_fn=collate)
        validation: Any = DataLoader(Items())
        self.places: dict[str, Any] = {
            "module": made,
            "callback.Callback": self.callback,
            "datamodule": datamodule,
            "module.helper": made.helper,
            "loader0": loader,
            "loader0.dataset.datasets.0.dataset": items,
            "loader0.dataset.datasets.1": other,
            "loader0.sampler": sampler,
            "loader0.collate_fn": collate,
            "validation0.dataset": validation.dataset,
        }
        for owner in self.places.values():
            for name, (make, _) in kinds.items():
                object.__setattr__(owner, name, make())
        # A class of the user's: in plain ones of Lightning's own nothing is the user's.
        Callback_, callbacks = type("Callback", (Callback,), {}), [self.callback]
        self.callback.__class__ = Callback_
        loops: Any = SimpleNamespace(
            _combined_loader=SimpleNamespace(flattened=[loader]), _should_reload_train_dl=False
        )
        trainer: Any = SimpleNamespace(
            callbacks=callbacks, datamodule=datamodule, fit_loop=loops, val_dataloaders=validation, optimizers=[]
        )
        self.module, self.trainer = made, trainer
        self.moved = MovedAttributes(trainer, made, ())
        self.moved.look_at_data()
        self.moved.look()


def train(life: Life, kinds: dict[str, Any]) -> None:
    for owner in life.places.values():
        for name, (_, move) in kinds.items():
            new = move(getattr(owner, name))
            if new is not None or name == "float_to_none":
                object.__setattr__(owner, name, new)


def content(value: Any) -> Any:
    """What a value is, in types that compare bit by bit."""
    inner: Any = repr(value)
    if isinstance(value, Tensor):
        inner = value.dtype, value.shape, value.detach().reshape(-1).contiguous().view(torch.uint8).tolist()
    elif isinstance(value, np.ndarray | np.generic):
        inner = value.dtype.str, value.shape, value.tobytes()
    elif isinstance(value, dict):
        inner = [(content(key), content(item)) for key, item in value.items()], _attributes(value)
    elif isinstance(value, list | tuple | deque):
        inner = getattr(value, "maxlen", None), [content(item) for item in value], _attributes(value)
    elif isinstance(value, nn.Module):
        inner = [*map(content, value.state_dict().values()), content(getattr(value, "mean_value", 0))]
    elif isinstance(value, torch.optim.Optimizer):
        inner = content(value.state_dict())
    elif isinstance(value, np.random.Generator):
        inner = value.bit_generator.state
    elif isinstance(value, random.Random):
        inner = value.getstate()
    elif _attributes(value):
        inner = {name: attribute for name, attribute in _attributes(value).items() if name != "loads"}
    return type(value), inner


def _attributes(value: Any) -> dict[str, Any]:
    names = [*getattr(value, "__dict__", {}), *getattr(type(value), "__slots__", ())]
    if isinstance(value, Enum) or callable(value):
        return {}
    return {name: content(getattr(value, name)) for name in names}


def test_every_kind_in_every_place_is_what_it_was_in_the_next_life_and_the_one_after_it() -> None:
    """Each is there or made again; what is made by all processes keeps its identity."""
    first, second, third = (Life(KINDS) for _ in range(3))
    assert first.moved.take() == {}
    before = {(place, name): getattr(owner, name) for place, owner in second.places.items() for name in KINDS}
    train(first, KINDS)
    for earlier, life in ((first, second), (second, third)):
        taken = earlier.moved.take()
        assert set(decode(encode(taken))) == set(taken)
        life.moved.restore(decode(encode(taken)))
        found = {
            f"{place}.{name}": (content(getattr(first.places[place], name)), content(getattr(owner, name)))
            for place, owner in life.places.items()
            for name in KINDS
        }
        assert {name: pair for name, pair in found.items() if pair[0] != pair[1]} == {}
    mutable = [key for key, value in before.items() if isinstance(value, list | dict | deque | set | Tensor | Box)]
    assert mutable
    for place, name in mutable:
        assert getattr(second.places[place], name) is before[place, name]


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_goes_back_to_what_the_code_has_made(kind: str) -> None:
    """A replay has hooks that change what the original run did not."""
    kinds = {kind: KINDS[kind]}
    life, fresh = Life(kinds), Life(kinds)
    train(life, kinds)
    assert life.moved.take()
    life.moved.restore({})
    if "generator" not in kind:
        for place, owner in life.places.items():
            assert content(getattr(owner, kind)) == content(getattr(fresh.places[place], kind)), place


def test_shared_objects_stay_shared_and_cycles_end() -> None:
    """Whether they were there as training began or not."""
    lives = []
    for _ in range(2):
        life = Life({})
        life.module.one = life.callback.two = [1.0]
        life.module.circle = [life.module.one]
        life.module.circle.append(life.module.circle)
        life.module.weights = [life.module.part.weight]
        life.moved = MovedAttributes(life.trainer, life.module, ())
        life.moved.look()
        lives.append(life)
    first, second = lives
    first.module.one.append(2.0)
    first.module.new = first.callback.new = Box(0.1)
    first.module.new.me = first.module.new
    first.module.weights.append(first.module.part.bias)
    first.callback.at = first.module.part
    second.moved.restore(decode(encode(first.moved.take())))
    module, callback = second.module, second.callback
    assert module.one == [1.0, 2.0]
    assert module.one is callback.two is module.circle[0]
    assert module.circle[1] is module.circle
    assert module.new is callback.new is module.new.me
    assert module.weights[1] is module.part.bias
    assert callback.at is module.part


STRANGE: dict[str, Callable[[], Any]] = {
    "coo": lambda: torch.eye(3).to_sparse(),
    "csr": lambda: torch.eye(3).to_sparse_csr(),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
    "meta": lambda: torch.ones(2, device="meta"),
    "mkldnn": lambda: torch.ones(2).to_mkldnn(),
    "subclass": lambda: torch.ones(2).as_subclass(type("Own", (Tensor,), {})),
    "wrapper": lambda: Tensor._make_wrapper_subclass(Wrapper, (2,)),
    "lazy": nn.UninitializedParameter,
    "unseen": Unseen,
    "in_list": lambda: [torch.eye(3).to_sparse()],
    "in_module": lambda: [_with_sparse_buffer()],
}


def _with_sparse_buffer() -> nn.Module:
    part = nn.Linear(1, 1)
    part.register_buffer("mask", torch.eye(3).to_sparse())
    return part


@pytest.mark.filterwarnings("ignore:.*(prototype|beta state|invariant|deprecat)")
@pytest.mark.parametrize("kind", STRANGE)
def test_what_cannot_be_stored_or_looked_at_is_named_and_ends_no_training(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    make = STRANGE[kind]
    lives = [Life({kind: (make, None), "level": KINDS["none_to_float"]}) for _ in range(2)]
    for life in lives:
        assert life.moved.take() == {}
    with caplog.at_level("WARNING", logger="lightning_moe_ckpt"):
        train(lives[0], {kind: (make, lambda _: make()), "level": KINDS["none_to_float"]})
        lives[1].moved.restore(decode(encode(lives[0].moved.take())))
    for place, owner in lives[1].places.items():
        assert owner.level == 0.1
        assert any(f"`{place}.{kind}" in record.getMessage() for record in caplog.records) or kind in {"unseen", "lazy"}
    assert lives[1].moved.take().keys() >= {f"{place}.level" for place in lives[1].places}


def test_what_is_too_large_or_to_be_left_alone_is_not_taken(caplog: pytest.LogCaptureFixture) -> None:
    """The first is named once, the second never."""
    life = Life({})
    life.module.large, life.module.small, life.module.cache = torch.zeros(4000), [0.0], {}
    life.moved = MovedAttributes(
        life.trainer, life.module, (), most_nbytes=10_000, untouched=["module.cache", "callback.Callback.*"]
    )
    life.moved.look()
    with caplog.at_level("WARNING", logger="lightning_moe_ckpt"):
        for step in range(3):
            life.module.large += 1
            life.module.small[0], life.module.cache[step] = step, object()
            life.callback.count = step
            taken = life.moved.take()
    assert list(taken) == ["module.small{}"]
    assert [record.getMessage().split("`")[1] for record in caplog.records] == ["module.large"]


def test_new_data_begins_with_what_it_is_when_lightning_has_loaded_it() -> None:
    """Values of a data set that is gone are not written into the next one; what hooks do to that is a change."""
    life, later = Life({"level": KINDS["none_to_float"]}), Life({"level": KINDS["none_to_float"]})
    items = life.places["loader0.dataset.datasets.1"]
    items.level = 3
    assert life.moved.take(("loader",)) == {"loader0.dataset.datasets.1.level": 3}
    fresh = Life({"level": KINDS["none_to_float"]})
    life.trainer.fit_loop._combined_loader.flattened[:] = [fresh.places["loader0"]]
    life.moved.look_at_data()
    assert life.moved.take() == {}
    fresh.places["loader0.dataset.datasets.1"].level = 5
    taken = life.moved.take()
    later.moved.restore({**taken, "module.level": 1.0}, ("loader0.dataset",))
    assert later.places["loader0.dataset.datasets.1"].level == 5
    assert later.module.level is None
    life.trainer.fit_loop._should_reload_train_dl = True
    assert life.moved.take() == {}


def test_validation_data_that_is_loaded_later_gets_its_values_then() -> None:
    """Lightning loads it where it is first needed."""
    kinds = {"level": KINDS["none_to_float"]}
    first, second = Life(kinds), Life(kinds)
    first.places["validation0.dataset"].level = 2
    second.trainer.val_dataloaders = None
    second.moved = MovedAttributes(second.trainer, second.module, ())
    second.moved.look()
    second.moved.restore(decode(encode(first.moved.take())))
    second.trainer.val_dataloaders = first.trainer.val_dataloaders
    first.places["validation0.dataset"].level = None
    second.moved.look()
    assert first.places["validation0.dataset"].level == 2


def test_no_restart_makes_half_an_object() -> None:
    """What holds a part that nobody can make again stays what the code has made, by its `None` for one."""
    first, second = Life({}), Life({})
    first.module.teacher, first.module.box, first.module.level = [nn.Linear(1, 1)], Box(0.1), 1
    first.module.box.lock = random.SystemRandom()
    for life in (first, second):
        life.module.__dict__.setdefault("teacher", None)
    second.moved.restore(decode(encode(first.moved.take())))
    assert second.module.level == 1
    assert second.module.teacher is None
    assert "box" not in vars(second.module)


def test_plain_attributes_of_metrics_are_restored() -> None:
    """Their states are the logger's; what the user's class has beside them is the user's."""
    lives = [Life({}) for _ in range(2)]
    for life in lives:
        life.module.metric = MeanMetric()
        life.module.metric.history = []
        life.moved = MovedAttributes(life.trainer, life.module, ())
        life.moved.look()
    first, second = lives
    first.module.metric.history.append(0.1)
    first.module.metric.update(3.0)
    assert first.moved.take().keys() == {"module.metric.history{}"}
    second.moved.restore(decode(encode(first.moved.take())))
    assert second.module.metric.history == [0.1]
