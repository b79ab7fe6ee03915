"""Test the promises of every storage backend: inherit, say how to make a backend, and run pytest.

```python
class TestMyBackend(BackendContract):
    def make_backend(self, tmp_path: Path) -> Backend:
        return MyBackend(...)
```
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import product
from pathlib import Path

import pytest

from lightning_moe_ckpt.errors import Corrupt, KeyExists, KeyMissing, StorageError
from lightning_moe_ckpt.storage import Backend, Entry


class BackendContract:
    """Tests that every backend passes. Every test gets an empty store."""

    def make_backend(self, tmp_path: Path) -> Backend:
        """Return a backend over an empty store that no other test uses."""
        raise NotImplementedError

    def make_paced_backend(self, tmp_path: Path, bandwidth: int) -> Backend:
        """Return a backend that writes at most `bandwidth` bytes per second. Unless overridden, tests of the limit are skipped."""
        pytest.skip("no backend with a cap on its bandwidth")

    def break_listings(self, monkeypatch: pytest.MonkeyPatch, after: int) -> None:
        """Let the medium fail in every listing behind its first `after` answers: entries, folders or pages.

        `monkeypatch` undoes it. Unless overridden, the test of broken listings is skipped.
        """
        pytest.skip("no way to make this medium fail in the middle of a listing")

    @pytest.fixture
    def backend(self, tmp_path: Path) -> Iterator[Backend]:
        """Yield the backend under test, and close it afterwards."""
        backend = self.make_backend(tmp_path)
        yield backend
        backend.close()

    def test_an_object_is_read_back_whole(self, backend: Backend) -> None:
        """`get` and `get_into` return the bytes that `put` took."""
        written = bytes(range(256)) * 37
        backend.put("snap/1/a.safetensors", written)
        out = bytearray(len(written))
        backend.get_into("snap/1/a.safetensors", memoryview(out))
        assert backend.get("snap/1/a.safetensors") == written
        assert out == written

    @pytest.mark.parametrize("nbytes", [0, 1, 4096, 4 * 2**20 + 1, 40 * 2**20 + 7])
    def test_any_size_is_kept(self, backend: Backend, nbytes: int) -> None:
        """Sizes around the chunks that an implementation may use are kept, and empty objects too."""
        written = (bytes(range(251)) * (nbytes // 251 + 1))[:nbytes]
        backend.put("a", memoryview(written))
        out = bytearray(nbytes)
        backend.get_into("a", memoryview(out))
        assert out == written
        assert backend.list("") == [Entry("a", nbytes)]

    def test_views_are_concatenated(self, backend: Backend) -> None:
        """Several views of different shapes make one object."""
        grid = memoryview(bytearray(b"....cdef")).cast("B", (2, 4))
        backend.put("a", b"ab", grid, b"", memoryview(b"gh"))
        assert backend.get("a") == b"ab....cdefgh"

    def test_the_caller_may_reuse_its_memory(self, backend: Backend) -> None:
        """Bytes written to a view after `put` returned do not reach the store."""
        buffer = bytearray(b"first")
        backend.put("a", memoryview(buffer))
        buffer[:] = b"other"
        assert backend.get("a") == b"first"

    def test_put_replaces_whole(self, backend: Backend) -> None:
        """A second `put` leaves nothing of the first."""
        backend.put("a", b"a long first object")
        backend.put("a", b"short")
        assert backend.get("a") == b"short"
        assert backend.list("") == [Entry("a", 5)]

    def test_an_object_of_another_size_is_corrupt(self, backend: Backend) -> None:
        """`get_into` never fills a part of `out` and returns."""
        backend.put("a", b"12345")
        for nbytes in (0, 4, 6, 100):
            with pytest.raises(Corrupt):
                backend.get_into("a", memoryview(bytearray(nbytes)))

    @pytest.mark.parametrize(("start", "nbytes"), [(0, 0), (0, 1), (4095, 2), (0, 2**21), (2**20, 2**20), (2**21, 0)])
    def test_any_range_is_read(self, backend: Backend, start: int, nbytes: int) -> None:
        """Ranges at the ends of an object, across pages and of the whole object are read."""
        written = (bytes(range(251)) * (2**21 // 251 + 1))[: 2**21]
        backend.put("a", written)
        out = bytearray(nbytes)
        backend.get_range("a", start, memoryview(out))
        assert out == written[start : start + nbytes]

    def test_a_range_past_the_end_is_an_error(self, backend: Backend) -> None:
        """`get_range` never fills a part of `out` and returns; a second copy may have the bytes."""
        backend.put("a", b"12345")
        for start, nbytes in ((0, 6), (4, 2), (5, 1), (100, 1)):
            with pytest.raises((Corrupt, StorageError)):
                backend.get_range("a", start, memoryview(bytearray(nbytes)))

    def test_missing_keys_are_named(self, backend: Backend) -> None:
        """Reading a missing object names its key, whether or not its directory exists."""
        backend.put("dir/present", b"x")
        for key in ("dir/absent", "absent/dir"):
            with pytest.raises(KeyMissing, match=key):
                backend.get(key)
            with pytest.raises(KeyMissing, match=key):
                backend.get_into(key, memoryview(bytearray(1)))
            with pytest.raises(KeyMissing, match=key):
                backend.get_range(key, 0, memoryview(bytearray(1)))

    def test_create_refuses_an_existing_key(self, backend: Backend) -> None:
        """The first object stays, whether `put` or `create` made it."""
        backend.create("_log/0", b"first")
        backend.put("plain", b"first")
        for key in ("_log/0", "plain"):
            with pytest.raises(KeyExists):
                backend.create(key, b"second")
            assert backend.get(key) == b"first"

    def test_a_deleted_key_can_be_created_again(self, backend: Backend) -> None:
        """Nothing of an object remains after `delete`."""
        backend.create("a/b", b"first")
        backend.delete("a/b")
        backend.create("a/b", b"second")
        assert backend.get("a/b") == b"second"

    def test_of_many_creators_one_wins(self, backend: Backend) -> None:
        """If threads create one key at once, exactly one succeeds, and its object is stored."""
        if not backend.creates_exclusively:
            pytest.skip("the store cannot create exclusively")
        with ThreadPoolExecutor(8) as pool:
            for turn in range(20):
                won = list(pool.map(_creator(backend, f"_log/{turn}"), range(8)))
                assert sum(won) == 1
                assert backend.get(f"_log/{turn}") == b"%d" % won.index(True)

    def test_probing_leaves_nothing(self, backend: Backend) -> None:
        """Finding out whether `create` is exclusive leaves no objects."""
        assert backend.creates_exclusively in {True, False}
        assert backend.list("") == []

    def test_listing_is_by_prefix_and_sorted(self, backend: Backend) -> None:
        """A prefix may end inside a name; directories are not objects; an unknown prefix is empty."""
        for key in ("snap/2/b", "snap/1/a", "snap/10/c", "_log/0"):
            backend.put(key, key.encode())
        assert [entry.key for entry in backend.list("snap/1")] == ["snap/1/a", "snap/10/c"]
        assert [entry.key for entry in backend.list("snap/1/")] == ["snap/1/a"]
        assert [entry.key for entry in backend.list("")] == ["_log/0", "snap/1/a", "snap/10/c", "snap/2/b"]
        assert backend.list("snap/3/") == backend.list("nothing/") == []
        assert [entry.nbytes for entry in backend.list("snap/10/")] == [9]

    def test_a_listing_goes_on_behind_a_key(self, backend: Backend) -> None:
        """The key need not exist, and at most as many objects come as were asked for; folders count in full."""
        keys = ["_log/0", "snap/1/_C", "snap/1/r.0", "snap/1/r.1", "snap/10/_C", "snap/2/_C"]
        for key in keys:
            backend.put(key, b"x")
        places = ("", "_log/0", "snap/1/_C", "snap/1/r", "snap/1/z", "snap/10/z", "snap/9")
        for after, prefix, most in product(places, ("", "snap/", "snap/1/r", "snap/10"), (1, 2, None)):
            wanted = [key for key in keys if key > after and key.startswith(prefix)]
            assert [entry.key for entry in backend.list(prefix, after, most)] == wanted[:most]

    def test_listing_sees_every_change_at_once(self, backend: Backend) -> None:
        """No cache stands between a change and the next listing."""
        for turn in range(5):
            backend.put(f"dir/{turn}", b"x")
            assert backend.list("dir/") == [Entry(f"dir/{turn}", 1)]
            backend.delete(f"dir/{turn}")
            assert backend.list("dir/") == []

    @pytest.mark.parametrize("after", [0, 1, 2])
    def test_a_listing_that_fails_midway_is_not_a_shorter_one(
        self, backend: Backend, monkeypatch: pytest.MonkeyPatch, after: int
    ) -> None:
        """Nor is an unreachable store an empty one: the caller may try again, or must stop."""
        keys = ["_log/0", "snap/1/a", "snap/1/b", "snap/2/c"]
        for key in keys:
            backend.put(key, b"x")
        with monkeypatch.context() as broken:
            self.break_listings(broken, after)
            with pytest.raises(StorageError) as caught:
                backend.list("")
        assert not isinstance(caught.value, KeyMissing), "that would say that nothing is there"
        assert [entry.key for entry in backend.list("")] == keys

    def test_deleting_what_is_not_there_is_fine(self, backend: Backend) -> None:
        """Deletes are repeated after a crash, and two processes may race."""
        backend.put("dir/a", b"x")
        backend.delete("dir/a")
        backend.delete("dir/a")
        backend.delete("never/was")
        assert backend.list("") == []

    def test_many_objects_are_deleted_at_once(self, backend: Backend) -> None:
        """With one call, some of them missing, in several folders; all others stay."""
        keys = [f"dir{number % 3}/{number}" for number in range(40)]
        for key in (*keys, "dir0/stays"):
            backend.put(key, b"x")
        backend.delete(*keys, "dir0/absent", "absent/dir")
        backend.delete()
        assert backend.list("") == [Entry("dir0/stays", 1)]

    def test_sweeping_touches_no_object(self, backend: Backend) -> None:
        """`sweep` removes only unfinished writes."""
        backend.put("snap/1/a", b"x")
        backend.create("_log/0", b"y")
        assert not backend.unfinished_writes(""), "what is whole is not unfinished"
        backend.sweep("")
        assert [entry.key for entry in backend.list("")] == ["_log/0", "snap/1/a"]

    def test_threads_do_not_disturb_each_other(self, backend: Backend) -> None:
        """Writers, readers and a lister may work at once, each on keys of its own."""
        before = backend.list("")

        def work(worker: int) -> None:
            for turn in range(10):
                key = f"dir/{worker}/{turn}"
                backend.put(key, b"%d" % worker * 1000)
                assert backend.get(key) == b"%d" % worker * 1000
                assert key in [entry.key for entry in backend.list("dir/")]
                backend.delete(key)

        with ThreadPoolExecutor(6) as pool:
            list(pool.map(work, range(6)))
        assert backend.list("") == before

    def test_writes_stay_below_the_bandwidth(self, tmp_path: Path) -> None:
        """The limit holds over several objects and threads, and objects have the given bytes."""
        bandwidth, sizes = 16 * 2**20, (6 * 2**20, 5 * 2**20 + 1, 3, 4 * 2**20)
        with closing(self.make_paced_backend(tmp_path, bandwidth)) as backend:
            bodies = {f"dir/{number}": os.urandom(nbytes) for number, nbytes in enumerate(sizes)}
            start = time.monotonic()
            with ThreadPoolExecutor(2) as pool:
                list(pool.map(backend.put, bodies.keys(), bodies.values()))
            seconds = time.monotonic() - start
            assert {key: backend.get(key) for key in bodies} == bodies
        # The last chunk, which may be a whole object, goes as soon as those before it have had their time.
        assert seconds >= (sum(sizes) - max(sizes)) / bandwidth

    def test_a_write_that_waits_for_bandwidth_holds_up_nobody(self, tmp_path: Path) -> None:
        """Other threads read and list meanwhile. Closing ends the waiting write at once, and none of its bytes are visible."""
        backend = self.make_paced_backend(tmp_path, 1)
        backend.create("small", b"x")
        backend.put("first", b"takes the place of the next hour" * 200)
        with ThreadPoolExecutor(1) as pool:
            writing = pool.submit(backend.put, "dir/slow", bytes(12 * 2**20))
            for _ in range(10):
                assert backend.get("small") == b"x"
                assert [entry.key for entry in backend.list("")] == ["first", "small"]
            assert not writing.done()
            backend.close()
            with pytest.raises(StorageError, match="closed"):
                writing.result(60)
            assert [entry.key for entry in backend.list("")] == ["first", "small"]


def _creator(backend: Backend, key: str) -> Callable[[int], bool]:
    """Return a function to create `key` with a number as its object; the function returns whether it succeeded."""

    def create(number: int) -> bool:
        try:
            backend.create(key, b"%d" % number)
        except KeyExists:
            return False
        return True

    return create
