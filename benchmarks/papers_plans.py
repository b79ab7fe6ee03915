"""Plans of the papers' own models, on no device: bytes that are only counted are counted at their size."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import nn

from lightning_moe_ckpt.moe import MoELayer
from lightning_moe_ckpt.operators import RecordKind, StateSchema, discover
from lightning_moe_ckpt.parallel import ParallelGroups, set_current_groups
from lightning_moe_ckpt.policies import (
    MEMORY,
    STORAGE,
    ExpertLayout,
    PartialPolicy,
    Plan,
    PlanInputs,
    Selection,
    SelectivePolicy,
    TokenLedger,
    assign_writers,
    expert_layouts,
)
from lightning_moe_ckpt.policies._policy import ExpertPolicy
from lightning_moe_ckpt.snapshot import PlanRecord, StateView, lay_out, record_nbytes

Rows = dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Way:
    """How a figure is measured."""

    seed: int
    full: bool = False
    accelerator: str | None = None

    def steps(self, number: int, full: int) -> int:
        """Return the steps of a fit."""
        return full if self.full else number


@dataclass(frozen=True, kw_only=True)
class PaperModel:
    """A GPT of which some blocks have experts."""

    layers: int
    dim: int
    experts: int
    every: int = 1
    """Each so many blocks has experts, others one perceptron."""
    tied: bool = True
    """Whether the output shares the embedding's matrix."""
    vocabulary: int = 50257
    """Tokens; 0 for a pipeline stage without embedding and output."""
    context: int = 1024
    hidden: int = 0
    """Hidden width of an expert; 0 for four times `dim`."""

    def build(self) -> nn.Module:
        """Return the modules, of parameters without memory; never run."""
        dim, hidden = self.dim, self.hidden or 4 * self.dim
        with torch.device("meta"):
            blocks = []
            for i in range(self.layers):
                block = nn.Module()
                block.norms = nn.ModuleList([nn.LayerNorm(dim), nn.LayerNorm(dim)])
                block.attention = nn.ModuleList([nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)])
                dense = (i + 1) % self.every > 0 or self.experts == 1
                block.mlp = (
                    nn.ModuleList([nn.Linear(dim, hidden), nn.Linear(hidden, dim)])
                    if dense
                    else MoELayer(dim, hidden, self.experts, top_k=1)
                )
                blocks.append(block)
            model = nn.Module()
            if not self.vocabulary:
                model.blocks = nn.ModuleList(blocks)
                return model
            model.embed, model.position = nn.Embedding(self.vocabulary, dim), nn.Embedding(self.context, dim)
            model.blocks, model.norm = nn.ModuleList(blocks), nn.LayerNorm(dim)
            if not self.tied:
                model.head = nn.Linear(dim, self.vocabulary, bias=False)
        return model


PEC_MODEL = PaperModel(layers=12, dim=768, experts=8, every=2, tied=False)
"""Of PEC's Table 1, but with an output matrix of its own, as its 2.18 times and its shares tell."""
LARGE_MODEL = PaperModel(layers=24, dim=2176, experts=64, tied=False, vocabulary=51200)
"""1.6 billion parameters dense and 59 with experts, as MOETION's Sec. 7.1 has it; it tells no width."""
_JOURNAL_NBYTES = 4096


@dataclass(frozen=True)
class _Rank:
    """What one rank has of a model; nothing is allocated."""

    view: StateView
    groups: ParallelGroups

    @classmethod
    def of(cls, model: PaperModel, rank: int = 0, world_size: int = 1) -> _Rank:
        """Return one rank of a world over all of which experts are spread."""
        groups = ParallelGroups(rank=rank, world_size=world_size, ep_rank=rank, ep_size=world_size)
        set_current_groups(groups)
        try:
            module = model.build()
            schema = StateSchema.of(torch.optim.AdamW(module.parameters()))
            return cls(StateView(module, discover(module, ep_size=world_size), schema, {}), groups)
        finally:
            set_current_groups(None)

    @property
    def layouts(self) -> tuple[ExpertLayout, ...]:
        """Layers of experts."""
        operators = self.view.operators
        return expert_layouts(operators, {op.name: self.view.record_nbytes(op, RecordKind.FULL) for op in operators})

    def planned(
        self, policy: ExpertPolicy, ledger: TokenLedger, budgets: Mapping[str, int]
    ) -> tuple[Plan, TokenLedger]:
        """Return what a policy takes now, and the ledger behind it."""
        step = ledger.generations + 1
        inputs = PlanInputs(
            operators=self.view.operators,
            sizes=record_nbytes(self.view, self.groups),
            budgets=budgets,
            index=ledger.generations,
            ledger=ledger,
            layouts=self.layouts,
        )
        plan = policy.plan(inputs)
        taken = ledger.take(step, Selection.of_plan(plan, self.view.operators))
        for level in taken.saved:
            taken = taken.complete(level, step)
        return plan, taken

    def written(self, plan: Plan) -> int:
        """Return the bytes that this rank writes of a generation."""
        (step,) = lay_out(PlanRecord(plan=plan, config={}), self.view, self.groups, _JOURNAL_NBYTES).steps
        return step.durable.segment.nbytes

    def held(self, plan: Plan) -> int:
        """Return the bytes that this rank holds of it, whoever writes them."""
        operators = self.view.operators
        named = [operators[name] for name in plan.names if name in operators]
        return sum(self.view.record_nbytes(op, RecordKind.FULL) for op in named)

    def equal_share(self, plan: Plan) -> int:
        """Return the bytes that this rank would write if all ranks shared the dense part alike, whoever has experts to write."""
        operators, total = self.view.operators, 0
        named = [operators[name] for name in plan.names if name in operators]
        total += sum(self.view.record_nbytes(op, RecordKind.FULL) for op in named if op.expert_idx is not None)
        width = self.view.widths(RecordKind.FULL)
        pieces = [(op.name, piece) for op in named if op.expert_idx is None for piece in op.slices]
        parts = assign_writers(pieces, width, range(self.groups.world_size))
        return total + sum(p.slice.numel * width(p.slice.fqn) for p in parts if p.writer == self.groups.rank)


