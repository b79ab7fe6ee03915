"""The log: dense entries, fencing, healing, and a history that forgets only what no longer decides anything."""

from __future__ import annotations

import dataclasses
import json
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
from door import Cut, History, Log, log_key
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import example, given, settings
from hypothesis import strategies as st
from stored._crashes import Crashed, CrashingBackend, When
from stored._lives import LIFE, named

from lightning_moe_ckpt.errors import Corrupt, Fenced, StorageError
from lightning_moe_ckpt.storage import Backend, Entry, GenerationId, RunView, _log, _view
from lightning_moe_ckpt.storage._fsspec import FsspecBackend
from lightning_moe_ckpt.storage._json import encode
from lightning_moe_ckpt.storage._log import HISTORY
from lightning_moe_ckpt.storage._retention import advanced_history

EVENT: dict[str, object] = {"type": "test"}


@pytest.fixture
def backend() -> Backend:
    MemoryFileSystem.store.clear()  # listings take time for all that was ever stored
    MemoryFileSystem.pseudo_dirs[:] = [""]
    return FsspecBackend(f"memory://{uuid.uuid4().hex}")


def _spoil(backend: Backend, key: str, position: int = 30) -> None:
    data = bytearray(backend.get(key))
    data[position] ^= 1
    backend.put(key, bytes(data))


def _written_log(backend: Backend) -> list[History]:
    """Three lives and a watermark; returns the history after each entry."""
    log = Log(backend)
    log.read()
    history = History(run_id="r", first_incarnation=1, last_incarnation=0)
    histories = [history]
    histories.append(histories[-1].opened(1, None, LIFE))
    histories.append(histories[-1].opened(2, named(step=30, incarnation=1), LIFE))
    histories.append(histories[-1].advanced(20, [named(step=10, incarnation=1), named(step=5, incarnation=1)]))
    histories.append(histories[-1].opened(3, named(step=40, incarnation=2), LIFE))
    for written in histories:
        assert log.append(EVENT, written)
    return histories


def test_the_newest_entry_is_the_state(backend: Backend) -> None:
    assert Log(backend).read() is None
    histories = _written_log(backend)
    assert Log(backend).read() == histories[-1]
    assert histories[-1] == History(
        run_id="r",
        first_incarnation=1,
        last_incarnation=3,
        watermark=20,
        kept=frozenset({named(step=5, incarnation=1), named(step=10, incarnation=1)}),
        cuts=(Cut(1, None, LIFE), Cut(2, 30, LIFE), Cut(3, 40, LIFE)),
    )


@pytest.mark.parametrize("index", range(4))
def test_a_spoilt_entry_is_healed_by_the_ones_after_it(backend: Backend, index: int) -> None:
    """Flipped, truncated or gone makes no difference, even for the entry that names the run."""
    histories = _written_log(backend)
    for spoil in (lambda key: _spoil(backend, key), lambda key: backend.put(key, b""), backend.delete):
        spoil(log_key(index))
        log = Log(backend)
        assert log.read() == histories[-1]
        assert log.num_lost == 0


def test_a_spoilt_newest_entry_is_passed_over_and_counted(backend: Backend, caplog: pytest.LogCaptureFixture) -> None:
    """Its predecessor is the state; what it may have opened is counted, so that no incarnation is given twice."""
    histories = _written_log(backend)
    _spoil(backend, log_key(4))
    log = Log(backend)
    assert log.read() == histories[3]
    assert log.num_lost == 1
    assert "entry 4" in caplog.text
    assert log.append(EVENT, histories[3])
    assert backend.list(log_key(5)), "the next entry goes behind the spoilt one"


def test_an_entry_under_a_wrong_name_is_spoilt(backend: Backend) -> None:
    histories = _written_log(backend)
    backend.put(log_key(5), backend.get(log_key(1)))
    assert Log(backend).read() == histories[-1]


