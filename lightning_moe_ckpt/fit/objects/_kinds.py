"""Describe users' objects and values in the journal's types, and make them again in place: one class per kind.

An immutable value is described in place. A mutable object is a node, referred to by name: shared objects stay shared,
and cycles end. Objects made by the user's code in every process are the reference: only later changes are entries,
attribute by attribute. Objects made in training are described whole.

A look at a node compares its parts by identity, tensors by version, and arrays by digest. Unchanged parts keep their
description, and with it their text in the journal.
"""

from __future__ import annotations

import copy
import functools
import itertools
import random
from array import array
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from operator import is_
from typing import Any, Protocol

import numpy as np
import torch
import xxhash
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree
from torchmetrics import MeanMetric, Metric

from lightning_moe_ckpt._units import size_text
from lightning_moe_ckpt.fit.objects._users import (
    GENERATORS,
    MADE_BY_LIGHTNING,
    MOST_ITEMS,
    MOST_PLAIN_ITEMS,
    SEARCHED,
    has_base,
    has_state,
    in_state,
    is_library,
    refill,
    restore_values,
    slots_of,
    space_of,
)
from lightning_moe_ckpt.journal import (
    NATIVE,
    Constant,
    Missing,
    Text,
    encode,
    found,
    held_state,
    name_of,
    refusals,
    restore_held,
    same_text,
)
from lightning_moe_ckpt.snapshot import DataAccess

COMPARED_NBYTES = 2**16
"""Largest tensor on the host, in bytes, compared element by element: changes through `.data` leave no trace."""
CONTENT = "{}"
"""End of the names of entries for an object's content; other entries are attributes."""
GONE = ("gone",)
UNSEEN = "cannot be looked at"
NEW = object()
FILLED_LAST = {"l": 1, "e": 2, "d": 2}
"""Fill order of containers, by tag: after their items are whole, since items may be hashed."""


class Graph(Protocol):
    """The graph around nodes."""

    most_nbytes: int

    def describe(self, value: Any, place: str, node: Node, end: str) -> Text:
        """Describe a value for a node's entry; a mutable value becomes a part of the node."""

    def is_untouched(self, name: str) -> bool:
        """Return whether an attribute is left alone."""

    def may_copy(self, nbytes: int) -> bool:
        """Return whether there is room for a copy of `nbytes` of the reference, and reserve the room."""


