"""Encode plain values and tensors for the journal, and decode them, equal in type and in every bit.

A closed list of exact types is accepted; everything else is refused by name, so that nothing comes back as something
only similar. There is no pickle and no import by name: bytes from a file can only build values of the list below.

Bytes, little endian::

    u64 length of the JSON | u64 length of the array bytes | JSON, ASCII | bytes of all arrays, in order of appearance

The JSON is `[version, node]`. A node is null, true, false, a string, an integer of 64 bits, or `[tag, ...]`::

    i    larger integer: hex                      dt   torch dtype: name
    f    float: `float.hex()`                     dv   torch device: text
    n    float NaN: 16 hex digits                 sz   torch.Size: integers
    s    string that UTF-8 cannot hold: hex       T    tensor: dtype, shape, device it came from
    b    bytes: hex                               A    numpy array: dtype, shape
    l t  list, tuple: nodes                       N    numpy scalar: dtype, hex of its bytes
    e z  set, frozenset: nodes, sorted as text    p    Path: node of its text
    d o  dict, OrderedDict: [key, value] pairs    td   timedelta: days, seconds, microseconds
    c    Counter: pairs                           x    defaultdict: name of its factory, pairs

Array bytes of 512 or more that equal earlier ones are stored once: the node of a tensor or array ends with one more
integer then, the position of the earlier ones among those that are stored. (A journal holds the random state of
several moments between which often nothing was drawn.) That is done as long as what is repeated takes no more than 16
MiB and 16 times the array bytes stored before it, so that a few bytes of a file cannot become gigabytes in memory.

Invariant: one value has one encoding, and `decode` encodes what it read once more and compares the bytes. Duplicate
keys, other spellings of a number, sets in another order and spare bytes therefore all fail in the same place.

The encoder writes text as it goes: lists for a tree would, at every step, count towards the next garbage collection.
Plain leaves are written where they are met, since calls are what a journal costs.

Not kept: identity of objects, the memory layout of arrays, the device of a tensor (it returns on CPU).
"""

from __future__ import annotations

import json
import math
import struct
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from json.encoder import encode_basestring_ascii as _quoted
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from lightning_moe_ckpt.errors import CodecError, Corrupt

_VERSION = 1
_LENGTHS = struct.Struct("<QQ")
_MAX_DEPTH = 64
_CUT = "\0"
"""Stands in the text of a `Constant` where that of an array's place goes; JSON has no such character."""
_SHARED_NBYTES = 512
"""Bytes of the smallest array that is stored once if it repeats."""
_REPEATED_NBYTES, _REPEATED_FACTOR = 16 * 2**20, 16
"""Limits of repeated arrays: bytes, and multiple of the stored array bytes."""
_NATIVE_PATH = type(Path())

Leaf: TypeAlias = Any
"""JSON value of the codec: None, bool, int, str or a list of nodes."""

LEAST_INT, MOST_INT = -(2**63), 2**63 - 1
"""Range of integers that are stored as JSON numbers."""

TORCH_DTYPES = {
    name: getattr(torch, name)
    for name in (
        *("bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"),
        *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
        *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
    )
    if hasattr(torch, name)
}
TORCH_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in TORCH_DTYPES.items()}
NUMPY_DTYPES = {
    np.dtype(order + code).str: np.dtype(order + code)
    for order in "<>"
    for code in ("b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16")
}
FACTORIES: dict[str | None, type | None] = {
    None: None,
    **{cls.__name__: cls for cls in (bool, int, float, str, bytes, list, tuple, set, frozenset, dict)},
}
"""Allowed factories of a `defaultdict`, by name."""

_OF_NUMPY = {torch.float32, torch.float64, torch.int64, torch.bool}
"""The commonest types of tensors that numpy has too, complex ones apart."""
_SMALL_NBYTES = 64


def encode(value: object, on_host: Mapping[int, Tensor] | None = None) -> bytes:
    """Encode `value`. Raises `CodecError` if a part of `value` is not on the closed list; the message says where it
    sits and what it is. `on_host` has host copies of tensors on a device, by the tensor's `id`; others are read, which
    waits for the device.
    """
    return _Encoder(on_host=on_host).encode(value)


