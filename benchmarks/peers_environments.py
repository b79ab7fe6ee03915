"""Environments of other systems, made by pip in a cache folder, each with a process for its trainings.

An environment is a venv with the packages of this process behind its own: all train with the same torch, and a system's
packages change nothing outside.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any, cast

from benchmarks.peers_fits import PeerFit, PeerKills, PeerTurn
from benchmarks.peers_systems import REQUIREMENTS
from lightning_moe_ckpt.errors import CheckpointError

_INSTALLING = timedelta(minutes=10)
_ANSWERING = timedelta(minutes=5)
_PACKAGE = Path(__file__).resolve().parents[1]


def default_place() -> Path:
    """Return the default folder for environments."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moe-ckpt" / "peers"


def interpreter_of(name: str, place: Path) -> str:
    """Return the Python of an environment, made on first use; this process's for an empty `name`. Raises `CheckpointError` with pip's last line."""
    if not name:
        return sys.executable
    requirements = REQUIREMENTS[name]
    behind = sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
    digest = hashlib.sha256(repr((requirements, sys.version, behind)).encode()).hexdigest()
    folder = place / f"{name}-{digest[:12]}"
    python, made = folder / "bin" / "python", folder / "made"
    if not made.exists():
        sys.stderr.write(f"moe-ckpt: installing {', '.join(requirements)} into {folder}\n")
        _run([sys.executable, "-m", "venv", "--clear", str(folder)])
        (own,) = folder.glob("lib/python*/site-packages")
        (own / "behind.pth").write_text("".join(f"{path}\n" for path in behind))
        _run([str(python), "-m", "pip", "install", "--no-input", "--disable-pip-version-check", *requirements])
        made.touch()
    return str(python)


def _run(command: list[str]) -> None:
    try:
        ended = subprocess.run(  # noqa: S603  # our own command
            command, capture_output=True, text=True, timeout=_INSTALLING.total_seconds(), check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CheckpointError(f"cannot be installed here: {error}") from error
    if ended.returncode:
        last = (ended.stderr.strip() or ended.stdout.strip() or "it says nothing").splitlines()[-1]
        raise CheckpointError(f"cannot be installed here: {last}")


class Environment:
    """The process of an environment: `python` trains with the systems `names`; socket and output are in `folder`."""

    def __init__(self, python: str, names: Sequence[str], folder: Path) -> None:
        path = os.pathsep.join([str(_PACKAGE), *filter(None, [os.environ.get("PYTHONPATH")])])
        code = "import sys; from benchmarks.peers_fits import serve; serve(sys.argv[1])"
        self._log, self._bare_nbytes = folder / "log", cast("int | None", None)
        with Listener(str(folder / "socket"), "AF_UNIX") as listener, self._log.open("wb") as log:
            self._process = subprocess.Popen(  # noqa: S603  # our own command
                [python, "-c", code, listener.address],
                env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
            listener._listener._socket.settimeout(_ANSWERING.total_seconds())  # type: ignore[attr-defined]  # noqa: SLF001
            self._pipe: Connection = listener.accept()
        self.missing: dict[str, str] = self._ask([*names])
        """Why a system cannot be imported, by its name."""

    def turn(self, fit: PeerFit) -> PeerTurn:
        """Give a training a turn; the first begins it."""
        return cast("PeerTurn", self._ask(("turn", fit)))

    def bare_nbytes(self, fit: PeerFit) -> int:
        """Return the memory of a training without checkpoints in this environment, whose forks share all imports."""
        if self._bare_nbytes is None:
            self.turn(fit)
            self._bare_nbytes = self.turn(fit).memory_nbytes
        return self._bare_nbytes

    def kill(self, fit: PeerFit, num_kills: int) -> PeerKills:
        """Kill trainings."""
        return cast("PeerKills", self._ask(("kill", fit, num_kills)))

    def close(self) -> None:
        """End the process and its trainings."""
        self._pipe.close()
        try:
            self._process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _ask(self, what: Any) -> Any:
        try:
            self._pipe.send(what)
            if not self._pipe.poll(_ANSWERING.total_seconds()):
                self._process.kill()  # which ends the pipe
            answer = self._pipe.recv()
        except (EOFError, OSError) as error:
            lines = self._log.read_text(errors="replace").strip().splitlines()
            raise CheckpointError(f"its process ended: {lines[-1] if lines else 'it said nothing'}") from error
        if isinstance(answer, CheckpointError):
            raise answer
        return answer
