"""What others put under the names of our memory: stepped around with a warning, not followed, waited for or removed."""

from __future__ import annotations

import logging
import os
import socket
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from door import SharedFile, marker_path, unfinished_path

from lightning_moe_ckpt.storage import GenerationId
from lightning_moe_ckpt.tiers import HostTier, RankMemory, shared_directory, shared_name
from tiers._segments import LAYOUT, RUN, generation, keep, leave_behind, readable

SLOT = LAYOUT.nbytes
G3, G6 = generation(3), generation(6)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Path]:
    """Shared memory of one node, in a directory of its own, and a file that is nobody's business."""
    directory = shared_directory() / f"moe-ckpt-test-{tmp_path.parent.name}-{tmp_path.name}"
    directory.mkdir()
    (tmp_path / "private").write_bytes(b"private")
    yield directory
    assert (tmp_path / "private").read_bytes() == b"private"
    for path in directory.iterdir():
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
    directory.rmdir()


def memory(node: Path) -> RankMemory:
    return RankMemory(RUN, 0, url="file:///run", directory=node)


def other_users(path: Path) -> None:
    path.write_bytes(b"theirs")
    os.chown(path, 54321, 54321)


def bound(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(short := path.with_name("s")))  # a socket's name may not be long
        short.rename(path)


def link(path: Path) -> None:
    path.symlink_to(path.parent / "elsewhere")


def of_everybody(path: Path) -> None:
    path.write_bytes(b"mine, or not")
    path.chmod(0o666)


SQUATTERS: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "folder": Path.mkdir,
    "link": link,
    "socket": bound,
    "other user's": other_users,
    "everybody's": of_everybody,
}


def squat(kind: str, path: Path) -> None:
    if kind == "other user's" and os.geteuid() != 0:
        pytest.skip("only root can give files away")
    SQUATTERS[kind](path)


@pytest.mark.parametrize("kind", SQUATTERS)
def test_a_squatted_name_stops_no_start(node: Path, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """Another name is used, what is kept there is found by the next incarnation, and what was squatted is as it was."""
    path = node / shared_name(RUN, 0)
    squat(kind, path)
    before = path.lstat()

    def live() -> object:
        own = memory(node)
        own.claim(None)
        keep(own.make(SLOT, 9), G3, (2, 3))
        return own

    leave_behind(live)
    assert readable(node) == [(0, 3)]
    own = memory(node)
    own.claim(G3)
    assert own.published == [G3]
    with caplog.at_level(logging.WARNING):
        own.make(2 * SLOT, 9)
    assert caplog.text.count(f"{path} is not used: it is `{stat.filemode(before.st_mode)}` of user") == 1
    own.close(unlink=True)
    assert path.lstat() == before
    assert [*node.iterdir()] == [path]


@pytest.mark.parametrize(
    "kind", [kind for kind in SQUATTERS if kind != "everybody's"]
)  # what is this user's may be replaced
def test_a_squatted_statement_is_not_read_and_not_written_to(node: Path, kind: str) -> None:
    """Neither the finished one nor the one that is being written: the generation is not kept, and the next one is."""
    own = memory(node)
    ring = own.make(SLOT, 9)
    statement = marker_path(ring.path, G3)
    squat(kind, unfinished_path(statement))
    squat(kind, marker_path(ring.path, generation(4)))
    assert HostTier(RUN, node).holdings() == []
    with pytest.raises(FileExistsError):
        keep(ring, G3, (2, 3))
    keep(ring, G6, (5, 6))
    assert readable(node) == [(0, 6)]
    own.close(unlink=True)
    assert sorted(node.iterdir()) == sorted([unfinished_path(statement), marker_path(ring.path, generation(4))])


@pytest.mark.parametrize("opened", ["ring", "statement"])
def test_memory_that_others_could_write_is_named_and_not_used(
    node: Path, opened: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It stays for whoever trusts it, and so does what is beside it."""

    def live() -> object:
        own = memory(node)
        keep(own.make(SLOT, 9), G3, (2, 3))
        return own

    leave_behind(live)
    ring = node / shared_name(RUN, 0)
    path = ring if opened == "ring" else marker_path(ring, G3)
    path.chmod(0o666)
    assert readable(node) == []
    assert f"{path} is not used: it is `-rw-rw-rw-` of user {os.geteuid()}." in caplog.text
    if opened == "ring":
        own = memory(node)
        own.claim(None)
        assert own.make(SLOT, 9).path != ring
        own.close(unlink=True)
    path.chmod(0o600)
    assert readable(node) == [(0, 3)]


def test_a_link_under_a_name_that_is_made_is_not_followed(node: Path, tmp_path: Path) -> None:
    """To a file of the same user, which a careless writer would overwrite or map."""
    for name in (shared_name(RUN, 0), shared_name(RUN, 0, turn=1)):
        (node / name).symlink_to(tmp_path / "private")
    own = memory(node)
    own.claim(None)
    ring = own.make(SLOT, 9)
    unfinished_path(marker_path(ring.path, G3)).symlink_to(tmp_path / "private")
    with pytest.raises(FileExistsError):
        keep(ring, G3, (2, 3))
    with pytest.raises(FileExistsError):
        SharedFile.create(node / shared_name(RUN, 0), 4096)
    own.close(unlink=True)


def test_a_name_that_is_taken_in_the_same_moment_is_stepped_around(node: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the look at what is there, and before the file is made."""
    create, taken = SharedFile.create, list[Path]()

    def beaten(path: Path, nbytes: int) -> SharedFile:
        if not taken:
            taken.append(path)
            path.mkdir()
        return create(path, nbytes)

    monkeypatch.setattr(SharedFile, "create", beaten)
    own = memory(node)
    ring = own.make(SLOT, 9)
    assert ring.path not in taken
    own.close(unlink=True)
    assert [*node.iterdir()] == taken


@pytest.mark.parametrize("umask", [0o000, 0o777])
def test_all_that_is_made_is_for_this_user_alone(node: Path, umask: int) -> None:
    """Memory and statements, whatever the umask says; and for this user in any case."""
    before = os.umask(umask)
    try:
        own = memory(node)
        keep(own.make(SLOT, 9), G3, (2, 3))
        assert {stat.S_IMODE(path.stat().st_mode) for path in node.iterdir()} == {0o600}
        assert len([*node.iterdir()]) == 2
        assert own.published == [GenerationId(step=3, incarnation=1, nonce="0123456789ab")]
        own.close(unlink=True)
    finally:
        os.umask(before)


def test_a_statement_of_an_absurd_size_is_not_read(node: Path) -> None:
    """A file without bytes can have any length."""
    own = memory(node)
    ring = own.make(SLOT, 9)
    keep(ring, G3, (2, 3))
    absurd = marker_path(ring.path, G6)
    absurd.touch(0o600)
    os.truncate(absurd, 2**40)
    assert readable(node) == [(0, 3)]
    own.close(unlink=True)
    assert [*node.iterdir()] == []
