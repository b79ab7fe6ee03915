"""Norm of all gradients, experts counted once, with the same bits whether a rank holds whole gradients or pieces.

*Blocks.* A parameter's flat elements are cut into blocks. Their size depends on the number of elements alone. Ranks own
whole blocks if they share a parameter's optimizer state.

*Sums.* On a device the powers of a block's elements are added in a tree: the second half to the first, element by element,
until one is left. So a block's sum does not depend on the blocks beside it, as it may in a reduction of torch, whose launch
follows the number of blocks. On the CPU torch reduces a row alike whichever rows are beside it, at a third of a tree's cost.
Blocks are added to parameters and parameters to the model likewise, in fp64.

*Ranks.* Owners of blocks put their sums into a vector that is zero elsewhere, and add the vectors; adding zero is exact.
Expert-parallel ranks hold different experts, so each contributes the sums of its own. Every rank combines the same
numbers in the same order, then all take the first one's result. Stages of a pipeline contribute one norm each.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial, reduce
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_moe_ckpt.parallel._collectives import all_gather_flat
from lightning_moe_ckpt.parallel._groups import GroupName, ParallelGroups

_SMALLEST, _LARGEST = 32, 32768
_MOST_BLOCKS = 1024
_CHUNK_NUMEL, _DEVICE_CHUNK_NUMEL = 2**17, 2**24
"""Elements whose powers are in memory at once: few enough for a processor's cache, enough for few launches on a device."""


