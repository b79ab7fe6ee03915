"""Draws runs of the random campaign, spells one as a line that repeats it, and makes a failing one smaller."""

from __future__ import annotations

import dataclasses
import json
import random
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, get_args

from door import HookPhase, Phase
from typing_extensions import Self

from campaign._drawn import Drawn
from campaign._drawn_hooks import HOOKS, LATER
from campaign._drawn_values import VALUES, Place
from campaign._optimizers import TABLELESS
from campaign._training import Checkpointing
from lightning_moe_ckpt.testing import Kill

PHASES: tuple[Phase, ...] = tuple(
    phase for phase in get_args(HookPhase) if phase not in {"sanity_check", "epoch_start", "epoch_end"}
)
"""Moments of a batch; those of an epoch are drawn apart."""

_STUTTER = 0.1
"""Share of the runs whose store fails at times."""


@dataclass(frozen=True)
class Case:
    """A training and where its lives end."""

    setup: Drawn
    kills: tuple[Kill, ...]
    drawn: ClassVar[type[Drawn]] = Drawn

    @property
    def named(self) -> str | None:
        """What the log says of this run at its start, where its restarts may not be exact; `None` if they have to be."""
        setup = self.setup
        streams = setup.data in {"sized_stream", "stream", "shuffled_stream"}
        if setup.loader == "stateful" and setup.persistent and (setup.augment or setup.holds != "nothing" or streams):
            return "`StatefulDataLoader(persistent_workers=True)` keeps their state to itself"
        return None

    def line(self) -> str:
        """Everything that is not the default, as one line of JSON."""
        setup = _spelled(replace(self.setup, checkpointing=None), self.drawn())
        assert self.setup.checkpointing is not None
        checkpointing = _spelled(self.setup.checkpointing, Checkpointing(policy="dense"))
        kills = [_spelled(kill, Kill(phase="random_time")) for kill in self.kills]
        return json.dumps({"setup": setup, "checkpointing": checkpointing, "kills": kills})

    @classmethod
    def parse(cls, line: str) -> Self:
        """The case that a line spells."""
        read = json.loads(line)
        checkpointing = Checkpointing(**{"policy": "dense", **_tuples(read["checkpointing"])})
        setup = cls.drawn(checkpointing=checkpointing, **_tuples(read["setup"]))
        kills = [{"phase": "random_time", "signal": signal.SIGKILL, **kill} for kill in read["kills"]]
        return cls(setup, tuple(Kill(**{**kill, "signal": signal.Signals(kill["signal"])}) for kill in kills))


def _spelled(value: Any, default: Any) -> dict[str, Any]:
    names = [field.name for field in dataclasses.fields(value)]
    return {name: getattr(value, name) for name in names if getattr(value, name) != getattr(default, name)}


def _tuples(value: dict[str, Any]) -> dict[str, Any]:
    def frozen(each: Any) -> Any:
        return tuple(frozen(one) for one in each) if isinstance(each, list) else each

    return {name: frozen(item) for name, item in value.items()}


def draw(seed: int) -> Case:
    """The case of a number, the same every time."""
    rng = random.Random(seed)
    while True:
        setup = _sensible(rng, _setup(rng))
        if setup is not None:
            setup = _further(random.Random(-1 - seed), setup)
            kills = tuple(_kill(rng, setup) for _ in range(rng.choice([1, 1, 2, 2, 3, 4])))
            kills = _stops(random.Random(-2 - seed), setup, kills)
            setup = _sharding(random.Random(f"shards {seed}"), _comes_again(setup, kills))
            return Case(_stuttering(random.Random(f"store {seed}"), setup), kills)


def _sharding(rng: random.Random, setup: Drawn) -> Drawn:
    """At times with an optimizer in shards, if it steps elements apart from each other. Not for hooks that look for a parameter in an
    optimizer, nor with a scaler, which refuses hooks that read gradients.
    """
    apart = setup.world_size > 1 and setup.strategy == "moe" and not setup.other and setup.precision != "16-mixed"
    known = {"reads_state", "replaces"}.isdisjoint(setup.hooks)
    return replace(setup, shard_optimizer=apart and known and rng.random() < 0.5)