def test_a_log_without_a_readable_entry_is_an_error_with_the_remedy(backend: Backend) -> None:
    _written_log(backend)
    for index in range(5):
        _spoil(backend, log_key(index))
    with pytest.raises(Corrupt, match=r'none of the 5 log entries.*resume="never"'):
        Log(backend).read()


def test_every_flipped_bit_of_an_entry_is_seen(backend: Backend) -> None:
    """Exhaustively: the state is then the entry before."""
    histories = _written_log(backend)
    key = log_key(4)
    data = backend.get(key)
    for position in range(len(data)):
        spoilt = bytearray(data)
        spoilt[position] ^= 1 << position % 8
        backend.put(key, bytes(spoilt))
        assert Log(backend).read() == histories[3]
    for length in range(0, len(data), 7):
        backend.put(key, data[:length])
        assert Log(backend).read() == histories[3]


def test_only_the_first_of_two_writers_appends(backend: Backend) -> None:
    """And the other is fenced, as often as it asks, if that began an incarnation or a run; else it takes over what was said."""
    _written_log(backend)
    first, second = Log(backend), Log(backend)
    history = first.read()
    assert history is not None
    second.read()
    advanced = history.advanced(30, [named(step=20, incarnation=2)])
    assert first.append(EVENT, advanced)
    assert not second.append(EVENT, history)
    assert first.news(history) is None
    assert second.news(history) == advanced
    assert second.news(history) is None
    for later in (history.opened(4, None, LIFE), dataclasses.replace(history, run_id="another")):
        assert first.append(EVENT, later)
        for _ in range(2):
            with pytest.raises(Fenced):
                second.news(advanced)


def test_an_unreadable_foreign_entry_fences_too(backend: Backend) -> None:
    _written_log(backend)
    log = Log(backend)
    history = log.read()
    assert history is not None
    backend.put(log_key(5), b"rubbish")
    for _ in range(2):
        with pytest.raises(Fenced):
            log.news(history)


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> int:
    """Entries that a log keeps."""
    for module in (_log, _view):
        monkeypatch.setattr(module, "KEPT_ENTRIES", 3)
    return 3


def _filled(backend: Backend, number: int) -> tuple[Log, list[History]]:
    """A writer behind so many watermarks, and the history after each entry."""
    log = Log(backend)
    log.read()
    histories = [History(run_id="r", first_incarnation=1, last_incarnation=1, cuts=(Cut(1, None, LIFE),))]
    for step in range(number):
        assert log.append(EVENT, histories[-1])
        log.compact()
        histories.append(histories[-1].advanced(step))
    return log, histories[:-1]


def test_a_log_stays_short(backend: Backend, short: int) -> None:
    """The newest entries stay, and are the state; what is gone is no damage."""
    for number in (1, 5, 6, 11, 40):
        for entry in backend.list("_log/"):
            backend.delete(entry.key)
        _, histories = _filled(backend, number)
        left = [entry.key for entry in backend.list("_log/")]
        assert left == [log_key(index) for index in range(number - len(left), number)]
        assert min(number, short) <= len(left) < 2 * short
        assert Log(backend).read() == histories[-1]
        assert RunView(backend, histories[-1]).log_damage() == []


def test_a_hole_among_what_stays_is_damage(backend: Backend, short: int) -> None:
    """Among the newest, which no compaction deletes."""
    _, histories = _filled(backend, 10)
    backend.delete(log_key(8))
    assert [said for said in RunView(backend, histories[-1]).log_damage() if "entry 8 is missing" in said]


