"""Windows that the product's planner finds for the papers' models and precisions; nothing is allocated.

The paper tells the bytes per parameter of every precision, the time of an iteration (an overhead in seconds and in percent)
and the window, and not the bandwidth that the window is for. One row gives the bandwidth, all others are then predictions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

from benchmarks.papers_plans import PaperModel, Rows, Way, rank_of
from lightning_moe_ckpt.operators import OperatorSet
from lightning_moe_ckpt.policies import MEMORY, PlanInputs, Popularity, SparsePolicy
from lightning_moe_ckpt.policies._windows import PlannerName
from lightning_moe_ckpt.snapshot import split_operators

_LONGEST = 64


@dataclass(frozen=True, kw_only=True)
class Job:
    """A training of the paper, on one of whose ranks a window is planned."""

    model: PaperModel
    """The layers of a pipeline stage."""
    full: int = 12
    """Bytes per parameter of master weights and optimizer."""
    compute: int = 2
    """Bytes per parameter of the weights that forward and backward read."""
    seconds: float
    """Of an iteration."""
    paper: int
    """Window."""
    replicas: int = 1
    """Data-parallel degree: ranks that share the writing of what they all have."""

    @property
    def ranks(self) -> int:
        """Expert-parallel ranks: 8, as in the paper, or as many as there are experts."""
        return min(8, self.model.experts)


_DEEPSEEK = PaperModel(layers=4, dim=2048, hidden=2112, experts=64, vocabulary=0)
"""Of 28 layers in 8 stages; gated perceptrons of 1408 have as many parameters as plain ones of 2112."""
PRECISIONS = {
    "FP16, FP16, FP16+FP16": Job(model=_DEEPSEEK, full=6, compute=2, seconds=1.16 / 0.39, paper=3),
    "FP8, FP32, FP32+FP32": Job(model=_DEEPSEEK, full=12, compute=1, seconds=3.53 / 1.54, paper=6),
    "FP8, FP16, FP32+FP32": Job(model=_DEEPSEEK, full=10, compute=1, seconds=2.88 / 1.37, paper=4),
    "FP8, FP16, FP8+FP16": Job(model=_DEEPSEEK, full=5, compute=1, seconds=1.16 / 0.61, paper=3),
    "FP8, FP8, FP8+FP16": Job(model=_DEEPSEEK, full=4, compute=1, seconds=0.87 / 0.51, paper=3),
}
"""Table 7: weights that compute, master weights, moments. Seconds from MoC's overhead, which is largest and so least rounded."""
MODELS = {
    "MoE-LLaVa": Job(
        replicas=2, model=PaperModel(layers=6, dim=1536, experts=4, vocabulary=0), seconds=5.88 / 3.47, paper=3
    ),
    "GPT-MoE": Job(
        replicas=4, model=PaperModel(layers=4, dim=1536, experts=32, vocabulary=0), seconds=8.36 / 3.97, paper=3
    ),
    "QWen-MoE": Job(
        replicas=2,
        model=PaperModel(layers=4, dim=2048, hidden=2112, experts=64, vocabulary=0),
        seconds=9.68 / 3.86,
        paper=5,
    ),
    "DeepSeek-MoE": Job(
        model=PaperModel(layers=3, dim=2048, hidden=2112, experts=64, vocabulary=0), seconds=13.65 / 4.70, paper=6
    ),
}
"""Table 3, by the largest stage of each."""


