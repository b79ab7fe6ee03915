"""The subcommands of `moe-ckpt` on stored runs, places and clusters.

Each subcommand is a function of its arguments, which `lightning_moe_ckpt.cli` declares, and returns the exit status. With
`--json` standard output has one JSON document in any case, of an error `{"error": ...}`; without it tables.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import json
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import click
import torch
from click.core import ParameterSource
from rich.console import Console, RenderableType
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Table
from rich.text import Text

from lightning_moe_ckpt import policies
from lightning_moe_ckpt._units import rate_text, size_text
from lightning_moe_ckpt.errors import CheckpointError, ConfigurationError, NoUsableGeneration
from lightning_moe_ckpt.inspection import _shared_memory
from lightning_moe_ckpt.inspection._answers import (
    Answer,
    Screen,
    describe,
    gc_document,
    gc_tables,
    generation_rows,
    inspect_tables,
    kind_of,
    ls_tables,
    plain_table,
    repair_document,
    repair_tables,
    select,
)
from lightning_moe_ckpt.inspection._cluster import examine_cluster
from lightning_moe_ckpt.inspection._conformance import Check, examine_url
from lightning_moe_ckpt.inspection._diff import diff as compare
from lightning_moe_ckpt.inspection._export import ExportOptions
from lightning_moe_ckpt.inspection._export import export as write_files
from lightning_moe_ckpt.inspection._import import import_run
from lightning_moe_ckpt.inspection._progress_views import follow, progress_now, write_page
from lightning_moe_ckpt.inspection._replays import audit_window, rerun
from lightning_moe_ckpt.inspection._run_profile import write_profile
from lightning_moe_ckpt.inspection._run_progress import Follower
from lightning_moe_ckpt.inspection._simulations import planned, simulation_answer
from lightning_moe_ckpt.inspection._verify import Verdict
from lightning_moe_ckpt.inspection._verify import verify as read_everything
from lightning_moe_ckpt.launch import DENSIFY
from lightning_moe_ckpt.native import Examined, examine
from lightning_moe_ckpt.planning._forecast import forecast_run, placed_copies
from lightning_moe_ckpt.storage import (
    Backend,
    Commit,
    GenerationId,
    Retention,
    RunView,
    collect_garbage,
    open_backend,
    repair_log,
)
from lightning_moe_ckpt.storage._open import memory_tag
from lightning_moe_ckpt.tiers import ReplicaPlacement, Survival, percent, survival_probability

_STYLES = {
    "good": "green", "slower": "yellow", "absent": "dim", "weaker": "yellow", "broken": "red", "unknown": "dim",
}  # fmt: skip
_PROSE = 52
"""Widest column of sentences, also in a pipe: the table then takes 80 columns."""
_KILLED = 128
"""Exit statuses above it are of a signal."""
_PATIENCE = timedelta(seconds=5)
"""How long a store that does not answer is tried: somebody sits and waits."""


def _show(answer: Answer, *, as_json: bool) -> int:
    """Write the answer to standard output; returns its exit status."""
    if as_json:
        sys.stdout.write(json.dumps(answer.document, indent=2) + "\n")
        return answer.status
    screen = Screen()
    for table in answer.tables():
        screen.print(table)
    return answer.status


def _fail(where: str, error: CheckpointError, facts: Mapping[str, str], *, as_json: bool) -> int:
    """Write in a line why the command could not do its work, and return its exit status."""
    reason = " ".join(str(error).split())
    place = "" if where and (where in reason or "://" in reason) else f" {where}"
    sys.stderr.write(f"moe-ckpt{place}: {reason}\n")
    if as_json:
        document = {**facts, "error": {"type": type(error).__name__, "message": reason}}
        sys.stdout.write(json.dumps(document, indent=2) + "\n")
    return 2


def _of_run(look: Callable[..., Answer], patience: timedelta = _PATIENCE) -> Callable[..., int]:
    """Make a command on the run at a URL, whose store is tried for as long as `patience`, or on a described run."""

    @functools.wraps(look)
    def command(
        *, url: str = "", as_json: bool = False, storage_option: Sequence[tuple[str, object]] = (), **arguments: Any
    ) -> int:
        try:
            if not url:
                return _show(look(**arguments), as_json=as_json)
            opened = open_backend(url, storage_options=dict(storage_option), patience=patience)
            with contextlib.closing(opened) as backend:
                return _show(look(backend, **arguments), as_json=as_json)
        except CheckpointError as error:
            return _fail(url or look.__name__, error, {"url": url} if url else {}, as_json=as_json)

    return command


@_of_run
def ls(backend: Backend) -> Answer:
    """List generations."""
    view = RunView.open(backend)
    rows = generation_rows(view)
    document = {"url": view.url, "run_id": view.run_id, "generations": rows}
    return Answer(document, lambda: ls_tables(view, rows))


@_of_run
def inspect(backend: Backend, *, step: int | None) -> Answer:
    """Show one generation."""
    view = RunView.open(backend)
    document = describe(view, select(view, step))
    return Answer(document, lambda: inspect_tables(document))


@_of_run
def verify(backend: Backend, *, step: int | None, everything: bool) -> Answer:
    """Read every byte."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn())
    total = sum(generation.nbytes for generation in RunView.open(backend).generations() if generation.committed)
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("reading", total=total)
        show = functools.partial(bar.advance, task)
        verdict = read_everything(backend, step=step, everything=everything, show=show)
    document = dataclasses.asdict(verdict) | {
        "sound": verdict.sound,
        "nbytes_per_second": round(verdict.nbytes_per_second),
    }
    return Answer(document, lambda: _verdict_lines(verdict), status=0 if verdict.sound else 1)


