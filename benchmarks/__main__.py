"""`python -m benchmarks NAME`, in a checkout: what the papers say and what this project chose, repeated. See README.md.

What checkpoints cost on a user's machine is `moe-ckpt bench`, which comes with the package.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from click import Argument, Choice

from lightning_moe_ckpt._cli_options import flag, option
from lightning_moe_ckpt.cli import BENCHMARKS, Benchmarks, bench, number, run, several, take_large_pages

_POLICIES = ["sparse", "differential", "bf16", "compressed", "feedback", "partial", "dynamic", "selective", "ablation"]
_BENCHMARKS: Benchmarks = {  # the first ones fork, and a fork copies what others leave behind
    "quality": (
        "Final validation loss after faults, by policy, against the fault-free run of the same seed.",
        [
            number("--quality-seeds", 3, "Runs of each policy."),
            number("--quality-jobs", 2, "Runs at once, which change no loss."),
            option("--quality-out", "For figures and the plot.", "PATH", type=Path, default=Path("out/quality")),
            option("--quality-folder", "For checkpoints (default: the temporary directory).", "PATH", type=Path),
            several("--quality-policies", _POLICIES, "What is killed; `ablation` has to miss the margin"),
            flag("--quality-quick", "A few steps of a tiny model, which say nothing about quality."),
        ],
    ),
    "persist": (
        "Time and CPU until a generation is durable beside a bare write, and what steps notice of it.",
        [
            number("--generation-megabytes", 200, "MiB of a generation."),
            number("--segments", 4, "Files it consists of."),
            number("--persist-rounds", 10, "Generations stored in each place."),
            number("--persist-steps", 400, "Steps of the fit."),
            number("--persist-dim", 128, "Model dimension of the fit."),
            option("--persist-folder", "On the disk in question (default: a temporary folder).", "PATH", type=Path),
            option("--object-url", "s3://bucket/place; without it object storage is left out.", "URL"),
            option("--object-options", "Its storage_options, as JSON.", "JSON", type=json.loads),
        ],
    ),
    "pipeline": (
        "Seconds from the SIGKILL of a pipeline stage to the first new step, when all stages go back or only that one.",
        [
            number("--stages", 3, "Pipeline stages, a process each."),
            number("--micro-batches", 4, "Of a batch."),
            number("--stage-ms", 20, "A stage sleeps in one of the three passes over a micro-batch."),
            option("--stage-experts", "Experts of a layer of a stage; 0 for stages without.", "N", type=int, default=0),
            number("--pipeline-kills", 6, "Kills of every system."),
            several(
                "--pipeline-systems", ["torchrun", "computes_all", "in_place", "reordered", "alone"], "What is compared"
            ),
            option("--pipeline-folder", "For checkpoints (default: the temporary directory).", "PATH", type=Path),
        ],
    ),
    "bubbles": (
        "What steps of a pipeline feel of copies that wait for bubbles, and of copies that do not.",
        [
            several("--bubble-settings", ["cores", "devices"], "Two stages of one core each; four that sleep"),
            number("--bubble-megabytes", 128, "MiB of a stage's state, copied at every step."),
            number("--bubble-layers", 4, "Layers of a stage with a core, 512 wide."),
            number("--bubble-samples", 128, "Of such a stage's micro-batch."),
            number("--bubble-steps", 110, "Steps of every fit."),
        ],
    ),
    "recovery": (
        "Steps and seconds lost per kind of failure, beside torch DCP and Lightning's .ckpt.",
        [
            number("--kills", 5, "Kills of every run, each at another step between two checkpoints."),
            number("--nodes", 2, "Processes, each a node of its own."),
            number("--every", 8, "Steps between two checkpoints; the window of sparse ones."),
            number("--recovery-blocks", 4, "Transformer blocks of the model that is killed."),
            number("--recovery-dim", 128, "Its model dimension."),
            number("--host-kills", 10, "Kills of a process whose state is read back from memory, without training."),
            number("--host-megabytes", 50, "MiB of that state."),
            several("--systems", ["sparse", "dense", "partial", "selective", "dcp", "lightning"], "What is compared"),
            flag("--breakdown", "Where the milliseconds go: of restarts by phase, of checkpoints by hook and thread."),
            option("--folder", "For checkpoints (default: the temporary directory).", "PATH", type=Path),
        ],
    ),
    "in-place": (
        "Seconds from a SIGKILL to the first new step: moe-ckpt run, with and without a spare, and torchrun.",
        [
            option("--in-place-ranks", "Ranks of the trainings, one after another.", "N,N", default="2,3,4"),
            number("--in-place-kills", 10, "Kills under each launcher."),
            several("--launchers", ["spare", "replaced", "torchrun"], "What is compared"),
            option("--in-place-folder", "For checkpoints (default: the temporary directory).", "PATH", type=Path),
        ],
    ),
    "simulator": (
        "Goodput simulated and measured: trainings that die by SIGKILL at random, by policy and mean steps between failures.",
        [
            several("--simulator-policies", ["sparse", "dense", "differential"], "What is compared"),
            option("--simulator-mtbf", "Mean steps of training between failures.", "N,N", default="20,60,200"),
            number("--simulator-faults", 8, "Failures of every cell."),
            option("--simulator-step", "Seconds of a step here, roughly.", "SECONDS", type=float, default=0.06),
            option(
                "--simulator-out",
                "For runs; those that are there are not repeated.",
                "PATH",
                type=Path,
                default=Path("out/simulator"),
            ),
            option("--simulator-folder", "For checkpoints (default: the temporary directory).", "PATH", type=Path),
        ],
    ),
    "native": (
        "Compiled copies beside those of torch: small slices, strided and converted ones, from a GPU.",
        [
            number("--slices", 10_000, "Of one list."),
            number("--repeats", 7, "Of every measurement."),
            number("--megabytes", 256, "MiB of large copies."),
        ],
    ),
    "native-goals": (
        "Compiled parts by the goals that were set for them, and kernels beside torch; on a GPU also arrangements of copies.",
        [
            number("--goal-megabytes", 256, "MiB of large copies."),
            number("--goal-repeats", 7, "Of every measurement."),
            number("--elements", 32 * 2**20, "Of gradients."),
            number("--device-elements", 10**9, "On a GPU."),
        ],
    ),
    "breakdown": (
        "Where the time of checkpoints goes: microseconds by hook, CPU time by thread beside.",
        BENCHMARKS["overhead"][1],
    ),
    "strategy-breakdown": (
        "Where the reducer of MoEStrategy spends the time of a step.",
        BENCHMARKS["strategy"][1],
    ),
    "replicas": (
        "Seconds from a SIGKILL to the first new step: torchft, where it is installed, and moe-ckpt run.",
        [
            option("--replica-ranks", "Ranks of the trainings, one after another.", "N,N", default="2,3"),
            number("--replica-kills", 10, "Kills under each launcher."),
            option("--replica-folder", "For checkpoints (default: the temporary directory).", "PATH", type=Path),
        ],
    ),
    "papers": (
        "Figures of the papers, repeated on two cores: ours beside theirs, and whether the shape is the same.",
        [
            option(
                "--only",
                "A figure, or how keys begin; repeat for several (default: all but ten long ones).",
                "KEY",
                multiple=True,
            ),
            flag("--list", "List the figures, and measure nothing.", "list_only"),
            option("--page", "Put rows into the tables of docs/papers.md.", "PATH", type=Path),
            flag("--full", "Three seeds, and longer runs."),
        ],
    ),
    "simulator-published": (
        "The simulator beside MoEvement's Table 3 and Fig. 11, with all that the paper does not state.",
        [
            number("--published-failures", 720, "Failures of each cell, in runs of 12 hours."),
            option("--page", "Put the table into docs/papers.md.", "PATH", type=Path),
        ],
    ),
    "simulator-sensitivity": (
        "What of that agreement is left where one assumption has another value.",
        [
            number("--sensitivity-failures", 360, "Failures of each cell, in runs of 12 hours."),
            option("--page", "Put the tables into docs/papers.md.", "PATH", type=Path),
        ],
    ),
    "selection": (
        "Experts in turns, by load and by budget: how many are taken again, tokens at risk, bytes to another node.",
        [
            several("--routers", ["even", "skewed", "steep"], "How tokens are spread"),
            number("--selection-steps", 50, "Steps of every fit."),
            option("--shares", "Of experts that a generation takes.", "X,X", default="0.25,0.4"),
        ],
    ),
    "differential": (
        "Bytes and time of a step of DifferentialCheckpoint, and how fast a restart applies differences.",
        [
            number("--differential-steps", 130, "Steps of every fit."),
            number("--differential-every", 64, "Steps between two full snapshots."),
            number("--differential-dim", 128, "Model dimension of the fits."),
            number("--differential-elements", 4_000_000, "Of the parameter that differences are applied to."),
            number("--differential-repeats", 5, "Of every way to apply them."),
        ],
    ),
    "ranks": (
        "What commits, agreements, starts and restores cost with up to 10,000 ranks: our code, simulated store and network.",
        [
            Argument(["parts"], nargs=-1, type=Choice(["store", "agree"]), metavar="[store|agree]..."),
            option("--ranks", "Numbers of ranks.", "N,N", default="64,256,1024,4096,10000"),
        ],
    ),
    "scale": (
        "What sparse checkpoints add to a step, to the start and to a restart, by the number of experts.",
        [
            option("--sizes", "Experts in all, in four layers.", "N,N", default="256,1024,4096,16384"),
            number("--scale-rounds", 3, "Turns of every fit."),
            number("--scale-steps", 16, "Steps of a turn that count, whole windows of 8."),
        ],
    ),
}

PROGRAM = bench(_BENCHMARKS, "benchmarks.")


if __name__ == "__main__":
    take_large_pages()
    sys.exit(run(PROGRAM, "python -m benchmarks"))
