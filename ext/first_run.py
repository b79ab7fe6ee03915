"""Find out all that a first run on a machine with a GPU should tell, whatever of it fails: `python ext/first_run.py --help`.

Each section is a process with a limit of its own, so that an illegal access, a crash or a hang in one costs the others
nothing. The document is whole after every section; it has what a section had found when it ended, and what it printed
last, tracebacks included. A section that cannot be run here says what is lacking.
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import importlib.metadata
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout, for `benchmarks`, which is not installed
from benchmarks import native
from benchmarks.documents import write_document
from benchmarks.native_goals import CopyScale, DeviceCopies, judge
from benchmarks.native_kernels import Kernels
from benchmarks.peers_saving import OTHERS
from benchmarks.recovery import Precision, RecoveryFit, RecoveryLoss, RecoverySystem
from lightning_moe_ckpt.benchmarks import _overhead
from lightning_moe_ckpt.benchmarks._benchmark import (
    Accelerator,
    Machine,
    Progress,
    accelerator_for,
    show_table,
)
from lightning_moe_ckpt.benchmarks._fits import ModelSize, bench_folders, one_thread
from lightning_moe_ckpt.cli import BENCH
from lightning_moe_ckpt.errors import CheckpointError, ConfigurationError
from lightning_moe_ckpt.native import _choice, _library, examine
from lightning_moe_ckpt.testing import AttemptResult, Kill, differences, run_attempts

ROOT = Path(__file__).resolve().parents[1]
"""Root of the checkout."""
NO_DEVICE = "no CUDA device"
_SAID = 8000  # characters of the end of the output
_DUMP_SECONDS = 1.0
"""Time for a section that is over its limit to write the stacks of its threads."""
_ATTRIBUTES = {
    "copy engines": 40,
    "page tables of the host": 100,
    "pageable memory": 88,
    "host pointers of registered memory": 91,
    "registering host memory": 99,
    "shared memory of a block, most": 97,
}
"""Numbers of `CUdevice_attribute` that decide which way copies and kernels go."""
_BIG = (
    "--dim",
    "1024",
    "--experts",
    "8",
    "--batch-size",
    "768",
    "--rounds",
    "3",
    "--steps",
    "16",
    "--settle",
    "4",
    "--warm-up",
    "12",
    "--blocks",
    "2",
    "--precision",
    "bf16-mixed",
)
"""1.7 GB of state, and 55 ms a step on an H100; four such trainings share the device, and twice the batch is too much for it."""
_SMALL = ("--dim", "32", "--experts", "4", "--rounds", "1", "--blocks", "1", "--steps", "4", "--settle", "2")
_SIZE = ModelSize(num_blocks=2, model_dim=64, num_experts=4, expert_dim=64, batch_size=4, dropout=0.1)
_PRECISIONS: tuple[Precision, ...] = ("32-true", "bf16-mixed")
_STEPS, _ATTEMPT_SECONDS = 16, 40.0
"""Steps and time limit of the training that is killed and resumed."""
_SECTION = "--section"
_CHECKS = """
import torch
from lightning_moe_ckpt.native import _choice, _library
for use in _choice.USES:
    _choice._check(use, _library.cuda(), torch.device("cuda", 0))
"""


class _Lacking(Exception):
    """Names what a section needs and this machine has not."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SectionOutcome:
    """End of a section."""

    outcome: str
    """`done`, `not run: ` and what is lacking, or `FAILED: ` and how."""
    seconds: float
    limit_seconds: float
    found: Any = None
    """Values of JSON; of a section that failed, those it had until then."""
    said: str = ""
    """The end of its output."""


Keep = Callable[[Any], None]
"""Writes down what a section has found so far: values of JSON and dataclasses."""
SectionWork = Callable[[Accelerator, Keep], None]
"""Gets `cpu` or `gpu` for trainings; raises if something is not as it should be."""


@dataclass(frozen=True, slots=True)
class Section:
    """One part of a first run."""

    work: SectionWork
    limit: timedelta
    needs_device: bool = True


