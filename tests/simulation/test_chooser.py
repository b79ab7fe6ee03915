"""What is chosen for a rate of failures, and why: claims that hold for every profile, and numbers of one by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import pytest

from lightning_moe_ckpt.errors import ConfigurationError
from lightning_moe_ckpt.goodput import Goodput
from lightning_moe_ckpt.simulation import PlannedRun, Profile, choose, reasons
from lightning_moe_ckpt.simulation._behaviour import log_enough
from lightning_moe_ckpt.simulation._chooser import _memory, _Search, _spares
from lightning_moe_ckpt.simulation._systems import Ours

HOUR = 3600.0
PROFILE = Profile.of(
    {
        "training": {"step_seconds": 2.0},
        "model": {"layers": 4, "experts": 8, "params": 2e9, "expert_params": 5e7},
        "cluster": {"nodes": 4, "ranks_per_node": 4, "expert_parallel": 4},
        "speeds": {"device_host": "10GB", "host_host": "10GB", "storage": "4GB"},
        "costs": {
            "detection": 5, "startup": 30, "restore_fixed": 1, "hooks_per_step": 0.0005, "hooks_per_capture": 0.01,
            "slowed_per_nbyte": 2e-11, "repair": 600,
        },
    }
)  # fmt: skip
RATES = (120.0, 600.0, HOUR, 6 * HOUR, 48 * HOUR)


@cache
def chosen(mtbf: float, **limits: object) -> list[PlannedRun]:
    return choose(PROFILE, mtbf, **limits)  # type: ignore[arg-type]


@pytest.mark.parametrize("system", [Ours(window=4), Ours(policy="dense"), Ours(policy="differential")])
def test_rarer_failures_never_shorten_the_interval(system: Ours) -> None:
    """Nor make goodput worse, of any policy alone."""
    given = replace(
        PROFILE, cluster=replace(PROFILE.cluster, spares=40)
    )  # else the fewer needed, the closer to too few
    found = [_Search(given, mtbf, "node").best(system) for mtbf in RATES]
    assert [each.every for each in found] == sorted(each.every for each in found)
    assert [each.goodput.share for each in found] == sorted(each.goodput.share for each in found)
    assert found[-1].every > found[0].every


def test_the_best_is_the_best_of_all_that_is_shown() -> None:
    """Three ways, of which no two have the same policy and window; each part is in one place."""
    for mtbf in RATES:
        found = chosen(mtbf)
        assert len({each.label for each in found}) == len(found) == 3
        shares = [each.goodput.share for each in found]
        assert shares == sorted(shares, reverse=True)
        for each in found:
            assert sum(each.goodput.shares().values()) == pytest.approx(1.0)
            assert each.every >= each.window


def test_no_cadence_beside_the_chosen_one_is_better() -> None:
    """The search is by turns: a scan over all steps between generations finds nothing that is better by a thousandth."""
    search, best = _Search(PROFILE, HOUR, "node"), chosen(HOUR)[0]
    every = range(best.window, 40 * best.window)
    scanned = max(search._share(replace(best.system, every_n_steps=each)) for each in every)
    assert best.goodput.share >= scanned - 0.001


def test_failures_of_nodes_ask_for_copies_on_others_and_spares() -> None:
    """And storage is left for what takes all nodes."""
    best = chosen(600.0)[0]
    assert best.system.replicas >= 1
    assert best.spares >= 1
    assert chosen(600.0, scope="process")[0].goodput.share > best.goodput.share
    alone = choose(PROFILE, 600.0, replicas=0)[0]
    assert alone.system.replicas == 0
    assert alone.goodput.share < best.goodput.share
    assert alone.storage_seconds <= best.storage_seconds


def test_spares_are_hardly_ever_too_few() -> None:
    """Machines that are away at once are a Poisson number; spares of the profile are kept, and too few of them are idle time."""
    for away in (0.001, 2.0, 144.0, 2000.0):
        spares = _spares(PROFILE, PROFILE.costs.repair / away, "node")
        assert log_enough(away, spares) >= math.log(0.99)
        assert not spares or log_enough(away, spares - 1) < math.log(0.99)
    exact = sum(math.exp(-2.0) * 2.0**n / math.factorial(n) for n in range(4))
    assert math.exp(log_enough(2.0, 3)) == pytest.approx(exact)
    assert _spares(PROFILE, 300.0, "process") == 0
    given = replace(PROFILE, cluster=replace(PROFILE.cluster, spares=1))
    (few,) = choose(given, 300.0, policies=["dense"])
    assert (few.spares, few.spares_needed) == (1, 6)
    assert few.goodput.shares()["idle"] > 0.4
    (enough,) = choose(PROFILE, 300.0, policies=["dense"])
    assert enough.spares == 6
    assert enough.goodput.shares()["idle"] < 0.01


def test_policies_are_exact_unless_losses_are_allowed() -> None:
    """Then what is lost stays within what is allowed."""
    assert {each.system.policy for mtbf in RATES for each in chosen(mtbf)} <= {"sparse", "dense", "differential"}
    assert all(each.lost_portion == 0 for each in chosen(HOUR))
    for allowed in (0.001, 0.05):
        assert all(each.lost_portion <= allowed for each in chosen(600.0, allow_loss=allowed))
    assert any(each.lost_portion > 0 for each in choose(PROFILE, 600.0, allow_loss=0.05, policies=["partial"]))


def test_what_does_not_fit_is_not_chosen() -> None:
    """Memory is the forecast's; below the least there is nothing, and the message says how much would do."""
    wanted = [each.host_nbytes for each in chosen(HOUR)]
    limit = max(wanted) - 1
    assert all(each.host_nbytes <= limit for each in choose(PROFILE, HOUR, host_nbytes=limit))
    with pytest.raises(
        ConfigurationError, match=r"The least that a node needs is [0-9.]+ GiB of shared memory, and 0.00 MiB|<0.01 MiB"
    ):
        choose(PROFILE, HOUR, host_nbytes=1)


