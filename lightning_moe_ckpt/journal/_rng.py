"""Capture and restore random state: torch on CPU and every CUDA device, Python, numpy, and generators of the caller.

Generators that loaders were given must exist again at a restore. Generators of other objects may be missing.

`capture_rng` gives values the journal's codec takes. `restore_rng` puts them back so that every generator continues
with the same draws. Generators of data loader workers are not here; they follow from the state at the epoch's start.
"""

from __future__ import annotations

import copy
import ctypes
import random
from collections.abc import Mapping, Sequence
from functools import lru_cache
from struct import pack
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override
from xxhash import xxh3_64_intdigest

from lightning_moe_ckpt.journal._codec import Constant, encode

RngState: TypeAlias = dict[str, Any]
HeldGenerator: TypeAlias = torch.Generator | np.random.Generator | np.random.RandomState | random.Random


def capture_rng(
    generators: Mapping[str, torch.Generator] | None = None,
    held: Mapping[str, HeldGenerator] | None = None,
    last: RngState | None = None,
) -> RngState:
    """Return copies of all generators' states in this process, with those of loaders and held by other objects.

    Names are the same in every process. `last`, an earlier result, is returned again if nothing was drawn since.
    """
    state: RngState = Constant(
        torch=torch.get_rng_state(),
        python=_python.state(),
        numpy=_numpy.state(),
        generators={name: generator.get_state() for name, generator in generators.items()} if generators else {},
        held={name: held_state(generator) for name, generator in held.items()} if held else {},
    )
    # A process that has not touched CUDA has drawn nothing there; asking would create contexts on every device.
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state_all()
        state["cuda_current"] = torch.cuda.current_device()
    return last if last is not None and _is_same(last, state) else state


def _is_same(last: RngState, state: RngState) -> bool:
    """Return whether two states are equal in every bit, apart from generators of other objects."""
    return (
        last.keys() == state.keys()
        and not (last["held"] or state["held"])
        and last["generators"].keys() == state["generators"].keys()
        and last.get("cuda_current") == state.get("cuda_current")
        and last["python"] is state["python"]
        and last["numpy"] is state["numpy"]
        and all(map(torch.equal, _tensors(last), _tensors(state)))
    )


def _tensors(state: RngState) -> list[Tensor]:
    return [state["torch"], *state["generators"].values(), *state.get("cuda", ())]


def held_state(generator: HeldGenerator) -> Any:
    """Return a generator's state, in types that the journal stores."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, np.random.Generator):
        return copy.deepcopy(generator.bit_generator.state)  # a counter-based one gives its own array
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    return _python_state(*generator.getstate())


@lru_cache(maxsize=4)
def _python_state(version: int, words: tuple[int, ...], gauss: float | None) -> tuple[Any, ...]:
    """Return the state of Python's generator with its words as one array: 625 integers would cost the journal more than all else.

    If nothing was drawn since the last call, which is usual, the same array is returned. Do not write to it.
    """
    array = np.array(words, dtype=np.uint32)
    array.flags.writeable = False
    return (version, array, gauss)


@lru_cache(maxsize=4)
def _mersenne_state(key: bytes, pos: int, has_gauss: int, gauss: str) -> dict[str, Any]:
    """Return numpy's state: like Python's, the same object while nothing is drawn. Do not write to this object."""
    words = {"key": np.frombuffer(key, np.uint32), "pos": pos}
    return {"bit_generator": "MT19937", "state": words, "has_gauss": has_gauss, "gauss": float.fromhex(gauss)}


class _Watched:
    """State of one of the two global generators, read anew only if its memory has changed.

    Reading takes 20 to 40 us, comparing memory 1 to 4, and most steps draw nothing. Equal memory is equal state: every reading
    checks that the memory holds the state just read, and otherwise the memory is not relied upon.
    """

    def __init__(self) -> None:
        self._seen: tuple[bytes, ...] = ()
        self._state: Any = None

    def state(self) -> Any:
        """Return the state: the same object while nothing is drawn. Do not write to this object."""
        if not (seen := self._look()) or seen != self._seen:
            self._state = self._read()
            self._seen = seen if self._holds(seen) else ()
        return self._state

    def _look(self) -> tuple[bytes, ...]:
        raise NotImplementedError

    def _read(self) -> Any:
        raise NotImplementedError

    def _holds(self, seen: tuple[bytes, ...]) -> bool:
        raise NotImplementedError


class _WatchedPython(_Watched):
    """Python's: words and their index in the object, the second of two gaussians in an attribute."""

    _owner: Any = random.getstate.__self__  # type: ignore[attr-defined]  # a bound method

    @override
    def _look(self) -> tuple[bytes, ...]:
        gauss = self._owner.gauss_next
        return _memory_of(self._owner), b"" if gauss is None else pack("d", gauss)

    @override
    def _read(self) -> Any:
        return _python_state(*random.getstate())

    @override
    def _holds(self, seen: tuple[bytes, ...]) -> bool:
        *_, index = words = self._state[1]
        return words[:-1].tobytes() in seen[0] and pack("i", index) in seen[0]


