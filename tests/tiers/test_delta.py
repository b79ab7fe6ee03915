"""A segment rebuilt from the one before it and the gradients of a step has the bytes of the real optimizer's state."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from door import DeltaDecoder, EncodedDelta, encode_delta
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_moe_ckpt.errors import Corrupt
from lightning_moe_ckpt.tiers import _delta
from lightning_moe_ckpt.tiers._delta_plan import index_of
from lightning_moe_ckpt.tiers._peer_wire import compress, decompress

from . import _steps
from ._steps import OPTIMIZERS, Training, baseline, decode, feed

SIZES = (130, 7, 1000)
ALL = (0, 1, 2)


def encoded_step(training: Training, before: Sequence[int], after: Sequence[int], routed: Sequence[int]) -> tuple[
    EncodedDelta, Tensor, Tensor
]:  # fmt: skip
    """A step of training as a delta, with the segments on both sides of it."""
    base = training.segment(before)
    training.take_step(routed)
    segment = training.segment(after)
    return encode_delta(baseline(base), segment, training.gradients()), base, segment


@pytest.mark.parametrize("options", OPTIMIZERS, ids=lambda o: "-".join(f"{k}={v}" for k, v in o.items()))
def test_ten_steps_are_rebuilt_from_their_gradients(options: dict[str, Any]) -> None:
    """Each from what was rebuilt before it: Adam and AdamW, weight decay, amsgrad, maximize, a schedule."""
    training = Training(sizes=SIZES, **options)
    training.take_step(ALL)
    copy = training.segment(ALL)
    for _ in range(10):
        encoded, _, segment = encoded_step(training, ALL, ALL, ALL)
        copy = decode(encoded, copy, training.slot_nbytes(segment))
        assert torch.equal(copy, segment)


SELECTIONS = [tuple(permutation) for n in range(4) for permutation in itertools.permutations(ALL, n)]


def test_every_change_of_selection_is_rebuilt() -> None:
    """All subsets in all orders before and after, with experts that were stepped, not stepped, and never stepped."""
    routings: list[tuple[tuple[int, ...], tuple[int, ...]]] = [(ALL, ALL), ((0, 1), ALL), ((0, 1), (1, 2)), (ALL, ())]
    for first, second in routings:
        training = Training(sizes=(5, 70, 16))
        training.take_step(first)
        bases = {selection: training.segment(selection) for selection in SELECTIONS}
        training.take_step(second)
        segments = {selection: training.segment(selection) for selection in SELECTIONS}
        for before, after in itertools.product(SELECTIONS, SELECTIONS):
            encoded = encode_delta(baseline(bases[before]), segments[after], training.gradients())
            rebuilt = decode(encoded, bases[before], training.slot_nbytes(segments[after]))
            assert torch.equal(rebuilt, segments[after]), (first, second, before, after)


@given(data=st.data())
@settings(max_examples=40)
def test_any_history_is_rebuilt(data: st.DataObject) -> None:
    """Sizes, settings, selections, routing and chunks of any kind."""
    sizes = data.draw(st.lists(st.integers(1, 100), min_size=1, max_size=4))
    some = st.lists(st.sampled_from(range(len(sizes))), unique=True)
    training = Training(
        sizes=sizes, averages=data.draw(st.booleans()), seed=data.draw(st.integers(0, 99)),
        **data.draw(st.sampled_from(OPTIMIZERS)),
    )  # fmt: skip
    copy = training.segment(data.draw(some))
    for _ in range(data.draw(st.integers(1, 4))):
        after = data.draw(some)
        training.take_step(data.draw(some))
        segment = training.segment(after)
        encoded = encode_delta(baseline(copy), segment, training.gradients())
        copy = decode(encoded, copy, training.slot_nbytes(segment), data.draw(st.sampled_from([1, 7, 64, 500])))
        assert torch.equal(copy, segment)


def test_a_part_that_was_not_stepped_takes_nothing_but_what_all_take() -> None:
    """No gradient came, or never one: the bytes are those of the segment before."""
    training = Training(sizes=SIZES)
    training.take_step((0,))  # 1 and 2 have no state yet
    encoded, base, segment = encoded_step(training, ALL, ALL, ())
    assert torch.equal(decode(encoded, base, training.slot_nbytes(segment)), segment)
    expert_nbytes = min(training.sizes) * 12
    assert encoded.payload_nbytes < 37 * 12 + 1500 + expert_nbytes


def test_the_first_step_of_a_part_travels_as_it_is() -> None:
    """Moments began from nothing, of which the segment before has no bytes."""
    training = Training(sizes=(50_000,))
    encoded, base, segment = encoded_step(training, (0,), (0,), (0,))
    assert encoded.payload_nbytes > 50_000 * 12
    assert torch.equal(decode(encoded, base, training.slot_nbytes(segment)), segment)


@pytest.mark.parametrize(("dtype", "part"), [(torch.float32, 0.35), (torch.bfloat16, 1 / 6)])
def test_a_delta_is_a_small_part_of_the_segment(dtype: torch.dtype, part: float) -> None:
    """What an expert adds to it, recipe included, of what it adds to the segment; other tensors travel either way."""
    training = Training(sizes=[40_000] * 3, dtype=dtype)
    training.take_step(ALL)
    few, _, small = encoded_step(training, (0,), (0,), ALL)
    many, _, large = encoded_step(training, ALL, ALL, ALL)
    delta_nbytes = many.payload_nbytes - few.payload_nbytes + len(many.recipe) - len(few.recipe)
    assert delta_nbytes <= part * (large.numel() - small.numel())


@pytest.mark.parametrize("used", [0, 1, 4096, 40_000])
def test_room_of_a_journal_that_is_zero_is_not_sent(used: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In whole blocks of 4 KiB; the receiver's memory, which had other bytes, is zero there."""
    monkeypatch.setattr(_steps, "JOURNAL_NBYTES", 40_000)
    training = Training(sizes=SIZES)
    training.take_step(ALL)
    base = training.segment(ALL)
    training.take_step(ALL)
    segment = training.segment(ALL)
    segment[-40_000:] = 0
    segment[-40_000 : segment.numel() - 40_000 + used] = 7
    encoded, whole = (
        encode_delta(baseline(base), each, training.gradients()) for each in (segment, training.segment(ALL))
    )
    assert 0 <= (40_000 - used) - (whole.payload_nbytes - encoded.payload_nbytes) < 4096
    assert torch.equal(decode(encoded, base, training.slot_nbytes(segment)), segment)


