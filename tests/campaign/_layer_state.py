"""Layers of other libraries, and layers that keep what training depends on in plain attributes, as campaigns."""

# Shape suffixes: T tokens, E experts.

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from campaign._models import MODEL_DIM, NUM_EXPERTS, ListMoE, Residual, StackedMoE
from campaign._training import Module, Setup
from lightning_moe_ckpt.moe import MoELayer
from lightning_moe_ckpt.testing import Attempt

Kind = Literal["load", "capacity", "deepspeed", "tutel", "tutel_flat", "tutel_list"]


class LoadedMoE(ListMoE):
    """Balances by a load that the gate keeps as NeMo Automodel's does: `None`, then a tensor; no buffer."""

    SPEED = 0.05
    expert_bias: Tensor

    def __init__(self) -> None:
        super().__init__(dropout=0.1, gate_fp32=False, noisy=False, never_routed=False)
        self.register_buffer("expert_bias", torch.zeros(NUM_EXPERTS))
        self.gate._cumulative_expert_load = None  # type: ignore[assignment]

    @override
    def _choose(self, probs_TE: Tensor) -> tuple[Tensor, Tensor]:
        expert_T = (probs_TE + self.expert_bias).argmax(-1)
        if self.training:
            gate: Any = self.gate
            load_E = functional.one_hot(expert_T, NUM_EXPERTS).sum(0).float()
            kept_E = gate._cumulative_expert_load
            gate._cumulative_expert_load = load_E if kept_E is None else kept_E + load_E
        return probs_TE.gather(1, expert_T[:, None])[:, 0], expert_T

    @torch.no_grad()
    def balance(self) -> None:
        """Move the bias by the load of the last steps, the older the less."""
        gate: Any = self.gate
        load_E = gate._cumulative_expert_load.clone()
        if dist.is_initialized():
            dist.all_reduce(load_E)
        self.expert_bias.add_(self.SPEED * (load_E.mean() - load_E) / load_E.mean())
        gate._cumulative_expert_load *= 0.7


class DeepSpeedMoE(nn.Module):
    """The library's layer, which drops tokens at random and chooses second experts by lot."""

    def __init__(self) -> None:
        super().__init__()
        from deepspeed.moe.layer import MoE

        expert = nn.Sequential(nn.Linear(MODEL_DIM, 2 * MODEL_DIM), nn.GELU(), nn.Linear(2 * MODEL_DIM, MODEL_DIM))
        self.layer = MoE(MODEL_DIM, expert, num_experts=NUM_EXPERTS, k=2, capacity_factor=0.75, min_capacity=1)

    @override
    def forward(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        out_TD, l_aux, _ = self.layer(x_TD)
        return out_TD, l_aux


class ListedExperts(nn.Module):
    """Custom experts of Tutel's layer that are modules of their own."""

    def __init__(self, model_dim: int, num_experts_per_device: int, sharded_count: int) -> None:
        super().__init__()
        self.each = nn.ModuleList(nn.Linear(model_dim, model_dim) for _ in range(num_experts_per_device))

    @override
    def forward(self, x_eCD: Tensor, ctx: object) -> Tensor:
        return torch.stack([expert(x_CD).tanh() for expert, x_CD in zip(self.each, x_eCD, strict=True)])


class TutelMoE(nn.Module):
    """The library's layer, with noise at its gate and tokens over capacity."""

    def __init__(self, kind: Kind) -> None:
        super().__init__()
        from tutel.moe import moe_layer

        world_size = dist.get_world_size() if dist.is_initialized() else 1
        hidden = {"hidden_size_per_expert": 2 * MODEL_DIM, "activation_fn": functional.gelu}
        experts: dict[str, Any] = {
            "tutel": {"type": "ffn", **hidden},
            "tutel_flat": {"type": "llama_ffn", **hidden},
            "tutel_list": {"type": "custom", "module": ListedExperts},
        }[kind]
        self.layer = moe_layer(
            gate_type={"type": "top", "k": 2, "capacity_factor": 0.8, "gate_noise": 1.0},
            model_dim=MODEL_DIM,
            experts={**experts, "num_experts_per_device": NUM_EXPERTS // world_size},
        )

    @override
    def forward(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        out_TD = self.layer(x_TD)
        return out_TD, self.layer.l_aux


@torch.no_grad()
def tighten(layer: TutelMoE) -> None:
    """Less capacity and less noise after each batch: each value follows from the one before."""
    gate = layer.layer.gates[0]
    gate.capacity_factor *= 0.97
    gate.gate_noise *= 0.9


@torch.no_grad()
def squeeze(layer: MoELayer) -> None:
    """Take a tenth of the capacity of one expert after the other: each value follows from the one before."""
    factor = layer.capacity_factor
    factor_E = [factor] * layer.num_experts if isinstance(factor, float) else list(factor)
    lowest = factor_E.index(max(factor_E))
    factor_E[lowest] *= 0.8
    layer.capacity_factor = tuple(factor_E)


@dataclass(frozen=True, kw_only=True)
class LayerStateSetup(Setup):
    """A run whose layers change plain attributes after each batch."""

    kind: Kind

    @override
    def make_module(self, life: Attempt) -> Module:
        return LayerStateModule(self, life)

    @override
    def returned(self, life: Attempt, trainer: Trainer) -> dict[str, Any]:
        layers = list(trainer.lightning_module.modules())
        capacity = [list(layer.capacity_factor) for layer in layers if isinstance(layer, MoELayer)]  # type: ignore[arg-type]
        load = [layer.gate._cumulative_expert_load.tolist() for layer in layers if isinstance(layer, LoadedMoE)]  # type: ignore[operator]
        return {"capacity": capacity, "load": load}


class LayerStateModule(Module):
    """Changes what its layers keep beside their weights."""

    def __init__(self, setup: LayerStateSetup, life: Attempt) -> None:
        super().__init__(setup, life)
        self._kind = setup.kind

    @override
    def configure_model(self) -> None:
        if self.model is None:
            self.model = Residual(self._make_layer())

    @override
    def on_train_batch_end(self, *args: object) -> None:
        for module in self.modules():
            if isinstance(module, LoadedMoE):
                module.balance()
            elif isinstance(module, MoELayer):
                squeeze(module)
            elif isinstance(module, TutelMoE):
                tighten(module)

    def _make_layer(self) -> nn.Module:
        if self._kind == "deepspeed":
            return DeepSpeedMoE()
        if self._kind.startswith("tutel"):
            return TutelMoE(self._kind)
        return LoadedMoE() if self._kind == "load" else StackedMoE(gate_fp32=False, noisy=False, never_routed=False)
