"""Small fits of what figures of the papers are of; rows by name."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from typing_extensions import override

from benchmarks import differential, pipeline, pipeline_memory
from benchmarks.papers_plans import Rows, Way
from benchmarks.quality_fit import Case, Scale, TextModel, training_text, validation_text
from benchmarks.quality_runs import TOLERANCE, QualityRun, run_all
from benchmarks.selection import NODES, Choice, SelectionFit, figure_of, run_fit
from lightning_moe_ckpt.benchmarks._benchmark import accelerator_for
from lightning_moe_ckpt.benchmarks._fits import (
    BenchModel,
    HandOver,
    ModelSize,
    TurnTaker,
    bench_folders,
    bench_trainer,
    own_memory,
    patient_storage,
    quiet_lightning,
    random_tokens,
)
from lightning_moe_ckpt.callbacks import (
    DenseCheckpoint,
    DifferentialCheckpoint,
    PartialExpertCheckpoint,
    SelectiveExpertCheckpoint,
)
from lightning_moe_ckpt.callbacks._base import CheckpointCallback
from lightning_moe_ckpt.policies import DifferentialMode
from lightning_moe_ckpt.testing import Kill

T = TypeVar("T")

# -- trainings that are killed: the text of `bench quality`

_CLEAN, _CONTROL = Case(system="none"), Case(system="control")
_SMALL = ModelSize(
    num_blocks=2, model_dim=48, num_experts=8, expert_dim=96, batch_size=8, capacity_factor=2.5, balance=0.0
)


def _killed(cases: Sequence[Case], scale: Scale, way: Way) -> dict[Case, QualityRun]:
    """Return runs by case."""
    accelerator = accelerator_for(way.accelerator)
    runs = run_all(cases, [way.seed], scale, jobs=2, folder=None, accelerator=accelerator, progress=lambda *_: None)
    return dict(zip(cases, runs, strict=True))


def _changes(found: Mapping[Case, QualityRun]) -> tuple[dict[Case, float], float]:
    """Return how much higher the final loss is than without faults, in percent, by case, and the margin."""
    clean = found[_CLEAN].final
    change = {case: 100 * (run.final / clean - 1) for case, run in found.items() if case != _CLEAN}
    return change, max(100 * TOLERANCE, abs(change.pop(_CONTROL)))


def loss_by_plt(way: Way) -> Rows:
    """One fault, by K and by steps between checkpoints: PEC, Fig. 2."""
    scale = Scale(steps=way.steps(240, 480), size=_SMALL, faults=1)
    cases = {
        f"K={k}, I={every}": Case(
            system="partial", loss="node", k=k, snapshot_k=k, every=every, kills=(scale.steps * 3 // 4,)
        )
        for every in (1, 32)
        for k in (1, 2, 4)
    }
    found = _killed([_CLEAN, _CONTROL, *cases.values()], scale, way)
    change, margin = _changes(found)
    rows = {f"PLT, {name}": 100 * found[case].plt for name, case in cases.items()}
    rows |= {f"loss, {name}": change[case] for name, case in cases.items()}
    few = [abs(change[case]) for case in cases.values() if found[case].plt < 0.075]
    return {**rows, "largest change of loss, PLT below 7.5 %": max(few), "margin": margin}


def dynamic_k(way: Way) -> Rows:
    """Eight faults, with K as it is asked for and with Dynamic-K: PEC, Fig. 5d."""
    scale = Scale(steps=way.steps(400, 800), size=_SMALL, faults=8, val_every=100, val_crops=8)
    cases = {name: Case(system=name, loss="node", snapshot_k=1) for name in ("partial", "dynamic")}
    found = _killed([*cases.values()], scale, way)
    rows: Rows = {}
    for fault in range(scale.faults):
        for name in cases:
            plt, k = found[cases[name]].after_faults[fault]
            rows[f"PLT, fault {fault + 1}, {name}"] = 100 * plt
            if name == "dynamic":
                rows[f"K, fault {fault + 1}"] = float(k or 0)
    return rows | {"limit of PLT": 5.0}


def order_of_experts(way: Way) -> Rows:
    """One fault, early, midway or late, by the order in which experts are taken: PEC, Fig. 6."""
    scale = Scale(steps=way.steps(240, 480), size=_SMALL)
    cases = {
        (part, select): Case(
            system="partial", loss="node", snapshot_k=1, select=select, kills=(scale.steps * part // 100,)
        )
        for part in (25, 50, 75)
        for select in ("sequential", "load_aware")
    }
    found = _killed([_CLEAN, _CONTROL, *cases.values()], scale, way)
    change, margin = _changes(found)
    rows: Rows = {f"loss, fault at {part} %, {select}": change[case] for (part, select), case in cases.items()}
    rows |= {f"PLT, fault at {part} %, {select}": 100 * found[case].plt for (part, select), case in cases.items()}
    apart = [change[cases[part, "load_aware"]] - change[cases[part, "sequential"]] for part in (25, 50, 75)]
    return {
        **rows,
        "largest change of loss": max(change.values()),
        "load-aware, above sequential": statistics.median(apart),
        "margin": margin,
    }


def loss_after_faults(way: Way) -> Rows:
    """Four faults at every-step selective checkpoints, and how long they are seen: MOETION, Fig. 8."""
    scale = Scale(steps=way.steps(300, 450), val_every=10, val_crops=32)
    case = Case(system="selective", loss="node")
    found = _killed([_CLEAN, _CONTROL, case], scale, way)
    clean, run = found[_CLEAN], found[case]
    beside = dict([*clean.curve, *clean.resumed])
    spikes = [bits - beside[step] for step, bits in run.resumed]
    (change,), margin = list(_changes(found)[0].values()), _changes(found)[1]
    curve, faultless = dict(run.curve), dict(clean.curve)
    later = [curve[s] / faultless[s] - 1 for fault in run.killed_at for s in curve if fault + 20 <= s < fault + 40]
    return {
        "highest spike, in units of loss": max(spikes),
        "highest spike": 100 * max(bits / beside[step] - 1 for step, bits in run.resumed),
        "20 to 40 steps after a fault": 100 * statistics.median(later),
        "at the end": change,
        "margin": margin,
    }


def convergence(way: Way) -> Rows:
    """Four faults under differences, by how gradients are kept: TierCheck, Exp8."""
    scale = Scale(steps=way.steps(240, 450), size=_SMALL)
    cases = {
        "lossless": Case(system="differential", loss="process"),
        "bf16": Case(system="bf16", loss="process"),
        "compressed": Case(system="compressed", loss="process"),
        "error feedback": Case(system="feedback", loss="process"),
    }
    found = _killed([_CLEAN, _CONTROL, *cases.values()], scale, way)
    change, margin = _changes(found)
    bits = {name: 100 * found[case].captured for name, case in cases.items()}
    rows: Rows = {f"loss, {name}": change[case] for name, case in cases.items()}
    return {**rows, **{f"bytes per step, {name}": value for name, value in bits.items()}, "margin": margin}


_JUDGED = {
    "fault-free": replace(_CLEAN, with_tasks=True),
    "rounding": replace(_CONTROL, with_tasks=True),
    "sparse": Case(system="sparse", loss="node", with_tasks=True),
    "partial": Case(system="partial", loss="node", snapshot_k=1, with_tasks=True),
    "rarely saved": Case(system="ablation", loss="node", snapshot_k=1, with_tasks=True),
}


_LOOK = 10
"""Steps between two looks at the loss."""


@cache
def _judged(way: Way) -> dict[str, QualityRun]:
    scale = Scale(steps=way.steps(240, 480), size=_SMALL, val_every=_LOOK)
    found = _killed([*_JUDGED.values()], scale, way)
    return {name: found[case] for name, case in _JUDGED.items()}


def tasks_after_faults(way: Way) -> Rows:
    """Tasks of a model after four faults, by checkpoints: MoEvement, Table 5."""
    found = _judged(way)
    rows = {f"{task}, {name}": value for name, run in found.items() for task, value in run.tasks.items()}
    clean = found["fault-free"].tasks
    for name in ("sparse", "partial", "rarely saved"):
        rows[f"largest loss, {name}"] = max(clean[task] - found[name].tasks[task] for task in clean)
    rows["largest change, rounding"] = max(abs(clean[task] - found["rounding"].tasks[task]) for task in clean)
    return rows | {"same bits, sparse": float(bool(found["sparse"].identical))}


def loss_over_training(way: Way) -> Rows:
    """Validation loss in a training with four faults: MoEvement, Fig. 12."""
    found = _judged(way)
    clean = found["fault-free"]
    curve, beside, rows = dict(clean.curve), dict([*clean.curve, *clean.resumed]), Rows()
    for name in ("sparse", "partial", "rarely saved"):
        run = found[name]
        rows[f"furthest above fault-free, {name}"] = 100 * max(bits / curve[step] - 1 for step, bits in run.curve)
        rows[f"at the end, {name}"] = 100 * (run.final / clean.final - 1)
        if run.resumed:
            # Rare generations are resumed from where the fault-free run was not looked at: its value before is no lower.
            before = {step: beside.get(step, curve.get(step - step % _LOOK, math.inf)) for step, _ in run.resumed}
            rows[f"right after a fault, {name}"] = 100 * max(bits / before[step] - 1 for step, bits in run.resumed)
    return rows | {"margin": 100 * abs(found["rounding"].final / clean.final - 1)}


# -- two nodes: the fits of `bench selection`


def snapshot_k(way: Way) -> Rows:
    """PLT after one of two nodes is lost, by experts that memory gets: PEC, Fig. 7."""
    size = replace(_SMALL, num_blocks=3, capacity_factor=0.0, balance=0.01)
    steps = way.steps(40, 80)
    kill = Kill(phase="after_backward", step=steps * 3 // 4, rank=NODES - 1, settle=60.0)
    rows: Rows = {}
    for k in (1, 2, 4, 8):
        fit = SelectionFit(
            system="in turns", skew="even", k=1, snapshot_k=k, expert_parallel=2, replicas=0, size=size, steps=steps
        )
        rows[f"PLT, snapshot-K={k}, persist-K=1"] = 100 * run_fit(fit, kill)[0]["plt"]
    return rows


_TWO_NODES = ModelSize(num_blocks=2, model_dim=64, num_experts=16, expert_dim=96, batch_size=4)


def at_risk(way: Way) -> Rows:
    """Tokens that only live weights have, by how experts are chosen: MOETION, Fig. 11."""
    choices: dict[str, Choice] = {"in turns": "in turns", "by load": "load-aware", "by budget": "selective"}
    rows: Rows = {}
    for k in (4, 6):
        found = {
            name: figure_of(SelectionFit(system=how, skew="skewed", k=k, size=_TWO_NODES, steps=way.steps(40, 100)))
            for name, how in choices.items()
        }
        tokens = 2 * NODES * _TWO_NODES.batch_size * _TWO_NODES.context  # of a layer and step
        rows |= {
            f"tokens at risk, {name}, {k} of 16": 100 * each.at_risk["memory"] / tokens for name, each in found.items()
        }
        turns = found["in turns"].at_risk["memory"]
        rows |= {
            f"{name}, of turns, {k} of 16": found[name].at_risk["memory"] / turns
            for name in choices
            if name != "in turns"
        }
    return rows


def breakdown(way: Way) -> Rows:
    """Bytes to the other node, by what makes them fewer: MOETION, Fig. 10."""
    fit = SelectionFit(system="in turns", skew="skewed", k=16, size=_TWO_NODES, steps=way.steps(40, 100))
    cases = {
        "everything": fit,
        "selective, 6 of 16": replace(fit, system="selective", k=6, delta=None),
        "+ gradients for states": replace(fit, system="selective", k=6),
    }
    found = {name: figure_of(case).wire_nbytes / 1e6 for name, case in cases.items()}
    everything, selective, gradients = found.values()
    return {
        **found,
        "selective, of everything": selective / everything,
        "gradients, of selective": gradients / selective,
    }


# -- single fits, each in a process of its own


def alone(work: Callable[[], T]) -> T:
    """Return what `work` returns in a process that is forked for it: fits leave threads behind, and other figures fork."""

    def turn(hand_over: HandOver[T]) -> None:
        hand_over(work())

    with TurnTaker(turn) as taker:
        return taker.take()


def _trained(model: LightningModule, steps: int, data: Any, *callbacks: Callback) -> None:
    with quiet_lightning(), patient_storage():
        saves = any(isinstance(callback, CheckpointCallback) for callback in callbacks)
        trainer = bench_trainer(
            accelerator="cpu", strategy="auto", callbacks=[*callbacks], max_steps=steps, enable_checkpointing=saves
        )
        trainer.fit(model, data)


@contextmanager
def _dropping(model: TextModel, share: float) -> Iterator[None]:
    """Take the experts' output from a share of tokens in training, drawn anew each time: what is over capacity has none."""

    def drop(module: nn.Module, _: Any, out_BTD: Tensor) -> Tensor:
        kept_BT = torch.rand(out_BTD.shape[:-1]) >= share
        return out_BTD * kept_BT.unsqueeze(-1) if module.training else out_BTD

    hooks = [layer.register_forward_hook(drop) for layer in model.moe_layers()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def loss_by_drops(way: Way) -> Rows:
    """Loss where a share of tokens passes experts by: MOETION, Table 1."""
    size, steps = replace(_SMALL, capacity_factor=0.0, balance=0.01), way.steps(300, 600)

    def work(share: float) -> float:
        seed_everything(way.seed, verbose=False)
        model = TextModel(size, steps)
        with _dropping(model, share):
            _trained(model, steps, training_text(size, steps + 1, way.seed))
        return model.bits_per_byte(validation_text(size, 128))

    shares = (0, 1, 3, 5, 7, 10)
    losses = {share: alone(lambda share=share: work(share / 100)) for share in shares}  # type: ignore[misc]
    return {f"loss above none, {share} % dropped": 100 * (losses[share] / losses[0] - 1) for share in shares[1:]}


class _Loads(Callback):
    """Takes the tokens of every expert at each step."""

    def __init__(self) -> None:
        self.steps: list[Tensor] = []

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: object) -> None:
        assert isinstance(pl_module, TextModel)
        self.steps.append(torch.stack([layer.read_and_reset_counts() for layer in pl_module.moe_layers()]))


