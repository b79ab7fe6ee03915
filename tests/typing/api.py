"""Every public name used as a user would use it. mypy checks this file; nothing runs it.

`test_public_api.py` sees to it that no name is left out. An assertion here that fails means that the types users see
have changed: say so in the changelog.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset
from typing_extensions import Unpack, assert_type, override

import lightning_moe_ckpt
from lightning_moe_ckpt import (
    MoEStrategy,
    callbacks,
    data,
    errors,
    extend,
    metrics,
    moe,
    strategy,
    testing,
)
from lightning_moe_ckpt.goodput import Goodput

# -- the package, callbacks, strategy


def train(model: LightningModule) -> None:
    assert_type(lightning_moe_ckpt.__version__, str)
    popularity = callbacks.Popularity(counts="soft", half_life_steps=200.0, per_capacity=True)
    sparse = callbacks.SparseCheckpoint(
        Path("checkpoints"),
        window="auto",
        budget_nbytes=2**20,
        planner="packed",
        order="popularity",
        popularity=popularity,
        max_window=8,
        over_budget="dense",
        retention=callbacks.Retention(last=3, every_n_steps=1000, days=7),
        resume="must",
        batches="log",
        audit_every_n_steps=1000,
        on_fault="stop",
        stop_grace=timedelta(seconds=20),
        on_change="mine",
        freeze_heap=False,
        overhead_target=0.05,
        storage_at_least=timedelta(minutes=5),
        failure_domains=[callbacks.FailureDomain(node="host0", rack="a")],
    )
    monitor = callbacks.ExpertLoadMonitor(every_n_steps=10)
    planned = callbacks.auto("s3://bucket/run", mtbf="2h", allow_loss=0.05, profile="profile.yaml", keep=3)
    assert_type(planned.keep, int)
    assert_type(callbacks.CapacityBoost(boost=0.1, dropless=True).debts, dict[str, tuple[int, ...]])
    if sparse.accounting is not None:
        assert_type(sparse.accounting.plt, float)
    plan = MoEStrategy(expert_parallel=2, gradient_reduction="allreduce", timeout=timedelta(minutes=1))
    assert_type(plan.last_grad_norm, Tensor | None)
    Trainer(strategy=plan, callbacks=[sparse, monitor]).fit(model)
    assert_type(sparse.wait_committed(timeout=10.0), bool)
    assert_type(sparse.replaying, bool)
    assert_type(sparse.report.window, int)
    assert_type(sparse.report.stall_seconds, dict[str, float])
    assert_type(sparse.report.device_stall_seconds, dict[str, float])
    assert_type(sparse.report.resumed_from, int | None)
    assert_type(sparse.report.goodput.share, float)
    if sparse.goodput is not None:
        assert_type(sparse.goodput.shares(), dict[str, float])
    assert_type(sparse.report.overhead.share, float)
    assert_type(sparse.report.overhead.tiers, dict[str, float])
    assert_type(monitor.latest, dict[str, float])


def seed(items: Dataset[int]) -> None:
    seeded = data.SeededItems(items, seed=3)
    seeded.set_epoch(2)
    assert_type(seeded[0], int)


def train_dense(model: LightningModule) -> None:
    dense = callbacks.DenseCheckpoint("s3://bucket/run", every_n_steps=50, storage_options={"anon": False})
    Trainer(strategy=strategy.MoEStrategy(), callbacks=[dense]).fit(model)
    assert_type(dense.every_n_steps, int | None)
    chained = callbacks.DifferentialCheckpoint("/ckpt", every_n_steps=64, batch=8, keep=3)
    assert_type(chained.batch, int)
    assert_type(chained.mode, Literal["lossless", "bf16", "compressed"])
    assert_type(callbacks.DifferentialCheckpoint("/ckpt", mode="compressed", error_feedback=True).error_feedback, bool)
    lossy = callbacks.PartialExpertCheckpoint(
        "/ckpt", every_n_steps=2, k=1, snapshot_k=4, select="load_aware", plt_budget=0.03, keep=3
    )
    Trainer(strategy=strategy.MoEStrategy(), callbacks=[lossy]).fit(model)
    assert_type(lossy.snapshot_k, int | Literal["auto"] | None)
    chosen = callbacks.SelectiveExpertCheckpoint("/ckpt", every_n_steps=2, local_budget=2**20, remote_budget="auto")
    assert_type(chosen.local_budget, int | Literal["auto"])
    assert_type(callbacks.SelectiveExpertCheckpoint("/ckpt", delta="bf16", resync_every=9).resync_every, int)


def wrap(url: str, **shared: Unpack[callbacks.CheckpointArguments]) -> list[Callback]:
    """Arguments that all take can be passed on; one that there is not, or of another type, is an error."""
    callbacks.DenseCheckpoint(url, kepp=3)  # type: ignore[call-arg]
    callbacks.SparseCheckpoint(url, keep="3")  # type: ignore[arg-type]
    return [callbacks.SparseCheckpoint(url, **shared), callbacks.PartialExpertCheckpoint(url, k=2, **shared)]


# -- the layer


def layer(x_TD: Tensor) -> Tensor:
    experts = moe.MoELayer(16, 32, 8, top_k=2, capacity_factor=1.25, activation=torch.tanh, bias=False)
    y_TD: Tensor = experts(x_TD)
    assert_type(experts.forward(x_TD), Tensor)
    assert_type(experts.l_aux, Tensor | None)
    assert_type(experts.capacity(num_tokens=64), int | Tensor | None)
    assert_type(experts.tokens_per_expert, Tensor)
    assert_type(experts.read_and_reset_counts(), Tensor)
    assert_type(list(experts.expert_parameters()), list[tuple[str, nn.Parameter]])
    routing = moe.route(torch.randn(4, 8), 2, normalize=True)
    assert_type(routing, moe.Routing)
    assert_type(routing.topk_idx, Tensor)
    assert_type(moe.spread_experts(nn.Sequential(experts)), list[str])
    return moe.balance_loss(routing.probs, routing.topk_idx[:, 0]) + y_TD.sum()


# -- metrics


def measure(counts_E: Tensor, report: Mapping[str, int]) -> dict[str, Tensor]:
    assert_type(metrics.load_skew(counts_E), Tensor)
    skew, load = metrics.LoadSkew(num_experts=8), metrics.ExpertLoad(8)
    skew.update(counts_E)
    load.update(counts_E)
    assert_type(skew.compute(), Tensor)
    assert_type(load.compute(), Tensor)
    share = metrics.GoodputShare()
    share.update(Goodput(productive=9.0, hooks=1.0))
    assert_type(share.compute(), dict[str, Tensor])
    captured, persisted = metrics.CapturedPerStep(), metrics.PersistedPerSecond()
    captured.update(1024, steps=2)
    persisted.update(1024, seconds=0.5)
    generations, position = metrics.Generations(metrics.TIERS), metrics.WindowPosition()
    generations.update(10, report)
    position.update(6, 2)
    assert_type(metrics.portion_of_lost_tokens(counts_E, counts_E), float)
    assert_type(metrics.moementary_lost_tokens(counts_E, counts_E, [8, 8]), float)
    plt, mlt = metrics.PortionOfLostTokens(16), metrics.MoementaryLostTokens([8, 8])
    plt.update(counts_E, counts_E)
    mlt.update(counts_E, counts_E)
    metrics.TokensAtRisk(("memory", "storage")).update({"memory": 1, "storage": 2})
    tokens, taken = metrics.ExpertTokens(16), metrics.ExpertsTaken(("memory", "storage"))
    tokens.update(counts_E, counts_E, counts_E)
    taken.update(report)
    assert_type(taken.compute(), dict[str, Tensor])
    assert_type(generations.compute(), dict[str, Tensor])
    return position.compute()


# -- extensions: layouts, optimizers, backends and strategies of one's own


class StackedMoE(nn.Module):
    num_experts = 4


class MyAdamW(torch.optim.AdamW):
    pass


def describe(fqn: str, module: nn.Module, index: extend.ParameterIndex) -> extend.MoELayerSpec | None:
    stacked, ids = index.under(f"{fqn}.experts"), (0, 1, 2, 3)
    assert_type(stacked, dict[str, nn.Parameter])
    experts = extend.stacked_slices(stacked, ids, len(ids))
    assert_type(experts, dict[int, tuple[extend.ParamSlice, ...]])
    assert_type(extend.merged_slices(stacked, ids, len(ids)), dict[int, tuple[extend.ParamSlice, ...]])
    assert_type(extend.whole_slice(fqn, next(module.parameters())), extend.ParamSlice)
    spec = extend.MoELayerSpec(
        fqn=fqn,
        num_experts=len(ids),
        local_expert_ids=ids,
        experts=experts,
        router=(f"{fqn}.gate.weight",),
        top_k=2,
        count=extend.IndexTap(f"{fqn}.experts"),
        probabilities=extend.ProbabilityTap(f"{fqn}.gate", score="softmax"),
        capacity=extend.CapacityTap(fqn),
        live_capacity=extend.AttributeCapacity(fqn, ("capacity_factor",), "layer"),
        bias=extend.BiasView(layer=fqn, owner=f"{fqn}.gate", attribute="expert_bias"),
        extra=extend.AttributeState(((fqn, "cumulative_load"),)),
        graphs=((fqn, "l_aux"),),
    )
    spec = replace(spec, count=extend.RowsTap({0: f"{fqn}.experts.0"}))
    spec = replace(spec, count=extend.AttributeTap(fqn, "tokens_per_expert"))
    spec = replace(spec, live_capacity=extend.ExpertCapacity(fqn, "capacity_factor", len(ids)))
    return replace(spec, count=extend.MaskTap(f"{fqn}.gate", output=0))


def register() -> None:
    extend.register_adapter(StackedMoE, describe)
    extend.register_optimizer(MyAdamW, like=torch.optim.AdamW)
    extend.register_optimizer(MyAdamW, like=torch.optim.AdamW, coupling="parameter", dtypes={"exp_avg": torch.bfloat16})
    extend.register_optimizer(MyAdamW, coupling="element")


def hook(wrapped: DistributedDataParallel) -> None:
    wrapped.register_comm_hook(extend.OrderedHookState(), extend.ordered_hook)


def store(backend: extend.Backend) -> list[extend.Entry]:
    backend.create("key", b"value")
    return backend.list("snap/")


# -- testing: contracts and kills for tests of one's own


class TestMyLayer(testing.AdapterContract):
    @override
    def make_model(self) -> nn.Module:
        return nn.Linear(2, 2)

    @override
    def loss(self, model: nn.Module, seed: int) -> Tensor:
        loss: Tensor = model(torch.ones(2)).sum()
        return loss


class TestMyBackend(testing.BackendContract):
    @override
    def make_backend(self, tmp_path: Path) -> extend.Backend:
        raise NotImplementedError


def fit(attempt: testing.Attempt) -> dict[str, object]:
    own: list[Callback] = attempt.callbacks(callbacks.DenseCheckpoint(attempt.url))
    trainer = Trainer(callbacks=own, devices=attempt.world_size)
    model = LightningModule()
    trainer.fit(model)
    assert_type(testing.capture_end(trainer, model), dict[str, Any])
    return {}


def kill_and_resume(tmp_path: Path) -> Literal["finished", "killed", "stopped"]:
    kills = [testing.Kill(phase="forward", step=3)]
    seams = [testing.Seam(module="os", attribute="fsync", replacement=lambda _: None)]
    try:
        reference = testing.run_attempts(fit, url="memory://clean", workdir=tmp_path)
        killed = testing.run_attempts(fit, url=str(tmp_path / "url"), workdir=tmp_path, kills=kills, seams=seams)
    except testing.AttemptFailed as error:
        raise RuntimeError from error
    assert_type(killed, list[testing.AttemptResult])
    testing.assert_same_end(reference, killed)
    assert_type(testing.differences(reference[-1].end(), killed[-1].end()), list[str])
    return killed[-1].outcome


def break_on_purpose(tmp_path: Path) -> testing.FaultSummary:
    script: list[testing.Fault] = [
        testing.fail_at(0, 7, "before_optimizer_step"),
        testing.Fault(kind="node_loss", rank=3),
    ]
    at_random = testing.RandomFaults(mtbf=30.0, seed=1, kinds=[testing.fail_at("all", 0, kind="full_disk", steps=3)])
    Trainer(callbacks=[testing.FaultInjector(script, random=at_random, folder=tmp_path)])
    summary = testing.summarize_faults(tmp_path)
    assert_type(summary.kinds, tuple[testing.FaultTally, ...])
    assert_type(summary.ettr, float)
    return summary


# -- errors


def remedies() -> Sequence[type[errors.CheckpointError]]:
    """Each can also be caught as the built-in that it is."""
    values: list[type[ValueError]] = [errors.ConfigurationError, errors.Corrupt]
    configuration: list[type[errors.ConfigurationError]] = [
        errors.UnknownLayout,
        errors.UnsupportedOptimizer,
        errors.WrongCounts,
        errors.IdentityMismatch,
    ]
    system: list[type[OSError]] = [errors.StorageError, errors.StorageRefused, errors.KeyExists, errors.KeyMissing]
    runtime: list[type[RuntimeError]] = [errors.Fenced, errors.NoUsableGeneration]
    others = [errors.CodecError, errors.OtherData, errors.RingFull, errors.SilentFault]
    make: Callable[[str], errors.CheckpointError] = errors.Corrupt
    return [type(make("")), *others, errors.CheckpointError] if values and configuration and system and runtime else []