@cache
def rank_of(model: PaperModel, world_size: int) -> _Rank:
    """Return the first rank of an expert-parallel world."""
    return _Rank.of(model, 0, world_size)


def size_by_k(way: Way) -> Rows:
    """Bytes of a checkpoint without copies, as K grows: PEC, Fig. 5a."""
    rows: Rows = {}
    for name, tied in (("", False), (", tied output", True)):
        rank = _Rank.of(replace(PEC_MODEL, tied=tied))
        ledger = TokenLedger.start([layout.num_experts for layout in rank.layouts])
        whole = rank.written(Plan.of_everything(rank.view.operators.names))
        for k in (1, 2, 4, 8):
            plan, _ = rank.planned(PartialPolicy(k=k), ledger, {})
            rows[f"smaller by, K={k}{name}"] = 100 * (1 - rank.written(plan) / whole)
    return rows


def load_by_rank(way: Way) -> Rows:
    """Bytes that each of eight ranks writes, over a round of all experts: PEC, Fig. 5b."""
    ranks = [_Rank.of(PEC_MODEL, rank, 8) for rank in range(8)]
    start = TokenLedger.start([layout.num_experts for layout in ranks[0].layouts])
    full = max(rank.held(Plan.of_everything(rank.view.operators.names)) for rank in ranks)
    rows: Rows = {}
    for k in (1, 4):
        ledger, found = start, {"own": list[int](), "equal": list[int](), "adaptive": list[int](), "mean": list[int]()}
        for _ in range(PEC_MODEL.experts // k):
            plan, ledger = ranks[0].planned(PartialPolicy(k=k), ledger, {})
            written = [rank.written(plan) for rank in ranks]
            found["own"] += [rank.held(plan) for rank in ranks]
            found["equal"].append(max(rank.equal_share(plan) for rank in ranks))
            found["adaptive"].append(max(written))
            found["mean"] += written
        rows[f"all of its state, less per rank, K={k}"] = 100 * (1 - statistics.fmean(found["own"]) / full)
        rows[f"sharded adaptively, less per rank, K={k}"] = 100 * (1 - statistics.fmean(found["mean"]) / full)
        rows[f"adaptive peak below equal shares, K={k}"] = 100 * (1 - max(found["adaptive"]) / max(found["equal"]))
        rows[f"adaptive peak above the mean, K={k}"] = 100 * (
            max(found["adaptive"]) / statistics.fmean(found["mean"]) - 1
        )
    return rows


def size_of_large(way: Way) -> Rows:
    """Bytes where six of 64 experts have most of the tokens, as the budget allows: MOETION, Fig. 4."""
    rank = _Rank.of(LARGE_MODEL)
    whole = rank.written(Plan.of_everything(rank.view.operators.names))
    # 80 % of the tokens on six experts, another six in each layer.
    shares = [
        torch.ones(64).index_fill_(0, (torch.arange(6) + 7 * i) % 64, 4 * 58 / 6) for i in range(LARGE_MODEL.layers)
    ]
    tokens_E = torch.cat([(10**6 * share / share.sum()).round().long() for share in shares])
    ledger = TokenLedger.start([64] * LARGE_MODEL.layers).add(tokens_E)
    budget = 6 * sum(layout.nbytes for layout in rank.layouts)
    plan, after = rank.planned(
        SelectivePolicy(local_budget=budget, remote_budget=budget), ledger, {MEMORY: budget, STORAGE: budget}
    )
    return {
        "parameters, dense": sum(p.numel() for p in replace(LARGE_MODEL, experts=1).build().parameters()) / 1e9,
        "parameters, with experts": sum(p.numel() for p in rank.view.params.values()) / 1e9,
        "everything": whole / 1e9,
        "selective": rank.written(plan) / 1e9,
        "times smaller": whole / rank.written(plan),
        "tokens of the experts taken": 100 * (1 - float(after.unsaved(STORAGE).sum() / tokens_E.sum())),
    }
