"""A stand-in with the attributes, the storage and the loading of Tutel's layer, for where Tutel is not installed.

Written from its documented behaviour; the tests marked `tutel` run the same claims against the real one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override


class _Gate(nn.Module):
    def __init__(self, model_dim: int, num_experts: int, *, k: int, capacity_factor: float, fp32_gate: bool) -> None:
        super().__init__()
        self.wg = nn.Linear(model_dim, num_experts, bias=False)
        self.top_k, self.capacity_factor, self.gate_noise, self.fp32_gate = k, capacity_factor, 0.0, fp32_gate

    @override
    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.wg(x)
        return logits


class _Stacked(nn.Module):
    def __init__(self, num_local: int, model_dim: int, hidden: int) -> None:
        super().__init__()
        self.batched_fc1_w = nn.Parameter(torch.randn(num_local, hidden, model_dim))
        self.batched_fc2_w = nn.Parameter(torch.randn(num_local, hidden, model_dim))
        self.batched_fc1_bias = nn.Parameter(torch.randn(num_local, hidden))

    @override
    def forward(self, x_eCD: Tensor) -> Tensor:
        hidden = x_eCD @ self.batched_fc1_w.transpose(1, 2) + self.batched_fc1_bias[:, None]
        return hidden.relu() @ self.batched_fc2_w


class Flat(nn.Module):
    """As `llama_ffn` keeps them: one dimension, and the shape beside it."""

    def __init__(self, num_local: int, model_dim: int, hidden: int) -> None:
        super().__init__()
        self.W_fc1_full_shape = torch.Size([num_local, model_dim, hidden])
        self.W_fc1 = nn.Parameter(torch.randn(self.W_fc1_full_shape.numel()))


class Listed(nn.Module):
    """Custom experts: modules of their own."""

    def __init__(self, num_local: int, model_dim: int, hidden: int) -> None:
        super().__init__()
        self.each = nn.ModuleList(nn.Linear(model_dim, model_dim) for _ in range(num_local))


class Mixed(nn.Module):
    """Custom experts of which nothing says what belongs to which."""

    def __init__(self, num_local: int, model_dim: int, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(model_dim, num_local * hidden + 1))


class MOELayer(nn.Module):
    """Drops over capacity like the real layer, on one process; experts of other ranks can be pretended."""

    def __init__(
        self,
        model_dim: int = 8,
        hidden: int = 6,
        num_local: int = 4,
        *,
        k: int = 2,
        num_gates: int = 1,
        capacity_factor: float = 1.0,
        fp32_gate: bool = False,
        world_size: int = 1,
        experts: type[nn.Module] = _Stacked,
    ) -> None:
        super().__init__()
        self.group, self.world_size, self.sharded_count = None, world_size, 1
        self.num_local_experts, self.batch_prioritized_routing = num_local, False
        self.register_buffer("_num_global_experts", torch.tensor(num_local * world_size))
        make: Any = experts
        self.experts = make(num_local, model_dim, hidden)
        options: dict[str, Any] = {"k": k, "capacity_factor": capacity_factor, "fp32_gate": fp32_gate}
        self.gates = nn.ModuleList(_Gate(model_dim, num_local * world_size, **options) for _ in range(num_gates))
        for parameter in self.experts.parameters():
            parameter._tutel_expert = True

    @override
    def forward(self, x_TD: Tensor, gate_index: int = 0) -> Tensor:
        gate: Any = self.gates[gate_index]
        score_TE = gate(x_TD).softmax(-1)
        num_experts = score_TE.shape[1]
        weight_TK, idx_TK = score_TE.topk(gate.top_k)
        demand_E = torch.bincount(idx_TK.view(-1), minlength=num_experts)
        factor, fair = gate.capacity_factor, -(-len(x_TD) // num_experts)
        capacity = gate.top_k * int(factor * fair) if factor > 0 else int(demand_E.max())
        out_TD = torch.zeros_like(x_TD)
        rows = x_TD.new_zeros(num_experts, capacity, x_TD.shape[1])
        taken, places = [0] * num_experts, []
        for k in range(gate.top_k):
            for t, e in enumerate(idx_TK[:, k].tolist()):
                if taken[e] < capacity:
                    rows[e, taken[e]] = x_TD[t]
                    places.append((t, k, e, taken[e]))
                taken[e] += 1
        done = self.experts(rows)
        for t, k, e, place in places:
            out_TD[t] = out_TD[t] + weight_TK[t, k] * done[e, place]
        self.dispatch_count = demand_E
        self.l_aux = (score_TE.mean(0) * demand_E).sum()
        return out_TD

    @override
    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        for name, param in self.experts.named_parameters():
            state_dict.setdefault(f"{prefix}experts.{name}", torch.zeros_like(param))
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


MOELayer.__module__ = "tutel.impls.moe_layer"
