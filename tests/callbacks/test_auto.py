"""`callbacks.auto` measures, chooses and goes on: the same bits as a run without it, through a SIGKILL before the choice and one behind it."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from launcher import run_world
from lightning.pytorch import Callback, Trainer
from tiny import quiet_trainer, rows, waves, with_experts
from typing_extensions import override

from lightning_moe_ckpt import MoEStrategy
from lightning_moe_ckpt.callbacks import DenseCheckpoint, SparseCheckpoint, auto
from lightning_moe_ckpt.callbacks._auto import AutoCheckpoint
from lightning_moe_ckpt.errors import ConfigurationError, StorageError
from lightning_moe_ckpt.inspection._run_profile import profile_of
from lightning_moe_ckpt.simulation import Profile
from lightning_moe_ckpt.storage import RunView, open_backend

STEPS = 240
BEHIND = 12
"""Steps from the choice to the kill behind it."""
PROFILE = """\
training: {step_seconds: 2.0}
model: {layers: 4, experts: 8, params: 2e9, expert_params: 5e7}
cluster: {nodes: 4, ranks_per_node: 4, expert_parallel: 4}
speeds: {device_host: 10GB, host_host: 10GB, storage: 4GB}
costs: {detection: 5s, startup: 30s, hooks_per_step: 0.0005, hooks_per_capture: 0.01, slowed_per_nbyte: 2.0e-11}
"""


class Killed(Callback):
    """Slows steps down, and kills its process at a step, or, at -1, some steps behind the choice."""

    def __init__(self, at: int | None, checkpoint: Any) -> None:
        self.at, self.checkpoint = at, checkpoint

    @override
    def on_train_batch_start(self, trainer: Trainer, *args: object) -> None:
        time.sleep(0.01)  # steps of a few ms leave storage no quiet ones
        if self.at == -1 and self.checkpoint.chosen is not None:
            self.at = trainer.global_step + BEHIND
        if self.at is not None and trainer.global_step == self.at:
            self.checkpoint.wait_committed(20)
            os.kill(os.getpid(), signal.SIGKILL)


def trained(
    rank: int, checkpoint: Callable[[], Any], *, ranks: int, kill_at: int | None = None, steps: int = STEPS
) -> dict[str, Any]:
    """Train, and return the weights, where the fit resumed and what was chosen."""
    torch.manual_seed(1)
    module, made = with_experts(), checkpoint()
    options: dict[str, Any] = {"devices": ranks, "strategy": MoEStrategy()} if ranks > 1 else {}
    trainer = quiet_trainer(Killed(kill_at if rank == 0 else None, made), made, max_steps=steps, **options)
    trainer.fit(module, rows(waves(96, 8)))
    chosen = getattr(made, "chosen", None)
    return {
        "weights": [parameter.detach() for parameter in module.parameters()],
        "resumed": made.report.resumed_from,
        "chosen": None
        if chosen is None
        else (type(chosen).__name__, vars(chosen).get("every_n_steps"), made.overhead_target),
    }


def start(ranks: int, checkpoint: Callable[[], Any], **options: Any) -> list[dict[str, Any]]:
    work = partial(trained, checkpoint=checkpoint, ranks=ranks, **options)
    return run_world(ranks, work, process_group=False)


def killed(ranks: int, checkpoint: Callable[[], Any], at: int) -> None:
    with pytest.raises(RuntimeError):  # the others are killed by the launcher, or leave
        start(ranks, checkpoint, kill_at=at)


@pytest.mark.parametrize("ranks", [1, pytest.param(3, marks=pytest.mark.soak)])
def test_a_run_that_chooses_ends_the_same(ranks: int, tmp_path: Path) -> None:
    """Killed in the trial and behind the choice: later starts make the stored choice, on all ranks, and each weight has its bits."""
    calm = start(ranks, lambda: DenseCheckpoint(tmp_path / "calm", every_n_steps=500))
    url = tmp_path / "run"
    measuring = partial(auto, url, mtbf="10min")
    killed(ranks, measuring, 14)
    assert not (url / "choice.json").exists()
    killed(ranks, measuring, -1)
    stored = json.loads((url / "choice.json").read_text())
    assert stored["world_size"] == ranks
    assert Profile.read(url / "profile.yaml").ranks == ranks
    ends = start(ranks, measuring)
    for end, reference in zip(ends, calm, strict=True):
        assert all(map(torch.equal, end["weights"], reference["weights"]))
        assert end["resumed"] >= 10
        assert end["chosen"] == ends[0]["chosen"]
        assert end["chosen"][0] == stored["callback"]
        assert end["chosen"][2] == stored["arguments"].get("overhead_target", 0.03)
    assert json.loads((url / "choice.json").read_text()) == stored


def test_other_settings_choose_again_and_never_measure_again(tmp_path: Path) -> None:
    """Another rate uses the stored profile; what is given is not chosen; `resume='never'` begins with a trial."""
    (tmp_path / "profile.yaml").write_text(
        PROFILE.replace("nodes: 4, ranks_per_node: 4, expert_parallel: 4", "nodes: 1")
    )
    stored = {
        "callback": "DenseCheckpoint",
        "arguments": {"every_n_steps": 7},
        "mtbf": 600.0,
        "replicas": None,
        "world_size": 1,
    }
    (tmp_path / "choice.json").write_text(json.dumps(stored))

    def recalled(mtbf: float, ranks: int = 1, **shared: Any) -> Any:
        made = auto(tmp_path, mtbf=mtbf, **shared)
        assert isinstance(made, AutoCheckpoint)
        return made._recalled(ranks)

    assert recalled(600.0) == ["DenseCheckpoint", {"every_n_steps": 7}]
    assert recalled(600.0, ranks=2) is None
    assert recalled(600.0, resume="never") is None
    name, arguments = recalled(3600.0)
    assert (name, arguments) != ("DenseCheckpoint", {"every_n_steps": 7})
    assert json.loads((tmp_path / "choice.json").read_text())["mtbf"] == 3600.0
    assert recalled(3600.0) == [name, arguments]
    choice = json.loads((tmp_path / "choice.json").read_text())
    (tmp_path / "choice.json").write_text(json.dumps({**choice, "host_nbytes": 1}))
    with pytest.raises(ConfigurationError, match="The least that a node needs"):
        recalled(60.0)


@pytest.mark.parametrize(
    ("choice", "profile", "says"),
    [
        ("[]", PROFILE, "choice.json at .* is no choice"),
        ("{", PROFILE, "choice.json at .* is no choice"),
        ('{"mtbf": 600.0, "replicas": null, "world_size": 1}', PROFILE, "choice.json at .* is no choice"),
        (
            '{"callback": "DenseCheckpoint", "arguments": {}, "world_size": 1}',
            None,
            "profile.yaml at .* cannot be read",
        ),
        (
            '{"callback": "DenseCheckpoint", "arguments": {}, "world_size": 1}',
            "a: [",
            "profile.yaml at .* cannot be read",
        ),
    ],
)
def test_what_is_stored_badly_is_measured_again(
    choice: str, profile: str | None, says: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With a WARNING."""
    (tmp_path / "choice.json").write_text(choice)
    if profile is not None:
        (tmp_path / "profile.yaml").write_text(profile)
    made = auto(tmp_path, mtbf=600.0)
    assert isinstance(made, AutoCheckpoint)
    assert made._recalled(1) is None
    assert re.search(says, caplog.text)


