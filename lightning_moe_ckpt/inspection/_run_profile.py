"""Make a profile from a run's measurements: figures in its log, and sizes in the markers of a generation.

Numbers without a measurement are left out and named. Nothing is guessed: the user may give such a number.
"""

from __future__ import annotations

import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from lightning_moe_ckpt.errors import ConfigurationError
from lightning_moe_ckpt.inspection._answers import Answer
from lightning_moe_ckpt.simulation import Profile
from lightning_moe_ckpt.snapshot import Topology
from lightning_moe_ckpt.storage import RankMarker, RunView

Document = dict[str, dict[str, Any]]

_EXPERT = re.compile(r"(.*)/expert\.\d+")
_SPREAD = 1.2
"""Least ratio of the largest restore to the smallest to tell the time per byte from the rest."""
_AT_ONCE = 16
"""Markers read at the same time."""
_FIRST_STEPS = 6
"""Steps of a start until the log's figures leave out unusual steps."""
_UNKNOWN = {
    "training.step_seconds": "no start took enough steps for a figure in the log",
    "model.operators": "no generation that could be restored is stored",
    "cluster.nodes": "the log does not say on which nodes several ranks are",
    "cluster.ranks_per_node": "the log does not say on which nodes several ranks are",
    "speeds.device_host": "copies run beside training, so no step shows their speed; `moe-ckpt doctor` measures memory",
    "speeds.host_host": "the log has no speed of the network between nodes",
    "speeds.storage": "nothing was stored",
    "costs.detection": "no start followed a failure",
    "costs.startup": "no start followed a failure",
    "costs.restore_fixed": "no start restored anything",
    "costs.warm_up": "no start has an entry in the log after its first steps",
    "costs.hooks_per_step": "something was taken at every step",
    "costs.hooks_per_capture": "no step with a capture is in the log's figures",
    "costs.slowed_per_nbyte": "no steps without background work to compare with are in the log's figures",
    "costs.replay_factor": "no start repeated steps",
    "costs.repair": "the log does not say when a lost machine is back",
}
"""Numbers of a profile, each with the reason why a run may lack a measurement."""


def write_profile(view: RunView, out: Path, given: Sequence[tuple[str, object]], *, force: bool) -> Answer:
    """Write the profile of a run, with `given` values on top, by name. Raises `ConfigurationError` if the file exists, a name or value of
    `given` is no profile's, or a required number is missing.
    """
    if out.exists() and not force:
        raise ConfigurationError(f"{out} exists. Give another name, or --force to replace it.")
    document, sources = profile_of(view)
    for name, value in given:
        section, _, key = name.partition(".")
        document.setdefault(section, {})[key] = value
        sources[name] = "given"
    missing = {name: why for name, why in _UNKNOWN.items() if name not in sources}
    try:
        profile = Profile.of(document)
    except ConfigurationError as error:
        named = "".join(f"\n  {name}: {why}" for name, why in missing.items())
        raise ConfigurationError(f"{error} Give it by `--set NAME=VALUE`. The run did not measure:{named}") from None
    starts, cluster = _starts(view), profile.cluster
    if starts and (ranks := starts[-1][-1]["world_size"]) != profile.ranks:
        raise ConfigurationError(
            f"The run has {ranks} ranks, and not {cluster.nodes} nodes of {cluster.ranks_per_node}: the log does not say on which nodes they are. Give "
            "`--set cluster.nodes=N --set cluster.ranks_per_node=M`."
        )
    profile.write(out)
    told = [f"{name}: {_text(document, name)}, {source}" for name, source in sources.items() if name in _UNKNOWN]
    left = [f"{name}: left out, {why}" for name, why in missing.items()]
    answer = {"out": str(out), "profile": document, "sources": sources, "missing": missing}
    return Answer(answer, lambda: [f"{out}: profile of run {view.run_id}", *told, *left])


