"""Any history of saves, replications, commits, crashes, losses, restarts and reclamation, against what must survive.

Committed data is never lost, latest never runs ahead of durability, and nothing that a restart needs is ever gone.
Source: TierCheck (2026), Fig. 5; the design, Sec. 2 and 5.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from stored._machine import RANKS, Job, Loss

from lightning_moe_ckpt.storage import Retention

HISTORIES = 30
SOAK_HISTORIES = 5_000

retentions = st.builds(Retention, last=st.integers(1, 3), every_n_steps=st.none() | st.integers(2, 6))
mostly = st.sampled_from([True, True, True, False])
on_ranks = st.tuples(*(mostly for _ in RANKS))
losses = st.sampled_from(("processes", "processes", "node 0", "node 1", "cluster"))


class Histories(RuleBasedStateMachine):
    """One history; ends with the loss of everything but storage."""

    count = restarts = 0

    def __init__(self) -> None:
        super().__init__()
        self.job = Job()

    @rule(whole=on_ranks)
    def captures(self, whole: tuple[bool, ...]) -> None:
        self.job.capture(whole)

    @rule()
    def captures_on_all_ranks(self) -> None:
        self.job.capture([True for _ in RANKS])

    @rule()
    def learns_what_all_have_sealed(self) -> None:
        self.job.tell(self.job.own)

    @rule(whole=on_ranks)
    def replicates(self, whole: tuple[bool, ...]) -> None:
        self.job.replicate(whole)

    @rule()
    def learns_what_all_have_replicated(self) -> None:
        self.job.tell(self.job.copies)

    @rule(retention=retentions)
    def commits(self, retention: Retention) -> None:
        self.job.commit(retention, None, "before")

    @rule(retention=retentions)
    def captures_and_commits(self, retention: Retention) -> None:
        """Often enough that generations refer to some that retention would take."""
        self.job.capture([True for _ in RANKS])
        self.job.commit(retention, None, "before")
        self.job.tell(self.job.own)

    @rule(retention=retentions, at=st.integers(0, 30), when=st.sampled_from(["before", "after"]))
    def dies_while_it_commits(self, retention: Retention, at: int, when: str) -> None:
        self.job.commit(retention, at, when)  # type: ignore[arg-type]

    @rule(lost=losses)
    def dies(self, lost: Loss) -> None:
        self.job.restart(lost)

    @rule(retention=st.none() | retentions)
    def somebody_collects_garbage(self, retention: Retention | None) -> None:
        self.job.collect(retention)

    @rule(number=st.integers(0, 5))
    def a_zombie_wakes_up(self, number: int) -> None:
        self.job.wake_a_zombie(number)

    @invariant()
    def what_is_committed_can_be_restored(self) -> None:
        """By the log, whatever was deleted: all that nobody gave up."""
        offered = {commit.generation for commit in self.job.store.candidates()}
        assert self.job.committed <= offered, f"{sorted(self.job.committed - offered)} cannot be restored any more"

    def teardown(self) -> None:
        self.job.restart("cluster")
        type(self).count += 1
        type(self).restarts += self.job.restarts
        self.job.end()


def run_histories(number: int) -> tuple[int, int]:
    """How many histories were run, and how many restarts were in them."""
    Histories.count = Histories.restarts = 0
    quiet = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
    run_state_machine_as_test(
        Histories,
        settings=settings(max_examples=number, stateful_step_count=25, deadline=None, suppress_health_check=quiet),
    )
    return Histories.count, Histories.restarts


def test_any_history_keeps_what_a_restart_needs() -> None:
    """Thirty; the soak target runs thousands."""
    count, restarts = run_histories(HISTORIES)
    assert count >= HISTORIES
    assert restarts > count


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_thousands_of_histories_keep_what_a_restart_needs(capsys: pytest.CaptureFixture[str]) -> None:
    """And how many there were."""
    count, restarts = run_histories(SOAK_HISTORIES)
    with capsys.disabled():
        print(f"\n{count} histories with {restarts} restarts")
    assert count >= SOAK_HISTORIES
