"""Describe a training, its cluster and the costs of checkpoints there: measured by `moe-ckpt profile`, or written by hand.

A profile is a file of YAML with the sections below. Sizes and times may have units, such as `5GB` and `10min`. Unknown and missing
names and impossible values are refused, and the message says how to mend them.

Failures come at random from a mean time between them, or from a trace.
"""

from __future__ import annotations

import csv
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args

import yaml  # type: ignore[import-untyped]  # it has no types, and stubs are not a dependency

from lightning_moe_ckpt._units import read_duration, read_size
from lightning_moe_ckpt.errors import ConfigurationError

_ABOVE_ZERO = 1e-12
_MOST = {"seconds": 1e9, "size": 1e18, "speed": 1e18, "count": 1e15, "factor": 1e9}
"""Largest values by unit."""


def _value(
    unit: str, default: object = MISSING, *, least: float = 0.0, most: float | None = None, levels: int = 0
) -> Any:
    """Return a field whose values are checked. Text may have units, a `speed` may be infinite, a `count` is whole. `levels` is 1 for lists of
    values, 2 for lists of pairs.
    """
    metadata = {"unit": unit, "least": least, "most": most or _MOST[unit], "levels": levels}
    return field(metadata=metadata) if default is MISSING else field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class TrainingProfile:
    """Steps: their time without checkpoints, or the times of pipeline stages."""

    step_seconds: float | None = _value("seconds", None, least=_ABOVE_ZERO)
    """Seconds of a step without checkpoints; `None` computes them from `stage_seconds`."""
    stage_seconds: tuple[float, ...] = _value("seconds", (), least=_ABOVE_ZERO, levels=1)
    """Seconds of a micro-batch in each pipeline stage, forward and backward with the stage's own communication."""
    update_seconds: float = _value("seconds", 0.0)
    """The optimizer's seconds; with `stage_seconds` only."""
    synced: int = _value("size", 0)
    """Bytes that a rank reduces in a step; with `stage_seconds` only."""
    noise: float = _value("factor", 0.0)
    """Standard deviation of a step's time, as a part of the mean. The simulation takes means: a measured run differs by this much."""
    steps: int | None = _value("count", None, least=1)
    """The whole training's steps, for its time to finish."""
    tokens: int = _value("count", 0)
    """Tokens per step; 0 counts lost tokens in steps."""


@dataclass(frozen=True, kw_only=True)
class ModelProfile:
    """Sizes of the model, as numbers or as bytes of a rank's operators."""

    layers: int = _value("count", least=1, most=1e4)
    """Blocks with experts."""
    experts: int = _value("count", least=0, most=1e4)
    """Experts per block."""
    params: int = _value("count", least=1)
    """Parameters in all."""
    expert_params: int = _value("count", 0)
    """Parameters of an expert."""
    nbytes_state: float = _value("factor", 12.0, least=_ABOVE_ZERO)
    """Bytes per parameter of master weights and optimizer."""
    nbytes_compute: float = _value("factor", 2.0)
    """Bytes per parameter of the weights read by forward and backward."""
    operators: tuple[tuple[int, int], ...] = _value("size", (), levels=2)
    """A rank's bytes of each operator: its full state, and the weights read. Empty computes them from the sizes above."""


@dataclass(frozen=True, kw_only=True)
class ClusterProfile:
    """Machines, and how the training is spread over them."""

    nodes: int = _value("count", 1, least=1, most=1e6)
    """The run's machines."""
    ranks_per_node: int = _value("count", 1, least=1, most=1e6)
    """Processes on each."""
    pipeline: int = _value("count", 1, least=1, most=1e6)
    """Pipeline stages."""
    expert_parallel: int = _value("count", 1, least=1, most=1e6)
    """Ranks that share a set of experts."""
    micro_batches: int = _value("count", 1, least=1)
    """A pipeline's micro-batches in a step."""
    spares: int = _value("count", 0)
    """Machines, or waiting processes, to replace lost ones at once."""


@dataclass(frozen=True, kw_only=True)
class SpeedProfile:
    """Bytes per second between places."""

    device_host: float = _value("speed", least=1)
    """A rank's bytes per second, from its device to the node's memory."""
    host_host: float = _value("speed", math.inf, least=1)
    """Bytes per second from a node to other nodes."""
    storage: float = _value("speed", math.inf, least=1)
    """Bytes per second to storage, all nodes together."""
    alpha: float = _value("seconds", 0.0)
    """A collective's seconds, whatever its bytes."""
    beta: float = _value("factor", 0.0)
    """A collective's seconds per byte."""


