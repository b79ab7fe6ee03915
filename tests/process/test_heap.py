"""What is alive stays out of garbage collections for as long as asked, and other owners' arrangements are left alone."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from lightning_moe_ckpt.process import FrozenHeap, collections_paused
from lightning_moe_ckpt.process._heap import _Owner


class Ring:
    """Garbage that only a collection can free."""

    def __init__(self) -> None:
        self.self = self


@pytest.fixture(autouse=True)
def heap_as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    assert gc.isenabled()
    monkeypatch.setattr(_Owner, "others", False)
    monkeypatch.setattr(_Owner, "had_fit", False)
    gc.unfreeze()  # that of the tests is frozen
    yield
    gc.enable()
    gc.unfreeze()
    gc.freeze()


def test_what_is_alive_is_left_out_of_collections_until_thawed() -> None:
    """A cycle that becomes garbage meanwhile waits; one that was garbage before is collected first."""
    alive, dead = Ring(), Ring()
    seen, gone = weakref.ref(alive), weakref.ref(dead)
    del dead
    heap = FrozenHeap(wanted=True)
    heap.freeze()
    assert gone() is None
    frozen = gc.get_freeze_count()
    assert frozen > 1000
    del alive
    gc.collect()
    assert seen() is not None
    heap.freeze()  # only the first counts
    assert gc.get_freeze_count() <= frozen
    heap.thaw()
    heap.thaw()
    assert gc.get_freeze_count() == 0
    gc.collect()
    assert seen() is None


def test_what_a_restart_finds_alive_is_spared_until_thawed() -> None:
    """Garbage too, which is not looked for while training waits; what is made afterwards is collected as ever."""
    dead = Ring()
    gone = weakref.ref(dead)
    del dead
    heap = FrozenHeap(wanted=True)
    heap.freeze_unswept()
    made = weakref.ref(Ring())
    gc.collect()
    assert gone() is not None
    assert made() is None
    frozen, kept = gc.get_freeze_count(), [Ring() for _ in range(100)]
    heap.freeze()
    assert gone() is not None
    assert gc.get_freeze_count() >= frozen + len(kept)
    heap.thaw()
    assert gc.get_freeze_count() == 0
    gc.collect()
    assert gone() is None


def test_a_restart_within_a_process_collects_what_the_fit_before_has_left_when_it_has_caught_up() -> None:
    """Its model, say."""
    FrozenHeap(wanted=True)
    dead = Ring()
    gone = weakref.ref(dead)
    del dead
    heap = FrozenHeap(wanted=True)
    heap.freeze_unswept()
    gc.collect()
    assert gone() is not None
    heap.freeze()
    assert gone() is None
    heap.thaw()


def test_a_fresh_start_is_swept_and_what_its_first_steps_make_is_collected_alone() -> None:
    """The second collection does not look at what the first has left out."""
    dead, later = Ring(), Ring()
    gone, kept = weakref.ref(dead), weakref.ref(later)
    del dead
    heap = FrozenHeap(wanted=True)
    heap.freeze_unswept()
    heap.sweep()
    assert gone() is None
    frozen = gc.get_freeze_count()
    assert frozen > 1000
    del later
    made, new = weakref.ref(Ring()), [Ring() for _ in range(100)]
    heap.freeze()
    assert made() is None
    assert kept() is not None
    assert gc.get_freeze_count() >= frozen + len(new)
    heap.thaw()
    assert gc.get_freeze_count() == 0


def test_what_is_made_to_be_kept_is_not_walked() -> None:
    """Nor collected, until it is undone; no collection runs meanwhile."""
    heap = FrozenHeap(wanted=True)
    with heap.keeping():
        assert not gc.isenabled()
        made = weakref.ref(Ring())
    assert gc.isenabled()
    gc.collect()
    assert made() is not None
    heap.thaw()
    gc.collect()
    assert made() is None


def test_what_is_spared_comes_back() -> None:
    heap = FrozenHeap(wanted=True)
    heap.freeze_unswept()
    assert gc.get_freeze_count() > 1000
    heap.thaw()
    assert gc.get_freeze_count() == 0


def test_nothing_is_done_unless_wanted() -> None:
    heap = FrozenHeap(wanted=False)
    heap.freeze_unswept()
    heap.sweep()
    heap.freeze()
    assert gc.get_freeze_count() == 0


def test_another_owners_frozen_objects_stay_frozen() -> None:
    """A program that froze its heap, say before forking, keeps it so."""
    gc.freeze()
    heap = FrozenHeap(wanted=True)
    heap.freeze_unswept()
    heap.sweep()
    heap.freeze()
    heap.thaw()
    assert gc.get_freeze_count() > 0


def test_another_owner_is_found_once() -> None:
    """Looking again would count all that is frozen in a step of training; who froze once does so again, if need be."""
    gc.freeze()
    FrozenHeap(wanted=True).freeze_unswept()
    gc.unfreeze()
    heap = FrozenHeap(wanted=True)
    heap.freeze()
    assert gc.get_freeze_count() == 0


def test_collections_that_are_off_are_left_alone() -> None:
    """Nobody waits for collections there."""
    gc.disable()
    heap = FrozenHeap(wanted=True)
    heap.freeze_unswept()
    heap.freeze()
    assert gc.get_freeze_count() == 0


def test_collections_are_paused_and_go_on_even_after_an_error() -> None:
    @collections_paused()
    def failing() -> None:
        assert not gc.isenabled()
        raise KeyError

    with pytest.raises(KeyError):
        failing()
    assert gc.isenabled()


def test_collections_that_somebody_has_switched_off_stay_off() -> None:
    gc.disable()
    with collections_paused():
        assert not gc.isenabled()
    assert not gc.isenabled()