def _stuttering(rng: random.Random, setup: Drawn) -> Drawn:
    """At times with a store of which many calls fail; each of its own random numbers, so that other draws stay as they were."""
    if setup.checkpointing is None or rng.random() >= _STUTTER:
        return setup
    return replace(setup, checkpointing=replace(setup.checkpointing, stutters=rng.choice([5, 15])))


def _stops(rng: random.Random, setup: Drawn, kills: Sequence[Kill]) -> tuple[Kill, ...]:
    """Some of them as a cluster that wants its machines back: a signal to all ranks and their workers, that lets them finish."""
    asked: dict[str, Any] = {"signal": signal.SIGTERM, "group": True, "everyone": setup.world_size > 1, "settle": 0.0}
    return tuple(replace(kill, **asked) if rng.random() < 0.15 else kill for kill in kills)


def _comes_again(setup: Drawn, kills: Sequence[Kill]) -> Drawn:
    """Without hooks that edit at the end of an epoch where `max_steps` may cut it short and a kill strike behind the last save, or a
    signal that lets the run finish: what they edit there is documented to be no part of a longer run.
    """
    late = any(kill.phase == "random_time" or kill.signal == signal.SIGTERM for kill in kills)
    if "max_steps" not in dict(setup.trainer) or not late:
        return setup
    return replace(setup, hooks=tuple(hook for hook in setup.hooks if hook not in {"edits", "clears"}))


def smaller(case: Case) -> Iterator[Case]:
    """Cases with one thing less, those first that take away most."""
    for index in range(len(case.kills)):
        if len(case.kills) > 1:
            yield replace(case, kills=case.kills[:index] + case.kills[index + 1 :])
    plain = case.drawn()
    for field in dataclasses.fields(plain):
        value, default = getattr(case.setup, field.name), getattr(plain, field.name)
        if field.name in {"trainer", "options", "user_callbacks", "hooks", "remembers", "changed"}:
            for index in range(len(value)):
                yield replace(case, setup=replace(case.setup, **{field.name: value[:index] + value[index + 1 :]}))
        elif field.name not in {"checkpointing", "epochs", "batches"} and value != default:
            yield replace(case, setup=replace(case.setup, **{field.name: default}))
    assert case.setup.checkpointing is not None
    for checkpointing in (Checkpointing(policy="dense"), Checkpointing(policy="sparse", window=2)):
        if len(_spelled(case.setup.checkpointing, checkpointing)) > 0:
            yield replace(case, setup=replace(case.setup, checkpointing=checkpointing))
            break


def shrink(case: Case, fails: Callable[[Case], bool], attempts: int = 60) -> Case:
    """A case that still fails and of which nothing can be taken away, as far as `attempts` runs tell."""
    found = True
    while found and attempts > 0:
        found = False
        for candidate in smaller(case):
            attempts -= 1
            if attempts >= 0 and fails(candidate):
                case, found = candidate, True
                break
    return case


# -- drawing


def _one(rng: random.Random, shares: Mapping[str, float]) -> Any:
    """One value by weight. Not a `str` to type checkers, whom fields tell which ones there are."""
    return rng.choices(list(shares), list(shares.values()))[0]


def _some(rng: random.Random, shares: Mapping[str, float]) -> Any:
    """Each value with a probability of its own."""
    return tuple(name for name, share in shares.items() if rng.random() < share)