class Node:
    """A mutable object with searched attributes, but for `left_out`, names not the user's; `None` if none are searched.

    Without `is_new`, the object was not made in training, and its state at the first look is the reference.
    """

    tag = "o"

    def __init__(self, name: str, each: Any, left_out: Collection[str] | None, *, is_new: bool) -> None:
        self.name, self.each, self.left_out, self.is_new = name, each, left_out, is_new
        self.first: dict[str, Text] = {}
        """Descriptions in the reference, by the end of their entries' names; empty for a new object."""
        self.now: dict[str, Text] = {}
        self.moved: dict[str, Text] = {}
        """Changed entries."""
        self.lost: dict[str, str] = {}
        """Names of changed entries that cannot be stored, with reasons."""
        self.why: dict[str, dict[object, str]] = {}
        """Reasons why values cannot be stored, by the end of the entry's name and the value's identity."""
        self.parts: list[Node] = []
        self.turn = self.size = 0
        self._seen: list[object] = []
        self._first_why: dict[str, Collection[object]] = {}

    def look(self, graph: Graph) -> bool:
        """Describe the object anew if it has changed since the last look; return whether it has."""
        space = space_of(self.each) if self.left_out is not None else {}
        seen = [*self._items(), *space.keys(), *space.values()]
        if self.now and len(seen) == len(self._seen) and all(map(is_, seen, self._seen)):
            return False
        self._seen, self.parts, self.why = seen, [], {}
        if self.is_new and found(name_of(type(self.each))) is not type(self.each):
            self.why[CONTENT] = {NEW: f"of class {name_of(type(self.each))}, which has no such name"}
        self.now = {CONTENT: self._content(graph)}
        self._look_at(space, graph)
        return True

    def _look_at(self, space: Mapping[str, Any], graph: Graph) -> None:
        for name, value in space.items():
            place = f"{self.name}.{name}"
            noted = name.startswith("__pl_")  # Lightning's notes for making loaders and batch samplers anew
            if not (noted or name in (self.left_out or ()) or graph.is_untouched(place)):
                self.now[f".{name}"] = graph.describe(value, place, self, f".{name}")

    def cannot_look(self, error: Exception) -> bool:
        """Note the error of a look, so that no foreign object ends training; return whether the error is new."""
        last, self._seen = self.why, []
        self.why = {CONTENT: {str(error): f"{UNSEEN}: {error!r}"}}
        self.now = {**self.now, CONTENT: ("kept", UNSEEN)}
        return self.why != last

    def compare(self, *, always: Collection[str] = ()) -> None:
        """Note entries that differ from the reference; the first call sets it. Entries in `always` always differ."""
        if not self.is_new and not self.first:
            self.first = {end: NEW if f"{self.name}{end}" in always else text for end, text in self.now.items()}
            self._first_why = {end: set(why) for end, why in self.why.items()}
        changed = {end: text for end, text in self.now.items() if not same(self.first.get(end, NEW), text)}
        unstored = {end: self._unstored(end) for end in changed if end in self.why}
        self.lost = {f"{self.name}{end}".removesuffix(CONTENT): why for end, why in unstored.items() if why}
        whole = not (self.is_new and self.lost)  # an object without some of its parts is not stored
        self.moved = {f"{self.name}{end}": text for end, text in changed.items() if whole and not unstored.get(end)}
        self.moved |= {f"{self.name}{end}": GONE for end in self.first if end not in self.now}
        self.size = sum(map(size_of, self.moved.values()))

    def states(self) -> Iterator[tuple[str, str]]:
        """Yield names of entries with state that certainly cannot be stored, with reasons."""
        for end, reasons in self.why.items():
            if why := ", ".join(sorted(why for why in reasons.values() if why.startswith(("state of", UNSEEN)))):
                yield f"{self.name}{end}".removesuffix(CONTENT), why

    def _unstored(self, end: str) -> str:
        """Return why an entry cannot be stored; empty if only values of the reference stand in the way.

        A new process has those again, since the user's code makes them.
        """
        known = self._first_why.get(end, ())
        return ", ".join(sorted({why for key, why in self.why[end].items() if key not in known}))

    def _items(self) -> Iterable[object]:
        return ()

    def _content(self, graph: Graph) -> Text:  # the same for all but containers
        return self.now.get(CONTENT) or self._described()

    def _described(self, **more: Any) -> Text:
        return Constant(kind=self.tag, of=name_of(type(self.each)), **more)

    @classmethod
    def make(cls, kind: type, content: Mapping[str, Any]) -> Any:  # noqa: ARG003
        """Return an object to be filled."""
        return _bare(kind)

    def fill(self, content: Mapping[str, Any], read: Callable[..., Any]) -> None:
        """Make the object equal to a description of its content."""

    def close(self) -> None:
        """Stop watching the object."""


