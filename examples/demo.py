"""`make demo`: train, kill a rank with SIGKILL three times, and compare with a training that was left in peace.

Both train the same MoE-GPT on three ranks. The first has no checkpoints and no failures. The second checkpoints, and is
started three times: by `moe-ckpt run` with a spare, by `moe-ckpt run` without one, and by torchrun. Each time this
process kills one rank, lets the training go on for a while, and stops it with SIGTERM, the last time excepted. Nothing
tells it where to resume: the command is the same, and the callback finds its way.

Exit status 0 means that both trainings ended in the same bits; 1 that they did not, or that one failed.
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

from extras import require

require("rich", "matplotlib")  # the picture is drawn after minutes of training

from rich.console import Console  # noqa: E402
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn  # noqa: E402

WORKER = Path(__file__).with_name("demo_worker.py")
CLEAN, KILLED = "without-failures", "killed-and-resumed"
LAUNCHERS = {
    "moe-ckpt run --spares 1": ["lightning_moe_ckpt.cli", "run", "--spares", "1"],
    "moe-ckpt run": ["lightning_moe_ckpt.cli", "run"],
    "torchrun": ["torch.distributed.run", "--standalone", "--max-restarts", "3"],
}
"""Module and options by the name that is shown."""
STEPS_BETWEEN = 12
"""Steps from a recovery until the training is stopped to be started by the next launcher."""
POLL_SECONDS = 0.05
QUIET_SECONDS = 120.0
"""A training that writes no record for so long has hung."""
STOPPED = (0, 128 + signal.SIGTERM, -signal.SIGTERM, 1)
"""Exit statuses of launchers after SIGTERM; that of torchrun is 1."""


@dataclass(frozen=True, kw_only=True)
class Kill:
    """Kill of a rank."""

    launcher: str
    rank: int
    step: int
    """Newest step that rank 0 had finished, as far as was known."""
    time: float
    """Seconds since 1970."""


class DemoFailed(RuntimeError):
    """A training did not reach its end; the message says which and shows what it printed last."""


class Tail:
    """Follows the records that the ranks of a training append.

    Attributes:
        pids: newest process of each rank.
        begun: when each rank last began to train, in seconds since 1970.
        steps: newest step of each rank, replayed steps included.
    """

    def __init__(self, out: Path, ranks: int) -> None:
        self._paths = [out / f"steps.rank{rank}.jsonl" for rank in range(ranks)]
        self._offsets = [0] * ranks
        self.pids: dict[int, int] = {}
        self.begun = [0.0] * ranks
        self.steps = [0] * ranks

    def poll(self) -> bool:
        """Read what is new; returns whether there was anything."""
        before = list(self._offsets)
        for rank, path in enumerate(self._paths):
            for line in self._new_lines(rank, path):
                self._take(rank, line)
        return before != self._offsets

    def passed(self, kill: Kill, num_steps: int) -> bool:
        """Whether all ranks have begun since `kill`, and taken so many new steps."""
        return min(self.begun) > kill.time and min(self.steps) > kill.step + num_steps

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
        if line["event"] == "begin":
            self.pids[rank], self.begun[rank] = line["pid"], line["time"]
        elif line["event"] == "step":
            self.steps[rank] = line["step"]


class Demo:
    """Runs both trainings and follows them.

    Args:
        args: the command line.
        progress: shows a bar per training.
    """

    def __init__(self, args: argparse.Namespace, progress: Progress) -> None:
        self._args, self._progress = args, progress

    def run_undisturbed(self) -> None:
        """Train without checkpoints and without failures."""
        out, bar = self._begin(CLEAN, "without failures")
        self._run("torchrun", out, bar, kill_after=None)

    def run_killed(self) -> list[Kill]:
        """Train with checkpoints and kill a rank under each launcher."""
        out, bar = self._begin(KILLED, "killed three times")
        every = self._args.steps // (len(LAUNCHERS) + 1)
        return [
            kill
            for index, name in enumerate(LAUNCHERS)
            if (kill := self._run(name, out, bar, kill_after=every * (index + 1))) is not None
        ]

    def _begin(self, name: str, shown: str) -> tuple[Path, TaskID]:
        out = self._args.out / name
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True)
        return out, self._progress.add_task(shown, total=self._args.steps)

    def _run(self, launcher: str, out: Path, bar: TaskID, kill_after: int | None) -> Kill | None:
        """Run a training until its end, or, if another launcher follows, until it has recovered from a kill."""
        args, folder = self._args, out / "checkpoints"
        worker = ["--out", str(out), "--steps", str(args.steps), "--blocks", str(args.blocks)]
        worker += ["--crops", str(args.crops), "--accelerator", args.accelerator]
        worker += ["--checkpoints", folder.as_uri()] if kill_after is not None else []
        stops = kill_after is not None and launcher != [*LAUNCHERS][-1]
        tail, kill, heard, stopped = Tail(out, args.ranks), None, time.monotonic(), False
        with _started(launcher, args.ranks, worker, out / "log.txt") as process:
            while process.poll() is None:
                if tail.poll():
                    heard = time.monotonic()
                    self._progress.update(bar, completed=tail.steps[0])
                elif time.monotonic() - heard > QUIET_SECONDS:
                    raise DemoFailed(f"No step in {QUIET_SECONDS:.0f} s.\n{_last_lines(out)}")
                if kill is None and kill_after is not None and tail.steps[0] >= kill_after and committed_window(folder):
                    kill = kill_one(launcher, tail)
                    self._tell(kill)
                elif kill is not None and stops and not stopped and tail.passed(kill, STEPS_BETWEEN):
                    process.terminate()
                    stopped = True
                time.sleep(POLL_SECONDS)
        if process.returncode not in (STOPPED if stopped else (0,)):
            raise DemoFailed(f"{launcher} in {out} ended with status {process.returncode}.\n{_last_lines(out)}")
        if kill is None and kill_after is not None:
            raise DemoFailed("The training ended before there was a window to resume from. Use more --steps.")
        tail.poll()
        self._progress.update(bar, completed=tail.steps[0])
        return kill

    def _tell(self, kill: Kill) -> None:
        self._progress.console.print(f"step {kill.step + 1}, under {kill.launcher}: SIGKILL of rank {kill.rank}")


def kill_one(launcher: str, tail: Tail) -> Kill:
    """SIGKILL a rank chosen at random."""
    rank = random.choice(sorted(tail.pids))
    kill = Kill(launcher=launcher, rank=rank, step=tail.steps[0], time=time.time())
    os.kill(tail.pids[rank], signal.SIGKILL)
    return kill


def committed_window(folder: Path) -> bool:
    """Whether something newer than the dense generation 0 is committed, so that the resume has to replay."""
    return any(int(path.parts[-3]) > 0 for path in folder.glob("snap/*/i*/_COMMITTED"))


@contextmanager
def _started(launcher: str, ranks: int, worker: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The training, in processes of its own; stopped when the block ends before it does."""
    command = [sys.executable, "-m", *LAUNCHERS[launcher], "--nproc-per-node", str(ranks), str(WORKER), *worker]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with log.open("ab") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()  # launchers pass it on and wait for their ranks
            process.wait()


