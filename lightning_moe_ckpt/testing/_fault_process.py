"""Help a process to wake up after a SIGSTOP, or to die with its whole node.

The helper runs as a file, by `python -I -S`, to start in milliseconds, and imports nothing of this package. The helper has a
session of its own: a signal to a rank's process group does not end the helper.

A node is lost in an order that leaves no race with the launcher, as a death lets it start the job again: all
processes of the node are stopped, its files are removed, and only then are the processes killed. Nodes lost together
wait for each other between the two.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path

_POLL_SECONDS = 0.001
_STOP_SECONDS = 5.0
"""Time that a stopped process may take to stand still; one that waits for a disk cannot be stopped before."""


def main(argv: list[str]) -> None:
    """Run one command: `stop`, or `lose` with its JSON argument."""
    if argv[0] == "stop":
        stop_for(int(argv[1]), float(argv[2]))
    else:
        lose_node(**json.loads(argv[1]))


def stop_for(pid: int, seconds: float) -> None:
    """Stop process `pid`, the parent of this one, and let it go on `seconds` after it stands still."""
    process = os.pidfd_open(pid)
    if os.getppid() != pid:
        return  # it has ended, and `pid` may be another by now
    with contextlib.suppress(ProcessLookupError):  # it ends meanwhile
        signal.pidfd_send_signal(process, signal.SIGSTOP)
        _await_standstill([pid])
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and state_of(pid):
            time.sleep(min(0.05, seconds))
        signal.pidfd_send_signal(process, signal.SIGCONT)


def lose_node(
    *, processes: list[list[int]], files: list[str], ready: str, others: list[str], record: str, patience: float
) -> None:
    """Stop processes (id and start time of each, see `start_time`) with their children, remove files by patterns of
    names, make the file `ready`, wait up to `patience` seconds for such files of other nodes, kill. JSON lines are
    appended to `record`.
    """
    doomed = _with_children(processes)
    _signal_all(doomed, signal.SIGSTOP)
    _await_standstill([pid for pid, _ in doomed])
    removed = [path for pattern in files for path in _remove(Path(pattern))]
    line = {"event": "removed", "time": time.time(), "files": removed, "processes": [pid for pid, _ in doomed]}
    with Path(record).open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
    Path(ready).touch()
    deadline = time.monotonic() + patience
    while not all(Path(other).exists() for other in others) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    _signal_all(doomed, signal.SIGKILL)


def _await_standstill(pids: list[int]) -> None:
    deadline = time.monotonic() + _STOP_SECONDS
    while any(state_of(pid) not in {"", "T", "t", "Z", "X"} for pid in pids) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)


def _remove(pattern: Path) -> list[str]:
    removed = sorted(str(path) for path in pattern.parent.glob(pattern.name))
    for path in removed:
        Path(path).unlink(missing_ok=True)
    return removed


def _signal_all(processes: list[tuple[int, int]], number: signal.Signals) -> None:
    for _, process in processes:
        with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
            signal.pidfd_send_signal(process, number)


def _with_children(processes: list[list[int]]) -> list[tuple[int, int]]:
    """Return ids and file descriptors of processes and descendants, without this one and those whose id was reused."""
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    parents = {pid: int(fields[1]) for pid in pids if (fields := _stat(pid))}
    family = [pid for pid, began in processes if start_time(pid) == began]
    for parent in family:  # which grows meanwhile
        family += [pid for pid, of in parents.items() if of == parent and pid != os.getpid()]
    return [(pid, descriptor) for pid in family if (descriptor := _open(pid)) is not None]


def _open(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return None


def state_of(pid: int) -> str:
    """Return the letter of `ps`, e.g. T for stopped; empty if there is no such process."""
    fields = _stat(pid)
    return fields[0] if fields else ""


def start_time(pid: int) -> int:
    """Return a process's start in ticks since the machine's; -1 if the process is gone. With the id it names one process for ever."""
    fields = _stat(pid)
    return int(fields[19]) if fields else -1


def _stat(pid: int) -> list[str]:
    """Return the fields of `/proc/PID/stat` after the program's name, where anything may stand."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


if __name__ == "__main__":
    main(sys.argv[1:])