@pytest.mark.parametrize("replicas", [0, 1])
@pytest.mark.parametrize(
    "system",
    [Ours(policy="dense"), Ours(policy="differential", every_n_steps=64), Ours(policy="differential", every_n_steps=4)],
)
def test_the_simulated_memory_is_about_the_forecast(system: Ours, replicas: int) -> None:
    """Which plans and lays out as in the run."""
    given = replace(system, replicas=replicas)
    planned = _Search(PROFILE, HOUR, "node").planned(given)
    assert planned.host_nbytes == pytest.approx(_memory(PROFILE, planned), rel=0.05)


def test_reasons_name_the_parts_that_differ() -> None:
    """In points of goodput, which add up to the difference."""
    best, *others = chosen(HOUR)
    for text, other in zip(reasons([best, *others]), others, strict=True):
        assert text.startswith(f"{other.label}: {100 * (best.goodput.share - other.goodput.share):.2f} points less")
        assert " more " in text


@pytest.mark.parametrize(
    ("mtbf", "limits", "says"),
    [
        (2.0, {}, r"`mtbf=2.0 s` must be longer than a step, 2.0 s.*Take shorter steps"),
        (5.0, {}, r"too short for a start, which takes 36 s .*hardly any"),
        (HOUR, {"replicas": 9}, "`replicas=9` needs 10 nodes, and there are 4"),
        (HOUR, {"allow_loss": 1.5}, r"`allow_loss=1.5` must be a portion"),
    ],
)
def test_what_cannot_work_is_said(mtbf: float, limits: dict[str, float], says: str) -> None:
    """Before anything is searched for."""
    with pytest.raises(ConfigurationError, match=says):
        choose(PROFILE, mtbf, **limits)  # type: ignore[arg-type]


def test_the_callback_is_what_was_planned() -> None:
    """Its arguments say window, interval, copies and the rest for storage."""
    for mtbf in RATES:
        for each in chosen(mtbf):
            name, given = each.callback()
            assert name.lower().startswith(each.system.policy)
            assert given["replicas"] == each.system.replicas
            assert given.get("every_n_steps", each.window) == each.every
            assert ("storage_at_least" in given) == each.plans_storage
    assert isinstance(chosen(HOUR)[0].goodput, Goodput)
