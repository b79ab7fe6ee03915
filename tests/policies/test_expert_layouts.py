"""The tables of a real model: where its experts lie and what one takes."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from lightning_moe_ckpt.moe import MoELayer
from lightning_moe_ckpt.operators import discover
from lightning_moe_ckpt.policies import expert_layouts


def test_layouts_of_a_model() -> None:
    """Layers in the order of the counts; experts that all ranks hold have one position, shared ones as many as ranks."""
    model = nn.Sequential(MoELayer(4, 8, 4), nn.Linear(4, 4), MoELayer(4, 8, 6))
    found = discover(model)
    nbytes = {op.name: 12 * op.numel for op in found}
    first, second = expert_layouts(found, nbytes)
    assert (first.layer, second.layer) == tuple(layer.fqn for layer in found.layers)
    assert first.rank_of == (0,) * 4
    assert first.nbytes == 12 * (4 * 8 + 8 + 8 * 4 + 4)
    shared = [replace(layer, holders="expert_data") for layer in found.layers]
    first, second = expert_layouts(replace(found, layers=tuple(shared), ep_size=2), nbytes)
    assert (first.rank_of, second.rank_of) == ((0, 0, 1, 1), (0, 0, 0, 1, 1, 1))
