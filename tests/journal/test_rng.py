"""Random state comes back through the journal so that every generator continues with the same draws."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from lightning_moe_ckpt.journal import HeldGenerator, capture_rng, decode, encode, restore_rng


def draws(*generators: torch.Generator) -> list[float]:
    """From every source, the cached second gaussian of Python and numpy included."""
    own = [torch.rand((), generator=g).item() for g in generators]
    legacy = [np.random.standard_normal(), np.random.random()]  # noqa: NPY002  # the global state is under test
    return [torch.rand(()).item(), torch.randn(()).item(), random.random(), random.gauss(0, 1), *legacy, *own]


def test_every_generator_continues_with_the_same_draws() -> None:
    """State captured in one place and restored in a scrambled one gives bit-equal draws."""
    own = torch.Generator().manual_seed(3)
    draws(own)  # leaves a cached gaussian behind
    data = encode(capture_rng({"noise": own}))
    wanted = [draws(own) for _ in range(3)]
    torch.manual_seed(99)
    random.seed(99)
    np.random.seed(99)  # noqa: NPY002  # as above
    other = torch.Generator().manual_seed(99)
    restore_rng(decode(data), {"noise": other})
    assert [draws(other) for _ in range(3)] == wanted


def test_captured_state_is_a_copy() -> None:
    """Draws after the capture do not change it."""
    own = torch.Generator().manual_seed(3)
    state = capture_rng({"noise": own})
    before = encode(state)
    draws(own)
    assert encode(state) == before


def test_state_is_small() -> None:
    """The journal carries two of these per step; 625 integers as text would be the most of it."""
    assert len(encode(capture_rng())) < 12_000


def test_generators_that_are_not_there_are_named() -> None:
    """All others go on, and one that is new stays as it is."""
    kept, new = torch.Generator(), torch.Generator()
    state = capture_rng({"noise": torch.Generator(), "kept": kept}, {"gone": torch.Generator()})
    wanted, new_state = draws(kept), new.get_state()
    assert restore_rng(state, {"gate": new, "kept": kept}) == ["noise", "gone"]
    assert draws(kept) == wanted
    assert torch.equal(new.get_state(), new_state)


@pytest.mark.gpu
def test_cuda_generators_continue_with_the_same_draws() -> None:
    """Every local device is captured."""
    torch.rand(1, device="cuda")
    state = decode(encode(capture_rng()))
    wanted = torch.rand(4, device="cuda")
    torch.cuda.manual_seed_all(7)
    restore_rng(state)
    assert torch.equal(torch.rand(4, device="cuda"), wanted)


def held_draws(held: dict[str, HeldGenerator]) -> list[object]:
    """Of every kind that objects may hold."""
    return [
        torch.rand((), generator=held["torch"]).item(),  # type: ignore[arg-type]
        held["pcg"].standard_normal(),  # type: ignore[union-attr]
        held["philox"].integers(9, dtype="uint32"),  # type: ignore[union-attr]
        held["legacy"].standard_normal(),  # type: ignore[union-attr]
        held["python"].gauss(0, 1),  # type: ignore[union-attr]
    ]


def held_generators(seed: int) -> dict[str, HeldGenerator]:
    return {
        "torch": torch.Generator().manual_seed(seed),
        "pcg": np.random.default_rng(seed),
        "philox": np.random.Generator(np.random.Philox(seed)),
        "legacy": np.random.RandomState(seed),
        "python": random.Random(seed),
    }


def test_held_generators_continue_with_the_same_draws() -> None:
    """Half-used words and cached gaussians included; one that is gone or of another kind is named, the others go on."""
    held = held_generators(1)
    held_draws(held)
    data = encode(capture_rng(held=held))
    wanted = [held_draws(held) for _ in range(3)]
    others = held_generators(2)
    assert restore_rng(decode(data), held=others) == []
    assert [held_draws(others) for _ in range(3)] == wanted
    changed: dict[str, HeldGenerator] = {**others, "pcg": others["philox"]}
    del changed["legacy"]
    assert sorted(restore_rng(decode(data), held=changed)) == ["legacy", "pcg"]


def test_state_is_the_same_object_while_nothing_is_drawn() -> None:
    """So it is encoded once; a draw from any generator makes another, whose bytes are those of a state without a history."""
    own = torch.Generator().manual_seed(3)
    last = capture_rng({"noise": own})
    assert capture_rng({"noise": own}, last=last) is last
    draw: Callable[[], object]
    for draw in (
        lambda: torch.rand(()),
        random.random,
        np.random.random,  # the global state is under test
        lambda: torch.rand((), generator=own),
    ):
        draw()
        state = capture_rng({"noise": own}, last=last)
        assert encode(state) == encode(dict(capture_rng({"noise": own}))) != encode(last)
        last = state
    held = {"own": random.Random(1)}
    assert capture_rng(held=held, last=capture_rng()) is not last


def test_no_draw_is_overlooked() -> None:
    """Neither one that only uses up a cached gaussian, nor a state that is set, nor another kind of generator."""
    legacy: Any = np.random  # the global state is under test
    before = legacy.get_state()
    cached = legacy.RandomState(3)
    cached.standard_normal()
    with_gaussian = cached.get_state()
    without_gaussian = (*with_gaussian[:3], 0, 0.0)
    moves: dict[str, Callable[[], object]] = {
        "python, first of two gaussians": lambda: random.gauss(0, 1),
        "python, second": lambda: random.gauss(0, 1),
        "numpy, first": legacy.standard_normal,
        "numpy, second": legacy.standard_normal,
        "words of a given state": lambda: legacy.set_state(without_gaussian),
        "the same words with a gaussian": lambda: legacy.set_state(with_gaussian),
        "and with its negative": lambda: legacy.set_state((*with_gaussian[:4], -with_gaussian[4])),
        "many words": lambda: legacy.bytes(4 * 624),
        "another kind": lambda: legacy.set_bit_generator(np.random.PCG64(3)),
        "a draw of that": legacy.random,
        "the kind before": lambda: legacy.set_bit_generator(np.random.MT19937(3)),
        "a draw of the other instance": legacy.random,
    }
    try:
        last = capture_rng()
        for name, move in moves.items():
            move()
            state = capture_rng(last=last)
            assert encode(state) != encode(last), name
            kept, wanted = decode(encode(state)), draws()
            restore_rng(kept)
            assert draws() == wanted, name
            restore_rng(kept)
            assert encode(capture_rng()) == encode(kept), name
            last = capture_rng()
    finally:
        legacy.set_bit_generator(np.random.MT19937(1))
        legacy.set_state(before)
