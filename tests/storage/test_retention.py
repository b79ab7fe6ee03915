"""Retention: which generations stay by number, step and age, in any combination, and what the log says of them."""

from __future__ import annotations

import dataclasses
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from door import History, commit_key
from hypothesis import given, settings
from hypothesis import strategies as st
from stored._lives import LIFE, named
from stored._runs import begin, save, steps, stored, write

from lightning_moe_ckpt.errors import ConfigurationError, Fenced, KeyMissing
from lightning_moe_ckpt.storage import (
    Commit,
    GenerationId,
    PosixBackend,
    Retention,
    segment_key,
)
from lightning_moe_ckpt.storage._retention import advanced_history

DAY = 86_400


@pytest.fixture
def backend(tmp_path: Path) -> PosixBackend:
    return PosixBackend(tmp_path / "run")


def test_every_rule_keeps_what_it_says_and_together_they_keep_all_of_it(backend: PosixBackend) -> None:
    """The last two, the first after every hundred, and three days."""
    store = begin(backend)
    retention = Retention(last=2, every_n_steps=100, days=3)
    for number, step in enumerate(range(0, 400, 30)):
        save(store, step, retention, unix_time=number * DAY)
    assert steps(store) == stored(backend) == [0, 120, 210, 300, 330, 360, 390]
    save(store, 420, Retention(last=2, every_n_steps=100), unix_time=14 * DAY)
    assert steps(store) == stored(backend) == [0, 120, 210, 300, 390, 420]
    save(store, 450, Retention(last=1, days=1), unix_time=15 * DAY)
    assert steps(store) == stored(backend) == [420, 450]


def test_what_is_kept_for_good_outlives_lives(backend: PosixBackend) -> None:
    """Also under a later incarnation that keeps otherwise, until it has committed and said so."""
    store = begin(backend)
    for step in range(0, 70, 10):
        save(store, step, Retention(last=2, every_n_steps=30))
    second = begin(backend)
    assert steps(second) == [0, 30, 50, 60]
    second.retain(Retention(last=2, every_n_steps=30))
    assert stored(backend) == [0, 30, 50, 60]
    save(second, 70, Retention(last=2))
    assert steps(second) == stored(backend) == [60, 70]


def test_a_life_may_begin_from_what_was_kept_below_the_watermark(backend: PosixBackend) -> None:
    """The newer ones were damaged: the steps begin again there, and what the old incarnation had beyond them is dead."""
    store = begin(backend)
    retention = Retention(last=2, every_n_steps=30)
    for step in range(0, 80, 10):
        save(store, step, retention)
    second = begin(backend, at=30)
    assert steps(second) == [0, 30]
    for step in (40, 50):
        save(second, step, retention)
    assert steps(second) == stored(backend) == [0, 30, 40, 50]
    late = write(store, 45)  # the old incarnation, which does not know
    with pytest.raises(Fenced):
        store.commit(late, timeout=timedelta())
    assert begin(backend).candidates()[0].generation == named(step=50, incarnation=2)


def test_a_milestone_that_cannot_be_read_now_is_kept_with_the_next_one(backend: PosixBackend) -> None:
    """The medium may only be away; when it is back, the later one goes."""
    store = begin(backend)
    for step in (0, 100, 130, 160):
        save(store, step, Retention(last=1, every_n_steps=100))
    key = commit_key(named(step=100, incarnation=1))
    manifest = backend.get(key)
    backend.put(key, b"unreadable for now")
    for step in (190, 220):
        save(store, step, Retention(last=1, every_n_steps=100))
    assert stored(backend) == [0, 100, 160, 220]
    backend.put(key, manifest)
    save(store, 250, Retention(last=1, every_n_steps=100))
    assert steps(store) == stored(backend) == [0, 100, 200 + 20, 250]


def test_one_of_which_objects_are_missing_does_not_count(backend: PosixBackend) -> None:
    """Somebody deleted a segment by hand: the one before it stays in its place."""
    store = begin(backend)
    for step in (10, 20):
        save(store, step, Retention(last=2))
    backend.delete(segment_key(named(step=20, incarnation=1), 0, 20))
    save(store, 30, Retention(last=2))
    assert stored(backend) == [10, 20, 30]
    save(store, 40, Retention(last=2))
    assert stored(backend) == [30, 40]