def _setup(rng: random.Random) -> Drawn:
    def some(probability: float) -> bool:
        return rng.random() < probability

    batches = rng.randint(2, 7)
    world_size = 3 if some(0.12) else 1
    data = _one(rng, {"map": 12, "sized_stream": 2, "stream": 2, "shuffled_stream": 2, "combined": 3, "by_epoch": 3})
    workers = rng.choice([1, 2]) if some(0.25) else 0
    model = _one(
        rng,
        {"lists": 5, "batch_norm": 3, "tied": 3, "stacked": 3, "biased": 1, "counting": 1, "dense": 1, "mixtral": 0.5},
    )
    validated = some(0.6)
    return Drawn(
        model=model,
        options=_options(rng, model),
        checkpointing=_checkpointing(rng),
        loader="stateful" if some(0.25) else "plain",
        workers=workers,
        persistent=workers > 0 and some(0.4),
        augment=some(0.6),
        batches=batches,
        batch_size=rng.choice([2, 3, 4]),
        ragged=rng.choice([0, 0, 1, 2]) if world_size == 1 else 0,
        drop_last=some(0.2),
        epochs=rng.randint(2, 4),
        accumulate=rng.choice([1, 1, 1, 2, 3]),
        validate_every=1 if validated else None,
        validation_loaders=rng.choice([1, 1, 2]),
        precision=_one(rng, {"32-true": 6, "bf16-mixed": 2, "bf16-true": 1, "16-mixed": 1}),
        clip=rng.choice([None, 0.5, 0.5]),
        clip_algorithm=_one(rng, {"norm": 3, "value": 1}),
        optimizer=rng.choice(["adamw", "adamw_foreach", "adamw_fused", "adam", "sgd"]),
        amsgrad=some(0.15),
        groups=rng.choice([1, 2, 3]),
        scheduler=rng.choice(["none", "cosine", "epoch"]),
        one_cycle=some(0.15),
        plateau=(rng.choice(["step", "epoch"]), rng.choice([1, 2])) if some(0.15) else None,
        world_size=world_size,
        strategy="moe" if some(0.8) else "ddp_ordered",
        expert_parallel=3 if some(0.5) else 1,
        averaged=rng.choice(["ema", "mean"]) if some(0.08) else None,
        balanced_by="callback" if model == "biased" else None,
        trainer=_trainer(rng, validated=validated, batches=batches),
        logged=some(0.2),
        growing_accumulation=False,
        data=data,
        combined=rng.choice(["min_size", "max_size_cycle", "max_size"]),
        sampler=_one(rng, {"shuffle": 4, "own_generator": 1, "sequential": 1, "replacement": 1}),
        holds=_one(rng, {"nothing": 9, "numpy": 1, "random": 1, "torch": 1}),
        user_callbacks=_some(rng, {"early_stopping": 0.1, "best": 0.15, "every_two_steps": 0.1}),
        logger=some(0.15),
        compiled=some(0.01),
        toggled=some(0.08),
        seeded=some(0.15),
    )


def _further(rng: random.Random, setup: Drawn) -> Drawn:
    """What is drawn apart from the rest, so that a number means the same run but for this."""
    changes: dict[str, Any] = {"hooks": _hooks(rng, setup)}
    user_callbacks = _some(
        rng, {"every_two_epochs": 0.05, "exception": 0.05, "learning_rate": 0.3 if setup.logger else 0}
    )
    if "odd_buffers" in changes["hooks"]:  # Lightning loads the file at the next start, and torch no expanded buffer
        user_callbacks = tuple(callback for callback in user_callbacks if callback != "exception")
    changes["user_callbacks"] = (*setup.user_callbacks, *user_callbacks)
    if setup.data != "combined" and rng.random() < 0.2:
        changes["batch_of"] = rng.choice(["dict", "class", "random"])
    if setup.data != "by_epoch" and rng.random() < 0.15:
        changes["datamodule"] = True
    if setup.data == "map" and setup.sampler == "shuffle" and rng.random() < 0.25:
        kinds = ["weighted", "by_epoch", *(["varying"] if _any_batches(setup) else [])]
        changes["sampler"] = rng.choice(kinds)
    if setup.scheduler == "cosine" and rng.random() < 0.4:
        changes["further_scheduler"] = rng.choice(["sequential", "chained", "restarts", "cyclic"])
        changes["frequency"] = rng.choice([1, 1, 2])
    elif setup.scheduler != "epoch" and not setup.one_cycle and setup.plateau is None and rng.random() < 0.2:
        changes["further_optimizer"] = rng.choice(["tensor_lr", "nesterov", "no_momentum", "maximize"])
    if setup.precision == "32-true" and "odd_buffers" not in changes["hooks"] and rng.random() < 0.05:
        changes["precision"] = "64-true" if setup.model != "mixtral" else "32-true"  # torch groups no such matrices
    changes["tensorboard"] = setup.logger and rng.random() < 0.4
    grows = setup.accumulate == 1 and rng.random() < 0.08
    # Else it may never step again.
    changes["growing_accumulation"] = grows and not {"skips_rest", "accumulates"} & {*changes["hooks"]}
    changes["emulated"] = rng.random() < 0.1
    changes["remembers"] = _remembers(setup)
    setup = replace(setup, **changes, checkpointing=_paced(rng, setup.checkpointing))
    setup = replace(setup, **_counts(random.Random(f"counts {setup!r}"), setup))
    changed = _changed(random.Random(repr(setup)), setup)
    return replace(setup, changed=changed, other=_other(random.Random(f"optimizer {setup!r}"), setup))


