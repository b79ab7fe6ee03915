"""Nodes that are really apart on one machine: namespaces of network, host name, processes, mounts and shared memory.

A node has a host name, a boot id, process numbers and `/dev/shm` of its own, and one cable to a switch, which is a bridge in a
network namespace. Nothing has a name outside: the namespaces live as long as a process that waits for the end of this one, so
nothing is left of a test that is killed.

Cut cables carry nothing and say nothing, as real ones: no connection is reset. The kernel of this machine has no `netem`, so
a slow link has a rate (`tbf`), and no delay of its own.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import TracebackType

import pytest
from launcher import exit_after
from typing_extensions import Self

from lightning_moe_ckpt.process import compute_alone

_KINDS = ("mnt", "uts", "ipc", "net", "pid")
"""The last one holds for children only."""
_BOOT_ID = "/proc/sys/kernel/random/boot_id"
_NODE = """
set -e
hostname "$1"
mount -t tmpfs -o size="$2" tmpfs /dev/shm
mount --bind "$3/boot_id" /proc/sys/kernel/random/boot_id
mount --bind "$3/hosts" /etc/hosts
mount --bind "$3/resolv.conf" /etc/resolv.conf
ip link set lo up
echo ready
exec cat
"""
_SWITCH = "set -e; ip link add bridge type bridge; ip link set bridge up; echo ready; exec cat"


@cache
def why_not() -> str:
    """Return why this machine has no such nodes, empty if it has."""
    if os.geteuid():
        return "only root makes namespaces"
    if missing := [name for name in ("ip", "tc", "unshare", "nsenter", "mount") if shutil.which(name) is None]:
        return f"there is no {', '.join(missing)}"
    tried = "ip link add bridge type bridge && ip link add port type veth peer name cable && tc qdisc add dev port root tbf rate 1mbit burst 16k latency 1s"
    done = subprocess.run(
        ["unshare", "--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "sh", "-c", tried],
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    return done.stderr.strip().partition("\n")[0] if done.returncode else ""


needs_namespaces = pytest.mark.skipif(bool(why_not()), reason=f"needs namespaces of network and processes: {why_not()}")


class _Space:
    """A process that keeps namespaces of its own alive."""

    def __init__(self, script: str, *arguments: str, kinds: Sequence[str]) -> None:
        words = {"net": "--net", "uts": "--uts", "ipc": "--ipc", "mnt": "--mount", "pid": "--pid"}
        flags = [words[kind] for kind in kinds] + (["--fork", "--kill-child", "--mount-proc"] if "pid" in kinds else [])
        self._process = subprocess.Popen(
            ["unshare", *flags, "sh", "-c", script, "sh", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # unshare complains when its child is killed
            text=True,
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n"
        own = self._process.pid
        children = Path(f"/proc/{own}/task/{own}/children").read_text().split()
        self.pid = int(children[0]) if "pid" in kinds else own

    def call(self, *command: str) -> None:
        """Run a command of the network there."""
        subprocess.run(["nsenter", "-t", str(self.pid), "-n", *command], check=True, timeout=20, capture_output=True)

    def end(self) -> None:
        """Kill every process there at once."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(20)


class Started:
    """A process on a node, and what it writes."""

    def __init__(self, pid: int, console: Path) -> None:
        self.pid, self._console, self._code = pid, console, None if pid else 0

    @property
    def output(self) -> str:
        return self._console.read_text(errors="replace") if self._console.exists() else ""

    @property
    def code(self) -> int | None:
        """Exit status, negative for a signal; None while it runs."""
        if self._code is None and (found := os.waitpid(self.pid, os.WNOHANG))[0]:
            self._code = os.waitstatus_to_exitcode(found[1])
        return self._code

    def wait(self, seconds: float) -> int:
        """Return its exit status, after at most so many seconds."""
        self.wait_until(lambda: self.code is not None, seconds)
        assert self.code is not None
        return self.code

    def wait_until(self, reached: Callable[[], object], seconds: float) -> float:
        """Return the seconds until something is so."""
        began = time.monotonic()
        while not reached():
            assert time.monotonic() < began + seconds, f"not within {seconds:g} s:\n{self.output}"
            time.sleep(0.02)
        return time.monotonic() - began

    def wait_for(self, text: str, seconds: float) -> float:
        """Return the seconds until it has written `text`."""
        return self.wait_until(lambda: text in self.output, seconds)


