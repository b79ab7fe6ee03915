"""Figures of the papers: the table is whole, counts of plans are run, and a verdict can be bad."""

from __future__ import annotations

import io
import json
import math
from contextlib import redirect_stdout

import pytest
from rich.console import Console

from benchmarks import papers
from benchmarks.__main__ import PROGRAM
from benchmarks.papers import FIGURES, Figure, ascending, judged
from benchmarks.papers_plans import Way
from benchmarks.pipeline_memory import DENSE, PipelineSize, measure
from lightning_moe_ckpt.benchmarks._fits import ModelSize
from lightning_moe_ckpt.cli import run

WANTED = {
    *(f"pec-{each}" for each in ("2", "5a", "5b", "5d", "6", "7")),
    *(f"moetion-{each}" for each in ("table1", "3", "4", "8", "9", "10", "11")),
    *(f"tiercheck-exp{each}" for each in (3, 7, 8, 9)),
    *(f"moevement-{each}" for each in ("9", "13", "table6")),
}


def test_every_figure_is_there_and_says_where_it_is_from() -> None:
    """Each has claims, a limit of time, and a row of its own for what it says of the paper."""
    assert set(FIGURES) == WANTED
    for key, figure in FIGURES.items():
        assert figure.source.split()[0].lower() == key.partition("-")[0]
        assert figure.claims, key
        assert len({claim.text for claim in figure.claims}) == len(figure.claims), key
        assert 0 < figure.takes_seconds <= 120, key
        assert figure.note, key
        assert all(math.isfinite(number) for number in figure.paper.values()), key


def test_without_a_figure_all_are_listed() -> None:
    """In text of 80 columns, and as JSON."""
    with redirect_stdout(io.StringIO()) as out:
        assert run(PROGRAM, "benchmarks", ["papers", "--json"]) == 0
    listed = json.loads(out.getvalue())["papers"]
    assert [each["key"] for each in listed] == [*FIGURES]
    assert not any(each["ours"] for each in listed)
    assert run(PROGRAM, "benchmarks", ["papers", "--figure", "pec-99"]) == 2


@pytest.mark.parametrize("key", ["pec-5a", "pec-5b"])
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