def decode(data: bytes | bytearray | memoryview) -> Any:
    """Decode a value, with tensors on the CPU in memory of their own. Raises `Corrupt` unless `data` is exactly a result of `encode`."""
    view = memoryview(data).cast("B")
    decoder = _Decoder(view)
    try:
        value = decoder.decode()
        again = _Encoder(devices=decoder.devices).encode(value)
    except (ValueError, TypeError, LookupError, ArithmeticError, RuntimeError, struct.error) as error:
        raise Corrupt(f"A journal of {len(view)} bytes cannot be read: {error}. Use another copy.") from error
    if again != view:
        raise Corrupt(f"A journal of {len(view)} bytes is not in canonical form. Use another copy.")
    return value


def refusals(value: object) -> list[str]:
    """Return the parts of `value` that `encode` refuses, a line each with place and type; empty if `value` can be stored."""
    encoder = _Encoder(collect=True)
    encoder.node(value)
    return encoder.refused


@dataclass(frozen=True, slots=True, eq=False)
class Unread:
    """Number in a one-element tensor, stored as a number and not read before: reading waits for the device."""

    tensor: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Written:
    """Value without tensors and arrays whose text is made already."""

    text: str


def written(value: object) -> Written:
    """Write a value without tensors and arrays. Raises `CodecError`, see `encode`."""
    encoder = _Outline()
    text = encoder.node(value)
    assert not encoder.arrays
    return Written(text)


class Constant(dict[str, Any]):
    """Dict of plain values and tensors on the CPU that nobody changes any more. It is encoded once, wherever it appears."""

    __slots__ = ("arrays", "texts")

    texts: list[str]
    """Text of its node, cut where the ends of the nodes of its arrays go."""
    arrays: list[bytes]


class _Encoder:
    """Build the text and gather the arrays of one value.

    With `collect` refusals are noted, instead of raising the first. `devices` are those to note for the tensors, in
    order; by default the current ones. For `on_host` see `encode`.
    """

    def __init__(
        self,
        *,
        collect: bool = False,
        devices: Iterable[str] | None = None,
        on_host: Mapping[int, Tensor] | None = None,
    ) -> None:
        self.refused: list[str] = []
        self._collect, self._on_host = collect, on_host or {}
        self._devices = iter(devices) if devices is not None else None
        self._arrays: list[memoryview | bytes] = []
        self._stored: dict[bytes, int] = {}
        self._allowance = _REPEATED_NBYTES
        """Bytes of arrays that may still be repeated; the decoder counts alike."""
        self._place: list[tuple[str, object]] = []
        self._open: list[int] = []

    def encode(self, value: object) -> bytes:
        text = f"[{_VERSION},{self.node(value)}]".encode("ascii")
        return b"".join([_LENGTHS.pack(len(text), sum(map(len, self._arrays))), text, *self._arrays])

    def node(self, value: Any) -> str:
        kind = type(value)
        if (tag := _TAGS.get(kind)) is not None:
            return self.container(tag, value)
        if (leaf := LEAF_WRITERS.get(kind)) is not None:
            return leaf(value)
        if (writer := _WRITERS.get(kind)) is not None:
            return writer(self, value)
        if isinstance(value, np.generic):
            if not is_plain(value.dtype) or value.dtype.type is not type(value):
                return self.refuse(f"numpy scalar of {value.dtype}, which is not a plain number")
            return _tagged("N", [_quoted(value.dtype.str), _quoted(value.tobytes().hex())])
        return self.refuse(f"{kind.__module__}.{kind.__qualname__} is not a type that can be stored exactly")

    def container(self, tag: str, value: Any) -> str:
        """Return the node of a container. One call for each: a journal has a hundred, and its leaves need none."""
        if id(value) in self._open:
            return self.refuse("contains itself")
        if len(self._open) >= _MAX_DEPTH:
            return self.refuse(f"nested more than {_MAX_DEPTH} deep")
        self._open.append(id(value))
        keyed = isinstance(value, dict)
        texts: list[str] = [_text_of_factory(self, value)] if tag == "x" else []
        if tag in {"e", "z"}:
            texts, value = sorted([self.key(item) for item in value]), ()
        for key, item in value.items() if keyed else enumerate(value):
            name = "" if not keyed else _quoted(key) if type(key) is str and key.isascii() else self.key(key)
            if (kind := type(item)) is str and item.isascii():
                text = _quoted(item)
            elif kind is int and LEAST_INT <= item <= MOST_INT:
                text = str(item)
            elif kind is float and item == item:  # noqa: PLR0124  # no NaN
                text = f'["f","{item.hex()}"]'
            elif item is None or kind is bool:
                text = _WORDS[item]
            else:
                self._place.append(("[{!r:.80}]" if keyed else "[{}]", key))  # turned into text only for a refusal
                if (inner := _TAGS.get(kind)) is None:
                    text = self.node(item)
                else:  # half of a journal's are empty
                    text = self.container(inner, item) if item or inner == "x" else f'["{inner}"]'
                self._place.pop()
            texts.append(f"[{name},{text}]" if keyed else text)
        self._open.pop()
        return f'["{tag}",{",".join(texts)}]' if texts else f'["{tag}"]'

    def constant(self, value: Constant) -> str:
        if self._collect:
            return self.container("d", value)
        if not hasattr(value, "texts"):
            once = _Outline()
            value.texts, value.arrays = once.container("d", value).split(_CUT), once.arrays
        texts = value.texts[:1]
        for content, text in zip(value.arrays, value.texts[1:], strict=True):
            texts += self.array(content), text
        return "".join(texts)

    def key(self, value: Any) -> str:
        """Return the node of a dict key or set element. Tensors are refused, since they are hashed by identity."""
        if not _is_key(value):
            return self.refuse(f"{type(value).__qualname__} cannot be a key or the element of a set")
        self._place.append(("[key {!r:.80}]", value))
        node = self.node(value)
        self._place.pop()
        return node

    def array(self, content: memoryview | bytes) -> str:
        """Store bytes and return the end of their node."""
        if (nbytes := len(content)) >= _SHARED_NBYTES:
            position = self._stored.setdefault(bytes(content), len(self._arrays))
            if position < len(self._arrays) and nbytes <= self._allowance:
                self._allowance -= nbytes
                return f",{position}]"
        self._arrays.append(content)
        self._allowance += _REPEATED_FACTOR * nbytes
        return "]"

    def tensor(self, value: Tensor) -> str:
        if (reason := tensor_refusal(value)) is not None:
            return self.refuse(reason)
        device = str(value.device) if self._devices is None else next(self._devices)
        head = _head_of_tensor(value.dtype, value.shape, device)
        if self._collect:  # tensors are not read, which would wait for the device
            return f"{head}]"
        return head + self.array(tensor_content(self._on_host.get(id(value), value) if self._on_host else value))

    def number(self, value: Unread) -> str:
        return "null" if self._collect else self.node(self._on_host.get(id(value.tensor), value.tensor).item())

    def refuse(self, reason: str) -> str:
        place = "".join(template.format(key) for template, key in self._place)
        line = f"`value{place}`: {reason}"
        if not self._collect:
            raise CodecError(f"{line}. Keep plain values or tensors there, or leave it out of the state.")
        self.refused.append(line)
        return "null"


