"""The journal's codec returns what it was given, in type and in bits, or refuses it by name."""

from __future__ import annotations

import json
import math
import random
import re
import string
import struct
import tracemalloc
from collections import Counter, OrderedDict, defaultdict
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_moe_ckpt.errors import CheckpointError, CodecError, Corrupt
from lightning_moe_ckpt.journal import Constant, decode, encode, refusals
from lightning_moe_ckpt.journal._codec import FACTORIES, NUMPY_DTYPES, TORCH_DTYPES


class Phase(IntEnum):
    A = 1


class Pair(NamedTuple):
    a: int
    b: int


def same(a: Any, b: Any) -> bool:
    """Equal in type, order and every bit."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        factories = [d.default_factory if isinstance(d, defaultdict) else None for d in (a, b)]
        return factories[0] is factories[1] and same(list(a.items()), list(b.items()))
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, (set, frozenset)):
        return len(a) == len(b) and all(any(same(x, y) for y in b) for x in a)
    return bool(content(a) == content(b))


def content(leaf: Any) -> Any:
    """Something to compare by `==` that shows every bit."""
    if isinstance(leaf, torch.Tensor):
        return leaf.dtype, leaf.shape, raw(leaf)
    if isinstance(leaf, (np.ndarray, np.generic)):
        return leaf.dtype, leaf.shape, leaf.tobytes()
    return struct.pack("<d", leaf) if isinstance(leaf, float) else leaf


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()


def tensor_from(dtype: torch.dtype, shape: list[int], seed: int) -> torch.Tensor:
    """Random bytes as a tensor: every NaN payload and subnormal can turn up."""
    content = random.Random(seed).randbytes(math.prod(shape) * dtype.itemsize)
    tensor = torch.empty(shape, dtype=dtype)
    tensor.view(-1).view(torch.uint8).copy_(torch.tensor(list(content), dtype=torch.uint8))
    return tensor


SHAPES = st.lists(st.integers(0, 3), max_size=3)
SEEDS = st.integers(0, 2**32)
TENSORS = st.builds(tensor_from, st.sampled_from(list(TORCH_DTYPES.values())), SHAPES, SEEDS)
ARRAYS = st.builds(
    lambda dtype, shape, seed: np.frombuffer(
        random.Random(seed).randbytes(math.prod(shape) * dtype.itemsize + 16), dtype, count=math.prod(shape)
    ).reshape(shape),
    st.sampled_from([dtype for dtype in NUMPY_DTYPES.values() if dtype.kind != "b"]),
    SHAPES,
    SEEDS,
)
NUMPY_SCALARS = st.builds(
    lambda dtype, seed: np.frombuffer(random.Random(seed).randbytes(16), dtype)[0],
    st.sampled_from([dtype for dtype in NUMPY_DTYPES.values() if dtype.isnative and dtype.kind != "b"]),
    SEEDS,
)
TEXT = st.text(st.characters(codec=None), max_size=6)  # lone surrogates included
_KEYS = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**70), 2**70),
        st.floats(),
        TEXT,
        st.binary(max_size=5),
        st.timedeltas(),
        st.sampled_from([torch.bfloat16, torch.device("cuda:1")]),
        st.lists(st.integers(0, 9), max_size=3).map(torch.Size),
        st.text(string.ascii_letters + "/.", max_size=5).map(Path),
        NUMPY_SCALARS,
    ),
    lambda keys: st.one_of(st.lists(keys, max_size=2).map(tuple), st.frozensets(keys, max_size=2)),
    max_leaves=3,
)


@st.composite
def keys(draw: st.DrawFn) -> Any:
    """Anything that may be a key; a function, because the text of the strategy itself is very long."""
    return draw(_KEYS)


def containers(parts: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    dicts = st.dictionaries(keys(), parts, max_size=3)
    return st.one_of(
        st.lists(parts, max_size=4),
        st.lists(parts, max_size=4).map(tuple),
        st.sets(keys(), max_size=3),
        dicts,
        dicts.map(OrderedDict),
        dicts.map(Counter),
        st.builds(defaultdict, st.sampled_from(list(FACTORIES.values())), dicts),
    )


_VALUES = st.recursive(st.one_of(keys(), TENSORS, ARRAYS), containers, max_leaves=12)


@st.composite
def values(draw: st.DrawFn) -> Any:
    """Anything the codec accepts."""
    return draw(_VALUES)


@settings(max_examples=120, deadline=None)
@given(values())
def test_what_is_accepted_comes_back_equal(value: Any) -> None:
    """Types, order, NaN payloads, signs of zero: all of it."""
    data = encode(value)
    assert same(decode(data), value)
    assert refusals(value) == []
    assert encode(decode(memoryview(data))) == data


@settings(max_examples=120, deadline=None)
@given(values(), st.data())
def test_a_changed_byte_is_another_value_or_corrupt(value: Any, draw: st.DataObject) -> None:
    """No change of a byte raises anything but `Corrupt`, and what is still read is spelled in the one right way."""
    data = bytearray(encode(value))
    place = draw.draw(st.integers(0, len(data) - 1))
    data[place] ^= draw.draw(st.integers(1, 255))
    outcome = attempt(bytes(data))
    if not isinstance(outcome, Corrupt):
        assert without_devices(encode(outcome)) == without_devices(data)


def attempt(data: bytes) -> Any:
    try:
        return decode(data)
    except CheckpointError as error:
        return error


def without_devices(data: bytes | bytearray) -> bytes:
    """A tensor that says it came from an `xpu` is read all the same, and then says `cpu`."""
    return re.sub(rb'"[a-z]pu"\]', b'""]', data)


@settings(max_examples=40, deadline=None)
@given(values())
def test_a_truncated_or_extended_journal_is_corrupt(value: Any) -> None:
    """Every prefix of an encoding, and an encoding with a byte more, is refused."""
    data = encode(value)
    for stop in {0, 7, 15, 16, len(data) // 2, len(data) - 1}:
        with pytest.raises(Corrupt):
            decode(data[: min(stop, len(data) - 1)])
    with pytest.raises(Corrupt):
        decode(data + b"\0")


def forged(node: object, arrays: bytes = b"") -> bytes:
    text = json.dumps([1, node], separators=(",", ":")).encode()
    return struct.pack("<QQ", len(text), len(arrays)) + text + arrays


@pytest.mark.parametrize(
    "node",
    [
        1.5,
        {"a": 1},
        [],
        [7],
        ["unknown"],
        ["l", ["i", "0x1"]],  # an integer that has a shorter spelling
        ["i", "0xZZ"],
        2**70,
        ["f", "1.0"],
        ["f", "nan"],
        ["n", "3ff0000000000000"],  # not a NaN
        ["b", "AB"],
        ["b", "a b"],
        ["s", "61"],  # UTF-8 can hold it
        ["d", ["a", 1], ["a", 2]],
        ["d", ["a"]],
        ["d", [["l"], 1]],  # a key that cannot be hashed
        ["e", "b", "a"],
        ["e", "a", "a"],
        ["x", "eval", ["a", 1]],
        ["dt", "quint8"],
        ["dv", "nowhere"],
        ["p", "a//b"],
        ["td", 0, 100000, 0],
        ["sz", 1.5],
        ["T", "float32", [1], "cpu"],  # four bytes that are not there
        ["T", "float32", [-1, -1], "cpu"],
        ["T", "float32", [2**40, 2**40], "cpu"],
        ["A", "<i4", [2**62]],
        ["A", "|O", [0]],
        ["N", ">i4", "00000001"],
        ["E", "this.Enum", "true"],  # no class is looked for by name
    ],
    ids=lambda node: json.dumps(node)[:30],
)
def test_forged_nodes_are_corrupt(node: object) -> None:
    """Unknown tags, duplicates, other spellings and impossible sizes are all refused, before anything large is made."""
    with pytest.raises(Corrupt):
        decode(forged(node))


@pytest.mark.parametrize("text", ["\ud83d\ude00", "\ud83d", "a\udc80", "\U0001f600", "\0"], ids=ascii)
def test_strings_that_are_no_text_survive(text: str) -> None:
    """JSON joins two lone surrogates into one character, and file names may hold undecodable bytes."""
    assert decode(encode({text: text, "path": Path(f"x{text}")})) == {text: text, "path": Path(f"x{text}")}


def test_bytes_that_no_array_claims_are_corrupt() -> None:
    """The lengths add up and every node is good, yet something was added."""
    with pytest.raises(Corrupt, match="canonical"):
        decode(forged(["A", "<i4", [1]], b"\0" * 8))


def test_deep_nesting_is_corrupt_or_refused() -> None:
    """Neither direction runs into the interpreter's recursion limit."""
    deep: list[Any] = []
    for _ in range(100):
        deep = [deep]
    with pytest.raises(CodecError, match="nested more than 64 deep"):
        encode(deep)
    text = b"[1," + b'["l",' * 50_000 + b"1" + b"]" * 50_001
    with pytest.raises(Corrupt):
        decode(struct.pack("<QQ", len(text), 0) + text)


