"""A simulated run divides its time as its events say, agrees with the closed form, and gains nothing from failures."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_moe_ckpt.errors import ConfigurationError
from lightning_moe_ckpt.simulation import (
    SYSTEMS,
    ClusterProfile,
    CostProfile,
    Failures,
    Gemini,
    MoC,
    ModelProfile,
    MoEvement,
    NoCheckpoints,
    Ours,
    Profile,
    Scope,
    Simulated,
    SpeedProfile,
    System,
    TrainingProfile,
    expected,
    simulate,
)

Event = tuple[float, Scope]
DENSE = Ours(policy="dense", every_n_steps=10, replicas=1, storage_every=30)


def profile(**costs: float) -> Profile:
    """A model of 960 MB on eight nodes: steps of 1 s, and no costs but these."""
    return Profile(
        training=TrainingProfile(step_seconds=1.0, tokens=100),
        model=ModelProfile(layers=4, experts=8, params=80_000_000, expert_params=2_000_000),
        cluster=ClusterProfile(nodes=8, ranks_per_node=2, expert_parallel=8),
        speeds=SpeedProfile(device_host=1e12, host_host=1e12, storage=1e15),
        costs=CostProfile(**{"detection": 0.0, "startup": 0.0} | costs),
    )


def costly(**cluster: Any) -> Profile:
    """The same with all costs, and copies that take longer than a step."""
    costs = {"detection": 0.5, "startup": 2.0, "startup_all": 20.0, "restore_fixed": 0.4, "restore_per_nbyte": 1e-9}
    costs |= {"hooks_per_step": 0.001, "hooks_per_capture": 0.01, "slowed_per_nbyte": 2e-10, "stall_whole": 0.5}
    costs["warm_up"] = 0.3
    cheap = profile(**costs, replay_factor=0.8)
    cluster_of = replace(cheap.cluster, **({"nodes": 64, "pipeline": 2, "micro_batches": 4} | cluster))
    return replace(cheap, speeds=SpeedProfile(device_host=1e7, host_host=1e9, storage=2e8), cluster=cluster_of)


def run(given: Profile, system: System, *failures: Event, seconds: float) -> Simulated:
    return simulate(given, system, Failures(trace=failures), until_seconds=seconds)


def parts(found: Simulated) -> dict[str, float]:
    return {name: round(found.goodput.wall * share, 6) for name, share in found.goodput.shares().items() if share}


def test_a_failure_of_a_process_costs_the_steps_since_the_generation_and_the_start() -> None:
    """Of step 26 a half is lost, and 21 to 25 are taken again."""
    found = run(profile(startup=3, detection=1), DENSE, (25.5, "process"), seconds=60)
    assert parts(found) == {"productive": 50.5, "detection": 1, "startup": 3, "lost": 5.5}
    assert (found.steps, found.failures) == (50.5, 1)


def test_slow_first_steps_are_a_cost_of_every_start() -> None:
    """Also behind the repeated steps, and in the closed form."""
    warm, cold = profile(startup=2.0), profile(startup=2.0, warm_up=3.0)
    found = [run(each, DENSE, (100.0, "process"), (200.0, "process"), seconds=400) for each in (warm, cold)]
    assert [each.goodput.startup for each in found] == pytest.approx([4.0, 10.0])
    shares = [expected(each, DENSE, 1000.0, "process").startup for each in (warm, cold)]
    assert shares[1] - shares[0] == pytest.approx(3.0, rel=0.01)


def test_every_scope_leaves_the_places_that_survive_it() -> None:
    """Memory and other nodes have step 20, storage nothing before step 30; two nodes at once may be the two with the copies."""
    left: list[tuple[Scope, float]] = [("process", 54.5), ("node", 54.5), ("cluster", 34.5)]
    for scope, steps in left:
        assert run(profile(), DENSE, (25.5, scope), seconds=60).steps == pytest.approx(steps, abs=1e-3)
    assert run(profile(), DENSE, (35.5, "cluster"), seconds=60).steps == pytest.approx(54.5, abs=1e-3)
    alone = run(profile(), replace(DENSE, replicas=0), (25.5, "node"), seconds=60)
    assert alone.steps == pytest.approx(34.5)


def test_a_sparse_generation_is_repeated_and_a_stage_alone_needs_no_turns_of_others() -> None:
    """A window of 4 covers three steps before its last. Of two stages with 4 micro-batches one alone takes 4 turns of 5."""
    sparse = run(profile(), Ours(window=4, replicas=0), (10.5, "process"), seconds=60)
    assert parts(sparse) == {"productive": 54.5, "repeated": 3, "lost": 2.5}
    two = replace(profile(), cluster=replace(profile().cluster, pipeline=2, expert_parallel=4, micro_batches=4))
    alone = run(two, Ours(window=4, replicas=0, localized=True), (10.5, "process"), seconds=60)
    assert parts(alone) == pytest.approx({"productive": 60 - 0.5 - 5 * 0.8, "repeated": 2.4, "lost": 2.1})


def test_a_failure_without_a_spare_waits_for_the_repair() -> None:
    """The spare takes the first lost machine's place; the second place waits for the first machine, repaired 100 s after its loss."""
    given = profile(repair=100)
    with_spare = replace(given, cluster=replace(given.cluster, spares=1))
    assert run(with_spare, DENSE, (12, "node"), seconds=300).goodput.idle == 0
    assert run(given, DENSE, (12, "node"), seconds=300).goodput.idle == pytest.approx(100)
    assert run(with_spare, DENSE, (12, "node"), (50, "node"), seconds=300).goodput.idle == pytest.approx(62)
    assert run(given, DENSE, (12, "node"), (50, "node"), seconds=300).goodput.idle == pytest.approx(138)
    assert run(given, DENSE, (12, "process"), seconds=300).goodput.idle == 0


