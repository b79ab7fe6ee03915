"""Real S3 servers on loopback, each a process of its own, from the environment that the Makefile makes for them."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

ENVIRONMENT = Path(os.environ.get("MOE_CKPT_S3_SERVERS", Path(__file__).resolve().parents[2] / ".venv" / "servers"))
# The shell's input is a pipe from this process: a test run that is killed leaves no server behind.
_UNTIL_CLOSED = '"$@" < /dev/null & cat > /dev/null; kill -9 $!'
KEY, SECRET = "test", "testtest"
BUCKET = "bucket"


class S3Server:
    """One running server.

    Args:
        name: `moto`, `ministack` or `rclone`.
        folder: where it may write.
    """

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self._folder = name, folder
        self.port = _free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def storage_options(self) -> dict[str, object]:
        return {"key": KEY, "secret": SECRET, "endpoint_url": self.endpoint}

    def url(self) -> str:
        """A prefix nobody else uses."""
        return f"s3://{BUCKET}/{uuid.uuid4().hex}/run"

    def start(self) -> None:
        (self._folder / "root" / BUCKET).mkdir(parents=True, exist_ok=True)
        with (self._folder / f"{self.name}.log").open("ab") as log:
            self._process = subprocess.Popen(
                ["/bin/sh", "-c", _UNTIL_CLOSED, "sh", *self._command()],
                stdout=log,
                stderr=log,
                env=os.environ | self._environment(),
                start_new_session=True,
                stdin=subprocess.PIPE,
            )
        self._wait_until_it_answers()
        if self.name != "rclone":  # there a bucket is a folder
            self._make_bucket()

    def stop(self) -> None:
        """Kill the server; its connections break."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process.wait(timeout=30)
            self._process = None

    def pause(self) -> None:
        """It accepts connections and never answers."""
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        assert self._process is not None
        os.killpg(self._process.pid, number)

    def _command(self) -> list[str]:
        binary = ENVIRONMENT / "bin"
        if self.name == "moto":
            return [str(binary / "moto_server"), "-H", "127.0.0.1", "-p", str(self.port)]
        if self.name == "ministack":
            return [str(binary / "ministack")]
        options = ["--auth-key", f"{KEY},{SECRET}", "--config", "/dev/null"]
        return [
            str(binary / "rclone"),
            "serve",
            "s3",
            "--addr",
            f"127.0.0.1:{self.port}",
            *options,
            str(self._folder / "root"),
        ]

    def _environment(self) -> dict[str, str]:
        return {"GATEWAY_PORT": str(self.port), "BIND_HOST": "127.0.0.1"} if self.name == "ministack" else {}

    def _wait_until_it_answers(self) -> None:
        end = time.monotonic() + 60
        while True:
            assert self._process is not None
            assert self._process.poll() is None, (self._folder / f"{self.name}.log").read_text()
            try:
                urllib.request.urlopen(self.endpoint, timeout=5).close()  # noqa: S310 - loopback
            except urllib.error.HTTPError:
                return
            except OSError:
                assert time.monotonic() < end, f"{self.name} does not answer"
                time.sleep(0.05)
            else:
                return

    def unfinished_uploads(self) -> int:
        """Multipart uploads that were neither completed nor aborted."""
        return self._request("GET", "?uploads").count(b"<UploadId>")

    def _make_bucket(self) -> None:
        self._request("PUT")

    def _request(self, method: str, query: str = "") -> bytes:
        scope = f"Credential={KEY}/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=x"
        headers = {"Authorization": f"AWS4-HMAC-SHA256 {scope}"}  # neither server looks at the signature
        url = f"{self.endpoint}/{BUCKET}{query}"
        request = urllib.request.Request(url, method=method, headers=headers)  # noqa: S310 - loopback
        with urllib.request.urlopen(request, timeout=30) as answer:  # noqa: S310 - loopback
            return bytes(answer.read())


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@contextlib.contextmanager
def running(name: str, folder: Path) -> Iterator[S3Server]:
    """A server for as long as the block; skips the test where the servers are not installed."""
    if not (ENVIRONMENT / "bin" / "rclone").exists():
        pytest.skip(f"no S3 servers in {ENVIRONMENT}: `make test` installs them")
    server = S3Server(name, folder)
    try:
        server.start()
        yield server
    finally:
        server.stop()