@dataclass(frozen=True, kw_only=True)
class CostProfile:
    """Costs of checkpoints and failures, in seconds."""

    detection: float = _value("seconds")
    """Seconds from a failure until somebody acts on it."""
    startup: float = _value("seconds")
    """Seconds until started processes can restore: only lost ones where they are replaced alone, else all."""
    startup_all: float | None = _value("seconds", None)
    """Seconds of a start of all ranks, for systems without single replacement; `None` for `startup`."""
    restore_fixed: float = _value("seconds", 0.0)
    """A restore's seconds, whatever its bytes."""
    restore_per_nbyte: float = _value("factor", 0.0)
    """A restore's seconds per byte of a rank, on top of the way from other nodes or storage."""
    warm_up: float = _value("seconds", 0.0)
    """Seconds lost in all by slower first steps after a start, hooks included."""
    hooks_per_step: float = _value("seconds", 0.0)
    """Seconds in hooks, per step without capture."""
    hooks_per_capture: float = _value("seconds", 0.0)
    """Seconds in hooks, per step with a capture."""
    slowed_per_nbyte: float = _value("factor", 0.0)
    """Seconds by which steps are longer, per byte from a rank to any tier."""
    replay_factor: float = _value("factor", 1.0, least=_ABOVE_ZERO)
    """Time of a repeated step, as a multiple of a step's."""
    stall_whole: float = _value("seconds", 0.0)
    """Seconds for which training waits, besides bytes, for a generation in a single step; for systems with such generations."""
    repair: float = _value("seconds", 0.0)
    """Seconds until a lost machine is back."""


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Description of a run for simulations."""

    training: TrainingProfile
    """Steps and their time."""
    model: ModelProfile
    """Sizes of the model."""
    cluster: ClusterProfile
    """Machines and parallel degrees."""
    speeds: SpeedProfile
    """Bytes per second."""
    costs: CostProfile
    """Costs of checkpoints and failures, in seconds."""

    def __post_init__(self) -> None:
        for section in fields(self):
            for each in fields(found := getattr(self, section.name)):
                if (value := getattr(found, each.name)) is not None or each.default is not None:
                    _checked(f"{section.name}.{each.name}", value, each.metadata)
        training, model, cluster = self.training, self.model, self.cluster
        if model.operators and not any(full for full, _ in model.operators):
            raise _refusal("model.operators", "only zeros", "a list of pairs, some with bytes of full state")
        if (training.step_seconds is None) == (not training.stage_seconds):
            wanted = "seconds, or `training.stage_seconds`, and not both"
            raise _refusal("training.step_seconds", training.step_seconds, wanted)
        if training.stage_seconds and len(training.stage_seconds) != cluster.pipeline:
            wanted = f"one for each of `cluster.pipeline`, {cluster.pipeline}"
            raise _refusal("training.stage_seconds", list(training.stage_seconds), wanted)
        if self.ranks % (cluster.pipeline * cluster.expert_parallel):
            wanted = f"{cluster.pipeline} stages of {cluster.expert_parallel} expert-parallel ranks, or a multiple"
            raise _refusal("cluster.nodes", cluster.nodes, f"{wanted}; there are {self.ranks} ranks")
        if self.dense_params < 0:
            wanted = f"at most {model.params // max(1, model.layers * model.experts):,}: {model.layers * model.experts} experts are part of `model.params`"
            raise _refusal("model.expert_params", model.expert_params, wanted)

    @property
    def ranks(self) -> int:
        """The run's processes."""
        return self.cluster.nodes * self.cluster.ranks_per_node

    @property
    def dense_params(self) -> int:
        """Parameters outside of experts."""
        return self.model.params - self.model.layers * self.model.experts * self.model.expert_params

    @property
    def step_seconds(self) -> float:
        """Seconds of a step without checkpoints.

        Of stages, 1F1B has M + S - 1 turns of the slowest stage, then the collective and the optimizer (MoEvement, App. C).
        """
        training, speeds = self.training, self.speeds
        if training.step_seconds is not None:
            return training.step_seconds
        turns = self.cluster.micro_batches + self.cluster.pipeline - 1
        synced = speeds.alpha + speeds.beta * training.synced
        return turns * max(training.stage_seconds) + synced + training.update_seconds

    @property
    def alone_share(self) -> float:
        """Time of a stage's M turns alone, without waits for other stages, as a part of a step's."""
        cluster, training = self.cluster, self.training
        turns = cluster.micro_batches + cluster.pipeline - 1
        if not training.stage_seconds:
            return cluster.micro_batches / turns
        return 1 - (cluster.pipeline - 1) * max(training.stage_seconds) / self.step_seconds

    @classmethod
    def read(cls, path: str | Path) -> Profile:
        """Return the profile in a file of YAML.

        Raises:
            ConfigurationError: the file cannot be read, or a value in it is missing, unknown or impossible; the message names it.
        """
        try:
            said = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise ConfigurationError(f"{path}: no profile can be read from it. {error}") from error
        try:
            return cls.of(said)
        except ConfigurationError as error:
            raise ConfigurationError(f"{path}: {error}") from None

    @classmethod
    def of(cls, said: object) -> Profile:
        """Return a document's profile. Raises `ConfigurationError` as `read`."""
        sections = {"training": TrainingProfile, "model": ModelProfile, "cluster": ClusterProfile}
        sections |= {"speeds": SpeedProfile, "costs": CostProfile}
        document = _mapping("a profile", said, sections)
        return cls(**{name: _section(name, kind, document.get(name, {})) for name, kind in sections.items()})

    def write(self, path: str | Path) -> None:
        """Write the profile as YAML, see `text`."""
        Path(path).write_text(self.text(), encoding="utf-8")

    def text(self) -> str:
        """Return the profile as YAML; defaults are left out."""
        document: dict[str, dict[str, Any]] = {}
        for section in fields(self):
            found = getattr(self, section.name)
            kept = {each: value for each in fields(found) if (value := getattr(found, each.name)) != each.default}
            document[section.name] = {each.name: _plain(value) for each, value in kept.items()}
        return yaml.safe_dump(document, sort_keys=False)  # type: ignore[no-any-return]