def test_payload_is_views() -> None:
    """Nothing is copied to be sent; gradients that follow each other are one view."""
    training = Training(sizes=SIZES)
    training.take_step(ALL)
    encoded, _, segment = encoded_step(training, ALL, ALL, ALL)
    memory = {each.untyped_storage().data_ptr() for each in (segment, training.area)}
    assert {view.untyped_storage().data_ptr() for view in encoded.payload} == memory
    assert len(encoded.payload) == 3  # what is before the experts, the journal behind them, the gradients


def _changed(training: Training, what: str) -> tuple[EncodedDelta, Tensor, Tensor]:
    """A step with something about it that is not true."""
    encoded, base, segment = encoded_step(training, ALL, ALL, ALL)
    gradients = training.gradients()
    if what == "base":
        other = base.clone()
        index = index_of(baseline(base).header)
        index.layout.view(other, f"{index.prefixes[1]}/exp_avg")[0] += 1e-3
        return encoded, other, segment
    if what == "bit":
        gradients.area[3 * 4] ^= 1
    else:
        parts = {
            name: replace(part, settings=replace(part.settings, **{what: getattr(part.settings, what) * 1.001}))
            for name, part in gradients.parts.items()
            if part.settings is not None
        }
        encoded = encode_delta(baseline(base), segment, replace(gradients, parts=parts))
    return encoded, base, segment


@pytest.mark.parametrize("what", ["lr", "beta1", "beta2", "weight_decay", "base", "bit"])
def test_ablation_another_step_gives_other_bytes(what: str) -> None:
    """What the digest is for: a setting, a number of the segment before, or a bit of a gradient is not the owner's."""
    training = Training(sizes=SIZES, weight_decay=0.1)
    training.take_step(ALL)
    encoded, base, segment = _changed(training, what)
    rebuilt = decode(encoded, base, training.slot_nbytes(segment))
    assert rebuilt.shape == segment.shape
    assert not torch.equal(rebuilt, segment)


