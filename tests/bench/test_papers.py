"""Figures of the papers: the table is whole, counts of plans are run, and a verdict can be bad."""

from __future__ import annotations

import io
import json
import math
import statistics
from contextlib import redirect_stdout
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
import torch
from _pages import ROOT
from rich.console import Console

from benchmarks import papers
from benchmarks.__main__ import PROGRAM
from benchmarks.papers import FIGURES, judged
from benchmarks.papers_figure import Figure, ascending
from benchmarks.papers_page import cells, keys_of, untold, with_rows
from benchmarks.papers_plans import Way
from benchmarks.papers_skew import ALPHAS, CountedProducts, drawn, repeated
from benchmarks.papers_trace import gaps
from benchmarks.papers_windows import PRECISIONS, bandwidth_of, window_of
from benchmarks.pipeline_memory import DENSE, PipelineSize, measure
from benchmarks.quality_fit import TextModel
from lightning_moe_ckpt.benchmarks._benchmark import Machine
from lightning_moe_ckpt.benchmarks._fits import ModelSize
from lightning_moe_ckpt.cli import run
from lightning_moe_ckpt.errors import ConfigurationError
from lightning_moe_ckpt.metrics import load_skew
from lightning_moe_ckpt.policies._windows import PlannerName

PLANNERS: tuple[PlannerName, ...] = get_args(PlannerName)

WANTED = {
    *(f"pec-{each}" for each in ("2", "5a", "5b", "5c", "5d", "6", "7")),
    *(f"moetion-{each}" for each in ("table1", "3", "4", "5", "6", "8", "9", "10", "11")),
    *(f"tiercheck-exp{each}" for each in (1, 2, 3, 5, 7, 8, 9)),
    *(f"moevement-{each}" for each in ("4", "6", "9", "10", "12", "13", "15", "16")),
    *(f"moevement-table{each}" for each in (1, 3, 5, 6, 7)),
}


def test_every_figure_is_there_and_says_where_it_is_from() -> None:
    """Each has claims, a limit of time, and a row of its own for what it says of the paper."""
    assert set(FIGURES) == WANTED
    for key, figure in FIGURES.items():
        assert figure.source.split()[0].lower() == key.partition("-")[0]
        assert figure.claims, key
        assert len({claim.text for claim in figure.claims}) == len(figure.claims), key
        assert 0 < figure.takes_seconds <= 150, key
        assert figure.note, key
        assert all(math.isfinite(number) for number in figure.paper.values()), key


def test_figures_are_listed_and_unknown_ones_refused() -> None:
    """Nothing is measured for a list."""
    with redirect_stdout(io.StringIO()) as out:
        assert run(PROGRAM, "benchmarks", ["papers", "--list", "--json"]) == 0
    listed = json.loads(out.getvalue())["papers"]
    assert [each["key"] for each in listed] == [*FIGURES]
    assert not any(each["ours"] for each in listed)
    assert run(PROGRAM, "benchmarks", ["papers", "--only", "pec-99"]) == 2


@pytest.mark.parametrize("key", ["pec-5a", "pec-5b", "moevement-6", "moevement-table7"])
def test_bytes_of_plans_are_those_of_the_paper(key: str) -> None:
    """These are pure counts, at the paper's size: equal on every machine."""
    figure = FIGURES[key]
    found = judged(figure, [figure.measure(Way(seed=1))])
    assert found.same_shape, found.claims
    assert any(row in found.ours for row in found.paper)
    console = Console(width=80, file=io.StringIO(), record=True)
    console.print(papers.table([found]))
    shown = console.export_text()
    assert "same shape" in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_windows_follow_from_one_bandwidth() -> None:
    """Half of the bandwidth needs longer windows by both planners, and the packed one is never longer than the paper's."""
    job = PRECISIONS["FP8, FP32, FP32+FP32"]
    bandwidth = bandwidth_of(job)
    assert window_of(job, bandwidth) == job.paper
    for planner in PLANNERS:
        assert window_of(job, bandwidth / 2, planner) > window_of(job, bandwidth, planner)
    assert window_of(job, bandwidth, "packed") <= job.paper


def test_draws_have_the_skew_of_the_paper() -> None:
    """Shares add up to one, and the metric finds each skew on average; few experts have a token where one has nearly all."""
    draw = np.random.default_rng(0)
    for skew, alpha in ALPHAS.items():
        shares = [np.exp(drawn(alpha, 64, draw)) for _ in range(100)]
        assert all(abs(each.sum() - 1) < 1e-9 for each in shares)
        found = [float(load_skew(torch.from_numpy(draw.multinomial(10**6, each)))) for each in shares]
        assert abs(statistics.fmean(found) - skew) < 0.08
    rows = FIGURES["moevement-15"].measure(Way(seed=1))
    assert rows["experts with a token, S=0, median"] == 64
    assert rows["experts with a token, S=0.99, median"] < 8


def test_products_are_counted_as_torch_runs_them() -> None:
    """Forward and both gradients of a layer have equally many multiplications; without the weight's gradient a third less."""
    counts = []
    for trains in (True, False):
        layer = torch.nn.Linear(8, 16)
        layer.weight.requires_grad_(trains)
        with CountedProducts() as mode:
            layer(torch.randn(4, 8, requires_grad=True)).sum().backward()
        counts.append(mode.count)
    assert counts == [3 * 4 * 8 * 16, 2 * 4 * 8 * 16]