class Node:
    """One machine of a cluster."""

    def __init__(self, cluster: Cluster, number: int, *, hosts: str, shm: str = "256m") -> None:
        self.name, self.address = f"node{number}", f"10.77.0.{number + 1}"
        self._cluster, self._port = cluster, f"port{number}"
        self.started: list[Started] = []
        files = cluster.folder / f"{self.name}-{uuid.uuid4().hex[:6]}"
        files.mkdir(parents=True)
        self._files = files
        (files / "boot_id").write_text(f"{uuid.uuid4()}\n")
        (files / "resolv.conf").touch()  # nobody is asked for names, which would take seconds of silence
        (files / "hosts").write_text(f"127.0.0.1 localhost\n{hosts}")
        self._space = _Space(_NODE, self.name, shm, str(files), kinds=("net", "uts", "ipc", "mnt", "pid"))
        switch = cluster.switch
        switch.call("ip", "link", "add", self._port, "type", "veth", "peer", "name", "cable", "netns", str(self.pid))
        switch.call("ip", "link", "set", self._port, "master", "bridge", "up")
        self._space.call("ip", "addr", "add", f"{self.address}/24", "dev", "cable")
        self._space.call("ip", "link", "set", "cable", "up")
        self._space.call("ip", "route", "add", "default", "dev", "cable")

    @property
    def pid(self) -> int:
        return self._space.pid

    # -- processes

    def fork(self, work: Callable[[], object], name: str = "fork") -> Started:
        """Do `work` in a process there, forked from this one, which has imported all."""
        console = self._files / f"{name}{len(self.started)}"
        pid = os.fork()
        if pid == 0:
            exit_after(lambda: self._enter(work, console))
        self.started.append(Started(pid, console))
        return self.started[-1]

    def run(self, *command: str, name: str = "run", **environment: str) -> Started:
        """Start a program there."""
        return self.fork(lambda: os.execvpe(command[0], command, os.environ | environment), name)  # noqa: S606

    def _enter(self, work: Callable[[], object], console: Path) -> None:
        written = os.open(console, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(written, 1)
        os.dup2(written, 2)
        sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
        folder, libc = Path.cwd(), ctypes.CDLL(None, use_errno=True)
        opened = [os.open(f"/proc/{self.pid}/ns/{kind}", os.O_RDONLY) for kind in _KINDS]
        for each in opened:
            if libc.setns(each, 0):
                raise OSError(ctypes.get_errno(), "cannot enter a namespace")
            os.close(each)
        os.chdir(folder)
        pid = os.fork()
        if pid == 0:
            compute_alone()
            exit_after(work)
        for each in (signal.SIGTERM, signal.SIGINT):
            signal.signal(each, lambda number, _: os.kill(pid, number))
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        os._exit(128 - code if code < 0 else code)

    # -- the cable

    def cut(self) -> None:
        """Pull the cable."""
        self._cluster.switch.call("ip", "link", "set", self._port, "down")

    def join(self) -> None:
        """Plug the cable in again."""
        self._cluster.switch.call("ip", "link", "set", self._port, "up")

    def mute(self) -> None:
        """Lose all that this node sends; it still hears others."""
        self._space.call("tc", "qdisc", "replace", "dev", "cable", "root", "blackhole")

    def deafen(self) -> None:
        """Lose all that is sent to this node; others still hear it."""
        self._cluster.switch.call("tc", "qdisc", "replace", "dev", self._port, "root", "blackhole")

    def mend(self) -> None:
        """End `mute`, `deafen` and `slow`."""
        for space, device in ((self._space, "cable"), (self._cluster.switch, self._port)):
            with suppress(subprocess.CalledProcessError):  # there was nothing
                space.call("tc", "qdisc", "del", "dev", device, "root")

    def slow(self, rate: str) -> None:
        """Limit the cable to a rate such as `8mbit`, in both directions."""
        limit = ("root", "tbf", "rate", rate, "burst", "64k", "latency", "500ms")
        self._space.call("tc", "qdisc", "replace", "dev", "cable", *limit)
        self._cluster.switch.call("tc", "qdisc", "replace", "dev", self._port, *limit)

    def lose(self) -> None:
        """Cut its power: nothing of it says goodbye."""
        self.cut()
        self._space.end()
        for each in self.started:
            each.wait(20)

    def end(self) -> None:
        self._space.end()
        for each in self.started:
            with suppress(ChildProcessError, ProcessLookupError, AssertionError):
                each.wait(10)


class Cluster:
    """Nodes on one switch; a context.

    Args:
        folder: for consoles.
        size: number of nodes, named `node0`, ...
        names: host names that each node can resolve: `all`, or `own` to a loopback address, as Debian writes it, or `none`.
    """

    def __init__(
        self, folder: Path, size: int, *, names: str = "all", environment: Mapping[str, str] | None = None
    ) -> None:
        self.folder, self._names = folder, names
        self.switch = _Space(_SWITCH, kinds=("net",))
        self.nodes: list[Node] = []
        self._all: list[Node] = []
        try:
            for number in range(size):
                self.nodes.append(self._make(number, size))
        except BaseException:
            self.end()
            raise

    def _make(self, number: int, size: int) -> Node:
        own = {
            "all": "".join(f"10.77.0.{each + 1} node{each}\n" for each in range(size)),
            "own": f"127.0.1.1 node{number}\n",
            "none": "",
        }
        node = Node(self, number, hosts=own[self._names])
        self._all.append(node)
        return node

    def replace(self, number: int) -> Node:
        """Return another machine in the place of a lost one: it knows nothing."""
        self.switch.call("sh", "-c", f"ip link del port{number} 2>/dev/null || true")
        self.nodes[number] = self._make(number, len(self.nodes))
        return self.nodes[number]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.end()

    def end(self) -> None:
        for node in self._all:
            node.end()
        self.switch.end()
