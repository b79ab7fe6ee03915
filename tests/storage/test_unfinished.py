"""Multipart uploads that nobody finishes are aborted: at once by who lives, at the next start for who was killed."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
from servers._s3 import KEY, SECRET, S3Server, running

import lightning_moe_ckpt
from lightning_moe_ckpt.errors import StorageError
from lightning_moe_ckpt.storage import ObjectBackend, RunStore, open_backend
from lightning_moe_ckpt.storage._object import Upload

BIG = 18 * 2**20
SLOW = 5 * 2**20
"""Bytes per second at which the upload of `BIG` takes long enough to be caught in it."""
QUICK = timedelta(seconds=10)


@pytest.fixture(scope="module", params=["moto", pytest.param("ministack", marks=pytest.mark.soak), "rclone"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with running(request.param, tmp_path_factory.mktemp(request.param)) as server:
        yield server


def opened(server: S3Server, url: str, bandwidth: int | None = None) -> ObjectBackend:
    return ObjectBackend(url, storage_options=server.storage_options, timeout=QUICK, bandwidth=bandwidth)


def unfinished(backend: ObjectBackend, prefix: str = "") -> list[Upload]:
    assert backend.unfinished is not None
    return backend.unfinished.list(f"{backend._store.prefix}/{prefix}")


def await_upload(backend: ObjectBackend) -> None:
    """Until an upload is under way, as the server tells."""
    end = time.monotonic() + 60
    while not unfinished(backend):
        assert time.monotonic() < end, "no upload began"
        time.sleep(0.02)


_UPLOADER = """
import sys, threading, types
sys.modules["lightning_moe_ckpt"] = package = types.ModuleType("lightning_moe_ckpt")
package.__path__ = [sys.argv.pop(1)]  # without what it imports itself, which is Lightning and takes seconds
from lightning_moe_ckpt.storage import ObjectBackend
endpoint, key, secret, nbytes, *urls = sys.argv[1:]
options = {"key": key, "secret": secret, "endpoint_url": endpoint}
name = "snap/000000000010/i000001-00112233aabb/rank00000.000000000010.safetensors"
for url in urls:
    backend = ObjectBackend(url, storage_options=options, bandwidth=2**20)
    threading.Thread(target=backend.put, args=(name, bytes(int(nbytes)))).start()
"""


def start_uploads(server: S3Server, *urls: str) -> subprocess.Popen[bytes]:
    """Another process uploads, slowly."""
    folder = str(Path(lightning_moe_ckpt.__file__).parent)
    arguments = [folder, server.endpoint, KEY, SECRET, str(BIG), *urls]
    return subprocess.Popen([sys.executable, "-c", _UPLOADER, *arguments])


def test_the_next_start_aborts_what_a_killed_process_left(server: S3Server, caplog: pytest.LogCaptureFixture) -> None:
    """Not what belongs to other runs in the bucket, whose names may even begin alike."""
    url = server.url()
    own, other = opened(server, url), opened(server, f"{url}-2")
    process = start_uploads(server, url, f"{url}-2")
    try:
        for backend in (own, other):
            await_upload(backend)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(30)
    assert own.list("") == []
    with caplog.at_level(logging.INFO):
        store = RunStore.open(open_backend(url, storage_options=server.storage_options), resume="auto")
        store.candidates()
        assert store.open_incarnation(None) == 1
    assert unfinished(own) == []
    assert [upload.key.endswith("10.safetensors") for upload in unfinished(other)] == [True]
    assert "left by an interrupted write" in caplog.text
    other.sweep("snap/")
    assert unfinished(other) == []


def test_an_upload_that_is_swept_away_fails_and_its_retry_succeeds(server: S3Server) -> None:
    """A process of an earlier incarnation that still writes is told, in words; never silently."""
    url = server.url()
    slow, other = opened(server, url, SLOW), opened(server, url)
    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(slow.put, "snap/a", bytes(BIG))
        await_upload(other)
        other.sweep("snap/")
        with pytest.raises(StorageError, match=r"put snap/a at s3://"):
            writing.result(120)
    assert other.list("") == []
    assert unfinished(other) == []
    opened(server, url).put("snap/a", bytes(BIG))
    assert other.list("")[0].nbytes == BIG


@pytest.mark.parametrize("error", [RuntimeError("a bug"), KeyboardInterrupt(), SystemExit(143)], ids=repr)
def test_no_exception_leaves_an_upload(server: S3Server, error: BaseException) -> None:
    """Whatever passes through it, also what is no `Exception`; nothing is published either."""
    backend = opened(server, server.url())
    wait, turns = backend._pace.wait, iter(range(10))

    def interrupted(nbytes: int) -> None:
        if next(turns) == 1:
            raise error
        wait(nbytes)

    backend._pace.wait = interrupted  # type: ignore[method-assign]
    with pytest.raises(type(error)):
        backend.put("a", bytes(40 * 2**20))
    assert backend.list("") == []
    assert unfinished(backend) == []


def test_closing_during_an_upload_leaves_nothing(server: S3Server) -> None:
    """As a process does that ends while storage is slow."""
    url = server.url()
    slow, other = opened(server, url, SLOW), opened(server, url)
    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(slow.put, "a", bytes(BIG))
        await_upload(other)
        slow.close()
        with pytest.raises(StorageError, match="closed"):
            writing.result(60)
    assert other.list("") == []
    assert unfinished(other) == []


def test_many_uploads_are_found_page_by_page(server: S3Server) -> None:
    """As many as a large job leaves when all its ranks are killed."""
    if server.name == "rclone":
        pytest.skip("one page holds all")
    backend = opened(server, server.url())
    assert backend.unfinished is not None
    backend.unfinished.page_size = 10
    for number in range(35):
        backend.unfinished.begin(f"{backend._store.prefix}/snap/{number:02d}")
    assert len(unfinished(backend)) == 35
    backend.sweep("snap/0")
    assert len(unfinished(backend)) == 25
    backend.sweep("")
    assert unfinished(backend) == []


def test_a_store_that_will_not_tell_is_asked_once(server: S3Server, caplog: pytest.LogCaptureFixture) -> None:
    """No list of uploads, no permission, no keys to sign with: the remedy is said, and saving goes on."""
    options = server.storage_options | {"secret": "wrong"}
    backend = ObjectBackend(server.url(), storage_options=options, timeout=QUICK)
    anonymous = ObjectBackend(server.url(), timeout=QUICK)
    with caplog.at_level(logging.INFO):
        if server.name == "rclone":  # the others do not look at signatures
            for _ in range(2):
                backend.sweep("snap/")
            assert caplog.text.count("403") == 1
        for _ in range(2):
            anonymous.sweep("snap/")
    assert caplog.text.count("no credentials were found") == 1
    assert "AbortIncompleteMultipartUpload" in caplog.text


def test_without_botocore_the_remedy_is_said(
    server: S3Server, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, and saving goes on."""
    monkeypatch.setitem(sys.modules, "botocore.exceptions", None)
    backend = opened(server, server.url())
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            backend.sweep("snap/")
            backend.put("a", b"x")
    assert caplog.text.count("pip install botocore") == 1
    assert "AbortIncompleteMultipartUpload" in caplog.text


def test_a_server_that_is_away_is_an_error(tmp_path: Path) -> None:
    """The caller tries again; nothing is taken for swept."""
    with running("ministack", tmp_path) as server:
        backend = ObjectBackend(server.url(), storage_options=server.storage_options, timeout=timedelta(seconds=1))
        backend.sweep("")
    with pytest.raises(StorageError, match="list_multipart_uploads"):
        backend.sweep("")
