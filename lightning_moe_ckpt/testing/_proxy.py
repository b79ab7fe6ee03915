"""Run a proxy between a client and an object store that fails as networks and overloaded stores do.

It stands on loopback, understands as much of HTTP/1.1 as it takes to tell requests apart, and hands them on byte for
byte, so that signatures stay good. What happens to a request is drawn before it is handed on, from a seed.
"""

from __future__ import annotations

import contextlib
import random
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from itertools import chain
from types import TracebackType
from typing import Literal

from typing_extensions import Self

_CHUNK_NBYTES = 64 * 2**10
_BUSY = b"HTTP/1.1 503 Slow Down\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"

ProxyFault = Literal["busy", "lost request", "lost reply"]
_FAULTS: tuple[ProxyFault, ...] = ("busy", "lost request", "lost reply")


class _Hangup(Exception):
    """One side closed its connection."""


class _Reader:
    """Bytes of one direction of one connection."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._rest = connection, b""

    def head(self) -> bytes:
        """Up to and with the empty line."""
        while (end := self._rest.find(b"\r\n\r\n")) < 0:
            self._rest += self._receive()
        head, self._rest = self._rest[: end + 4], self._rest[end + 4 :]
        return head

    def take(self, nbytes: int) -> Iterator[bytes]:
        """So many bytes, as they come."""
        while nbytes:
            chunk = self._rest or self._receive()
            chunk, self._rest = chunk[:nbytes], chunk[nbytes:]
            nbytes -= len(chunk)
            yield chunk

    def line(self) -> bytes:
        """Up to and with the end of the line."""
        while (end := self._rest.find(b"\r\n")) < 0:
            self._rest += self._receive()
        line, self._rest = self._rest[: end + 2], self._rest[end + 2 :]
        return line

    def until_closed(self) -> Iterator[bytes]:
        """Everything that still comes."""
        with contextlib.suppress(_Hangup):
            while True:
                chunk, self._rest = self._rest or self._receive(), b""
                yield chunk

    def _receive(self) -> bytes:
        chunk = self._connection.recv(_CHUNK_NBYTES)
        if not chunk:
            raise _Hangup
        return chunk


@dataclass(frozen=True, slots=True)
class Weather:
    """State of the network at a moment."""

    latency: timedelta = timedelta()
    """Time from a request until it is passed on."""
    failing: float = 0.0
    """Probability that a request fails: answered "slow down", lost before the store sees it, or done without a reply."""


class FaultyProxy:
    """Listen on a port and pass requests on to a store; a context manager.

    Args:
        port: port of the store, on this machine.
        seed: seed of the failures.
    """

    def __init__(self, port: int, *, seed: int = 0) -> None:
        self.weather = Weather()
        """State of the network for requests from now on; may be replaced at any time."""
        self.num_requests = 0
        """Number of requests."""
        self.num_failed = 0
        """Number of requests that were made to fail."""
        self._target, self._random = port, random.Random(seed)
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._open: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._thread = threading.Thread(target=self._accept, name="faulty-proxy", daemon=True)

    @property
    def endpoint(self) -> str:
        """URL of the proxy for clients."""
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Break every connection."""
        self._closed.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            connections = list(self._open)
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._thread.join(10)

    # -- threads

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), name="faulty-proxy", daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with contextlib.suppress(_Hangup, OSError), self._held(client):
            server = socket.create_connection(("127.0.0.1", self._target), timeout=30)
            with self._held(server):
                server.settimeout(None)
                requests, replies = _Reader(client), _Reader(server)
                while self._pass_on(client, server, requests, replies):
                    pass

    @contextlib.contextmanager
    def _held(self, connection: socket.socket) -> Iterator[None]:
        with self._lock:
            self._open.add(connection)
        try:
            yield
        finally:
            with self._lock:
                self._open.discard(connection)
            connection.close()

    def _pass_on(self, client: socket.socket, server: socket.socket, requests: _Reader, replies: _Reader) -> bool:
        """One request and its reply; whether the connection goes on."""
        head = requests.head()
        fault, weather = self._draw()
        if self._closed.wait(weather.latency.total_seconds()) or fault == "lost request":
            return False
        body = requests.take(_length(head) or 0)
        if fault == "busy":
            for _ in body:  # a client that is still sending would take an early answer for a broken connection
                pass
            client.sendall(_BUSY)
            return False
        server.sendall(head)
        for chunk in body:
            server.sendall(chunk)
        return self._reply(None if fault == "lost reply" else client, replies, is_head=head.startswith(b"HEAD "))

    def _draw(self) -> tuple[ProxyFault | None, Weather]:
        with self._lock:
            weather = self.weather
            self.num_requests += 1
            fails = self._random.random() < weather.failing
            self.num_failed += fails
            return (self._random.choice(_FAULTS) if fails else None), weather

    @staticmethod
    def _reply(client: socket.socket | None, replies: _Reader, *, is_head: bool) -> bool:
        """Hand a reply on, or only take it; whether the connection goes on."""
        head = replies.head()
        nbytes = 0 if is_head or head[9:12] in {b"204", b"304"} else _length(head)
        if nbytes is not None:
            body = replies.take(nbytes)
        else:
            body = _chunked(replies) if _is_chunked(head) else replies.until_closed()
        for chunk in chain((head,), body):
            if client is not None:
                client.sendall(chunk)
        return client is not None and (nbytes is not None or _is_chunked(head))


def _length(head: bytes) -> int | None:
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            return int(value)
    return None


def _is_chunked(head: bytes) -> bool:
    return b"transfer-encoding: chunked" in head.lower()


def _chunked(reader: _Reader) -> Iterator[bytes]:
    """A body in chunks, with its framing."""
    while True:
        line = reader.line()
        yield line
        nbytes = int(line.split(b";")[0], 16)
        yield from reader.take(nbytes + 2)  # and the line break; after the last chunk, that of the end
        if nbytes == 0:
            return
