"""Open a run: find the generation to resume, and make all parts that capture and store the state of this incarnation."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from lightning_moe_ckpt.coordination import Exchange
from lightning_moe_ckpt.errors import StorageError
from lightning_moe_ckpt.launch import Supervised
from lightning_moe_ckpt.planning import Planner
from lightning_moe_ckpt.process import Balance, HookClock, Origin, RunAccount, read_account
from lightning_moe_ckpt.recovery import (
    Frozen,
    Replay,
    RestoreSource,
    ResumeRequest,
    RunOpener,
    follow_found,
    is_superseded,
    replay_of,
)
from lightning_moe_ckpt.session._capture import CaptureSession
from lightning_moe_ckpt.session._dense import DenseCapture
from lightning_moe_ckpt.session._job import SessionJob
from lightning_moe_ckpt.session._tiers import Tiers
from lightning_moe_ckpt.snapshot import Identity, WindowLayout, describe_stages
from lightning_moe_ckpt.tiers import (
    STORAGE,
    HostWorker,
    Markers,
    PersistWorker,
    RankMemory,
    Rings,
    claim_memory,
    join_peers,
    shared_directory,
)


@dataclass(frozen=True)
class OpenRun:
    """Parts of a session that exist once its run is open."""

    job: SessionJob
    opener: RunOpener
    found: RestoreSource | None
    """The generation to resume; `None` for a fresh start."""
    planner: Planner
    memory: RankMemory
    storage: PersistWorker
    tiers: Tiers
    dense: DenseCapture
    capture: CaptureSession
    account: RunAccount

    def memory_is_superseded(self, *, ask: bool = False) -> bool:
        """Return whether no restart needs this rank's memory; `ask` storage, or go by generations known here."""
        found, storage = self.found, self.storage
        known = [self.tiers.everywhere.get(STORAGE), found.generation if found and found.committed else None]
        if self.job.exchange.is_coordinator:
            known.append(storage.newest)  # the coordinator committed it
        stored = None if self.job.policy.exact else storage.marker_of
        return is_superseded(self.memory, known, self.opener.store if ask else None, stored=stored)

    def close(self, *, keep_memory: bool) -> None:
        """End all threads, and release the backend and memory, superseded memory for good unless `keep_memory`."""
        self.capture.close()
        self.tiers.close()
        self.account.close()
        self.tiers.release(unlink=not keep_memory and self.memory_is_superseded(ask=True))
        self.opener.close()


def open_run(
    job: SessionJob, planner: Planner, clock: HookClock, *, load: bool
) -> tuple[OpenRun, WindowLayout | None, Replay | None]:
    """Open the run and make its parts, with one worker per tier, in the same order on all ranks. Return it with the layout of a
    restored generation, if there is one, and the generation's replay if it is to `load`. Collective.

    Where constants change what trains, another planner takes `planner`'s place. Ranks may differ in `load`, see `Planner.settle`. `clock` has the time in hooks.
    """
    began, supervised = time.monotonic(), Supervised.from_environment()
    config, policy, view, groups, exchange = job.config, job.policy, job.view, job.groups, job.exchange
    identity = Identity.of_job(job.operators, view, groups, job.autocast_dtype, exchange)
    opener = RunOpener(config.url, config.storage_options, exchange, groups, bandwidth=config.bandwidth)
    with ExitStack() as failed:
        failed.callback(opener.close)
        found = opener.open(
            resume=config.resume,
            job=ResumeRequest(
                identity=identity,
                view=view,
                groups=groups,
                may_lack_experts=policy.allow_missing_experts,
                elastic=config.elastic == "auto" and load,
                journals=job.journals,
                period_steps=job.least_steps,
                only_tag=config.densify if config.rerun is None else config.rerun.tag,
                rerun=config.rerun,
            ),
        )
        if supervised is not None and config.rerun is None:
            files = shared_directory() / f"moe-ckpt-{os.getuid()}-{opener.claim.tag}-"
            supervised.leaves(str(files), opener.store.url, config.storage_options)
        resumed, stored = (None, None) if found is None else (found.generation, found.policy)
        planner = planner.settle(opener.store, opener.name(0), stored, load=load)
        markers = Markers(
            run_id=opener.target.run_id,
            rank=groups.rank,
            world_size=groups.world_size,
            policy={"policy": policy.kind, **identity.policy(), **planner.constants.policy},
            module=describe_stages(view.module, view.schema, job.extra, exchange, groups),
            lineage=opener.target.lineage,
        )
        with exchange.raise_together():
            nbytes, older = planner.sizes.dense_nbytes, not policy.exact or policy.chains is not None
            memory = RankMemory(opener.claim.tag, groups.rank, url=opener.claim.tag)
            if config.rerun is None:
                memory = claim_memory(opener.claim, groups.rank, resumed, dense_nbytes=nbytes, older=older)
            failed.callback(memory.close, unlink=False)  # another rank may fail here, or while tiers are joined
        pays, balances, origins = _known_of_the_run(opener, memory, supervised, exchange)
        account = RunAccount(clock, balances, origins, began)
        memory.on_ring = lambda ring: account.move(ring.account)
        layout, replay = None, None
        if found is not None and load:  # its bytes travel while tiers are joined
            layout, replay = replay_of(
                *(found, view, groups, exchange, job.engine),
                frozen=partial(Frozen, whole=job.compiled, omits=job.omits),
                as_user=job.journals.as_user,
            )
        elif found is not None:  # exchanges as above, with ranks that load
            layout = follow_found(found, view, groups, exchange)
        run = _joined(job, opener, found, planner=planner, memory=memory, markers=markers, account=account, pays=pays)
        measured, reached = run.tiers.governor.measured, None if found is None else found.generation.step
        account.begin(reached, 0 if found is None else found.first_step, measured)
        failed.pop_all()
    return run, layout, replay


