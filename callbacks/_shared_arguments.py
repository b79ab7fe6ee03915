"""Define the arguments that all checkpoint callbacks share, each twice: the type and text that users see, and its attribute.

A callback names its own arguments and takes the shared ones as `**shared: Unpack[CheckpointArguments]`, which type
checkers understand. Readers of signatures at run time (`help`, `inspect`, LightningCLI) see the full list instead.
Each error quotes the call as the user wrote it and names the allowed values.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Literal, NamedTuple, TypedDict, TypeVar, get_args, get_type_hints

from lightning_moe_ckpt._units import duration, number_of_bytes
from lightning_moe_ckpt.errors import ConfigurationError
from lightning_moe_ckpt.fit import Batches, OnChange, OnMismatch
from lightning_moe_ckpt.process import OnFault
from lightning_moe_ckpt.storage import Resume, Retention
from lightning_moe_ckpt.tiers import DEFAULT_MAX_CHUNK, Elastic, FailureDomain

T = TypeVar("T")
Init = TypeVar("Init", bound=Callable[..., object])


class StorageArguments(TypedDict, total=False):
    """The shared arguments about storage and its cost; for their meaning see `CheckpointArguments`."""

    keep: int | None
    retention: Retention | None
    resume: Resume
    storage_options: dict[str, Any] | None
    bandwidth: int | str | None
    overhead_target: float | None
    storage_at_least: timedelta | float | str


class CheckpointArguments(StorageArguments, total=False):
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
            training, from its second second and 20th step on. Where it is more, storage and copies on other nodes rest,
            and windows start less often, unless their distance is your number: the log has one that would meet the target.
        storage_at_least: longest time that `overhead_target` may keep windows, storage and copies waiting from one
            generation to the next: a `timedelta`, seconds, or text such as `10min`.
        replicas: copies of every rank's generations in the memory of other nodes; `auto` is one where the ranks are on
            several nodes, else none.
        memory_generations: generations in shared memory. With 2 a new generation waits for tiers that still read the
            one before the newest; 3 leaves them time. `auto` takes 3 where they are at most half of the memory that is free on a node.
        redundancy: whether holders of a copy take what they have in common with its owner (what data parallelism replicates)
            from their own state, at the same boundary, so that it is not sent; `auto` if the run's first start has measured that to be
            faster than the network, and shared memory has room. Costs memory and copies on the node, and no exactness.
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
        audit_every_n_steps: steps from one audit to the next; `None` for none. An audit compares what ranks should hold alike, and has a step's
            forward and backward done twice, on another rank where there is one, to find devices that compute wrong. The log
            says at the start what it costs, and what cannot be audited.
        on_fault: what follows where an audit finds other bits. `warn` logs an ERROR and trains on; `stop` ends the run with `SilentFault` before
            the optimizer steps; `restart` puts a spare of `moe-ckpt run` in the named rank's place. With either, generations since
            the last clean audit are void.
        stop_grace: longest time from SIGTERM to the end of the process, a `timedelta`, seconds, or text such as `25s`. Within it all ranks agree on a boundary and store
            it; what cannot be stored in time is left. Keep it below the limit of your launcher: torchrun and SLURM
            kill after 30 s.
        elastic: `auto` resumes from what another number of ranks wrote, or ranks that shared the model otherwise (`expert_parallel`, stages,
            shards); a WARNING names what is not exact then. `refuse` raises `IdentityMismatch`.
        freeze_heap: keep objects that are alive as training begins, and after the first generation, out of garbage
            collections (`gc.freeze`) until the fit ends. Such collections hold up training for a quarter of a second now
            and then. It affects the whole process, and is not done where collections are off or frozen already.
    """

    replicas: int | Literal["auto"]
    memory_generations: Literal["auto", 2, 3]
    redundancy: bool | Literal["auto"]
    max_chunk: int | str
    failure_domains: Sequence[FailureDomain] | None
    batches: Batches
    deterministic_dataset: bool
    untouched: Sequence[str]
    attributes_nbytes: int | str
    on_change: OnChange
    on_mismatch: OnMismatch
    audit_every_n_steps: int | None
    on_fault: OnFault
    stop_grace: timedelta | float | str
    elastic: Elastic
    freeze_heap: bool


Rule = Callable[[object, str, Any], Any]
"""Called with the callback, the name of an argument and its value. Returns the value in its final type, or raises."""


class _Argument(NamedTuple):
    default: object
    rule: Rule


def _argument(default: object, rule: Rule = lambda _owner, _name, value: value) -> Any:
    return _Argument(default, rule)


def require_count(owner: object, name: str, value: T, *, what: str, also: Sequence[object] = ()) -> T:
    """Return `value`, which has to be an integer of at least 1, or one of `also`.

    Args:
        owner: the object whose constructor took the argument.
        name: name of the argument.
        value: the value that the user gave.
        what: what the number counts; the message says it.
        also: other values that are allowed.

    Raises:
        ConfigurationError: the message shows the call.
    """
    # A bool is an int to Python, never to whoever wrote it.
    if isinstance(value, bool) or not (value in also or (isinstance(value, int) and value >= 1)):
        raise ConfigurationError(
            _call(owner, name, value) + f"{''.join(f'{each!r} or ' for each in also)}1 or more {what}."
        )
    return value


def require_choice(owner: object, name: str, value: T, choices: Sequence[object]) -> T:
    """Return `value`, which has to be one of `choices`.

    Raises:
        ConfigurationError: the message shows the call.
    """
    if value not in choices:
        raise ConfigurationError(
            _call(owner, name, value) + ", ".join(map(repr, choices[:-1])) + f" or {choices[-1]!r}."
        )
    return value