def _other(rng: random.Random, setup: Drawn) -> str:
    """In a tenth of the runs an optimizer in no table."""
    can = others_of(setup)
    return rng.choice(can) if can and rng.random() < 0.1 else ""


def others_of(setup: Drawn) -> list[str]:
    """Return the optimizers in no table that the policy takes, if nothing asks for options of its own."""
    if setup.compiled or setup.one_cycle or "reads_state" in setup.hooks or setup.checkpointing is None:
        return []
    policy = setup.checkpointing.policy
    can = [*TABLELESS]
    if policy in {"sparse", "dense", "differential"}:
        can += ["by_hand", "adafactor", "lamb", "per_matrix", "row_by_row"]
    return can


def _counts(rng: random.Random, setup: Drawn) -> dict[str, Any]:
    """In a quarter of the runs data that counts, and in some an iterator that is made early."""
    can = []
    if setup.data == "stream":
        can = ["passes"]
    elif setup.data == "map" and setup.world_size == 1 and not setup.seeded and setup.sampler != "varying":
        overfits = "overfit_batches" in dict(setup.trainer)
        samplers = ["sampler", "batch_sampler"] if not overfits and setup.sampler == "shuffle" else []
        can = ["items", *samplers, *(["collate"] if setup.batch_of == "list" and not setup.persistent else [])]
        can += ["worker"] if setup.workers else []
        can += ["asked"] if setup.datamodule else []
    if not can or setup.loader == "stateful":  # its workers keep what they count to themselves
        return {}
    return {"counts": rng.choice(can) if rng.random() < 0.25 else "nothing", "early": rng.random() < 0.1}


def _changed(rng: random.Random, setup: Drawn) -> Any:
    """What every other life sets otherwise, and no bit depends on: a few things, in a quarter of the runs."""
    can = ["callbacks"]
    if setup.precision != "16-mixed" and not setup.compiled:
        can.append("detect_anomaly")
    if not setup.logger:
        can.append("log_every_n_steps")
    draws = setup.counts != "nothing" or setup.augment or setup.holds != "nothing" or setup.batch_of == "random"
    # Loaders that are made again have an iterator that nobody reads, of which workers draw more.
    again = "reload_dataloaders_every_n_epochs" in dict(setup.trainer)
    # Without workers the order is drawn by the first fetch, and not with the iterator.
    if setup.workers and setup.data == "map" and not (draws or again or setup.persistent) and setup.loader == "plain":
        can.append("num_workers")
    return tuple(name for name in can if rng.random() < 0.5) if rng.random() < 0.25 else ()


