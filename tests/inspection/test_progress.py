"""`moe-ckpt top` and `report`: what a run that was started twice says of itself, in a terminal and as a page."""

from __future__ import annotations

import json
import re
import time
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from lightning.pytorch import Callback, Trainer

from inspection._runs import Small, train
from lightning_moe_ckpt.callbacks import DenseCheckpoint, SparseCheckpoint
from lightning_moe_ckpt.cli import main
from lightning_moe_ckpt.goodput import PARTS
from lightning_moe_ckpt.inspection import _answers, _progress_views
from lightning_moe_ckpt.inspection._progress_views import page_of
from lightning_moe_ckpt.inspection._run_progress import Follower
from lightning_moe_ckpt.storage import RunView, open_backend


@pytest.fixture(scope="module")
def restarted(tmp_path_factory: pytest.TempPathFactory) -> str:
    """URL of a run that ended at step 8 and was then trained up to step 14."""
    url = str(tmp_path_factory.mktemp("restarted") / "run")
    for steps in (8, 14):
        checkpoint = DenseCheckpoint(url, every_n_steps=1, keep=1, overhead_target=None)
        train(Small(), checkpoint, steps=steps)
    return url


def asked(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    assert main([*argv, "--json"]) == 0
    return dict(json.loads(capsys.readouterr().out))


def test_top_says_how_far_a_run_is(restarted: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Its starts, its newest step by tier and rank, and rates, from what it wrote anyway."""
    found = asked(capsys, "top", restarted)
    assert (found["state"], found["step"], found["stored"], found["last_step"]) == ("finished", 14, 14, 14)
    first, second = found["incarnations"]
    assert (first["resumed_from"], first["reached"], second["resumed_from"], second["reached"]) == (None, 8, 8, 14)
    assert first["opened"] < second["opened"] <= time.time()
    steps = [sample["step"] for sample in second["samples"]]
    assert steps == sorted(steps)
    assert steps[-1] == 14
    assert found["lost_steps"] == 0
    parts = found["goodput"]
    assert 0 < parts["share"] < 1
    assert parts["startup"] + parts["idle"] + parts["productive"] < sum(map(parts.get, PARTS))
    assert found["steps_per_second"] > 0
    assert found["eta_seconds"] is None
    assert {(place["tier"], place["rank"], place["step"]) for place in found["places"]} == {
        ("storage", -1, 14),
        ("storage", 0, 14),
    }


def test_top_fits_into_80_columns_and_ends_where_nobody_looks(
    restarted: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Into a pipe it is shown once, as with `--once`."""
    monkeypatch.setattr(_answers, "_PIPE_WIDTH", 80)
    assert main(["top", restarted]) == 0
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines())) <= 80
    assert "…" not in said
    for words in ("finished, incarnation 2", "14 of 14 (100%)", "goodput", "from step", "steps/s"):
        assert words in said


def test_what_is_in_memory_of_this_node_is_seen_while_it_trains(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A look from outside, in the midst of a fit: the rank's own memory, which lives, and that training goes on."""
    url, seen = str(tmp_path / "run"), []

    class Look(Callback):
        def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
            if trainer.global_step == 9:
                seen.append(asked(capsys, "top", url))

    checkpoint = SparseCheckpoint(url, window=2, keep=1, overhead_target=None)
    train(Small(), checkpoint, Look(), steps=12)
    (found,) = seen
    assert found["state"] == "training"
    memory = [place for place in found["places"] if place["tier"] == "host"]
    assert [(each["rank"], each["step"] >= 6) for each in memory] == [(0, True)]
    assert found["last_step"] == 12
    assert found["eta_seconds"] is None or found["eta_seconds"] > 0


def test_entries_are_read_once(restarted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A view that is drawn every two seconds must not read a thousand objects each time."""
    backend = open_backend(restarted)
    follower, read = Follower(RunView.open(backend)), list[str]()
    get = type(backend).get

    def counted(self: Any, key: str) -> bytes:
        read.append(key)
        return get(self, key)

    monkeypatch.setattr(type(backend), "get", counted)
    first = follower.look()
    entries = [key for key in read if key.startswith("_log/")]
    assert len(entries) == len(set(entries)) > 5
    read.clear()
    assert follower.look().incarnations == first.incarnations
    assert not [key for key in read if key.startswith("_log/")]
    backend.close()


class Links(HTMLParser):
    """What a page would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        links = [value or "" for name, value in attrs if name in {"src", "href", "xlink:href"}]
        self.found += [link for link in links if not link.startswith("#")]
        assert tag not in {"script", "link", "iframe", "img"}

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_a_report_is_one_page_with_its_plots_in_it(
    restarted: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is fetched when it is shown; it is not written over a file without `--force`."""
    out = tmp_path / "page.html"
    assert main(["report", restarted, str(out)]) == 0
    page = out.read_text()
    links = Links()
    links.feed(page)
    assert links.found == []
    assert not re.search(r"url\((?!#)|@import", page)
    assert page.count("<svg") == 4
    assert page.count("<!-- incarnation -->") == 3, "each plot says which colour is which start"
    assert page.count("<!-- part -->") == 1
    words = " ".join(links.text)
    for said in ("Lag of storage", "Goodput", "14 of 14 (100%)", restarted):
        assert said in words
    capsys.readouterr()
    assert main(["report", restarted, str(out)]) == 2
    assert "--force" in capsys.readouterr().err
    assert asked(capsys, "report", restarted, str(out), "--force")["nbytes"] == out.stat().st_size


def test_entries_in_which_training_did_not_go_on_say_nothing_of_speed(restarted: str) -> None:
    """The last one is written when all steps are done: no point of the plot is at zero."""
    backend = open_backend(restarted)
    samples = Follower(RunView.open(backend)).look().incarnations[-1].samples
    backend.close()
    later = replace(samples[-1], seconds=samples[-1].seconds + 1, unix_time=samples[-1].unix_time + 1)
    assert _progress_views._advancing([*samples, later]) == _progress_views._advancing(samples) != []


def test_a_run_without_figures_has_a_page_without_plots(
    dense_run: tuple[str, object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As of releases before, or that was killed before its first commit: what is known is shown."""
    backend = open_backend(dense_run[0])
    view = RunView.open(backend)
    with mock.patch.object(view, "events", return_value={}):
        found = Follower(view).look()
    assert (found.step, found.incarnations, found.steps_per_second, found.goodput) == (6, (), None, None)
    assert "There are no plots" in page_of(found)
    backend.close()