def test_a_container_that_holds_itself_is_refused() -> None:
    """A cycle is named, also in a dry run."""
    cycle: dict[str, Any] = {"a": []}
    cycle["a"] += [cycle, cycle]
    assert refusals(cycle) == ["`value['a'][0]`: contains itself", "`value['a'][1]`: contains itself"]
    with pytest.raises(CodecError, match="contains itself"):
        encode(cycle)


@pytest.mark.parametrize(
    "value",
    [
        Pair(1, 2),
        object(),
        len,
        lambda: None,
        complex(1, 2),
        bytearray(b"a"),
        range(3),
        Phase.A,
        type("D", (dict,), {})(),
        torch.nn.Parameter(torch.zeros(1)),
        torch.zeros(1, requires_grad=True),
        torch.zeros(2).to_sparse(),
        torch.zeros(2, device="meta"),
        np.array([object()]),
        np.array(["text"]),
        np.longlong(1),
        np.array([1], np.longlong),
        np.ma.masked_array([1]),
        defaultdict(lambda: 0),
        {torch.zeros(1): 1},
        torch.quint8,
    ],
    ids=lambda value: type(value).__name__,
)
def test_everything_else_is_refused_with_its_place(value: Any) -> None:
    """The dry run and the error both say where the value sits."""
    state = {"callbacks": [1, value, 2.0]}
    refused = refusals(state)
    assert len(refused) == 1
    assert refused[0].startswith("`value['callbacks'][1]")
    with pytest.raises(CodecError) as caught:
        encode(state)
    assert str(caught.value).startswith(refused[0])


