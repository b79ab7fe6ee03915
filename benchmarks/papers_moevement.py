"""Figures of MoEvement: what the paper says, how it is measured here, and what has to hold of it."""

from __future__ import annotations

from benchmarks import papers_runs as runs
from benchmarks.papers_figure import MOEVEMENT, Claim, Figure, ascending, at_least, at_most, no_more

MOEVEMENTS = [
    Figure(
        key="moevement-9", source=f"{MOEVEMENT}, Fig. 9", takes_seconds=120,
        title="a step that is taken again after the loss of one of 3 stages",
        paper={"shorter by": 23.0},
        units={"all": "ms", "that": "ms", "shorter": "%"},
        measure=runs.upstream_logs, is_drawn=False,
        claims=[at_least("a fifth shorter or more with logs", "shorter by", 20.0)],
        note="stages sleep in place of computing, four micro-batches: a third of a step is bubbles, which a stage that is fed by "
        "logs does not have.",
    ),
    Figure(
        key="moevement-13", source=f"{MOEVEMENT}, Fig. 13", takes_seconds=120,
        title="a step that is taken again after the loss of one of 3 stages, by mechanism",
        paper={"weight gradients, of a step": 33.0},
        units={"weight": "%", "": "ms"},
        measure=runs.mechanisms, is_drawn=False,
        claims=[ascending("each makes it shorter", "+ upstream logs", "+ frozen weights skipped", "sparse checkpoints")],
        note="a window of 4, of whose steps 2 in 5 have frozen weights: what is skipped is of all steps that are taken again. These "
        "stages have no experts, so nothing is ordered by popularity.",
    ),
    Figure(
        key="moevement-table6", source=f"{MOEVEMENT}, Table 6", takes_seconds=50,
        title="host memory of a sparse checkpoint with its log, and of a dense one",
        paper={
            "dense, per parameter": 189.8 / 7.3, "more than dense, window 3": 10.3, "more than dense, window 6": 17.2,
            "without log, window 3": 100 * (205.2 / 189.8 - 1), "log, window 3": 100 * 4.2 / 189.8,
            "without log, window 6": 100 * (478.7 / 426.4 - 1), "log, window 6": 100 * 21.1 / 426.4,
            "without log, per parameter, window 3": (205.2 - 189.8) / 7.3, "without log, per parameter, window 6": (478.7 - 426.4) / 16.4,
        },
        units={"dense": "B", "without log, per": "B", "steps": "", "": "%"},
        measure=runs.memory_of_stages, is_drawn=False,
        claims=[
            at_least("a sparse checkpoint with its log takes more, by 1 % at least", "more than dense, window 3", 1.0),
            ascending("a longer window takes more", "more than dense, window 3", "more than dense, window 6"),
            *(no_more(f"the log is the smaller part, window {w}", f"log, window {w}", f"without log, window {w}") for w in (3, 6)),
            *(at_most(f"the log has two windows of steps, window {w}", f"steps in the log, window {w}", 2 * w) for w in (3, 6)),
            Claim("without log, as in the paper to a quarter, window 3", ("without log, per parameter, window 3",), lambda x: abs(x[0] - 2.11) <= 2.11 / 4),
            *(at_most(f"17.2 % more at most, as in the paper, window {w}", f"more than dense, window {w}", 17.2) for w in (3, 6)),
        ],
        note="window 3 beside GPT-MoE, 6 beside DeepSeek-MoE. Dense checkpoints have 12 bytes per parameter here, 26 in the paper's table: as many bytes "
        "more are twice the share. In a window of 6 weights wait 2.9 steps, 2 bytes each (and a journal per step); the paper's 3.2 bytes are of 1.6. Tokens "
        "(128 a step, 3.3 M parameters) were chosen for the paper's share of the log, which so says nothing. BF16 weights, FP32 activations. Shared memory: "
        "three generations, of sparse ones two steps more, all as large as the largest and a quarter.",
    ),
]  # fmt: skip
