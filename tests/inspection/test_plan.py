"""`moe-ckpt plan` says what a node needs, or chooses for a profile; `tests/planning/test_forecast.py` and `tests/simulation/test_chooser.py` have the sums."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]
from lightning.pytorch.cli import LightningCLI
from tiny import ToZero, rows, waves
from torch import nn

from lightning_moe_ckpt.callbacks._base import checkpoint_of
from lightning_moe_ckpt.cli import main
from lightning_moe_ckpt.moe import MoELayer

MODEL = ["--params", "53.3e9", "--layers", "32", "--experts", "64", "--expert-params", "23e6", "--expert-parallel", "8"]
NODE = ["plan", *MODEL, "--nodes", "2", "--window", "6", "--replicas", "1"]


def test_the_table_has_every_purpose_of_a_node_of_eight_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    """40 GB of state per GPU: the first example of `docs/sizing.md`, with the room that containers need."""
    assert main(NODE) == 0
    shown = capsys.readouterr().out
    rows = {" ".join(words[:-4]): words[-4:] for line in shown.splitlines() if len(words := line.split()) > 4}
    assert rows["generations"] == ["112.01", "GiB", "168.01", "GiB"]
    assert rows["room for other plans"] == ["1.75", "GiB", "2.63", "GiB"]
    assert rows["copies of other ranks"] == ["113.76", "GiB", "113.76", "GiB"]
    assert rows["a rank"] == ["227.51", "GiB", "284.39", "GiB"]
    assert rows["a node of 8 ranks"] == ["1820.10", "GiB", "2275.13", "GiB"]
    assert "full state of a rank: 37.23 GiB; a generation: 56.00 GiB in a window of 6" in shown
    assert "`--shm-size=1857g`" in shown
    assert "takes 3 where 4642 GiB are free" in shown


def test_json_is_the_same_in_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    """Of one rank by the number of generations, and of the node."""
    assert main([*NODE, "--redundancy", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["window"] == 6
    assert document["captured"] == pytest.approx(document["generation"] / 2, rel=0.01)
    for generations, purposes in document["purposes"].items():
        assert document["node"][generations] == 8 * sum(purposes.values())
    assert set(document["purposes"]["2"]) == {
        "generations", "room for other plans", "copies of other ranks",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("policy", "generations"),
    [
        (["--policy", "dense"], ["2", "3"]),
        (["--policy", "differential", "--batch", "4"], ["2", "3"]),
        (["--policy", "partial", "--k", "2"], ["4"]),
        (["--policy", "selective", "--budget", "40GB"], ["4"]),
        (["--budget", "15GB", "--planner", "algorithm1"], ["2", "3"]),
    ],
)
def test_every_policy_has_a_plan(policy: list[str], generations: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """In pipeline stages, too: of half of the layers on half of the ranks, as many bytes each."""
    assert main([*NODE, *policy, "--layers", "4", "--json"]) == 0
    whole = json.loads(capsys.readouterr().out)
    assert list(whole["purposes"]) == generations
    assert main([*NODE, *policy, "--layers", "4", "--pipeline-parallel", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["full"] == pytest.approx(whole["full"], rel=0.01)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--params", "1e9"], "leave -46,104,000,000 of 1,000,000,000 for all else"),
        (["--config", "nowhere/config.json"], "transformers makes no language model of it"),
        (["--policy", "selective"], "measures its budget in training. Give one: `--budget`"),
        (["--experts", "60"], "`MoELayer(num_experts=60)` cannot be shared by `expert_parallel=8` ranks"),
        (["--replicas", "2"], "`replicas=2` needs 3 nodes"),
        (["--expert-parallel", "3"], "`expert_parallel=3` does not divide the 16 processes"),
        (["--pipeline-parallel", "3"], "`pipeline_parallel=3` does not divide the 16 processes"),
    ],
)
def test_what_cannot_be_is_said(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit status 2, in words and as a document."""
    assert main([*NODE, *arguments, "--json"]) == 2
    out, err = capsys.readouterr()
    assert says in err
    assert says in json.loads(out)["error"]["message"]


PROFILE = """\
training: {step_seconds: 2.0}
model: {layers: 4, experts: 8, params: 2e9, expert_params: 5e7}
cluster: {nodes: 4, ranks_per_node: 4, expert_parallel: 4}
speeds: {device_host: 10GB, host_host: 10GB, storage: 4GB}
costs: {detection: 5s, startup: 30s, hooks_per_step: 0.0005, hooks_per_capture: 0.01, slowed_per_nbyte: 2.0e-11, repair: 10min}
"""


@pytest.fixture
def profile(tmp_path: Path) -> str:
    path = tmp_path / "profile.yaml"
    path.write_text(PROFILE)
    return str(path)


