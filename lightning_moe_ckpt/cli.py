"""The console command `moe-ckpt`.

A subcommand is a function that declares its arguments and, by `set_defaults(run=...)`, what runs: it stands in
`_COMMANDS`, takes the parsed arguments and returns the exit status. Results go to standard output, as tables or, with
`--json`, as one JSON document; progress and errors go to standard error.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import Progress

from lightning_moe_ckpt.benchmarks import (
    ACCELERATORS,
    Benchmark,
    Machine,
    NativeBench,
    OverheadBench,
    PersistBench,
    QualityBench,
    RecoveryBench,
)
from lightning_moe_ckpt.errors import CheckpointError
from lightning_moe_ckpt.inspection import Screen, add_commands, add_doctor, add_placement

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]  # noqa: SLF001  # argparse has no public name for it

Run = Callable[[argparse.Namespace], int]

# The first ones fork, which is safe only as long as nothing else has run in this process.
_BENCHMARKS: tuple[Benchmark[Any], ...] = (
    RecoveryBench(),
    QualityBench(),
    PersistBench(),
    OverheadBench(),
    NativeBench(),
)


_HELP = """\
Looks at checkpoints that lightning_moe_ckpt wrote, and measures what they cost. Start with `moe-ckpt ls URL`."""
_STATUSES = """\
Exit status:
  0    done; for verify: everything is as it was written
  1    verify only: something is damaged, or there is nothing to restore
  2    wrong arguments, or the command could not do its work; standard error says why in a line
  141  whoever read the output closed it early, as `head` does

Errors never stand in standard output but with --json, where they are a document {"error": ...}."""
_BROKEN_PIPE = 141  # 128 + SIGPIPE, as a shell reports it


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: arguments after the program's name; those of the process by default.

    Returns:
        Exit status, as `--help` lists them. Wrong arguments raise `SystemExit` with 2.
    """
    parser = argparse.ArgumentParser(
        prog="moe-ckpt", description=_HELP, epilog=_STATUSES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for declare in _COMMANDS:
        declare(commands)
    args = parser.parse_args(argv)
    run: Run = args.run
    try:
        status = run(args)
        sys.stdout.flush()
    except CheckpointError as error:
        sys.stderr.write(f"moe-ckpt: {error}\n")
        return 2
    except BrokenPipeError:
        # What is still buffered would fail again when Python ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _BROKEN_PIPE
    return status


def _declare_bench(commands: Commands) -> None:
    bench = commands.add_parser("bench", help="measure costs on this machine")
    choices = bench.add_subparsers(metavar="BENCHMARK", required=True)
    for benchmark in _BENCHMARKS:
        _declare_benchmarks(choices, benchmark.name, benchmark.summary, [benchmark])
    _declare_benchmarks(choices, "all", "all of them, one after another", _BENCHMARKS)


def _declare_benchmarks(choices: Commands, name: str, summary: str, chosen: Sequence[Benchmark[Any]]) -> None:
    parser = choices.add_parser(name, help=summary, description=summary)
    parser.add_argument("--json", action="store_true", help="write figures as JSON")
    parser.add_argument(
        "--accelerator",
        choices=ACCELERATORS,
        help="of trainings; gpu needs a device per rank (default: cpu; with --first-run auto)",
    )
    for benchmark in chosen:
        benchmark.add_options(parser)
    parser.set_defaults(run=lambda args: _bench(chosen, args))


def _bench(chosen: Sequence[Benchmark[Any]], args: argparse.Namespace) -> int:
    machine = Machine.read()
    figures = _measure(chosen, args)
    if args.json:
        document = {name: [dataclasses.asdict(each) for each in group] for name, group in figures.items()}
        sys.stdout.write(
            json.dumps({"machine": dataclasses.asdict(machine), "accelerator": args.accelerator, **document}, indent=2)
            + "\n"
        )
        return 0
    console = Screen()
    console.print(f"{machine}; trainings on: {args.accelerator or 'cpu'}")
    for benchmark in chosen:
        console.print(benchmark.table(figures[benchmark.name]))
    return 0


def _measure(chosen: Sequence[Benchmark[Any]], args: argparse.Namespace) -> dict[str, list[Any]]:
    # No thread that refreshes, and standard streams as they are: a benchmark may fork.
    bar = Progress(
        console=Console(stderr=True), transient=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False
    )
    with bar:
        task = bar.add_task("")

        def show(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total, refresh=True)

        return {benchmark.name: benchmark.measure(args, show) for benchmark in chosen}


_COMMANDS: tuple[Callable[[Commands], None], ...] = (add_commands, add_doctor, add_placement, _declare_bench)


if __name__ == "__main__":  # where the package is on the path and not installed
    sys.exit(main())
