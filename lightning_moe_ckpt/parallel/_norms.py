"""Norm of all gradients, experts counted once, with the same bits whether a rank holds whole gradients or pieces.

*Blocks.* A parameter's flat elements are cut into blocks. Their size depends on the number of elements alone. Ranks own
whole blocks if they share a parameter's optimizer state.

*Sums.* The powers of a block's elements are added in a tree: the second half to the first, element by element, until one
is left. Each addition is a correctly rounded one of IEEE 754. So a block's sum does not depend on the blocks beside it,
threads, processor or device, as it may in a reduction of torch. The same trees add blocks to parameters and parameters
to the model, in fp64.

*Ranks.* Owners of blocks put their sums into a vector that is zero elsewhere, and add the vectors; adding zero is exact.
Expert-parallel ranks hold different experts, so each contributes the sums of its own. Every rank combines the same
numbers in the same order, then all take the first one's result. Stages of a pipeline contribute one norm each.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial, reduce
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_moe_ckpt.parallel._collectives import all_gather_flat
from lightning_moe_ckpt.parallel._groups import GroupName, ParallelGroups

_SMALLEST, _LARGEST = 32, 32768
_MOST_BLOCKS = 1024
_CHUNK_NUMEL, _DEVICE_CHUNK_NUMEL = 2**20, 2**24
"""Elements whose powers are in memory at once: few enough for a processor's cache, enough for few launches on a device."""