def _remembers(setup: Drawn) -> tuple[tuple[str, Place], ...]:
    """In a quarter of the runs up to three values, of kinds and in places that are drawn beside the rest."""
    beside = random.Random(f"remembers {setup!r}")
    if beside.random() > 0.25 or setup.compiled:
        return ()
    own = setup.data == "map" and not setup.seeded  # else the data set is not the user's, or there are several
    places = [place for place in get_args(Place) if place != "data" or own]
    return tuple((beside.choice([*VALUES]), beside.choice(places)) for _ in range(beside.randint(1, 3)))


def _paced(rng: random.Random, checkpointing: Checkpointing | None) -> Checkpointing | None:
    """In a third of the runs with an overhead that they may have, for which half of these keep windows apart, and a time that nothing
    may rest for longer than.
    """
    target, at_least = rng.choice([0.001, 0.03, 0.5]), rng.choice([0.05, 600.0])
    if checkpointing is None or rng.random() > 1 / 3:
        return checkpointing
    stretched = random.Random(repr(checkpointing)).random() < 0.5  # beside other draws, which stay what they are
    return replace(checkpointing, target=target, at_least=at_least, stretched=stretched)


def _any_batches(setup: Drawn) -> bool:
    """Whether nothing asks how many items a batch has, or how many batches there are."""
    options = dict(setup.trainer)
    counted = {"overfit_batches", "limit_train_batches", "val_check_interval"} & options.keys()
    return setup.world_size == 1 and setup.batch_size > 2 and not counted and setup.loader == "plain"


def _hooks(rng: random.Random, setup: Drawn) -> Any:
    """A few; those that end an epoch or training do so where a step ends."""
    chosen = set(_some(rng, {hook: 0.06 for hook in HOOKS if hook not in LATER}))
    beside = random.Random(repr(setup))  # beside the others, whose seeds were chosen before
    chosen |= {hook for hook in LATER if beside.random() < 0.06}
    if setup.accumulate > 1 or chosen & {"skips_rest", "stops"}:
        chosen -= {"accumulates"}
    if setup.accumulate > 1 or setup.world_size > 1:
        chosen -= {"skips_rest", "stops"}
    if setup.world_size > 1 or setup.clip_algorithm == "value":
        chosen -= {"no_loss"}  # Lightning refuses it there; and torch refuses to clip the values of no gradients
    if setup.strategy != "moe":
        chosen -= {"unfreezes"}  # DDP reduces only what trains as it begins
    if chosen & {"unfreezes", "replaces"}:
        chosen -= {"reads_state"}  # what trains from later on has none before
    if setup.world_size > 1:
        chosen -= {"replaces"}  # ranks reduce the gradients of what the module had when training began
    if setup.compiled:
        chosen -= {"modes", "replaces"}
    if setup.averaged is not None:
        chosen -= {"counts_forwards"}  # validation counts in the averaged copy
    if "clears" in chosen and setup.toggled:
        chosen -= {"reads_state"}  # what did not train when all was cleared has none as it trains again
    if "odd_buffers" in chosen:
        chosen -= {"counts"}  # both are the one extra part
    if setup.precision == "bf16-true" or setup.averaged is not None or setup.strategy != "moe":
        # Torch makes real numbers of complex ones; it does not average expanded ones, and its DDP does not broadcast them.
        chosen -= {"odd_buffers"}
    return tuple(sorted(chosen))


def _options(rng: random.Random, model: str) -> tuple[tuple[str, Any], ...]:
    options: list[tuple[str, Any]] = []
    if model not in {"dense", "mixtral"}:
        options += [(name, True) for name in ("gate_fp32", "noisy", "never_routed") if rng.random() < 0.25]
    if model in {"lists", "batch_norm", "tied", "counting"} and rng.random() < 0.15:
        options.append(("shared", True))
    if model == "mixtral" and rng.random() < 0.3:
        options.append(("never_routed", True))
    if model not in {"dense", "mixtral", "tied"} and rng.random() < 0.2:
        options.append(("recompute", rng.choice(["reentrant", "not_reentrant"])))
    return tuple(options)


