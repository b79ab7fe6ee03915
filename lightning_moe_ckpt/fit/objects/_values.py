"""Follow objects held by owners, directly or through other objects: take changes, and restore them in place.

Objects are nodes of a graph that begins at owners; a node is named by the first place at which it was found, see
`_kinds`. Objects made by the user's code in every process are the reference. Objects made later have a number in their
names, `#`.
"""

from __future__ import annotations

import fnmatch
import re
import types
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain
from operator import is_, itemgetter
from typing import Any

from torch import nn

from lightning_moe_ckpt._logging import rank_logger
from lightning_moe_ckpt._units import size_text
from lightning_moe_ckpt.fit.objects._kinds import (
    COMPARED_NBYTES,
    CONTENT,
    FILLED_LAST,
    GONE,
    KINDS,
    NEW,
    UNSEEN,
    Node,
    Stateful,
    Whole,
    kind_of,
    may_make,
    same,
    size_of,
)
from lightning_moe_ckpt.fit.objects._users import MADE_BY_LIGHTNING, has_base, has_state, space_of, why_not
from lightning_moe_ckpt.journal import NATIVE, Missing, Text, fixed, found, name_of, read_named

log = rank_logger(__name__)

_MOST_NODES = 50_000
_MOST_SAID = 30
_HOOKED = ("._output_capturing_hooks_installed", "._is_hooked")
"""Flags by which transformers marks hooked modules. Hooks are not restored: a new process installs its own."""