def _verdict_lines(verdict: Verdict) -> list[RenderableType]:
    lines = [f"damaged: {problem.generation or 'log'}: {problem.reason}" for problem in verdict.problems]
    if not verdict.generations:
        lines.append("nothing that could be restored was found")
    count, speed = len(verdict.generations), rate_text(verdict.nbytes_per_second)
    lines.append(f"{count} generations read: {', '.join(verdict.generations) or 'none'}; others: {verdict.skipped}")
    lines.append(f"{verdict.num_files} files, {size_text(verdict.nbytes)} in {verdict.seconds:.2f} s: {speed}")
    if verdict.num_single:
        lines.append(f"operators with one good copy only, of those taken in turns: {verdict.num_single}")
    lines.append("good" if verdict.sound else "NOT GOOD")
    return list(lines)


def diff(*, a: tuple[str, int | None], b: tuple[str, int | None], **options: Any) -> int:
    """Compare two states."""

    def look(backend: Backend) -> Answer:
        stored = dict(options.get("storage_option", ()))
        with contextlib.closing(open_backend(b[0], storage_options=stored, patience=_PATIENCE)) as other:
            return compare([(backend, a[1]), (other, b[1])])

    return _of_run(look)(url=a[0], **options)


@_of_run
def export(backend: Backend, *, out: Path, step: int | None, tie: Sequence[tuple[str, str]], **options: Any) -> Answer:
    """Write files that other programs read."""
    done = write_files(backend, out, ExportOptions(ties=dict(tie), **options), step=step)
    lines = [f"{path}: {size_text(nbytes)}" for path, nbytes in done.files.items()]
    of = f"step {done.step} (incarnation {done.incarnation}) as {done.format}"
    lines += [f"{of}, {done.num_tensors} parameters and buffers", *(f"note: {note}" for note in done.notes)]
    return Answer(dataclasses.asdict(done), lambda: lines)


@_of_run
def densify(backend: Backend, *, command: Sequence[str], module: bool, force: bool) -> Answer:
    """Replay the newest generation in the user's training, with as many processes as wrote it, and store it dense."""
    view = RunView.open(backend)
    now, commit = Follower(view).look(), select(view, None).commit
    assert commit is not None, "`select` chooses among those with a manifest"
    assert view.history is not None, "and without a log it refuses"
    step, ranks = commit.generation.step, commit.world_size
    if kind_of(commit) != "sparse" and all(place.step <= step for place in now.places if place.tier == "host"):
        return Answer({}, lambda: [f"nothing to do: generation step {step} of run {view.run_id} is {kind_of(commit)}"])
    if now.state == "training" and not force:
        raise ConfigurationError(
            f"Run {view.run_id} seems to train still: its last change is {now.silent_seconds or 0:.0f} s old, or a process of this "
            "node holds its memory. This start would end it, as every later start does. Stop it, or, if it has ended, wait "
            "for a minute; --force starts nevertheless."
        )
    tag = memory_tag(view.history.key, view.url)
    os.environ |= {DENSIFY: tag, "PL_TRAINER_DEVICES": str(ranks), "PL_TRAINER_NUM_NODES": "1"}
    if torch.cuda.device_count() < ranks:
        os.environ |= {"CUDA_VISIBLE_DEVICES": "", "PL_TRAINER_ACCELERATOR": "cpu"}
    launcher = importlib.import_module("lightning_moe_ckpt.launch.run_command")
    place = ["--standalone", "--nnodes", "1", "--nproc-per-node", str(ranks)]
    status = launcher.run(command, torchrun=place, module=module, max_failures="0", flush_timeout=0.0)
    if status > _KILLED:
        return Answer({}, list, status)
    made = select(RunView.open(backend), None).commit
    if status or made is None or kind_of(made) == "sparse" or made.generation <= commit.generation:
        raise CheckpointError(_not_dense(status, commit))
    replayed = f", {len(commit.steps) - 1} steps replayed" if made.generation.step == step else ""
    said = f"densified: generation step {made.generation.step} of run {view.run_id}; {ranks} processes{replayed}"
    return Answer({}, lambda: [said])


