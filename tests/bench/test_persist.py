"""What persisting is compared with is whole and durable too, and goals are judged by what was measured."""

from __future__ import annotations

import io
import logging
from datetime import timedelta
from pathlib import Path

import pytest
from launcher import run_world
from rich.console import Console

from benchmarks import persist
from benchmarks.costs import Cost
from benchmarks.persist import (
    CPU,
    LOCAL,
    Pair,
    PersistFigure,
    StepsMeanwhile,
    _BareObjects,
    _cpu,
    _p99,
    _ratio,
    _RawFiles,
    take_pairs,
    time_steps,
)
from lightning_moe_ckpt.benchmarks._fits import ModelSize
from lightning_moe_ckpt.errors import ConfigurationError
from lightning_moe_ckpt.inspection import verify
from lightning_moe_ckpt.storage import open_backend


def _pair(bare: float, ours: float) -> Pair:
    return Pair(2**30, *(Cost(seconds, seconds / 10) for seconds in (bare, ours)))


class _Enough(Exception):
    pass


def test_both_sides_store_all_bytes(tmp_path: Path) -> None:
    """The generation passes `verify`; what is stored barely is gone after its turn, like the generation before."""

    def work(_: int) -> list[int]:
        stored: list[int] = []

        def hand_over(pair: Pair) -> None:
            stored.append(pair.nbytes)
            if len(stored) == 3:
                raise _Enough

        with pytest.raises(_Enough):
            take_pairs(tmp_path.as_uri(), None, 10**6, 2, hand_over)
        return stored

    (stored,) = run_world(1, work, process_group=False, timeout=timedelta(minutes=2))
    assert len(set(stored)) == 1
    assert stored[0] >= 10**6
    backend = open_backend(str(tmp_path / "run"))
    verdict = verify(backend, everything=True)
    backend.close()
    assert verdict.sound
    assert (len(verdict.generations), verdict.num_files) == (1, 2)
    assert verdict.nbytes >= stored[0]
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_raw_files_are_written_whole(tmp_path: Path) -> None:
    """One per segment."""
    raw = _RawFiles(tmp_path)
    raw("x", [memoryview(b"abc"), memoryview(b"de")])
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"x-0": b"abc", "x-1": b"de"}
    raw.forget("x")
    assert not list(tmp_path.iterdir())


def test_ratios_are_taken_within_a_turn() -> None:
    """A slow minute slows both sides of its pair."""
    figure = _ratio(LOCAL, [_pair(1.0, 1.1), _pair(10.0, 11.0), _pair(1.0, 3.0)], "")
    assert figure.value == pytest.approx(1.1)
    assert figure.range == pytest.approx((1.1, 3.0))
    assert figure.outcome == "met"
    assert _ratio(LOCAL, [_pair(1.0, 1.3)], "").outcome == "NOT met"
    cpu = _cpu([_pair(1.0, 5.0)], "")
    assert cpu.value == pytest.approx(0.5)
    assert (cpu.outcome, cpu.baseline) == ("met", "0.10 s/GiB")


def test_what_was_not_measured_meets_nothing() -> None:
    """And says why."""
    figures = [
        _ratio(LOCAL, [], "not run: why"),
        _cpu([], "not run: why"),
        _p99(StepsMeanwhile(idle=[1.0], persisting=[])),
    ]
    assert [figure.value for figure in figures] == [None] * 3
    assert [figure.outcome for figure in figures] == ["not run: why"] * 2 + [
        "not run: 0 steps met a write and 1 did not"
    ]
    assert CPU.what in _shown(figures)


def test_slow_steps_while_writing_are_seen() -> None:
    """Two in a hundred are what p99 is about."""
    idle = [0.1] * 200
    assert _p99(StepsMeanwhile(idle=idle, persisting=[0.1] * 97 + [0.2] * 3)).outcome == "NOT met"
    assert _p99(StepsMeanwhile(idle=idle, persisting=[0.1] * 200)).value == pytest.approx(1)


@pytest.mark.parametrize("num_steps", [40, 24], ids=["ends-writing", "ends-held"])
def test_steps_are_told_apart(tmp_path: Path, num_steps: int) -> None:
    """Of stretches one is idle, another meets writes of a window at least, no step counts twice; nobody hears of it."""

    def work(_: int) -> tuple[int, int, int, list[str]]:
        said: list[str] = []
        handler = logging.Handler(logging.WARNING)
        handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("lightning_moe_ckpt").addHandler(handler)
        size = ModelSize(num_blocks=1, model_dim=32, num_experts=4, expert_dim=64, batch_size=2)
        steps = time_steps(tmp_path.as_uri(), size, num_steps=num_steps, warm_up=8, accelerator="cpu")
        return len(steps.idle), len(steps.persisting), sum(second > 0 for second in steps.idle + steps.persisting), said

    ((idle, persisting, positive, said),) = run_world(1, work, process_group=False, timeout=timedelta(minutes=2))
    held = min(16, num_steps - 16)
    assert (8 if held == 16 else 0) <= idle <= held, "steps in which a write ended that had begun before are neither"
    assert 1 <= persisting <= 24
    assert positive == idle + persisting
    assert said == [], "the end waits for no write that is held up"


def _shown(figures: list[PersistFigure]) -> str:
    console = Console(width=250, file=io.StringIO(), record=True)
    console.print(persist.table(figures))
    return console.export_text()


def test_object_urls_are_of_s3() -> None:
    """What puts are measured on."""

    with pytest.raises(ConfigurationError, match="must begin with s3://"):
        _BareObjects("gs://bucket/place", {"token": "anon"})
