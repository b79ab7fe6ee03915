"""The model's state over ranks: buffers kept equal while training, experts gathered for Lightning's checkpoints.

Each rank computes statistics such as batch normalisation's from its own tokens. When an optimizer step reduces gradients,
buffers are made equal to those of the stage's first rank, as DistributedDataParallel does, so that at every step boundary
all ranks of a stage hold the same values. Only changed buffers are sent. Changes are known from tensor version counters,
except in normalisation layers: their kernels update running statistics without counting, so in training these always count
as changed.

A checkpoint of Lightning holds every expert: a sharded tensor `[e, ...]` becomes `[E, ...]`, the same bytes as without
expert parallelism, so any number of expert-parallel ranks (a single rank without this strategy, too) can load it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer

from lightning_moe_ckpt._logging import rank_logger
from lightning_moe_ckpt.errors import ConfigurationError
from lightning_moe_ckpt.operators import whole_of
from lightning_moe_ckpt.parallel import ParallelGroups, broadcast_tensors

log = rank_logger(__name__)

STAGES = "pipeline_stages"
"""Key of an optimizer's state dicts by stage, if there are several stages."""


def gather_module_state(state: dict[str, Any], sharded: Collection[str], groups: ParallelGroups) -> dict[str, Any]:
    """Return a state dict with all experts and parameters of all stages, on the CPU, on rank 0; on other ranks `state`.
    Collective over the world. Names in `sharded` differ between expert-parallel ranks.
    """
    whole = {name: _gather(state[name], groups) for name in sorted(sharded) if name in state}
    merged = {**state, **whole} if groups.rank == _first(groups) else state
    stages = _gather_stages(merged, groups)
    return {name: value for stage in reversed(stages) for name, value in stage.items()} if stages else merged


def shard_module_state(
    state: Mapping[str, Any], local: Mapping[str, Tensor], sharded: Collection[str], groups: ParallelGroups
) -> dict[str, Any]:
    """Return this rank's part of a whole state dict, by the shapes of the live parameters. Names in `sharded` differ
    between expert-parallel ranks. Raises `ConfigurationError` if the checkpoint has another number of experts.
    """
    parts = {}
    for name in sorted(sharded):
        if name in state:
            experts = local[name].shape[0] * groups.ep_size
            if state[name].shape[0] != experts:
                raise ConfigurationError(
                    f"The checkpoint has {state[name].shape[0]} experts in `{name}`, the model has {experts}. "
                    "Build the model with the number of experts of the checkpoint."
                )
            parts[name] = _own_part(state[name], groups)
    return {**state, **parts}


def gather_optimizer_state(
    optimizer: Optimizer, own: dict[str, Any], sharded: Collection[int], groups: ParallelGroups
) -> dict[str, Any]:
    """Return all experts' optimizer state on rank 0, as without expert parallelism, each stage apart; elsewhere this
    rank's own. Collective. The optimizer is torch's; `sharded` has the `id` of parameters that differ between
    expert-parallel ranks.
    """
    if sharded:
        own = _gather_experts(optimizer, own, sharded, groups)
    stages = _gather_stages(own, groups)
    return {STAGES: stages, "param_groups": own["param_groups"], "state": {}} if stages else own


def _gather_experts(
    optimizer: Optimizer, own: dict[str, Any], sharded: Collection[int], groups: ParallelGroups
) -> dict[str, Any]:
    parameters = dict(_sharded_parameters(optimizer, sharded))
    # Replicas add nothing, and may have pieces only.
    states = {idx: own["state"].get(idx, {}) for idx in (parameters if groups.dp_rank == 0 else ())}
    for idx, outline in _exchange_outlines(states, parameters, groups).items():
        # A rank without state beside ranks with state: its first step starts from zeros.
        if outline.keys() != states[idx].keys():
            log.warning("optimizer state of parameter %d is absent on some ranks; zeros are saved for those", idx)
        device = parameters[idx].device
        whole = {key: _gather_entry(entry, states[idx].get(key), device, groups) for key, entry in outline.items()}
        if groups.rank == _first(groups):
            own["state"][idx] = whole
    return own


def shard_optimizer_state(
    state: Mapping[str, Any], optimizer: Optimizer, sharded: Collection[int], groups: ParallelGroups
) -> dict[str, Any]:
    """Return this rank's part of a whole optimizer state dict; entries without an expert dimension stay as they are.
    Raises `ConfigurationError` if the state has another number of pipeline stages.
    """
    if not sharded and groups.num_stages == 1 and STAGES not in state:
        return dict(state)  # of any form
    stages = state.get(STAGES, [state])
    if len(stages) != groups.num_stages:
        raise ConfigurationError(
            f"The checkpoint has the optimizer state of {len(stages)} pipeline stages, and this run has {groups.num_stages}. "
            "Parameters are numbered by stage in it, so it cannot be cut otherwise: resume with as many stages, or load the "
            "weights alone."
        )
    state = stages[groups.stage]
    states = dict(state["state"])
    for idx, parameter in _sharded_parameters(optimizer, sharded):
        experts = parameter.shape[0] * groups.ep_size
        states[idx] = {
            key: _own_part(value, groups) if _runs_over(value, experts) else value
            for key, value in states.get(idx, {}).items()
        }
        if not states[idx]:
            del states[idx]
    return {**state, "state": states}


