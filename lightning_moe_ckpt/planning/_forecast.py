"""Forecast a run's shared memory before it trains: plan and lay out as in the run, over parameters without memory.

All ranks write alike. Only the journal's size is assumed.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from lightning_moe_ckpt.coordination import Exchange
from lightning_moe_ckpt.errors import ConfigurationError
from lightning_moe_ckpt.moe import MoELayer, spread_experts
from lightning_moe_ckpt.operators import StateSchema, discover
from lightning_moe_ckpt.parallel import ParallelGroups, current_groups, set_current_groups
from lightning_moe_ckpt.planning._planning import Planner
from lightning_moe_ckpt.policies import Policy
from lightning_moe_ckpt.snapshot import StateView, repeatable
from lightning_moe_ckpt.tiers import (
    PAGE_NBYTES,
    FailureDomain,
    Mirroring,
    PeerRoom,
    ReplicaPlacement,
    RingRoom,
    mirroring_of,
    place_replicas,
)


def placed_copies(
    *, nodes: int, ranks_per_node: int, replicas: int, expert_parallel: int, racks: int = 1, stages: int = 1
) -> tuple[ReplicaPlacement, list[list[int]]]:
    """Place replicas as a run on such a cluster does; return also the groups with the same experts. Raises `ConfigurationError` if no such
    placement is possible.
    """
    world_size = nodes * ranks_per_node
    groups = ParallelGroups.placed(0, world_size, ep_size=expert_parallel, num_stages=stages).peers()
    if racks > nodes:
        raise ConfigurationError(f"`--racks {racks}` is more than `--nodes {nodes}`. Choose at most that.")
    node_of = [rank // ranks_per_node for rank in range(world_size)]
    domains = [FailureDomain(node=f"node {n}", rack=f"rack {n * racks // nodes}") for n in node_of]
    return place_replicas(domains, groups, [1] * world_size, replicas), groups


def described_model(groups: ParallelGroups, described: Mapping[str, Any]) -> nn.Module:
    """Return a rank's modules, without memory, in the largest pipeline stage.

    The model is Hugging Face's for a `config` file, or has `layers` blocks with `experts` each, which share all other `params` equally.
    Raises `ConfigurationError` if there is no such model, or these ranks cannot share it.
    """
    stages, config, layers, experts = (described[each] for each in ("stages", "config", "layers", "experts"))
    params, expert_params = int(described["params"]), int(described["expert_params"])
    rest = params - layers * experts * expert_params
    if config is None and rest < layers:
        raise ConfigurationError(
            f"{layers} blocks of {experts} experts of {expert_params:,} parameters leave {rest:,} of {params:,} for all else. Give "
            "`--params` of the whole model and `--expert-params` of a single expert, or `--config`."
        )
    before = current_groups()  # of a training under way, if any
    set_current_groups(groups)
    try:
        with torch.device("meta"):
            if config is not None:
                module = _of_config(config, stages)
            else:
                blocks = [nn.Module() for _ in range(-(-layers // stages))]
                for block in blocks:
                    block.rest = nn.Parameter(torch.empty(rest // layers))
                    if experts:
                        block.experts = MoELayer(1, max(1, expert_params // 2), experts, top_k=1, bias=False)
                module = nn.ModuleDict({"blocks": nn.ModuleList(blocks)})
        spread_experts(module)
    finally:
        set_current_groups(before)
    return module


def _of_config(path: str, stages: int) -> nn.Module:
    transformers = importlib.import_module("transformers")
    try:
        config = transformers.AutoConfig.from_pretrained(path, local_files_only=True)
        config.num_hidden_layers = -(-config.num_hidden_layers // stages)
        model: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigurationError(f"{path}: transformers makes no language model of it. {error}") from error
    return model


def forecast(
    policy: Policy, module: nn.Module, groups: ParallelGroups, precision: str, *, mirroring: Mirroring, redundancy: bool
) -> dict[str, Any]:
    """Return the bytes reserved in shared memory by a rank of a run with AdamW, as JSON values.

    The policy has all budgets, and differences are lossless. The rank keeps copies for the owners in `mirroring`, and with `redundancy` captures state for them.
    Raises `ConfigurationError` if the policy cannot plan for the model, or lacks a budget.

    Returns:
        `purposes`: bytes by purpose, for each `memory_generations`. `generation`: bytes in `window` steps, with `journals` and
        state `captured` for other ranks. `full`: weights and optimizer state written by this rank.
    """
    module = module.to(torch.bfloat16 if precision == "bf16-true" else torch.float32)
    schema, operators = StateSchema.of(torch.optim.AdamW(module.parameters())), discover(module, ep_size=groups.ep_size)
    view = StateView(module, operators, schema, {})
    view.repeatable = repeatable(view, exact=False)[0]
    low = dict.fromkeys(view.params, torch.bfloat16) if precision.endswith("mixed") else {}
    planner = Planner(policy, view, groups, Exchange(ParallelGroups()), module, may_probe=False, consumed=low)
    planner.journal_had(96 * 2**10)  # the quickstart's training reserves 88
    if (layout := planner.first_layout()) is None:
        raise ConfigurationError(f"`--policy {policy.kind}` measures its budget in training. Give one: `--budget`.")
    owners, mirrored = len(mirroring.owners), layout.mirrored(mirroring) if redundancy else layout
    captured = [step.mirrors_nbytes for step in mirrored.steps]
    copy, purposes = planner.peer_room() or PeerRoom(slot_nbytes=0, keep=planner.generations_kept), {}
    pages = RingRoom(steps=[copy.slot_nbytes] if copy.slot_nbytes else layout.sizes).block
    # Storage and, with copies, other nodes may each still read a generation that has only some experts.
    for generations in (3 + bool(owners),) if layout.record.plan.partial else (2, 3):
        room = planner.maker.room(layout, generations)
        steps = [nbytes + more for nbytes, more in zip(room.steps, captured, strict=True)]
        busy = policy.least_steps(len(operators)) <= len(steps)
        room = replace(room, steps=steps, copies=1 + bool(owners), back_to_back=busy)
        links = 0 if room.links is None else room.links.nbytes * (room.links.slots + 2)
        others = owners * ((1 + copy.keep) * pages * PAGE_NBYTES + links)
        purposes[generations] = room.purposes | ({"copies of other ranks": others} if others else {})
    captured_nbytes = {"journals": len(captured) * planner.journal_nbytes, "captured": sum(captured)}
    sizes = {"full": planner.sizes.dense_nbytes, "window": len(captured), "generation": mirrored.nbytes}
    return {**sizes, **captured_nbytes, "purposes": purposes}


def forecast_run(
    policy: Policy, described: Mapping[str, Any], precision: str, *, redundancy: bool = False
) -> dict[str, Any]:
    """Return the forecast for the rank with most copies in a described run, see `described_model` and `placed_copies`."""
    names = ("nodes", "ranks_per_node", "replicas", "expert_parallel", "stages")
    placed, peers = placed_copies(**{name: described[name] for name in names})
    ranks, ep_size = len(placed.domains) // described["stages"], described["expert_parallel"]
    rank = max(range(ranks), key=lambda each: len(placed.owners(each)))
    groups = ParallelGroups(rank=rank, world_size=ranks, ep_rank=rank % ep_size, ep_size=ep_size)
    module, mirroring = described_model(groups, described), mirroring_of(placed, rank, peers)
    return forecast(policy, module, groups, precision, mirroring=mirroring, redundancy=redundancy)
