"""Find the parameters that hold only this expert-parallel rank's experts, by duck typing.

A module that shards experts over ranks has `expert_parallel_parameters()`, an iterator of (name in the module,
parameter) over those whose dim 0 runs over this rank's experts, consecutive by `ep_rank`. Everything else is
replicated on all ranks.

Tutel's layers do the same under other names. They are recognized by class name, without importing Tutel, and refused
with settings that would silently train wrongly. Each fault was measured; none raises an error itself. Source: Tutel 0.4
(commit ac0e51b), `impls/moe_layer.py`, `impls/communicate.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import nn


@runtime_checkable
class ExpertParallelModule(Protocol):
    """A module that may hold only a part of its experts."""

    ep_size: int
    """Number of ranks over which the module shards its experts."""

    def expert_parallel_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters sharded over expert-parallel ranks; none when `ep_size` is 1."""
        ...


def expert_parallel_modules(root: nn.Module) -> Iterator[tuple[str, ExpertParallelModule]]:
    """Yield every (FQN, module) below and including `root` that may shard experts."""
    for fqn, module in root.named_modules():
        # A protocol is asked only where it may answer yes: it looks for its members anew each time.
        if hasattr(module, "expert_parallel_parameters") and isinstance(module, ExpertParallelModule):
            yield fqn, module
        elif _is_tutel(module):
            yield fqn, _TutelShards(module)


def expert_parallel_fqns(root: nn.Module) -> set[str]:
    """Return the names, as in `root.named_parameters()`, of parameters with one rank's part of the experts."""
    sharded = {id(p) for _, module in expert_parallel_modules(root) for _, p in module.expert_parallel_parameters()}
    return {fqn for fqn, parameter in root.named_parameters(remove_duplicate=False) if id(parameter) in sharded}


# -- Tutel -----------------------------------------------------------------------------------------------------------


class _TutelShards:
    """A `tutel.moe.moe_layer` as an `ExpertParallelModule`."""

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer
        self.ep_size = int(layer.world_size)  # type: ignore[arg-type]  # a plain attribute

    def expert_parallel_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield this rank's experts; their gradients include tokens of all ranks of the layer's group."""
        if self.ep_size > 1:
            yield from _expert_parameters(self.layer)


def _is_tutel(module: nn.Module) -> bool:
    """Whether a module is a layer of Tutel or of a derived class."""
    return any(c.__name__ == "MOELayer" and c.__module__.partition(".")[0] == "tutel" for c in type(module).__mro__)


def _expert_parameters(layer: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield all parameters of a layer's experts, with their names in the layer."""
    return ((f"experts.{name}", p) for name, p in layer.get_submodule("experts").named_parameters())


def tutel_refusal(layer: Any) -> str | None:
    """Return why a layer would train wrongly in this world, and what to do; `None` if it would not."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    size = dist.get_world_size(layer.group) if dist.is_initialized() else 1
    if layer.world_size != size:
        return (
            f"was built for {layer.world_size} ranks and runs on {size}: it computes wrong results. "
            "Build it in `LightningModule.configure_model`, once the process group exists, not in `__init__`."
        )
    if 1 < size < world:
        return (
            f"shares experts over {size} of {world} ranks: its backward exchanges gradients over all of them. "
            "Let its group be the whole world (`expert_parallel` = number of processes), or one rank."
        )
    if layer.sharded_count > 1:
        return (
            f"cuts each expert over {layer.sharded_count} ranks: none has a whole one. "
            "Have at least as many experts as ranks (`num_experts_per_device` of 1 or more)."
        )
    if layer.batch_prioritized_routing and any(gate.capacity_factor <= 0 for gate in layer.gates):
        return (
            "has `batch_prioritized_routing` and a capacity factor that is not above zero: it derives its capacity "
            "from a wrong count and drops almost all tokens. "
            "Give a capacity factor above zero, or no prioritised routing."
        )
    for gate in layer.gates:
        if getattr(gate, "fp32_gate", False) and any(p.dtype != torch.float32 for p in gate.parameters()):
            return (
                "has `fp32_gate` and a gate of lower precision, which its first forward replaces by one in fp32. "
                "Convert the gate before fit: `layer.gates.float()`."
            )
    return None


def refuse_tutel(root: nn.Module, ignored: Collection[str]) -> str | None:
    """Return why a model with Tutel layers cannot train under `MoEStrategy`; `None` if it can.

    Tutel's examples hide all experts from DistributedDataParallel: `ignored`.
    """
    for fqn, layer in _layers(root):
        if (reason := tutel_refusal(layer)) is not None:
            return f"Tutel layer `{fqn}` {reason}"
        replicated = layer.world_size == 1 and dist.is_initialized() and dist.get_world_size() > 1
        if replicated and any(_join(fqn, name) in ignored for name, _ in _expert_parameters(layer)):
            return (
                f"Tutel layer `{fqn}` has all experts on every rank, and `_ddp_params_and_buffers_to_ignore` keeps "
                "their gradients from being averaged: ranks would diverge. Leave them out of that list."
            )
    return None


def zero_filled(root: nn.Module, state: Mapping[str, Any]) -> list[str]:
    """Return expert parameters that a state dict lacks; Tutel would load them as zeros without an error."""
    names = (_join(fqn, name) for fqn, layer in _layers(root) for name, _ in _expert_parameters(layer))
    return [name for name in names if name not in state]


def _layers(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    return ((fqn, module) for fqn, module in root.named_modules() if _is_tutel(module))


def _join(fqn: str, name: str) -> str:
    return f"{fqn}.{name}" if fqn else name