def popularity(way: Way) -> Rows:
    """Shares of experts in the tokens of a layer, step by step: MOETION, Fig. 3."""
    size, steps = replace(_SMALL, num_experts=16, capacity_factor=0.0), way.steps(400, 800)

    def work() -> Tensor:
        seed_everything(way.seed, verbose=False)
        loads = _Loads()
        _trained(TextModel(size, steps), steps, training_text(size, steps + 1, way.seed), loads)
        return torch.stack(loads.steps).float()

    loads_NLE = alone(work)
    share_NLE = loads_NLE / loads_NLE.sum(-1, keepdim=True)
    busiest = Counter((layer, int(e)) for row in share_NLE.argmax(-1) for layer, e in enumerate(row))
    return {
        "four busiest of 16, most of any step": 100 * float(share_NLE.topk(4).values.sum(-1).max()),
        "two busiest of 16, most of any step": 100 * float(share_NLE.topk(2).values.sum(-1).max()),
        "busiest, times the average": 16 * float(share_NLE.amax(-1).mean()),
        "experts that were busiest of a layer": len(busiest) / size.num_blocks,
        "correlation with the next step": _correlation(share_NLE, 1),
        f"correlation with {steps // 2} steps later": _correlation(share_NLE, steps // 2),
    }


def active_experts(way: Way) -> Rows:
    """Experts with a token, and how their shares change, in a layer of 64: MoEvement, Fig. 4."""
    size, steps = replace(_SMALL, num_experts=64, expert_dim=32, capacity_factor=0.0, balance=0.01), way.steps(150, 600)

    def work() -> Tensor:
        seed_everything(way.seed, verbose=False)
        loads, model = _Loads(), TextModel(size, steps)
        for layer in model.moe_layers():
            layer.top_k = 8
        _trained(model, steps, training_text(size, steps + 1, way.seed), loads)
        return torch.stack(loads.steps).float()

    loads_NLE = alone(work)
    active_NL, share_NLE = (loads_NLE > 0).sum(-1), loads_NLE / loads_NLE.sum(-1, keepdim=True)
    return {
        "steps with 62 of 64 active": 100 * float((active_NL >= 62).float().mean()),
        "fewest active, of 64": float(active_NL.min()),
        "busiest, times the average": 64 * float(share_NLE.amax(-1).mean()),
        "an expert's largest share over its least": float((share_NLE.amax(0) / share_NLE.amin(0).clamp(1e-4)).median()),
    }


def _correlation(share_NLE: Tensor, apart: int) -> float:
    centred_NLE = share_NLE - share_NLE.mean(-1, keepdim=True)
    return float(torch.cosine_similarity(centred_NLE[:-apart], centred_NLE[apart:], dim=-1).mean())


class _Durable(Callback):
    """Waits at every step until what was taken before it is stored. It goes before the checkpoint callback in the list."""

    def __init__(self, checkpoint: CheckpointCallback) -> None:
        self._checkpoint = checkpoint

    @override
    def on_train_batch_start(self, trainer: Trainer, *_: object) -> None:
        self._checkpoint.wait_committed()


def size_by_experts(way: Way) -> Rows:
    """Bytes and time until they are durable, by the number of experts: MOETION, Fig. 9."""
    rows: Rows = {}
    steps, taken = way.steps(12, 24), 2
    for number in (2, 4, 8, 16, 32):
        size = ModelSize(num_blocks=2, model_dim=128, num_experts=number, expert_dim=512, batch_size=2)
        for name in ("everything", "selective"):
            found = alone(lambda name=name, size=size: _durable_fit(name, size, taken, steps))  # type: ignore[misc]
            rows[f"MB, {number} experts, {name}"], rows[f"ms, {number} experts, {name}"], _ = found
    for what in ("MB", "ms"):
        everything, selective = (rows[f"{what}, 32 experts, {name}"] for name in ("everything", "selective"))
        rows[f"{what}, 32 experts, times less"] = everything / selective
    least, most = (rows[f"MB, {number} experts, selective"] for number in (4, 32))
    return {**rows, "MB, selective, 32 over 4 experts": most / least}


def duration_by_k(way: Way) -> Rows:
    """Time until a checkpoint is durable by K, beside a step's: PEC, Fig. 5c."""
    steps, rows = way.steps(12, 24), Rows()
    size = ModelSize(num_blocks=2, model_dim=128, num_experts=8, expert_dim=512, batch_size=8)
    for k in (1, 2, 4, 8):
        found = alone(lambda k=k: _durable_fit("partial", size, k, steps))  # type: ignore[misc]
        rows[f"MB, K={k}"], rows[f"ms, K={k}"], rows["ms, a step without"] = found
    return rows


def time_until_durable(way: Way) -> Rows:
    """Time until what a step has made is durable, by how it is kept: TierCheck, Exp2."""
    steps, rows = way.steps(16, 32), Rows()
    size = ModelSize(num_blocks=2, model_dim=256, num_experts=8, expert_dim=512, batch_size=2)
    for name in ("everything", "lossless", "compressed"):
        found = alone(lambda name=name: _durable_fit(name, size, 1, steps))  # type: ignore[misc]
        rows[f"MB, {name}"], rows[f"ms, {name}"], _ = found
    return rows


def _durable_fit(name: str, size: ModelSize, taken: int, steps: int) -> tuple[float, float, float]:
    """Return megabytes of a generation, milliseconds that a step gets longer by until it is durable, and those of a step."""
    budget = Scale(size=size).budget(taken)
    with bench_folders() as (folder, memory):
        own_memory(memory, lost=False)
        url = f"{folder}/run"
        checkpoint: CheckpointCallback
        if name == "everything":
            checkpoint = DenseCheckpoint(url, every_n_steps=1, overhead_target=None)
        elif name == "partial":
            checkpoint = PartialExpertCheckpoint(url, every_n_steps=1, k=taken, plt_budget=None, overhead_target=None)
        elif name in ("lossless", "compressed"):
            # Storage gets differences one by one, so that each step waits for its own.
            checkpoint = DifferentialCheckpoint(url, every_n_steps=64, batch=1, mode=cast("DifferentialMode", name))
        else:
            checkpoint = SelectiveExpertCheckpoint(
                url, every_n_steps=1, local_budget=budget, remote_budget=budget, overhead_target=None
            )
        durable, bare = differential.StepTimes(folder), differential.StepTimes(folder)
        _trained(BenchModel(size), steps, random_tokens(size, steps + 1), bare)
        _trained(BenchModel(size), steps, random_tokens(size, steps + 1), _Durable(checkpoint), durable, checkpoint)
        report = checkpoint.report
        median = [statistics.median(each.seconds[4:]) for each in (durable, bare)]
        return report.nbytes_captured / report.steps / 1e6, 1e3 * (median[0] - median[1]), 1e3 * median[1]


# -- pipeline stages that are killed: `pipeline.py`


@cache
def _stages(kills: int, experts: int = 0) -> dict[str, pipeline.StageFigure]:
    options = {"stages": 3, "micro_batches": 4, "stage_ms": 20, "pipeline_kills": kills, "pipeline_folder": None}
    options["stage_experts"] = experts
    systems = ["computes_all", "in_place", "reordered", "alone"] if experts else ["in_place", "alone"]
    found = pipeline.measure(SimpleNamespace(**options, pipeline_systems=systems), lambda *_: None)
    return {figure.system: figure for figure in found}


def _again(figure: pipeline.StageFigure) -> float:
    """Return milliseconds of a step that is taken again."""
    return statistics.median(1e3 * failure.rerun_seconds / failure.rerun_steps for failure in figure.failures)


def upstream_logs(way: Way) -> Rows:
    """Milliseconds of a step that is taken again: MoEvement, Fig. 9."""
    found = _stages(way.steps(2, 9))
    every, alone = _again(found["in_place"]), _again(found["alone"])
    return {"all stages": every, "that stage alone": alone, "shorter by": 100 * (1 - alone / every)}


def mechanisms(way: Way) -> Rows:
    """Milliseconds of a step that is taken again, with one mechanism more each time: MoEvement, Fig. 13."""
    found = _stages(way.steps(1, 9), experts=16)
    names = {
        "sparse checkpoints": "computes_all", "+ frozen weights skipped": "in_place",
        "+ popular experts last": "reordered", "+ upstream logs": "alone",
    }  # fmt: skip
    rows = {row: _again(found[name]) for row, name in names.items()}
    for row, name in {"fixed order": "in_place", "popular last": "reordered"}.items():
        rows[f"work left out, {row}"] = 100 * statistics.median(found[name].skipped)
    times = list(rows.values())
    for row, before, after in zip(list(names)[1:], times, times[1:4], strict=False):
        rows[f"shorter by, {row}"] = 100 * (1 - after / before)
    return rows


# -- pipeline stages that nobody kills


def memory_of_stages(_: Way) -> Rows:
    """Host memory of sparse checkpoints with upstream logs, beside that of dense ones: MoEvement, Table 6."""
    size = pipeline_memory.PipelineSize()
    dense = pipeline_memory.measure(pipeline_memory.DENSE, size)
    rows: Rows = {"dense, per parameter": dense.generation / dense.params}
    for window in (3, 6):
        found = pipeline_memory.measure(window, size)
        more, here = found.generation - dense.generation, f"window {window}"
        rows |= {
            f"more than dense, {here}": 100 * (more + found.log) / dense.generation,
            f"without log, {here}": 100 * more / dense.generation,
            f"log, {here}": 100 * found.log / dense.generation,
            f"without log, per parameter, {here}": more / dense.params,
            f"shared memory and log, more, {here}": 100 * ((found.shared + found.log) / dense.shared - 1),
            f"steps in the log, {here}": float(found.log_steps),
        }
    return rows
