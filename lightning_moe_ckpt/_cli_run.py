"""Define `moe-ckpt run`: its options, most of them torchrun's, and their help. Imports nothing heavy, as `cli` says."""

from __future__ import annotations

import importlib
from typing import Any

import click

from lightning_moe_ckpt._units import read_duration


def option(flag: str, text: str, metavar: str | None = None, **more: Any) -> click.Option:
    """Return an option whose value is passed on under the name of its flag; a default is shown."""
    if "default" in more:
        more["show_default"] = True
    name = more.pop("name", flag.strip("-").replace("-", "_"))
    return click.Option([flag, name], help=text, metavar=metavar, **more)


def flag(flag: str, text: str, name: str | None = None) -> click.Option:
    """Return an option without a value."""
    return click.Option([flag, name or flag.strip("-").replace("-", "_")], help=text, is_flag=True)


def seconds(text: object) -> float:
    """Return the seconds that an option says, such as `300`, `5min` or `0:05:00`."""
    try:
        return read_duration(text).total_seconds()
    except ValueError as error:
        raise click.BadParameter(f"`{text}` {error}") from error


_RUN = """\
Start the ranks of a training on this node, and keep it running: only a rank that dies is replaced.

Takes torchrun's options and its place. The other ranks stay in their processes, if the script trains with MoEStrategy: they
resume from memory together with the new one. Under any other script, and whenever ranks do not come together again, all
are started anew, as torchrun does. A rank whose steps stop, or that is stopped, is ended and counts as dead.

Exit status: 0 all ranks have ended well, 1 given up, 2 wrong arguments, 128 + N ended by signal N."""

_SPARE_AT = """\
How far spares run ahead: until MoEStrategy asks for its rank, or, for scripts that read RANK earlier, until torch,
lightning and this package are imported."""
_RECOVER_TIMEOUT = "Longest time from a failure until training goes on; after it all ranks are started anew."
_HANG_TIMEOUT = (
    "Silence within a step that counts as a hang, or five times the longest step if that is longer. A rank between two steps, "
    "as when it validates or saves, is waited for as long as --recover-timeout."
)
_TORCHRUN = [
    option("--nproc-per-node", "Ranks of this node: a number, or auto, gpu, cpu (default: 1).", "N"),
    option("--nnodes", "Nodes, or MIN:MAX (default: 1).", "N"),
    flag("--standalone", "All ranks are on this node, which is the default."),
    option("--node-rank", "Rank of this node; for the static rendezvous.", "N"),
    option("--rdzv-endpoint", "Where nodes meet.", "HOST:PORT"),
    option("--rdzv-backend", "How they meet (default: static with --node-rank, else c10d).", "NAME"),
    option("--rdzv-id", "Name of the job.", "NAME"),
    option("--rdzv-conf", "More for the rendezvous.", "KEY=VALUE,..."),
    option("--master-addr", "Address of the first node; for the static rendezvous.", "HOST"),
    option("--master-port", "Port there.", "PORT"),
    option("--local-addr", "Address of this node, if its host name does not lead to it.", "HOST"),
    option("--max-restarts", "How often all ranks may be started anew (default: as --max-failures allows).", "N"),
    option("--log-dir", "Folder for files of what ranks write, and of their errors.", "PATH"),
    click.Option(
        ["-r", "--redirects"], help="What goes to files only: 1 stdout, 2 stderr, 3 both; by rank as in 0:1,1:2."
    ),
    click.Option(["-t", "--tee"], help="What goes to files and to the console, likewise."),
    option("--local-ranks-filter", "Ranks of this node that the console shows.", "N,..."),
    flag("--no-python", "SCRIPT is a program, not a file of Python."),
    option("--role", "Name of the ranks' role.", "NAME"),
    option("--numa-binding", "Bind ranks to cores near their GPU: node, socket, exclusive, core-complex.", "MODE"),
    option("--signals-to-handle", "Signals passed on to ranks (default: SIGTERM,SIGINT,SIGHUP,SIGQUIT).", "NAME,..."),
    option("--shutdown-timeout", "Seconds from a signal to SIGKILL (default: 30).", "SECONDS"),
]
_WATCHED, _PROGRAMS, _FILTERS = (
    "what happens to ranks is waited for, not asked for",
    "ranks are programs of their own",
    "take `--log-dir` with `--tee` or `--redirects`",
)
_NOT_TAKEN = {"--monitor-interval": _WATCHED, "--event-log-handler": _WATCHED, "--start-method": _PROGRAMS}
_NOT_TAKEN |= {"--run-path": _PROGRAMS, "--logs-specs": _FILTERS}
"""Options of torchrun, and why there is none; any other is simply unknown."""


def _refuse(_: click.Context, param: click.Parameter, value: object) -> None:
    if value is not None:
        flag = param.opts[0]
        raise click.UsageError(f"{flag} is torchrun's, and `moe-ckpt run` has none: {_NOT_TAKEN[flag]}. Leave it out.")


def _refused(flag: str) -> click.Option:
    more: dict[str, Any] = {"is_flag": True, "flag_value": "given"} if flag == "--run-path" else {}
    return click.Option([flag], hidden=True, expose_value=False, default=None, callback=_refuse, **more)


def _run(command: tuple[str, ...], **arguments: Any) -> int:
    commands = importlib.import_module("lightning_moe_ckpt.launch.commands")
    torchrun: list[str] = []
    for option in _TORCHRUN:
        value = arguments.pop(str(option.name))
        if value is True:
            torchrun.append(option.opts[-1])
        elif value not in (None, False):
            torchrun += [option.opts[-1], value]
    return int(commands.run(command, torchrun=torchrun, **arguments))


RUN = click.Command(
    "run",
    callback=_run,
    short_help="Start the ranks of a training, and replace those that die.",
    help=_RUN,
    # torchrun takes its options with underscores, too
    context_settings={"allow_interspersed_args": False, "token_normalize_func": lambda name: name.replace("_", "-")},
    params=[
        *_TORCHRUN,
        *map(_refused, _NOT_TAKEN),
        option("--spares", "Processes per node that wait to take the place of a rank.", "N", type=int, default=0),
        option("--spare-at", _SPARE_AT, type=click.Choice(["strategy", "imports"]), default="strategy"),
        option(
            "--max-failures",
            "More failures than these end the job; a number without 'per' counts them in all.",
            "RATE",
            default="10 per 1h",
        ),
        option("--recover-timeout", _RECOVER_TIMEOUT, "TIME", type=seconds, default="300s"),
        option("--hang-timeout", _HANG_TIMEOUT, "TIME", type=seconds, default="10s"),
        click.Option(["-m", "--module", "module"], help="SCRIPT is the name of a module.", is_flag=True),
        click.Argument(["command"], metavar="SCRIPT [ARGS]...", nargs=-1, required=True, type=click.UNPROCESSED),
    ],
)
