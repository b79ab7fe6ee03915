"""An account divides wall time without gaps, and goes on from what a killed process has left of it."""

from __future__ import annotations

import os
import time
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_moe_ckpt.goodput import PARTS, Goodput
from lightning_moe_ckpt.process import ACCOUNT_NBYTES, Balance, HookClock, Origin, RunAccount, read_account, rounded
from lightning_moe_ckpt.process._account import gap

LAST = 1000.0


def origin(birth: float, launcher: float | None = None, noticed: float = 0.0) -> Origin:
    return Origin(birth, birth if launcher is None else launcher, noticed, False)


@pytest.mark.parametrize(
    ("ranks", "want"),
    [
        # torchrun lived, and started all processes anew
        ([origin(1004, 900), origin(1003, 900)], {"detection": 3, "startup": 7}),
        # a supervisor noticed; one process stayed, another one waited as a spare
        ([origin(900, 890, noticed=1001), origin(950, 890, noticed=1001)], {"detection": 1, "startup": 9}),
        # a later failure is no news of this one
        ([origin(900, 890, noticed=999), origin(1002, 890)], {"detection": 2, "startup": 8}),
        # somebody started the script again
        ([origin(1008)], {"idle": 8, "startup": 2}),
        # a lost node: its supervisor is younger, another one noticed
        ([origin(1006, 890, noticed=1002), origin(1007, 1005)], {"detection": 2, "idle": 3, "startup": 5}),
        # the same process trains again, or all clocks of the other ranks are wrong
        ([origin(900, 890)], {"startup": 10}),
        ([origin(2000, 890)], {"detection": 10}),
        ([origin(2000)], {"idle": 10}),
    ],
)
def test_a_gap_is_divided_by_what_is_known(ranks: list[Origin], want: dict[str, float]) -> None:
    """From the last sign of life to the begin of restoring, ten seconds later."""
    assert gap(LAST, ranks, LAST + 10) == Goodput(**want)


TIMES = st.floats(0, 2000)


@given(st.lists(st.builds(Origin, TIMES, TIMES, TIMES, st.booleans()), min_size=1), TIMES)
def test_a_gap_has_no_gap(ranks: list[Origin], now: float) -> None:
    """Whatever clocks say, its parts are the whole time, and none is negative."""
    assert gap(LAST, ranks, now).wall == pytest.approx(max(0.0, now - LAST))


class Beside:
    """Measures steps that are slower by so much."""

    slowed = 0.0
    share: float | None = None


class Clocks:
    """Time that a test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        self.hooks, self.beside = HookClock(), Beside()
        for name in ("time", "monotonic"):
            monkeypatch.setattr(time, name, lambda: self.now)

    def account(self, *known: Balance, birth: float | None = None) -> RunAccount:
        here = self.now if birth is None else birth
        return RunAccount(self.hooks, known, [Origin(here, 0.0, 0.0, True)], self.now)

    def step(self, account: RunAccount, step: int, seconds: float = 1.0) -> None:
        """A step of a tenth in hooks, and a twentieth slower."""
        self.now += seconds
        self.hooks.ended += seconds / 10
        self.beside.slowed += seconds / 20
        account.stepped(step)


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Clocks:
    return Clocks(monkeypatch)


def test_steps_decide_where_time_goes(clocks: Clocks) -> None:
    """Ten steps, a kill, and a start from a generation of steps 4 to 6: up to there they are repeated, up to 10 they were lost."""
    page, first = memoryview(bytearray(ACCOUNT_NBYTES)), clocks.account(birth=990.0)
    first.begin(None, 0, clocks.beside)
    clocks.now += 5
    first.passed(0)
    first.move(page)
    for step in range(1, 11):
        clocks.step(first, step)
    left = Balance.read(bytes(page))
    assert left is not None
    assert (left.at, left.step) == (1015, 10)
    assert left.goodput.startup == 15
    assert (left.goodput.productive, left.goodput.hooks, left.goodput.slowed) == pytest.approx((8.5, 1.0, 0.5))

    clocks.now += 7  # killed, noticed and started again
    second = clocks.account(left, Balance(500.0, 3, Goodput()), birth=1017.0)
    second.begin(6, 4, clocks.beside)
    clocks.now += 2
    second.passed(4)
    for step in range(5, 13):
        clocks.step(second, step)
    assert second.taken_again() == {"repeated": 2, "lost": 4}
    found = second.balance()
    assert (found.goodput.restore, found.goodput.repeated, found.goodput.lost) == (2, 2, 4)
    assert (found.goodput.detection, found.goodput.startup) == (2, 20)
    assert found.goodput.productive == pytest.approx(8.5 + 0.85 * 2)
    assert found.goodput.wall == pytest.approx(clocks.now - 990)
    assert second.own().wall == pytest.approx(clocks.now - 1015)
    clocks.now += 60  # in a collective, for a rank that is gone
    assert second.signed() == Balance(clocks.now - 60, 12, found.goodput)


def test_what_first_steps_take_longer_belongs_to_the_start(clocks: Clocks) -> None:
    """As soon as ten steps behind them say how long steps are; validation among them is no step's."""
    account = clocks.account(birth=990.0)
    account.begin(None, 0, clocks.beside)
    account.passed(0)
    for step in range(1, 15):
        clocks.step(account, step, 3.0 if step <= 5 else 1.0)
    assert account.balance().goodput.startup == 10
    clocks.now, clocks.hooks.validated = clocks.now + 4, 4.0
    clocks.step(account, 15)
    found = account.balance().goodput
    assert account.warm_up == pytest.approx(5 * 2 * 0.85)
    assert (found.startup, found.productive) == pytest.approx((10 + 8.5, 15 * 0.85 + 4))
    assert found.wall == pytest.approx(clocks.now - 990)
    clocks.step(account, 16, 100.0)
    assert account.balance().goodput.startup == found.startup
    assert account.signed().goodput.startup == found.startup


