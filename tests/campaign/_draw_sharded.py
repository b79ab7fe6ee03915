"""Draws runs under every sharding: a run of `_draw`, of which what sharded training does not have is taken away."""

from __future__ import annotations

import dataclasses
import random
from dataclasses import replace
from typing import Any, ClassVar, get_args

from operators._families import SPREAD

from campaign._draw import Case, draw
from campaign._drawn import Drawn
from campaign._drawn_hooks import Hook
from campaign._sharded import Edits, Experts, Part, Sharded, Sharding
from lightning_moe_ckpt.testing import Kill

LAYOUTS: tuple[tuple[Sharding, int], ...] = (
    *(("fsdp2", ranks) for ranks in (2, 3, 4)),
    *(("tp", 2), ("fsdp2+tp", 4), ("hsdp", 4)),
    *(
        ("none", 1),
        ("ddp", 3),
        ("moe", 3),
        ("moe+zero1", 3),
        ("moe+zero1", 4),
        ("hf+ep", 3),
        ("hf+ep", 4),
        ("hf+ep+zero1", 4),
    ),
)
"""Ways of sharding, with numbers of ranks."""

WITHOUT: frozenset[Hook] = frozenset(
    {
        *("counts", "odd_buffers"),  # parameters that FSDP2 has not seen, whose gradients nobody reduces
        *("no_loss", "skips_rest", "stops", "replaces"),  # as on several ranks
        "unfreezes",  # FSDP2 computes gradients of what trained as the module was sharded
        # Behind a validation the root has whole parameters, and forgets an edit of them.
        *("edits", "clamps", "renorms", "after_step", "edits_frozen", "modes"),
        *("scales_gradients", "reads_state"),
    }
)
"""Hooks that are no use on shards."""


class ShardedCase(Case):
    """A training under a sharding, and where its lives end."""

    drawn: ClassVar[type[Drawn]] = Sharded


def draw_sharded(seed: int) -> ShardedCase:
    """The case of a number, the same every time: layouts in turn."""
    rng = random.Random(f"sharded {seed}")
    case, layout = draw(rng.randrange(10**6)), LAYOUTS[seed % len(LAYOUTS)]
    setup = _sharded(rng, case.setup, *layout)
    return ShardedCase(setup, tuple(placed(kill, rng.randrange(setup.world_size)) for kill in case.kills))


def _sharded(rng: random.Random, setup: Drawn, sharding: Sharding, ranks: int) -> Sharded:
    fields = {field.name: getattr(setup, field.name) for field in dataclasses.fields(Drawn)}
    several = "tp" in sharding
    trainer = dict(setup.trainer)
    trainer.pop("overfit_batches", None)
    changes: dict[str, Any] = {
        "model": "lists",
        "options": (),
        "world_size": ranks,
        "sharding": sharding,
        "expert_parallel": 1,
        "averaged": None,  # such modules cannot be copied
        "balanced_by": None,
        "emulated": False,
        "compiled": False,
        "toggled": False,
        "other": "",
        "user_callbacks": (),
        "growing_accumulation": False,
        "ragged": 0,
        "early": False,
        "trainer": tuple(trainer.items()),
        "hooks": tuple(hook for hook in setup.hooks if hook not in WITHOUT),
        "experts": rng.choice(get_args(Experts)),
        "num_experts": rng.choice([2, 3, 5]),
        "tied": rng.random() < 0.25,
        "frozen": tuple(part for part in get_args(Part) if rng.random() < 0.15),
        "recompute": rng.random() < 0.25,
        "kept": rng.random() < 0.25,
        "changed": tuple(each for each in setup.changed if each != "detect_anomaly"),  # torch cannot, on DTensors
        "edits": rng.choice(get_args(Edits)) if rng.random() < 0.5 else "",
    }
    if "hf+ep" in sharding:
        changes["family"] = rng.choice([*SPREAD.values()])
    if setup.precision in {"16-mixed", "64-true"}:
        changes["precision"] = "32-true"
    if setup.data != "map" or setup.sampler == "varying" or setup.counts != "nothing":
        changes |= {"data": "map", "sampler": "shuffle", "counts": "nothing", "remembers": (), "holds": "nothing"}
        changes["datamodule"] = False
        trainer.pop("reload_dataloaders_every_n_epochs", None)
        changes["trainer"] = tuple(trainer.items())
    if several:
        changes["hooks"] = tuple(hook for hook in changes["hooks"] if hook != "reseeds")  # by the rank
    if sharding == "tp":  # torch takes no list of plain tensors and DTensors
        changes["optimizer"] = setup.optimizer.removesuffix("_foreach").removesuffix("_fused")
        changes["further_optimizer"] = setup.further_optimizer.replace("nesterov", "none")
    return Sharded(**{**fields, **changes})


def placed(kill: Kill, rank: int) -> Kill:
    """A kill of a rank. Before a forward pass it does not wait for storage: other ranks wait in theirs for shards of this one,
    and hand over a boundary behind it.
    """
    return replace(kill, rank=rank, settle=0.0 if kill.phase == "batch_start" else kill.settle)
