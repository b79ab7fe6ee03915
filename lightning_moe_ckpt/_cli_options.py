"""Define `moe-ckpt run`, whose options are mostly torchrun's, and the help of the other commands.

Imports nothing heavy, as `cli` says.
"""

from __future__ import annotations

import importlib
import json
from datetime import timedelta
from typing import Any

import click

from lightning_moe_ckpt._units import read_duration, read_size

LS = """\
List what is stored under URL, newest first, and say of each generation whether a restart would try it.

Reads names, the log and manifests, no segments: `verify` reads those. KIND is dense if one step holds everything,
sparse if a window of steps adds up to it, partial if it references experts from older ones; NEEDS says from which. Works
while the run goes on, and writes nothing.

Exit status: 0 listed, 2 there is no run or it could not be read."""

INSPECT = """\
Show one generation: how it was planned, which operator was captured at which step, and which rank wrote what.

Reads the markers of all ranks, no segments. What a partial generation takes from older ones is shown with its step. Sizes
are without padding; `compute` is what forward and backward of replayed steps need of an operator whose full state comes
later in the window.

Exit status: 0 shown, 2 there is no such generation or its markers could not be read."""

VERIFY = """\
Read every byte of committed generations, and the log, and compare all digests.

Without --step and --all: each generation that a restart would try, and what it references. Files stream past, so memory
does not depend on their size.

Exit status: 0 all good, 1 something is damaged or there is nothing to restore, 2 could not be read."""

DIFF = """\
Compare two stored states bit by bit: weights, optimizer state and buffers, by operator. @STEP chooses a generation. Without any
step, the newest of which both URLs have one is compared.

Tensors of all ranks are put together, so runs on other ranks, in other layouts or under other policies can be compared. Records whose
digests agree are equal, and only others are read. Operators of a sparse or partial generation are compared where both are equally
many steps old; others are named.

Of two runs that differ it is then shown where they part: the row of generations that both keep is halved until one is equal and
the next differs, and between these two, records and losses of steps within windows tell the first that differs.

Exit status: 0 equal in all that could be compared, 1 different, 2 not compared."""

EXPORT = """\
Write a generation as files that other programs read; experts of all ranks are put together. Those that a partial
generation references are as old as they are; the file says which.

\b
OUT decides what is written:
  *.safetensors   parameters and buffers by name
  *.ckpt          what Lightning would have saved, for load_from_checkpoint
                  and Trainer.fit(ckpt_path=...); it passes
                  torch.load(weights_only=True), and what does not is left
                  out and named
  a folder        for from_pretrained of transformers: config.json and
                  weights of the Hugging Face model in the module
  --format dcp    a folder that ModelParallelStrategy loads, as
                  Trainer.fit(ckpt_path=...): torch Distributed Checkpoint
                  and meta.pt; written tensor by tensor

Names are those of the module's state_dict: with tied weights, without buffers that are not persistent. Buffers are
those of rank 0. No format has what an exact restart needs; a run itself resumes from URL. A sparse generation is several
steps in one and cannot be exported, since only replay in training makes them one: the message names the nearest dense one.
SparseCheckpoint(dense_every_n_steps=...) leaves one now and then, each run where it ends, and `densify` makes the newest one.

Exit status: 0 written, 2 not written."""

PLAN = """\
Choose how a run takes checkpoints, from a profile (`moe-ckpt profile URL`, or by hand) and a rate of failures: policy, window, steps
between generations, copies, storage, spares, and what is expected of them, with the two next best ways beside it. --policy and
--replicas then limit the choice.

Without a profile: show the shared memory that a described run will take on each node, planned and laid out as in the run. The model is
a config.json of Hugging Face, or numbers; assumed are AdamW and 96 KiB of journal per step.

Exit status: 0 shown, 2 there can be no such run, or no checkpoint can help it."""

DENSIFY = """\
Make the newest generation dense: resume the run in its own SCRIPT, replay until every part is of one step, store that, and
end. Any number of ranks resumes from the result for bits, and `export` reads it.

SCRIPT is started with as many processes as wrote the generation, all on this machine, by gloo on its CPUs unless it has a GPU for
each. The Trainer gets devices and num_nodes to match; values that SCRIPT gives it itself, and its strategy, have to be those of the
run: say so by ARGS. Several processes have a thread each unless OMP_NUM_THREADS says another number. Replays on other
hardware than that of the run are right to rounding, not to bits.

This is a start of the run like any other: earlier ones that still live stop. It is refused while the run seems to train.

Exit status: 0 dense, or it was already, 2 not, 128 + N ended by signal N."""