class _Outline(_Encoder):
    """Encoder for a part of values to come: the places of their arrays are not known yet."""

    def __init__(self) -> None:
        super().__init__()
        self.arrays: list[bytes] = []

    @override
    def array(self, content: memoryview | bytes) -> str:
        self.arrays.append(bytes(content))
        return _CUT


class _Decoder:
    """Rebuild one value; may raise any error on bytes that `encode` did not write."""

    def __init__(self, view: memoryview) -> None:
        self.devices: list[str] = []
        self._view = view
        self._arrays = view[:0]
        self._taken: list[memoryview] = []
        self._allowance = _REPEATED_NBYTES

    def decode(self) -> Any:
        text_nbytes, arrays_nbytes = _LENGTHS.unpack_from(self._view)
        stop = _LENGTHS.size + text_nbytes
        if stop + arrays_nbytes != len(self._view):
            raise ValueError("the lengths at its start do not add up to its size")
        self._arrays = self._view[stop:]
        version, node = _loads(str(self._view[_LENGTHS.size : stop], "ascii"))
        if version != _VERSION:
            raise ValueError(f"format version {version!r} is not {_VERSION}")
        return self.value(node)

    def value(self, node: Leaf) -> Any:
        if node is None or type(node) in {bool, int, str}:
            return node
        tag, *args = node
        leaf = LEAF_READERS.get(tag)
        return leaf(args) if leaf is not None else _READERS[tag](self, args)

    def pairs(self, nodes: list[Leaf]) -> Iterator[tuple[Any, Any]]:
        return ((self.value(key), self.value(item)) for key, item in nodes)

    def take(self, nbytes: int, earlier: Sequence[int]) -> memoryview:
        """Return the next array, or an earlier one; its size is checked before memory is allocated."""
        if earlier:
            (position,) = earlier
            taken = self._taken[position]
            if len(taken) != nbytes:
                raise ValueError("an array refers to bytes of another length")
            if nbytes > self._allowance:
                raise ValueError("arrays are repeated until they take more than its size allows")
            self._allowance -= nbytes
            return taken
        if not 0 <= nbytes <= len(self._arrays):
            raise ValueError("an array is larger than the bytes that are there")
        taken, self._arrays = self._arrays[:nbytes], self._arrays[nbytes:]
        self._taken.append(taken)
        self._allowance += _REPEATED_FACTOR * nbytes
        return taken


