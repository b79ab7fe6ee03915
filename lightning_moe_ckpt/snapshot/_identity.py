"""Tell whether a stored generation belongs to this job: same parameters, optimizer, precision and ranks.

Fingerprints decide. Only if they differ, the stored run's records are compared with the model, to name the parameter
and the remedy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, cast

import torch
from xxhash import xxh3_128_hexdigest

from lightning_moe_ckpt.coordination import VERSIONS, Exchange, agreed_versions
from lightning_moe_ckpt.errors import Corrupt
from lightning_moe_ckpt.operators import OperatorSet, StateSchema, sharding_of
from lightning_moe_ckpt.parallel import ParallelGroups
from lightning_moe_ckpt.snapshot._averages import is_average
from lightning_moe_ckpt.snapshot._layout import PARAM, PRESENT, StateView
from lightning_moe_ckpt.storage import Commit, ModuleEntry, RankMarker, SegmentEntry, dtype_code

_MAX_NAMED = 6

STAGES = "pipeline_parallel"
"""Key of a marker's number of pipeline stages, present if there are several."""

IMPORTED = "imported"
"""Key of an imported generation's source, in words, in its policy, and of its only entry in the start half of the journal."""

Facts = dict[str, str]
"""Shape and type by parameter."""

_UNRECORDED = "without a record here"


@dataclass(frozen=True, kw_only=True)
class Topology:
    """Ranks of a run, and how they share the model. No part of what a run is: other ranks may go on with it."""

    world_size: int
    expert_parallel: int = 1
    pipeline_parallel: int = 1
    sharding: str = ""
    """How many parameters are in which shards, in words; empty without any."""

    @classmethod
    def of_stored(cls, stored: Commit | RankMarker) -> Topology:
        """Return the topology of the run that wrote a generation. Raises `Corrupt` if the generation does not say."""
        return Identity.of_stored(stored).topology

    def __str__(self) -> str:
        sizes = ("expert_parallel", self.expert_parallel), ("pipeline_parallel", self.pipeline_parallel)
        said = [f"{name}={size}" for name, size in sizes if size > 1]
        said += [f"in shards: {self.sharding}"] if self.sharding else []
        ranks = f"{self.world_size} rank{'s' if self.world_size > 1 else ''}"
        return f"{ranks} ({', '.join(said)})" if said else ranks


@dataclass(frozen=True, kw_only=True)
class Identity:
    """Facts that a job must have in common with the run that it resumes."""

    fingerprint: str
    autocast: str | None
    """Low precision of the forward pass under autocast."""
    topology: Topology
    coupling: str = field(default="element", compare=False)
    """Range on which an element's update depends; said in markers where it is wider, for readers: fingerprints decide."""
    versions: Mapping[str, str] = field(default_factory=dict, compare=False)
    """Releases of the libraries that decide bits; if they differ, the run is resumed with a warning."""

    @classmethod
    def of_job(
        cls,
        operators: OperatorSet,
        view: StateView,
        groups: ParallelGroups,
        autocast_dtype: torch.dtype | None,
        exchange: Exchange,
    ) -> Identity:
        """Return this job's identity, with all its pipeline stages. Collective."""
        fingerprint = f"{operators.fingerprint}-{view.schema.fingerprint()}"
        sharding = sharding_of(view.params.values())
        if groups.num_stages > 1:
            said = cast("list[list[str]]", exchange.gather_values([fingerprint, sharding])[:: groups.stage_size])
            fingerprint = xxh3_128_hexdigest("\n".join(each for each, _ in said).encode())
            sharding = "; ".join(dict.fromkeys(text for _, text in said if text))
        return cls(
            fingerprint=fingerprint,
            autocast=None if autocast_dtype is None else str(autocast_dtype).removeprefix("torch."),
            topology=Topology(
                world_size=groups.world_size,
                expert_parallel=groups.ep_size,
                pipeline_parallel=groups.num_stages,
                sharding=sharding,
            ),
            coupling=view.schema.reach.coupling,
            versions=agreed_versions(exchange),
        )

    @classmethod
    def of_stored(cls, stored: Commit | RankMarker) -> Identity:
        """Return the identity of the run that wrote a generation. Raises `Corrupt` if the generation does not say."""
        policy: Mapping[str, Any] = stored.policy
        fingerprint, expert_parallel = policy.get("fingerprint"), policy.get("expert_parallel")
        stages = policy.get(STAGES, 1)
        if not isinstance(stages, int):
            fingerprint = None
        if not isinstance(fingerprint, str) or not isinstance(expert_parallel, int) or "plan" not in policy:
            raise Corrupt(
                f"{stored.generation} does not say which model wrote it, and by which plan. If another program stored "
                "it, remove it, or give another URL."
            )
        topology = Topology(
            world_size=stored.world_size,
            expert_parallel=expert_parallel,
            pipeline_parallel=stages,
            sharding=str(policy.get("sharding", "")),
        )
        return cls(fingerprint=fingerprint, autocast=policy.get("autocast"), topology=topology)

    def policy(self) -> dict[str, object]:
        """Return the identity's entries in every marker."""
        ranks = self.topology
        return {
            "fingerprint": self.fingerprint,
            "autocast": self.autocast,
            "expert_parallel": ranks.expert_parallel,
            **({STAGES: ranks.pipeline_parallel} if ranks.pipeline_parallel > 1 else {}),
            **({"sharding": ranks.sharding} if ranks.sharding else {}),
            **({"coupling": self.coupling} if self.coupling != "element" else {}),
            VERSIONS: dict(self.versions),
        }

    def is_same_model(self, stored: Identity) -> bool:
        """Return whether model, optimizer and precision are a stored run's; if not, names may still agree."""
        return (self.fingerprint, self.autocast) == (stored.fingerprint, stored.autocast)

    def job_differences(self, stored: Identity, *, moved: bool = False) -> Iterator[str]:
        """Yield differences in ranks and precision, a line each; in precision only if the ranks may have `moved`."""
        before, here = stored.topology, self.topology
        ranks = (
            ("processes", before.world_size, here.world_size),
            ("expert_parallel", before.expert_parallel, here.expert_parallel),
            ("pipeline_parallel", before.pipeline_parallel, here.pipeline_parallel),
            ("parameters", before.sharding or "plain", here.sharding or "plain"),
        )
        for what, was, now in (
            *(() if moved else ranks),
            ("autocast", stored.autocast or "none", self.autocast or "none"),
        ):
            if was != now:
                yield f"{what}: {was} in the run, {now} now"


