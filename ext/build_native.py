"""Build command of the compiled libraries: g++ for the CPU part, nvcc for the CUDA part where it is found.

Neither library includes a header of Python or torch, so one build serves every Python 3 and every torch; `ctypes`
loads them. The CUDA runtime is linked statically, so the CUDA part loads on a machine without toolkit and driver.
A part that cannot be built is left out with a warning, and its functions run in Python.

Environment:
    MOE_CKPT_NATIVE: `0` builds nothing; `1` makes a missing or failing C++ compiler an error.
    MOE_CKPT_CUDA: `0` leaves the CUDA part out; `1` makes a missing or failing nvcc an error.
    MOE_CKPT_CUDA_ARCHS: compute capabilities, `80;90` by default; the last one is also stored as PTX.
    CXX, NVCC, CUDA_HOME, CUDA_PATH: where the compilers are.

Without setuptools: `python ext/build_native.py` builds into the package of this checkout; see `--help`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

from setuptools import Extension
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

Part = Literal["cpu", "cuda"]
Sanitizer = Literal["address", "thread"]

ROOT = Path(__file__).resolve().parents[1]
CSRC = ROOT / "ext" / "csrc"
PACKAGE = ROOT / "lightning_moe_ckpt" / "native"
PATTERNS: dict[Part, str] = {"cpu": "cpu_*.cpp", "cuda": "cuda_*.cu"}

# `sqrt` that may set errno, and traps that may be observed, keep loops from being vectorised; neither changes a bit.
# Contraction to fused multiply-add does, and at the compiler's whim: code that wants one asks for `std::fma`.
# No -march: one binary runs everywhere, and hot loops are compiled for several processors (see MOE_CLONES).
CXX_FLAGS = ["-O3", "-std=c++17", "-fPIC", "-pthread", "-fvisibility=hidden", "-Wall", "-Wextra"]
CXX_FLAGS += ["-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off"]
SANITIZED = ["-O1", "-g", "-fno-omit-frame-pointer"]
NVCC_FLAGS = ["-O3", "-std=c++17", "--threads", "0", "-Xcompiler", "-fPIC,-fvisibility=hidden,-pthread,-Wall"]


def sources(part: str) -> list[str]:
    """Source files of one part, relative to the root as setuptools wants them."""
    pattern = PATTERNS["cuda" if part == "cuda" else "cpu"]
    return sorted(path.relative_to(ROOT).as_posix() for path in CSRC.glob(pattern))


def source_digest() -> str:
    """Identity of everything in `csrc`: the loader of a checkout notices libraries that are older than it."""
    digest = hashlib.sha256()
    for path in sorted(CSRC.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def library_name(part: Part) -> str:
    """File name; never `libcuda.so`, which is the driver's own."""
    return f"libmoe_ckpt_{part}.so"


def find_nvcc() -> str | None:
    """CUDA's compiler, where its installers put it."""
    if "NVCC" in os.environ:
        return os.environ["NVCC"]
    homes = [Path(os.environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if name in os.environ]
    found = [shutil.which("nvcc", path=home / "bin") for home in homes]
    found += [shutil.which("nvcc"), *map(str, sorted(Path("/usr/local").glob("cuda*/bin/nvcc"), reverse=True))]
    return next((path for path in found if path), None)


def build_part(part: Part, out: Path, *, note: str = "", sanitizer: Sanitizer | None = None) -> None:
    """Compile and link one library; replaces `out` at the end, so that a process that has it loaded keeps the old one.

    Args:
        part: which one.
        out: the file to write.
        note: stored in the library, for `moe-ckpt doctor`.
        sanitizer: instrument the code (CPU part only).

    Raises:
        CompileError: a compiler is missing or failed.
    """
    compile_command, link_command = _cuda_commands() if part == "cuda" else _cpu_commands(sanitizer)
    defines = [f"-DMOE_CKPT_SOURCE_DIGEST={json.dumps(source_digest())}", f"-DMOE_CKPT_BUILD_NOTE={json.dumps(note)}"]
    with tempfile.TemporaryDirectory(prefix="moe-ckpt-build-") as folder:
        objects = [(ROOT / source, Path(folder) / f"{Path(source).stem}.o") for source in sources(part)]
        commands = [[*compile_command, *defines, "-c", str(source), "-o", str(obj)] for source, obj in objects]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(_run, commands))
        linked = Path(folder) / out.name
        _run([*link_command, *(str(obj) for _, obj in objects), "-o", str(linked)])
        out.parent.mkdir(parents=True, exist_ok=True)
        staged = out.with_name(f".{out.name}.{os.getpid()}")
        shutil.copy2(linked, staged)
        staged.replace(out)


