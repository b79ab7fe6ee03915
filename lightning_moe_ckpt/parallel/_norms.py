"""Norm of all gradients, with the same bits whether a rank holds whole gradients or pieces.

*Blocks.* A parameter's flat elements are cut into blocks. Their size depends on the number of elements alone. Ranks own
whole blocks if they share a parameter's optimizer state.
"""

from __future__ import annotations

from itertools import pairwise

_SMALLEST, _LARGEST = 32, 32768
_MOST_BLOCKS = 1024


def block_numel(numel: int) -> int:
    """Return the elements per block of a parameter: a power of two, 32 to 32768, so that blocks are at most 1024 where the limits allow.

    Args:
        numel: elements of the whole parameter; of all its replicas and cuts alike.
    """
    least = -(-numel // _MOST_BLOCKS)
    return min(max(1 << max(least - 1, 0).bit_length(), _SMALLEST), _LARGEST)


def pieces(numel: int, parts: int) -> list[tuple[int, int]]:
    """Return flat intervals of a parameter, one per owner, that are cut between blocks. The last may be shorter than its blocks.

    Args:
        numel: elements of the whole parameter.
        parts: owners, at least one. The numbers of blocks of two owners differ by one at most, so some may be empty.
    """
    block = block_numel(numel)
    blocks = -(-numel // block)
    cuts = [min(part * blocks // parts * block, numel) for part in range(parts + 1)]
    return list(pairwise(cuts))
