"""What checkpoints cost per step, in time and in storage, from fits of `bench overhead` and `bench differential`."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

from benchmarks import differential
from benchmarks.papers_plans import Rows, Way
from benchmarks.papers_runs import alone
from benchmarks.peers_saving import OTHERS
from lightning_moe_ckpt.benchmarks import _overhead
from lightning_moe_ckpt.benchmarks._fits import ModelSize
from lightning_moe_ckpt.benchmarks._overhead import VARIANTS
from lightning_moe_ckpt.callbacks import DenseCheckpoint, DifferentialCheckpoint

_INTERVALS = {"differences": "differential64-memory", "dense in memory": "dense4-memory", "torch.save": "torch.save4"}
_EACH_STEP = {"selective": "selective1-memory", **_INTERVALS}
_BOUND = 0.035
"""Part of a step that checkpoints may cost."""


@cache
def _overheads(names: tuple[str, ...], full: bool, accelerator: str | None, dim: int) -> tuple[float, dict[str, float]]:
    """Return seconds of a step without checkpoints, and what one checkpoint of each variant adds."""
    options = SimpleNamespace(
        accelerator=accelerator, variants=",".join(names), breakdown=False, ranks=1, expert_parallel=1,
        rounds=5 if full else 3, steps=16, settle=8, warm_up=28, precision="32-true", blocks=2, dim=dim, experts=16,
        batch_size=16, url=None, others=OTHERS,
    )  # fmt: skip
    none, *figures = _overhead.measure(options, lambda *_: None)
    variants = {**VARIANTS, **OTHERS}
    added = {figure.variant: figure.added_seconds for figure in figures}
    # Differences are of each step, and between two full states.
    return none.mean_seconds, {
        name: seconds * (variants[name].every if variants[name].system != "differential" else 1)
        for name, seconds in added.items()
    }


def _each_step(way: Way, dim: int = 128) -> tuple[float, dict[str, float]]:
    """Return milliseconds of a step, and the percent of it that a checkpoint adds, by system."""
    names = tuple(_EACH_STEP.values()) if dim == 128 else (_INTERVALS["differences"], _INTERVALS["dense in memory"])
    step, added = _overheads(names, way.full, way.accelerator, dim)
    return 1e3 * step, {name: 100 * added[variant] / step for name, variant in _EACH_STEP.items() if variant in added}


def interval(way: Way) -> Rows:
    """Steps between two checkpoints that slow training down by 3.5 %: TierCheck, Exp3."""
    step, shares = _each_step(way)
    rows: Rows = {"step": step}
    for name in _INTERVALS:
        rows[f"a checkpoint, {name}"] = shares[name]
        rows[f"steps between two, {name}"] = float(max(1, -(-shares[name] // (100 * _BOUND))))
    return rows


def iteration_time(way: Way) -> Rows:
    """Time of a step with a checkpoint at each: TierCheck, Exp1."""
    step, shares = _each_step(way)
    rows: Rows = {"step": step, **{f"longer, {name}": shares[name] for name in _INTERVALS}}
    for name in ("dense in memory", "torch.save"):
        rows[f"differences shorter than {name}"] = 100 * (1 - (100 + shares["differences"]) / (100 + shares[name]))
    return rows


def iteration_by_size(way: Way) -> Rows:
    """What a checkpoint adds to a step, by the size of the model: TierCheck, Exp5."""
    rows: Rows = {}
    for dim in (64, 128, 192):
        step, shares = _each_step(way, dim)
        rows[f"step, width {dim}"] = step
        rows |= {f"longer, {name}, width {dim}": shares[name] for name in ("differences", "dense in memory")}
    return rows


def selective_iterations(way: Way) -> Rows:
    """Time of a step with a checkpoint at each, selective and whole ones: MOETION, Fig. 5."""
    step, shares = _each_step(way)
    return {
        "step": step,
        **{f"longer, {name}": shares[name] for name in ("selective", "dense in memory", "torch.save")},
    }


def frequency(way: Way) -> Rows:
    """Checkpoints in 100 steps that cost 3.5 % of time: MOETION, Fig. 6."""
    _, shares = _each_step(way)
    rows: Rows = {}
    for name in ("selective", "dense in memory", "torch.save"):
        rows[f"in 100 steps, {name}"] = 100 / max(1, -(-shares[name] // (100 * _BOUND)))
    rows["times more often than dense in memory"] = (
        rows["in 100 steps, selective"] / rows["in 100 steps, dense in memory"]
    )
    rows["times more often than torch.save"] = rows["in 100 steps, selective"] / rows["in 100 steps, torch.save"]
    return rows


@cache
def _options(**options: Any) -> SimpleNamespace:
    usual = {"accelerator": None, "differential_dim": 128, "differential_steps": 60, "differential_repeats": 1}
    return SimpleNamespace(**{**usual, **options})


def fused_replay(way: Way) -> Rows:
    """Seconds to get over so many steps, in one pass, one by one, by torch's optimizer and by training: TierCheck, Exp7."""
    size = ModelSize()
    options = _options(differential_elements=size.num_params(), differential_repeats=3 if way.full else 1)
    bare = alone(lambda: differential.fit_of("none", None, options)).seconds
    rows: Rows = {}
    for figure in alone(lambda: differential.applied(options, (20, 50, 100))):
        rows[f"{figure.length} steps, {figure.what}"] = 1e3 * figure.seconds
    for length in (20, 50, 100):
        rows[f"{length} steps, trained again"] = 1e3 * length * bare
    fused, single, again = (rows[f"100 steps, {way}"] for way in ("one pass", "a pass each", "trained again"))
    return {**rows, "less than one by one": 100 * (1 - fused / single), "trained again, times one pass": again / fused}


def storage(way: Way) -> Rows:
    """Size of the folder, in full states, where everything is kept and where differences are reclaimed: TierCheck, Exp9."""
    options = _options(differential_steps=way.steps(210, 410))
    kinds: dict[str, Callable[[str], differential.Checkpoint]] = {
        "kept all": lambda url: DenseCheckpoint(url, every_n_steps=20, keep=100, overhead_target=None),
        "lossless": lambda url: DifferentialCheckpoint(url, every_n_steps=50, batch=5, keep=1),
        "bf16": lambda url: DifferentialCheckpoint(url, every_n_steps=50, batch=5, keep=1, mode="bf16"),
        "compressed": lambda url: DifferentialCheckpoint(url, every_n_steps=50, batch=5, keep=1, mode="compressed"),
    }
    # Parts of more than 100,000 elements: smaller ones are not sparse.
    size = ModelSize(num_blocks=2, model_dim=512, num_experts=4, expert_dim=256, batch_size=2)
    rows: Rows = {}
    for name, make in kinds.items():
        figure = alone(lambda name=name, make=make: differential.fit_of(name, make, options, size))  # type: ignore[misc]
        sizes = [nbytes / figure.dense_nbytes for nbytes in figure.folder_sizes]
        if name == "kept all":
            rows["kept all, at step 100"], rows["kept all, at the end"] = sizes[99], sizes[-1]
            continue
        half = len(sizes) // 2
        rows[f"{name}, largest"], rows[f"{name}, least"] = max(sizes), min(sizes[60:])
        rows[f"{name}, largest of the first half"] = max(sizes[:half])
        rows[f"{name}, largest of the second half"] = max(sizes[half:])
    return rows