def test_the_work_of_replay_is_that_of_its_steps() -> None:
    """All but the last step of a window are replayed with frozen operators; the rest is left out of the count."""
    before = [{"count": 90}, {"count": 90}]
    assert repeated([before, [{"count": 60}, {"count": 75}, {"count": 90}]], window=3) == (1.5, 0.75)


def test_a_trace_has_its_faults_within_its_batches() -> None:
    """Every attempt runs a few batches, and all together the whole trace, drawn by seed."""
    found = gaps(1, 24, 1860)
    assert (len(found), sum(found)) == (25, 1860)
    assert min(found) >= 4
    assert found == gaps(1, 24, 1860) != gaps(2, 24, 1860)


def test_rows_of_the_page_are_those_of_the_command() -> None:
    """A row that was typed, one of a figure that is gone, and a reason that has changed show here."""
    text = (ROOT / "docs" / "papers.md").read_text(encoding="utf-8")
    assert keys_of(text) <= set(FIGURES)
    assert with_rows(text, {}, FIGURES) == text
    assert untold(text) == text
    for key in ("moevement-6", "moevement-15"):
        figure = FIGURES[key]
        found = judged(figure, [figure.measure(Way(seed=1))])
        row = cells(figure, found.ours, found.claims, Machine.read()).split(" | ")
        (written,) = [line.split(" | ") for line in text.splitlines() if f"`--only {key}`" in line]
        assert [*row[:3], row[4]] == [*written[:3], written[4]]


def test_a_row_says_what_did_not_hold() -> None:
    """And a page without a place for rows is refused, unchanged."""
    figure = replace(FIGURES["moevement-6"], claims=[ascending("it grows", "a", "b")], shown=("a",), note="a | b")
    row = cells(figure, {"a": 2.0, "b": 1.0}, {"it grows": False}, Machine.read())
    assert "a: 2 %; **not so**: it grows" in row
    assert row.count("|") == 6
    with pytest.raises(ConfigurationError, match="has no `<!-- figures of MoEvement"):
        with_rows("# A page\n", {}, FIGURES)


def test_tasks_ask_for_their_bytes() -> None:
    """A model that always says one byte is right exactly where this byte is asked for."""
    size = ModelSize(num_blocks=1, model_dim=32, num_experts=2, expert_dim=32, context=16, batch_size=2)
    model = TextModel(size, 1)
    with torch.no_grad():
        model.head.weight.zero_()
        model.head.bias.zero_()
        model.head.bias[ord("(")] = 1.0
    text = torch.tensor([[*b"ab(\n(c)(def\nx = 1"[:17]]])
    found = model.accuracies(text)
    assert found["first of a line"] == 50
    assert found["inside words"] == 0
    assert found["every byte"] == pytest.approx(100 * 3 / 16)
    assert found["punctuation"] == pytest.approx(100 * 3 / 5)


@pytest.mark.soak
def test_memory_of_stages_is_that_of_what_is_kept() -> None:
    """Two ranks: everything once, weights of what waits at half the bytes, and all that crossed their border in two windows."""
    stage = ModelSize(num_blocks=1, model_dim=32, num_experts=8, expert_dim=512, context=8, batch_size=2)
    size = PipelineSize(stage=stage, stages=2, micro_batches=2)
    dense, sparse = measure(DENSE, size), measure(3, size)
    assert 12 * dense.params < dense.generation < 13 * dense.params
    assert (dense.log, dense.log_steps) == (0, 0)
    assert sparse.params == dense.params
    journals = dense.generation - 12 * dense.params
    weights = sparse.generation - dense.generation - 2 * journals
    # A parameter waits about one step until it is taken. Its weight has 2 bytes in BF16, and would have 4 in FP32.
    assert 1.6 < weights / dense.params < 2.6
    crossing = 4 * stage.batch_size * stage.context * stage.model_dim
    assert (sparse.log_steps, sparse.log) == (6, 6 * 2 * crossing)
    assert dense.shared > 2 * dense.generation
    assert sparse.shared > 2 * sparse.generation


def _figure() -> Figure:
    claims = [ascending("it grows", "a", "b", "c")]
    return Figure(
        key="pec-0", source="PEC", title="", takes_seconds=1, measure=lambda _: {}, claims=claims, note="a note"
    )


@pytest.mark.parametrize(
    ("rows", "same"),
    [((1, 2, 3), True), ((1, 1, 3), True), ((1, 3, 2), False), ((3, 2, 1), False), ((1, 1, 1), False)],
)
def test_a_verdict_can_be_bad(rows: tuple[float, ...], same: bool) -> None:
    """Equal rows have no order; neither has what is not a number."""
    ours = dict(zip("abc", rows, strict=True))
    found = judged(_figure(), [ours])
    assert (found.same_shape, found.claims) == (same, {"it grows": same})
    assert not judged(_figure(), [{**ours, "c": math.nan}]).same_shape
    console = Console(width=80, file=io.StringIO(), record=True)
    console.print(papers.table([found]))
    assert ("NO " in console.export_text()) == (not same)


def test_seeds_are_summed_up_by_their_median() -> None:
    """And a row that a claim is on has to be there."""
    found = judged(_figure(), [{"a": 1.0, "b": 2.0, "c": number} for number in (9.0, 3.0, 0.0)])
    assert (found.ours["c"], found.same_shape, found.seeds) == (3.0, True, 3)
    with pytest.raises(KeyError):
        judged(_figure(), [{"a": 1.0}])