def block_numel(numel: int) -> int:
    """Return the elements per block of a parameter: a power of two, 32 to 32768, so that blocks are at most 1024 where the limits allow.

    Args:
        numel: elements of the whole parameter; of all its replicas and cuts alike.
    """
    return min(max(_power_of_two(-(-numel // _MOST_BLOCKS)), _SMALLEST), _LARGEST)


def pieces(numel: int, parts: int) -> list[tuple[int, int]]:
    """Return flat intervals of a parameter, one per owner, that are cut between blocks. The last may be shorter than its blocks.

    Args:
        numel: elements of the whole parameter.
        parts: owners, at least one. All have equally many blocks, but for the last with any, which may have fewer.
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

    Args:
        named_gradients: gradients in the same order of names on all ranks of a stage; `None` means no gradient.
        expert_parallel: names with different experts on each expert-parallel rank. Equal on all ranks of a stage; a name
            without a gradient on this rank counts as zero.
        groups: this rank's groups.
        norm_type: as in `torch.nn.utils.clip_grad_norm_`, above zero, infinity included. Bits are independent of pieces and
            threads for whole numbers and infinity.
        device: device of the result if there is no gradient at all.
        whole: elements of the parameter, for names whose gradient here is a flat piece: the interval of `pieces` with this
            rank's index in the group `stage`, or `expert_data` for an expert-parallel name. Equal on that group's ranks.

    Returns:
        A scalar on the gradients' device, equal in bits for whole gradients and pieces: fp64 if all gradients are and there
            are no expert-parallel names and stages, otherwise fp32.

    Raises:
        ValueError: `norm_type` is not above zero.
    """
    if not norm_type > 0:
        raise ValueError(f"`norm_type={norm_type}` must be above zero. Infinity gives the largest absolute value.")
    named = list(named_gradients)
    present = [grad for _, grad in named if grad is not None]
    device = present[0].device if present else device or torch.device("cpu")
    own = dict(named)
    dense = [(name, grad) for name, grad in named if name not in expert_parallel]
    experts = [(name, own.get(name)) for name in sorted(expert_parallel)]
    of_names = partial(_totals, groups=groups, norm_type=norm_type, device=device, whole=whole)
    totals = [of_names(dense, "stage")]
    if experts:
        totals.append(_gathered(of_names(experts, "expert_data"), groups, "expert"))
    total = _root(_sum(torch.cat(totals), _added(norm_type)), norm_type)
    stage = groups.group("stage")
    if stage is not None and stage.size() > 1:
        dist.broadcast(total, groups.ranks("stage")[0], group=stage)
    if groups.num_stages > 1:
        # The same numbers in the same order on all ranks, replicas of a stage having the same bits.
        total = _root(_sum(_gathered(total.view(1), groups, "pipeline"), norm_type), norm_type)
    elif present and not expert_parallel and all(grad.dtype == torch.float64 for grad in present):
        return total
    return total.to(torch.float32)


def _totals(
    named: Sequence[tuple[str, Tensor | None]],
    owners: GroupName,
    *,
    groups: ParallelGroups,
    norm_type: float,
    device: torch.device,
    whole: Mapping[str, int],
) -> Tensor:
    """Return one sum per name, in fp64; zero for a name without a gradient. Collective among the owners of pieces, if there are pieces."""
    zero = torch.zeros(1, device=device)
    grads = [zero if grad is None or grad.numel() == 0 else grad for _, grad in named]
    numels = [whole.get(name, grad.numel()) for (name, _), grad in zip(named, grads, strict=True)]
    sums = [each.to(device) for each in _sums(grads, [block_numel(numel) for numel in numels], norm_type)]
    cut = [position for position, (name, _) in enumerate(named) if name in whole]
    if cut:
        placed = _placed([sums[position] for position in cut], [numels[position] for position in cut], groups, owners)
        for position, blocks in zip(cut, placed, strict=True):
            sums[position] = blocks
    lengths = [_power_of_two(each.numel()) for each in sums]
    return torch.cat([zero.double()[:0], *_sums(sums, lengths, _added(norm_type))])


def _placed(sums: Sequence[Tensor], numels: Sequence[int], groups: ParallelGroups, owners: GroupName) -> list[Tensor]:
    """Return the sums of all blocks of parameters, given those of this rank's pieces. Collective among owners."""
    ranks = groups.ranks(owners)
    parts, part = len(ranks), ranks.index(groups.rank)
    blocks = [max(-(-numel // block_numel(numel)), 1) for numel in numels]
    zeros = sums[0].new_zeros(max(blocks))
    spans = list[Tensor]()
    for own, numel, count in zip(sums, numels, blocks, strict=True):
        start, stop = (_cut(numel, parts, end) for end in (part, part + 1))
        first = start // block_numel(numel)
        kept = own[: -(-(stop - start) // block_numel(numel))]  # none of an empty piece, whose one sum is zero
        spans += [zeros[:first], kept, zeros[: count - first - kept.numel()]]
    everything = torch.cat(spans)
    group = groups.group(owners)
    if group is not None and parts > 1:
        dist.all_reduce(everything, group=group)
    return list(torch.split(everything, blocks))


def _sums(tensors: Sequence[Tensor], widths: Sequence[int], norm_type: float) -> list[Tensor]:
    """Return for each tensor a vector in fp64: the sums of powers of its rows of `width` elements."""
    alike = defaultdict[tuple[int, torch.dtype, torch.device], list[int]](list)
    for position, (tensor, width) in enumerate(zip(tensors, widths, strict=True)):
        alike[width, tensor.dtype, tensor.device].append(position)
    sums = list(tensors)
    for (width, *_), positions in alike.items():
        chosen = [tensors[position] for position in positions]
        rows = torch.cat([_fold(rows, norm_type) for rows in _packed(chosen, width)])
        counts = [-(-tensor.numel() // width) for tensor in chosen]
        for position, own in zip(positions, torch.split(rows, counts), strict=True):
            sums[position] = own
    return sums


def _packed(tensors: Sequence[Tensor], width: int) -> Iterator[Tensor]:
    """Yield the rows of tensors in their order, some at a time, each tensor's last row filled with zeros.

    The caller may overwrite them. All are in the same memory: on CPU fresh pages would cost more than the sums. They are
    in fp32 unless the tensors are in fp64.
    """
    most = max(_CHUNK_NUMEL if tensors[0].is_cpu else _DEVICE_CHUNK_NUMEL, width)
    room = min(most, sum(tensor.numel() + -tensor.numel() % width for tensor in tensors))
    memory = tensors[0].new_empty(room, dtype=torch.promote_types(tensors[0].dtype, torch.float32))
    zeros, spans, filled = tensors[0].new_zeros(width), list[Tensor](), 0
    for tensor in tensors:
        flat = tensor.detach().reshape(-1)
        for span in torch.split(flat, most) if flat.numel() > most else (flat,):
            tail = -span.numel() % width
            if filled + span.numel() + tail > most:
                yield torch.cat(spans, out=memory[:filled]).view(-1, width)
                spans, filled = [], 0
            spans += [span, zeros[:tail]] if tail else [span]
            filled += span.numel() + tail
    yield torch.cat(spans, out=memory[:filled]).view(-1, width)


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
    return _sums([values], [_power_of_two(values.numel())], norm_type)[0].sum()  # one value, or none


def _root(total: Tensor, norm_type: float) -> Tensor:
    if norm_type == math.inf:
        return total
    return total.sqrt() if norm_type == 2 else total.pow(1 / norm_type)


def _added(norm_type: float) -> float:
    """Return the norm type that adds sums of powers as they are."""
    return math.inf if norm_type == math.inf else 1.0


def _gathered(own: Tensor, groups: ParallelGroups, name: GroupName) -> Tensor:
    """Return the vectors of all ranks of a group, one behind the other. Collective."""
    group = groups.group(name)
    if group is None or group.size() == 1:
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