def _cpu_commands(sanitizer: Sanitizer | None) -> tuple[list[str], list[str]]:
    compiler = shlex.split(os.environ.get("CXX", "g++"))
    extra = [f"-fsanitize={sanitizer}", *SANITIZED] if sanitizer else []
    return [*compiler, *CXX_FLAGS, *extra], [*compiler, "-shared", "-pthread", *extra]


def _cuda_commands() -> tuple[list[str], list[str]]:
    nvcc = find_nvcc()
    if nvcc is None:
        raise CompileError("nvcc was not found; CUDA_HOME or NVCC can say where it is")
    archs = os.environ.get("MOE_CKPT_CUDA_ARCHS", "80;90").replace(",", ";").split(";")
    targets = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in archs]
    targets.append(f"-gencode=arch=compute_{archs[-1]},code=compute_{archs[-1]}")
    return [nvcc, *NVCC_FLAGS, *targets], [nvcc, "-shared", "-cudart", "static", *targets]


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)  # noqa: S603
    except OSError as error:
        raise CompileError(f"{command[0]} could not be run: {error}") from error
    if done.returncode:
        raise CompileError(f"{shlex.join(command)} failed:\n{done.stdout}")
    sys.stderr.write(done.stdout)


def _wanted(part: Part) -> Literal["no", "maybe", "must"]:
    native, cuda = os.environ.get("MOE_CKPT_NATIVE", ""), os.environ.get("MOE_CKPT_CUDA", "")
    own = cuda if part == "cuda" else native
    if "0" in (native, own):
        return "no"
    return "must" if own == "1" else "maybe"


def build_wanted(folder: Path) -> list[str]:
    """Build into `folder` what the environment asks for, the CPU part last: it carries what became of the other.

    Returns:
        Why parts were left out, one line each.

    Raises:
        CompileError: a part that must be built could not be.
    """
    left_out, note = [], "built"
    for part in ("cuda", "cpu"):
        wanted, reason = _wanted(part), "the environment said so at build time"
        if wanted != "no":
            try:
                build_part(part, folder / library_name(part), note=note if part == "cpu" else "")
                continue
            except CompileError as error:
                if wanted == "must":
                    raise
                reason = str(error)
        (folder / library_name(part)).unlink(missing_ok=True)  # of an earlier build
        left_out.append(f"the {part} part was left out: {reason}")
        note = reason.splitlines()[0]
    return left_out


class BuildNative(build_ext):
    """Puts the libraries where setuptools expects extension modules."""

    def get_ext_filename(self, fullname: str) -> str:
        *package, part = fullname.split(".")
        return str(Path(*package, f"libmoe_ckpt_{part}.so"))  # no suffix of a Python version: these are no modules

    def build_extensions(self) -> None:
        for reason in build_wanted(Path(self.get_ext_fullpath(self.extensions[0].name)).parent):
            self.warn(f"{reason}\nThe functions of this part will run in Python.")

    def copy_extensions_to_source(self) -> None:
        self.extensions = [extension for extension in self.extensions if self._built(extension)]
        super().copy_extensions_to_source()

    def get_outputs(self) -> list[str]:
        return [path for path in super().get_outputs() if Path(path).exists()]

    def get_output_mapping(self) -> dict[str, str]:
        return {built: path for built, path in super().get_output_mapping().items() if Path(built).exists()}

    def _built(self, extension: Extension) -> bool:
        name = self.get_ext_filename(self.get_ext_fullname(extension.name))
        return (Path(self.build_lib) / name).exists()


class BdistWheel(bdist_wheel):
    """One wheel of a platform for all versions of Python."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.root_is_pure = False

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


def main() -> None:
    """Build into this checkout, or with a sanitizer into another folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=PACKAGE, help="folder of the libraries (default: the package)")
    parser.add_argument("--sanitize", choices=["address", "thread"], help="CPU part only, instrumented")
    args = parser.parse_args()
    if args.sanitize:
        build_part("cpu", args.out / library_name("cpu"), note=f"{args.sanitize} sanitizer", sanitizer=args.sanitize)
        return
    for reason in build_wanted(args.out):
        sys.stderr.write(f"warning: {reason}\n")


if __name__ == "__main__":
    main()