def _planned(job: Job, budget: int, planner: PlannerName) -> tuple[int, list[int]]:
    """Return the window of one rank, and the bytes of each of its steps, as the policy plans it."""
    rank = rank_of(job.model, job.ranks)
    policy = SparsePolicy(
        planner=planner, budget_nbytes=budget, max_window=_LONGEST, order="popularity", popularity=Popularity()
    )

    def inputs(operators: OperatorSet) -> PlanInputs:
        sizes = _sizes(job, operators)
        zeros = [0.0] * operators.num_experts
        return PlanInputs(operators=operators, sizes=sizes, popularity=zeros, budgets={MEMORY: budget})

    whole = rank.view.operators
    # Pieces are cut by the bytes of the view, which has 12 per parameter.
    cut = split_operators(rank.view, rank.groups, policy.split_nbytes(inputs(whole)) * 12 // job.full)
    plan = policy.plan(inputs(cut))
    return plan.window, step_nbytes(plan.window, [set(plan.full(i)) for i in range(plan.window)], _sizes(job, cut))


def step_nbytes(window: int, full: list[set[str]], sizes: Mapping[str, tuple[int, int]]) -> list[int]:
    """Return the bytes of each step: what is taken in full, and weights of what still waits."""
    return [
        sum(size for name, (size, _) in sizes.items() if name in full[i])
        + sum(size for name, (_, size) in sizes.items() if any(name in full[j] for j in range(i + 1, window)))
        for i in range(window)
    ]


def _sizes(job: Job, operators: OperatorSet) -> dict[str, tuple[int, int]]:
    numels = {op.name: sum(piece.numel for piece in op.slices) for op in operators}
    # What several ranks have is written by all of them, a share each.
    shared = {op.name: job.replicas * (1 if op.expert_idx is not None else job.ranks) for op in operators}
    return {name: (n * job.full // shared[name], n * job.compute // shared[name]) for name, n in numels.items()}


@cache
def _params(job: Job) -> int:
    """Return the parameters that a rank writes."""
    sizes = _sizes(replace(job, full=1, compute=1), rank_of(job.model, job.ranks).view.operators)
    return sum(full for full, _ in sizes.values())


def window_of(job: Job, bandwidth: float, planner: PlannerName = "algorithm1") -> int:
    """Return the window at a bandwidth in bytes per second."""
    return _planned(job, int(bandwidth * job.seconds), planner)[0]


def bandwidth_of(job: Job) -> float:
    """Return the middle of the bandwidths with which Algorithm 1 finds the paper's window."""
    state = _params(job) * job.full / job.seconds
    found = [share for i in range(10, 100) if window_of(job, (share := i / 100) * state) == job.paper]
    return state * (found[0] + found[-1]) / 2


def _windows(jobs: Mapping[str, Job], given: str) -> Rows:
    bandwidth = bandwidth_of(jobs[given])
    rows: Rows = {"bandwidth, from one row": bandwidth / 1e6}
    for name, job in jobs.items():
        rows[f"window, {name}"] = float(window_of(job, bandwidth))
        rows[f"packed, {name}"] = float(window_of(job, bandwidth, "packed"))
        rows[f"off, {name}"] = rows[f"window, {name}"] - job.paper
    others = [name for name in jobs if name != given]
    rows["others within a step"] = float(sum(abs(rows[f"off, {name}"]) <= 1 for name in others))
    rows["others as in the paper"] = float(sum(rows[f"off, {name}"] == 0 for name in others))
    rows["packed, longest over Algorithm 1"] = max(rows[f"packed, {name}"] - rows[f"window, {name}"] for name in jobs)
    return rows


def windows_of_precisions(_: Way) -> Rows:
    """Windows for low-precision states: MoEvement, Table 7."""
    return _windows(PRECISIONS, "FP8, FP32, FP32+FP32")


def windows_of_models(_: Way) -> Rows:
    """Windows of four models: MoEvement, Table 3."""
    return _windows(MODELS, "DeepSeek-MoE")


def size_of_snapshots(_: Way) -> Rows:
    """Bytes of a window's largest snapshot beside a dense one: MoEvement, Fig. 6 (inset)."""
    rows: Rows = {}
    job = MODELS["DeepSeek-MoE"]
    state = _params(job) * job.full
    for window in (3, 6):
        for planner in ("algorithm1", "packed"):
            budget = _least_budget(job, window, planner)
            steps = _planned(job, budget, planner)[1]
            rows[f"smaller than dense, window {window}, {planner}"] = 100 * (1 - max(steps) / state)
    return rows


def _least_budget(job: Job, window: int, planner: PlannerName) -> int:
    """Return the least bytes per step, to a 256th of the state, of which a plan of so many steps is made."""
    state, low, high = _params(job) * job.full, 0, 256
    while high - low > 1:
        middle = (low + high) // 2
        if _planned(job, state * middle // 256, planner)[0] <= window:
            high = middle
        else:
            low = middle
    return state * high // 256