def profile_of(view: RunView, *, needs: Collection[str] = ()) -> tuple[Document, dict[str, str]]:
    """Return a profile's document with the numbers known of a run, and each number's source by name.

    Without a number that it `needs` from the log no markers are read.
    """
    starts = _starts(view)
    document, sources = Document({name: {} for name in ("training", "model", "cluster", "speeds", "costs")}), {}

    def put(name: str, value: float | None, source: str) -> None:
        if value is not None:
            section, key = name.split(".")
            document[section][key] = value
            sources[name] = source

    _put_steps(starts, put)
    _put_failures(starts, document, put)
    ranks = {start[-1]["world_size"] for start in starts}
    if ranks == {1}:  # of several, the log does not say on which nodes they are
        put("cluster.nodes", 1, "the log")
        put("cluster.ranks_per_node", 1, "the log")
    wanted = view.generations() if sources.keys() >= set(needs) else ()
    for commit in (stored.commit for stored in wanted if stored.commit is not None):
        with ThreadPoolExecutor(_AT_ONCE, "moe-ckpt-profile") as pool:
            markers = list(pool.map(partial(view.read_marker, commit), range(commit.world_size)))
        document["model"], shared = _model(markers), Topology.of_stored(commit)
        sources["model.operators"] = said = f"generation of step {commit.generation.step}"
        put("cluster.pipeline", shared.pipeline_parallel, said)
        put("cluster.expert_parallel", shared.expert_parallel, said)
        break
    return document, sources


Put = Callable[[str, float | None, str], None]
Figures = Mapping[str, Any]


def _starts(view: RunView) -> list[list[Figures]]:
    """Return the figures of every log entry of the newest run, by start; starts without any are left out."""
    found = defaultdict[int, list[Figures]](list)
    for each in view.events().values():
        figures = each.event.get("figures")
        if each.history.run_id == view.run_id and isinstance(figures, Mapping) and "own" in figures.get("measured", {}):
            found[int(str(each.event["incarnation"]))].append(figures)
    return [found[number] for number in sorted(found)]


def _put_steps(starts: Sequence[Sequence[Figures]], put: Put) -> None:
    """Put costs of steps: means over starts, weighted by their steps."""
    rows = [(start[-1]["measured"], float(start[-1]["steps"])) for start in starts]
    said = f"mean of {sum(steps for _, steps in rows):.0f} steps in {len(rows)} starts"

    def mean(name: str) -> float | None:
        return _mean((row[name], steps) for row, steps in rows if row.get(name) is not None)

    step, repeated = mean("step_seconds"), mean("repeated_seconds")
    if step is None:  # every step was slowed by something: what that is cannot be told from the step
        step = _per_step(starts, "productive")
        put("training.step_seconds", step, f"{said}, with what slowed them")
        put("costs.hooks_per_capture", _per_step(starts, "hooks"), said)
    else:
        put("training.step_seconds", step, said)
        put("costs.hooks_per_step", mean("hooks_quiet_seconds"), said)
        put("costs.hooks_per_capture", mean("hooks_captured_seconds"), said)
    put("training.noise", mean("step_noise"), said)
    put("costs.replay_factor", repeated / step if step and repeated else None, said)
    slowed, nbytes = Counter[str](), Counter[str]()
    for row, _ in rows:
        if row.get("step_seconds") is not None:
            slowed.update(row["slowed_seconds"])
            nbytes.update(row["nbytes"])
    if nbytes.total():
        put("costs.slowed_per_nbyte", max(0.0, slowed.total()) / nbytes.total(), said)
    rates = [rate for row, _ in rows if (rate := (row.get("nbytes_per_second") or {}).get("storage"))]
    world = starts[-1][-1]["world_size"] if starts else 1
    put("speeds.storage", statistics.median(rates) * world if rates else None, f"median of {len(rates)} starts")


def _per_step(starts: Sequence[Sequence[Figures]], part: str) -> float | None:
    """Return the mean seconds of a part in a step between two log entries of a start, without its first steps."""
    seconds = steps = 0.0
    for start in starts:
        later = [figures for figures in start if _counted(figures) >= _FIRST_STEPS]
        if len(later) > 1:
            seconds += later[-1]["measured"]["own"][part] - later[0]["measured"]["own"][part]
            steps += _counted(later[-1]) - _counted(later[0])
    return seconds / steps if steps else None


def _counted(figures: Figures) -> int:
    measured = figures["measured"]
    return int(figures["steps"] - measured["repeated_steps"] - measured["lost_steps"])


