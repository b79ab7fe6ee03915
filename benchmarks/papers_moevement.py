"""Figures of MoEvement: what the paper says, how it is measured here, and what has to hold of it."""

from __future__ import annotations

from benchmarks import papers_runs as runs
from benchmarks import papers_skew as skew
from benchmarks import papers_trace as trace
from benchmarks import papers_windows as windows
from benchmarks.papers_figure import MOEVEMENT, Claim, Figure, ascending, at_least, at_most, near, no_more

MOEVEMENTS = [
    Figure(
        key="moevement-table1", source=f"{MOEVEMENT}, Table 1", takes_seconds=150,
        title="four properties of four systems, after 24 faults",
        says="low overhead and high frequency, fast and full recovery, and high ETTR: only MoEvement has all; MoC has no full recovery",
        units={"steps": "", "tokens": "", "batches repeated": "", "": "%"},
        measure=trace.properties,
        claims=[
            at_most("MoEvement: a checkpoint per step", "steps between checkpoints, MoEvement", 1),
            *(no_more(f"MoEvement repeats less than {other}", "batches repeated per fault, MoEvement", f"batches repeated per fault, {other}")
              for other in ("CheckFreq", "Gemini")),
            *(at_most(f"{system} loses no token", f"tokens lost, {system}", 0) for system in ("CheckFreq", "Gemini", "MoEvement")),
            at_least("MoC loses tokens", "tokens lost, MoC", 1),
            at_least("MoEvement: nine batches in ten are of use", "batches of use, MoEvement", 90),
        ],
        shown=tuple(f"{what}, {system}" for what in ("batches repeated per fault", "tokens lost", "batches of use") for system in trace.SYSTEMS),
        note="the runs of Fig. 10. What a batch takes longer is not in it: `moe-ckpt bench overhead` has that.",
    ),
    Figure(
        key="moevement-table3", source=f"{MOEVEMENT}, Table 3", takes_seconds=8,
        title="windows of four models",
        paper={f"window, {name}": float(job.paper) for name, job in windows.MODELS.items()},
        units={"bandwidth": "MB/s"},
        measure=windows.windows_of_models, is_drawn=False,
        claims=[
            at_least("the other three are within a step of the paper's", "others within a step", 3),
            no_more("a window is longest for 64 experts in 12 stages", "window, QWen-MoE", "window, DeepSeek-MoE"),
            at_most("packed windows are no longer than those of Algorithm 1", "packed, longest over Algorithm 1", 0),
        ],
        note="the planner with `algorithm1`, at the paper's bytes and seconds. It tells no bandwidth: DeepSeek-MoE's window gives 283 MB/s per GPU, which "
        "no PCIe bus limits it to, and the others follow. `packed`, the default here, needs a step less for the two of 64 experts.",
    ),
    Figure(
        key="moevement-table5", source=f"{MOEVEMENT}, Table 5", takes_seconds=90,
        title="four tasks after four faults, exact and lossy checkpoints",
        paper={"largest loss, sparse": 0.1, "largest loss, MoC (TriviaQA)": 54.8 - 37.5, "least loss, MoC (NaturalQuestions)": 15.3 - 6.3},
        units={"": "%", "same": ""},
        measure=runs.tasks_after_faults,
        claims=[
            Claim("sparse: the very accuracies", ("largest loss, sparse", "same bits, sparse"), lambda x: x[0] == 0 and x[1] == 1),
            at_least("experts that are rarely saved cost a point or more", "largest loss, rarely saved", 1.0),
            no_more("partial checkpoints cost less than these", "largest loss, partial", "largest loss, rarely saved"),
        ],
        shown=("largest loss, sparse", "largest loss, MoC (TriviaQA)", "least loss, MoC (NaturalQuestions)", "largest change, rounding", "largest loss, partial",
               "largest loss, rarely saved"),
        note="tasks of a byte model of 240 steps: which byte comes next, anywhere, inside words, first of a line, in punctuation. `rounding` is a fault-free "
        "run whose first weights are off by a rounding: smaller differences say nothing. `rarely saved` saves each expert twice in the run; the paper's MoC loses more.",
    ),
    Figure(
        key="moevement-table7", source=f"{MOEVEMENT}, Table 7", takes_seconds=5,
        title="windows for states of low precision",
        paper={f"window, {name}": float(job.paper) for name, job in windows.PRECISIONS.items()},
        units={"bandwidth": "MB/s"},
        measure=windows.windows_of_precisions, is_drawn=False,
        claims=[
            at_least("three of the other four are the paper's", "others as in the paper", 3),
            at_least("all are within a step", "others within a step", 4),
            at_most("packed windows are no longer than those of Algorithm 1", "packed, longest over Algorithm 1", 0),
        ],
        note="the planner with `algorithm1`, at the paper's bytes per parameter and its seconds, which are of a rounded percentage. One window, of FP8 with FP32 states, "
        "gives the bandwidth; the others follow from it. FP8, FP16, FP32+FP32 has 5 steps here.",
    ),
    Figure(
        key="moevement-4", source=f"{MOEVEMENT}, Fig. 4", takes_seconds=30,
        title="experts with a token in a layer of 64, top-8",
        paper={"steps with 62 of 64 active": 92.0},
        units={"steps": "%"},
        measure=runs.active_experts,
        claims=[
            at_least("62 of 64 are active in nine steps of ten", "steps with 62 of 64 active", 90),
            at_least("shares are uneven: the busiest has twice the average", "busiest, times the average", 2.0),
            at_least("shares change over time", "an expert's largest share over its least", 2.0),
        ],
        shown=("steps with 62 of 64 active", "fewest active, of 64", "busiest, times the average", "an expert's largest share over its least"),
        note="512 tokens per step, with a balancing loss, not a million; a token of text has one of 100 common bytes.",
    ),
    Figure(
        key="moevement-6", source=f"{MOEVEMENT}, Fig. 6 (inset)", takes_seconds=2,
        title="largest snapshot of a window beside a dense one",
        paper={"smaller than dense, window 3, algorithm1": 55.0},
        units={"": "%"},
        measure=windows.size_of_snapshots, is_drawn=False,
        claims=[
            Claim("within 6 points of the paper by its own rule", ("smaller than dense, window 3, algorithm1",), lambda x: abs(x[0] - 55) <= 6),
            at_least("smaller than in the paper by `packed`", "smaller than dense, window 3, packed", 55),
        ],
        shown=("smaller than dense, window 3, algorithm1", "smaller than dense, window 3, packed", "smaller than dense, window 6, packed"),
        note="plans for a rank of DeepSeek-MoE. The paper's 55 % is of operators of equal size; with their real sizes Algorithm 1's first step is larger, and "
        "`packed` evens steps out.",
    ),
    Figure(
        key="moevement-10", source=f"{MOEVEMENT}, Fig. 10", takes_seconds=150,
        title="useful work under a trace of 24 faults, and MoC's K and lost tokens",
        paper={
            "MoEvement over CheckFreq": 1.25, "MoEvement over Gemini": 1.15, "MoEvement over MoC": 1.98,
            "K of MoC, fault 1": 12.5, "K of MoC, fault 24": 100.0, "tokens lost, MoEvement": 0,
        },
        units={"batches": "%", "a batch": "ms", "K": "%", "PLT": "%"},
        measure=trace.goodput,
        claims=[
            ascending("more batches are of use: CheckFreq, Gemini, MoEvement", *(f"batches of use, {each}" for each in ("CheckFreq", "Gemini", "MoEvement"))),
            Claim("1.25 times CheckFreq's, to 0.1, in batches", ("MoEvement over CheckFreq",), lambda x: abs(x[0] - 1.25) <= 0.1),
            Claim("1.15 times Gemini's, to 0.1, in batches", ("MoEvement over Gemini",), lambda x: abs(x[0] - 1.15) <= 0.1),
            ascending("MoC's K grows", "K of MoC, fault 1", "K of MoC, fault 24"),
            ascending("MoC's PLT grows", "PLT of MoC, fault 1", "PLT of MoC, fault 6"),
            at_most("until all experts are taken, at its budget of 3.75 % or a tenth above", "PLT of MoC, fault 24", 4.125),
            at_most("MoEvement loses no token", "tokens lost, MoEvement", 0),
        ],
        shown=("MoEvement over CheckFreq", "MoEvement over Gemini", "MoEvement over MoC", "K of MoC, fault 1", "K of MoC, fault 6", "K of MoC, fault 24",
               "PLT of MoC, fault 24", "tokens lost, MoEvement"),
        note="a quarter of the paper's steps, intervals and window (6 becomes 2), 24 faults at times drawn evenly. Useful batches of all that were run, whatever a "
        "batch takes: stalls, for which MoC falls behind in the paper, are not in it, and `moe-ckpt bench overhead` has them.",
    ),
    Figure(
        key="moevement-12", source=f"{MOEVEMENT}, Fig. 12", takes_seconds=90,
        title="validation loss in a training with four faults",
        says="MoC's loss has spikes after the first two faults and stays above; Gemini's and MoEvement's follow the fault-free curve",
        units={"": "%"},
        measure=runs.loss_over_training,
        claims=[
            Claim("sparse: the fault-free curve", ("furthest above fault-free, sparse",), lambda x: x[0] == 0),
            at_least("rarely saved experts: a spike of a percent or more", "right after a fault, rarely saved", 1.0),
            no_more("partial checkpoints: a smaller one", "right after a fault, partial", "right after a fault, rarely saved"),
        ],
        shown=("furthest above fault-free, sparse", "right after a fault, partial", "right after a fault, rarely saved", "at the end, partial",
               "at the end, rarely saved", "margin"),
        note="the runs of Table 5. `margin` is what a rounding of the first weights does to the final loss.",
    ),
    Figure(
        key="moevement-15", source=f"{MOEVEMENT}, Fig. 15", takes_seconds=2,
        title="experts with a token by skew, at the paper's 8.4 million slots per step",
        says="most of 64 experts have a token at any skew",
        measure=skew.activated,
        claims=[
*(near(f"the metric finds S={each:g}, to 0.05", f"skew, S={each:g}", each, 0.05) for each in skew.ALPHAS),
            at_least("most have a token at S=0.25", "experts with a token, S=0.25, median", 33),
            at_least("most have a token at S=0.99", "experts with a token, S=0.99, median", 33),
            ascending("fewer have a token as skew grows", *(f"experts with a token, S={each:g}, median" for each in reversed(skew.ALPHAS))),
        ],
        shown=tuple(f"experts with a token, S={each:g}, median" for each in skew.ALPHAS),
        note="200 draws of each of the paper's alphas: skews are as the paper says, but most experts have no token, for a share is below 1e-7 with a "
        "probability of (1e-7)^alpha or so. Routers with noise or a balancing loss, as in Fig. 4, keep them active.",
    ),
    Figure(
        key="moevement-16", source=f"{MOEVEMENT}, Fig. 16", takes_seconds=100,
        title="work of replay by skew, 32 experts, a window of 6",
        says="MoEvement's advantage grows with skew; a frozen expert costs a third less",
        paper={"less by reordering, most": 33.0},
        units={"": "%"},
        measure=skew.recomputation, is_drawn=False,
        claims=[
            no_more("little to gain where all are alike", "less by reordering, S=0", "less by reordering, S=0.75"),
            *(at_least(f"popular experts last: a twentieth less or more, S={each:g}", f"less by reordering, S={each:g}", 5) for each in (0.25, 0.5, 0.75, 0.99)),
            ascending("the more skew, the more reordering brings", *(f"less by reordering, S={each:g}" for each in (0.25, 0.5, 0.75, 0.99))),
            at_most("nine tenths of what can be left out is, S=0.25", "work of replay, S=0.25, popularity", 70.0),
            no_more("a step's third is the most that is left out", "least possible", "work of replay, S=0.99, popularity"),
        ],
        shown=("less by reordering, most", *(f"work of replay, S={each:g}, popularity" for each in skew.ALPHAS), *(f"less by reordering, S={each:g}" for each in skew.ALPHAS),
               "MoC's K at the end, S=0", "MoC's K at the end, S=0.99", "MoC's PLT at the end, S=0", "MoC's PLT at the end, S=0.99"),
        note="multiplications in products of matrices, counted in real replays; 100 % is a step without frozen operators, and weight gradients are a third of it. A skew of 0.25 is enough for nine tenths of that: more brings "
        "nothing, and a fixed order has its busy experts late or early by chance. "
        "MoC's mean loss does not depend on skew, only how much it varies does: an expert waits as long whatever it has.",
    ),
    Figure(
        key="moevement-9", source=f"{MOEVEMENT}, Fig. 9", takes_seconds=120, is_long=True,
        title="a step that is taken again after the loss of one of 3 stages",
        paper={"shorter by": 23.0},
        units={"all": "ms", "that": "ms", "shorter": "%"},
        measure=runs.upstream_logs, is_drawn=False,
        claims=[at_least("a fifth shorter or more with logs", "shorter by", 20.0)],
        note="stages sleep in place of computing, four micro-batches: a third of a step is bubbles, which a stage that is fed by "
        "logs does not have.",
    ),
    Figure(
        key="moevement-13", source=f"{MOEVEMENT}, Fig. 13", takes_seconds=150,
        title="a step that is taken again after the loss of one of 3 stages with experts, by mechanism",
        paper={"work left out, fixed order": 33.0, "ETTR from reordering, 64 experts": 32.0, "ETTR from upstream logs, 12 stages": 50.0},
        units={"work": "%", "shorter": "%", "ETTR": "%", "": "ms"},
        measure=runs.mechanisms, is_drawn=False,
        claims=[
            ascending("each makes it shorter", "+ upstream logs", "+ popular experts last", "+ frozen weights skipped", "sparse checkpoints"),
            no_more("popular experts last leave more out", "work left out, fixed order", "work left out, popular last"),
        ],
        shown=("ETTR from reordering, 64 experts", "ETTR from upstream logs, 12 stages", "work left out, fixed order", "work left out, popular last",
               "shorter by, + frozen weights skipped", "shorter by, + popular experts last", "shorter by, + upstream logs"),
        note="two layers of 16 experts, two of which have most tokens; stages sleep by the size of each product. A window of 4: three steps of those "
        "taken again have frozen weights. Weight gradients are a third of a step, so that order alone can take no third off a step: the paper's "
        "figures are of ETTR, where recovery was half of the time.",
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