REPLAY = """\
Run step N of a run again, up to step M: restore the newest generation at or before N, train to N, and compare every loss on
the way with the run's journals. Where the run resumes for bits, so is this.

COMMAND starts the run's own training, such as `torchrun --nproc-per-node 8 train.py`, or train.py alone. In its processes nothing
is written: to URL, to files of loggers, to .ckpt files, to shared memory. So the run may train meanwhile. They end with
step M.

--dump writes a file per step, rank and part to --out, safetensors by name: what came into the step, outputs of modules, gradients
before clipping. --hook may register hooks, or return a context manager, such as torch.autograd.detect_anomaly(), for
the rest of the batch.

Exit status: 0 done, 1 done, with other losses than the run's, 2 not done."""

AUDIT = """\
Run the steps between two kept generations again, elsewhere or at another time, and compare every bit: the losses that the run's journals
have, and the state at the second generation. This finds what a faulty device has computed wrong in any of these steps, and what storage
or memory has changed since.

COMMAND starts the run's own training, as for `replay`, on this machine. It restores the first of the two. Nothing is written to URL.

What differs first is said. Then the steps are run a second time: if that differs from the first time too, this machine does not
repeat itself, by nondeterministic kernels or a fault of its own, and there is no verdict.

Exit status: 0 the same bits, 1 other bits than the run's, 2 no verdict."""

IMPORT = """\
Begin a run at URL from a checkpoint of another tool. It becomes a dense generation, from which any number of ranks goes on,
in any layout.

\b
SRC decides what is read:
  a .ckpt                        of Lightning, or a state_dict
  a folder with .metadata        torch Distributed Checkpoint; torch reads it
                                 with pickle, so import only what you trust
  a folder, model*.safetensors   Hugging Face; weights only

The optimizer's state comes along if it is there, and if names of its parameters are: a .ckpt numbers them, and nothing is imported
if several fit. Lightning restores loops, schedulers and callbacks as from its own file, without random state and place in the data.

Exit status: 0 imported, 2 not imported: URL has checkpoints, or SRC cannot be read."""

GC = """\
Delete what no restart would use any more, and say why; with --dry-run only say it.

Without --keep-...: what the run itself has given up but not deleted, because it was killed or its storage failed. These are
generations older than those it keeps, those of a start that a later one replaced, those that a start which is over never
committed, and those of an earlier run at this URL once the newer one has as many as it keeps; and what their interrupted writes
and uploads left.

With --keep-...: first gives up all that none of these rules keeps; the newest always stays. What a generation
that stays refers to stays with it; if the newest references, the last two are kept, since a save may refer to both,
and with them the copy before the newest one of each operator that is taken in turns.

Manifests and sizes say what is whole. With --verify, which reads every byte of as many of the newest as --keep-last says
(2 without it), a damaged one does not count, and the next older one is kept in its place.

Works while a job uses URL, which takes note and goes on; a job that starts meanwhile picks again.

Exit status: 0 done, 2 there is no run or something could not be read or deleted; the next gc goes on there."""

TOP = """\
Show how far a run is, again and again until Ctrl-C: its newest step in every tier and of every rank, how far storage is
behind, steps and bytes per second, starts, goodput and what takes the rest of the time, and when it will be done.

Reads what the run writes anyway: its log, names in storage, and names in shared memory of this node. Nothing is asked of
the job, and nothing is written. Rates and ETA are as of the newest entry of the log, which the run adds when it gives up
older generations; a start that was killed may have come further than its last entry says. Goodput is the share of the wall
time, from the first process to that entry, that steps that count would have taken without checkpoints and failures; behind
it are the parts that the rest went to. Memory of other nodes is not seen: run the command there.

Exit status: 0 shown, 2 there is no run or it could not be read."""

REPORT = """\
Write one HTML page about a run: its steps over time, how far storage was behind, speed, goodput by its parts, every start, and what
is stored. The page needs no other file, so that it can be sent and kept.

OUT is report.html if it is not given. The figures are those of `top`: the newest thousand entries of the log, names in
storage, and memory of this node. Works while the run goes on, and changes nothing there.

Exit status: 0 written, 2 there is no run, or the page could not be written."""

