"""Compiles the CUDA part of the extension for the emulated device; once for each state of the sources.

A `.cu` file becomes C++ by two substitutions: launches, and shared memory whose size the launch gives.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import platform
import re
import shlex
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

Sanitizer = Literal["address", "thread"]

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
CSRC = ROOT / "ext" / "csrc"
FLAGS = ["-O1", "-g", "-std=c++17", "-fPIC", "-pthread", "-fvisibility=hidden", "-ffp-contract=off", "-Wall"]
FLAGS += ["-Wno-unknown-pragmas", "-Wno-unused-function"]
_LAUNCH = re.compile(r"([A-Za-z_]\w*(?:<\w+(?:, \w+)*>)?)<<<(.*?)>>>\(", re.DOTALL)
_DYNAMIC_SHARED = re.compile(r"extern __shared__ (\w+) (\w+)\[\];")


def unavailable() -> str | None:
    """Why there can be no emulated device on this machine."""
    if platform.machine() != "x86_64" or platform.system() != "Linux":
        return "fibers of the emulated device are switched in assembly for x86-64 Linux"
    return None


def translate(source: str) -> str:
    """Device code as C++."""
    launched = _LAUNCH.sub(r"emulated::launch(emulated::Grid{\2}, \1, ", source)
    return _DYNAMIC_SHARED.sub(r"\1* const \2 = static_cast<\1*>(emulated::dynamic_shared());", launched)


def build(sanitizer: Sanitizer | None = None) -> Path:
    """The library; compiled now if nobody has for these sources.

    Raises:
        subprocess.CalledProcessError: the compiler failed; its output is on stderr.
    """
    folder = ROOT / "build" / "emulator"
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / f"libmoe_ckpt_emulated_{sanitizer or 'plain'}_{_digest()}.so"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # tests run in several processes
        if not library.exists():
            for stale in folder.glob(f"libmoe_ckpt_emulated_{sanitizer or 'plain'}_*.so"):
                stale.unlink()
            _compile(library, sanitizer)
    return library


def _digest() -> str:
    digest = hashlib.sha256(shlex.join(FLAGS).encode())
    for path in sorted([*CSRC.iterdir(), *HERE.glob("*.cpp"), *HERE.glob("include/*"), Path(__file__)]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def _compile(library: Path, sanitizer: Sanitizer | None) -> None:
    compiler = shlex.split(os.environ.get("CXX", "g++"))
    flags = [*FLAGS, f"-I{HERE / 'include'}", f"-I{CSRC}"]
    sanitized = [f"-fsanitize={sanitizer}"] if sanitizer else []
    # What a sanitizer thinks of stacks that are exchanged is of no use; fibers.cpp tells it what it has to know.
    fibers = ["-fno-tree-loop-distribute-patterns", *(["-DEMULATOR_TSAN"] if sanitizer == "thread" else [])]
    with tempfile.TemporaryDirectory(prefix="moe-ckpt-emulator-") as name:
        scratch = Path(name)
        for path in CSRC.glob("cuda_*.cu"):
            (scratch / f"{path.stem}.cpp").write_text(f'#line 1 "{path}"\n{translate(path.read_text())}')
        units = [(path, sanitized) for path in [*sorted(scratch.glob("*.cpp")), HERE / "runtime.cpp"]]
        units.append((HERE / "fibers.cpp", fibers))
        objects = [scratch / f"{path.stem}.o" for path, _ in units]
        commands = [
            [*compiler, *flags, *extra, "-c", str(path), "-o", str(obj)]
            for (path, extra), obj in zip(units, objects, strict=True)
        ]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(_run, commands))
        staged = scratch / library.name
        _run([*compiler, "-shared", "-pthread", *sanitized, *map(str, objects), "-o", str(staged)])
        library.write_bytes(staged.read_bytes())


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True)


def main() -> None:
    """Print where the library is, for `make sanitize`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sanitize", choices=["address", "thread"])
    print(build(parser.parse_args().sanitize))


if __name__ == "__main__":
    main()
