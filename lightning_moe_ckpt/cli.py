"""Define the console command `moe-ckpt`: its subcommands, their arguments and their help.

Each subcommand is the function of its name in `inspection.commands` or `benchmarks._benchmark`, and returns the
exit status. It is imported when the subcommand runs, so that help, the completion of a shell and mistyped arguments
wait for nothing. Results go to standard output, progress and errors to standard error.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click
from typing_extensions import override

from lightning_moe_ckpt import _cli_options
from lightning_moe_ckpt._cli_options import RUN, remedy
from lightning_moe_ckpt._cli_options import count_of as _count
from lightning_moe_ckpt._cli_options import flag as _flag
from lightning_moe_ckpt._cli_options import option as _option
from lightning_moe_ckpt._cli_options import pair_of as _pair
from lightning_moe_ckpt._cli_options import parts_of as _parts
from lightning_moe_ckpt._cli_options import place_of as _place
from lightning_moe_ckpt._cli_options import setting_of as _setting
from lightning_moe_ckpt._cli_options import size_of as _size
from lightning_moe_ckpt._cli_options import time_of as _time
from lightning_moe_ckpt.errors import CheckpointError

_HELP = """\
Looks at checkpoints that lightning_moe_ckpt wrote, and measures what they cost. Start with `moe-ckpt ls URL`."""
_STATUSES = """\
\b
Exit status:
  0    done; for verify: everything is as it was written
  1    verify: something is damaged, or there is nothing to restore;
       diff, audit: something differs;
       doctor: checkpoints are not safe at URL, or a node is not good
  2    wrong arguments, or the command could not do its work;
       standard error says why in a line
  141  whoever read the output closed it early, as `head` does

Errors go to standard error. With --json they are also a document {"error": ...} on standard output.