@cache
def block_numel(numel: int) -> int:
    """Return elements per block of a whole parameter: a power of two, 32 to 32768, for at most 1024 blocks where the limits allow."""
    return min(max(_power_of_two(-(-numel // _MOST_BLOCKS)), _SMALLEST), _LARGEST)


def pieces(numel: int, parts: int) -> list[tuple[int, int]]:
    """Return flat intervals of a parameter, one per owner, that are cut between blocks. All have equally many blocks,
    but for the last with any, which may have fewer, and whose last block may be shorter.
    """
    return list(pairwise(_cut(numel, parts, part) for part in range(parts + 1)))


def global_grad_norm(
    named_gradients: Iterable[tuple[str, Tensor | None]],
    *,
    expert_parallel: Collection[str],
    groups: ParallelGroups,
    norm_type: float = 2.0,
    device: torch.device | None = None,
    whole: Mapping[str, int] = {},
) -> Tensor:
    """Return the gradient norm of the whole model, over all stages, after reduction. Collective.

    A scalar on the gradients' device (`device` without any), equal in bits for whole gradients and pieces: fp64 if all
    gradients are and there are no expert-parallel names and stages, otherwise fp32. Bits are independent of pieces and
    threads for whole `norm_type`s and infinity. Raises `ValueError` if `norm_type`, as in
    `torch.nn.utils.clip_grad_norm_`, is not above zero.

    Gradients come in the same order of names on all ranks of a stage; `None` means no gradient. Names in
    `expert_parallel` have different experts on each expert-parallel rank; without a gradient on this rank they count as
    zero. `whole` has the parameter's elements, for names whose gradient here is a flat piece: the interval of `pieces`
    with this rank's index in the group `stage`, or `expert_data` for an expert-parallel name. Both are equal on the
    group's ranks.
    """
    if not norm_type > 0:
        raise ValueError(f"`norm_type={norm_type}` must be above zero. Infinity gives the largest absolute value.")
    named = list(named_gradients)
    present = [grad for _, grad in named if grad is not None]
    device = present[0].device if present else device or torch.device("cpu")
    of_names = partial(_total, groups=groups, norm_type=norm_type, device=device, whole=whole)
    totals = [of_names([(name, grad) for name, grad in named if name not in expert_parallel], "stage")]
    if expert_parallel:
        own = dict(named)
        experts = of_names([(name, own.get(name)) for name in sorted(expert_parallel)], "expert_data")
        totals.append(_gathered(experts, groups, "expert"))
    total = _root(_sum(torch.cat(totals), _added(norm_type)), norm_type)
    if (stage := groups.group("stage")) is not None and stage.size() > 1:
        dist.broadcast(total, groups.ranks("stage")[0], group=stage)
    if groups.num_stages > 1:
        # The same numbers in the same order on all ranks, replicas of a stage having the same bits.
        total = _root(_sum(_gathered(total.view(1), groups, "pipeline"), norm_type), norm_type)
    elif present and not expert_parallel and all(grad.dtype == torch.float64 for grad in present):
        return total
    return total.to(torch.float32)


def _total(
    named: Iterable[tuple[str, Tensor | None]],
    owners: GroupName,
    *,
    groups: ParallelGroups,
    norm_type: float,
    device: torch.device,
    whole: Mapping[str, int],
) -> Tensor:
    """Return the sum over names, `[1]` in fp64. Collective among the owners of pieces, if there are pieces."""
    alike = defaultdict[tuple[int, torch.dtype, torch.device], list[tuple[str, Tensor]]](list)
    for name, grad in named:
        if grad is not None:
            numel = whole.get(name)
            alike[block_numel(grad.numel() if numel is None else numel), grad.dtype, grad.device].append((name, grad))
    sums = [torch.zeros(1, dtype=torch.float64, device=device)]
    for (width, *_), kind in alike.items():
        rows = _sums([grad for _, grad in kind], width, norm_type).to(device)
        sums += _placed(rows, kind, width, (groups.ranks(owners), groups.rank), whole) if whole else [rows]
    everything, group = torch.cat(sums), groups.group(owners)
    if whole and group is not None and group.size() > 1:
        dist.all_reduce(everything, group=group)
    return _sums([everything], _power_of_two(everything.numel()), _added(norm_type))


def _placed(
    rows: Tensor,
    kind: Sequence[tuple[str, Tensor]],
    width: int,
    place: tuple[Sequence[int], int],
    whole: Mapping[str, int],
) -> list[Tensor]:
    """Return the sums of all blocks, zero where other owners have them; the first owner has those of whole gradients."""
    (ranks, rank) = place
    parts, part = len(ranks), ranks.index(rank)
    counts = [-(-grad.numel() // width) for _, grad in kind]
    spans = list[Tensor]()
    for (name, _), own in zip(kind, torch.split(rows, counts), strict=True):
        if (numel := whole.get(name)) is None:
            spans.append(own if part == 0 else torch.zeros_like(own))
        else:
            before = _cut(numel, parts, part) // width
            spans += [own.new_zeros(before), own, own.new_zeros(-(-numel // width) - before - own.numel())]
    return spans


def _sums(tensors: Sequence[Tensor], width: int, norm_type: float) -> Tensor:
    """Return the sums of powers of the tensors' rows of `width` elements, one tensor behind the other, in fp64."""
    sums_of = _reduced if tensors[0].is_cpu else _fold
    none = torch.zeros(0, dtype=torch.float64, device=tensors[0].device)
    return torch.cat([none, *(sums_of(rows, norm_type) for rows in _packed(tensors, width))])


def _reduced(rows: Tensor, norm_type: float) -> Tensor:
    """Return the sums of the powers of each row, in fp64, by torch's own reduction on the CPU."""
    norms: Tensor = torch.linalg.vector_norm(rows, norm_type, dim=1).double()
    return norms if norm_type == math.inf else norms**norm_type


def _packed(tensors: Sequence[Tensor], width: int) -> Iterator[Tensor]:
    """Yield the rows of tensors in their order, some at a time, each tensor's last row filled with zeros.

    The caller may overwrite those on a device. Small tensors are packed into the same memory, since on CPU fresh pages would cost
    more than the sums. Rows are in fp32 unless the tensors are in fp64.
    """
    wide, in_place = torch.promote_types(tensors[0].dtype, torch.float32), tensors[0].is_cpu
    most = max(_CHUNK_NUMEL if in_place else _DEVICE_CHUNK_NUMEL, width)
    room = min(most, sum(tensor.numel() + width for tensor in tensors))
    memory = tensors[0].new_empty(room, dtype=wide)
    zeros, spans, filled = tensors[0].new_zeros(width), list[Tensor](), 0
    for tensor in tensors:
        flat = tensor.detach().reshape(-1)
        large, as_is = flat.numel() > (most // 8 if in_place else most), in_place and flat.dtype is wide
        for span in (
            torch.split(flat, _lengths(flat.numel(), width, flat.numel() if as_is else most)) if large else (flat,)
        ):
            tail = -span.numel() % width
            alone = large and as_is and not tail
            if filled and (alone or filled + span.numel() + tail > most):
                yield torch.cat(spans, out=memory[:filled]).view(-1, width)
                spans, filled = [], 0
            if alone:
                yield span.view(-1, width)
            else:
                spans += [span, zeros[:tail]] if tail else [span]
                filled += span.numel() + tail
    if filled:
        yield torch.cat(spans, out=memory[:filled]).view(-1, width)


def _lengths(numel: int, width: int, most: int) -> list[int]:
    """Return lengths of parts: whole rows, then the rest of a row."""
    end = numel // width * width
    full, rest = divmod(end, most)
    return [length for length in (*[most] * full, rest, numel - end) if length]


def _fold(rows: Tensor, norm_type: float) -> Tensor:
    """Return the sums of the powers of each row, in fp64; overwrites the rows."""
    base = rows if norm_type % 2 == 0 else rows.abs_()
    if norm_type == 2:
        powers = rows.mul_(rows)
    elif norm_type == math.inf:
        powers = base
    elif norm_type == int(norm_type):  # by multiplications: `pow` may round differently in the rest of a vector loop
        powers = reduce(torch.mul, [base] * int(norm_type))
    else:
        powers = base.pow(norm_type)
    add = torch.maximum if norm_type == math.inf else torch.add
    while powers.shape[1] > 1:
        left, right = powers.chunk(2, 1)
        powers = add(left, right, out=left)
    return powers[:, 0].to(torch.float64, copy=True)


def _sum(values: Tensor, norm_type: float) -> Tensor:
    """Return the sum of powers of a vector, a scalar."""
    return _sums([values], _power_of_two(values.numel()), norm_type)[0]


def _root(total: Tensor, norm_type: float) -> Tensor:
    if norm_type == math.inf:
        return total
    return total.sqrt() if norm_type == 2 else total.pow(1 / norm_type)


def _added(norm_type: float) -> float:
    """Return the norm type that adds sums of powers as they are."""
    return math.inf if norm_type == math.inf else 1.0


def _gathered(own: Tensor, groups: ParallelGroups, name: GroupName) -> Tensor:
    """Return the vectors of all ranks of a group, one behind the other. Collective."""
    if (group := groups.group(name)) is None or group.size() == 1:
        return own
    everyone = own.new_empty(group.size() * own.numel())
    all_gather_flat(everyone, own, group)
    return everyone


def _power_of_two(least: int) -> int:
    return 1 << max(least - 1, 0).bit_length()


def _cut(numel: int, parts: int, part: int) -> int:
    """Return where a part begins: at a multiple of the block, or at the end."""
    block = block_numel(numel)
    return min(part * -(-numel // (block * parts)) * block, numel)