def test_a_failure_during_recovery_begins_it_anew() -> None:
    """2 of 5 seconds of the start are spent twice."""
    found = run(profile(startup=5), DENSE, (12, "process"), (14, "process"), seconds=60)
    assert parts(found) == {"productive": 60 - 7 - 2, "startup": 7, "lost": 2}


def test_partial_generations_lose_the_mean_age_of_experts_and_k_grows() -> None:
    """One of 8 experts a step: copies are up to 7 steps old, 3.5 on average. K doubles once the budget is exceeded, not before."""
    moc, failures = MoC(plt_budget=0.1), list[Event]((each, "process") for each in (20.0, 40.0, 60.0, 80.0))
    found = run(profile(), moc, *failures[:2], seconds=100)
    assert (found.lost_tokens, found.notes["k"]) == (700, 1)
    found = run(profile(), moc, *failures, seconds=100)
    assert (found.lost_tokens, found.notes["k"]) == (1200, 4)
    assert run(profile(), DENSE, *failures, seconds=100).lost_tokens == 0


def test_steps_of_stages_are_turns_of_the_slowest_one() -> None:
    """1F1B: M + S - 1 turns, the collective and the optimizer."""
    given = replace(
        profile(),
        training=TrainingProfile(stage_seconds=(0.1, 0.2), update_seconds=0.3, synced=1000),
        cluster=replace(profile().cluster, pipeline=2, expert_parallel=4, micro_batches=4),
        speeds=replace(profile().speeds, alpha=0.01, beta=1e-5),
    )
    assert given.step_seconds == pytest.approx(5 * 0.2 + 0.01 + 0.01 + 0.3)
    assert given.alone_share * given.step_seconds == pytest.approx(given.step_seconds - 0.2)


_LISTS = st.lists(st.floats(1, 3000), min_size=0, max_size=12)


@settings(deadline=None, max_examples=60)
@given(
    name=st.sampled_from(sorted(SYSTEMS)),
    times=_LISTS,
    scope=st.sampled_from(["process", "node", "cluster"]),
    spares=st.integers(0, 2),
)
def test_the_parts_are_the_wall_time(name: str, times: list[float], scope: Scope, spares: int) -> None:
    """Whatever fails and when."""
    given = costly(spares=spares)
    given = replace(given, costs=replace(given.costs, repair=300.0))
    found = run(given, SYSTEMS[name], *[(each, scope) for each in times], seconds=2000)
    assert found.goodput.wall == pytest.approx(2000)
    assert found.goodput.productive == pytest.approx(found.steps)