Completion: put eval "$(_MOE_CKPT_COMPLETE=bash_source moe-ckpt)" into ~/.bashrc, or zsh_source and ~/.zshrc."""
_BROKEN_PIPE = 141  # 128 + SIGPIPE, as a shell reports it
_INTERRUPTED = 130  # 128 + SIGINT
_LARGE_PAGES = "glibc.malloc.hugetlb"

Benchmarks = dict[str, tuple[str, list[click.Parameter]]]
"""Summary and own options of each benchmark, by name."""


class _Program(click.Group):
    @override
    def invoke(self, ctx: click.Context) -> Any:
        try:
            status = super().invoke(ctx)
            sys.stdout.flush()
        except (CheckpointError, ModuleNotFoundError) as error:
            sentence = remedy(error) if isinstance(error, ModuleNotFoundError) else str(error)
            if sentence is None:
                raise
            sys.stderr.write(f"moe-ckpt: {sentence}\n")
            return 2
        except BrokenPipeError:
            _drop_output()
            return _BROKEN_PIPE
        return status


def _drop_output() -> None:
    """Drop buffered output, which would fail again when Python ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: arguments after the program's name; those of the process by default.

    Returns:
        Exit status, as `--help` lists them. Wrong arguments raise `SystemExit` with 2.
    """
    if argv is None and sys.argv[1:2] == ["bench"]:
        take_large_pages()
    return run(PROGRAM, "moe-ckpt", argv)


def run(program: click.Group, name: str, argv: Sequence[str] | None = None) -> int:
    """Run one command of `program`, which tells its users that it is called `name`; else as `main`."""
    sys.stderr = sys.stderr or open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123, SIM115  # closed by who has started us
    if sys.stdout is None:
        sys.stderr.write(
            "moe-ckpt: standard output is closed, and nothing can be shown. Redirect it to /dev/null instead.\n"
        )
        return 2
    try:
        return int(program.main(argv, name, standalone_mode=False))
    except OSError as error:  # what the commands themselves read and write is a `CheckpointError`
        sys.stderr.write(
            f"moe-ckpt: {error.filename or 'standard output'}: {error.strerror}. The output is not complete.\n"
        )
        _drop_output()
        return 2
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except click.Abort:
        sys.exit(_INTERRUPTED)


def take_large_pages() -> None:
    """Start this process anew with large pages under every allocation, unless the environment chooses pages.

    With small pages a process keeps the speed of its place in memory, and two processes are not alike: a training
    whose steps take 30 to 33 ms with large pages takes 35 to 53 ms without. The C library looks at this only as it starts.
    """
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    if sys.platform == "linux" and _LARGE_PAGES not in tunables:
        os.environ["GLIBC_TUNABLES"] = ":".join([*filter(None, [tunables]), f"{_LARGE_PAGES}=1"])
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606  # the same program


def _command(name: str, summary: str, text: str, params: Sequence[click.Parameter]) -> click.Command:
    """Return the command that is the function of its name in `inspection.commands`."""

    def run(**arguments: Any) -> int:
        commands = importlib.import_module("lightning_moe_ckpt.inspection.commands")
        return int(getattr(commands, name if name != "import" else "import_")(**arguments))

    return click.Command(name, callback=run, params=list(params), short_help=summary, help=text)


def number(flag: str, default: int, text: str) -> click.Option:
    return _option(flag, text, "N", type=_count, default=default)


def several(flag: str, choices: Sequence[str], text: str) -> click.Option:
    names = f"{text}: {', '.join(choices)}; repeat for several (default: all)"
    return click.Option([flag], help=names, metavar="NAME", type=click.Choice(choices), multiple=True, default=choices)


def one_of(flag: str, choices: Sequence[str], text: str) -> click.Option:
    return _option(flag, text, type=click.Choice(choices), default=choices[0])


# -- stored runs, places and clusters

_URL = click.Argument(["url"], metavar="URL")
_JSON = _flag("--json", "Write one JSON document instead of tables, also for an error.", "as_json")
_STORAGE = _option(
    "--storage-option",
    "As in storage_options of the callback; VALUE is JSON, or else text. Repeat for more.",
    "KEY=VALUE",
    type=_setting,
    multiple=True,
)
_set = partial(_option, "--set", metavar="NAME=VALUE", type=_setting, multiple=True, name="given")
_PATH = click.Path(path_type=Path)
_COMMAND = click.Argument(["command"], metavar="-- COMMAND [ARGS]...", nargs=-1, required=True, type=click.UNPROCESSED)
_STEP = _option("--step", "This step instead of the newest usable one.", "N", type=int)


def _on_a_run(name: str, summary: str, text: str, *params: click.Parameter) -> click.Command:
    return _command(name, summary, text, [_URL, *params, _JSON, _STORAGE])


_LOOKING = [
    _on_a_run("ls", "List stored generations.", _cli_options.LS),
    _on_a_run("inspect", "Show one generation: operators, steps, ranks, bytes.", _cli_options.INSPECT, _STEP),
    _on_a_run(
        "verify",
        "Read every byte and check every digest.",
        _cli_options.VERIFY,
        _option("--step", "This step only.", "N", type=int),
        _flag("--all", "Also generations that no restart would use any more.", "everything"),
    ),
    _command(
        "diff",
        "Show in which operators two states differ, and since which step two runs do.",
        _cli_options.DIFF,
        [
            click.Argument(["a"], metavar="URL_A[@STEP]", type=_place),
            click.Argument(["b"], metavar="URL_B[@STEP]", type=_place),
            _JSON,
            _STORAGE,
        ],
    ),
    _on_a_run(
        "export",
        "Write a dense or partial generation to safetensors, a .ckpt, or a folder of torch DCP or Hugging Face.",
        _cli_options.EXPORT,
        click.Argument(["out"], metavar="OUT", type=_PATH),
        _STEP,
        _option(
            "--format",
            "Instead of what the ending of OUT says.",
            type=click.Choice(["safetensors", "ckpt", "dcp", "huggingface"]),
        ),
        _flag("--optimizer", "safetensors: optimizer state too, beside OUT as *.optimizer.safetensors."),
        _flag("--weights-only", "ckpt, dcp: without optimizer, schedulers and callbacks; a third of the size."),
        _option("--module", "Folder: which Hugging Face model, if the module holds several.", "NAME"),
        _option(
            "--max-shard-size",
            "Folder: bytes per file of weights, such as 500MB.",
            "SIZE",
            type=_size,
            default="5GB",
            name="max_shard_nbytes",
        ),
        _option("--leave-out", "Names to leave out, such as '*.mask'.", "PATTERN", multiple=True),
        _option("--tie", "A further name of a stored tensor.", "NEW=STORED", type=_pair, multiple=True),
        _flag("--merge", "Folder: with a PEFT adapter added to the weights of its base, not the adapter alone."),
        _flag("--force", "Replace files that exist."),
    ),
    _command(
        "densify",
        "Replay a sparse generation in its training script, and store it dense.",
        _cli_options.DENSIFY,
        [
            _URL,
            click.Argument(["command"], metavar="-- SCRIPT [ARGS]...", nargs=-1, required=True, type=click.UNPROCESSED),
            click.Option(["-m", "--module", "module"], help="SCRIPT is the name of a module.", is_flag=True),
            _flag("--force", "Also if the run seems to train still: this start ends it."),
            _STORAGE,
        ],
    ),
    _on_a_run(
        "replay",
        "Run steps of a run again in its training script, and look at them.",
        _cli_options.REPLAY,
        _COMMAND,
        _option("--step", "First step to look at, as loggers number them.", "N", type=click.IntRange(0), required=True),
        _option("--until", "Last step (default: the first).", "M", type=click.IntRange(0)),
        _option("--hook", "Called at each step with trainer, module, batch, batch_idx.", "MODULE:FUNCTION", default=""),
        _option(
            "--dump", "Each step's gradients, activations, batch; joined by commas.", "PARTS", type=_parts, default=""
        ),
        _option("--out", "Folder for --dump.", "DIR", type=_PATH),
        _set(
            "Of the optimizer's groups, such as lr=1e-5, or gradient_clip_val; from N on other bits. Repeat for several."
        ),
    ),
    _on_a_run(
        "audit",
        "Run the steps between two generations again, and compare every bit with the run's.",
        _cli_options.AUDIT,
        _COMMAND,
        _option(
            "--from",
            "The newest generation at or before step N (default: the newest two).",
            "N",
            type=click.IntRange(0),
            name="start",
        ),
    ),
    _command(
        "import",
        "Begin a run from a .ckpt of Lightning, or a folder of torch DCP or Hugging Face.",
        _cli_options.IMPORT,
        [
            click.Argument(["src"], metavar="SRC", type=_PATH),
            _URL,
            _flag("--weights-only", "Without optimizer, schedulers, callbacks and loops; at step 0."),
            _option("--prefix", "Begin of all names in the module that names in SRC lack.", "NAME.", default=""),
            _option("--part-size", "Bytes in memory.", "SIZE", type=_size, default="1GiB", name="part_nbytes"),
            _JSON,
            _STORAGE,
        ],
    ),
    _on_a_run(
        "gc",
        "Delete what no restart would use any more.",
        _cli_options.GC,
        _flag("--dry-run", "Delete nothing and write nothing."),
        _option("--keep-last", "Keep the newest N (default: 2).", "N", type=int),
        _option("--keep-every", "Keep the first at or after every Nth step (default: none).", "N", type=int),
        _option(
            "--keep-days", "Keep those committed at most D days before the newest (default: none).", "D", type=float
        ),
        _option("--keep-dense", "Keep the newest N that can be exported, besides (default: none).", "N", type=int),
        _flag("--verify", "With --keep-...: read what is to be kept before others are given up.", "verify_first"),
    ),
    _on_a_run(
        "top",
        "Follow a run: newest steps, lag, rates, goodput, ETA.",
        _cli_options.TOP,
        _flag("--once", "Show it once and end; the default with --json, and where output is no terminal."),
        _option("--every", "Time between two looks, such as 2s or 1min.", "TIME", type=_time, default="2s"),
    ),
    _on_a_run(
        "report",
        "Write a page with plots of a run.",
        _cli_options.REPORT,
        click.Argument(["out"], metavar="[OUT]", required=False, type=_PATH, default="report.html"),
        _flag("--force", "Replace a file that exists."),
    ),
    _on_a_run(
        "profile",
        "Write what a run has measured, for simulate and plan.",
        _cli_options.PROFILE,
        click.Argument(["out"], metavar="[OUT]", required=False, type=_PATH, default="profile.yaml"),
        _set("Of a profile, such as speeds.device_host=20GB or costs.repair=10min; repeat for several."),
        _flag("--force", "Replace a file that exists."),
    ),
    _on_a_run(
        "repair",
        "Rebuild a lost log from committed generations.",
        _cli_options.REPAIR,
        _flag("--yes", "Write the log; without it, only show what it would name.", "write"),
    ),
    _command(
        "doctor",
        "Show which compiled parts are in use, whether checkpoints are safe at a URL, or whether a job's nodes are good.",
        _cli_options.DOCTOR,
        [
            click.Argument(["url"], metavar="[URL]", required=False),
            _flag("--cluster", "Examine the nodes of the job of which this process is a rank."),
            _option("--plan", "With --cluster: of `moe-ckpt plan --json`.", "FILE", type=_PATH),
            _option("--wait", "With --cluster: time for all ranks to come.", "TIME", type=_time, default="20s"),
            _JSON,
            _STORAGE,
        ],
    ),
    _on_a_run(
        "flush",
        "Store what a run that has ended has left in shared memory of this node.",
        _cli_options.FLUSH,
        _option("--wait", "Time for other nodes to bring their ranks' parts.", "TIME", type=_time, default="30s"),
    ),
    _command(
        "shm",
        "List what runs have left in shared memory of this node, and clear it.",
        _cli_options.SHM,
        [
            click.Argument(["url"], metavar="[URL]", required=False),
            _flag(
                "--clear", "Remove what no process holds; without URL of every run, also one that waits to be requeued."
            ),
            _flag("--force", "Remove also what a process holds: that process loses its memory when it ends."),
            _flag("--dry-run", "With --clear or --force: remove nothing, say what would go."),
            _JSON,
            _STORAGE,
        ],
    ),
    _command(
        "placement",
        "Show who keeps whose copies on a cluster, and which losses that survives.",
        _cli_options.PLACEMENT,
        [
            _option("--nodes", "Machines of the run.", "N", type=_count, required=True),
            number("--ranks-per-node", 8, "Processes on each."),
            number("--replicas", 1, "Copies on other nodes, besides one's own."),
            number("--racks", 1, "Racks that the nodes are in, equally many in each as far as that goes."),
            number("--expert-parallel", 1, "Ranks that share one set of experts, as given to MoEStrategy."),
            number("--most", 4, "Losses at once to look at."),
            _flag("--json", "Write one JSON document, which also names every holder.", "as_json"),
        ],
    ),
    _command(
        "plan",
        "Choose policy, window and cadence for a failure rate, or show the shared memory that a run will take.",
        _cli_options.PLAN,
        [
            _option("--profile", "Profile of the run; the model and the cluster are those in it.", "FILE", type=_PATH),
            _option("--mtbf", "Profile: mean time between failures of the whole run, such as 2h.", "TIME", type=_time),
            _option(
                "--scope",
                "Profile: what most failures take (default: node, or process of one node).",
                type=click.Choice(["process", "node", "cluster"]),
            ),
            _option(
                "--allow-loss",
                "Profile: portion of tokens that may be lost, such as 0.05 (default: none).",
                "X",
                type=float,
                default=0.0,
            ),
            _option("--host-memory", "Profile: most shared memory of a node.", "SIZE", type=_size, name="host_nbytes"),
            _flag("--yaml", "Profile: write the callback for a configuration file of LightningCLI.", "as_yaml"),
            _option("--url", "With --yaml: where checkpoints live.", "URL", default="checkpoints", name="at"),
            _option("--config", "config.json of the model, or its folder.", "PATH"),
            _option("--params", "Parameters in all, such as 16.4e9.", "N", type=float, default=0),
            number("--layers", 1, "Blocks with experts."),
            _option("--experts", "Experts of each.", "N", type=int, default=0),
            _option("--expert-params", "Parameters of one.", "N", type=float, default=0),
            one_of("--precision", ["bf16-mixed", "32-true", "bf16-true"], "Of the Trainer."),
            number("--nodes", 1, "Machines of the run."),
            number("--ranks-per-node", 8, "Processes on each."),
            number("--expert-parallel", 1, "As given to MoEStrategy."),
            _option("--pipeline-parallel", "Likewise.", "N", type=_count, default=1, name="stages"),
            one_of("--policy", ["sparse", "dense", "differential", "partial", "selective"], "Of the callback."),
            number("--window", 8, "sparse: steps."),
            _option("--budget", "sparse, instead of --window, and selective: bytes.", "SIZE", type=_size),
            one_of("--planner", ["packed", "algorithm1"], "sparse, with --budget."),
            _option("--every", "Others: steps.", "N", type=_count, default=64, name="every_n_steps"),
            number("--batch", 8, "differential: differences."),
            number("--k", 1, "partial: experts."),
            _option("--replicas", "Copies on other nodes.", "N", type=int, default=0),
            _flag("--redundancy", "Holders of copies take part of them from their own state."),
            _flag("--json", "Write one JSON document.", "as_json"),
        ],
    ),
    _command(
        "simulate",
        "Show the goodput of a run under failures, by checkpointing system.",
        _cli_options.SIMULATE,
        [
            click.Argument(["path"], metavar="PROFILE", type=_PATH),
            _option("--mtbf", "Mean time between failures (default: 2h).", "TIME", type=_cli_options.seconds),
            _option("--trace", "Failures instead: lines of seconds,scope.", "FILE", type=_PATH),
            _option(
                "--scope", "What failures take (default: node).", type=click.Choice(["node", "process", "cluster"])
            ),
            _option("--system", _cli_options.SYSTEM, "NAME[:SETTING=VALUE,...]", multiple=True, name="chosen"),
            _option("--hours", "Wall time of the run.", "H", type=float, default=24.0),
            number("--seeds", 10, "Runs of each system, with failures of their own."),
            _option("--plot", "Also draw the parts, such as out.png or out.svg.", "FILE", type=_PATH),
            _flag("--json", "Write one JSON document.", "as_json"),
        ],
    ),
]

# -- benchmarks

_FITS: list[click.Parameter] = [
    number("--rounds", 5, "Turns of every fit."),
    number("--steps", 16, "Steps of a turn that count."),
    number("--settle", 8, "Steps of a turn before them."),
    number("--warm-up", 28, "Steps before those of the first turn that count."),
    _option("--precision", "Of the Trainer.", default="32-true"),
    number("--blocks", 2, "Transformer blocks."),
    number("--dim", 128, "Model dimension; experts are four times as wide."),
    number("--experts", 16, "Experts per block."),
    number("--batch-size", 1, "Crops of 64 tokens per step."),
]
BENCHMARKS: Benchmarks = {  # the first ones fork, and a fork copies what others leave behind
    "overhead": (
        "What checkpoints add to a step, in memory only and with storage.",
        [
            _option("--variants", "What is measured (default: the usual ones); a wrong name lists them.", "A,B"),
            number("--ranks", 1, "Processes of every fit."),
            number("--expert-parallel", 1, "Of them share one set of experts."),
            *_FITS,
            _option("--url", "Folder for checkpoints, which stay (default: a temporary folder).", "URL"),
        ],
    ),
    "strategy": (
        "What MoEStrategy adds to a step beside DDP, without checkpoints.",
        [
            _option("--strategy-ranks", "Ranks of the trainings, one after another.", "N,N", default="1,2"),
            _flag("--spread-experts", "Give each rank experts of its own, which DDP does not reduce."),
            *_FITS,
        ],
    ),
    "peers": (
        "Steps, CPU, memory and kills beside other systems, each in an environment that pip makes; in a checkout.",
        [
            _option("--peers", "What is measured (default: all); a wrong name lists them.", "A,B"),
            number("--every", 4, "Steps between two saves."),
            number("--peer-kills", 2, "Kills of every system."),
            _option(
                "--envs", "For environments, which stay (default: a folder in the user's cache).", "PATH", type=Path
            ),
            number("--rounds", 6, "Of four turns, of every system."),
            *_FITS[1:3],
            *_FITS[5:],
            _option("--peers-folder", "For checkpoints (default: the temporary directory).", "PATH", type=Path),
            _option("--png", "Draw what is added to a step.", "PATH", type=Path),
            _option("--page", "Put the table into a page, between its marks.", "PATH", type=Path),
        ],
    ),
}
_APART = {"peers"}
"""Not among `all`, and not installed with the package: it has pip install other systems."""


def bench(benchmarks: Benchmarks, place: str) -> click.Group:
    """Return the command of benchmarks that are modules of their names at `place`, such as `lightning_moe_ckpt.benchmarks._`."""
    return _Program(
        "bench",
        help="Measure costs on this machine.",
        commands=[
            *(_bench(name, summary, {name: params}, place) for name, (summary, params) in benchmarks.items()),
            _bench(
                "all",
                "All of them but peers, one after another.",
                {name: benchmark[1] for name, benchmark in benchmarks.items() if name not in _APART},
                place,
            ),
        ],
    )


def _bench(name: str, summary: str, chosen: Mapping[str, list[click.Parameter]], place: str) -> click.Command:
    def run(**options: Any) -> int:
        commands = importlib.import_module("lightning_moe_ckpt.benchmarks._benchmark")
        modules = {each: commands.module_of(each, place, apart=each in _APART) for each in chosen}
        return int(commands.bench(modules, **options))

    params: list[click.Parameter] = [
        _flag("--json", "Write figures as JSON.", "as_json"),
        _option(
            "--accelerator",
            "Of trainings; gpu needs a device per rank (default: cpu).",
            type=click.Choice(["cpu", "gpu", "auto"]),
        ),
    ]
    params += {param.name: param for each in chosen.values() for param in each}.values()
    return click.Command(name, callback=run, params=params, short_help=summary, help=summary)


BENCH = bench(BENCHMARKS, "lightning_moe_ckpt.benchmarks._")
PROGRAM = _Program(
    "moe-ckpt",
    help=_HELP,
    epilog=_STATUSES,
    commands=[*_LOOKING, RUN, BENCH],
    context_settings={"max_content_width": 110},
)
click.version_option(package_name="lightning-moe-ckpt", prog_name="moe-ckpt")(PROGRAM)


if __name__ == "__main__":  # where the package is on the path and not installed
    sys.exit(main())
