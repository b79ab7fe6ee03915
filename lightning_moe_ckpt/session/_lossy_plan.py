"""The stored plan of a lossy generation: which experts it takes, as JSON that is equal on all ranks.

A generation has two flavours, one in memory and one in storage, with the same plan but for `level`. Their markers
differ, since what is stored borrows the experts that it lacks from older generations, and so may their bytes; so their
hashes differ too. `family` is the same, and either record gives the other.

Copies on other nodes are of the flavour of memory, or, under budgets of bytes, of a third one: the same experts as in
storage, and nothing borrowed.

Source: PEC/MoC (2024), Sec. 3.2 (two-level PEC).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from lightning_moe_ckpt.errors import IdentityMismatch
from lightning_moe_ckpt.operators import OperatorSet
from lightning_moe_ckpt.session._layout import hash_of_plan

LossyRecord = dict[str, Any]
"""JSON values, equal on all ranks: `config`, `memory`, `storage`, `level`, `family`."""

Level = Literal["memory", "storage", "peer"]

Experts = tuple[tuple[int, ...], ...]
"""Global indices of experts, ascending, by MoE layer in the order of the model."""


def lossy_record(config: Mapping[str, Any], memory: Experts, storage: Experts) -> LossyRecord:
    """The record of a plan, as memory has it.

    Args:
        config: of the policy.
        memory: experts that memory takes.
        storage: those of them that storage takes too.
    """
    shared = {
        "config": dict(config),
        "memory": [list(each) for each in memory],
        "storage": [list(each) for each in storage],
    }
    return {**shared, "family": hash_of_plan(shared), "level": "memory"}


def is_lossy(record: Mapping[str, Any]) -> bool:
    """Whether a plan takes only some experts."""
    return "family" in record


def has_two_levels(record: LossyRecord) -> bool:
    """Whether memory takes experts that storage does not."""
    return bool(record["memory"] != record["storage"])


def flavour(record: LossyRecord, level: Level) -> LossyRecord:
    """The record of the same generation at a level."""
    return {**record, "level": level}


def storage_flavour(record: LossyRecord) -> LossyRecord:
    """The record that storage has of a generation, from that of either flavour."""
    return flavour(record, "storage")


def peer_flavour(record: LossyRecord) -> LossyRecord:
    """The record that copies on other nodes have where they take what storage takes, from that of any flavour."""
    return flavour(record, "peer")


def memory_flavour(record: LossyRecord) -> LossyRecord:
    """The record that memory has of a generation, from that of either flavour."""
    return flavour(record, "memory")


def experts_of(record: LossyRecord, level: Level | None = None) -> Experts:
    """Experts that a flavour holds, by layer: that of the record's own level, unless another is named."""
    level = level or record["level"]
    chosen: Sequence[Sequence[int]] = record["storage" if level == "peer" else level]
    return tuple(tuple(each) for each in chosen)


def check_experts(record: LossyRecord, operators: OperatorSet) -> None:
    """Raise `IdentityMismatch` unless a stored plan names layers and experts that the model has."""
    for level in ("memory", "storage"):
        layers = record[level]
        sizes = [layer.num_experts for layer in operators.layers]
        if len(layers) != len(sizes) or any(
            not 0 <= e < size for layer, size in zip(layers, sizes, strict=True) for e in layer
        ):
            raise IdentityMismatch(
                f"The stored plan takes experts {layers} of layers with {sizes} experts. "
                "Resume with the code that wrote it, or start anew with resume='never'."
            )
