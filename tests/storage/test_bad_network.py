"""Object storage over a network that fails: the wire between client and server is a real one, through a real proxy."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from datetime import timedelta
from http.client import HTTPConnection, IncompleteRead
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from lightning.pytorch import Callback, Trainer
from servers._proxy import FaultyProxy, Network
from servers._s3 import KEY, SECRET, S3Server, running
from torch import nn

from lightning_moe_ckpt.callbacks import DenseCheckpoint
from lightning_moe_ckpt.errors import KeyExists
from lightning_moe_ckpt.session import Report
from lightning_moe_ckpt.storage import Backend, Entry, ObjectBackend, open_backend
from lightning_moe_ckpt.storage._backend import create_once

CALM = Network()
STORM = Network(failing=0.3)


def options(proxy: FaultyProxy) -> dict[str, object]:
    return {"key": KEY, "secret": SECRET, "endpoint_url": proxy.endpoint}


@pytest.fixture
def proxy(moto: S3Server) -> Iterator[FaultyProxy]:
    with FaultyProxy(moto.port) as proxy:
        yield proxy


# The proxy itself.


def test_the_proxy_hands_everything_on(moto: S3Server, proxy: FaultyProxy) -> None:
    """Bodies of both directions, listings in chunks, empty answers; and every request is seen."""
    backend = open_backend(moto.url(), storage_options=options(proxy))
    body = os.urandom(20 * 2**20)
    backend.put("a", body)
    backend.create("b", b"")
    assert backend.get("a") == body
    assert backend.list("") == [Entry("a", len(body)), Entry("b", 0)]
    backend.delete("a")
    assert [entry.key for entry in backend.list("")] == ["b"]
    assert proxy.num_failed == 0
    assert proxy.num_requests >= 8


def test_the_proxy_fails_as_often_as_it_is_told(proxy: FaultyProxy) -> None:
    """By all its faults, drawn from the seed."""
    proxy.network = Network(failing=0.5)
    kinds = [_outcome(proxy) for _ in range(200)]
    assert proxy.num_failed == sum(kind != "fine" for kind in kinds)
    assert 70 < proxy.num_failed < 130
    assert {"fine", "busy", "broken", "cut"} == set(kinds)


def _outcome(proxy: FaultyProxy) -> str:
    with closing(HTTPConnection(proxy.endpoint.removeprefix("http://"), timeout=10)) as connection:
        connection.request("GET", "/bucket/none")
        try:
            answer = connection.getresponse()
            answer.read()
        except IncompleteRead:
            return "cut"
        except OSError:
            return "broken"
        return "busy" if answer.status == 503 else "fine"


# Storage.


def test_with_a_third_of_the_requests_failing_everything_is_stored_right(moto: S3Server, proxy: FaultyProxy) -> None:
    """Small objects, uploads in parts, creates whose reply was lost, listings, deletes: all as without failures."""
    backend = open_backend(moto.url(), storage_options=options(proxy))
    proxy.network = STORM
    assert backend.creates_exclusively
    unfinished = moto.unfinished_uploads()
    bodies = {f"small/{number}": b"%d" % number for number in range(10)}
    bodies["big/0"] = os.urandom(18 * 2**20 + 1)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(backend.put, bodies.keys(), bodies.values()))
    assert {entry.key: entry.nbytes for entry in backend.list("")} == {key: len(body) for key, body in bodies.items()}
    for key, body in bodies.items():
        out = bytearray(len(body))
        backend.get_into(key, memoryview(out))
        assert out == body
    for number in range(5):
        assert create_once(backend, f"_log/{number}", b"ours")
        with pytest.raises(KeyExists):
            backend.create(f"_log/{number}", b"theirs")
        assert not create_once(backend, f"_log/{number}", b"theirs")
    for key in bodies:
        backend.delete(key)
    assert len(backend.list("")) == 5
    backend.sweep("")
    proxy.network = CALM
    assert moto.unfinished_uploads() == unfinished
    assert proxy.num_failed > 8


def test_latency_is_no_failure(moto: S3Server, proxy: FaultyProxy, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing is given up and nothing done twice."""
    backend = open_backend(moto.url(), storage_options=options(proxy))
    proxy.network = Network(latency=timedelta(seconds=1))
    with caplog.at_level(logging.WARNING):
        backend.put("a", b"x")
        assert backend.get("a") == b"x"
    assert proxy.num_requests == 2
    assert not caplog.records


def test_a_server_killed_in_the_middle_of_an_upload_gets_it_later(tmp_path: Path) -> None:
    """Killed with parts of the object on its disk, and started again while the client keeps trying."""
    with running("rclone", tmp_path) as server:
        backend = open_backend(server.url(), storage_options=server.storage_options, bandwidth=10 * 2**20)
        backend.put("first", b"x")
        body = os.urandom(25 * 2**20)
        with ThreadPoolExecutor(1) as pool:
            writing = pool.submit(backend.put, "a", body)
            uploads = ObjectBackend(server.url(), storage_options=server.storage_options).unfinished
            assert uploads is not None
            _until(lambda: len(uploads.list("")) == 1)
            server.stop()
            assert not writing.done()
            server.start()
            writing.result(100)
        assert backend.get("a") == body
        assert [entry.key for entry in backend.list("")] == ["a", "first"]