# -- values without parts: text of a node by exact type, value of a node by tag; one spelling each, with every bit


def is_plain(dtype: np.dtype[Any]) -> bool:
    """Return whether the text of a numpy dtype is unique. `longlong` has the text of `int64` and is another type."""
    return dtype.str in NUMPY_DTYPES and NUMPY_DTYPES[dtype.str].char == dtype.char


def tensor_refusal(value: Tensor) -> str | None:
    """Return why a tensor cannot be stored exactly, or `None`."""
    if value.dtype not in TORCH_NAMES:
        return f"tensor of {value.dtype}, which is not a supported dtype"
    if value.layout is not torch.strided or value.is_nested or value.is_meta:
        return f"tensor that is not dense ({value.layout}, on {value.device})"
    return "tensor that requires grad; detach it" if value.requires_grad else None


def tensor_content(value: Tensor) -> memoryview:
    """Return a tensor's elements in row-major order, on the host; shares its memory if possible."""
    if value.dtype in _OF_NUMPY and value.nbytes <= _SMALL_NBYTES and value.is_cpu and not value.is_neg():
        return memoryview(value.numpy().tobytes())  # a scalar, usually, which the calls below would take 4 us for
    return memoryview(value.resolve_conj().resolve_neg().cpu().reshape(-1).contiguous().view(torch.uint8).numpy().data)


def _text_of_float(value: float) -> str:
    # `float.hex` says "nan" for every NaN; its sign and payload are bits too.
    return f'["n","{struct.pack(">d", value).hex()}"]' if math.isnan(value) else f'["f","{value.hex()}"]'