def test_trouble_with_storage_is_no_end_of_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The figures are looked at again 24 steps later."""
    asked: list[int] = []

    def fails_once(view: RunView, *, needs: Any) -> Any:
        asked.append(1)
        if len(asked) == 1:
            raise StorageError("an outage")
        return profile_of(view, needs=needs)

    monkeypatch.setattr("lightning_moe_ckpt.callbacks._auto.profile_of", fails_once)
    made = auto(tmp_path / "run", mtbf="10min")
    end = trained(0, lambda: made, ranks=1)
    assert len(asked) > 1
    assert end["chosen"] is not None


def test_markers_are_read_only_for_a_choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of thousands of ranks each look would take long, and most find that the log does not know enough yet."""
    trained(0, lambda: SparseCheckpoint(tmp_path, window=2, every_n_steps=8), ranks=1, steps=60)
    read: list[int] = []
    original = RunView.read_marker

    def noted(view: RunView, commit: Any, rank: int) -> Any:
        read.append(rank)
        return original(view, commit, rank)

    monkeypatch.setattr(RunView, "read_marker", noted)
    with closing(open_backend(str(tmp_path))) as backend:
        view = RunView.open(backend)
        document, _ = profile_of(view, needs={"speeds.host_host"})
        assert (read, document["model"]) == ([], {})
        document, sources = profile_of(view, needs={"training.step_seconds"})
    assert read == [0]
    assert document["model"]["operators"]
    assert "training.step_seconds" in sources


def test_what_cannot_be_chosen_leaves_the_trial(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An ERROR says what cannot work, and training goes on with the checkpoints it has."""
    made = auto(tmp_path / "run", mtbf=1e-6)
    (end,) = [trained(0, lambda: made, ranks=1, steps=80)]
    assert end["chosen"] is None
    assert made.report.generations_complete >= 2
    assert "must be longer than a step" in caplog.text


def test_with_a_profile_the_callback_is_chosen_at_once(tmp_path: Path) -> None:
    """Arguments that are given are kept."""
    (profile := tmp_path / "profile.yaml").write_text(PROFILE)
    made = auto(tmp_path / "run", mtbf="1h", profile=profile)
    assert isinstance(made, SparseCheckpoint | DenseCheckpoint)
    assert made.every_n_steps is not None
    assert made.every_n_steps > 1
    assert made.replicas in {1, 2}
    given = auto(tmp_path / "run", mtbf="1h", profile=str(profile), replicas=0, overhead_target=0.5, keep=3)
    assert (given.replicas, given.overhead_target, given.keep) == (0, 0.5, 3)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"mtbf": "soon"}, r"`auto\(mtbf='soon'.*must be a time"),
        ({"mtbf": 0}, r"`auto\(mtbf=0\)` must be longer than 0"),
        ({"mtbf": "1h", "allow_loss": [1]}, r"allow_loss=\[1\]"),
        ({"mtbf": "1h", "allow_loss": "much"}, r"allow_loss='much'"),
        ({"mtbf": "1h", "allow_loss": "0.05"}, r"`auto\(allow_loss='0.05'\)` without a profile"),
        ({"mtbf": "1h", "profile": "nowhere.yaml"}, r"nowhere.yaml: no profile can be read"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict[str, Any], says: str, tmp_path: Path) -> None:
    """With what is wanted."""
    with pytest.raises(ConfigurationError, match=says):
        auto(tmp_path, **arguments)