def _until(condition: Callable[[], bool]) -> None:
    pause = threading.Event()
    for _ in range(3000):
        if condition():
            return
        pause.wait(0.01)
    pytest.fail("it never came to that")


# Training.


def fit(checkpoint: DenseCheckpoint, *others: Callback, steps: int) -> tiny.ToZero:
    torch.manual_seed(1)
    module = tiny.ToZero(nn.Linear(32, 32))
    tiny.fit(module, tiny.rows(torch.ones(6, 32)), *others, checkpoint, max_steps=steps)
    return module


@dataclass
class Phase:
    """A change of the network, what it takes to have seen enough of it, and the change back."""

    begin: Callable[[], None]
    end: Callable[[], None]
    generations: int = 0
    """So many become durable in it."""
    steps: int = 30
    """So many are taken in it, at least."""


class Phases(Callback):
    """One phase after another; after each storage has time to catch up. Then training stops."""

    def __init__(self, checkpoint: DenseCheckpoint, phases: dict[str, Phase]) -> None:
        self.checkpoint, self.phases = checkpoint, iter(phases.items())
        self.stalls: dict[str, float] = {}
        """Seconds per step that training waited for checkpoints in each phase."""
        self.durable: dict[str, tuple[int, int, int]] = {}
        """Newest durable generation when each phase began, when it ended, and when storage had caught up."""
        self._name, self._phase = next(self.phases)
        self._before: Report | None = None

    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_step == 0:
            assert self.checkpoint.wait_committed(120)  # there is a newest generation from here on
        now = self.checkpoint.report
        if self._before is None:
            self._before = now
            self._phase.begin()
        steps = now.steps - self._before.steps
        committed = now.generations_committed - self._before.generations_committed
        if steps >= self._phase.steps and committed >= self._phase.generations:
            self._finish(self._before, now)
            self._name, self._phase = next(self.phases, ("", self._phase))
            self._before = None
            trainer.should_stop = not self._name

    def _finish(self, before: Report, now: Report) -> None:
        stalled = sum(now.stall_seconds.values()) - sum(before.stall_seconds.values())
        self.stalls[self._name] = stalled / (now.steps - before.steps)
        self._phase.end()
        assert self.checkpoint.wait_committed(120)
        newest = [report.generations["storage"] for report in (before, now, self.checkpoint.report)]
        self.durable[self._name] = (newest[0], newest[1], newest[2])


@pytest.mark.parametrize("latency", [1.5, pytest.param(10.0, marks=pytest.mark.soak)])
def test_training_goes_on_whatever_storage_does(
    latency: float, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A server that is killed and started again, a third of the requests failing, seconds of latency.

    The stall of those phases is compared with that of a calm one, in the same run: had training waited for a single
    request, it would be the latency longer. The generations arrive when the network is well again.
    """
    with running("rclone", tmp_path) as server, FaultyProxy(server.port) as proxy:

        def change(new: Network) -> Callable[[], None]:
            return lambda: setattr(proxy, "network", new)

        phases = {
            "calm": Phase(change(CALM), change(CALM), generations=3),
            "server gone": Phase(server.stop, server.start),
            "requests fail": Phase(change(STORM), change(CALM), generations=3),
            "latency": Phase(change(Network(latency=timedelta(seconds=latency))), change(CALM)),
        }
        url = server.url()
        checkpoint = DenseCheckpoint(url, every_n_steps=2, overhead_target=None, storage_options=options(proxy))
        watch = Phases(checkpoint, phases)
        with caplog.at_level(logging.WARNING):
            module = fit(checkpoint, watch, steps=10**6)
        assert set(watch.stalls) == set(phases)
        for name, phase in phases.items():
            assert watch.stalls[name] * phase.steps < watch.stalls["calm"] * phase.steps + latency / 2, watch.stalls
        for name in ("server gone", "latency"):  # a generation may have been on its way, even to its last request
            before, during, after = watch.durable[name]
            assert during - before <= 4
            assert after > during
        assert proxy.num_failed > 0
        # Steps of a millisecond: on a busy machine several windows pass while one generation is copied.
        errors = [record.message for record in caplog.records if record.levelno >= logging.ERROR]
        assert [message for message in errors if "windows in a row" not in message] == []
        last = checkpoint.report.steps
        resumed = DenseCheckpoint(url, storage_options=options(proxy))
        again = fit(resumed, steps=last)
        assert resumed.report.resumed_from == last
    for name, value in module.state_dict().items():
        assert torch.equal(again.state_dict()[name], value)
    sys.stdout.write(
        f"stall per step in ms: { {name: round(stall * 1e3, 2) for name, stall in watch.stalls.items()} }\n"
    )


def test_the_proxy_leaves_nothing_open(moto: S3Server) -> None:
    """Threads and sockets end with it, also those in the middle of a request."""
    before = threading.active_count()
    with FaultyProxy(moto.port) as proxy:
        backend: Backend = open_backend(moto.url(), storage_options=options(proxy))
        backend.put("a", b"x")
        proxy.network = Network(latency=timedelta(hours=1))
        with ThreadPoolExecutor(1) as pool:
            writing = pool.submit(backend.put, "b", b"y")
            _until(lambda: proxy.num_requests == 2)
            proxy.__exit__(None, None, None)
            backend.close()
            assert writing.exception(60) is not None
    _until(lambda: threading.active_count() <= before)
