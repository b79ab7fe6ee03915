"""Choose the checkpoint callback for a rate of failures: from a profile at once, or from measurements in the run's first steps.

Without a profile a run begins under a trial: windows of two steps, with ordinary steps between them. Every so many steps rank 0 looks whether the
log knows enough, and then chooses for all ranks among the exact policies. Profile and choice are stored at the run's URL before the session
is replaced, so every later start makes the same choice. Training itself does not change: the trial's captures are checkpoints like others.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]  # it has no types, and stubs are not a dependency
from lightning.pytorch import LightningModule, Trainer
from typing_extensions import Unpack, override

from lightning_moe_ckpt._logging import rank_logger
from lightning_moe_ckpt._units import read_duration
from lightning_moe_ckpt.callbacks._base import CheckpointCallback
from lightning_moe_ckpt.callbacks._exact_checkpoints import DenseCheckpoint, DifferentialCheckpoint, SparseCheckpoint
from lightning_moe_ckpt.callbacks._experts import PartialExpertCheckpoint
from lightning_moe_ckpt.callbacks._shared_arguments import CheckpointArguments, spelled_out
from lightning_moe_ckpt.coordination import Exchange
from lightning_moe_ckpt.errors import ConfigurationError, Corrupt, KeyMissing, NoUsableGeneration, StorageError
from lightning_moe_ckpt.fit import FitSession
from lightning_moe_ckpt.fit.loops._trainer import groups_of
from lightning_moe_ckpt.inspection._run_profile import profile_of
from lightning_moe_ckpt.journal import capture_rng, restore_rng
from lightning_moe_ckpt.policies import Policy, SparsePolicy
from lightning_moe_ckpt.simulation import Profile, choose
from lightning_moe_ckpt.storage import Backend, RunView, open_backend
from lightning_moe_ckpt.tiers import room_nbytes, shared_directory, this_domain

log = rank_logger(__name__)

_TRIAL = SparsePolicy(window=2, every_n_steps=8)
_LOOK_STEPS = 24
"""Steps between looks at the figures: the first has seen 20 ordinary steps."""
_NEEDS = {"training.step_seconds", "costs.hooks_per_capture"}
"""Numbers of a profile without which nothing is chosen."""
_PROFILE, _CHOICE = "profile.yaml", "choice.json"
"""Objects at the run's URL."""
_KINDS = {
    kind.__name__: kind for kind in (SparseCheckpoint, DenseCheckpoint, DifferentialCheckpoint, PartialExpertCheckpoint)
}
_PRESUMED = {"detection": 5.0, "startup": 30.0}
"""Seconds that no run without failures can measure; its own first start takes the place of the second."""


@spelled_out
def auto(
    url: str | Path,
    *,
    mtbf: timedelta | float | str,
    allow_loss: float | str | None = None,
    profile: str | Path | None = None,
    **shared: Unpack[CheckpointArguments],
) -> CheckpointCallback:
    """Return the checkpoint callback that is expected to give the best goodput at a rate of failures, as `moe-ckpt plan` chooses it.

    With a profile it is chosen here. Without one the run measures its first steps, chooses then, and keeps profile and choice at its URL.

    Args:
        url: where checkpoints live, one run per URL: a path, `file://`, `s3://`, `gs://`, `az://` or any fsspec URL.
        mtbf: mean time between failures of the whole run, a `timedelta`, seconds, or text such as `2h`.
        allow_loss: portion of tokens that failures may lose for good, such as 0.05, which allows `PartialExpertCheckpoint`; needs a profile.
            `None` for policies whose restarts are exact.
        profile: file that `moe-ckpt profile` has written.
        **shared: arguments of every checkpoint callback, see `CheckpointArguments`. What is given here is not chosen.

    Raises:
        ConfigurationError: an argument is out of range, the profile cannot be read, or no checkpoint can help at this rate.
    """
    try:
        seconds, loss = read_duration(mtbf).total_seconds(), float(allow_loss or 0.0)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"`auto(mtbf={mtbf!r}, allow_loss={allow_loss!r})`: {error}.") from error
    if seconds <= 0:
        raise ConfigurationError(f"`auto(mtbf={mtbf!r})` must be longer than 0.")
    if profile is not None:
        best = choose(Profile.read(profile), seconds, allow_loss=loss, replicas=_copies(shared))[0]
        return _made(url, best.callback(), shared)
    if loss:
        raise ConfigurationError(
            f"`auto(allow_loss={allow_loss!r})` without a profile: a run that measures itself chooses exact policies, since it cannot take back what "
            f"it has captured. Let it run once, and give `profile='{_PROFILE}'` of `moe-ckpt profile {url}`."
        )
    return AutoCheckpoint(url, mtbf=seconds, **shared)