def _checkpointing(rng: random.Random) -> Checkpointing:
    if rng.random() < 0.35:
        return _in_memory(Checkpointing(policy="dense", every_n_steps=rng.randint(1, 4)), rng)
    window: Any = "auto" if rng.random() < 0.1 else rng.randint(1, 6)
    sparse = Checkpointing(policy="sparse", window=window, order=rng.choice(["popularity", "fixed", "back_to_front"]))
    return _in_memory(sparse, rng)


def _in_memory(checkpointing: Checkpointing, rng: random.Random) -> Checkpointing:
    """With room for two generations, three, or what the machine decides; other draws stay what they are."""
    generations = random.Random(hash(rng.getstate()[1])).choice(["auto", 2, 3])
    return replace(checkpointing, arguments=(*checkpointing.arguments, ("memory_generations", generations)))


def _trainer(rng: random.Random, *, validated: bool, batches: int) -> tuple[tuple[str, Any], ...]:
    options: dict[str, Any] = {}
    budget = rng.choice(["epochs", "steps", "steps", "both", "time"])
    if budget in {"steps", "both", "time"}:
        options["max_steps"] = rng.randint(5, 14)
    if budget == "steps":
        options["max_epochs"] = None
    if budget == "time":
        options |= {"max_time": "00:01:00:00", "max_epochs": None}
    if rng.random() < 0.2:
        options["limit_train_batches"] = rng.choice([2, 3, 0.7])
    elif rng.random() < 0.1:
        options["overfit_batches"] = rng.choice([2, 0.5])
    if rng.random() < 0.2:
        options["reload_dataloaders_every_n_epochs"] = rng.choice([1, 2])
    if validated:
        options |= _validation(rng, batches)
    return tuple(options.items())


def _validation(rng: random.Random, batches: int) -> dict[str, Any]:
    kind = rng.choice(["epoch", "epochs", "batches", "fraction", "over_epochs"])
    sanity = {"num_sanity_val_steps": rng.choice([0, 0, 2])}
    if kind == "epoch":
        return {"val_check_interval": 1.0, **sanity}
    if kind == "epochs":
        return {"val_check_interval": 1.0, "check_val_every_n_epoch": 2, **sanity}
    if kind == "batches":
        return {"val_check_interval": rng.randint(1, 2), **sanity}
    if kind == "fraction":
        return {"val_check_interval": 0.5, **sanity}
    return {"val_check_interval": rng.randint(2, batches + 2), "check_val_every_n_epoch": None, **sanity}


def _sensible(rng: random.Random, setup: Drawn) -> Drawn | None:
    """The drawn run without what Lightning or torch refuse in itself; `None` if it is not worth mending."""
    options = _sensible_options(setup)
    if _batches_per_epoch(setup, options) < 2:
        return None
    interval = options.get("val_check_interval")
    if type(interval) is int and "check_val_every_n_epoch" not in options:
        options["val_check_interval"] = min(interval, _batches_per_epoch(setup, options))
    return replace(setup, trainer=tuple(options.items()), **_sensible_data(setup), **_sensible_training(setup))


def _sensible_options(setup: Drawn) -> dict[str, Any]:
    """Arguments of the Trainer: what has no length takes no shares of it."""
    options = dict(setup.trainer)
    if setup.data in {"stream", "shuffled_stream", "combined"}:
        if isinstance(options.get("limit_train_batches"), float):
            options["limit_train_batches"] = 2
        if isinstance(options.get("val_check_interval"), float):
            options["val_check_interval"] = 1.0
    if setup.data not in {"map", "by_epoch"}:
        options.pop("overfit_batches", None)
    if type(options.get("limit_train_batches")) is int:
        # Of a stream that ends before its limit Lightning does not see the end coming: with accumulation it may never step.
        length, steps_alone = _batches_per_epoch(setup, {}), setup.accumulate == 1 and not setup.growing_accumulation
        beyond = setup.data in {"stream", "shuffled_stream"} and steps_alone and options["limit_train_batches"] == 3
        options["limit_train_batches"] = length + 2 if beyond else min(options["limit_train_batches"], length)
    if setup.world_size > 1 and isinstance(options.get("overfit_batches"), float):
        options["overfit_batches"] = 2  # it is a share of the batches of validation too, of which each rank has few
    if setup.loader == "stateful" and setup.world_size > 1 and setup.data != "by_epoch":
        # Lightning shards such a loader anew when it is given again, and by that loses its sampler, in every process.
        options.pop("reload_dataloaders_every_n_epochs", None)
    if setup.data == "by_epoch":
        options.setdefault("reload_dataloaders_every_n_epochs", 1)
    return options