def test_the_newest_readable_entry_is_never_deleted(backend: Backend, short: int) -> None:
    """If the newest is spoilt, all that is older may be needed."""
    log, _ = _filled(backend, 5)
    log.append(EVENT, History(run_id="r", first_incarnation=1, last_incarnation=1))
    _spoil(backend, log_key(5))
    log.compact()
    assert len(backend.list("_log/")) == 6


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_compaction_that_dies_anywhere_loses_nothing(backend: Backend, short: int, when: When) -> None:
    """Some entries are gone then, the oldest first or in any order; the next writer goes on, and deletes the rest."""
    finished, crash_at = False, 0
    while not finished:
        for entry in backend.list("_log/"):
            backend.delete(entry.key)
        log, histories = _filled(backend, 5)
        assert log.append(EVENT, histories[-1])
        log._backend = dying = CrashingBackend(backend, crash_at=crash_at, when=when)
        with suppress(Crashed):
            log.compact()
            finished = True
        again = Log(backend)
        assert again.read() == histories[-1]
        assert again.num_lost == 0
        assert RunView(backend, histories[-1]).log_damage() == []
        for _ in range(short):
            assert again.append(EVENT, histories[-1])
            again.compact()
        assert len(backend.list("_log/")) < 2 * short
        crash_at += 1
    assert len(dying.calls) == 2 + short, "reads the newest entry, lists, and deletes"


@given(st.sets(st.integers(0, 6)))
def test_any_rest_of_a_deletion_is_read(gone: set[int]) -> None:
    """A store deletes the keys of a request in any order."""
    backend = FsspecBackend(f"memory://{uuid.uuid4().hex}")
    histories = _written_log(backend)
    log = Log(backend)
    log.read()
    for _ in range(3):
        assert log.append(EVENT, histories[-1])
    backend.delete(*map(log_key, gone))
    assert Log(backend).read() == histories[-1]


def test_a_writer_that_slept_through_a_compaction_is_fenced(backend: Backend, short: int) -> None:
    """The index behind its newest entry is free again: it can create an entry there, which does not count."""
    log, histories = _filled(backend, 1)
    sleeper = Log(backend)
    assert sleeper.read() == histories[-1]
    later = histories[-1].opened(2, None, LIFE)
    for _ in range(10):
        assert log.append(EVENT, later)
        log.compact()
    assert not backend.list(log_key(1))
    assert not sleeper.append(EVENT, histories[-1].advanced(99))
    with pytest.raises(Fenced):
        sleeper.news(histories[-1])
    assert Log(backend).read() == later
    for _ in range(2 * short):  # the stray entry goes with the next compaction
        assert log.append(EVENT, later)
        log.compact()
    fresh = Log(backend)
    fresh.read()
    fresh.compact()
    assert not backend.list(log_key(1))


def test_a_failed_look_behind_an_entry_is_made_up_for(
    backend: Backend, short: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the entry counts is unknown then. The writer finds it later, like one of `moe-ckpt gc`."""
    log, histories = _filled(backend, 5)
    advanced = histories[-1].advanced(99)

    def fail(*_: object) -> list[Entry]:
        raise StorageError("The listing failed.")

    with monkeypatch.context() as broken:
        broken.setattr(backend, "list", fail)
        with pytest.raises(StorageError):
            log.append(EVENT, advanced)
    assert log.news(histories[-1]) == advanced
    assert log.append(EVENT, advanced.advanced(100))


@pytest.mark.parametrize("lost", [(), (4,)])
def test_a_look_at_the_log_during_a_compaction(
    backend: Backend, short: int, lost: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the listed entries the older ones go, and more have come; an entry among the newest that is gone is damage."""
    log, histories = _filled(backend, 5)
    get = backend.get

    def get_later(key: str) -> bytes:
        monkeypatch.setattr(backend, "get", get)
        for _ in range(2):
            assert log.append(EVENT, histories[-1])
        backend.delete(*map(log_key, [*range(4), *lost]))
        return get(key)

    monkeypatch.setattr(backend, "get", get_later)
    assert len(RunView(backend, histories[-1]).log_damage()) == len(lost)


def test_the_fence_is_seen_across_a_block_of_keys(backend: Backend) -> None:
    """A listing has a thousand names at once."""
    log, history = Log(backend), History(run_id="r", first_incarnation=1, last_incarnation=0)
    backend.put(log_key(998), b"spoilt")
    for index in range(999, 1003):
        with pytest.raises(Corrupt):
            Log(backend).read()
        log = Log(backend)
        with pytest.raises(Corrupt):
            log.read()
        assert log.news(history) is None
        backend.put(log_key(index), b"spoilt")
        with pytest.raises(Fenced):
            log.news(history)
    assert not log.append(EVENT, history)


def test_of_many_writers_each_appends_once_per_index(backend: Backend) -> None:
    """Threads that re-read and try again: every append lands, on an index of its own."""
    _written_log(backend)

    def append(worker: int) -> int:
        log = Log(backend)
        for attempt in range(1000):
            history = log.read()
            assert history is not None
            if log.append({"worker": worker}, history):
                return attempt
        raise AssertionError("never won")

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(append, range(12)))
    assert [entry.key for entry in backend.list("_log/")] == [log_key(index) for index in range(5 + 12)]


