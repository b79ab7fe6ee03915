"""Popularity of a run, compared with what a loop over every forward's choices gives, step by step and on every rank."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from campaign._training import quiet
from campaign._warm import WarmParents
from lightning_moe_ckpt.policies import Popularity
from lightning_moe_ckpt.testing import Attempt, AttemptResult, run_attempts

# Shape suffixes: T tokens, K top-k, E experts, D model dim.

NUM_EXPERTS, TOP_K, DIM, STEPS = 12, 2, 8, 6
COLLECTIVES = (
    "all_gather", "all_gather_into_tensor", "all_reduce", "all_to_all", "all_to_all_single", "barrier", "broadcast",
    "gather", "reduce", "reduce_scatter", "reduce_scatter_tensor", "scatter", "send", "recv", "isend", "irecv",
    "all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list", "batch_isend_irecv",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Counted:
    """A short run with validation, a sanity check and one look at the order after every step."""

    popularity: Popularity | None
    world_size: int = 1
    expert_parallel: int = 1
    accumulate: int = 1
    use_reentrant: bool | None = None
    """Of activation checkpointing around the MoE layer; `None` without."""
    window: int = 1


class Module(LightningModule):
    """One MoE layer, some tokens dropped. Keeps, by hand, what its gate gave each expert in every training forward."""

    def __init__(self, use_reentrant: bool | None) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        self.layer: Any = None
        self.hard, self.soft, self.capacity = [0.0] * NUM_EXPERTS, torch.zeros(NUM_EXPERTS, dtype=torch.float64), 0

    def configure_model(self) -> None:
        from lightning_moe_ckpt.moe import MoELayer

        if self.layer is None:
            self.first = nn.Linear(DIM, DIM)
            self.layer = MoELayer(DIM, 12, NUM_EXPERTS, top_k=TOP_K, capacity_factor=1.25)

    def forward(self, x_TD: Tensor) -> Tensor:
        x_TD = self.first(x_TD)
        if self.training:
            self._count(x_TD)
        if self.use_reentrant is None or not self.training:
            y_TD = self.layer(x_TD)
        else:
            y_TD = checkpoint(self.layer, x_TD, use_reentrant=self.use_reentrant)
        return (x_TD + y_TD).square().mean()  # type: ignore[no-any-return]

    @torch.no_grad()
    def _count(self, x_TD: Tensor) -> None:
        self.layer.capacity_factor = 0.75 + 0.25 * self.trainer.global_step  # it may change at any step
        probs_TE = nn.functional.linear(x_TD, self.layer.gate.weight).softmax(-1)
        capacity = math.ceil(TOP_K * self.layer.capacity_factor * len(x_TD) / NUM_EXPERTS)
        taken: Counter[int] = Counter()
        chosen_TK = probs_TE.topk(TOP_K).indices.tolist()
        for k in range(TOP_K):  # first choices of all tokens come before second ones
            for token in chosen_TK:
                if taken[token[k]] < capacity:
                    taken[token[k]] += 1
                    self.hard[token[k]] += 1
        self.soft += probs_TE.sum(0, dtype=torch.float64)
        self.capacity += capacity

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self(batch[0])  # type: ignore[no-any-return]

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.05)


class ByHand(Callback):
    """After each step: what the module has counted in it, and which collectives it took; all plans are committed."""

    def __init__(self, own: Any) -> None:
        self.own, self.steps, self.collectives = own, list[dict[str, Any]](), list[dict[str, int]]()
        self.seen: Counter[str] = Counter()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for name in COLLECTIVES:
            setattr(dist, name, self._counted(name, getattr(dist, name)))

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *args: object) -> None:
        if len(self.steps) == trainer.global_step:
            self.own.wait_committed()

    def on_train_batch_end(self, trainer: Trainer, module: Any, *args: object) -> None:
        if trainer.global_step > len(self.steps):
            values = {"hard": module.hard, "soft": module.soft.tolist(), "capacity": module.capacity}
            self.steps.append(values)
            module.hard, module.soft, module.capacity = [0.0] * NUM_EXPERTS, torch.zeros_like(module.soft), 0
            self.collectives.append(dict(sorted(self.seen.items())))
            self.seen.clear()

    def _counted(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.seen[name] += 1
            return original(*args, **kwargs)

        return call


def train(case: Counted, life: Attempt) -> Mapping[str, Any]:
    from lightning_moe_ckpt import MoEStrategy
    from lightning_moe_ckpt.callbacks import SparseCheckpoint

    quiet()
    seed_everything(5, verbose=False)
    order: Any = "fixed" if case.popularity is None else "popularity"
    own = SparseCheckpoint(life.url, window=case.window, keep=1000, order=order, popularity=case.popularity)
    hand = ByHand(own)
    # Sizes of batches differ from rank to rank, as packed sequences do.
    rows = torch.randn(
        STEPS * case.accumulate, 9 + 4 * life.rank, DIM, generator=torch.Generator().manual_seed(life.rank)
    )
    loader = DataLoader(TensorDataset(rows), batch_size=None)
    strategy: Any = MoEStrategy(expert_parallel=case.expert_parallel) if case.world_size > 1 else "auto"
    trainer = Trainer(
        accelerator="cpu",
        devices=case.world_size,
        strategy=strategy,
        max_epochs=1,
        accumulate_grad_batches=case.accumulate,
        val_check_interval=2,
        num_sanity_val_steps=2,
        limit_val_batches=2,
        use_distributed_sampler=False,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[own, hand],
    )
    trainer.fit(Module(case.use_reentrant), loader, loader)
    return {"steps": hand.steps, "collectives": hand.collectives}


def run(warm: WarmParents, folder: Path, case: Counted) -> AttemptResult:
    url = (folder / "checkpoints").as_uri()
    (life,) = warm.call(run_attempts, partial(train, case), url=url, workdir=folder, world_size=case.world_size)
    return life


def by_hand(life: AttemptResult, config: Popularity) -> list[list[float]]:
    """Popularity at every step over all ranks, from the steps' own counts; not decayed, each step stands for itself."""
    looks: list[Tensor] = [torch.zeros(NUM_EXPERTS, dtype=torch.float64)] * life.world_size
    result = []
    steps = [life.returned(rank)["steps"] for rank in range(life.world_size)]
    for per_rank in zip(*steps, strict=True):
        for rank, step in enumerate(per_rank):
            counts = torch.tensor(step[config.counts], dtype=torch.float64)
            if config.per_capacity:
                counts = counts / step["capacity"]
            if config.half_life_steps is not None:
                keep = 2.0 ** (-1.0 / config.half_life_steps)
                counts = keep * looks[rank] + (1 - keep) * counts
            looks[rank] = counts
        total = looks[0]
        for own in looks[1:]:
            total = total + own
        result.append(total.tolist())
    return result