def live_facts(operators: OperatorSet) -> Facts:
    """Return shape and type of the parameters on this rank."""
    dtypes = operators.dtypes
    slices = (param_slice for operator in operators for param_slice in operator.slices)
    return {each.fqn: _fact(each.global_shape, dtype_code(dtypes[each.fqn])) for each in slices}


def constant_facts(files: Sequence[SegmentEntry]) -> Facts:
    """Return shape and type of parameters stored as constants."""
    return {record.fqn: _fact(record.global_shape, record.dtype) for file in files for record in file.records}


def live_optimizer(operators: OperatorSet, schema: StateSchema, params: Mapping[str, torch.Tensor]) -> list[str]:
    """Return the optimizer in words: class, parameters per group, state."""
    keys = sorted({entry.key for fqn in operators.dtypes for entry in schema.entries(params[fqn])})
    sizes = [len(group["params"]) for group in schema.optimizer.param_groups]
    return _optimizer_words(type(schema.optimizer).__qualname__, sizes, keys)


def stored_facts(markers: Sequence[RankMarker]) -> tuple[Facts, list[str]]:
    """Return the parameters that a run's ranks stored, `_UNRECORDED` where these markers have names alone, and the optimizer."""
    facts: Facts = {}
    keys: set[str] = set()
    for record in (record for marker in markers for segment in marker.segments for record in segment.records):
        if record.kind == "full" and record.state_key == PARAM:
            facts[record.fqn] = _fact(record.global_shape, record.dtype)
        elif record.kind == "full" and record.state_key != PRESENT and not is_average(record.state_key):
            keys.add(record.state_key)
    module: ModuleEntry | None = None if markers[0].module is None else markers[0].module.read()
    groups = () if module is None else module.param_groups
    words = _optimizer_words("" if module is None else module.optimizer, [*map(len, groups)], sorted(keys))
    known = words if facts else words[:-1]  # differences alone have no state of the optimizer
    return facts | {name: _UNRECORDED for name in chain.from_iterable(groups) if name and name not in facts}, known


def model_differences(stored: tuple[Facts, list[str]], live: tuple[Facts, list[str]]) -> Iterator[str]:
    """Yield differences between the run's and this job's parameters and optimizer, a line each."""
    (was, optimizer_was), (now, optimizer_now) = stored, live
    lines = [*_name_differences(was, now)]
    both = [name for name in was if name in now and was[name] not in {now[name], _UNRECORDED}]
    lines += [f"parameter `{name}`: {was[name]} in the run, {now[name]} now" for name in both]
    changed = [pair for pair in zip(optimizer_was, optimizer_now, strict=False) if pair[0] != pair[1]]
    lines += [f"optimizer: {old} in the run, {new} now" for old, new in changed]
    yield from lines[:_MAX_NAMED]
    if len(lines) > _MAX_NAMED:
        yield f"and {len(lines) - _MAX_NAMED} more"


def _name_differences(was: Facts, now: Facts) -> Iterator[str]:
    gone, new = [name for name in was if name not in now], [name for name in now if name not in was]
    if [was[name] for name in gone] == [now[name] for name in new]:
        yield from (f"parameter `{old}` of the run is called `{name}` now" for old, name in zip(gone, new, strict=True))
        return
    yield from (f"parameter `{name}` ({was[name]}) of the run is not in the model" for name in gone)
    yield from (f"parameter `{name}` ({now[name]}) of the model is not in the run" for name in new)


def _fact(shape: Sequence[int], code: str) -> str:
    return f"{list(shape)} {code}"


def _optimizer_words(name: str, sizes: Sequence[int], keys: Sequence[str]) -> list[str]:
    return [f"class {name or 'unknown'}", f"groups of {list(sizes)} parameters", f"state {', '.join(keys) or 'none'}"]