def _plain(value: Any) -> Any:
    return [_plain(each) for each in value] if isinstance(value, tuple) else value


def _refusal(name: str, found: object, wanted: str) -> ConfigurationError:
    return ConfigurationError(f"`{name}: {found}` must be {wanted}.")


def _mapping(name: str, said: object, known: Mapping[str, object] | Sequence[str]) -> dict[str, Any]:
    if not isinstance(said, Mapping):
        raise ConfigurationError(f"{name} must have the names {', '.join(known)}, each with its value.")
    if unknown := [str(each) for each in said if each not in known]:
        raise ConfigurationError(f"{name} has no `{unknown[0]}`: its names are {', '.join(known)}.")
    return dict(said)


def _section(name: str, kind: type[Any], said: object) -> Any:
    known = {each.name: each for each in fields(kind)}
    given = _mapping(f"`{name}`", said, list(known))
    for each in known.values():
        if each.default is MISSING and each.name not in given:
            raise ConfigurationError(f"`{name}.{each.name}` is missing: {_wanted(each.metadata)}.")
    return kind(**{key: _read(f"{name}.{key}", value, known[key].metadata) for key, value in given.items()})


def _read(name: str, value: object, rules: Mapping[str, Any]) -> Any:
    """Return the value, with text that has units as a number, and whole numbers as integers."""
    if isinstance(value, list):
        return tuple(_read(name, each, rules) for each in value)
    if isinstance(value, float) and rules["unit"] == "count" and value.is_integer() and abs(value) < 1e18:
        return int(value)
    if not isinstance(value, str):
        return value
    try:
        if rules["unit"] == "seconds":
            return read_duration(value).total_seconds()
        try:
            # YAML takes 16.4e9 for text, because it lacks a sign.
            return _read(name, float(value), rules)
        except ValueError:
            return read_size(value if rules["unit"] in {"size", "speed"} else None)
    except ValueError:
        raise _refusal(name, value, _wanted(rules)) from None


