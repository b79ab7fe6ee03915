"""Trainings drawn at random over everything that a user may vary, killed at random: each ends as if nothing had happened.

`MOE_CKPT_CASE='{...}' pytest tests/campaign/test_configurations.py` repeats the line that a failure prints, and
`MOE_CKPT_SHRINK=1` beside it looks for a smaller one.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, get_args

import pytest
from lightning.pytorch import Trainer

from campaign._campaign import Campaigns
from campaign._draw import Case, draw, shrink
from lightning_moe_ckpt.fit._limits import gradients_are_seen
from lightning_moe_ckpt.testing import Attempt
from lightning_moe_ckpt.testing._kill import TrainingPhase

SAMPLE = [
    *(385, 218, 361, 490, 223, 398, 183, 22, 386, 501, 178, 4, 647, 463, 453, 517, 651, 288, 233, 36, 475, 287),
]  # fmt: skip
"""Seeds of `make test`, chosen so that few and cheap runs hold much: each kind of kill under each policy, and every value
of a dimension that the first 66 seeds have. Pairs of values are left to the soak. The first ones are the cheapest."""
CHUNK, CHUNKS = 50, 40
"""Runs of `make soak`."""

GIVEN = os.environ.get("MOE_CKPT_CASE")
ROWS = int(os.environ.get("MOE_CKPT_ROWS", "0"))
"""Of `make quick`; 0 for all."""
ONCE_FAILED = {
    "max_steps alone, replayed from between two epochs": """{"setup": {"validate_every": null, "plateau": ["epoch", 1],
        "trainer": [["max_steps", 16], ["max_epochs", null]]}, "checkpointing": {"policy": "sparse", "window": 4},
        "kills": [{"phase": "forward", "batches": 10, "settle": 10.0}]}""",
    "max_steps alone, with validation, from between two epochs": """{"setup": {"trainer": [["max_steps", 16], ["max_epochs", null]]},
        "checkpointing": {}, "kills": [{"phase": "after_batch_end", "batches": 6, "settle": 10.0}]}""",
    "newest metrics forgotten by the sanity check": """{"setup": {"batches": 3, "epochs": 3, "trainer": [["val_check_interval", 1.0],
        ["check_val_every_n_epoch", 2], ["num_sanity_val_steps", 2]]}, "checkpointing": {},
        "kills": [{"phase": "before_optimizer_step", "batches": 8, "settle": 10.0}]}""",
    "a compiled model in low precision, frozen in replay": """{"setup": {"precision": "16-mixed", "augment": false,
        "options": [], "compiled": true, "scheduler": "none", "optimizer": "sgd", "validate_every": null}, "checkpointing": {"policy": "sparse",
        "window": 2, "order": "popularity"}, "kills": [{"phase": "after_batch_end", "batches": 6, "settle": 10.0}]}""",
    "validation between repeated steps, behind a hook that edits weights": """{"setup": {"model": "counting", "batches": 2,
        "epochs": 4, "trainer": [["val_check_interval", 2], ["num_sanity_val_steps", 2]]}, "checkpointing":
        {"policy": "sparse", "window": 6}, "kills": [{"phase": "batch_start", "batches": 7}]}""",
    "between epochs, weights edited through `.data` and optimizer state cleared": """{"setup": {"hooks": ["clears", "edits"], "epochs": 3,
        "validate_every": null}, "checkpointing": {"policy": "sparse"}, "kills": [{"phase": "before_optimizer_step", "batches": 7,
        "settle": 10.0}, {"phase": "after_batch_end", "batches": 4}]}""",
    "modes, rates and counters of parts of the model; rows that nobody flushed; 64 bits": """{"setup": {"model": "batch_norm",
        "hooks": ["counts", "logs", "modes"], "user_callbacks": ["learning_rate"], "logger": true, "precision": "64-true",
        "epochs": 3}, "checkpointing": {"every_n_steps": 3}, "kills": [{"phase": "forward", "batches": 5, "settle": 10.0},
        {"phase": "batch_end", "batches": 4, "settle": 10.0}]}""",
    "gradients that are zero, not gone, of what is frozen": """{"setup": {"hooks": ["keeps_gradients"], "toggled": true, "optimizer": "adam"},
        "checkpointing": {}, "kills": [{"phase": "after_backward", "batches": 8, "settle": 10.0}]}""",
    "complex and expanded buffers, an epoch whose rest is skipped": """{"setup": {"hooks": ["odd_buffers", "skips_rest"], "epochs": 4,
        "batch_of": "class"}, "checkpointing": {"policy": "sparse", "window": 2}, "kills": [{"phase": "forward", "batches": 5,
        "settle": 10.0}]}""",
    "a metric of the module that `bf16-true` rounds otherwise from the second epoch on": """{"setup": {"model": "stacked", "options": [["gate_fp32", true]], "loader": "stateful", "augment": false, "batches": 2,
        "accumulate": 2, "validate_every": 1, "precision": "bf16-true", "clip_algorithm": "value", "optimizer": "adam",
        "scheduler": "none", "trainer": [["max_steps", 7], ["max_epochs", null], ["val_check_interval", 1.0],
        ["num_sanity_val_steps", 0]], "logged": true, "data": "shuffled_stream", "groups": 1, "hooks": ["keeps_gradients"]},
        "checkpointing": {"policy": "sparse", "window": 1}, "kills": [{"phase": "after_batch_end", "batches": 8}]}""",
    "DDP, which broadcasts no buffers in the forward pass after a validation": """{"setup": {"model": "biased", "augment": false, "epochs": 3, "validate_every": 1, "precision": "bf16-mixed", "clip":
        null, "scheduler": "epoch", "strategy": "ddp_ordered", "world_size": 3, "averaged": "ema", "balanced_by": "callback",
        "trainer": [["max_steps", 13], ["max_time", "00:01:00:00"], ["max_epochs", null], ["val_check_interval", 1],
        ["num_sanity_val_steps", 2]], "growing_accumulation": true, "data": "combined", "combined": "max_size", "sampler":
        "sequential"}, "checkpointing": {"every_n_steps": 2}, "kills": [{"phase": "batch_start", "batches": 8, "rank": 1},
        {"phase": "epoch_end", "batches": 5, "settle": 10.0}, {"phase": "after_backward", "batches": 2}]}""",
    "gradients of one step that the next adds to": """{"setup": {"hooks": ["fades_gradients"], "validate_every": null, "options":
        [["never_routed", true]]}, "checkpointing": {"every_n_steps": 2}, "kills": [{"phase": "forward", "batches": 7, "settle": 10.0}]}""",
    "gradients of experts that later got no token": """{"setup": {"hooks": ["fades_gradients"], "batch_size": 1, "batches": 5, "epochs":
        3, "validate_every": null}, "checkpointing": {"policy": "sparse", "window": 2, "order": "popularity"}, "kills":
        [{"phase": "batch_end", "batches": 10, "settle": 10.0}]}""",
    "gradients of some parameters, and at times of one more": """{"setup": {"hooks": ["keeps_some"], "epochs": 3}, "checkpointing":
        {"policy": "sparse"}, "kills": [{"phase": "forward", "batches": 5, "settle": 10.0},
        {"phase": "after_batch_end", "batches": 5, "settle": 10.0}]}""",
    "a plain tensor of an MoE layer's own": """{"setup": {"remembers": [["in_place", "layer"]]}, "checkpointing": {}, "kills":
        [{"phase": "after_backward", "batches": 8, "settle": 10.0}]}""",
    "a hook that reads state of what a window has only later": """{"setup": {"hooks": ["reads_state"], "options": [["never_routed",
        true]]}, "checkpointing": {"policy": "sparse", "window": 4, "order": "back_to_front"}, "kills": [{"phase": "forward", "batches":
        8, "settle": 10.0}]}""",
    "a parameter replaced in the second epoch, of which nothing is stored": """{"setup": {"hooks": ["replaces"]}, "checkpointing":
        {"policy": "sparse", "window": 2}, "kills": [{"phase": "forward", "batches": 8, "settle": 10.0}]}""",
    "batches that a step accumulates from within an epoch on, between epochs": """{"setup": {"hooks": ["accumulates"], "batches": 7,
        "epochs": 3, "validate_every": null}, "checkpointing": {}, "kills": [{"phase": "batch_start", "batches": 8, "settle": 10.0}]}""",
    "gradients with which a step begins since fewer were accumulated before": """{"setup": {"hooks": ["accumulates"], "batches": 9,
        "validate_every": null}, "checkpointing": {"policy": "sparse"}, "kills": [{"phase": "forward", "batches": 9, "settle": 10.0}]}""",
}
"""Lines of failures, by what was wrong."""


def failure(campaigns: Campaigns, case: Case) -> str | None:
    """What is wrong with a run, beginning with the line that repeats it; `None` if nothing is."""
    options: dict[str, Any] = {"must_strike": False, "timeout": 60.0}
    try:
        if case.named is None:
            campaigns.check(case.setup, *case.kills, **options)
        else:
            told = _told_by(campaigns, case, **options)
            assert case.named in told, f"no life said {case.named!r}"
    except (AssertionError, RuntimeError, TimeoutError) as error:
        return f"MOE_CKPT_CASE='{case.line()}'\n{error}"
    return None


def _told_by(campaigns: Campaigns, case: Case, **options: Any) -> str:
    """The logs of a run whose restarts may not be exact: it comes to its end, or a restart refuses other batches."""
    try:
        return "".join(life.log() for life in campaigns.run(case.setup, *case.kills, **options))
    except (AssertionError, RuntimeError) as error:
        if "OtherData" not in str(error):
            raise
        return str(error)


def _cases() -> list[Any]:
    if GIVEN is not None:
        return [pytest.param(Case.parse(GIVEN), id="given")]
    failed = [
        # Every process compiles: a row of 20 s.
        pytest.param(Case.parse(line), id=name, marks=[pytest.mark.soak] if '"compiled": true' in line else [])
        for name, line in ONCE_FAILED.items()
    ]
    drawn = [pytest.param(draw(seed), id=str(seed)) for seed in (SAMPLE[:ROWS] if ROWS else SAMPLE)]
    return drawn if ROWS else [*failed, *drawn]


def test_the_sample_has_each_kind_of_kill_under_each_policy() -> None:
    """On three ranks too; another draw of the seeds may lose some of them."""
    cases = [draw(seed) for seed in SAMPLE]
    policies = set(map(_policy, cases))
    wanted = {(policy, phase) for policy in policies for phase in (*get_args(TrainingPhase), "random_time")}
    found = {(_policy(case), kill.phase) for case in cases for kill in case.kills}
    assert len(policies) > 1
    assert found >= wanted, wanted - found
    assert {_policy(case) for case in cases if case.setup.world_size >= 3 and case.kills} == policies


def test_drawn_runs_leave_gradients_out_in_replay(tmp_path: Path) -> None:
    """Unless hooks that were drawn look at them; nothing of the campaign's own does, or none would meet frozen operators."""
    cases = [case for case in map(draw, SAMPLE) if _policy(case) == "sparse"]
    assert cases
    for case in cases:
        seen = "scales_gradients" in case.setup.hooks
        facts: dict[str, Any] = {"index": 0, "rank": 0, "world_size": 1, "seed": 0, "url": "", "workdir": tmp_path}
        life = Attempt(**facts, kill=case.kills[0])
        callbacks = life.callbacks(*case.setup.callbacks(life))
        trainer = Trainer(accelerator="cpu", devices=1, callbacks=callbacks, logger=bool(case.setup.user_callbacks))
        assert gradients_are_seen(trainer, case.setup.make_module(life), ()) is seen, case.line()


def _policy(case: Case) -> str:
    assert case.setup.checkpointing is not None
    return case.setup.checkpointing.policy


@pytest.mark.parametrize("case", _cases())
def test_a_drawn_run_ends_as_if_nothing_had_happened(campaigns: Campaigns, case: Case) -> None:
    """Every tensor, loss, batch, epoch, step, and what callbacks and loggers say, is that of the fault-free run."""
    found = failure(campaigns, case)
    if found is not None and "MOE_CKPT_SHRINK" in os.environ:
        small = shrink(case, lambda each: failure(campaigns, each) is not None)
        found = failure(campaigns, small)
    assert found is None, found


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_two_thousand_drawn_runs_end_as_if_nothing_had_happened(campaigns: Campaigns, chunk: int) -> None:
    """The same, at length; all failures of a chunk are told at once."""
    cases = [draw(seed) for seed in range(chunk * CHUNK, (chunk + 1) * CHUNK)]
    found = [each for each in (failure(campaigns, case) for case in cases) if each is not None]
    assert not found, "\n\n".join([f"{len(found)} of {len(cases)} drawn runs failed:", *found])