def test_a_dry_run_lists_every_refusal() -> None:
    """One line per place, so that a user can repair all of them at once."""
    assert refusals({"a": len, "b": {3: object()}, "c": 1}) == [
        "`value['a']`: builtins.builtin_function_or_method is not a type that can be stored exactly",
        "`value['b'][3]`: builtins.object is not a type that can be stored exactly",
    ]


def test_views_and_lazy_bits_of_tensors_are_resolved() -> None:
    """Strides, conjugation and negation are carried out; the elements are what counts."""
    base = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    values = [base.t(), base[:, ::2], torch.complex(base, base).conj(), torch.complex(base, base).conj().imag]
    for value, read in zip(values, decode(encode(values)), strict=True):
        assert torch.equal(read, value)
        assert read.is_contiguous()


def test_decoded_tensors_own_their_memory() -> None:
    """Writing to the journal's bytes afterwards changes nothing, and the values can be written to."""
    data = bytearray(encode([torch.zeros(4), np.zeros(4)]))
    tensor, array = decode(data)
    data[-64:] = b"\xff" * 64
    tensor += 1
    array += 1
    assert tensor.tolist() == array.tolist() == [1.0] * 4


def test_the_device_of_a_tensor_is_noted_but_not_needed() -> None:
    """Bytes that say `cuda:0` are read on a machine without one."""
    data = encode(torch.tensor([1, 2]))
    noted = forged(["T", "int64", [2], "cuda:0"], data[-16:])
    assert torch.equal(decode(noted), torch.tensor([1, 2]))