def main(argv: Sequence[str] | None = None) -> int:
    """Run sections, show a row for each, and return the exit status: 2 if something is asked for that there is not."""
    parser = argparse.ArgumentParser(description="Check, test, measure, kill and resume on a machine with a GPU.")
    parser.add_argument("--only", metavar="A,B", default=",".join(SECTIONS), help="sections (default: %(default)s)")
    parser.add_argument("--out", metavar="PATH", type=Path, default=ROOT / "ext" / "results", help="folder for JSON")
    parser.add_argument("--accelerator", choices=["cpu", "gpu", "auto"], default="auto", help="of trainings")
    options = parser.parse_args(argv)
    chosen = options.only.split(",")
    if unknown := [name for name in chosen if name not in SECTIONS]:
        parser.error(f"no section {unknown[0]}; there are {', '.join(SECTIONS)}")
    try:
        accelerator, has_device = accelerator_for(options.accelerator), torch.cuda.is_available()
    except ConfigurationError as error:
        parser.error(str(error))
    commands = {
        name: None if SECTIONS[name].needs_device and not has_device else _command(name, accelerator) for name in chosen
    }
    now = datetime.now(timezone.utc)
    outcomes = run_apart(commands, options.out / f"first-run-{now:%Y%m%dT%H%M%SZ}.json", _show)
    figures = [
        native.NativeFigure(
            what=f"section {name}", how="a process", value=outcome.seconds, unit="s", note=outcome.outcome
        )
        for name, outcome in outcomes.items()
    ]
    show_table(Console(), native.table(figures))
    return 0


def _show(what: str, done: int, total: int) -> None:
    sys.stderr.write(f"{done + 1} of {total}: {what}\n")


def _command(name: str, accelerator: Accelerator) -> list[str]:
    return [sys.executable, __file__, _SECTION, name, accelerator]


def run_apart(
    commands: Mapping[str, Sequence[str] | None], path: Path, progress: Progress
) -> dict[str, SectionOutcome]:
    """Run sections one after another and put the document into `path` after each.

    Args:
        commands: by section; each gets the path of the file for what it finds as a last argument. `None`: no device.
        path: of the document; folders are made.
        progress: called for each section.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    outcomes = dict[str, SectionOutcome]()
    for done, (name, command) in enumerate(commands.items()):
        progress(f"first run: {name}", done, len(commands))
        limit = SECTIONS[name].limit
        if command is None:
            lacking = f"not run: {NO_DEVICE}"
            outcomes[name] = SectionOutcome(outcome=lacking, seconds=0, limit_seconds=limit.total_seconds())
        else:
            outcomes[name] = run_section(command, limit)
        write_document(path, {"machine": Machine.read(), "sections": outcomes})
    return outcomes


def run_section(command: Sequence[str], limit: timedelta) -> SectionOutcome:
    """Run a process, and kill it with all that it started once `limit` is over or it has ended."""
    with tempfile.TemporaryDirectory(prefix="moe-ckpt-first-run-") as folder:
        found, log = Path(folder) / "found.json", Path(folder) / "log"
        start = time.perf_counter()
        with log.open("wb") as file:
            process = subprocess.Popen(  # noqa: S603  # ours
                [*command, str(found)],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=os.environ | {"PYTHONUNBUFFERED": "1"},
                start_new_session=True,
            )
        try:
            status: int | None = process.wait(limit.total_seconds())
        except subprocess.TimeoutExpired:
            status = None
            process.send_signal(signal.SIGUSR1)  # it writes its stacks
            time.sleep(_DUMP_SECONDS)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        said = log.read_text(encoding="utf-8", errors="replace")[-_SAID:]
        written = json.loads(found.read_text(encoding="utf-8")) if found.exists() else {}
        return SectionOutcome(
            outcome=_outcome(status, limit, written, said),
            seconds=time.perf_counter() - start,
            limit_seconds=limit.total_seconds(),
            found=written.get("found"),
            said=said,
        )


def _outcome(status: int | None, limit: timedelta, written: Mapping[str, Any], said: str) -> str:
    if "lacking" in written:
        return f"not run: {written['lacking']}"
    if status == 0:
        return "done"
    if status is None:
        return f"FAILED: over its limit of {limit.total_seconds():g} s"
    if status < 0:
        return f"FAILED: died by {signal.Signals(-status).name}"
    last_line = said.strip().rpartition("\n")[2]
    return f"FAILED: {written.get('error') or last_line or f'status {status}'}"


def section_main(name: str, wanted: str, path: str) -> None:
    """Run a section in a process of its own: its name, the accelerator, and the file for what is found."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    written = dict[str, Any]()

    def keep(found: Any) -> None:
        written["found"] = found
        write_document(Path(path), written)

    try:
        SECTIONS[name].work(accelerator_for(wanted), keep)
    except _Lacking as lacking:
        write_document(Path(path), written | {"lacking": str(lacking)})
    except Exception as error:
        write_document(Path(path), written | {"error": f"{type(error).__name__}: {error}".partition("\n")[0]})
        raise