def test_a_choice_is_shown_with_its_parts_and_two_others(profile: str, capsys: pytest.CaptureFixture[str]) -> None:
    """As a table, and as a document with the same numbers."""
    command = ["plan", "--profile", profile, "--mtbf", "1h"]
    assert main(command) == 0
    shown = capsys.readouterr().out
    assert main([*command, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert f"{document['goodput']:.2%}" in shown
    assert "why:" in shown
    assert "spares: " in shown
    assert len(document["alternatives"]) == len(document["why"]) == 2
    assert document["goodput"] >= max(each["goodput"] for each in document["alternatives"])
    assert sum(document["parts"].values()) == pytest.approx(1.0)
    name = document["callback"]["class_path"].rpartition(".")[2]
    assert f"{name}(url, " in shown
    assert document["host_nbytes"] > 0 < document["storage_nbytes_per_hour"]


def test_limits_of_the_choice(profile: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A policy, copies and lost tokens that are given."""
    assert main(["plan", "--profile", profile, "--mtbf", "1h", "--policy", "dense", "--replicas", "0", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["policy"], document["replicas"], document["alternatives"]) == ("dense", 0, [])
    given = ["plan", "--profile", profile, "--mtbf", "10min", "--policy", "partial", "--allow-loss", "0.05", "--json"]
    assert main(given) == 0
    assert 0 < json.loads(capsys.readouterr().out)["lost_portion"] <= 0.05


@pytest.mark.filterwarnings("ignore")  # jsonargparse has deprecated what LightningCLI calls
@pytest.mark.parametrize("policy", ["sparse", "dense", "differential", "partial"])
def test_the_printed_configuration_trains(
    policy: str, profile: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """LightningCLI loads it with our arguments, and a fit takes checkpoints at its URL."""
    url, config = tmp_path / "run", tmp_path / "trainer.yaml"
    limits = ["--policy", policy, "--replicas", "0", "--allow-loss", "0.05", "--url", str(url)]
    assert main(["plan", "--profile", profile, "--mtbf", "1h", "--yaml", *limits]) == 0
    config.write_text(capsys.readouterr().out)
    (entry,) = yaml.safe_load(config.read_text())["trainer"]["callbacks"]
    assert trained(config, monkeypatch) == entry["class_path"].rpartition(".")[2]
    assert (url / "_log").is_dir()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("with_profile", [True, False])
def test_auto_is_a_class_path(
    with_profile: bool, profile: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A function with a type to return is as good as a class to LightningCLI."""
    given = {"url": str(tmp_path / "run"), "mtbf": "1h", "replicas": 0} | ({"profile": profile} if with_profile else {})
    entry = {"class_path": "lightning_moe_ckpt.callbacks.auto", "init_args": given}
    (config := tmp_path / "trainer.yaml").write_text(yaml.safe_dump({"trainer": {"callbacks": [entry]}}))
    assert (trained(config, monkeypatch) == "AutoCheckpoint") is not with_profile
    assert (tmp_path / "run" / "_log").is_dir()


def trained(config: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Train a few steps under a configuration, and return the class of its checkpoint callback."""
    monkeypatch.setattr(sys, "argv", ["cli.py"])
    options = [f"--trainer.{name}=false" for name in ("logger", "enable_progress_bar", "enable_model_summary")]
    built = LightningCLI(
        Experts,
        args=["--config", str(config), "--trainer.max_steps=3", "--trainer.accelerator=cpu", *options],
        run=False,
        save_config_callback=None,
    )
    built.trainer.fit(built.model, rows(waves(8, 8)))
    assert built.trainer.global_step == 3
    found = checkpoint_of(built.trainer)
    assert found is not None
    return type(found).__name__


class Experts(ToZero):
    """A layer of experts, without arguments."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 8), MoELayer(8, 16, 4))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "the choice depends on how often they fail: add `--mtbf`"),
        (["--mtbf", "2s"], "must be longer than a step, 2.0 s"),
        (["--mtbf", "1h", "--nodes", "3"], "`--nodes`: with `--profile` it is what the profile says"),
        (["--mtbf", "1h", "--host-memory", "1MB"], "The least that a node needs is"),
        (["--mtbf", "1h", "--allow-loss", "5"], "`allow_loss=5` must be a portion"),
    ],
)
def test_what_cannot_be_chosen_is_said(
    arguments: list[str], says: str, profile: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit status 2, with the option by name."""
    assert main(["plan", "--profile", profile, *arguments]) == 2
    assert says in capsys.readouterr().err


def test_options_of_a_choice_need_a_profile(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """And the profile its numbers."""
    for option in (["--mtbf", "2h"], ["--host-memory", "1GB"], ["--yaml"], ["--url", "here"]):
        assert main([*NODE, *option]) == 2
        assert f"`{option[0]}` is for a choice" in capsys.readouterr().err
    (path := tmp_path / "bad.yaml").write_text(PROFILE.replace("startup: 30s", "startup: never"))
    assert main(["plan", "--profile", str(path), "--mtbf", "1h"]) == 2
    assert "`costs.startup: never` must be a time" in capsys.readouterr().err