class EverySaid:
    """The rules taken literally, over all that was ever said, beside a history that forgets."""

    def __init__(self) -> None:
        self.history = History(run_id="r", first_incarnation=1, last_incarnation=0)
        self.begun: list[tuple[int, int]] = []  # incarnation, and newest step that survives it
        self.stay: set[GenerationId] = set()  # what nobody gave up
        self.stored: set[GenerationId] = set()
        self.dead: set[GenerationId] = set()
        self.step = 0

    def open(self, choice: int) -> None:
        """An incarnation begins, from something that stays or from nothing."""
        resumed = [*sorted(self.stay, reverse=True), None][choice % (len(self.stay) + 1)]
        incarnation = self.history.last_incarnation + 1
        self.history = self.history.opened(incarnation, resumed, LIFE)
        self.begun.append((incarnation, -1 if resumed is None else resumed.step))
        self.step = 0 if resumed is None else resumed.step
        self.stay = {generation for generation in self.stay if generation.step <= self.begun[-1][1]}

    def save(self, steps: int) -> None:
        """The newest incarnation commits; its first generation may be of the step it began from."""
        self.step += steps % 4
        generation = named(step=self.step, incarnation=self.history.last_incarnation)
        self.stay.add(generation)
        self.stored.add(generation)

    def give_up(self, mask: int) -> None:
        """All but the newest may go."""
        restorable = sorted((g for g in self.stored if self.history.why_dead(g) is None), reverse=True)
        if restorable:
            newest, *others = restorable
            self.stay = {newest, *(each for bit, each in enumerate(others) if not mask >> bit & 1)} & self.stay
            self.history = advanced_history(self.history, self.stay, restorable) or self.history

    def check(self) -> None:
        """All that was stored, and all that an incarnation before might still store."""
        for step in range(max((each.step for each in self.stored), default=0) + 2):
            for incarnation in range(1, self.history.last_incarnation + 1):
                generation = named(step=step, incarnation=incarnation)
                dead = self.history.why_dead(generation) is not None
                assert not dead or generation not in self.stay, f"{generation} was kept"
                assert dead or generation not in self.dead, f"{generation} was dead and may be deleted"
                left_behind = any(incarnation < begun and step > floor for begun, floor in self.begun)
                assert dead or not left_behind, f"{generation} is of another past"
                if dead:
                    self.dead.add(generation)


said = st.lists(
    st.tuples(st.sampled_from(["open", "save", "save", "save", "give_up"]), st.integers(0, 255)), max_size=24
)