def _text_of_str(value: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:  # JSON would join two lone surrogates into one character
        return f'["s","{value.encode("utf-8", "surrogatepass").hex()}"]'
    return _quoted(value)


def _read_numpy_scalar(args: list[Leaf]) -> np.generic:
    name, text = args
    scalar: np.generic = np.frombuffer(bytes.fromhex(text), NUMPY_DTYPES[name])[0]
    return scalar


LEAF_WRITERS: dict[type, Callable[[Any], str]] = {
    type(None): lambda value: "null",  # noqa: ARG005  # the value is None
    bool: lambda value: "true" if value else "false",
    int: lambda value: str(value) if LEAST_INT <= value <= MOST_INT else f'["i","{value:#x}"]',
    float: _text_of_float,
    str: _text_of_str,
    bytes: lambda value: f'["b","{value.hex()}"]',
    timedelta: lambda value: f'["td",{value.days},{value.seconds},{value.microseconds}]',
    torch.device: lambda value: f'["dv",{_quoted(str(value))}]',
    torch.Size: lambda value: f'["sz"{"".join(f",{item}" for item in value)}]',
}
LEAF_READERS: dict[str, Callable[[list[Leaf]], Any]] = {
    "i": lambda args: int(args[0], 16),
    "f": lambda args: float.fromhex(args[0]),
    "n": lambda args: struct.unpack(">d", bytes.fromhex(args[0]))[0],
    "s": lambda args: bytes.fromhex(args[0]).decode("utf-8", "surrogatepass"),
    "b": lambda args: bytes.fromhex(args[0]),
    "td": lambda args: timedelta(*args),
    "dt": lambda args: TORCH_DTYPES[args[0]],
    "dv": lambda args: torch.device(args[0]),
    "sz": torch.Size,
    "N": _read_numpy_scalar,
}


# -- all other values


def _loads(text: str) -> Leaf:
    return json.loads(text, parse_float=_no_such_token, parse_constant=_no_such_token, object_hook=_no_such_token)


def _no_such_token(token: object) -> NoReturn:
    raise ValueError(f"{token!r:.40} has no place in a journal")


def _is_key(value: object) -> bool:
    if type(value) in {tuple, frozenset}:
        return all(map(_is_key, value))  # type: ignore[call-overload]  # both are iterable
    return value is None or type(value) in _KEY_TYPES or isinstance(value, np.generic)


_KEY_TYPES = {*LEAF_WRITERS, _NATIVE_PATH, torch.dtype}


def _tagged(tag: str, texts: Sequence[str]) -> str:
    return f'["{tag}",{",".join(texts)}]' if texts else f'["{tag}"]'


def _text_of_shape(shape: Sequence[int]) -> str:
    return f"[{','.join(map(str, shape))}]"


@lru_cache(maxsize=256)
def _head_of_tensor(dtype: torch.dtype, shape: torch.Size, device: str) -> str:
    return f'["T","{TORCH_NAMES[dtype]}",{_text_of_shape(shape)},{_quoted(device)}'


def _text_of_factory(encoder: _Encoder, value: defaultdict[Any, Any]) -> str:
    name = getattr(value.default_factory, "__name__", None)
    if FACTORIES.get(name, encoder) is not value.default_factory:
        return encoder.refuse(f"defaultdict of {value.default_factory!r:.80}, which is not a builtin type")
    return encoder.node(name)


def _write_torch_dtype(encoder: _Encoder, value: torch.dtype) -> str:
    if value not in TORCH_NAMES:
        return encoder.refuse(f"{value} is not a supported dtype")
    return f'["dt","{TORCH_NAMES[value]}"]'


def _write_array(encoder: _Encoder, value: np.ndarray[Any, Any]) -> str:
    if not is_plain(value.dtype):
        return encoder.refuse(f"numpy array of {value.dtype}, which is not a plain number")
    return f'["A","{value.dtype.str}",{_text_of_shape(value.shape)}{encoder.array(value.tobytes())}'


def _read_tensor(decoder: _Decoder, args: list[Leaf]) -> Tensor:
    name, shape, device, *earlier = args
    decoder.devices.append(str(torch.device(device)))
    dtype = TORCH_DTYPES[name]
    content = decoder.take(math.prod(shape) * dtype.itemsize, earlier)
    tensor = torch.empty(shape, dtype=dtype)
    tensor.view(-1).view(torch.uint8).numpy()[:] = np.frombuffer(content, np.uint8)
    return tensor


def _read_array(decoder: _Decoder, args: list[Leaf]) -> np.ndarray[Any, Any]:
    name, shape, *earlier = args
    dtype = NUMPY_DTYPES[name]
    content = decoder.take(math.prod(shape) * dtype.itemsize, earlier)
    array = np.empty(shape, dtype)
    array.reshape(-1).view(np.uint8)[:] = np.frombuffer(content, np.uint8)
    return array


_TAGS: dict[type, str] = {list: "l", tuple: "t", set: "e", frozenset: "z"}
_TAGS |= {dict: "d", OrderedDict: "o", Counter: "c", defaultdict: "x"}
_WORDS = {None: "null", True: "true", False: "false"}
_WRITERS: dict[type, Callable[[_Encoder, Any], str]] = {
    Constant: _Encoder.constant,
    Tensor: _Encoder.tensor,
    Unread: _Encoder.number,
    Written: lambda _, value: value.text,
    np.ndarray: _write_array,
    torch.dtype: _write_torch_dtype,
    _NATIVE_PATH: lambda encoder, value: _tagged("p", [encoder.node(str(value))]),
}
_READERS: dict[str, Callable[[_Decoder, list[Leaf]], Any]] = {
    "l": lambda decoder, args: list(map(decoder.value, args)),
    "t": lambda decoder, args: tuple(map(decoder.value, args)),
    "e": lambda decoder, args: set(map(decoder.value, args)),
    "z": lambda decoder, args: frozenset(map(decoder.value, args)),
    "d": lambda decoder, args: dict(decoder.pairs(args)),
    "o": lambda decoder, args: OrderedDict(decoder.pairs(args)),
    "c": lambda decoder, args: Counter(dict(decoder.pairs(args))),
    "x": lambda decoder, args: defaultdict(FACTORIES[args[0]], decoder.pairs(args[1:])),
    "p": lambda decoder, args: Path(decoder.value(*args)),
    "T": _read_tensor,
    "A": _read_array,
}