def _put_failures(starts: Sequence[Sequence[Figures]], document: Document, put: Put) -> None:
    """Put costs of restarts: medians over resumed starts."""
    resumed = [start for start in starts if start[-1]["resumed_from"] is not None]
    own = [start[-1]["measured"]["own"] for start in resumed]
    said = f"median of {len(own)} starts"
    put("costs.detection", _median(each["detection"] for each in own), said)
    put("costs.startup", _median(map(_startup, resumed)), said)
    if starts and starts[0][-1]["resumed_from"] is None:
        put("costs.startup_all", _startup(starts[0]), "the first start, launcher included")
    measured = [start[-1]["measured"] for start in resumed]
    restores = [(sum(each["restored_nbytes"].values()), each["own"]["restore"]) for each in measured]
    sizes = [nbytes for nbytes, _ in restores if nbytes]
    per_nbyte, fixed = 0.0, _median(seconds for _, seconds in restores)
    if sizes and max(sizes) > _SPREAD * min(sizes):
        slope, rest = statistics.linear_regression(*zip(*restores, strict=True))
        per_nbyte, fixed = (slope, rest) if slope > 0 <= rest else (per_nbyte, fixed)
    put("costs.restore_fixed", fixed, said if per_nbyte else f"{said} that read alike: all of their time")
    put("costs.restore_per_nbyte", per_nbyte or None, said)
    step, costs = document["training"].get("step_seconds"), document["costs"]
    if step is None:
        return
    ordinary = step + costs.get("hooks_per_capture", costs.get("hooks_per_step", 0.0))
    extras = [extra for start in resumed if (extra := _warm_up(start, ordinary)) is not None]
    put("costs.warm_up", max(0.0, statistics.median(extras)) if extras else None, f"median of {len(extras)} starts")


def _startup(start: Sequence[Figures]) -> float:
    """Return the seconds until restoring began: what first steps took longer is a cost of its own."""
    measured = start[-1]["measured"]
    return float(measured["own"]["startup"] - (measured.get("warm_up_seconds") or 0.0))


def _warm_up(start: Sequence[Figures], step: float) -> float | None:
    """Return the seconds of a start's first steps beyond ordinary steps', as measured or from the first entry with enough of them."""
    if (known := start[-1]["measured"].get("warm_up_seconds")) is not None:
        return float(known)
    for figures in start:
        own, number = figures["measured"]["own"], figures["steps"] - figures["measured"]["repeated_steps"]
        if number >= _FIRST_STEPS:
            return float(own["productive"] + own["hooks"] + own["slowed"] + own["lost"] - number * step)
    return None


def _model(markers: Iterable[RankMarker]) -> dict[str, Any]:
    """Return the model's sizes, and the operators of the rank with most bytes."""
    params, experts, of_ranks = dict[tuple[str, str], int](), dict[str, str](), list[dict[str, list[int]]]()
    for marker in markers:
        full, read = Counter[str](), Counter[str]()
        entries = [*marker.segments, *(entry.segment for entry in marker.referenced)]
        for record in (record for entry in entries for record in entry.records if record.operator):
            if record.kind == "full":
                full[record.operator] += record.nbytes
                if record.state_key == "param":
                    params[record.operator, f"{record.fqn} {record.global_start} {record.box}"] = record.numel
                    read[record.operator] += record.nbytes
        of_ranks.append({name: [nbytes, read[name]] for name, nbytes in full.items()})
        experts |= {name: found[1] for name in full if (found := _EXPERT.match(name))}
    sizes = defaultdict[str, int](int)
    for (operator, _), numel in params.items():
        sizes[operator] += numel
    layers = len(set(experts.values()))
    most = max(of_ranks, key=lambda each: sum(full for full, _ in each.values()))
    largest = max((sizes[name] for name in experts), default=0)
    per_layer = len(experts) // layers if layers else 0
    numbers = {"params": sum(sizes.values()), "expert_params": largest}
    return {"layers": max(1, layers), "experts": per_layer, **numbers, "operators": [*most.values()]}


def _mean(weighted: Iterable[tuple[float, float]]) -> float | None:
    rows = [(value, weight) for value, weight in weighted if weight]
    return sum(value * weight for value, weight in rows) / sum(weight for _, weight in rows) if rows else None


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _text(document: Mapping[str, Mapping[str, Any]], name: str) -> str:
    section, key = name.split(".")
    value = document[section][key]
    if isinstance(value, list):
        return f"{len(value)} operators"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