PROFILE = """\
Write a profile of a run, from which `simulate` and `plan` compute: what steps, checkpoints and restarts cost there, as the
run has measured it, and the model's sizes.

OUT is profile.yaml if it is not given. The figures are those of the log's newest thousand entries, and of the newest generation.
Restarts are known once there was one: kill the run, and let it come back. A number that no start has measured is left out, and
named with the reason: `--set costs.repair=10min` gives it, and replaces one that was measured. Nothing is made up.

Exit status: 0 written, 2 there is no run, or a number is missing that a profile must have."""

REPAIR = """\
Rebuild the log of URL, of which `_log/` is gone or cannot be read, from the manifests of committed generations.

Without --yes it only shows which generations a restart would then try. What is shown as left out is not deleted. Each
generation names the line of starts that led to it; of several lines, that of the start which began last counts. A
manifest that cannot be read is made again where the markers of all ranks are good. What is in shared memory of the nodes is not
found any more, since its names were derived from the log that is lost. Stop the job first.

Exit status: 0 shown or written, 2 there is a log that can be read, or nothing to make one from."""

DOCTOR = """\
Without URL: show which compiled parts are in use, why others are not, and what limits copies on this machine. Exit status: 0
whatever was found, since everything runs without compiled parts, only slower.

With URL: try there what checkpoints rely on (listings, exclusive creates and races of them, large and half-written
objects, leftovers), and say whether they are safe. Objects are written under URL/_doctor/ and removed again, also when
interrupted; a run that is stored there is not touched. Exit status: 0 fenced, that is safe whatever happens; 1 unfenced
or unsafe, and the last line says which and what that means; 2 nothing can be written there.

With --cluster every rank of a job runs it before the training, under torchrun, srun or `moe-ckpt run`. Rank 0 shows a row per node, and
names what is bad: clocks, versions, limits, memory, network, storage at URL. Exit status of all ranks: 0 good, 1 bad, 2 no answer."""

SHM = """\
List what runs have in shared memory of this node (/dev/shm/moe-ckpt-*): run, rank, newest
step, size, age, which process holds it and which user owns it. With URL only memory of the run there.

This is no garbage: a rank that is started again resumes from it, often from a newer step than storage has. URL --clear
removes what that run has left, if it will not go on. --clear without URL removes what every run has left, also those that wait to be
requeued. Neither removes what a process holds or another user owns.

Exit status: 0 listed or cleared, 2 something could not be removed."""

FLUSH = """\
Store the newest whole generation in this node's shared memory, of a run that has ended and may not start again here. Any launcher
may have started it. With several nodes do it on each, at once or one after another: every node brings its ranks, and
those whose copies it keeps, and the last one makes the generation visible.

If a process of the run lives on this node, nothing is flushed. A run that starts again meanwhile wins. Every byte is
compared with its digest. Memory stays as it was. Parts that are in storage already are not written again.

Exit status: 0 stored, or storage has all of it, 1 a newer one is not whole, as other ranks' parts are missing or bad, 2 not done."""

PLACEMENT = """\
Show who keeps copies of whose state on a cluster of NODES, and the probability that memory still holds every rank's
newest generation after nodes, or racks, are lost at once.

A run on such a cluster places its copies the same way. Ranks are numbered node by node, nodes rack by rack.

Exit status: 0 shown, 2 there can be no such placement."""

SIMULATE = """\
Simulate a run under failures, from the times and sizes in PROFILE, a YAML of `moe-ckpt profile` or written by hand.

Every system's goodput is the part of the wall time that steps which count would take without checkpoints; the other columns are what the
rest went to, and beside the simulation is the closed form, unless there is a trace. The papers' systems have the papers' settings.

Exit status: 0 shown, 2 something in PROFILE is missing or cannot work."""
SYSTEM = (
    "none, checkfreq, gemini, moc, tiercheck, moevement-global, moevement, ours-dense, ours-differential, ours-partial, "
    "ours-sparse or ours-localized, with settings as in ours-sparse:window=4,replicas=2; repeat for several (default: all)."
)

_SHORTEST = timedelta(seconds=0.1)
_EXTRA_OF = {"rich": "tools", "matplotlib": "plots", "jsonargparse": "cli", "botocore": "s3"}
"""Names of the extras in pyproject.toml, by package."""


