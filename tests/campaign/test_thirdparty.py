"""Modules of LitGPT and Hugging Face, killed and resumed; and Lightning's own callbacks and loggers beside ours."""

from __future__ import annotations

import csv
import re
from dataclasses import replace

import numpy as np
import pytest

from campaign._campaign import Campaigns
from campaign._thirdparty import Bar, Library, ThirdParty
from campaign._training import Checkpointing
from lightning_moe_ckpt.testing import AttemptResult, Kill

KILLS = [
    Kill(phase="after_batch_end", step=4, settle=10.0),
    Kill(phase="forward", batches=2),
]
"""After a window was stored, and while it is replayed."""


def third_party(library: Library, **options: object) -> ThirdParty:
    """Eight steps over two epochs, in windows of three."""
    defaults = {"batches": 4, "validate_every": None, "checkpointing": Checkpointing(policy="sparse", window=3)}
    return ThirdParty(library=library, **{**defaults, **options})  # type: ignore[arg-type]


def require(library: Library) -> None:
    """LitGPT is installed by `make`, not by pip: its bounds exclude versions that others here need."""
    if library.startswith("litgpt"):
        pytest.importorskip("litgpt.model", reason="LitGPT is not installed: pip install --no-deps litgpt")


ONE_PROCESS: list[tuple[Library, bool]] = [
    ("deepseek_v3", True),
]
MORE: list[tuple[Library, bool]] = [
    ("gpt_oss", False),
    ("switch", False),
    ("gpt2", False),
    ("litgpt_moe", False),
    ("gpt_oss", True),
    ("deepseek_v3", False),
    ("mixtral", True),
    ("mixtral", False),
    ("switch", True),
    ("gpt2", True),
    ("litgpt_dense", False),
]


@pytest.mark.parametrize(
    ("library", "recompute"), [*ONE_PROCESS, *(pytest.param(*each, marks=pytest.mark.soak) for each in MORE)]
)
def test_a_model_of_another_library_ends_the_same(campaigns: Campaigns, library: Library, recompute: bool) -> None:
    """As it is: with dropout, jitter in its router, tied embeddings and its own switch for recomputing activations."""
    require(library)
    lives = campaigns.check(third_party(library, recompute=recompute), *KILLS)
    assert [life.steps()[0] > 1 for life in lives] == [False, True, True], "it did not start over"
    corrections = lives[-1].returned().get("corrections", [[1.0]])
    assert all(any(bias_E) for bias_E in corrections), "a callback moves what no gradient moves"


THREE_RANKS: list[tuple[Library, bool]] = [("mixtral", True)]
MORE_ON_THREE: list[tuple[Library, bool]] = [
    ("switch", False),
    ("gpt_oss", True),
    ("deepseek_v3", False),
    ("gpt2", True),
    ("mixtral", False),
    ("switch", True),
    ("gpt2", False),
    ("litgpt_moe", False),
    ("litgpt_dense", False),
]


@pytest.mark.parametrize(
    ("library", "recompute"), [*THREE_RANKS, *(pytest.param(*each, marks=pytest.mark.soak) for each in MORE_ON_THREE)]
)
def test_and_on_three_ranks(campaigns: Campaigns, library: Library, recompute: bool) -> None:
    """Whichever of them dies."""
    require(library)
    setup = third_party(library, recompute=recompute, world_size=3)
    lives = campaigns.check(setup, Kill(phase="after_batch_end", step=4, rank=1, settle=10.0))
    assert lives[-1].steps()[0] > 1, "it did not start over"


# -- Lightning's own callbacks and loggers

WITH_COMPANIONS = third_party("mixtral", batches=8, companions=True)
"""Four steps of two batches in the first epoch, eight of one in the second."""
KILLED_LATE = Kill(phase="after_batch_end", step=8, settle=10.0)
REPLAYED = [5, 6]
"""Boundary 6 is the newest dense one in storage by then; its window began at 4."""


