"""Gradients kept compressed or rounded: whatever kills a run, it goes on from its base and what was kept, to the last bit.

Every life writes down what its optimizer consumed and what it made of that. The next one compares what it begins with to the
state of the base, stepped by torch's own optimizer with gradients that were put through the compression here once more.
"""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from door import Phase, compress_with
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from typing_extensions import override

from campaign._campaign import Campaigns
from campaign._training import Checkpointing, Setup, train
from lightning_moe_ckpt.native import decompress_gradient
from lightning_moe_ckpt.native._gradient import GradientCompression
from lightning_moe_ckpt.recovery import _fold
from lightning_moe_ckpt.storage import SegmentLayout
from lightning_moe_ckpt.testing import Attempt, AttemptResult, Kill, Seam

Mode = Literal["lossless", "bf16", "compressed"]
COMPRESSION = {"small_numel": 100, "keep_ratio": 0.1, "capacity_ratio": 0.15, "num_samples": 512}
"""So that of a small model some gradients are sparse."""


@dataclass(frozen=True)
class Case:
    """A run, how it keeps gradients, and when it dies."""

    setup: Setup
    mode: Mode
    error_feedback: bool
    kills: tuple[Kill, ...]


def drawn(seed: int) -> Case:
    """The case of a number."""
    draw = random.Random(seed)
    modes: list[tuple[Mode, bool]] = [
        ("bf16", False),
        ("compressed", False),
        ("compressed", True),
        ("compressed", True),
    ]
    mode, feedback = draw.choice(modes)
    arguments: tuple[tuple[str, Any], ...] = (("mode", mode), ("error_feedback", feedback))
    checkpointing = Checkpointing(
        policy="differential", every_n_steps=draw.randint(3, 9), batch=draw.randint(1, 4), arguments=arguments
    )
    setup = Setup(
        checkpointing=checkpointing,
        model=draw.choice(("lists", "stacked", "batch_norm")),
        optimizer=draw.choice(("adamw", "adam", "adamw_amsgrad", "adamw_foreach")),
        scheduler=draw.choice(("none", "cosine")),
        clip=draw.choice((None, 0.5)),
        batches=20,
        epochs=1,
        validate_every=draw.choice((None, None, 4)),
        world_size=draw.choice((1, 1, 3)),
    )
    if draw.random() < 0.3:
        setup = replace(setup, precision="16-mixed", overflow_steps=tuple(draw.sample(range(3, 18), 3)))
    phases: list[Phase] = ["batch_start", "forward", "before_optimizer_step", "batch_end", "after_batch_end"]
    steps = sorted(draw.sample(range(3, 20), 3))
    kills = [Kill(phase=draw.choice(phases), step=step, settle=draw.choice((0.0, 20.0))) for step in steps]
    return Case(setup, mode, feedback, tuple(kills))


@dataclass
class Heard:
    """What was folded in this process: no attribute of a callback, which would be what the life before had."""

    parts: list[str]
    folded: tuple[int, int] | None = None
    """Differences that this life began with, and the step that they follow on."""
    compared: bool = False

    def listen(self) -> None:
        """Hear of it from here on."""
        fold = vars(_fold)["fold"]

        def heard(state_U8: Tensor, layout: SegmentLayout, *differences: Any) -> None:
            self.parts = [name.removesuffix("/param") for name in layout.names if name.endswith("/param")]
            fold(state_U8, layout, *differences)

        Seam(module=_fold.__name__, attribute="fold", replacement=heard).apply()
        handler = logging.Handler()
        handler.emit = self._hear  # type: ignore[method-assign]
        _fold.log.logger.addHandler(handler)

    def _hear(self, record: logging.LogRecord) -> None:
        if " differences were applied to " in record.msg:
            assert isinstance(record.args, tuple)
            self.folded = record.args[0], record.args[1]  # type: ignore[assignment]


HEARD = Heard([])