def test_a_recipe_is_refused_where_it_does_not_belong() -> None:
    """Another segment before, a flipped bit, half of it, memory that is too small; never another error."""
    training = Training(sizes=SIZES)
    training.take_step(ALL)
    encoded, base, segment = encoded_step(training, ALL, ALL, ALL)
    out = torch.zeros(training.slot_nbytes(segment), dtype=torch.uint8)
    for other in (training.segment((0, 2)), training.segment((0,)), torch.zeros(5000, dtype=torch.uint8)):
        with pytest.raises(Corrupt):
            DeltaDecoder(encoded.recipe, other, out)
    for end in range(0, len(encoded.recipe), 7):
        with pytest.raises(Corrupt):
            DeltaDecoder(encoded.recipe[:end], base, out)
    for place in range(0, len(encoded.recipe), 3):
        flipped = bytearray(encoded.recipe)
        flipped[place] ^= 4
        with pytest.raises(Corrupt):
            DeltaDecoder(bytes(flipped), base, out)
    with pytest.raises(Corrupt):
        DeltaDecoder(encoded.recipe, base, out[: segment.numel()])


@pytest.mark.parametrize("place", [(1, 5), (0, 0), (0, 10**9)])
def test_bytes_out_of_turn_are_refused(place: tuple[int, int]) -> None:
    """Before anything is written."""
    training = Training(sizes=SIZES)
    training.take_step(ALL)
    encoded, base, segment = encoded_step(training, ALL, ALL, ALL)
    decoder = DeltaDecoder(encoded.recipe, base, torch.zeros(training.slot_nbytes(segment), dtype=torch.uint8))
    with pytest.raises(Corrupt):
        decoder.place(*place)


def test_bfloat16_gradients_bring_state_close_to_the_owners() -> None:
    """Not its bytes: after 20 steps, parameters differ by little of what the steps have changed."""
    training = Training(sizes=SIZES, dtype=torch.bfloat16)
    training.take_step(ALL)
    copy = training.segment(ALL)
    for _ in range(20):
        training.take_step(ALL)
        segment = training.segment(ALL)
        encoded = encode_delta(baseline(copy), segment, training.gradients())
        decoder = DeltaDecoder(encoded.recipe, copy, torch.zeros(training.slot_nbytes(segment), dtype=torch.uint8))
        feed(decoder, encoded.payload, 4096)
        copy = decoder.segment
    layout = decoder.plan.layout
    for prefix in index_of(layout.header).prefixes[1:]:
        near, exact = (layout.view(each, f"{prefix}/param") for each in (copy, segment))
        assert 0 < (near - exact).abs().max() < 1e-3
        assert torch.equal(layout.view(copy, f"{prefix}/step"), layout.view(segment, f"{prefix}/step"))


LINES = st.lists(st.binary(max_size=60), max_size=6).map(b"\n".join)


@given(data=LINES, like=LINES)
def test_squeezed_bytes_come_back(data: bytes, like: bytes) -> None:
    """Whatever the older version was."""
    assert decompress(compress(data, like), like, len(data)) == data


@given(told=st.binary(max_size=80), like=LINES)
def test_what_was_not_squeezed_is_refused_or_is_bytes(told: bytes, like: bytes) -> None:
    """No other error, whatever comes."""
    with contextlib.suppress(Corrupt):
        assert isinstance(decompress(told, like, 2**20), bytes)


@pytest.mark.parametrize("kernel", ["cpu plain", "cuda fused", "x", 1, None])
def test_a_recipe_that_names_a_kernel_is_refused(kernel: object) -> None:
    """Which of torch's kernels repeats a step is judged by the rank that takes it, never by a holder of copies."""
    found = {
        "lr": 0.1,
        "beta1": 0.9,
        "beta2": 0.999,
        "eps": 1e-8,
        "weight_decay": 0.0,
        "decoupled": True,
        "maximize": False,
    }
    document = {"settings": [found], "dtype": "F32", "audit": False, "zeros": 0, "digest": None}
    assert _delta._read(json.dumps(document).encode())[0][0].kernel == ""
    found["kernel"] = kernel  # type: ignore[assignment]
    with pytest.raises(Corrupt):
        _delta._read(json.dumps(document).encode())