def _options(owner: object, name: str, value: object) -> object:
    if not isinstance(value, dict | None):
        raise ConfigurationError(_call(owner, name, value) + "a dict: arguments of the file system of the URL.")
    return value


def _share_of_time(owner: object, name: str, value: object) -> object:
    if value is not None and not (isinstance(value, float) and 0 < value < 1):
        raise ConfigurationError(_call(owner, name, value) + "None or a share of training's time, above 0 and below 1.")
    return value


def _positive_duration(owner: object, name: str, value: object) -> timedelta:
    if (longest := duration(owner, name, value)) <= timedelta(0):
        raise ConfigurationError(f"`{_name(owner)}({name}={longest})` must be positive.")
    return longest


def _names(owner: object, name: str, value: Any) -> tuple[str, ...]:
    if isinstance(value, str) or not all(isinstance(item, str) for item in value):
        raise ConfigurationError(
            _call(owner, name, value) + "a list of names, such as ['module.cache', 'callback.Mover.*']."
        )
    return tuple(value)


class SharedArguments:
    """The shared arguments as attributes, in their final types; each with its default and the rule that leads there."""

    retention: Retention = _argument(None)
    resume: Resume = _argument("auto", partial(require_choice, choices=get_args(Resume)))
    storage_options: dict[str, Any] | None = _argument(None, _options)
    bandwidth: int | None = _argument(None, partial(number_of_bytes, also=[None]))
    overhead_target: float | None = _argument(0.03, _share_of_time)
    storage_at_least: timedelta = _argument(timedelta(minutes=10), _positive_duration)
    replicas: int | Literal["auto"] = _argument("auto", partial(require_count, what="copies", also=["auto", 0]))
    memory_generations: Literal["auto", 2, 3] = _argument("auto", partial(require_choice, choices=("auto", 2, 3)))
    redundancy: bool | Literal["auto"] = _argument("auto", partial(require_choice, choices=(True, False, "auto")))
    max_chunk: int = _argument(DEFAULT_MAX_CHUNK, number_of_bytes)
    failure_domains: Sequence[FailureDomain] | None = _argument(None)
    batches: Batches = _argument("reposition", partial(require_choice, choices=get_args(Batches)))
    deterministic_dataset: bool = _argument(default=False)
    untouched: tuple[str, ...] = _argument((), _names)
    attributes_nbytes: int = _argument(64 * 2**20, number_of_bytes)
    on_change: OnChange = _argument("stored", partial(require_choice, choices=get_args(OnChange)))
    on_mismatch: OnMismatch = _argument("stop", partial(require_choice, choices=get_args(OnMismatch)))
    audit_every_n_steps: int | None = _argument(None, partial(require_count, what="steps", also=[None]))
    on_fault: OnFault = _argument("warn", partial(require_choice, choices=get_args(OnFault)))
    # Within the 30 s that launchers commonly give, with time left for the rest of the script.
    stop_grace: timedelta = _argument(timedelta(seconds=25), duration)
    elastic: Elastic = _argument("auto", partial(require_choice, choices=get_args(Elastic)))
    freeze_heap: bool = _argument(default=True)

    def _take(self, shared: CheckpointArguments) -> None:
        """Check the given arguments, and set all attributes.

        Raises:
            TypeError: an argument that this callback does not have.
            ConfigurationError: an argument is out of range.
        """
        _refuse_unknown(self, list(shared))
        given: dict[str, Any] = {**DEFAULTS, **shared}
        keep, retention = given.pop("keep"), given["retention"]
        require_count(self, "keep", keep, what="generations, of which one is resumed from", also=[None])
        if keep is not None and retention is not None:
            raise ConfigurationError(
                f"`{_name(self)}(keep={keep}, retention={retention})`: `keep` is short for "
                f"`retention=Retention(last={keep})`. Give one of the two."
            )
        if not isinstance(retention, Retention | None):
            raise ConfigurationError(_call(self, "retention", retention) + "a Retention, such as Retention(last=3).")
        given["retention"] = retention or (Retention() if keep is None else Retention(last=keep))
        for name, value in given.items():
            setattr(self, name, _ARGUMENTS[name].rule(self, name, value))


_ARGUMENTS = {name: each for name, each in vars(SharedArguments).items() if isinstance(each, _Argument)}
DEFAULTS: dict[str, object] = {"keep": None, **{name: argument.default for name, argument in _ARGUMENTS.items()}}


def spelled_out(init: Init) -> Init:
    """Replace `**shared` in a signature by the shared arguments; an `__init__` gets their docstring."""
    signature = inspect.signature(init)
    own = [parameter for parameter in signature.parameters.values() if parameter.kind is not parameter.VAR_KEYWORD]
    keyword, hints = inspect.Parameter.KEYWORD_ONLY, get_type_hints(CheckpointArguments).items()
    shared = [inspect.Parameter(name, keyword, default=DEFAULTS[name], annotation=hint) for name, hint in hints]
    init.__signature__ = signature.replace(parameters=[*own, *shared])  # type: ignore[attr-defined]
    init.__doc__ = init.__doc__ or CheckpointArguments.__doc__
    return init


def _refuse_unknown(owner: object, names: Sequence[str]) -> None:
    takes = list(inspect.signature(type(owner)).parameters)
    for name in names:
        if name not in DEFAULTS:
            near = difflib.get_close_matches(name, takes, n=1)
            hint = f"Did you mean `{near[0]}`?" if near else f"It takes {', '.join(takes)}."
            raise TypeError(f"`{_name(owner)}({name}=...)`: there is no such argument. {hint}")


def _name(owner: object) -> str:
    return type(owner).__name__


def _call(owner: object, name: str, value: object) -> str:
    """Return the begin of a message that quotes an argument as the user wrote it."""
    return f"`{_name(owner)}({name}={value!r})` must be "