def _environment(accelerator: Accelerator, keep: Keep) -> None:
    packages = {
        distribution.metadata["Name"]: distribution.version for distribution in importlib.metadata.distributions()
    }
    found: dict[str, Any] = {"machine": Machine.read(), "packages": packages}
    found["devices"] = _say("nvidia-smi", "-q", "-d", "PCIE,MEMORY,CLOCK") if torch.cuda.is_available() else NO_DEVICE
    found["nvcc"] = _say("nvcc", "--version")
    found["shared memory"] = _say("df", "-h", "/dev/shm")  # noqa: S108  # looked at only
    limits = Path("/proc/self/limits").read_text(encoding="utf-8").splitlines()
    found["limits"] = [line for line in limits if "locked memory" in line]
    found["memory nodes"] = sorted(path.name for path in Path("/sys/devices/system/node").glob("node*"))
    keep(found)
    found["attributes"] = _attributes() if torch.cuda.is_available() else NO_DEVICE
    keep(found)


def _say(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=15, check=False)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return (done.stdout + done.stderr).strip()[-_SAID:]


def _attributes() -> dict[str, int]:
    driver, value = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
    driver.cuInit(0)
    found = {}
    for name, number in _ATTRIBUTES.items():
        code = driver.cuDeviceGetAttribute(ctypes.byref(value), number, 0)
        found[name] = value.value if code == 0 else -code
    return found


def _build(accelerator: Accelerator, keep: Keep) -> None:
    """Build for the device that is here, in place of the checkout's libraries; without one, see whether it builds."""
    script, start = str(ROOT / "ext" / "build_native.py"), time.perf_counter()
    on_device = torch.cuda.is_available()
    archs = "".join(map(str, torch.cuda.get_device_capability())) if on_device else "90"
    environment = os.environ | {"MOE_CKPT_CUDA": "1", "MOE_CKPT_CUDA_ARCHS": archs}
    with tempfile.TemporaryDirectory(prefix="moe-ckpt-build-") as folder:
        command = [sys.executable, script, *([] if on_device else ["--out", folder])]
        status = subprocess.run(command, env=environment, check=False).returncode  # noqa: S603
    keep({"archs": archs, "seconds": time.perf_counter() - start, "status": status})
    sys.exit(status)


def _check(accelerator: Accelerator, keep: Keep) -> None:
    """Run the package's own check of the device, with the tracebacks that it keeps to itself."""
    library, found, failed = _cuda_part(), dict[str, Any](), list[str]()
    for use in _choice.USES:
        start = time.perf_counter()
        try:
            _choice._check(use, library, torch.device("cuda", 0))  # noqa: SLF001  # its verdict has no traceback
            said = "good"
        except Exception:  # noqa: BLE001  # of the driver and of kernels: kept, the other uses are tried too
            said = traceback.format_exc()
            failed.append(use)
        found[use] = {"said": said, "seconds": time.perf_counter() - start}
        keep(found)
    keep(found | {"doctor": examine()})
    if failed:
        raise CheckpointError(f"The CUDA part fails its check for {', '.join(failed)}.")


def _cuda_part() -> _library.Library:
    status = _library.status("cuda")
    if status.library is None:
        raise CheckpointError(f"The compiled CUDA part is not in use: {status.reason}.")
    return status.library


def _tests(accelerator: Accelerator, keep: Keep) -> None:
    if lacking := [name for name in ("pytest", "pytest_timeout", "hypothesis") if find_spec(name) is None]:
        raise _Lacking(f"the tests need {', '.join(lacking)}")
    files = sorted(map(str, (ROOT / "tests").rglob("test_*.py")))
    files = [file for file in files if "mark.gpu" in Path(file).read_text(encoding="utf-8")]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "default", "-m", "gpu"]
    command += ["--timeout", "90", "-k", "not compute_sanitizer", *files]
    keep({"files": files})
    sys.exit(subprocess.run(command, cwd=ROOT, check=False).returncode)  # noqa: S603