def option(flag: str, text: str, metavar: str | None = None, **more: Any) -> click.Option:
    """Return an option whose value is passed on under the name of its flag; a default is shown."""
    if "default" in more:
        more["show_default"] = True
    name = more.pop("name", flag.strip("-").replace("-", "_"))
    return click.Option([flag, name], help=text, metavar=metavar, **more)


def flag(flag: str, text: str, name: str | None = None) -> click.Option:
    """Return an option without a value."""
    return click.Option([flag, name or flag.strip("-").replace("-", "_")], help=text, is_flag=True)


def pair_of(text: str) -> tuple[str, str]:
    """Return the two words in `KEY=VALUE`."""
    key, equals, value = text.partition("=")
    if not (key and equals and value):
        raise click.BadParameter(f"`{text}` must be two words joined by =")
    return key, value


def setting_of(text: str) -> tuple[str, object]:
    """Return a key, and a value from JSON or else text."""
    key, value = pair_of(text)
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value


def place_of(text: str) -> tuple[str, int | None]:
    """Return the URL and the step in `URL[@STEP]`."""
    url, at, step = str(text).rpartition("@")
    return (url, int(step)) if at and step.isdigit() else (str(text), None)


def parts_of(text: str) -> tuple[str, ...]:
    """Return the parts to dump."""
    parts = tuple(filter(None, str(text).split(",")))
    if unknown := [part for part in parts if part not in ("gradients", "activations", "batch")]:
        raise click.BadParameter(f"`{unknown[0]}` is none of gradients, activations, batch")
    return parts


def size_of(text: object) -> int:
    """Return bytes from a number with or without a unit."""
    try:
        return read_size(int(text) if isinstance(text, str) and text.isdigit() else text)
    except ValueError as error:
        raise click.BadParameter(f"`{text}` {error}") from error


def time_of(text: object) -> timedelta:
    """Return a time from seconds with or without a unit."""
    if (found := timedelta(seconds=seconds(text))) < _SHORTEST:
        raise click.BadParameter(f"`{text}` must be 0.1 s or more")
    return found


def count_of(text: object) -> int:
    """Return a number of 1 or more."""
    if not str(text).isdigit() or int(str(text)) < 1:
        raise click.BadParameter(f"`{text}` must be a number of 1 or more")
    return int(str(text))


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
_NODE_TIMEOUT = "With --nnodes MIN:MAX, time for which nodes wait for another one before they go on without it."
_GROW_EVERY = "With --nnodes MIN:MAX, least time from a start of all ranks to the next one that lets nodes in."
_FLUSH_TIMEOUT = (
    "Time to store what is left in this node's memory if the job fails or is ended, as `flush` does; 0 for not at all."
)
_TORCHRUN = [
    option("--nproc-per-node", "Ranks of this node: a number, or auto, gpu, cpu (default: 1).", "N"),
    option("--nnodes", "Nodes, or MIN:MAX, of which some may be lost (default: 1).", "N"),
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
_WATCHED = "what happens to ranks is waited for, not asked for"
_PROGRAMS = "ranks are programs of their own"
_FILTERS = "take `--log-dir` with `--tee` or `--redirects`"
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
    commands = importlib.import_module("lightning_moe_ckpt.launch.run_command")
    torchrun: list[str] = []
    for option in _TORCHRUN:
        if (value := arguments.pop(str(option.name))) is True:
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
        option("--node-timeout", _NODE_TIMEOUT, "TIME", type=seconds, default="60s"),
        option("--grow-every", _GROW_EVERY, "TIME", type=seconds, default="300s"),
        option("--flush-timeout", _FLUSH_TIMEOUT, "TIME", type=seconds, default="10min"),
        click.Option(["-m", "--module", "module"], help="SCRIPT is the name of a module.", is_flag=True),
        click.Argument(["command"], metavar="SCRIPT [ARGS]...", nargs=-1, required=True, type=click.UNPROCESSED),
    ],
)


def remedy(error: ModuleNotFoundError) -> str | None:
    """Return the remedy for a failed import, a sentence with the extra to install; `None` if no extra brings the module."""
    package = (error.name or "").partition(".")[0]
    if (extra := _EXTRA_OF.get(package)) is None:
        return None
    return f"This needs {package}, which is not installed: python -m pip install {package}, or the extra `{extra}` of this package."