def _checked(name: str, value: object, rules: Mapping[str, Any], level: int = 0) -> None:
    """Raise `ConfigurationError` unless the value, or all values in its list, are numbers within their limits."""
    if level < rules["levels"]:
        if not isinstance(value, tuple) or (level == 1 and len(value) != 2):
            raise _refusal(name, value, f"a list of {'pairs of ' * (rules['levels'] - 1)}values, each {_wanted(rules)}")
        for each in value:
            _checked(name, each, rules, level + 1)
        return
    good = isinstance(value, int | float) and not isinstance(value, bool) and rules["least"] <= value <= rules["most"]
    good = good or (rules["unit"] == "speed" and value == math.inf)
    if not good or (rules["unit"] == "count" and value != int(value)):  # type: ignore[call-overload]
        raise _refusal(name, list(value) if isinstance(value, tuple) else value, _wanted(rules))


def _wanted(rules: Mapping[str, Any]) -> str:
    kinds = {"seconds": "a time in seconds, or such as 10min,", "size": "bytes, or a size such as 5GB,"}
    least = rules["least"]
    kinds |= {"count": "a whole number", "factor": "a number", "speed": kinds["size"]}
    return f"{kinds[rules['unit']]} {'above 0' if least == _ABOVE_ZERO else f'of {least:g} or more'}, at most {rules['most']:g}"


Scope = Literal["process", "node", "cluster"]
"""Reach of a failure: processes, whose node keeps its memory; a node with its memory; or every node's memory."""
SCOPES: tuple[Scope, ...] = get_args(Scope)
"""Scopes, smallest loss first."""


@dataclass(frozen=True, kw_only=True)
class Failures:
    """Times and scopes of failures: of a Poisson process, or of a trace."""

    mtbf: float = float("inf")
    """Mean seconds between failures; infinite for none. Unused with a trace."""
    scope: Scope = "node"
    """Scope of failures without a trace."""
    trace: tuple[tuple[float, Scope], ...] | None = None
    """Seconds from the run's start, and scopes."""

    def __post_init__(self) -> None:
        if not self.mtbf > 0:
            raise ConfigurationError(f"`Failures(mtbf={self.mtbf})` must be seconds above 0.")
        if self.scope not in SCOPES:
            raise ConfigurationError(f"`Failures(scope={self.scope!r})` must be one of {', '.join(SCOPES)}.")

    def times(self, seed: int) -> Iterator[tuple[float, Scope]]:
        """Yield seconds from the run's start with the scope, in order; `seed` changes all but a trace."""
        if self.trace is not None:
            yield from sorted(self.trace)
            return
        draw, now = random.Random(f"failures {seed}"), 0.0
        while self.mtbf < float("inf"):
            now += draw.expovariate(1 / self.mtbf)
            yield now, self.scope

    @classmethod
    def read(cls, path: str | Path) -> Failures:
        """Return the failures in a CSV with a heading `seconds,scope`; without a scope it is a node.

        Raises:
            ConfigurationError: there is no such file, or a line is no failure; the message has its number.
        """
        try:
            with Path(path).open(encoding="utf-8-sig", newline="") as file:
                rows = csv.DictReader(file)
                rows.fieldnames = names = [name.strip() for name in rows.fieldnames or ()]
                if sorted(names) not in (["seconds"], ["scope", "seconds"]):
                    raise ConfigurationError(
                        f"{path}: its first line must be `seconds,scope`, or `seconds`; found `{','.join(names)}`."
                    )
                found = tuple(_failure(path, rows.line_num, row) for row in rows)
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            raise ConfigurationError(f"{path}: no trace can be read from it. {error}") from error
        return cls(trace=found)

    def mean_seconds(self, wall: float) -> float:
        """Return the mean seconds between failures; of a trace over `wall` seconds."""
        number = sum(1 for seconds, _ in self.trace or () if seconds <= wall)
        return self.mtbf if self.trace is None else wall / number if number else float("inf")


def _failure(path: str | Path, line: int, row: dict[str, str | None]) -> tuple[float, Scope]:
    scope = (row.get("scope") or "node").strip()
    try:
        seconds = float(row["seconds"] or "")
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf") or scope not in SCOPES or None in row:
        found = ",".join(map(str, row.values()))
        raise ConfigurationError(
            f"{path}, line {line}: must be seconds of 0 or more, and one of {', '.join(SCOPES)}; found `{found}`."
        )
    return seconds, scope