class AutoCheckpoint(CheckpointCallback):
    """Measure first, choose then, and go on under what is chosen; see `auto`, which makes it. `mtbf` is in seconds."""

    def __init__(self, url: str | Path, *, mtbf: float, **shared: Unpack[CheckpointArguments]) -> None:
        super().__init__(url, **shared)
        self._mtbf, self._given = mtbf, shared
        self._chosen: CheckpointCallback | None = None
        self._over = False
        """Whether nothing more is looked for."""

    @property
    def chosen(self) -> CheckpointCallback | None:
        """Callback whose policy and arguments are in force; `None` in the trial."""
        return self._chosen

    @override
    def _policy(self) -> Policy:
        return _TRIAL if self._chosen is None else self._chosen._policy()  # noqa: SLF001  # of one class

    @override
    def _begin(self, trainer: Trainer, module: LightningModule) -> FitSession:
        exchange = Exchange(groups_of(trainer.strategy))
        with exchange.raise_together() as said:  # of one object another rank could read another version
            said.append(self._recalled(exchange.world_size) if exchange.is_coordinator else None)
        self._use(said[0])
        self._over |= self._rerun is not None
        return super()._begin(trainer, module)

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: object) -> None:
        step, run = trainer.global_step, self._run
        if self._over or run is None or not step or step % _LOOK_STEPS or not run.together_at(step):
            return
        random = capture_rng()
        exchange, session = run.sessions.among(), run.session
        room = room_nbytes(shared_directory()) + sum(session.report().reserved_nbytes.values())
        here = [session.replaying, this_domain().node, session.rates(), room]
        rows = exchange.gather_values(here)
        with exchange.raise_together() as said:
            said.append(self._decided(rows, trainer) if exchange.is_coordinator else None)
        self._use(said[0])
        if self._chosen is not None:
            run.change_policy(self._config(), self._policy())
        restore_rng(random)

    # -- private

    def _use(self, choice: Any) -> None:
        """Take over a choice: the name of a callback and its arguments, or why there is none; `None` leaves the trial in force."""
        if choice is None:
            return
        self._over = True
        if isinstance(choice, str):
            log.error("no choice for the rate of failures, so the trial goes on. %s", choice, alike=True)
            return
        self._chosen = _made(self.url, choice, self._given)
        for name in ("replicas", "overhead_target", "storage_at_least"):
            setattr(self, name, getattr(self._chosen, name))

    def _recalled(self, world_size: int) -> list[Any] | None:
        """Return the choice of an earlier start: as stored, or anew for another rate; `None` without, or of other ranks."""
        self._chosen, self._over = None, False
        if self.resume == "never":
            return None
        with closing(self._backend()) as backend:
            if (stored := self._stored(backend)) is None:
                return None
            if (ranks := stored.get("world_size")) != world_size:
                log.info("the choice at %s is of %s ranks: this start measures again", self.url, ranks)
                return None
            if stored.get("mtbf") != self._mtbf or stored.get("replicas") != _copies(self._given):
                try:
                    profile = Profile.of(yaml.safe_load(backend.get(_PROFILE)))
                except (KeyMissing, ValueError, yaml.YAMLError) as error:
                    log.warning("%s at %s cannot be read: this start measures again. %s", _PROFILE, self.url, error)
                    return None
                log.warning(
                    "other settings than those of the stored choice: chosen again, from the profile stored with it"
                )
                return self._stored_choice(backend, profile, world_size, stored.get("host_nbytes"))
        return [stored["callback"], stored["arguments"]]

    def _stored(self, backend: Backend) -> dict[str, Any] | None:
        """Return the object of a choice; `None` if there is none, or none that can be used."""
        try:
            stored = json.loads(backend.get(_CHOICE))
        except KeyMissing:
            return None
        except ValueError:
            stored = None
        if isinstance(stored, dict) and stored.get("callback") in _KINDS and isinstance(stored.get("arguments"), dict):
            return stored
        log.warning("%s at %s is no choice: this start measures again", _CHOICE, self.url)
        return None

    def _decided(self, rows: Sequence[Any], trainer: Trainer) -> list[Any] | str | None:
        """Return a choice, why there can be none, or `None` if too little is measured; on rank 0."""
        if any(replaying for replaying, *_ in rows):
            return None
        with closing(self._backend()) as backend:
            try:
                document, known = profile_of(RunView.open(backend), needs=_NEEDS)
            except (StorageError, Corrupt, NoUsableGeneration) as error:  # an outage, or a generation removed meanwhile
                log.warning("the run's figures cannot be read: looked for again in %d steps. %s", _LOOK_STEPS, error)
                return None
            if not known.keys() >= _NEEDS:
                return None
            nodes = list(dict.fromkeys(node for _, node, *_ in rows))
            _complete(document, [rates for *_, rates, _ in rows], len(nodes), self.report.goodput.startup)
            document["cluster"]["micro_batches"] = getattr(trainer.strategy, "micro_batches", 1)
            ranks = len(rows) // len(nodes)
            try:
                return self._stored_choice(
                    backend, Profile.of(document), len(rows), ranks * min(room for *_, room in rows)
                )
            except ConfigurationError as error:
                return str(error)
            except StorageError as error:
                log.warning("the choice cannot be stored: made again in %d steps. %s", _LOOK_STEPS, error)
                return None

    def _stored_choice(self, backend: Backend, profile: Profile, world_size: int, room: int | None = None) -> list[Any]:
        policies = ["sparse", "dense"] + ["differential"] * (profile.cluster.pipeline == 1)
        best = choose(profile, self._mtbf, replicas=_copies(self._given), host_nbytes=room, policies=policies)[0]
        name, arguments = best.callback()
        told = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
        expects = 100 * best.goodput.share
        log.info("chosen for this rate of failures: %s(%s), expected goodput %.1f %%", name, told, expects)
        known = {"mtbf": self._mtbf, "replicas": _copies(self._given), "world_size": world_size, "host_nbytes": room}
        backend.put(_PROFILE, profile.text().encode())
        backend.put(_CHOICE, json.dumps({"callback": name, "arguments": arguments, **known}, indent=2).encode())
        return [name, arguments]

    def _backend(self) -> Backend:
        return open_backend(self.url, storage_options=self.storage_options)