@pytest.mark.parametrize("skew", [-10 * DAY, 10 * DAY])
def test_a_wrong_clock_never_takes_what_another_rule_keeps(backend: PosixBackend, skew: int) -> None:
    """Ahead, it lets others go early, but not the last two and not the milestones; behind, it keeps them longer."""
    store = begin(backend)
    retention = Retention(last=2, every_n_steps=100, days=5)
    for step in range(100, 160, 10):
        save(store, step, retention, unix_time=100 * DAY)
    save(store, 160, retention, unix_time=100 * DAY + skew)
    kept = [100, 150, 160] if skew > 0 else list(range(100, 170, 10))
    assert steps(store) == stored(backend) == kept


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"last": 0}, r"`Retention\(last=0\)` must be 1 or more generations"),
        ({"last": None}, r"`Retention\(last=None\)` must be 1 or more"),
        ({"last": True}, "last=True"),
        ({"every_n_steps": 0}, r"`Retention\(every_n_steps=0\)` must be 1 or more steps"),
        ({"every_n_steps": 1.5}, "every_n_steps=1.5"),
        ({"days": 0}, r"`Retention\(days=0\)` must be above zero"),
        ({"days": float("nan")}, "days=nan"),
        ({"days": float("inf")}, "days=inf"),
        ({"days": "7"}, "days='7'"),
    ],
)
def test_what_cannot_be_meant_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Retention(**arguments)


def commit_of(generation: GenerationId, unix_time: int) -> Commit:
    return Commit(
        run_id="r", generation=generation, plan_hash="p", world_size=1, steps=(generation.step,), markers=("m",),
        nbytes=1, unix_time=unix_time,
    )  # fmt: skip


retentions = st.builds(
    Retention,
    last=st.integers(1, 4),
    every_n_steps=st.none() | st.integers(1, 30),
    days=st.none() | st.integers(1, 40).map(lambda days: days / 4),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 2 * DAY)), min_size=1, max_size=20), st.lists(retentions))
def test_any_policies_in_turn_keep_the_union_of_their_rules(
    saves: list[tuple[int, int]], policies: list[Retention]
) -> None:
    """Against each rule taken literally: what one keeps is alive, what none keeps is dead or above the watermark."""
    history = History(run_id="r", first_incarnation=1, last_incarnation=0).opened(1, None, LIFE)
    commits: list[Commit] = []
    step = unix_time = 0
    for (steps_on, seconds), policy in zip(saves, [*policies, *[Retention()] * len(saves)], strict=False):
        step, unix_time = step + steps_on, unix_time + seconds
        commits.insert(0, commit_of(named(step=step, incarnation=1), unix_time))
        wanted = {c.generation for c in commits[: policy.last]}
        if policy.days is not None:
            wanted |= {c.generation for c in commits if unix_time - c.unix_time <= policy.days * DAY}
        if policy.every_n_steps is not None:
            multiples = range(0, step + 1, policy.every_n_steps)
            after = [[c.generation for c in commits if c.generation.step >= multiple] for multiple in multiples]
            wanted |= {
                min(each) for each, m in zip(after, multiples, strict=True) if min(each).step < m + policy.every_n_steps
            }
        stay = policy.reasons(commits, [])
        assert set(stay) == wanted
        history = advanced_history(history, stay, [c.generation for c in commits]) or history
        alive = {c.generation for c in commits if history.why_dead(c.generation) is None}
        assert wanted <= alive
        oldest_gap = max((c.generation.step for c in commits if c.generation not in wanted), default=-1)
        assert {g for g in alive if g.step <= oldest_gap} <= wanted
        commits = [c for c in commits if c.generation in alive]


def test_deletion_follows_the_log_and_never_leads_it(backend: PosixBackend) -> None:
    """The log fails: nothing was deleted."""
    store = begin(backend)
    retention = Retention(last=1, every_n_steps=20)
    for step in (0, 10, 20):
        store.commit(write(store, step), timeout=timedelta())
    rest = dataclasses.replace(retention, every_n_steps=None)
    rival = begin(backend)
    with pytest.raises(Fenced):
        store.retain(rest)
    assert stored(backend) == [0, 10, 20]
    rival.retain(retention)
    assert stored(backend) == [0, 20]
    with pytest.raises(KeyMissing):
        backend.get(commit_key(named(step=10, incarnation=1)))
