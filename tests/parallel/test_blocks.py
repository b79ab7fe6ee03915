"""Parameters are cut into equal blocks, of which owners get equally many."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_moe_ckpt.parallel._norms import block_numel, pieces


@pytest.mark.parametrize(
    ("numel", "block"),
    [(0, 32), (1, 32), (2**15, 32), (2**15 + 1, 64), (2**25, 2**15), (2**25 + 1, 2**15), (2**40, 2**15)],
)
def test_a_block_is_as_small_as_the_number_of_blocks_allows(numel: int, block: int) -> None:
    """1024 blocks at most, within the limits of a block."""
    assert block_numel(numel) == block


@given(numel=st.integers(0, 2**40) | st.integers(0, 5000), parts=st.integers(1, 70))
def test_owners_get_consecutive_whole_blocks_equally_many_but_for_the_last(numel: int, parts: int) -> None:
    """Cuts are multiples of 32 elements, which is 64 bytes of the smallest gradients; blocks are no finer than they need be."""
    block = block_numel(numel)
    assert block in {2**power for power in range(5, 16)}
    assert block == 2**15 or numel <= 1024 * block
    assert block == 32 or numel > 1024 * block // 2
    cut = pieces(numel, parts)
    assert len(cut) == parts
    assert [stop for _, stop in cut[:-1]] == [start for start, _ in cut[1:]]
    assert cut[0][0] == 0
    assert cut[-1][1] == numel
    assert all(start <= stop for start, stop in cut)
    assert all(start % block == 0 or start == numel for start, _ in cut)
    counts = [-(-(stop - start) // block) for start, stop in cut]
    most = -(-numel // (block * parts))
    *full, last = [count for count in counts if count] or [0]
    assert set(full) <= {most}
    assert last <= most