@settings(deadline=None, max_examples=60)
@given(name=st.sampled_from(sorted(SYSTEMS)), times=_LISTS, left_out=st.sets(st.integers(0, 11)))
def test_failures_never_add_goodput(name: str, times: list[float], left_out: set[int]) -> None:
    """Some of the same failures leave as much as all of them, or more: but a failure that leaves nothing to restore saves restoring it."""
    failures: list[Event] = [(each, "process") for each in sorted(times)]
    some = [each for i, each in enumerate(failures) if i not in left_out]
    # Oracles choose by the failures' number, so they are told the same.
    system = Gemini(interval=20) if name == "gemini" else SYSTEMS[name]
    fewer, more = (run(costly(), system, *each, seconds=2000) for each in (some, failures))
    restored = fewer.goodput.restore + fewer.goodput.repeated
    assert fewer.goodput.productive + restored >= more.goodput.productive - 1e-6


@pytest.mark.parametrize("name", SYSTEMS)
def test_without_failures_a_run_is_as_expected(name: str) -> None:
    """Exactly, and until a number of steps as until a time."""
    want = expected(costly(), SYSTEMS[name], math.inf).shares()
    for until in ({"until_seconds": 12_345.6}, {"until_steps": 4321}):
        found = simulate(costly(), SYSTEMS[name], Failures(), **until)
        assert found.goodput.shares() == pytest.approx(want, abs=1e-12)


@pytest.mark.parametrize("name", [name for name in SYSTEMS if name not in {"none", "moc", "ours-partial"}])
@pytest.mark.parametrize("mtbf", [300.0, 3600.0])
def test_long_runs_are_as_expected(name: str, mtbf: float) -> None:
    """Within what 4,000 random failures leave open, in every part: K apart, which changes in the course of a run."""
    found = simulate(costly(), SYSTEMS[name], Failures(mtbf=mtbf), until_seconds=4000 * mtbf, seed=1)
    want = expected(costly(), SYSTEMS[name], mtbf).shares()
    assert found.goodput.shares() == pytest.approx(want, abs=0.006)


@pytest.mark.parametrize(("spares", "repair"), [(0, 300), (1, 3600), (3, 1800), (12, 3600)])
def test_waits_for_machines_are_as_expected(spares: int, repair: float) -> None:
    """However many spares there are for a machine lost every 10 min: idle is the time in which more of them are away."""
    given = profile(repair=repair, startup=20)
    given = replace(given, cluster=replace(given.cluster, spares=spares))
    found = simulate(given, DENSE, Failures(mtbf=600), until_seconds=6000 * 600, seed=1).goodput.shares()
    want = expected(given, DENSE, 600).shares()
    assert found["idle"] == pytest.approx(want["idle"], abs=0.02)
    assert found["productive"] == pytest.approx(want["productive"], abs=0.02)


def test_sixteen_thousand_ranks_for_six_hours_take_seconds() -> None:
    """Time depends on failures, not on ranks or steps."""
    given = replace(
        costly(nodes=2048, ranks_per_node=8, pipeline=64, expert_parallel=8, spares=4),
        model=ModelProfile(layers=61, experts=256, params=671_000_000_000, expert_params=42_000_000),
    )
    began = time.perf_counter()
    for system in SYSTEMS.values():
        simulate(given, system, Failures(mtbf=600), until_seconds=6 * 3600)
    took = time.perf_counter() - began
    print(f"{took:.1f} s for {len(SYSTEMS)} systems")
    assert took < 10


def test_windows_are_those_of_the_planner() -> None:
    """Twice the bytes per second need no longer window, and Algorithm 1 none that is shorter than the packed plan's."""
    for speed in (5e6, 1e7, 2e7, 4e7):
        given = replace(costly(), speeds=replace(costly().speeds, device_host=speed))
        ours, theirs = (each.behaviour(given, 3600).notes["window"] for each in (Ours(), MoEvement()))
        faster = replace(given, speeds=replace(given.speeds, device_host=2 * speed))
        assert Ours().behaviour(faster, 3600).notes["window"] <= ours <= theirs
    assert Ours(window=3).behaviour(costly(), 3600).notes["window"] == 3


def test_what_cannot_work_is_refused() -> None:
    """Failures within a step, a run without an end, and one that never ends."""
    with pytest.raises(ConfigurationError, match=r"mtbf=0.5 s` must be longer than a step, 1.0 s"):
        simulate(profile(), DENSE, Failures(mtbf=0.5), until_steps=10)
    with pytest.raises(ConfigurationError, match=r"training\.steps"):
        simulate(profile(), DENSE, Failures(mtbf=50))
    with pytest.raises(ConfigurationError, match="it never ends"):
        simulate(profile(startup=60), NoCheckpoints(), Failures(mtbf=2), until_steps=1000)