def test_scheduler_and_optimizer_states_are_accepted() -> None:
    """What torch's own schedulers and AdamW keep is on the list."""
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2))])
    schedulers = [
        torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 5]),
        torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer),
        torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3),
    ]
    state = {"optimizer": optimizer.state_dict(), "schedulers": [s.state_dict() for s in schedulers]}
    assert same(decode(encode(state)), state)


def test_equal_large_arrays_are_stored_once() -> None:
    """Tensors and arrays alike, and only if every byte is equal; each comes back in memory of its own."""
    words = np.arange(600, dtype=np.uint32)
    other = words.copy()
    other[-1] += 1
    value: list[Any] = [
        words,
        torch.from_numpy(words.view(np.uint8).copy()),
        other,
        words.copy(),
        words[:100],
        words[:100],
    ]
    data = encode(value)
    assert len(data) < 2 * words.nbytes + 2 * 400 + 300
    found = decode(data)
    for want, got in zip(value, found, strict=True):
        assert type(got) is type(want)
        assert got.dtype == want.dtype
        assert got.tolist() == want.tolist()
    found[0][0] = 7
    assert found[3][0] == found[1][0] == 0


def test_repeated_arrays_cannot_take_more_than_the_size_of_the_file_allows() -> None:
    """A forged journal of a mebibyte whose nodes all name its one array; then as often as is allowed, and once more."""
    array = bytes(2**20)
    node = f'["A","|u1",[{len(array)}]'
    text = f'[1,["l",{node}],{",".join([f"{node},0]"] * 20_000)}]]'.encode()
    tracemalloc.start()
    with pytest.raises(Corrupt, match="repeated"):
        decode(struct.pack("<QQ", len(text), len(array)) + text + array)
    assert tracemalloc.get_traced_memory()[1] < 64 * 2**20
    tracemalloc.stop()
    value = [np.zeros(2**20, np.uint8)] * 34
    data = encode(value)
    assert 2 * 2**20 < len(data) < 2 * 2**20 + 2000  # 16 MiB, and 16 times one stored array, are repetitions
    assert same(decode(data), value)


@pytest.mark.parametrize("spoil", [b",1]]", b",9]]", b',"0"]]', b"]]"])
def test_a_reference_to_other_bytes_is_corrupt(spoil: bytes) -> None:
    """Of another length, to nothing, of another type, or left out."""
    data = encode(
        [torch.zeros(600, dtype=torch.uint8), torch.ones(512, dtype=torch.uint8), torch.zeros(600, dtype=torch.uint8)]
    )
    text, arrays = data[16:-1112], data[-1112:]
    assert text.endswith(b",0]]]")
    text = text.removesuffix(b",0]]]") + spoil + b"]"
    with pytest.raises(Corrupt):
        decode(struct.pack("<QQ", len(text), len(arrays)) + text + arrays)


def test_a_constant_is_encoded_as_the_dict_that_it_is() -> None:
    """Wherever it appears, and beside arrays that it repeats or that repeat its own."""
    state = {"words": np.arange(600), "more": [torch.arange(3), {"gauss": -0.0, "none": None}], "none": {}}
    constant = Constant(state)
    for value in ({"a": 1, "b": constant}, [constant, constant], [np.arange(600), {"c": (constant,)}, torch.ones(200)]):
        assert encode(value) == encode(plain(value))
    assert refusals(Constant(a=len)) == refusals({"a": len}) != []


def plain(value: Any) -> Any:
    """The value with dicts for constants."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return type(value)(map(plain, value)) if type(value) in {list, tuple} else value
