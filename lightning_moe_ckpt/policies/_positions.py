"""Plans that expert-parallel ranks agree on although their experts differ.

Ranks that share a reduction must capture a dense operator in the same window step, but rank 0's experts may be popular
in another order than rank 1's. So plans are over *positions*: dense operators and routers by name, and "the k-th least
popular expert here" of each layer. The positions, their sizes and their order depend only on counts summed over all
ranks, so all ranks make the same plan; each then puts its own experts into the positions.

Source: MoEvement (2026), Sec. 3.5; we differ in agreeing between ranks: it orders one rank's operators only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from lightning_moe_ckpt.operators import MoELayerSpec, Operator, OperatorSet
from lightning_moe_ckpt.policies._plan import Plan, WindowStep
from lightning_moe_ckpt.policies._popularity import Order
from lightning_moe_ckpt.policies._windows import PlanItem

Counts = Tensor | Sequence[float]


def positions(
    operators: OperatorSet, counts: Counts, *, sizes: Mapping[str, tuple[int, int]], by: Order = "popularity"
) -> list[PlanItem]:
    """Return the positions to plan instead of operators; equal on all ranks if `counts` and `by` are.

    Args:
        operators: of this rank, possibly split.
        counts: popularity per expert over all layers, summed over all ranks (frozen at the window's first step).
        sizes: `(FULL, COMPUTE)` bytes of each operator. Experts of one layer must have equal sizes on all ranks.
        by: order of capture, see `order`; only `popularity` looks at `counts`. A model without experts has no
            popularity and is captured back to front (MoEvement, Appendix E).
    """
    layers = _layers(operators, counts, by)
    if by == "popularity" and not operators.layers:
        by = "back_to_front"
    items = []
    for i, (position, op) in enumerate(_assign(operators, layers)):
        key = {"fixed": i, "back_to_front": -i}.get(by, position.popularity)
        full_nbytes, compute_nbytes = sizes[op.name]
        items.append(PlanItem(position.name, full_nbytes, compute_nbytes, key))
    return items


def assign_positions(plan: Plan, operators: OperatorSet, counts: Counts, *, by: Order = "popularity") -> Plan:
    """Return the plan over operators of all ranks, from the plan over positions; equal on all ranks.

    Args:
        plan: over the positions of these operators.
        operators: of this rank.
        counts: counts that the positions were made from.
        by: order that the positions were made with.

    Raises:
        ValueError: the plan does not name exactly the positions of these operators.
    """
    layers = _layers(operators, counts, by)
    holders = {position.name: position.holders for position, _ in _assign(operators, layers)}
    if set(plan.names) != set(holders):
        raise ValueError("The plan does not belong to these operators: it names other positions.")
    steps = tuple(
        WindowStep(
            {"durable": {name: kind for position, kind in step.files["durable"].items() for name in holders[position]}}
        )
        for step in plan.steps
    )
    return Plan(steps, plan.interval_steps, plan.partial)


def all_names(operators: OperatorSet) -> list[str]:
    """Return the operator names of all ranks, from this rank's: each rank holds as many experts, cut alike."""
    layers = {
        layer.fqn: (layer, {expert: k for k, expert in enumerate(layer.local_expert_ids)}) for layer in operators.layers
    }
    names: list[str] = []
    for op in operators:
        if op.layer is None or op.expert_idx is None:
            names.append(op.name)
        else:
            layer, place = layers[op.layer]
            parts = operators.ep_size if layer.holders == "expert_data" else 1
            each, piece = layer.num_experts // parts, _piece(op)
            names += [f"{layer.prefix}/expert.{r * each + place[op.expert_idx]}{piece}" for r in range(parts)]
    return names


@dataclass(frozen=True, slots=True)
class _Position:
    name: str
    holders: list[str]
    """Operators at the position, one of each expert-parallel rank."""
    popularity: float = float("inf")
    """Popularity of the position; operators that every token uses come after all experts."""


@dataclass(frozen=True, slots=True)
class _Layer:
    prefix: str
    """Prefix of the layer's operator names."""
    ordered: list[int]
    """Local experts, least popular first."""
    everywhere: list[list[int]]
    """Experts of each expert-parallel rank, least popular first; one row if all ranks hold all experts."""
    keys: list[float]
    """Popularity of each position, summed over the expert-parallel ranks."""


def _assign(operators: OperatorSet, layers: Mapping[str, _Layer]) -> Iterator[tuple[_Position, Operator]]:
    """Yield positions in the order of the model, each with this rank's operator for it."""
    local = {(layer.fqn, expert): k for layer in operators.layers for k, expert in enumerate(layer.local_expert_ids)}
    pieces = {(op.layer, op.expert_idx, _piece(op)): op for op in operators}
    for op in operators:
        if op.layer is None or op.expert_idx is None:
            yield _Position(op.name, [op.name]), op
        else:
            k, layer, piece = local[op.layer, op.expert_idx], layers[op.layer], _piece(op)
            holders = [f"{layer.prefix}/expert.{ordered[k]}{piece}" for ordered in layer.everywhere]
            position = _Position(f"{op.layer}/position.{k}{piece}", holders, layer.keys[k])
            yield position, pieces[op.layer, layer.ordered[k], piece]


def _piece(op: Operator) -> str:
    """Return the suffix that `split` appended to the name."""
    _, mark, number = op.name.partition("#")
    return mark + number


def _layers(operators: OperatorSet, counts: Counts, by: Order) -> dict[str, _Layer]:
    values = counts.tolist() if isinstance(counts, Tensor) else list(counts)
    if len(values) != operators.num_experts:
        raise ValueError(f"`counts` has {len(values)} entries for {operators.num_experts} experts.")
    if by != "popularity":
        values = [0.0] * len(values)
    offsets = operators.count_offsets
    return {
        layer.fqn: _layer(layer, values[offsets[layer.fqn] :][: layer.num_experts], operators.ep_size)
        for layer in operators.layers
    }


def _layer(layer: MoELayerSpec, counts_E: list[float], ep_size: int) -> _Layer:
    parts = ep_size if layer.holders == "expert_data" else 1
    each = layer.num_experts // parts
    rows = [sorted(range(r * each, (r + 1) * each), key=lambda e: (counts_E[e], e)) for r in range(parts)]
    local = sorted(layer.local_expert_ids, key=lambda e: (counts_E[e], e))
    keys = [sum(counts_E[expert] for expert in column) for column in zip(*rows, strict=True)]
    return _Layer(layer.prefix, local, rows, keys)
