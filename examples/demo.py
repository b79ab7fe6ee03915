"""`make demo`: train, kill a worker with SIGKILL, let torchrun restart the job, and compare with a run left in peace.

Both runs train the same MoE-GPT on three processes. The first has no checkpoints and no failures. The second
checkpoints at every step; once a window is committed and the run is past its middle, this process kills one worker.
Nothing tells the job where to resume: torchrun starts the same command again and the callback finds its way.

Exit status 0 means that both runs ended in the same bits; 1 that they did not, or that a run failed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

WORKER = Path(__file__).with_name("demo_worker.py")
CLEAN, KILLED = "without-failures", "killed-and-resumed"
POLL_SECONDS = 0.05
QUIET_SECONDS = 120.0
"""A job that writes no record for so long has hung."""


@dataclass(frozen=True, kw_only=True)
class Kill:
    """Kill of a worker."""

    rank: int
    pid: int
    time: float
    """Seconds since 1970."""


class DemoFailed(RuntimeError):
    """A run did not reach its end; the message says which and shows what it printed last."""


class Tail:
    """Follows the records that the ranks of a running job append.

    Attributes:
        step: newest step of rank 0, replayed steps included.
        attempt: newest attempt of any rank.
        pids: process of each rank in its newest attempt.
    """

    def __init__(self, out: Path, ranks: int) -> None:
        self._paths = [out / f"steps.rank{rank}.jsonl" for rank in range(ranks)]
        self._offsets = [0] * ranks
        self.step = self.attempt = 0
        self.pids: dict[int, int] = {}

    def poll(self) -> bool:
        """Read what is new; returns whether there was anything."""
        before = list(self._offsets)
        for rank, path in enumerate(self._paths):
            for line in self._new_lines(rank, path):
                self._take(rank, line)
        return before != self._offsets

    def _new_lines(self, rank: int, path: Path) -> Iterator[dict[str, Any]]:
        if not path.exists():
            return
        with path.open("rb") as file:
            file.seek(self._offsets[rank])
            # A line without its end is still being written.
            whole = file.read().rpartition(b"\n")[0]
        self._offsets[rank] += len(whole) + 1 if whole else 0
        yield from (json.loads(line) for line in whole.splitlines())

    def _take(self, rank: int, line: dict[str, Any]) -> None:
        if line["event"] == "start":
            self.pids[rank], self.attempt = line["pid"], line["attempt"]
        elif line["event"] == "step" and rank == 0:
            self.step = line["step"]


class Demo:
    """Runs the two jobs and follows them.

    Args:
        args: the command line.
        progress: shows a bar per job.
    """

    def __init__(self, args: argparse.Namespace, progress: Progress) -> None:
        self._args, self._progress = args, progress

    def run_undisturbed(self) -> None:
        """Train without checkpoints and without failures."""
        self._run(CLEAN, checkpoints=False)

    def run_killed(self) -> Kill:
        """Train with checkpoints and kill a worker on the way."""
        kill = self._run(KILLED, checkpoints=True)
        if kill is None:
            raise DemoFailed("The run ended before a window was committed, so nothing was killed. Use more --steps.")
        return kill

    def _run(self, name: str, *, checkpoints: bool) -> Kill | None:
        args, out = self._args, self._args.out / name
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True)
        worker = ["--out", str(out), "--steps", str(args.steps), "--blocks", str(args.blocks)]
        worker += ["--crops", str(args.crops), "--accelerator", args.accelerator]
        folder = out / "checkpoints"
        if checkpoints:
            worker += ["--checkpoints", folder.as_uri()]
        bar = self._progress.add_task(name.replace("-", " "), total=args.steps)
        with _torchrun(args.ranks, worker, out / "log.txt") as process:
            kill = self._follow(process, out, bar, folder if checkpoints else None)
        if process.returncode != 0:
            raise DemoFailed(f"The run in {out} failed with status {process.returncode}.\n{_last_lines(out)}")
        return kill

    def _follow(self, process: subprocess.Popen[bytes], out: Path, bar: TaskID, folder: Path | None) -> Kill | None:
        """Watch until the job ends; kill one worker once it is past `--kill-after` and can be resumed."""
        tail, kill, heard = Tail(out, self._args.ranks), None, time.monotonic()
        while process.poll() is None:
            if tail.poll():
                heard = time.monotonic()
                self._show(bar, tail, kill)
            elif time.monotonic() - heard > QUIET_SECONDS:
                raise DemoFailed(f"No step in {QUIET_SECONDS:.0f} s.\n{_last_lines(out)}")
            if folder is not None and kill is None and tail.step >= self._args.kill_after and committed_window(folder):
                kill = kill_one(tail)
                self._show(bar, tail, kill)
            time.sleep(POLL_SECONDS)
        tail.poll()
        self._show(bar, tail, kill)
        return kill

    def _show(self, bar: TaskID, tail: Tail, kill: Kill | None) -> None:
        self._progress.update(bar, completed=tail.step)
        if kill is not None:
            state = "resumed" if tail.attempt > 0 else "waiting for torchrun"
            self._progress.update(bar, description=f"rank {kill.rank} killed, {state}")


def kill_one(tail: Tail) -> Kill:
    """SIGKILL a rank chosen at random."""
    rank = random.choice(sorted(tail.pids))
    kill = Kill(rank=rank, pid=tail.pids[rank], time=time.time())
    os.kill(kill.pid, signal.SIGKILL)
    return kill


def committed_window(folder: Path) -> bool:
    """Whether something newer than the dense generation 0 is committed, so that the resume has to replay."""
    return any(int(path.parts[-3]) > 0 for path in folder.glob("snap/*/i*/_COMMITTED"))


@contextmanager
def _torchrun(ranks: int, worker: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The job, in processes of its own; stopped when the block ends before it does."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += ["--max-restarts", "3", str(WORKER), *worker]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()  # torchrun passes it on and waits for its workers
            process.wait()


def _last_lines(out: Path) -> str:
    lines = (out / "log.txt").read_text(errors="replace").splitlines()
    return "\n".join(["...", *lines[-30:], f"All of it is in {out / 'log.txt'}"])


def main(argv: Sequence[str] | None = None) -> int:
    args = _parse(argv)
    console = Console()
    columns = [
        TextColumn("{task.description:<34}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("steps"),
        TimeElapsedColumn(),
    ]
    try:
        with Progress(*columns, console=console) as progress:
            demo = Demo(args, progress)
            demo.run_undisturbed()
            kill = demo.run_killed()
    except DemoFailed as failure:
        console.print(str(failure), markup=False)
        return 1
    return _show(console, args, kill)


def _show(console: Console, args: argparse.Namespace, kill: Kill) -> int:
    from demo_report import RunRecords, compare, draw, table  # imports torch, which the runs should not wait for

    clean, killed = RunRecords(args.out / CLEAN), RunRecords(args.out / KILLED)
    verdict = compare(clean, killed)
    picture = args.out / "demo.png"
    draw(clean, killed, picture)
    console.print(table(clean, killed, kill.time, verdict))
    for line in verdict.lines[:20]:
        console.print(f"  differs: {line}", markup=False)
    console.print(f"Loss of both runs and load of the experts: {picture}", soft_wrap=True)
    return 0 if verdict.identical else 1


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, default=Path("out/demo"), help="folder for records, checkpoints and picture"
    )
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--accelerator", choices=["cpu", "gpu", "auto"], default="cpu", help="gpu: one for each rank")
    parser.add_argument("--steps", type=int, default=320)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--crops", type=int, default=3840, help="per epoch, over all ranks")
    parser.add_argument("--kill-after", type=int, help="step from which a worker may be killed")
    args = parser.parse_args(argv)
    args.out = args.out.resolve()
    args.kill_after = args.steps * 5 // 8 if args.kill_after is None else args.kill_after
    return args


if __name__ == "__main__":
    sys.exit(main())