class _List(Node):
    """A list or deque; a subclass of the user's has attributes, too."""

    tag = "l"

    def _items(self) -> Iterable[object]:
        return self.each  # type: ignore[no-any-return]

    def _content(self, graph: Graph) -> Text:
        more = {name: getattr(self.each, name) for name in ("maxlen", "typecode") if hasattr(self.each, name)}
        return self._filled(graph, list(self.each), itertools.count(), **more)

    def _filled(self, graph: Graph, items: list[Any], names: Iterable[object], **more: Any) -> Text:
        plain = NATIVE.issuperset(map(type, items))
        if len(items) > (MOST_PLAIN_ITEMS if plain else MOST_ITEMS):
            key = (len(items), *map(id, items[:: len(items) // 1000]))
            self.why[CONTENT] = {key: f"{len(items)} items"}
            return ("kept", key)
        if not plain:
            places = (f"{self.name}.{name}" for name in names)
            items = [graph.describe(each, place, self, CONTENT) for each, place in zip(items, places, strict=False)]
        return self._described(items=items, **more)

    @classmethod
    def make(cls, kind: type, content: Mapping[str, Any]) -> Any:
        each = kind.__new__(kind, *([content["typecode"]] if issubclass(kind, array) else []))
        if issubclass(kind, deque):
            deque.__init__(each, (), content["maxlen"])
        return each

    def fill(self, content: Mapping[str, Any], read: Callable[..., Any]) -> None:
        now = list(self.each)
        refill(self.each, [read(text, now[at : at + 1]) for at, text in enumerate(content["items"])])


class _Set(_List):
    tag = "e"

    def _described(self, **more: Any) -> Text:
        return super()._described(items=frozenset(more["items"]))


class _Dict(_List):
    tag = "d"

    def _items(self) -> Iterable[object]:
        return [*self.each.keys(), *self.each.values()]

    def _content(self, graph: Graph) -> Text:
        items = list(self.each.items())  # at once: another thread may change it
        names = [key if isinstance(key, str | int) else f"key {at}" for at, (key, _) in enumerate(items)]
        content = self._filled(graph, [value for _, value in items], names)
        if isinstance(content, Constant):
            keys = [graph.describe(key, f"{self.name}.key", self, CONTENT) for key, _ in items]
            content["items"] = [list(item) for item in zip(keys, content["items"], strict=True)]
            if (factory := getattr(self.each, "default_factory", None)) is not None:
                content["factory"] = graph.describe(factory, f"{self.name}.factory", self, CONTENT)
        return content

    def fill(self, content: Mapping[str, Any], read: Callable[..., Any]) -> None:
        found = [(read(key), text) for key, text in content["items"]]
        refill(self.each, [(key, read(text, [self.each[key]] if key in self.each else [])) for key, text in found])
        if "factory" in content:
            self.each.default_factory = read(content["factory"])


class Whole(Node):
    """An object stored as one value: the reference is copied only while there is room."""

    def look(self, graph: Graph) -> bool:
        seen = self._sight(graph)
        if self.now and self._is_same(seen):
            return False
        self._seen, self.why = seen, {}
        if why := self._refusal(graph):
            self.why[CONTENT] = {tuple(map(str, seen)): why}
        if why or (not self.now and not self.is_new and not graph.may_copy(self.nbytes())):
            self.now = {CONTENT: ("kept", *map(str, seen))}
        else:
            content = {"kind": self.tag, "of": name_of(type(self.each)), **self._copied()}
            on_host = all(leaf.is_cpu for leaf in pytree.tree_leaves(content) if isinstance(leaf, Tensor))
            self.now = {CONTENT: Constant(content) if on_host else content}
        return True

    def _sight(self, graph: Graph) -> list[Any]:
        raise NotImplementedError

    def _is_same(self, seen: list[Any]) -> bool:
        return seen == self._seen

    def _refusal(self, graph: Graph) -> str:
        raise NotImplementedError

    def nbytes(self) -> int:
        return _nbytes(self.each)

    def _copied(self) -> dict[str, Any]:
        raise NotImplementedError


class _Tensor(Whole):
    tag = "T"

    def _sight(self, graph: Graph) -> list[Any]:
        return _sight_of(self.each)

    def _is_same(self, seen: list[Any]) -> bool:
        content = self.now[CONTENT]
        return seen == self._seen and not (isinstance(content, dict) and _differs_unseen(self.each, content["items"]))

    def _refusal(self, graph: Graph) -> str:
        if self.nbytes() > graph.most_nbytes:
            return f"a tensor of {size_text(self.nbytes())}"
        return "; ".join(refusals(self.each.detach()))

    def _copied(self) -> dict[str, Any]:
        return {"items": self.each.detach().clone(), "leaf": self.each.requires_grad and self.each.is_leaf}

    @classmethod
    def make(cls, kind: type, content: Mapping[str, Any]) -> Any:
        made = torch.empty_like(content["items"])
        return nn.Parameter(made, content["leaf"]) if kind is nn.Parameter else made.requires_grad_(content["leaf"])

    def fill(self, content: Mapping[str, Any], read: Callable[..., Any]) -> None:
        restore_values(self.each, content["items"])


class _Array(Whole):
    tag = "A"

    def _sight(self, graph: Graph) -> list[Any]:
        return [_digest(self.each, graph.most_nbytes), self.each.shape, self.each.dtype]

    def _refusal(self, graph: Graph) -> str:
        if self.each.nbytes > graph.most_nbytes:
            return f"an array of {size_text(self.each.nbytes)}"
        return "; ".join(refusals(self.each[:0]))

    def _copied(self) -> dict[str, Any]:
        return {"items": self.each.copy()}

    @classmethod
    def make(cls, kind: type, content: Mapping[str, Any]) -> Any:  # noqa: ARG003
        return np.empty_like(content["items"])

    def fill(self, content: Mapping[str, Any], read: Callable[..., Any]) -> None:
        if self.each.shape != content["items"].shape:
            raise Missing
        self.each[...] = content["items"]


class Stateful(Whole):
    """An object with `state_dict` and `load_state_dict`; if of a user's class, with attributes, too."""

    tag = "s"
    _accesses: DataAccess | None = None
    _space: tuple[object, ...] = ()

    def look(self, graph: Graph) -> bool:
        changed, space = super().look(graph), space_of(self.each) if self.left_out is not None else {}
        seen = (*space.keys(), *space.values())
        if changed or len(seen) != len(self._space) or not all(map(is_, seen, self._space)):
            self._space, self.parts, changed = seen, [], True
            self.now = {CONTENT: self.now[CONTENT]}
            self.why = {end: self.why[end] for end in self.why if end == CONTENT}
            self._look_at(space, graph)
        return changed

    def close(self) -> None:
        if self._accesses is not None:
            self._accesses.close()

    def _is_same(self, seen: list[Any]) -> bool:
        content = self.now[CONTENT]
        copies = pytree.tree_leaves(content["items"]) if isinstance(content, dict) else self._leaves
        return seen == self._seen and not any(map(_differs_unseen, self._leaves, copies))

    def _sight(self, graph: Graph) -> list[Any]:
        self._state = self.each.state_dict()  # kept: no other tensors may get the same memory
        leaves, spec = pytree.tree_flatten(self._state)
        self._leaves, self._spec = leaves, spec
        if self._accesses is None and isinstance(self.each, nn.Module):
            self._accesses = DataAccess(self.each.parameters())
        return [
            None if self._accesses is None else self._accesses.count,
            spec,
            *(_sight_of(x) if isinstance(x, Tensor) else x if type(x) in NATIVE else _encoded(x) for x in leaves),
        ]

    def _refusal(self, graph: Graph) -> str:
        if self.nbytes() > graph.most_nbytes:
            return f"a state of {size_text(self.nbytes())}"
        if self.is_new:
            return "an object with a `state_dict` that came into being in training"
        return "; ".join(refusals(self._copied())[:3])

    def nbytes(self) -> int:
        return sum(map(_nbytes, self._leaves))

    def _copied(self) -> dict[str, Any]:
        leaves = [x.detach().clone() if isinstance(x, Tensor) else copy.deepcopy(x) for x in self._leaves]
        return {"items": pytree.tree_unflatten(leaves, self._spec)}

    def fill(self, content: Mapping[str, Any], read: Callable[..., Any]) -> None:
        self.each.load_state_dict(
            pytree.tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, content["items"])
        )


class _Generator(Whole):
    """A random generator. Generators made by the user's code are restored at their own moments, see `HeldGenerators`."""

    tag = "G"

    def _sight(self, graph: Graph) -> list[Any]:
        return [encode(held_state(self.each)) if self.is_new else b""]

    def _refusal(self, graph: Graph) -> str:
        return ""

    def nbytes(self) -> int:
        return 2**14

    def _copied(self) -> dict[str, Any]:
        return {"items": held_state(self.each) if self.is_new else None}

    @classmethod
    def make(cls, kind: type, content: Mapping[str, Any]) -> Any:
        if kind is np.random.Generator:
            return np.random.Generator(getattr(np.random, content["items"]["bit_generator"])())
        return kind()

    def fill(self, content: Mapping[str, Any], read: Callable[..., Any]) -> None:
        if content["items"] is not None:
            restore_held(self.each, content["items"])


_SEARCHED_AS: dict[type, type[Node]] = {Tensor: _Tensor, np.ndarray: _Array, set: _Set, dict: _Dict}
_SEARCHED_AS |= dict.fromkeys((list, bytearray, array, deque), _List) | dict.fromkeys(GENERATORS, _Generator)
KINDS: dict[str, type[Node]] = {k.tag: k for k in (Node, _List, _Set, _Dict, _Tensor, _Array, Stateful, _Generator)}


def kind_of(value: Any, *, is_new: bool) -> tuple[type[Node] | None, Collection[str] | None]:
    """Return an object's node class, and names of attributes to leave out; `None` if not searched."""
    users = not is_library(type(value))
    for base, kind in _SEARCHED_AS.items():
        if isinstance(value, base):
            return kind if _is_searched(value) else None, () if users and base in {list, deque, set, dict} else None
    if has_base(type(value), [Metric]):
        return Node, metrics_own() - {"_update_count", "_computed"}
    if isinstance(value, nn.Module | Optimizer):
        return Stateful, None
    made_by_lightning = has_base(type(value), MADE_BY_LIGHTNING)
    if not is_new and not made_by_lightning and has_state(value):
        return Stateful, in_state(value) if users else None
    if (
        made_by_lightning
        or not (users or has_base(type(value), SEARCHED))
        or callable(getattr(value, "__next__", None))
    ):
        return None, None
    return (Node, ()) if hasattr(value, "__dict__") or slots_of(type(value)) else (None, None)


@functools.cache
def metrics_own() -> frozenset[str]:
    """Return names of attributes that torchmetrics gives every metric, except states."""
    bare = MeanMetric()
    return frozenset(vars(bare)) - {*bare._defaults, "nan_strategy"}


def _is_searched(value: Any) -> bool:
    if isinstance(value, np.ndarray):
        return not isinstance(value, np.memmap) and bool(value.flags.writeable)
    return not isinstance(value, random.SystemRandom)


def may_make(kind: type, cls: type[Node]) -> bool:
    """Return whether a journal may ask for an object of this class: containers, tensors, arrays, and users' classes."""
    bases: dict[str, Any] = {"l": (list, deque, bytearray, array), "e": set, "d": dict}
    bases |= {"T": Tensor, "A": np.ndarray, "G": GENERATORS}
    if (base := bases.get(cls.tag)) is not None:
        return issubclass(kind, base)
    return not is_library(kind) or issubclass(kind, (*SEARCHED, Metric))


def same(first: Text, now: Text) -> bool:
    """Return whether two descriptions are equal in type and bits; except containers', objects' must be identical."""
    if isinstance(first, dict) and first["kind"] not in FILLED_LAST:
        return first is now
    return same_text(first, now)


def _bare(kind: Any) -> Any:
    return kind.__new__(kind)


def size_of(text: Text) -> int:
    """Return about how many bytes a description takes in a journal."""
    if isinstance(text, dict):
        return 64 + size_of(text.get("items"))
    if isinstance(text, Tensor | np.ndarray):
        return int(text.nbytes)
    if isinstance(text, list | tuple | frozenset):
        texts = [each for each in text if type(each) in {str, bytes}]
        inner = [each for each in text if type(each) not in NATIVE]
        return 24 * len(text) + sum(map(len, texts)) + sum(map(size_of, inner))
    return len(text) if isinstance(text, str | bytes) else 24


def _sight_of(tensor: Tensor) -> list[Any]:
    """Return values that change with a tensor, except after changes of elements that leave no trace."""
    version = None if tensor.is_inference() else tensor._version
    try:
        return [version, tensor.data_ptr(), tensor.shape]
    except RuntimeError:  # no memory of its own: sparse, nested, or a wrapping subclass
        return [version, *tensor.size()] if not tensor.is_nested else [version]


def _nbytes(value: Any) -> int:
    try:
        return int(getattr(value, "nbytes", 8))
    except RuntimeError:  # sparse tensors
        return 8


def _differs_unseen(now: Any, copy: Any) -> bool:
    """Return whether a small tensor on the host differs from its copy, as after an untraced change through `.data`."""
    small = isinstance(now, Tensor) and now.is_cpu and _nbytes(now) <= COMPARED_NBYTES
    return small and now is not copy and not torch.equal(now, copy)


def _digest(array: np.ndarray[Any, Any], most_nbytes: int) -> int:
    """Return an array's digest, or a sample's if the array is too large to be stored."""
    if array.nbytes > most_nbytes:
        array = array.reshape(-1)[:: array.size // 2**15]
    return xxhash.xxh3_64_intdigest(array.tobytes() if array.dtype.hasobject else np.ascontiguousarray(array).data)


def _encoded(value: object) -> object:
    return id(value) if refusals(value) else encode(value)
