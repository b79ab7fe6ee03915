"""Run a proxy between a client and an object store that fails as networks and overloaded stores do.

It stands on loopback and hands requests on with the headers and bytes that it got, so that signatures stay good. What
happens to a request is drawn before it is handed on, from a seed.
"""

from __future__ import annotations

import contextlib
import random
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from http.client import HTTPConnection, HTTPException
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer
from types import TracebackType
from typing import Any, Literal

from typing_extensions import Self, override

ProxyFault = Literal["busy", "lost request", "lost reply", "cut reply"]
_FAULTS: tuple[ProxyFault, ...] = ("busy", "lost request", "lost reply", "cut reply")


@dataclass(frozen=True, slots=True)
class Network:
    """State of the network at a moment."""

    latency: timedelta = timedelta()
    """Time from a request until it is passed on."""
    failing: float = 0.0
    """Probability that a request fails: answered "slow down", lost before the store sees it, or done with no or half a reply."""


class FaultyProxy:
    """Listen on a port and pass requests on to a store; a context manager.

    Args:
        port: port of the store, on this machine.
        seed: seed of the failures.
    """

    def __init__(self, port: int, *, seed: int = 0) -> None:
        self.network = Network()
        """State of the network for requests from now on; may be replaced at any time."""
        self.num_requests = 0
        """Number of requests."""
        self.num_failed = 0
        """Number of requests that were made to fail."""
        self._random = random.Random(seed)
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._open: set[socket.socket] = set()
        self._server = _Server(("127.0.0.1", 0), partial(_Connection, self, port))
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.05,), name="faulty-proxy", daemon=True
        )

    @property
    def endpoint(self) -> str:
        """URL of the proxy for clients."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Break every connection."""
        self._closed.set()
        self._server.shutdown()
        self._server.server_close()
        with self._lock:
            connections = list(self._open)
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._thread.join(10)

    # -- from the threads of connections

    @contextlib.contextmanager
    def _held(self, connection: socket.socket) -> Iterator[None]:
        with self._lock:
            self._open.add(connection)
        try:
            yield
        finally:
            with self._lock:
                self._open.discard(connection)

    def fate(self, request: BaseHTTPRequestHandler) -> ProxyFault | None:
        """Wait for the latency and return what happens to a request.

        Called in the thread of its connection. May be overridden, and may change `request.path` and `request.headers`.
        """
        with self._lock:
            network = self.network
            self.num_requests += 1
            fails = self._random.random() < network.failing
            self.num_failed += fails
            fault = self._random.choice(_FAULTS) if fails else None
        return "lost request" if self._closed.wait(network.latency.total_seconds()) else fault


class _Server(ThreadingTCPServer):
    daemon_threads = True
    request_queue_size = 128


class _Connection(BaseHTTPRequestHandler):
    """Connection of a client, and another one to the store."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def __init__(self, proxy: FaultyProxy, port: int, *args: Any) -> None:
        self._proxy, self._store = proxy, HTTPConnection("127.0.0.1", port)
        super().__init__(*args)

    @override
    def handle(self) -> None:
        held = self._proxy._held(self.connection)  # its own other half
        # A side that hangs up ends the connection to the other.
        with contextlib.suppress(OSError, HTTPException), contextlib.closing(self._store), held:
            super().handle()

    def _pass_on(self) -> None:
        fault = self._proxy.fate(self)
        if fault == "lost request":
            self.close_connection = True
            return
        # All of it, also for a "busy": a client that is still sending would take an early answer for a broken connection.
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if fault == "busy":
            self._answer(503, "Slow Down", [("Content-Length", "0"), ("Connection", "close")])
            return
        self._store.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
        for name, value in self.headers.items():
            self._store.putheader(name, value)
        self._store.endheaders(body or None)
        reply = self._store.getresponse()
        content = reply.read()
        if fault == "lost reply" or (fault == "cut reply" and not content):
            self.close_connection = True
            return
        headers = [header for header in reply.getheaders() if header[0].lower() != "transfer-encoding"]
        if reply.getheader("Content-Length") is None and (content or reply.chunked):
            headers.append(("Content-Length", str(len(content))))
        if fault == "cut reply":
            self.close_connection, content = True, content[: len(content) // 2]
        self._answer(reply.status, reply.reason, headers, content)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _pass_on  # noqa: N815  # as `http.server` calls them

    def _answer(self, status: int, reason: str, headers: list[tuple[str, str]], content: bytes = b"") -> None:
        self.send_response_only(status, reason)
        for name, value in headers:
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)