@settings(max_examples=400, deadline=None)
@given(said)
@example(
    [
        ("save", 1),
        ("save", 1),
        ("save", 1),
        ("save", 1),
        ("give_up", 1),
        ("open", 1),
        ("save", 1),
        ("give_up", 2),
        ("save", 0),
    ]
)
def test_whatever_was_said_the_verdicts_hold(actions: list[tuple[str, int]]) -> None:
    """What is kept lives, what was dead once is dead for ever, and what another incarnation left behind never comes back.

    Lives begin from any generation that was kept, also from one below the watermark, and give up any others.
    """
    model = EverySaid()
    model.open(0)
    for action, number in actions:
        getattr(model, action)(number)
        model.check()


@settings(max_examples=200, deadline=None)
@given(st.sets(st.tuples(st.integers(0, 10**12), st.integers(1, 10**6)), max_size=12), st.integers(0, 10**12))
def test_kept_generations_come_back_from_the_log(kept: set[tuple[int, int]], watermark: int) -> None:
    """Any set, whatever its order and however the incarnations repeat."""
    backend = FsspecBackend(f"memory://{uuid.uuid4().hex}")
    generations = {named(step=step, incarnation=incarnation) for step, incarnation in kept}
    history = History(
        run_id="r", first_incarnation=1, last_incarnation=10**6, watermark=watermark, kept=frozenset(generations)
    )
    log = Log(backend)
    log.read()
    assert log.append(EVENT, history)
    assert Log(backend).read() == history


@pytest.mark.parametrize(
    "kept",
    [
        None,
        {},
        [[1]],
        [{"incarnation": 1}],
        [{"incarnation": 1, "nonce": LIFE, "steps": [-1]}],
        [{"incarnation": 1, "nonce": LIFE, "steps": [], "more": 1}],
        [{"incarnation": 1, "nonce": "", "steps": []}],
    ],
)
def test_kept_generations_of_another_form_are_refused(backend: Backend, kept: object) -> None:
    """With a digest that fits: a program that writes something else is not understood by half."""
    histories = _written_log(backend)
    document = json.loads(backend.get(log_key(4)))["document"]["body"]
    document["index"] = 5
    document["history"]["kept"] = kept
    backend.create(log_key(5), encode("log", document))
    assert Log(backend).read() == histories[-1]


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.lists(st.integers(1, 3), max_size=4)), max_size=7))
def test_what_may_be_restored_is_what_the_newest_life_descends_from(lives: list[tuple[int, list[int]]]) -> None:
    """Lives that begin from any generation that may be restored, in storage or only in memory, or from nothing.

    The model knows the ancestors of every generation; the log knows incarnations and steps only.
    """
    history = History(run_id="r", first_incarnation=1, last_incarnation=0)
    ancestors: dict[GenerationId, list[GenerationId]] = {}
    path: list[GenerationId] = []
    for incarnation, (pick, gaps) in enumerate(lives, start=1):
        alive = sorted(ancestor for ancestor in ancestors if history.why_dead(ancestor) is None)
        begin = alive[-1 - pick] if pick < len(alive) else None
        history = history.opened(incarnation, begin, LIFE)
        path = [] if begin is None else [*ancestors[begin], begin]
        step = -1 if begin is None else begin.step
        for gap in gaps:
            step += gap
            generation = named(step=step, incarnation=incarnation)
            ancestors[generation] = list(path)
            path.append(generation)
    assert {ancestor for ancestor in ancestors if history.why_dead(ancestor) is None} == set(path)


def test_the_history_stays_small() -> None:
    """A thousand lives that each get one generation further and keep two, and every hundredth for good."""
    history = History(run_id="r", first_incarnation=1, last_incarnation=0)
    kept: list[GenerationId] = []
    for incarnation in range(1, 1000):
        history = history.opened(incarnation, GenerationId(step=incarnation, incarnation=incarnation - 1), "").advanced(
            max(0, incarnation - 1), kept
        )
        kept += [GenerationId(step=incarnation - 1, incarnation=incarnation - 2)] if incarnation % 100 == 2 else []
    assert len(history.cuts) <= 3
    assert len(json.dumps(HISTORY.body(history))) < 820