def _sensible_data(setup: Drawn) -> dict[str, Any]:
    changes: dict[str, Any] = {}
    if setup.data in {"sized_stream", "stream", "shuffled_stream"}:
        # All ranks and workers have the same number of whole batches, or Lightning waits for those that have none.
        changes |= {"holds": "nothing", "sampler": "shuffle", "ragged": 0, "drop_last": False, "batch_size": 4}
    if setup.data == "sized_stream":
        changes |= {"workers": 0, "persistent": False}
    return changes


def _sensible_training(setup: Drawn) -> dict[str, Any]:
    changes: dict[str, Any] = {}
    if setup.optimizer == "adamw_fused" and setup.precision.endswith("mixed"):  # refuses to be clipped
        changes["optimizer"] = "adamw"
    if setup.optimizer == "sgd":
        changes["amsgrad"] = False
    if setup.clip is None:
        changes["clip_algorithm"] = "norm"
    plateau = setup.plateau if setup.validate_every or setup.plateau is None or setup.plateau[0] == "epoch" else None
    changes["plateau"] = plateau
    if setup.one_cycle or plateau is not None:
        changes |= {"scheduler": "none", "one_cycle": setup.one_cycle and plateau is None}
    changes["compiled"] = setup.compiled and setup.world_size == 1 and setup.model not in {"mixtral", "counting"}
    if setup.world_size == 1:
        changes["strategy"] = "moe"
    strategy = changes.get("strategy", setup.strategy)
    if setup.expert_parallel > 1:
        sharded = setup.model == "stacked" and setup.world_size == 3 and strategy == "moe"
        options = (*setup.options, ("num_experts", 6)) if sharded else setup.options
        changes |= {"expert_parallel": 3 if sharded else 1, "options": options}
    if setup.world_size > 1:  # a gradient that comes twice in one backward pass is refused by name
        options = changes.get("options", setup.options)
        changes["options"] = tuple((name, "not_reentrant" if name == "recompute" else value) for name, value in options)
    changes["toggled"] = setup.toggled and setup.model not in {"mixtral", "counting"} and strategy == "moe"
    return changes


def _batches_per_epoch(setup: Drawn, options: dict[str, Any]) -> int:
    """At least so many; the shortest of combined loaders counts."""
    batches = setup.batches
    if setup.data == "combined" and setup.combined == "min_size":
        batches = batches // 2
    limit = options.get("limit_train_batches", options.get("overfit_batches", batches))
    return int(batches * limit) if isinstance(limit, float) else min(batches, limit)


def _kill(rng: random.Random, setup: Drawn) -> Kill:
    rank = rng.randrange(setup.world_size)
    settle = rng.choice([0.0, 10.0])
    if rng.random() < 0.15:
        return Kill(phase="random_time", seconds=round(rng.uniform(0.0, 0.3), 3), rank=rank)
    if rng.random() < 0.15:  # at either side of an epoch's end
        batches = _batches_per_epoch(setup, dict(setup.trainer)) * rng.randint(1, 2)
        return Kill(
            phase=rng.choice(["epoch_start", "epoch_end", "batch_end"]), batches=batches, rank=rank, settle=settle
        )
    phases = [phase for phase in PHASES if phase != "validation" or setup.validate_every]
    batches = (
        rng.randint(1, 3) if rng.random() < 0.25 else rng.randint(1, 12)
    )  # some before the window they resumed ends
    return Kill(phase=rng.choice(phases), batches=batches, rank=rank, settle=settle)