def planned(life: AttemptResult) -> list[list[float]]:
    """Popularity of every plan that windows were taken by, in order."""
    from lightning_moe_ckpt.storage import RunView, open_backend

    view = RunView.open(open_backend((life.workdir / "checkpoints").as_uri()))
    commits = sorted((g.commit for g in view.generations() if g.commit is not None), key=lambda c: c.generation)
    return [json.loads(str(c.policy["plan"]))["popularity"] for c in commits if c.policy["policy"] == "sparse"]


ALWAYS: dict[str, Any] = {"reorder_every_n_steps": 1, "reorder_threshold": 0.0, "reorder_fraction": 0.0}
CASES = {
    "hard": Counted(popularity=Popularity(**ALWAYS)),
    "hard, accumulated": Counted(popularity=Popularity(**ALWAYS), accumulate=3),
    "hard, checkpointed, re-entrant": Counted(popularity=Popularity(**ALWAYS), use_reentrant=True),
    "soft, checkpointed": Counted(popularity=Popularity(counts="soft", **ALWAYS), use_reentrant=False, accumulate=2),
    "soft, checkpointed, re-entrant": Counted(popularity=Popularity(counts="soft", **ALWAYS), use_reentrant=True),
    "per capacity, decayed": Counted(popularity=Popularity(per_capacity=True, half_life_steps=2, **ALWAYS)),
    "hard, 3 ranks": Counted(popularity=Popularity(**ALWAYS), world_size=3, accumulate=2),
    "soft, decayed, 3 ranks, sharded": Counted(
        popularity=Popularity(counts="soft", half_life_steps=3, **ALWAYS), world_size=3, expert_parallel=3
    ),
    "hard, per capacity, 4 ranks, sharded by 2": Counted(
        popularity=Popularity(per_capacity=True, **ALWAYS), world_size=4, expert_parallel=2, use_reentrant=False
    ),
}


LONG = ("hard", "hard, accumulated", "hard, per capacity, 4 ranks, sharded by 2")
"""Only in `make soak`: three ranks count hard and accumulated, too."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.soak] if name in LONG else []) for name in CASES]
)
def test_popularity_is_what_counting_by_hand_gives(warm: WarmParents, tmp_path: Path, name: str) -> None:
    """To the last bit, for every step: kept tokens only, all micro-batches, no validation, no recomputation."""
    case = CASES[name]
    assert case.popularity is not None
    life = run(warm, tmp_path, case)
    want, got = by_hand(life, case.popularity), planned(life)
    # The first window's plan is made at step 1, and so is the first look; then each plan is of the step before it.
    found = [each for each in got if any(each)]
    assert found == [want[0], *want[: len(found) - 1]]
    assert len(found) >= STEPS - 1
    assert len({tuple(each) for each in want}) == STEPS


@pytest.mark.parametrize("window", [3])
def test_popularity_takes_no_collective_of_its_own(warm: WarmParents, tmp_path: Path, window: int) -> None:
    """Every step of a run ordered by popularity calls what the same step of a run in a fixed order calls.

    But for the first plan, which every life makes once: there the ranks' popularity is gathered.
    """
    config = Popularity(counts="soft", half_life_steps=2, per_capacity=True, **ALWAYS)
    runs = [
        run(warm, tmp_path / str(i), Counted(popularity=each, world_size=3, expert_parallel=3, window=window))
        for i, each in enumerate([config, None])
    ]
    for rank in range(3):
        by_popularity, fixed = (each.returned(rank)["collectives"] for each in runs)
        assert len(fixed) == STEPS
        # Boundaries, which callbacks before ours see in the next step, are 1 and 4: there windows open.
        first, *others = by_popularity[1:]
        assert others == fixed[2:]
        assert Counter(first) == Counter(fixed[1]) + Counter({"all_gather": 1})
        assert Counter(fixed[4]) == Counter(fixed[2]) + Counter({"all_gather": 1}), "the exchange at a boundary is seen"