def _known_of_the_run(
    opener: RunOpener, memory: RankMemory, supervised: Supervised | None, exchange: Exchange
) -> tuple[bool | None, list[Balance], list[Origin]]:
    """Return whether mirrors paid in an earlier start, all accounts of earlier incarnations, in memory and in the log, and
    what ranks know of their starts. Collective.
    """
    accounts, pays, origin = memory.accounts, None, Origin.here(0.0 if supervised is None else supervised.noticed)
    if exchange.is_coordinator:
        with suppress(StorageError):  # for people only: what memory has is newer where it is there
            figures = opener.store.told()
            accounts += [found for found in [read_account(figures)] if found is not None]
            pays = figures.get("mirrors_pay") if figures.get("world_size") == exchange.world_size else None
    own = list(origin), [account.plain() for account in accounts], pays if isinstance(pays, bool) else None
    starts, plain, (pays, *_) = zip(*cast("list[Any]", exchange.gather_values(list(own))), strict=True)
    return pays, [Balance.of(each) for each_of in plain for each in each_of], [Origin(*row) for row in starts]


def _joined(
    job: SessionJob,
    opener: RunOpener,
    found: RestoreSource | None,
    *,
    planner: Planner,
    memory: RankMemory,
    markers: Markers,
    account: RunAccount,
    pays: bool | None,
) -> OpenRun:
    """Make the tiers' workers, and all that captures for them."""
    policy, is_first = job.policy, job.exchange.is_coordinator
    storage = PersistWorker(
        opener.target,
        markers,
        retention=job.config.retention,
        commit_timeout=job.config.commit_timeout,
        duplicated=[] if policy.exact else [each.name for each in job.operators if each.kind == "expert"],
        on_complete=memory.saw if is_first else None,
    )
    peers = join_peers(
        *(job.config, opener.claim, markers, job.exchange, job.groups),
        dense_nbytes=planner.sizes.dense_nbytes,
        resumed=None if found is None else found.generation,
        plan=planner,
        device=job.device,
        may_lack_nodes=found is not None,
        pays=pays,
    )
    workers = [HostWorker(memory, markers), storage, *peers]
    paced = None if policy.chains else job.config  # differences are taken at every step
    tiers = Tiers(workers, watcher=planner.tokens, config=paced, bound=policy.bound, speaks=is_first)
    # A number of steps that the user has given, and differences at every step, are promises.
    tiers.governor.calm = found is None and not policy.bound and policy.chains is None
    planner.joined(workers)
    return OpenRun(
        *(job, opener, found, planner, memory, storage, tiers),
        dense=DenseCapture(job, name=opener.name, worker=storage, plans=planner),
        capture=CaptureSession(job, name=opener.name, tiers=tiers, plans=planner, rings=Rings(memory, job.engine)),
        account=account,
    )