@pytest.mark.parametrize("bar", ["rich", pytest.param("tqdm", marks=pytest.mark.soak)])
def test_callbacks_and_loggers_of_lightning_go_together_with_ours(campaigns: Campaigns, bar: Bar) -> None:
    """They change no bit of a run that is killed, and what they show is what they show in a run in peace."""
    setup = replace(WITH_COMPANIONS, bar=bar)
    lives = campaigns.check(setup, KILLED_LATE)
    last = lives[-1]
    assert last.steps()[0] == REPLAYED[0]
    check_terminal(lives)
    rows = csv_rows(last)
    check_rows(rows, csv_rows(campaigns.reference(setup)[0]))
    # Of the steps that both lives took, either file may have lost a row with the process that was killed.
    assert late(events(last)) == late({name: as_float32(values) for name, values in rows.items()})
    assert float((last.workdir / "attempt1.timer").read_text()) > 0, "the timer goes on from where it was"


def check_terminal(lives: list[AttemptResult]) -> None:
    """While steps are repeated the bar says which one it is, and at no other time."""
    shown = [re.findall(r"replay[=:] ?(\d/\d)", terminal(life)) for life in lives]
    assert shown[0] == []
    # A bar may leave out a frame on a busy machine; what it says of each step is tested without a terminal.
    assert list(dict.fromkeys(shown[1])) in (["1/2", "2/2"], ["1/2"], ["2/2"])


def terminal(life: AttemptResult) -> str:
    """What a terminal was sent, without colours and movements of the cursor."""
    sent = (life.workdir / f"attempt{life.index}.terminal").read_text(encoding="utf-8")
    assert "Epoch 0" in sent if life.index == 0 else "Epoch 1" in sent
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", sent)


Rows = dict[str, dict[int, float]]


def csv_rows(life: AttemptResult) -> Rows:
    """Values by name and step, as the CSV logger wrote them."""
    found: Rows = {}
    with (life.workdir / "csv" / "run" / "metrics.csv").open() as file:
        for row in csv.DictReader(file):
            for name, value in row.items():
                if name != "step" and value:
                    found.setdefault(name, {})[int(row["step"])] = float(value)
    return found


def events(life: AttemptResult) -> Rows:
    """Values by name and step, as TensorBoard reads them back."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(life.workdir / "tensorboard" / "run"))
    accumulator.Reload()
    return {
        name: {event.step: event.value for event in accumulator.Scalars(name)} for name in accumulator.Tags()["scalars"]
    }


def late(rows: Rows) -> Rows:
    """Of steps that no life had taken before the kill."""
    return {name: {step: value for step, value in values.items() if step >= 8} for name, values in rows.items()}


def as_float32(values: dict[int, float]) -> dict[int, float]:
    """As TensorBoard stores them."""
    return {step: float(np.float32(value)) for step, value in values.items()}


THEIR_OWN = ("loss", "epoch", "lr-AdamW/pg1", "lr-AdamW/pg2", "lr-AdamW/pg1-momentum")
"""What does not depend on time, nor on where a life began: ThroughputMonitor counts from there, and has no state."""


def check_rows(rows: Rows, in_peace: Rows) -> None:
    """At the same steps as without a kill, from the first that no earlier life has logged."""
    fresh = range(REPLAYED[-1], 12)
    for name in THEIR_OWN:
        assert {step: rows[name][step] for step in fresh} == {step: in_peace[name][step] for step in fresh}
    for name in [
        *in_peace,
        "moe/goodput",
        "moe/window",
        "moe/generation/storage",
        "moe/load_skew/model.model.model.layers.0.mlp",
    ]:
        assert set(rows[name]) >= set(fresh), name
    for step, replaying in rows["moe/replaying"].items():
        # A row that the killed life has logged stays as it is.
        assert replaying <= (step + 1 in REPLAYED)