class Traces(Callback):
    """Writes down what each step consumed and made, and compares what this life begins with."""

    def __init__(self, life: Attempt, case: Case) -> None:
        self._life, self._case = life, case

    def _path(self, kind: str, step: int) -> Path:
        return self._life.workdir / f"{kind}.{step}.rank{self._life.rank}"

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        (optimizer,) = trainer.optimizers
        names = {id(param): name for name, param in pl_module.named_parameters()}

        def stepped(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            groups = [
                (
                    {key: value for key, value in group.items() if key != "params"},
                    {
                        names[id(parameter)]: parameter.grad.clone()
                        for parameter in group["params"]
                        if parameter.grad is not None
                    },
                )
                for group in optimizer.param_groups
            ]
            torch.save(groups, self._path("consumed", trainer.global_step + 1))

        optimizer.register_step_post_hook(stepped)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if HEARD.compared:
            return
        HEARD.compared = True
        for step in range(trainer.global_step + 1, self._case.setup.steps + 1):  # those of lives before are no more
            self._path("consumed", step).unlink(missing_ok=True)
        if HEARD.folded is None:
            return
        (count, first), found = HEARD.folded, state_of(trainer, pl_module)
        assert trainer.global_step == first + count
        base = torch.load(self._path("state", first))
        for part in HEARD.parts:
            kind, fqn, start, stop = interval(part)
            assert kind == "full"
            wanted = self._stepped(base[fqn], fqn, slice(start, stop), range(first + 1, first + count + 1))
            for key, value in wanted.items():
                own = found[fqn][key].view(-1)[start:stop] if found[fqn][key].numel() > 1 else found[fqn][key]
                assert torch.equal(own, value), f"step {first} and {count} steps: {part}/{key} is something else"
        told = {"count": count, "parts": len(HEARD.parts)}
        self._life.workdir.joinpath(f"folded.{self._life.index}.{self._life.rank}").write_text(json.dumps(told))

    def _stepped(self, base: Mapping[str, Tensor], fqn: str, part: slice, steps: range) -> dict[str, Tensor]:
        """Return what a part of a parameter and its state are after steps with what is kept of gradients."""
        param = torch.nn.Parameter(base["param"].view(-1)[part].clone())
        state = {
            key: value.view(-1)[part].clone() if value.numel() > 1 else value.clone() for key, value in base.items()
        }
        del state["param"]
        left_out, optimizer = torch.zeros_like(param), None
        for step in steps:
            if not self._path("consumed", step).exists():
                continue  # loss scaling has left the step out
            groups = torch.load(self._path("consumed", step))
            settings, gradient = next(((options, each[fqn]) for options, each in groups if fqn in each), (None, None))
            if settings is None or gradient is None:
                continue
            whole = gradient.view(-1)[part]
            if self._case.error_feedback:
                whole = whole + left_out
            kept = self._kept(whole)
            left_out = whole - kept
            if optimizer is None:
                make = torch.optim.Adam if self._case.setup.optimizer == "adam" else torch.optim.AdamW
                optimizer = make([param], lr=0.0, foreach=False, amsgrad=settings["amsgrad"])
                if state:
                    optimizer.state[param] = state
            plain = {key: settings[key] for key in ("lr", "betas", "eps", "weight_decay", "maximize")}
            optimizer.param_groups[0].update(plain)
            param.grad = kept
            optimizer.step()
            state = optimizer.state[param]
        return {"param": param.detach(), **state}

    def _kept(self, gradient: Tensor) -> Tensor:
        """Return what a boundary has of a gradient, by the twins of the compiled code."""
        if self._case.mode == "bf16":
            return gradient.bfloat16().float()
        (compressed,) = compress_with(None, [gradient.contiguous()], GradientCompression())
        return decompress_gradient(compressed).view(-1)

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: object) -> None:
        torch.save(state_of(trainer, pl_module), self._path("state", trainer.global_step))


def state_of(trainer: Trainer, module: LightningModule) -> dict[str, dict[str, Tensor]]:
    """Parameters and what the optimizer keeps of them, by name."""
    (optimizer,) = trainer.optimizers
    return {
        name: {"param": param.detach().clone(), **{key: each.clone() for key, each in optimizer.state[param].items()}}
        if param in optimizer.state
        else {"param": param.detach().clone()}
        for name, param in module.named_parameters()
    }


def interval(part: str) -> tuple[str, str, int, int]:
    """Kind, parameter, first element, and the element after the last."""
    head, _, place = part.rpartition("/")
    kind, _, fqn = head.partition("/")
    start, _, length = place.partition("+")
    return kind, fqn, int(start), int(start) + int(length)


def train_traced(case: Case, life: Attempt) -> Mapping[str, Any]:
    """Trains with traces."""
    defaults = {**(GradientCompression.__init__.__kwdefaults__ or {}), **COMPRESSION}
    module = GradientCompression.__module__
    Seam(module=module, attribute="GradientCompression.__init__.__kwdefaults__", replacement=defaults).apply()
    traces = Traces(life, case)
    HEARD.listen()
    Seam(module="campaign._training", attribute="Setup.callbacks", replacement=lambda *_: [traces]).apply()
    return train(case.setup, life)


def folded(lives: list[AttemptResult]) -> list[dict[str, int]]:
    """What lives began with and have compared, on each rank."""
    return [json.loads(path.read_text()) for path in sorted(lives[0].workdir.glob("folded.*"))]


SEEDS, SOAK_SEEDS = (5, 14), range(150)


@pytest.mark.parametrize(
    "seed", [*SEEDS, *(pytest.param(each, marks=pytest.mark.soak) for each in SOAK_SEEDS if each not in SEEDS)]
)
def test_a_killed_run_goes_on_from_its_base_and_what_was_kept(campaigns: Campaigns, seed: int) -> None:
    """Also what compression has left out begins with nothing at each base, so at each restart."""
    case = drawn(seed)
    lives = campaigns.run(case.setup, *case.kills, fit=partial(train_traced, case))
    assert lives[-1].outcome == "finished"
    compared = folded(lives)
    print(case.mode, case.error_feedback, compared)
    assert all(each["parts"] for each in compared)
    assert compared or not any(kill.settle for kill in case.kills), lives[-1].log()
