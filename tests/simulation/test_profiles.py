"""Profiles and traces are read as written, and what is wrong in them is refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lightning_moe_ckpt.cli import main
from lightning_moe_ckpt.errors import ConfigurationError
from lightning_moe_ckpt.simulation import SYSTEMS, Failures, Profile, simulate

GOOD = """\
training: {step_seconds: 1.5, steps: 1000}
model: {layers: 4, experts: 8, params: 80e6, expert_params: 2e6}
cluster: {nodes: 8, ranks_per_node: 2, expert_parallel: 8}
speeds: {device_host: 1GB, host_host: 5GB, storage: 500MB}
costs: {detection: 1s, startup: 0:00:10}
"""


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "profile.yaml"
    path.write_text(text)
    return path


def test_a_profile_is_read_with_its_units_and_written_again(tmp_path: Path) -> None:
    """Sizes, times and counts are numbers; defaults are left out."""
    found = Profile.read(written(tmp_path, GOOD))
    assert (found.model.params, found.speeds.storage, found.costs.startup) == (80_000_000, 500_000_000, 10.0)
    assert isinstance(found.model.params, int)
    found.write(tmp_path / "again.yaml")
    assert Profile.read(tmp_path / "again.yaml") == found
    assert "spares" not in (tmp_path / "again.yaml").read_text()
    endless = Profile.read(written(tmp_path, GOOD.replace("device_host: 1GB", "device_host: .inf")))
    assert simulate(endless, SYSTEMS["ours-sparse"], Failures(), until_seconds=60).steps > 0


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("step_seconds: 1.5", "step_seconds: 0", "`training.step_seconds: 0` must be a time in seconds, or such as 10min, above 0"),
        ("step_seconds: 1.5, ", "", "`training.step_seconds: None` must be seconds, or `training.stage_seconds`, and not both"),
        ("step_seconds: 1.5", "stage_seconds: [1, 2]", r"`training.stage_seconds: \[1, 2\]` must be one for each of `cluster.pipeline`, 1"),
        ("layers: 4, ", "", "`model.layers` is missing: a whole number of 1 or more"),
        ("layers: 4", "layers: 4.5", "`model.layers: 4.5` must be a whole number of 1 or more"),
        ("layers: 4", "layers: .inf", "`model.layers: inf` must be a whole number of 1 or more"),
        ("layers: 4", "layers: true", "`model.layers: True` must be a whole number"),
        ("expert_params: 2e6", "expert_params: 3e6", "`model.expert_params: 3000000` must be at most 2,500,000"),
        ("nodes: 8", "nodes: 3", "`cluster.nodes: 3` must be 1 stages of 8 expert-parallel ranks, or a multiple; there are 6 ranks"),
        ("storage: 500MB", "storage: fast", "`speeds.storage: fast` must be bytes, or a size such as 5GB"),
        ("storage: 500MB", "storage: .nan", "`speeds.storage: nan` must be bytes"),
        ("step_seconds: 1.5", "step_seconds: [2]", r"`training.step_seconds: \[2\]` must be a time in seconds"),
        ("step_seconds: 1.5", "step_seconds: 1e300", r"`training.step_seconds: 1e300` must be .* at most 1e\+09"),
        ("step_seconds: 1.5", "stage_seconds: 0.3", "`training.stage_seconds: 0.3` must be a list of values, each a time"),
        ("layers: 4", "layers: ", "`model.layers: None` must be a whole number of 1 or more"),
        ("layers: 4", "layers: 1e300", r"`model.layers: 1e\+300` must be a whole number .* at most 10000"),
        ("layers: 4", "layers: 4, operators: [5, 6]", "`model.operators: 5` must be a list of pairs of values, each bytes"),
        ("layers: 4", "layers: 4, operators: [[1, 2, 3]]", r"`model.operators: \(1, 2, 3\)` must be a list of pairs"),
        ("layers: 4", "layers: 4, operators: [[0, 0]]", "`model.operators: only zeros` must be a list of pairs, some with bytes"),
        ("detection: 1s", "detection: -1", "`costs.detection: -1` must be a time in seconds, or such as 10min, of 0 or more"),
        ("detection: 1s", "detect: 1s", "`costs` has no `detect`: its names are detection, startup"),
        ("costs:", "cost:", "a profile has no `cost`: its names are training, model"),
        (GOOD, "[1, 2]", "a profile must have the names training, model"),
        (GOOD, "a: [", "no profile can be read from it"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_refused_by_name(tmp_path: Path, old: str, new: str, said: str) -> None:
    """With what was found, and what is wanted."""
    with pytest.raises(ConfigurationError, match=said):
        Profile.read(written(tmp_path, GOOD.replace(old, new)))


def test_a_trace_is_read_with_scopes(tmp_path: Path) -> None:
    """In any order; a line that is no failure is named."""
    path = tmp_path / "trace.csv"
    path.write_text("seconds,scope\n30,node\n10.5,process\n20,\n")
    assert [*Failures.read(path).times(0)] == [(10.5, "process"), (20.0, "node"), (30.0, "node")]
    assert Failures.read(path).mean_seconds(60) == 20
    path.write_text("seconds,scope\n30,rack\n")
    with pytest.raises(ConfigurationError, match=r"line 2: .* one of process, node, cluster; found `30,rack`"):
        Failures.read(path)
    for first in ("time", "seconds,scop", "seconds,scope,scope"):
        path.write_text(f"{first}\n30\n")
        with pytest.raises(ConfigurationError, match=f"its first line must be `seconds,scope`.*found `{first}`"):
            Failures.read(path)
    path.write_text("seconds,scope\n30,node,process\n")
    with pytest.raises(ConfigurationError, match="line 2: "):
        Failures.read(path)
    path.write_text("\ufeffseconds, scope\n30, process\n")
    assert [*Failures.read(path).times(0)] == [(30.0, "process")]


def test_the_command_shows_systems_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As a table, as JSON, and drawn; settings of a system are its own."""
    path, trace, plot = written(tmp_path, GOOD), tmp_path / "trace.csv", tmp_path / "out.svg"
    trace.write_text("seconds,scope\n1000,node\n")
    systems = ["--system", "ours-sparse:window=4,replicas=2", "--system", "gemini"]
    assert (
        main(["simulate", str(path), "--mtbf", "30min", "--hours", "2", "--seeds", "2", "--plot", str(plot), *systems])
        == 0
    )
    shown = capsys.readouterr().out
    assert "16 ranks, steps of 1.5 s, 2 h, failures every 30 min" in shown
    assert "window 4, interval 4" in shown
    assert plot.read_text().count("<svg") == 1
    assert main(["simulate", str(path), "--trace", str(trace), "--hours", "2", "--json", *systems]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [(each["failures"], each["expected"]) for each in document["systems"]] == [(1, None), (1, None)]
    assert sum(document["systems"][0]["parts"].values()) == pytest.approx(1)
    for given, said in (
        (["--trace", str(trace), "--mtbf", "1h"], "leave out `--mtbf` and `--scope`"),
        (["--trace", str(trace), "--scope", "node"], "leave out `--mtbf` and `--scope`"),
        *((["--hours", hours], "must be above 0, and finite") for hours in ("0", "-1", "nan", "inf")),
    ):
        assert main(["simulate", str(path), *given]) == 2
        assert said in capsys.readouterr().err
    for wrong, said in (
        ("ours-sparse:window=0", "`Ours(window=0)` must be a whole number of 1 or more"),
        ("ours-sparse:localized=3", "`Ours(localized=3)` must be one of True, False"),
        ("ours-dense:replicas=9", "`replicas=9` needs 10 nodes, and there are 8"),
        ("moc:portion=0", "`MoC(portion=0)` must be a number above 0, at most 1"),
        ("checkfreq:target=true", "`CheckFreq(target=True)` must be a number above 0"),
        ("gemini:storage_every=-1", "`Gemini(storage_every=-1)` must be a whole number of 0 or more"),
        ("ours", "there are none, checkfreq"),
        ("gemini:k=1", "gemini has no `k`"),
        ("moc:portion=x", "settings are as in"),
    ):
        assert main(["simulate", str(path), "--system", wrong]) == 2
        assert said in capsys.readouterr().err
    assert main(["simulate", str(path), "--mtbf", "1s"]) == 2
    assert "must be longer than a step" in capsys.readouterr().err