def _last_lines(out: Path) -> str:
    lines = (out / "log.txt").read_text(errors="replace").splitlines()
    return "\n".join(["...", *lines[-30:], f"All of it is in {out / 'log.txt'}"])


def main(argv: Sequence[str] | None = None) -> int:
    args = _parse(argv)
    console = Console()
    columns = [
        TextColumn("{task.description:<20}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("steps"),
        TimeElapsedColumn(),
    ]
    console.print(
        f"The same training twice, on {args.ranks} ranks: once in peace, and once with a rank killed under each of\n"
        + ", ".join(LAUNCHERS)
        + f". What ranks print is in {args.out}.",
        soft_wrap=True,
    )
    try:
        with Progress(*columns, console=console) as progress:
            demo = Demo(args, progress)
            demo.run_undisturbed()
            kills = demo.run_killed()
    except DemoFailed as failure:
        console.print(str(failure), markup=False)
        return 1
    return _show(console, args, kills)


def _show(console: Console, args: argparse.Namespace, kills: list[Kill]) -> int:
    from demo_report import (
        RunRecords,
        compare,
        draw,
        figures,
        recoveries,
    )  # import torch, which the runs do not wait for

    clean, killed = RunRecords(args.out / CLEAN), RunRecords(args.out / KILLED)
    verdict = compare(clean, killed)
    picture = args.out / "demo.png"
    draw(clean, killed, kills, picture)
    console.print()
    console.print(recoveries(killed, kills))
    console.print()
    console.print(figures(clean, killed, verdict))
    for line in verdict.lines[:20]:
        console.print(f"  differs: {line}", markup=False)
    console.print(f"Loss of both trainings, and their difference: {picture}", soft_wrap=True)
    return 0 if verdict.identical else 1


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, default=Path("out/demo"), help="folder for records, checkpoints and picture"
    )
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--accelerator", choices=["cpu", "gpu", "auto"], default="cpu", help="gpu: one for each rank")
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--crops", type=int, default=1920, help="per epoch, over all ranks")
    args = parser.parse_args(argv)
    args.out = args.out.resolve()
    return args


if __name__ == "__main__":
    sys.exit(main())