def _sharded_parameters(optimizer: Optimizer, sharded: Collection[int]) -> Iterator[tuple[int, Tensor]]:
    """Yield the sharded parameters with their index in `state_dict`."""
    parameters = (whole_of(parameter) for group in optimizer.param_groups for parameter in group["params"])
    return ((idx, parameter) for idx, parameter in enumerate(parameters) if id(parameter) in sharded)


def _runs_over(value: Any, experts: int) -> bool:
    return isinstance(value, Tensor) and value.ndim > 0 and value.shape[0] == experts


def _exchange_outlines(
    states: Mapping[int, Mapping[str, Any]], parameters: Mapping[int, Tensor], groups: ParallelGroups
) -> dict[int, dict[str, Any]]:
    """Return every parameter's entries on any rank: an empty tensor for stacked entries, else the value. Collective."""
    outline = {
        idx: {
            key: value.new_empty(value.shape, device="meta") if _runs_over(value, len(parameters[idx])) else value
            for key, value in entries.items()
        }
        for idx, entries in states.items()
    }
    everyone: list[dict[int, dict[str, Any]]] = [{} for _ in range(groups.stage_size)]
    dist.all_gather_object(everyone, outline, group=groups.groups["stage_control"])
    row = everyone[groups.dp_rank * groups.ep_size :][: groups.ep_size]
    return {idx: {key: value for rank in reversed(row) for key, value in rank[idx].items()} for idx in states}


def _gather_entry(outline: Any, own: Any, device: torch.device, groups: ParallelGroups) -> Any:
    if not (isinstance(outline, Tensor) and outline.is_meta):
        return outline
    return _gather(own if own is not None else torch.zeros_like(outline, device=device), groups)


def _own_part(whole: Tensor, groups: ParallelGroups) -> Tensor:
    return whole.chunk(groups.ep_size)[groups.ep_rank].clone()


def _gather(part: Tensor, groups: ParallelGroups) -> Tensor:
    """Return expert-parallel ranks' parts, concatenated, on the stage's first rank; data-parallel replicas add nothing."""
    if groups.dp_rank != 0 or groups.ep_size == 1:
        return part
    part, first = part.detach().contiguous(), _first(groups)
    parts = [torch.empty_like(part) for _ in range(groups.ep_size)] if groups.rank == first else None
    received = [tensor.view(torch.uint8) for tensor in parts] if parts is not None else None
    dist.gather(part.view(torch.uint8), received, dst=first, group=groups.groups["expert"])
    return torch.cat([tensor.cpu() for tensor in parts]) if parts is not None else part


def _first(groups: ParallelGroups) -> int:
    return groups.ranks("stage")[0]


def _gather_stages(own: dict[str, Any], groups: ParallelGroups) -> list[dict[str, Any]]:
    """Return the states of each stage's first rank, on rank 0; empty elsewhere, and with a single stage."""
    if groups.num_stages == 1 or groups.rank != _first(groups):
        return []
    found: list[Any] | None = [None] * groups.num_stages if groups.rank == 0 else None
    dist.gather_object(own, found, dst=0, group=groups.groups["pipeline_control"])
    return found or []


_PREFIX = "buffer/"


class BufferSync:
    """Keep a module's buffers equal, except `ignored`; call `votes` before, `apply` after the reduction's exchange."""

    def __init__(self, module: nn.Module, ignored: Collection[str], groups: ParallelGroups) -> None:
        self._groups = groups
        self._owners: dict[str, tuple[nn.Module, str]] = {
            name: (module.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2])
            for name, _ in module.named_buffers()
            if name not in ignored
        }
        self._seen = self._versions()

    @property
    def flags(self) -> list[str]:
        """Names of the flags in the exchange."""
        return [_PREFIX + name for name in self._owners]

    def votes(self) -> dict[str, int]:
        """Return flags of buffers changed on this rank since the last `apply`."""
        return {
            _PREFIX + name: int((isinstance(owner, _NormBase) and owner.training) or self._is_other(name))
            for name, (owner, _) in self._owners.items()
        }

    def apply(self, agreed: Mapping[str, int]) -> None:
        """Take the first rank's value of every buffer changed on any rank of the stage. Collective."""
        if changed := [self._buffer(name) for name in self._owners if agreed[_PREFIX + name]]:
            broadcast_tensors(changed, self._groups.groups["stage"], self._groups.ranks("stage")[0])
        self._seen = self._versions()

    def _buffer(self, name: str) -> Tensor:
        owner, key = self._owners[name]
        return owner.get_buffer(key)

    def _versions(self) -> dict[str, tuple[Tensor, int]]:
        # The tensors themselves: a later one may get the place in memory, and so the `id`, of one that a forward replaced.
        buffers = {name: self._buffer(name) for name in self._owners}
        return {name: (buffer, buffer._version) for name, buffer in buffers.items()}  # noqa: SLF001

    def _is_other(self, name: str) -> bool:
        buffer, (seen, version) = self._buffer(name), self._seen[name]
        return buffer is not seen or buffer._version != version  # noqa: SLF001