class Values:
    """Objects held by owners, directly or through other objects.

    All changes together are limited to `most_nbytes`; names in `untouched`, of attributes and objects, are left alone,
    and `*` stands for anything; `speaks` says whether the log names objects that cannot be stored.
    """

    def __init__(self, *, most_nbytes: int, untouched: Sequence[str], speaks: bool = True) -> None:
        self._speaks = speaks
        self.most_nbytes, self._untouched = most_nbytes, untouched
        self._roots: dict[str, Node] = {}
        self._nodes: dict[int, Node] = {}
        """All nodes, by the identity of their objects."""
        self._kept: dict[str, Node] = {}
        """Nodes of the reference to which nothing leads any more."""
        self._at: dict[int, tuple[str, object]] = {}
        """Name and object of everything restored elsewhere, by identity."""
        self._order: list[Node] = []
        self._active: list[Node] = []
        self._always: Collection[str] = ()
        self._copied_nbytes = self._turn = self._count = 0
        self._is_new = False
        self._parts: _Parts | None = None
        self._still: set[str] = set()
        """Owners watched by `_parts`."""
        self._used: set[str] = set()
        self._taken: dict[str, Text] | None = None
        self._said: set[str] = set()
        self._pending: dict[str, Text] = {}
        """Entries of owners still missing in this process."""

    def hold(
        self,
        owners: Mapping[str, tuple[object, Collection[str]]],
        elsewhere: Mapping[str, object],
        *,
        always: Collection[str] = (),
    ) -> None:
        """Set the owners, each with names of attributes that are not the user's. The present state of new owners is the
        reference.

        Entries may refer to objects `elsewhere`, which are restored there. Entries in `always` are taken even if
        unchanged; with `#` at the end, those of objects that a later process has not made.
        """
        self._roots = {name: node for name, node in self._roots.items() if owners.get(name, (None,))[0] is node.each}
        self._at = {id(each): (name, each) for name, each in elsewhere.items()}
        self._at |= {id(each): (name, each) for name, (each, _) in owners.items()}
        self._active = [node for node in self._active if self._roots.get(node.name) is node]
        self._look()
        self._is_new, self._always, self._taken = False, always, None
        fresh = owners.keys() - self._roots.keys()
        for name, (each, left_out) in owners.items():
            if name not in self._roots and not self.is_untouched(name):
                # A loading data set is told where its next iterator begins: see `fit/_data.py`.
                apart = has_base(type(each), (nn.Module, *MADE_BY_LIGHTNING)) or name.startswith(
                    ("loader", "validation")
                )
                kind = Stateful if has_state(each) and not apart else Node
                self._roots[name] = kind(name, each, left_out, is_new=False)
        self._active = [node for name, node in self._roots.items() if name not in self._still]
        self._look(fresh)
        self._is_new = True
        coming = tuple(
            name for name in fresh if name.startswith("validation")
        )  # validation is loaded when first needed
        if coming and any(name.startswith(coming) for name in self._pending):
            self.restore(self._pending, coming)
        if not any(isinstance(node.each, nn.Module) for node in self._roots.values()):
            return  # data alone
        if self._parts is None:
            still = {
                node.name: node
                for node in self._roots.values()
                if isinstance(node.each, nn.Module) and not (node.parts or node.why or node.moved) and len(node.now) > 1
            }
            plain = {name: [end[1:] for end in node.now if end != CONTENT] for name, node in still.items()}
            self._still = set(still)
            self._active = [node for name, node in self._roots.items() if name not in still]
            self._parts = _Parts(plain, {name: node.each for name, node in still.items()})
        self._say(
            {name: why for node in self._order for name, why in node.states()},
            "`state_dict` and `load_state_dict`, a buffer or a plain value in its place would keep it",
        )

    def is_untouched(self, name: str) -> bool:
        """Return whether the user, or a library, wants an attribute to be left alone."""
        name = unnumbered(name).removesuffix(CONTENT) if self._untouched else name
        return name.endswith(_HOOKED) or any(fnmatch.fnmatchcase(name, pattern) for pattern in self._untouched)

    def may_copy(self, nbytes: int) -> bool:
        """Return whether there is room for a copy of `nbytes` of the reference, and reserve the room."""
        fits = self._copied_nbytes + nbytes <= self.most_nbytes
        self._copied_nbytes += nbytes if fits else 0
        return fits

    def take(self, of: tuple[str, ...] | None = None) -> dict[str, Text]:
        """Return descriptions of differences from the reference; with `of`, only if the name begins with an item."""
        if self._look() or self._taken is None:
            self._taken, lost = {}, dict[str, str]()
            for node in self._order:
                self._taken |= node.moved
                lost |= node.lost
            self._leave_out(lost)
            self._say(lost, "a `state_dict` would keep it")
        return self._taken if of is None else {name: text for name, text in self._taken.items() if name.startswith(of)}

    def restore(
        self,
        moved: Mapping[str, Text],
        of: tuple[str, ...] | None = None,
        *,
        forget_new: bool = False,
        but: tuple[str, ...] = (),
    ) -> None:
        """Restore, in place, the result of `take`, in this or an earlier process, and the reference for everything
        else.

        Owners whose names begin with another part than those in `of`, or with a part in `but`, are left as they are.
        With `forget_new` attributes added since then are deleted.
        """
        self._look()
        nodes = {**self._kept, **self._roots, **{node.name: node for node in self._order}}
        texts: dict[str, Text] = {}
        for node in list(nodes.values()):
            for name in node.moved:
                end = name.removeprefix(node.name)
                if end in node.first or (forget_new and not node.is_new):
                    texts[name] = node.first.get(end, GONE)
        texts = {
            name: text
            for name, text in {**texts, **moved}.items()
            if (of is None or name.startswith(of)) and not name.startswith(but) and not self.is_untouched(name)
        }
        lost = self._make(texts, nodes)
        for name in sorted(texts, key=lambda name: _turn_of(name, texts[name])):
            owner, end = _split(name)
            text = texts[name]
            if owner not in nodes:
                self._pending[name] = text
                continue
            node = nodes[owner]
            if node.now.get(end, NEW) is text or text is NEW or (end != CONTENT and same(node.now.get(end, NEW), text)):
                continue
            try:
                self._set(node, end, text, nodes)
            except Missing as error:
                lost[name.removesuffix(CONTENT)] = str(error) or "this process has another object there"
            except Exception as error:  # noqa: BLE001  # a foreign object may raise anything
                lost[name.removesuffix(CONTENT)] = f"this process has another object there: {error!r}"
        self._say(lost, "make the same objects at the start of all processes of a run")
        self._nodes |= {id(node.each): node for node in nodes.values() if self._roots.get(node.name) is not node}
        self._look()
        self._taken = None

    def close(self) -> None:
        """Stop watching objects."""
        for node in self._nodes.values():
            node.close()

    # -- private

    def describe(self, value: Any, place: str, node: Node, end: str) -> Text:
        """Describe a value for a node's entry; a mutable value becomes a part of the node."""
        if type(value) in NATIVE:
            return value
        try:
            if (text := self._described(value, place, node, end)) is not None:
                return text
            why = why_not(value)
        except Exception as error:  # noqa: BLE001  # a foreign object may raise anything
            why = f"{UNSEEN}: {error!r}"
        node.why.setdefault(end, {})[id(value)] = why
        return ("kept", id(value))

    def _described(self, value: Any, place: str, node: Node, end: str) -> Text | None:
        """Describe a value for an entry; `None` if it cannot be stored."""
        if (at := self._at.get(id(value))) is not None:
            return ("at", at[0])
        if (made := self._nodes.get(id(value))) is None:
            if (text := self._fixed(value, place, node, end)) is not None:
                return text
            made = self._node(value, place)
        if made is not None:
            node.parts.append(made)
            return ("ref", made.name)
        return ("kept", 0) if has_base(type(value), MADE_BY_LIGHTNING) else None  # Lightning keeps it in every process

    def _fixed(self, value: Any, place: str, node: Node, end: str) -> Text | None:
        """Describe an immutable value, items of tuples aside; `None` for a mutable value."""
        if isinstance(value, tuple | frozenset):
            texts = [self.describe(item, f"{place}.{at}", node, end) for at, item in enumerate(value)]
            return ("t", name_of(type(value)), *texts) if isinstance(value, tuple) else ("z", frozenset(texts))
        if isinstance(value, types.MethodType):
            return ("b", self.describe(value.__self__, f"{place}.self", node, end), value.__name__)
        return fixed(value)

    def _node(self, value: Any, place: str) -> Node | None:
        is_new = self._is_new or f"{unnumbered(place)}#" in self._always
        kind, left_out = kind_of(value, is_new=is_new)
        if kind is None or len(self._nodes) >= _MOST_NODES:
            return None
        self._count += is_new
        name = f"{place}#{self._count}" if is_new else place
        while name in self._used:
            name += "'"
        self._used.add(name)
        made = self._nodes[id(value)] = kind(name, value, left_out, is_new=is_new)
        return made

    def _look(self, fresh: Collection[str] = ()) -> bool:
        """Look at all nodes that owners lead to, and forget other nodes; return whether anything has changed.

        Owners that seldom change are looked at only if changed or `fresh`.
        """
        self._turn += 1
        turn, changed = self._turn, False
        moved = [*(self._parts.moved() if self._parts is not None else ()), *self._still.intersection(fresh)]
        work = [*self._active, *(self._roots[name] for name in moved if name in self._roots)]
        for node in work:
            try:
                looks_new = node.look(self)
            except Exception as error:  # noqa: BLE001  # a foreign object may raise anything
                looks_new = node.cannot_look(error)
            if looks_new:
                changed = True
                node.compare(always=self._always)
            for part in node.parts:
                if part.turn != turn:
                    part.turn = turn
                    work.append(part)
        if changed or len(work) != len(self._order):
            for node in self._order:
                if (
                    node.turn != turn
                    and not node.is_new
                    and not (isinstance(node, Whole) and node.nbytes() > COMPARED_NBYTES)
                ):
                    self._kept[node.name] = node
            found = [node for node in chain(self._kept.values(), work) if self._roots.get(node.name) is not node]
            self._nodes, self._used = {id(node.each): node for node in found}, {node.name for node in found}
            changed = True
        self._order = work
        return changed

    def _leave_out(self, lost: dict[str, str]) -> None:
        """Drop the largest entries until the rest fits."""
        assert self._taken is not None
        if sum(node.size for node in self._order) <= self.most_nbytes:
            return
        sizes = {name: size_of(text) for name, text in self._taken.items()}
        total = sum(sizes.values())
        for name in sorted(sizes, key=sizes.__getitem__, reverse=True):
            if total <= self.most_nbytes:
                return
            total -= sizes[name]
            del self._taken[name]
            lost[name.removesuffix(CONTENT)] = f"{size_text(sizes[name])}, more than is left of `attributes_nbytes`"

    def _say(self, lost: Mapping[str, str], remedy: str) -> None:
        if not self._speaks:
            return
        new = {n: why for n, why in zip(map(unnumbered, lost), lost.values(), strict=True) if n not in self._said}
        self._said.update(new)
        if new:
            shown = ", ".join(f"`{name}` ({why})" for name, why in list(new.items())[:_MOST_SAID])
            more = f" and {len(new) - _MOST_SAID} more" if len(new) > _MOST_SAID else ""
            log.warning(
                "not restored after a restart: %s%s: %s. `untouched=[...]` takes names of what a restart may leave out",
                *(shown, more, remedy),
                alike=True,
            )

    def _make(self, texts: Mapping[str, Text], nodes: dict[str, Node]) -> dict[str, str]:
        """Make missing objects; return why some cannot be made."""
        lost, made = dict[str, str](), dict[str, Node]()
        for name, text in texts.items():
            owner, end = _split(name)
            if end != CONTENT or owner in nodes or not isinstance(text, dict):
                continue
            number = re.search(r"#(\d+)", owner)
            if number is None:
                continue  # this process lacks the owner
            self._count = max(self._count, int(number[1]))
            kind, cls = found(text["of"]), KINDS[text["kind"]]
            if not isinstance(kind, type) or not may_make(kind, cls):
                lost[owner] = f"there is no class {text['of']} any more"
                continue
            try:
                each = cls.make(kind, text)
                _, left_out = kind_of(each, is_new=True)
            except Exception as error:  # noqa: BLE001  # the user's `__new__` may raise anything
                lost[owner] = f"{text['of']} makes no empty object: {error!r}"
                continue
            nodes[owner] = self._nodes[id(each)] = made[owner] = cls(owner, each, left_out, is_new=True)
        parts = [(_split(name)[0], ref) for name, text in texts.items() for ref in _refs(text)]
        while hollow := {owner for owner, ref in parts if owner in made and ref not in nodes}:
            for owner in hollow:  # its holder keeps the user code's object
                lost[owner] = "a part of it cannot be made again"
                del nodes[owner], self._nodes[id(made.pop(owner).each)]
        return lost

    def _set(self, node: Node, end: str, text: Text, nodes: Mapping[str, Node]) -> None:
        def read(text: Text, now: Sequence[Any] = ()) -> Any:
            return self._read(text, nodes, now)

        if end == CONTENT:
            if isinstance(text, dict):
                node.fill(text, read)
        elif text == GONE:
            if hasattr(node.each, end[1:]):
                object.__delattr__(node.each, end[1:])
        else:
            space = space_of(node.each)
            object.__setattr__(node.each, end[1:], read(text, [space[end[1:]]] if end[1:] in space else []))

    def _read(self, text: Text, nodes: Mapping[str, Node], now: Sequence[Any] = ()) -> Any:
        """Return a description's value; a value that cannot be stored stays as it is `now`."""
        if type(text) is not tuple:
            return text
        tag, *args = text
        if tag == "kept":
            places = now
        elif tag == "ref":
            places = [nodes[args[0]].each] if args[0] in nodes else []
        elif tag == "at":
            places = [each for name, each in self._at.values() if name == args[0]]
        elif tag == "z":
            places = [frozenset(self._read(arg, nodes) for arg in args[0])]
        elif tag == "b":
            places = [getattr(self._read(args[0], nodes), args[1])]
        elif tag == "r":
            places = [range(*args)]
        else:
            places = [read_named(tag, found(args[0]), [self._read(arg, nodes) for arg in args[1:]])]
        if not places:
            what = "what no journal holds"
            if tag in ("ref", "at"):
                what = f"`{unnumbered(args[0])}`, which this process has not made"
            raise Missing(f"it held {what}")
        return places[0]