def _resume(accelerator: Accelerator, keep: Keep) -> None:
    """Train, kill and resume, and hold every bit against the same training left in peace.

    It is left in peace twice: where two such runs differ, kernels are not deterministic, and nothing can be said of a resume.
    A sparse run finds the memory of the attempt before it, a dense one has to read storage.
    """
    # Attention has no deterministic backward in the fused kernels for float32.
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    found = list[dict[str, Any]]()
    # Comparing on several threads would leave some that the next attempt's fork has not, and waits for.
    with one_thread(), bench_folders() as (folder, memory):

        def run(name: str, system: RecoverySystem, loss: RecoveryLoss, *kills: Kill) -> list[AttemptResult]:
            name = f"{name}-{precision}"
            fit = RecoveryFit(
                system=system, loss=loss, size=_SIZE, every=4, max_steps=_STEPS, memory=str(memory / name),
                accelerator=accelerator, deterministic=True, precision=precision,
            )  # fmt: skip
            url = (folder / name).as_uri()
            return run_attempts(
                fit, url=url, workdir=folder / f"{name}-attempts", kills=kills, timeout=_ATTEMPT_SECONDS
            )

        losses: tuple[tuple[RecoverySystem, RecoveryLoss], ...] = (("sparse", "process"), ("dense", "cluster"))
        for precision in _PRECISIONS:
            (peace,), (again,) = run("peace", "none", "process"), run("again", "none", "process")
            for policy, loss in losses:
                killed, last = run(policy, policy, loss, Kill(phase="forward", step=_STEPS * 5 // 8, settle=20.0))
                returned, end = last.returned(), last.end()
                resumed = {
                    "policy": policy,
                    "precision": precision,
                    "accelerator": accelerator,
                    "resumed_from": returned["resumed_from"],
                    "restored_from": returned["restored_from"],
                    "num_tensors": sum(isinstance(value, torch.Tensor) for value in end.values()),
                    "differs": [*_other(peace, last), *_other_losses(peace, killed)],
                    "unrepeatable": _other(peace, again),
                    "seconds": killed.seconds + last.seconds,
                }
                found.append(resumed)
                keep(found)
    if other := [f"{each['policy']} in {each['precision']}" for each in found if each["differs"]]:
        raise CheckpointError(f"Other bits after a resume: {', '.join(other)}.")


def _other(peace: AttemptResult, other: AttemptResult) -> list[str]:
    """Return a line per difference to the run left in peace."""
    return [*differences(peace.end(), other.end()), *_other_losses(peace, other)]


def _other_losses(peace: AttemptResult, other: AttemptResult) -> list[str]:
    wanted, found = ({line["step"]: line["loss"] for line in each.records(kind="train")} for each in (peace, other))
    return [f"loss of step {step}: {found[step]}, not {wanted[step]}" for step in found if found[step] != wanted[step]]


def _measured(make: Callable[[torch.device], DeviceCopies | Kernels]) -> SectionWork:
    def work(accelerator: Accelerator, keep: Keep) -> None:
        _cuda_part()
        measured = make(torch.device("cuda", 0))
        found = judge(measured.goals(), "measured in another section")
        keep(found)
        for figure in measured.rates():
            found.append(figure)
            keep(found)

    return work


def _trained(accelerator: Accelerator, keep: Keep) -> None:
    """Measure the overhead of a model that is worth a GPU, or on a CPU of one that only shows that it works."""
    arguments = [*(_BIG if accelerator == "gpu" else _SMALL), "--accelerator", accelerator]
    arguments += ["--variants", "sparse8,dense4,dcp4"]
    # Storage in memory too: what a disk does to training is another question, and it does it to all of them.
    with bench_folders() as (_, memory):
        arguments += ["--url", memory.as_uri()]
        options = BENCH.commands["overhead"].make_context("overhead", arguments).params
        keep(_overhead.measure(SimpleNamespace(**options, others=OTHERS), print, keep))


def _sanitized(tool: str) -> SectionWork:
    def work(accelerator: Accelerator, keep: Keep) -> None:
        program = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
        if program is None:
            raise _Lacking("compute-sanitizer is part of the CUDA toolkit, which is not here")
        command = [program, "--tool", tool, "--report-api-errors", "no", "--error-exitcode", "9"]
        sys.exit(subprocess.run([*command, sys.executable, "-c", _CHECKS], check=False).returncode)  # noqa: S603

    return work


def _seconds(number: int) -> timedelta:
    return timedelta(seconds=number)


SECTIONS = {
    "env": Section(_environment, _seconds(20), needs_device=False),
    "build": Section(_build, _seconds(90), needs_device=False),
    "check": Section(_check, _seconds(60)),
    "tests": Section(_tests, _seconds(150)),
    "resume": Section(_resume, _seconds(200), needs_device=False),
    "copies": Section(_measured(lambda device: DeviceCopies(device, CopyScale())), _seconds(120)),
    "kernels": Section(_measured(lambda device: Kernels(device, 10**9, CopyScale().repeats)), _seconds(60)),
    "overhead": Section(_trained, _seconds(150), needs_device=False),
    "memcheck": Section(_sanitized("memcheck"), _seconds(100)),
    "racecheck": Section(_sanitized("racecheck"), _seconds(60)),
}


if __name__ == "__main__":
    if sys.argv[1:2] == [_SECTION]:
        section_main(*sys.argv[2:])
    else:
        sys.exit(main())
