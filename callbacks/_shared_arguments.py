"""Define the arguments that all checkpoint callbacks share: types, defaults, texts and checks.

A callback names its own arguments and takes the shared ones as `**shared: Unpack[CheckpointArguments]`, which type
checkers understand. Readers of signatures at run time (`help`, `inspect`, LightningCLI) see the full list instead.
Each error quotes the call as the user wrote it and names the allowed values.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Literal, TypedDict, TypeVar, get_type_hints

from lightning_moe_ckpt._units import duration
from lightning_moe_ckpt.errors import ConfigurationError
from lightning_moe_ckpt.fit import Batches, OnChange, OnMismatch
from lightning_moe_ckpt.storage import Resume, Retention
from lightning_moe_ckpt.tiers import DEFAULT_MAX_CHUNK, FailureDomain

Init = TypeVar("Init", bound=Callable[..., None])


class CheckpointArguments(TypedDict, total=False):
    """Name the keyword arguments of every checkpoint callback.

    Args:
        keep: short for `retention=Retention(last=keep)`; 2 if neither is given.
        retention: which committed generations stay, by number, step and age. The others are deleted once newer ones
            are durable and no generation that stays needs them.
        resume: `auto` continues a run found at `url` and else starts one, `must` refuses to start a new one, `never`
            always starts a new one beside it. `memory` is for one start, after storage was put back to an older state and
            a WARNING said so: like `auto`, but it restores the newer state that the nodes' memory has.
        storage_options: options of the object store, in the words of s3fs, gcsfs, adlfs or another fsspec file system. A
            path takes none.
        bandwidth: most bytes per second that each rank writes to storage, a number or text such as `400MB`, so that the
            network stays free for training; `None` for no limit. Generations that the limit leaves no time for are skipped.
        overhead_target: share of training's time that checkpoints may cost; `None` for as fast as possible. Measured while
            training, from its second second and 20th step on. Where it is more, windows start less often (`every_n_steps`
            means at most every so many), and storage and copies on other nodes rest between generations; what was more
            before is paid back.
        storage_at_least: longest time that `overhead_target` may keep windows, storage and copies waiting from one
            generation to the next: a `timedelta`, seconds, or text such as `10min`.
        replicas: copies of every rank's generations in the memory of other nodes; `auto` is one where the ranks are on
            several nodes, else none.
        redundancy: whether holders of a copy take what they have in common with its owner (what data parallelism replicates)
            from their own state, at the same boundary, so that it is not sent; `auto` if that is measured to be faster than
            the network, and shared memory has room. Costs memory and copies on the node, and no exactness.
        max_chunk: bytes per message of such a copy, a number or text such as `4MiB`. A message of training waits for at most one of them.
        failure_domains: node and rack of every rank, by rank; `None` lets each rank find out its own, or read
            `MOE_CKPT_NODE` and `MOE_CKPT_RACK`.
        batches: `reposition` makes a resumed run fetch again the batches that it repeats. `log` is for data that cannot be
            read twice: the batches of a window are stored with it, and a restart is exact up to the step at which the
            state is dense, not beyond.
        deterministic_dataset: promise that an item of the data set depends on its index alone: the data set draws from no
            random generator, or seeds it anew for every item. A restart then moves the sampler of a map-style data set
            forward, without fetching the items that the epoch has consumed.
        untouched: names of attributes of your objects that a restart leaves as your code makes them, such as `module.cache` or
            `callback.Mover.*`, where `*` stands for anything. Others are restored where training has changed them.
        attributes_nbytes: most bytes that changed attributes of your objects may take on each rank, a number or text such as
            `64MiB`; a warning names what does not fit.
        on_change: whose learning rate, weight decay and other fields of the optimizer, and arguments of schedulers, are used where
            this start sets others than the stored run has. `stored` goes on with its own; `mine` takes those of this start, from the
            step on at which the state is dense. A table at the start shows all settings that differ.
        on_mismatch: what happens where the first batch after a restart, or one of a repeated step, is not the original run's. `stop` ends
            the run with `OtherData` before it trains on it; nothing that is stored changes. `warn` logs an ERROR and trains on:
            the run is valid then, but not the same.
        stop_grace: longest time from SIGTERM to the end of the process, a `timedelta`, seconds, or text such as `25s`. Within it all ranks agree on a boundary and store
            it; what cannot be stored in time is left. Keep it below the limit of your launcher: torchrun and SLURM
            kill after 30 s.
        freeze_heap: keep objects that are alive as training begins, and after the first generation, out of garbage
            collections (`gc.freeze`) until the fit ends. Such collections hold up training for a quarter of a second now
            and then. It affects the whole process, and is not done where collections are off or frozen already.
    """

    keep: int | None
    retention: Retention | None
    resume: Resume
    storage_options: dict[str, Any] | None
    bandwidth: int | str | None
    overhead_target: float | None
    storage_at_least: timedelta | float | str
    replicas: int | Literal["auto"]
    redundancy: bool | Literal["auto"]
    max_chunk: int | str
    failure_domains: Sequence[FailureDomain] | None
    batches: Batches
    deterministic_dataset: bool
    untouched: Sequence[str]
    attributes_nbytes: int | str
    on_change: OnChange
    on_mismatch: OnMismatch
    stop_grace: timedelta | float | str
    freeze_heap: bool


DEFAULTS: CheckpointArguments = {
    "keep": None,
    "retention": None,
    "resume": "auto",
    "storage_options": None,
    "bandwidth": None,
    "overhead_target": 0.03,
    "storage_at_least": timedelta(minutes=10),
    "replicas": "auto",
    "redundancy": "auto",
    "max_chunk": DEFAULT_MAX_CHUNK,
    "failure_domains": None,
    "batches": "reposition",
    "deterministic_dataset": False,
    "untouched": (),
    "attributes_nbytes": 64 * 2**20,
    "on_change": "stored",
    "on_mismatch": "stop",
    # Within the 30 s that launchers commonly give, with time left for the rest of the script.
    "stop_grace": timedelta(seconds=25),
    "freeze_heap": True,
}


def spelled_out(init: Init) -> Init:
    """Replace `**shared` in the signature of an `__init__` by the shared arguments, and set their docstring."""
    signature = inspect.signature(init)
    own = [each for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD]
    defaults: dict[str, object] = dict(DEFAULTS)
    shared = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=defaults[name], annotation=hint)
        for name, hint in get_type_hints(CheckpointArguments).items()
    ]
    init.__signature__ = signature.replace(parameters=[*own, *shared])  # type: ignore[attr-defined]
    init.__doc__ = CheckpointArguments.__doc__
    return init


def complete(owner: object, shared: CheckpointArguments) -> CheckpointArguments:
    """Check the given arguments and add defaults for the others.

    Raises:
        TypeError: an argument that `owner` does not have.
        ConfigurationError: an argument is out of range.
    """
    _refuse_unknown(owner, list(shared))
    whole: CheckpointArguments = {**DEFAULTS, **shared}
    keep, retention = whole["keep"], whole["retention"]
    require_count(owner, "keep", keep, what="generations, of which one is resumed from", also=[None])
    if keep is not None and retention is not None:
        raise ConfigurationError(
            f"`{_name(owner)}(keep={keep}, retention={retention})`: `keep` is short for "
            f"`retention=Retention(last={keep})`. Give one of the two."
        )
    if not isinstance(retention, Retention | None):
        raise ConfigurationError(
            f"`{_name(owner)}(retention={retention!r})` must be a Retention, such as Retention(last=3)."
        )
    _check_rest(owner, whole)
    return whole


def _check_rest(owner: object, whole: CheckpointArguments) -> None:
    require_choice(owner, "resume", whole["resume"], ("auto", "must", "never", "memory"))
    if not isinstance(whole["storage_options"], dict | None):
        raise ConfigurationError(
            f"`{_name(owner)}(storage_options={whole['storage_options']!r})` must be a dict: arguments of the file "
            "system of the URL."
        )
    target = whole["overhead_target"]
    if target is not None and not (isinstance(target, float) and 0 < target < 1):
        raise ConfigurationError(
            f"`{_name(owner)}(overhead_target={target!r})` must be None or a share of training's time, above 0 and below 1."
        )
    longest = duration(owner, "storage_at_least", whole["storage_at_least"])
    if longest <= timedelta(0):
        raise ConfigurationError(f"`{_name(owner)}(storage_at_least={longest})` must be positive.")
    require_count(owner, "replicas", whole["replicas"], what="copies", also=["auto", 0])
    if whole["redundancy"] not in (True, False, "auto"):
        raise ConfigurationError(f"`{_name(owner)}(redundancy={whole['redundancy']!r})` must be True, False or 'auto'.")
    require_choice(owner, "batches", whole["batches"], ("reposition", "log"))
    untouched = whole["untouched"]
    if isinstance(untouched, str) or not all(isinstance(each, str) for each in untouched):
        raise ConfigurationError(
            f"`{_name(owner)}(untouched={untouched!r})` must be a list of names, such as ['module.cache', 'callback.Mover.*']."
        )
    require_choice(owner, "on_change", whole["on_change"], ("stored", "mine"))
    require_choice(owner, "on_mismatch", whole["on_mismatch"], ("stop", "warn"))
    duration(owner, "stop_grace", whole["stop_grace"])


def _refuse_unknown(owner: object, names: Sequence[str]) -> None:
    takes = list(inspect.signature(type(owner)).parameters)
    for name in names:
        if name not in DEFAULTS:
            near = difflib.get_close_matches(name, takes, n=1)
            hint = f"Did you mean `{near[0]}`?" if near else f"It takes {', '.join(takes)}."
            raise TypeError(f"`{_name(owner)}({name}=...)`: there is no such argument. {hint}")


def _name(owner: object) -> str:
    return type(owner).__name__


def require_count(owner: object, name: str, value: object, *, what: str, also: Sequence[object] = ()) -> None:
    """Raise unless `value` is an integer of at least 1, or one of `also`.

    Args:
        owner: the object whose constructor took the argument.
        name: name of the argument.
        value: the value that the user gave.
        what: what the number counts; the message says it.
        also: other values that are allowed.

    Raises:
        ConfigurationError: the message shows the call.
    """
    if any(value is each or value == each for each in also) and not isinstance(value, bool):
        return
    # A bool is an int to Python, never to whoever wrote it.
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return
    others = "".join(f"{each!r} or " for each in also)
    raise ConfigurationError(f"`{type(owner).__name__}({name}={value!r})` must be {others}1 or more {what}.")


def require_choice(owner: object, name: str, value: object, choices: Sequence[str | None]) -> None:
    """Raise unless `value` is one of `choices`.

    Raises:
        ConfigurationError: the message shows the call.
    """
    if value not in choices:
        listed = ", ".join(map(repr, choices[:-1])) + f" or {choices[-1]!r}"
        raise ConfigurationError(f"`{type(owner).__name__}({name}={value!r})` must be {listed}.")