class _WatchedNumpy(_Watched):
    """Numpy's: words and their index where `BitGenerator.ctypes` says, a gaussian in the object."""

    _owner: Any = np.random.get_state.__self__  # type: ignore[attr-defined]  # as above
    _bits: object = None
    _address = 0
    """Address of the words of `_bits`, which stays."""

    @override
    def _look(self) -> tuple[bytes, ...]:
        bits: object = np.random.get_bit_generator()  # type: ignore[attr-defined]  # not in its stubs
        if bits is not self._bits:
            self._bits, self._address = bits, 0
            if type(bits) is np.random.MT19937:
                self._address = bits.ctypes.state_address
        return (_memory_of(self._owner), ctypes.string_at(self._address, _MERSENNE_NBYTES)) if self._address else ()

    @override
    def _read(self) -> Any:
        state: Any = np.random.get_state(legacy=False)  # noqa: NPY002  # the global state is what user code draws from
        if state["bit_generator"] != "MT19937":
            return state
        words = state["state"]
        return _mersenne_state(words["key"].tobytes(), words["pos"], state["has_gauss"], state["gauss"].hex())

    @override
    def _holds(self, seen: tuple[bytes, ...]) -> bool:
        if not seen:
            return False
        words = self._state["state"]
        gauss = pack("d", self._state["gauss"])
        return seen[1] == words["key"].tobytes() + pack("i", words["pos"]) and gauss in seen[0]


def _memory_of(owner: object) -> bytes:
    """Return the bytes of an object itself, without its reference count and type. CPython's `id` is its address."""
    return ctypes.string_at(id(owner) + _HEAD_NBYTES, type(owner).__basicsize__ - _HEAD_NBYTES)


_HEAD_NBYTES = object.__basicsize__
_MERSENNE_NBYTES = 625 * 4
_python, _numpy = _WatchedPython(), _WatchedNumpy()


def restore_rng(
    state: RngState,
    generators: Mapping[str, torch.Generator] | None = None,
    held: Mapping[str, HeldGenerator] | None = None,
) -> list[str]:
    """Restore every generator with a part in `state`.

    A rank that moved to another local device takes the old device's state along. Return names in `generators` or `held` that were captured,
    and now are missing or of another kind.
    """
    if "python" in state:
        random.setstate(_python_words(*state["python"]))
    if "numpy" in state:
        np.random.set_state(state["numpy"])  # noqa: NPY002  # as in `capture_rng`
    if "torch" in state:
        torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        for device, each in enumerate(state["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(each, device)
        torch.cuda.set_rng_state(state["cuda"][state["cuda_current"]], torch.cuda.current_device())
    both = ((state.get("generators", {}), generators or {}), (state.get("held", {}), held or {}))
    return [name for then, now in both for name, each in then.items() if not restore_held(now.get(name), each)]


def restore_held(generator: HeldGenerator | None, state: Any) -> bool:
    """Restore a generator; return whether it is still there, and of the same kind."""
    if isinstance(generator, torch.Generator) and isinstance(state, Tensor):
        generator.set_state(state)
    elif isinstance(generator, np.random.Generator) and _kind(state) == type(generator.bit_generator).__name__:
        generator.bit_generator.state = state
    elif isinstance(generator, np.random.RandomState) and _kind(state) == "MT19937":
        generator.set_state(state)
    elif isinstance(generator, random.Random) and isinstance(state, tuple):
        generator.setstate(_python_words(*state))
    else:
        return False
    return True


def _kind(state: Any) -> object:
    return state.get("bit_generator") if isinstance(state, dict) else None


def _python_words(version: int, words: Any, gauss: float | None) -> tuple[Any, ...]:
    return (version, tuple(words.tolist()), gauss)


def retold_rng(states: Sequence[RngState | None], rank: int, world_size: int) -> tuple[RngState | None, bool]:
    """Return random state for `rank` from another number of ranks' `states`, and whether these were equal.

    A generator with equal states on all ranks keeps its state. With different states an old rank keeps its own, and a new rank's
    follows from its number and the state on rank `rank % len(states)`.
    """
    own, differ = states[rank % len(states)], False
    if own is None:
        return None, True

    def of(value: Any, others: Sequence[Any]) -> Any:
        nonlocal differ
        if all(encode(each) == encode(value) for each in others):
            return value
        differ = True
        return value if rank < len(states) else _derived(value, rank, world_size)

    found, rows = dict(own), [state or {} for state in states]
    for name, value in own.items():
        if name in ("generators", "held"):
            found[name] = {key: of(each, [row.get(name, {}).get(key) for row in rows]) for key, each in value.items()}
        elif name == "cuda":  # a rank draws on its own device, and that state goes along
            now = of(_current(own), list(map(_current, rows)))
            found[name] = [now if device == own.get("cuda_current", 0) else each for device, each in enumerate(value)]
        elif name != "cuda_current":
            found[name] = of(value, [row.get(name) for row in rows])
    return found, not differ


def _current(state: RngState) -> Any:
    return state["cuda"][state.get("cuda_current", 0)] if "cuda" in state else None


def _derived(state: Any, rank: int, world_size: int) -> Any:
    """Return another state for the same kind of generator, a function of the arguments alone."""
    seed = xxh3_64_intdigest(encode([state, rank, world_size])) >> 1
    if isinstance(state, Tensor):
        cpu = torch.Generator().manual_seed(seed).get_state()
        if state.numel() == cpu.numel():
            return cpu
        words = torch.zeros(state.numel() // 8, dtype=torch.int64)  # a device's: seed and offset
        words[0] = seed
        return words.view(torch.uint8)
    if isinstance(state, tuple):
        return _python_state(*random.Random(seed).getstate())  # no secret
    gaussian = {"has_gauss": 0, "gauss": 0.0} if "has_gauss" in state else {}
    return {**state, **getattr(np.random, state["bit_generator"])(seed).state, **gaussian}