def test_a_later_start_presumes_what_an_earlier_one_has_measured(clocks: Clocks) -> None:
    """Its first steps are as much longer, and its steps beside background work, until it has measured that itself; both outlive two kills."""
    page, first = memoryview(bytearray(ACCOUNT_NBYTES)), clocks.account(birth=1000.0)
    first.begin(None, 0, clocks.beside)
    first.move(page)
    first.passed(0)
    for step in range(1, 17):
        clocks.step(first, step, 3.0 if step <= 5 else 1.0)
    clocks.beside.share = 0.25
    for step in range(17, 80):
        clocks.step(first, step)
    left, warm_up = Balance.read(bytes(page)), 5 * 2 * 0.85
    assert left is not None
    assert left.share == 0.25
    assert left.warm_up == pytest.approx(warm_up)
    assert read_account({"goodput": first.document()}) == Balance(
        clocks.now, 79, Goodput(**rounded(left.goodput)), left.share, left.warm_up
    )
    for start in (80, 90):
        clocks.beside.slowed, clocks.beside.share = 0.0, cast("float | None", None)
        again = clocks.account(Balance.of(left.plain()))
        again.begin(start, start, clocks.beside)
        assert clocks.beside.share == 0.25
        again.move(page)
        again.passed(start)
        before = again.balance().goodput
        for step in range(start + 1, start + 7):
            clocks.step(again, step, 2.0)
        killed = Balance.read(bytes(page))
        assert killed is not None
        assert killed.goodput.startup - before.startup == pytest.approx(warm_up)
        assert killed.goodput.productive - before.productive == pytest.approx(6 * 2 * 0.85 - warm_up)
        assert (killed.share, killed.warm_up) == (left.share, left.warm_up)
        left = killed
    for step in range(97, 110):  # these steps say that first ones were not longer
        clocks.step(again, step, 2.0)
    assert again.warm_up == pytest.approx(0.0, abs=1e-6)
    assert again.balance().goodput.startup == pytest.approx(before.startup)


def test_a_page_that_says_nothing_is_passed_over(clocks: Clocks) -> None:
    """A new ring's, that of an older release, and one that a kill has torn."""
    account = clocks.account()
    account.begin(None, 0, clocks.beside)
    page = bytearray(ACCOUNT_NBYTES)
    assert Balance.read(bytes(page)) is None
    account.move(page)
    assert Balance.read(bytes(page)) is not None
    for at, bad in ((0, 0), (8, 255), (16 + 8 * 4 + 7, 255)):
        torn = bytearray(page)
        torn[at] = bad
        found = Balance.read(bytes(torn))
        assert found is None or found.goodput.wall >= 0


def test_a_log_entry_has_the_account(clocks: Clocks) -> None:
    """As documents of JSON; entries of older releases have none."""
    account = clocks.account(birth=990.0)
    account.begin(3, 3, clocks.beside)
    clocks.now += 1
    assert account.balance().at == clocks.now
    found = read_account({"goodput": account.document()})
    assert found == account.signed() == Balance(clocks.now - 1, 3, Goodput(startup=10))
    assert Balance.of(found.plain()) == found
    for said in (None, {}, {"goodput": 0.5}, {"goodput": {"productive": 3}}):
        assert read_account(said) is None


def test_who_waits_for_another_stage_repeats_as_long(clocks: Clocks) -> None:
    """Its own next step counts, from the batch on that it runs again."""
    account = clocks.account(Balance(999.0, 9, Goodput()))
    account.begin(6, 4, clocks.beside)
    clocks.now += 1
    account.waits()
    clocks.now += 4
    account.passed(account.first)
    clocks.step(account, 10)
    found = account.balance().goodput
    assert (found.restore, found.repeated, found.productive) == pytest.approx((1, 4, 0.85))


def test_this_process_knows_when_it_began() -> None:
    """To a hundredth of a second; a launcher is the parent, where torch's variables say that there is one."""
    before = time.time()
    pid = os.fork()
    if pid == 0:
        forked = time.time()
        os.environ["TORCHELASTIC_RUN_ID"] = "x"
        time.sleep(0.2)
        here = Origin.here(0.0)
        os._exit(int(before - 0.05 <= here.birth <= forked + 0.05 and here.launcher < before and not here.again))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
    assert set(PARTS) == set(Goodput().shares())


def test_of_several_accounts_the_longest_counts(clocks: Clocks) -> None:
    """Also if two ranks were alive in the same moment, and if the clock of another was put back since."""
    longest = Balance(at=1000.0, step=5, goodput=Goodput(productive=50.0))
    same, ahead = (
        Balance(at=1000.0, step=5, goodput=Goodput(productive=7.0)),
        Balance(4600.0, 5, Goodput(productive=20.0)),
    )
    assert clocks.account(longest, same, ahead).balance().goodput.productive == 50.0
    assert clocks.account(same, longest, ahead).balance().goodput.productive == 50.0


@pytest.mark.parametrize("figure", [float("nan"), float("inf"), 10**400])
@pytest.mark.parametrize("name", ["at", "productive"])
def test_a_log_entry_that_cannot_be_is_passed_over(name: str, figure: float) -> None:
    """No restart fails because of figures for people."""
    assert read_account({"goodput": {"at": 1000.0, "step": 5, "productive": 2.0, name: figure}}) is None
