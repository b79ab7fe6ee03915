"""Figures of PEC, MOETION and TierCheck: what each paper says, how it is measured here, and what has to hold of it."""

from __future__ import annotations

from benchmarks import papers_costs as costs
from benchmarks import papers_plans as plans
from benchmarks import papers_runs as runs
from benchmarks.papers_figure import (
    MOETION,
    PEC,
    TIERCHECK,
    Claim,
    Figure,
    ascending,
    at_least,
    at_most,
    no_more,
)

_KS, _PARTS = (1, 2, 4), (25, 50, 75)
_EVERYWHERE = {"": "%"}

OTHERS = [
    Figure(
        key="pec-2", source=f"{PEC}, Fig. 2", takes_seconds=90, is_long=True,
        title="final loss and PLT after one fault, by K and interval I, 8 experts",
        paper={"PLT, K=2, I=32": 7.5, "largest change of loss, PLT below 7.5 %": 100 * (4.8851 / 4.8808 - 1)},
        units=_EVERYWHERE,
        measure=runs.loss_by_plt,
        claims=[
            *(ascending(f"PLT falls as K grows, I={i}", *(f"PLT, K={k}, I={i}" for k in reversed(_KS))) for i in (1, 32)),
            *(ascending(f"PLT grows with I, K={k}", f"PLT, K={k}, I=1", f"PLT, K={k}, I=32") for k in _KS),
            no_more("loss stays put where PLT is below 7.5 %", "largest change of loss, PLT below 7.5 %", "margin"),
        ],
        note="hundreds of steps, not a training of 180 G tokens: the same I is a larger part of the run, so PLT at I=32 is "
        "higher, and two fault-free runs are further apart (margin).",
    ),
    Figure(
        key="pec-5a", source=f"{PEC}, Fig. 5a", takes_seconds=3,
        title="bytes of a checkpoint without copies, by K, GPT-MoE with 8 experts",
        paper={"smaller by, K=1": 54.2},
        units=_EVERYWHERE,
        measure=plans.size_by_k, is_drawn=False,
        claims=[
            ascending("smaller as K falls", *(f"smaller by, K={k}" for k in (8, 4, 2, 1))),
            Claim("K=1 is within 2 points of the paper", ("smaller by, K=1",), lambda x: abs(x[0] - 54.2) <= 2),
        ],
        note="plans at the paper's size. Its 54.2 % and 2.18 times are those of a model with an output matrix of its own; "
        "the 323 million parameters of its Table 1 are those of one that shares the embedding's.",
    ),
    Figure(
        key="pec-5b", source=f"{PEC}, Fig. 5b", takes_seconds=6,
        title="bytes per rank, 8 ranks with an expert of each layer",
        paper={
            "all of its state, less per rank, K=1": 15,
            "sharded adaptively, less per rank, K=1": 76.9,
            "adaptive peak below equal shares, K=1": 11.7,
        },
        units=_EVERYWHERE,
        measure=plans.load_by_rank, is_drawn=False,
        claims=[
            Claim(
                "without sharding K=1 saves within 2 points of the paper",
                ("all of its state, less per rank, K=1",),
                lambda x: abs(x[0] - 15) <= 2,
            ),
            at_least("sharding saves as much as in the paper", "sharded adaptively, less per rank, K=1", 76.9),
            *(at_least(f"adaptive peaks are no higher, to 0.1 %, K={k}", f"adaptive peak below equal shares, K={k}", -0.1) for k in (1, 4)),
            at_most("adaptive peaks are the mean, to a part of 32", "adaptive peak above the mean, K=1", 100 / 32),
        ],
        note="tensors are cut here; there they are whole, and 76.9 % is about what a rank with all of the embedding has. "
        "Equal shares are cut here too, so that less is left to gain.",
    ),
    Figure(
        key="pec-5c", source=f"{PEC}, Fig. 5c", takes_seconds=20,
        title="time until a checkpoint is durable, by K, 8 experts",
        says="with all 8 experts no way of saving is done within a forward and backward pass of 0.78 s; with fewer and sharding it is",
        units={"MB": "MB", "ms": "ms"},
        measure=runs.duration_by_k, is_drawn=False,
        claims=[
            ascending("longer as K grows", "ms, K=1", "ms, K=8"),
            ascending("more bytes as K grows", *(f"MB, K={k}" for k in (1, 2, 4, 8))),
        ],
        shown=(*(f"ms, K={k}" for k in (1, 2, 4, 8)), "ms, a step without"),
        note="one rank, storage on this machine's disk: what a step waits for its own checkpoint beyond its own time. Shares of ranks, which two cores "
        "cannot time, are in Fig. 5b as bytes.",
    ),
    Figure(
        key="pec-5d", source=f"{PEC}, Fig. 5d", takes_seconds=90, is_long=True,
        title="PLT over eight faults, fixed K=1 and Dynamic-K, I=1",
        paper={"limit of PLT": 5.0},
        units={"PLT": "%", "limit": "%"},
        measure=runs.dynamic_k,
        claims=[
            ascending("PLT grows from fault to fault where K is fixed", *(f"PLT, fault {i}, partial" for i in range(1, 9))),
            no_more("Dynamic-K stays within the limit", "PLT, fault 8, dynamic", "limit of PLT"),
            no_more("Dynamic-K loses no more than K=1", "PLT, fault 8, dynamic", "PLT, fault 8, partial"),
            ascending("K grows on the way", "K, fault 1", "K, fault 8"),
        ],
        note="a fault doubles K once here, there as often as it takes: where faults come one upon another, the limit is passed by a "
        "part of the last loss. K is doubled before the limit is met, if another such fault would exceed it.",
    ),
    Figure(
        key="pec-6", source=f"{PEC}, Fig. 6", takes_seconds=80, is_long=True,
        title="final loss after one early, middle or late fault, sequential and load-aware",
        paper={"accuracy, load-aware above sequential, least": 0.005, "accuracy, load-aware above sequential, most": 0.18},
        units=_EVERYWHERE,
        measure=runs.order_of_experts,
        claims=[
            no_more("no fault is seen at the end, early or late", "largest change of loss", "margin"),
            Claim(
                "load-aware is no worse than sequential, to the margin",
                ("load-aware, above sequential", "margin"),
                lambda x: x[0] <= x[1],
            ),
        ],
        shown=("largest change of loss", "load-aware, above sequential", "margin"),
        note="loss of a text model, not accuracy on images: less is better. With I=1 both orders lose so little that chaos "
        "is larger than what is between them.",
    ),
    Figure(
        key="pec-7", source=f"{PEC}, Fig. 7", takes_seconds=60,
        title="PLT by snapshot-K at persist-K=1: one of two nodes is lost",
        says="the larger snapshot-K, the markedly lower PLT",
        units=_EVERYWHERE,
        measure=runs.snapshot_k,
        claims=[
            ascending(
                "PLT falls as snapshot-K grows", *(f"PLT, snapshot-K={k}, persist-K=1" for k in (8, 4, 2, 1))
            ),
        ],
        note="no copies on other nodes here, as there: with `replicas` PLT is that of snapshot-K on both nodes.",
    ),
    Figure(
        key="moetion-table1", source=f"{MOETION}, Table 1", takes_seconds=90, is_long=True,
        title="loss by the share of tokens that experts drop",
        paper={
            f"loss above none, {share} % dropped": 100 * (loss / 2.8861 - 1)
            for share, loss in {1: 2.8875, 3: 2.8892, 5: 2.9474, 7: 3.3698, 10: 5.0146}.items()
        },
        units=_EVERYWHERE,
        measure=runs.loss_by_drops,
        claims=[
            *(
                at_most(f"{share} % cost no more than 3 % do in the paper (below 2.9)", f"loss above none, {share} % dropped", 0.48)
                for share in (1, 3)
            ),
            at_least("10 % cost a tenth of the loss or more", "loss above none, 10 % dropped", 10),
        ],
        note="tokens drawn at random are dropped from the start, and act as dropout does: nothing breaks at 10 %. Which "
        "tokens the paper drops from the 1000th step on, it does not say.",
    ),
    Figure(
        key="moetion-3", source=f"{MOETION}, Fig. 3", takes_seconds=30,
        title="shares of 16 experts in the tokens of a layer, over steps",
        paper={"four busiest of 16, most of any step": 80, "two busiest of 16, most of any step": 87},
        units={"four": "%", "two": "%"},
        measure=runs.popularity,
        claims=[
            at_least("skewed: four of 16 take more than half", "four busiest of 16, most of any step", 50),
            at_least("dynamic: others are the busiest over time", "experts that were busiest of a layer", 2),
            at_least("smooth: the next step is much like this one", "correlation with the next step", 0.8),
        ],
        note="two experts per token here, so that one has half of the slots at most. 80 and 87 % are those of two other models, "
        "with 16 experts, that the section cites.",
    ),
    Figure(
        key="moetion-4", source=f"{MOETION}, Fig. 4", takes_seconds=10,
        title="bytes of a checkpoint with six of 64 experts, 58.7 G parameters",
        paper={
            "parameters, dense": 1.6,
            "parameters, with experts": 58.7,
            "everything": 587,
            "selective": 61,
            "times smaller": 587 / 61,
            "tokens of the experts taken": 80,
        },
        units={"parameters": "G", "everything": "GB", "selective": "GB", "tokens": "%"},
        measure=plans.size_of_large, is_drawn=False,
        claims=[
            Claim("as many times smaller, to 5 %", ("times smaller",), lambda x: abs(x[0] / (587 / 61) - 1) <= 0.05),
            Claim(
                "the experts that are taken have the tokens, to a point",
                ("tokens of the experts taken",),
                lambda x: abs(x[0] - 80) <= 1,
            ),
        ],
        note="plans at the paper's size. 12 bytes per parameter here (weights and moments in fp32), 10 there.",
    ),
    Figure(
        key="moetion-5", source=f"{MOETION}, Fig. 5", takes_seconds=75,
        title="what a checkpoint adds to a step, one at each",
        paper={"throughput, CheckFreq, times less": 5.0},
        units={"step": "ms", "longer": "%"},
        measure=costs.selective_iterations, is_drawn=False,
        claims=[ascending("selective, whole in memory, torch.save", *(f"longer, {each}" for each in ("selective", "dense in memory", "torch.save")))],
        shown=("throughput, CheckFreq, times less", *(f"longer, {each}" for each in ("selective", "dense in memory", "torch.save"))),
        note="copies of a model of 4 M parameters on two cores, which train meanwhile; `dense in memory` stands for Gemini, `torch.save` for CheckFreq. "
        "The paper's stalls are 28 s (Gemini) and 100 s, MOETION's none.",
    ),
    Figure(
        key="moetion-6", source=f"{MOETION}, Fig. 6", takes_seconds=75,
        title="checkpoints in 100 steps that cost 3.5 % of time",
        paper={"in 100 steps, selective": 100, "in 100 steps, dense in memory": 6, "in 100 steps, torch.save": 2},
        units={},
        measure=costs.frequency, is_drawn=False,
        claims=[ascending("selective most often, torch.save least", *(f"in 100 steps, {each}" for each in ("torch.save", "dense in memory", "selective")))],
        note="from the same fits; the paper's limit is no stall at all. On two cores a copy takes time from training that a GPU's would not.",
    ),
    Figure(
        key="moetion-8", source=f"{MOETION}, Fig. 8", takes_seconds=90, is_long=True,
        title="validation loss around four faults, a selective checkpoint at every step",
        paper={"highest spike, in units of loss": 0.5},
        units={"highest spike, in": "", "": "%"},
        measure=runs.loss_after_faults,
        claims=[
            at_most("no spike is above 0.5", "highest spike, in units of loss", 0.5),
            no_more("nothing is seen at the end", "at the end", "margin"),
            no_more("later than 20 steps after a fault less is seen", "20 to 40 steps after a fault", "highest spike"),
        ],
        note="storage is all that is left. A run of 300 steps has no 200 steps after a fault, as there: 20 to 40 instead.",
    ),
    Figure(
        key="moetion-9", source=f"{MOETION}, Fig. 9", takes_seconds=60,
        title="bytes of a checkpoint, and time until it is durable, by number of experts",
        paper={
            "MB, 32 experts, times less": 1820 / 195,
            "ms, 32 experts, times less": 74.9 / 8.5,
        },
        units={"MB, sel": "", "MB, 32 experts, times": "", "ms, 32 experts, times": "", "MB": "MB", "ms": "ms"},
        measure=runs.size_by_experts, is_drawn=False,
        claims=[
            ascending("everything grows with experts", *(f"MB, {n} experts, everything" for n in (2, 4, 8, 16, 32))),
            at_most("selective grows by less than half from 4 to 32", "MB, selective, 32 over 4 experts", 1.5),
            at_least("32 experts: several times fewer bytes", "MB, 32 experts, times less", 4),
            at_least("32 experts: several times faster", "ms, 32 experts, times less", 2),
        ],
        note="two of the experts are taken whatever their number; there S is not told. Time is that of this machine's disk "
        "and two cores, on which training runs beside.",
    ),
    Figure(
        key="moetion-10", source=f"{MOETION}, Fig. 10", takes_seconds=60,
        title="bytes that a step sends to the other node, by mechanism",
        paper={"gradients, of selective": 3.9 / 7.0},
        units={"everything": "MB", "selective, 6": "MB", "+": "MB"},
        measure=runs.breakdown, is_drawn=False,
        claims=[
            ascending("each makes it less", "+ gradients for states", "selective, 6 of 16", "everything"),
            at_most("gradients take a tenth away or more", "gradients, of selective", 0.9),
        ],
        note="bytes on the wire, not seconds. This model has no pipeline, and so no bubbles, and no redundancy to skip where each "
        "node writes its own share; gradients stand for states only where an expert stays chosen.",
    ),
    Figure(
        key="moetion-11", source=f"{MOETION}, Fig. 11", takes_seconds=90, is_long=True,
        title="tokens at risk, experts in turns and by popularity",
        paper={"by budget, of turns, 4 of 16": 0.5},
        units={"tokens": "%"},
        measure=runs.at_risk, is_drawn=False,
        claims=[
            *(at_most(f"in turns has 1.5 times as many or more, {k} of 16", f"by budget, of turns, {k} of 16", 0.67) for k in (4, 6)),
            ascending("fewer are at risk where more are taken", "tokens at risk, in turns, 6 of 16", "tokens at risk, in turns, 4 of 16"),
        ],
        note="in percent of the tokens of one step, on average over steps. Routers are skewed by hand, so that four or five of 16 experts have most.",
    ),
    Figure(
        key="tiercheck-exp1", source=f"{TIERCHECK}, Exp1", takes_seconds=75,
        title="what a checkpoint at each step adds to it",
        paper={"longer, differences": 15.1, "differences shorter than dense in memory": 60.8, "differences shorter than torch.save": 82.7},
        units={"step": "ms", "": "%"},
        measure=costs.iteration_time, is_drawn=False,
        claims=[
            ascending("differences, memory, storage", *(f"longer, {name}" for name in ("differences", "dense in memory", "torch.save"))),
            at_most("differences: no more than in the paper", "longer, differences", 15.1),
        ],
        note="the paper's largest numbers, of 40 B parameters. A step here is long beside its state, so that whole checkpoints cost it less; lossless differences.",
    ),
    Figure(
        key="tiercheck-exp2", source=f"{TIERCHECK}, Exp2", takes_seconds=30,
        title="time until what a step has made is durable",
        paper={"CheckFreq, of TierCheck": 20.0 / 3.2, "Gemini, of TierCheck": 16.7 / 3.2},
        units={"MB": "MB", "ms": "ms"},
        measure=runs.time_until_durable, is_drawn=False,
        claims=[
            ascending("compressed, lossless, everything: bytes", *(f"MB, {name}" for name in ("compressed", "lossless", "everything"))),
            no_more("lossless is durable before everything", "ms, lossless", "ms, everything"),
            no_more("compressed is durable before everything", "ms, compressed", "ms, everything"),
        ],
        shown=("CheckFreq, of TierCheck", "Gemini, of TierCheck", *(f"ms, {name}" for name in ("compressed", "lossless", "everything"))),
        note="what a step waits for its own, each stored alone; median, so that full states, one in 64 steps, do not show. Selecting and packing on a busy "
        "core is most of it, where the paper's writes are.",
    ),
    Figure(
        key="tiercheck-exp3", source=f"{TIERCHECK}, Exp3", takes_seconds=70,
        title="steps between two checkpoints that slow training down by 3.5 %",
        paper={
            "steps between two, differences": 5,
            "steps between two, dense in memory": 11,
            "steps between two, torch.save": 21,
        },
        units={"steps": "", "step": "ms", "a checkpoint": "%"},
        measure=costs.interval, is_drawn=False,
        claims=[
            ascending(
                "differences come most often, then memory, then storage",
                *(f"steps between two, {name}" for name in ("differences", "dense in memory", "torch.save")),
            ),
        ],
        note="from what one checkpoint adds to a step; `dense in memory` stands for Gemini, `torch.save` for CheckFreq.",
    ),
    Figure(
        key="tiercheck-exp5", source=f"{TIERCHECK}, Exp5", takes_seconds=90, is_long=True,
        title="what a checkpoint at each step adds, by size of the model",
        paper={"longer, differences, least": 10.6, "longer, differences, most": 15.1},
        units={"step": "ms", "": "%"},
        measure=costs.iteration_by_size, is_drawn=False,
        claims=[
            *(no_more(f"differences cost less than whole states, width {dim}", f"longer, differences, width {dim}", f"longer, dense in memory, width {dim}")
              for dim in (64, 128, 192)),
        ],
        shown=("longer, differences, least", "longer, differences, most", *(f"longer, {name}, width {dim}" for name in ("differences", "dense in memory") for dim in (64, 128, 192))),
        note="1 to 10 million parameters, not 10 to 40 billion: small tensors dominate at the least width. `dense in memory` is four times what one in four steps "
        "adds, and rounds differ by as much as either adds: five rounds at width 192 had 5.4 % for differences and 4.8 % for whole states at each step. On two "
        "cores a lossless difference, a third of a state, costs what a state does: copies of both hide behind a step.",
    ),
    Figure(
        key="tiercheck-exp7", source=f"{TIERCHECK}, Exp7", takes_seconds=30,
        title="time to get over 20, 50 and 100 steps in a restart",
        paper={"less than one by one": 36.2, "trained again, times one pass": 14.4},
        units={"less": "%", "trained": "", "": "ms"},
        measure=costs.fused_replay, is_drawn=False,
        claims=[
            *(
                ascending(f"fused, one by one, trained again: {n} steps", *(f"{n} steps, {way}" for way in ("one pass", "a pass each", "trained again")))
                for n in (20, 50, 100)
            ),
            at_least("fused saves a third or more", "less than one by one", 33),
        ],
        note="state is in the caches of a CPU in part, and no ranks are synchronised between steps.",
    ),
    Figure(
        key="tiercheck-exp8", source=f"{TIERCHECK}, Exp8", takes_seconds=80, is_long=True,
        title="final loss after four faults under differences",
        units={"": "%"},
        measure=runs.convergence,
        claims=[
            Claim("lossless: the very loss", ("loss, lossless",), lambda x: x[0] == 0),
            *(no_more(f"{mode}: within the margin", f"loss, {mode}", "margin") for mode in ("bf16", "compressed")),
        ],
        note="the paper has a slightly lower final loss with faults than without.",
    ),
    Figure(
        key="tiercheck-exp9", source=f"{TIERCHECK}, Exp9", takes_seconds=110, is_long=True,
        title="size of storage, in full states",
        paper={"kept all, at step 100": 1140 / 228, "steady": 342.1 / 228, "largest": 570.1 / 228, "least": 1.0},
        measure=costs.storage, is_drawn=False,
        claims=[
            ascending("what is kept grows without end", "kept all, at step 100", "kept all, at the end"),
            *(
                Claim(f"{mode}: bounded, the second half has no larger peak (to 10 %)",
                      (f"{mode}, largest of the second half", f"{mode}, largest of the first half"), lambda x: x[0] <= 1.1 * x[1])
                for mode in ("lossless", "bf16", "compressed")
            ),
        ],
        note="a lossless difference is a third of a state and one in bf16 a sixth, where the paper's have 1 % of the elements: "
        "two bases with what is between them are more states.",
    ),
]  # fmt: skip

UNTOLD = {
    "MoEvement, Fig. 1 and Table 4": "ETTR by interval, and the paper's simulator beside its cluster; ours is beside its tables above, and beside real runs in `python -m benchmarks simulator`.",
    "MoEvement, Figs. 2, 3, 5, 7, 8, 9a, 14": "pictures of mechanisms; tests of replay, of frozen operators and of stages that recover alone or together show them.",
    "MOETION, Fig. 7": "time that a fault wastes is mostly that of a start and of reading; `python -m benchmarks recovery` measures both, by kind of failure, beside DCP and Lightning.",
    "TierCheck, Exp4": "as MOETION, Fig. 7: `recovery` has the loss of a process, of a node and of all nodes.",
    "TierCheck, Exp6": "sixteen ranks of data, pipeline and tensor parallelism on two cores measure how processes share cores, not what checkpoints add; campaigns "
    "of `python -m lightning_moe_ckpt.testing` show that restarts are exact there.",
}
"""Results that are not repeated, and why."""