def _made(url: str | Path, choice: Sequence[Any], shared: CheckpointArguments) -> CheckpointCallback:
    name, arguments = choice
    return _KINDS[name](url, **{**arguments, **shared})


def _copies(shared: CheckpointArguments) -> int | None:
    """Return the user's number of copies; `None` leaves the choice."""
    given = shared.get("replicas", "auto")
    return None if isinstance(given, str) else given


def _complete(
    document: Mapping[str, dict[str, Any]], rates: Sequence[Mapping[str, float]], nodes: int, startup: float
) -> None:
    """Put the numbers missing in a first start's log: speeds of the slowest rank, nodes, and presumptions."""
    cluster, costs = document["cluster"], document["costs"]
    cluster |= {"nodes": nodes, "ranks_per_node": max(1, len(rates) // nodes)}
    shared = (
        ("host", "device_host", 1),
        ("peer", "host_host", cluster["ranks_per_node"]),
        ("storage", "storage", len(rates)),
    )
    for tier, name, ranks in shared:
        if known := [each[tier] for each in rates if tier in each]:
            document["speeds"].setdefault(name, min(known) * ranks)
    document["speeds"].setdefault("device_host", 1e9)
    for name, seconds in (_PRESUMED | ({"startup": startup} if startup else {})).items():
        costs.setdefault(name, seconds)
    costs.setdefault("restore_per_nbyte", 1 / document["speeds"]["device_host"])
