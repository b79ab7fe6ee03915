"""Objects are what they were: every kind of thing that a fit may change, in place, with what refers to it."""

from __future__ import annotations

import random
from collections import Counter, OrderedDict, defaultdict, deque
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lightning_moe_ckpt.errors import CheckpointError
from lightning_moe_ckpt.fit.objects._memento import Memento


class Box:
    """Holds anything."""

    def __init__(self, **values: Any) -> None:
        vars(self).update(values)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)

    def __setattr__(self, name: str, value: Any) -> None:
        vars(self)[name] = value

    def read(self) -> None:
        """Something that leads here."""


@dataclass(slots=True)
class Slotted:
    """Has no `__dict__`."""

    number: int
    other: Any = None


class Private:
    """The interpreter spells this attribute's name with that of the class."""

    __slots__ = ("__number",)

    def __init__(self) -> None:
        self.__number = 1

    def count(self) -> int:
        self.__number += 1
        return self.__number


def test_containers_of_every_kind_keep_their_identity_and_get_their_items_back() -> None:
    box = Box(
        items=[1, [2]], table={"a": {"b": 1}}, ordered=OrderedDict(x=1, y=2), missing=defaultdict(list),
        count=Counter("aab"), names={"x"}, last=deque([1, 2], maxlen=2), raw=bytearray(b"abc"), pair=([1],),
    )  # fmt: skip
    kept = vars(box).copy()
    memento = Memento([box])
    box.items[1].append(3)
    box.items.append(4)
    box.table["a"]["b"] = 2
    box.ordered.move_to_end("x")
    box.missing["new"].append(1)
    box.count.update("c")
    box.names.add("y")
    box.last.append(5)
    box.raw.append(100)
    box.pair[0].clear()
    box.new, box.names = 1, set()
    memento.restore()
    assert vars(box) == {
        "items": [1, [2]], "table": {"a": {"b": 1}}, "ordered": OrderedDict(x=1, y=2), "missing": {}, "count": Counter("aab"),
        "names": {"x"}, "last": deque([1, 2]), "raw": b"abc", "pair": ([1],),
    }  # fmt: skip
    assert list(box.ordered) == ["x", "y"]
    assert all(vars(box)[name] is value for name, value in kept.items())


def test_objects_are_found_through_what_leads_to_them_and_circles_end() -> None:
    inner, slotted = Box(number=1), Slotted(number=1)
    outer = Box(method=Box(number=1, inner=inner), slotted=[slotted])
    outer.circle, outer.private = outer, Private()
    slotted.other = inner
    bound = Box(number=1)
    memento = Memento([outer, bound.read])
    inner.number = slotted.number = bound.number = outer.private.count()
    slotted.other = None
    memento.restore()
    assert outer.private.count() == 2
    assert (inner.number, slotted.number, slotted.other, bound.number) == (1, 1, inner, 1)


def test_an_aborted_call_leaves_nothing_when_twice_restored() -> None:
    box = Box(items=[], number=0)
    memento = Memento([box])
    for number in (1, 2):
        box.items.append(number)
        box.number = number
        memento.restore()
        assert vars(box) == {"items": [], "number": 0}


def test_random_state_of_the_process_and_of_every_held_generator() -> None:
    held = Box(
        torch=torch.Generator(), numpy=np.random.default_rng(1), old=np.random.RandomState(1), python=random.Random(1)
    )

    def draws() -> list[Any]:
        own = [held.torch.get_state().tolist(), held.numpy.random(), held.old.rand(), held.python.random()]
        torch.rand(1, generator=held.torch)
        return [*own, torch.rand(1).item(), np.random.rand(), random.random()]  # noqa: NPY002  # the legacy generator

    memento = Memento([held])
    first = draws()
    assert draws() != first
    memento.restore()
    assert draws() == first


def test_small_tensors_and_arrays_get_their_values_back() -> None:
    box = Box(total=torch.zeros(3), wide=torch.zeros(1).expand(3), array=np.zeros(2), nan=torch.tensor(float("nan")))
    total, array = box.total, box.array
    memento = Memento([box])
    box.total += 1
    box.array += 1
    box.wide = box.wide + 1
    box.nan.zero_()
    memento.restore()
    assert box.total is total
    assert box.array is array
    assert torch.equal(box.total, torch.zeros(3))
    assert torch.equal(box.wide, torch.zeros(3))
    assert array.tolist() == [0, 0]
    assert bool(box.nan.isnan())


def test_a_large_tensor_that_is_no_part_of_the_model_must_not_change() -> None:
    large = torch.zeros(2**19)
    memento = Memento([Box(data=large)])
    memento.restore()
    large[0] = 1
    with pytest.raises(CheckpointError, match="whole restart"):
        memento.restore()


def _is(gradient: torch.Tensor | None, wanted: torch.Tensor) -> bool:
    return gradient is not None and torch.equal(gradient, wanted)


def test_parameters_keep_values_that_others_restore_and_get_back_how_they_are_trained() -> None:
    module = nn.Linear(2, 2)
    module.bias.requires_grad_(False)
    memento = Memento([module], restored=module.parameters())
    with torch.no_grad():
        module.weight.fill_(1.0)
    module.weight.register_hook(torch.neg)  # type: ignore[no-untyped-call]
    module.weight.register_post_accumulate_grad_hook(lambda _: None)  # type: ignore[no-untyped-call]
    module(torch.ones(1, 2)).sum().backward()
    module.weight.requires_grad_(False)
    module.bias.requires_grad_(True)
    handle = module.register_forward_hook(lambda *_: None)
    module.register_buffer("late", torch.ones(1))
    module.eval()
    memento.restore()
    assert torch.equal(module.weight, torch.ones(2, 2))
    assert (module.weight.requires_grad, module.bias.requires_grad, module.training) == (True, False, True)
    assert module.weight.grad is None
    assert not module._forward_hooks
    assert "late" not in module._buffers
    module(torch.ones(1, 2)).sum().backward()
    assert _is(module.weight.grad, torch.ones(2, 2)), "the hook is gone"
    handle.remove()


def test_a_hook_of_the_user_stays() -> None:
    module = nn.Linear(2, 2)
    module.weight.register_hook(torch.neg)  # type: ignore[no-untyped-call]
    memento = Memento([module], restored=module.parameters())
    module.weight.register_hook(lambda gradient: gradient * 7)  # type: ignore[no-untyped-call]
    memento.restore()
    module(torch.ones(1, 2)).sum().backward()
    assert _is(module.weight.grad, -torch.ones(2, 2))


def test_some_objects_are_left_alone() -> None:
    class Apart(Box):
        """Somebody else's."""

    apart = Apart(number=1)
    memento = Memento([Box(apart=apart, kind=Box, function=random.shuffle)], apart=(Apart,))
    apart.number = 2
    memento.restore()
    assert apart.number == 2