class _Parts:
    """First values of `plain` attributes, by part, for a model's parts. There may be thousands of parts, and most never change."""

    def __init__(self, plain: Mapping[str, Sequence[str]], owners: Mapping[str, object]) -> None:
        self._names, self._owners = list(plain), [owners[name] for name in plain]
        self._values = list(map(vars, self._owners))
        self._lengths = list(map(len, self._values))
        # Twice: a getter of one name gives no tuple.
        self._get = [itemgetter(*names, *names) for names in plain.values()]
        self._first = list(map(_GET, self._get, self._values))

    def moved(self) -> dict[str, object]:
        """Return parts with an added, removed or replaced attribute, by name; fast if there are none."""
        return dict(self._moved(0, len(self._names)))

    def _moved(self, start: int, stop: int) -> Iterator[tuple[str, object]]:
        if self._have_moved(slice(start, stop)):
            if stop - start == 1:
                yield self._names[start], self._owners[start]
            else:
                middle = (start + stop) // 2
                yield from self._moved(start, middle)
                yield from self._moved(middle, stop)

    def _have_moved(self, own: slice) -> bool:
        values = self._values[own]
        if list(map(len, values)) != self._lengths[own] or not all(map(is_, map(vars, self._owners[own]), values)):
            return True
        now, first = map(_GET, self._get[own], values), self._first[own]
        try:
            return not all(map(is_, chain.from_iterable(now), chain.from_iterable(first)))
        except KeyError:  # an attribute is gone and another new
            return True


_GET = itemgetter.__call__


def is_of_values(text: Text) -> bool:
    """Return whether a description is a tensor's or an array's."""
    return isinstance(text, dict) and text["kind"] in {"T", "A"}


def _refs(text: Any) -> Iterator[str]:
    """Yield names of objects to which a description refers."""
    if isinstance(text, tuple) and len(text) == 2 and text[0] == "ref":
        yield text[1]
    elif isinstance(text, tuple | list | frozenset | dict):
        yield from chain.from_iterable(map(_refs, text.values() if isinstance(text, dict) else text))


def unnumbered(name: str) -> str:
    """Return an entry's name in the reference."""
    return re.sub(r"#\d+", "", name)


def _split(name: str) -> tuple[str, str]:
    """Return a node's name, and its end of the entry's name."""
    if name.endswith(CONTENT):
        return name.removesuffix(CONTENT), CONTENT
    owner, _, attribute = name.rpartition(".")
    return owner, f".{attribute}"


def _turn_of(name: str, text: Text) -> int:
    if not name.endswith(CONTENT):
        return 1
    return FILLED_LAST.get(text["kind"], 0) if isinstance(text, dict) else 0