def _not_dense(status: int, commit: Commit) -> str:
    """Return why the script has left no dense generation, as far as its exit status and the stored topology tell."""
    policy, ranks = commit.policy, commit.world_size
    layout = [f"{key}={policy[key]}" for key in ("expert_parallel", "pipeline_parallel") if policy.get(key, 1) != 1]
    layout += [str(policy[key]) for key in ("sharding",) if key in policy]
    why = f"ended with status {status}, as its output says" if status else "ended, and its fit has resumed nothing here"
    return (
        f"SCRIPT {why}. It has to train as the run did until step {commit.generation.step}, with a checkpoint callback at this URL: "
        f"{', '.join([f'{ranks} processes', *layout])}. A Trainer without values of its own gets devices={ranks}, num_nodes=1 and, "
        "without a GPU for each, accelerator='cpu'; where it has others, give SCRIPT arguments that change them."
    )


@contextlib.contextmanager
def _interrupted_by_sigterm() -> Iterator[None]:
    """Let SIGTERM, as of a scheduler, unwind the stack, so that partial files are removed."""

    def interrupt(*_: object) -> NoReturn:
        raise SystemExit(128 + signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


replay = _of_run(_interrupted_by_sigterm()(rerun))
audit = _of_run(_interrupted_by_sigterm()(audit_window))


@_of_run
def import_(backend: Backend, *, src: Path, **options: Any) -> Answer:
    """Begin a run from a checkpoint of another tool."""
    done = import_run(backend, src, **options)
    size = f"{done['tensors']} parameters and buffers, {size_text(done['nbytes'])} in {done['parts']} parts"
    said = f"{done['source']} as step {done['step']} (incarnation {done['incarnation']}): {size}"
    return Answer(done, lambda: [said, *(f"note: {note}" for note in done["notes"])])


@_of_run
def gc(
    backend: Backend,
    *,
    keep_last: int | None,
    keep_every: int | None,
    keep_days: float | None,
    keep_dense: int | None,
    verify_first: bool,
    dry_run: bool,
) -> Answer:
    """Delete generations that no rule keeps; without rules, the generations that the run itself has given up."""
    retention = None
    if (keep_last, keep_every, keep_days, keep_dense) != (None,) * 4:
        last = Retention().last if keep_last is None else keep_last
        retention = Retention(last=last, every_n_steps=keep_every, days=keep_days, dense=keep_dense or 0)
    elif verify_first:
        raise ConfigurationError(
            "--verify reads what is to be kept before others are given up, and without --keep-... none are. "
            "Add --keep-last=2, or use `moe-ckpt verify`."
        )
    check = functools.partial(_what_is_wrong, backend) if verify_first else None
    found = collect_garbage(backend, retention, dry_run=dry_run, check=check)
    return Answer(gc_document(found), lambda: gc_tables(found))


def _what_is_wrong(backend: Backend, generation: GenerationId) -> str | None:
    """Return the defect of a generation's files, own or referenced; `None` if all are good."""
    problems = read_everything(backend, step=generation.step).problems
    return next((problem.reason for problem in problems if problem.generation == str(generation)), None)


@_of_run
def repair(backend: Backend, *, write: bool) -> Answer:
    """Rebuild a lost log."""
    found = repair_log(backend, dry_run=not write)
    return Answer(repair_document(found), lambda: repair_tables(found))


@_of_run
def _top(backend: Backend, *, once: bool, every: timedelta) -> Answer:
    view = RunView.open(backend)
    return progress_now(view) if once else Answer({}, list, follow(view, every.total_seconds()))


def top(*, once: bool, as_json: bool, **others: Any) -> int:
    """Show how a run is, until it is interrupted; once where nobody looks."""
    return _top(once=once or as_json or not sys.stdout.isatty(), as_json=as_json, **others)


@_of_run
def report(backend: Backend, *, out: Path, force: bool) -> Answer:
    """Write a page about the run."""
    return write_page(RunView.open(backend), out, force=force)


@_of_run
def profile(backend: Backend, *, out: Path, given: Sequence[tuple[str, object]], force: bool) -> Answer:
    """Write what the run has measured, for simulations and plans."""
    return write_profile(RunView.open(backend), out, given, force=force)


def doctor(*, url: str | None, as_json: bool, storage_option: Sequence[tuple[str, object]], **job: Any) -> int:
    """Show the compiled parts in use, whether checkpoints are safe at a URL, or the nodes of this rank's job."""
    place, options, cluster = {"url": url} if url else {}, dict(storage_option), job.pop("cluster")
    try:
        if cluster:
            as_json &= os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0"
            opens = functools.partial(open_backend, url or "", storage_options=options, patience=job["wait"] / 2)
            answer = examine_cluster(opens if url else None, job["plan"], job["wait"].total_seconds())
            return _show(answer, as_json=as_json)
        if job["plan"] is not None:
            raise ConfigurationError("`--plan` is compared with the nodes of a job: add `--cluster`, or leave it out.")
        if url is None:
            findings = examine()
            rows = {"findings": [dataclasses.asdict(finding) for finding in findings]}
            return _show(Answer(rows, lambda: [_states(findings)]), as_json=as_json)
        with _interrupted_by_sigterm():
            found = examine_url(url, storage_options=options, progress=_show_progress)
    except CheckpointError as error:
        return _fail("doctor --cluster" if cluster else url or "doctor", error, place, as_json=as_json)
    document: dict[str, Any] = {**dataclasses.asdict(found), "verdict": found.verdict, "meaning": found.meaning}
    status = 0 if found.verdict == "fenced" else 1
    return _show(Answer(document, lambda: [_states(found.checks), found.meaning], status), as_json=as_json)


def _show_progress(check: str) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\033[Ktrying: {check}\r")
        sys.stderr.flush()


def shm(
    *, url: str | None, as_json: bool, storage_option: Sequence[tuple[str, object]], clear: bool, **options: bool
) -> int:
    """List the files that runs have in this node's shared memory, and clear files that nobody holds."""
    try:
        tag = None if url is None else _tag_of(url, dict(storage_option))
        return _show(_shared_memory.answer(tag=tag, clear=clear or options["force"], **options), as_json=as_json)
    except CheckpointError as error:
        return _fail(url or "shm", error, {}, as_json=as_json)


@functools.partial(_of_run, patience=timedelta(minutes=2))
def flush(backend: Backend, *, wait: timedelta) -> Answer:
    """Store generations in this node's memory of ended processes."""
    return _shared_memory.Flush(backend, wait=wait, say=lambda text: sys.stderr.write(f"moe-ckpt: {text}\n")).answer()


def _tag_of(url: str, storage_options: Mapping[str, object]) -> str:
    """Return the part that names of a run's shared memory have in common."""
    with contextlib.closing(open_backend(url, storage_options=storage_options, patience=_PATIENCE)) as backend:
        history = RunView.open(backend).history
        if history is None:
            raise NoUsableGeneration(f"{backend.url}: its log cannot be read, and names of its memory follow from it.")
        return memory_tag(history.key, backend.url)


def _states(found: Sequence[Check | Examined]) -> Table:
    """Return a table of findings; only findings on this machine come with advice."""
    table = plain_table("what", "state", "found", wraps="found")
    table.columns[-1].max_width = _PROSE
    for each in found:
        advice = f"\nto do: {each.advice}" if isinstance(each, Examined) and each.advice else ""
        table.add_row(each.name, Text(each.state, _STYLES[each.state]), each.found + advice)
    return table


@_of_run
def placement(*, nodes: int, ranks_per_node: int, replicas: int, most: int, **cluster: int) -> Answer:
    """Show every rank's holders on a cluster, and the chance to survive up to `most` losses at once.

    Chances and memory are also shown with one and two copies, as far as there are nodes.
    """
    wanted = {replicas, *range(1, min(nodes, 3))}
    placed = {
        each: placed_copies(nodes=nodes, ranks_per_node=ranks_per_node, replicas=each, **cluster)
        for each in sorted(wanted)
    }
    survivals = {each: _survivals(found, most) for each, (found, _) in placed.items()}
    several = {
        each: {"replicas": each, **_facts(*placed[each]), "survival": list(map(dataclasses.asdict, found))}
        for each, found in survivals.items()
    }
    facts = several[replicas]
    document = {**facts, "holders": placed[replicas][0].holders, "copies": list(several.values())}
    heading = f"{_copies(replicas)} of each rank's state, on {nodes} nodes of {ranks_per_node} ranks"
    closing = (
        f"{facts['within_data_parallel']:.0%} of all copies stay within their data-parallel group, "
        f"{facts['leaves_rack']:.0%} of all ranks have one in another rack.\n"
        f"The fullest rank keeps {facts['most_held']} copies, the emptiest {facts['least_held']}."
    )
    memory = {each: found["generations"] for each, found in several.items()}
    return Answer(document, lambda: [heading, _table(survivals, memory), closing])


_CHOICES = ("mtbf", "scope", "allow_loss", "host_nbytes", "as_yaml", "at")
"""Options of `plan` that go with a profile."""


@_of_run
def plan(*, profile: Path | None, policy: str, ranks_per_node: int, **given: Any) -> Answer:
    """Choose for a profile; else forecast the memory for a described run, on the rank with most copies."""
    limits, written = {name: given.pop(name) for name in _CHOICES}, _written()
    if profile is not None:
        if wrong := [name for name in written if name not in {*_CHOICES, "profile", "policy", "replicas", "as_json"}]:
            named = f"--{wrong[0].replace('_', '-')}"
            raise ConfigurationError(
                f"`{named}`: with `--profile` it is what the profile says. Change it there, or leave `{named}` out."
            )
        limits |= {"policies": [policy]} if "policy" in written else {}
        replicas = given["replicas"] if "replicas" in written else None
        return planned(profile, url=limits.pop("at"), replicas=replicas, **limits)
    if wrong := [name for name in _CHOICES if name in written]:
        named = {"host_nbytes": "host-memory", "as_yaml": "yaml", "at": "url"}.get(wrong[0], wrong[0].replace("_", "-"))
        raise ConfigurationError(
            f"`--{named}` is for a choice, which depends on what was measured: add `--profile FILE`, of `moe-ckpt profile`."
        )
    precision, redundancy, budget = (given.pop(name) for name in ("precision", "redundancy", "budget"))
    kind = getattr(policies, f"{policy.title()}Policy")
    if budget is not None:
        given |= {"window": None, "budget_nbytes": budget, "local_budget": budget, "remote_budget": budget}
    settings = {field.name: given[field.name] for field in dataclasses.fields(kind) if field.name in given}
    found = forecast_run(kind(**settings), given | {"ranks_per_node": ranks_per_node}, precision, redundancy=redundancy)
    return _shared_memory.forecast_answer(found, ranks_per_node)


@_of_run
def simulate(**options: Any) -> Answer:
    """Simulate a described run under several systems."""
    return simulation_answer(**options)


def _written() -> list[str]:
    """Return the names of the options that stand in the command line."""
    context = click.get_current_context()
    return [name for name in context.params if context.get_parameter_source(name) is ParameterSource.COMMANDLINE]


def _survivals(placement: ReplicaPlacement, most: int) -> list[Survival]:
    found = [survival_probability(placement, k) for k in range(1, min(most, placement.num_nodes) + 1)]
    if placement.num_racks > 1:
        racks = range(1, min(most, placement.num_racks) + 1)
        found += [survival_probability(placement, k, level="rack") for k in racks]
    return found


def _facts(placement: ReplicaPlacement, groups: Sequence[Sequence[int]]) -> dict[str, Any]:
    group_of = {rank: index for index, group in enumerate(groups) for rank in group}
    pairs = [(owner, holder) for owner, holders in enumerate(placement.holders) for holder in holders]
    ranks = range(len(placement.domains))
    held = Counter(holder for _, holder in pairs)
    return {
        "within_data_parallel": sum(group_of[owner] == group_of[holder] for owner, holder in pairs) / len(pairs),
        "leaves_rack": sum(map(placement.leaves_rack, ranks)) / len(ranks),
        "most_held": max(held[rank] for rank in ranks),
        "least_held": min(held[rank] for rank in ranks),
        "generations": 2 * (1 + max(held[rank] for rank in ranks)),
    }


def _copies(number: int) -> str:
    return "1 copy" if number == 1 else f"{number} copies"


def _table(survivals: Mapping[int, Sequence[Survival]], memory: Mapping[int, int]) -> Table:
    """Return what survives by number of copies, and the generations in the fullest rank's memory, its own two among them."""
    table = plain_table()
    for column in ("lost at once", "of", *(f"all survives, {_copies(each)}" for each in survivals)):
        table.add_column(column, justify="right")
    for alike in zip(*survivals.values(), strict=True):
        about = [f" +- {survival.error:.2%}" if survival.error else "" for survival in alike]
        chances = [percent(survival.probability) + error for survival, error in zip(alike, about, strict=True)]
        table.add_row(f"{alike[0].lost} {alike[0].level}{'s' * (alike[0].lost > 1)}", str(alike[0].of), *chances)
    table.add_row("generations in memory", "", *map(str, memory.values()))
    return table
