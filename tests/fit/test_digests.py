"""Digests by which a restart tells whether it goes on with the batch of the original run."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from lightning_moe_ckpt.fit._data import digest_of


def batch() -> dict[str, Any]:
    return {"x": torch.arange(6.0).view(2, 3), "y": [np.arange(4), "text", 3, None], "z": (torch.ones(2).bfloat16(),)}


@pytest.mark.parametrize(
    "other",
    [
        {**batch(), "x": torch.arange(6.0).view(3, 2)},
        {**batch(), "x": torch.arange(1.0, 7.0).view(2, 3)},
        {**batch(), "y": [np.arange(4), "texd", 3, None]},
        {**batch(), "y": [np.arange(1, 5), "text", 3, None]},
        {**batch(), "z": [torch.ones(2).bfloat16()]},
        {**batch(), "z": (torch.ones(2).half(),)},
    ],
    ids=["shape", "values", "text", "array", "container", "dtype"],
)
def test_a_batch_that_differs_has_another_digest(other: Any) -> None:
    """Values, shapes, types and structure all count; layout in memory does not."""
    assert digest_of(batch()) == digest_of({**batch(), "x": torch.arange(6.0).view(2, 3).t().contiguous().t()})
    assert digest_of(other) != digest_of(batch())


def test_large_tensors_are_digested_in_part() -> None:
    """Other data differs nearly everywhere, so a part tells; its first and last bytes are in it."""
    large = torch.zeros(2**20)
    first, last = large.clone(), large.clone()
    first[0], last[-1] = 1, 1
    assert len({digest_of(each) for each in (large, first, last, large + 1)}) == 4
