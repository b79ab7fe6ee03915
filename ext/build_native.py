"""Build command of the compiled libraries: g++ for the CPU part, nvcc for the CUDA part where it is found.

Neither library includes a header of Python or torch, so one build serves every Python 3 and every torch; `ctypes`
loads them. The CUDA runtime is linked statically, so the CUDA part loads on a machine without toolkit and driver.
A part that cannot be built is left out with a warning, and its functions run in Python; the CPU part carries the reason,
which `moe-ckpt doctor` shows.

A library that nvcc 12.8 has built runs with drivers from 525 on, one that nvcc 13 has built with drivers from 580 on.

Environment:
    MOE_CKPT_NATIVE: `0` builds nothing; `1` makes a missing or failing C++ compiler an error.
    MOE_CKPT_CUDA: `0` leaves the CUDA part out; `1` makes a missing or failing nvcc an error.
    MOE_CKPT_CUDA_ARCHS: compute capabilities such as `80;90`; the last one is also stored as PTX, for devices to come.
        By default those of every device since 2018 that nvcc knows.
    CXX, NVCC, CUDA_HOME, CUDA_PATH: where the compilers are.

`python ext/build_native.py` builds into the package of this checkout and needs nothing but compilers; see `--help`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shlex
import shutil
import site
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

Part = Literal["cpu", "cuda"]
Sanitizer = Literal["address", "thread"]

ROOT = Path(__file__).resolve().parents[1]
CSRC = ROOT / "ext" / "csrc"
PACKAGE = ROOT / "lightning_moe_ckpt" / "native"
TOOLKITS = Path("/usr/local")
PATTERNS: dict[Part, str] = {"cpu": "cpu_*.cpp", "cuda": "cuda_*.cu"}

# `sqrt` that may set errno, and traps that may be observed, keep loops from being vectorised; neither changes a bit.
# Contraction to fused multiply-add does, and at the compiler's whim: code that wants one asks for `std::fma`.
# No -march: one binary runs everywhere, and hot loops are compiled for several processors (see MOE_CLONES).
CXX_FLAGS = ["-O3", "-std=c++17", "-fPIC", "-pthread", "-fvisibility=hidden", "-Wall", "-Wextra"]
CXX_FLAGS += ["-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off"]
SANITIZED = ["-O1", "-g", "-fno-omit-frame-pointer"]
NVCC_FLAGS = [
    "-O3",
    "-std=c++17",
    "--threads",
    "0",
    "-Xptxas",
    "-warn-spills",
    "-Xcompiler",
    "-fPIC,-fvisibility=hidden,-pthread,-Wall",
]

ARCHS = ("75", "80", "90", "100", "120")
"""From Turing on. A device runs the newest of its own generation that is not newer than it: an 8.9 runs that of 8.0."""
PIP_PARTS = {
    "nvvm/bin/cicc": "nvidia-nvvm",
    "include/crt/host_config.h": "nvidia-cuda-crt",
    "include/cuda_runtime.h": "nvidia-cuda-runtime",
    "include/cccl/nv/target": "nvidia-cuda-cccl",
}
"""What pip's nvcc needs beside it: a file of each, and the package that has it."""


class BuildFailed(RuntimeError):
    """A compiler is missing or failed; the first line says why."""


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
    """CUDA's compiler, where its installers put it; what pip has installed comes last."""
    if "NVCC" in os.environ:
        return os.environ["NVCC"]
    homes = [Path(os.environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if name in os.environ]
    found = [shutil.which("nvcc", path=home / "bin") for home in homes]
    found += [shutil.which("nvcc"), *map(str, sorted(TOOLKITS.glob("cuda*/bin/nvcc"), reverse=True))]
    found += [str(path) for folder in site_packages() for path in sorted(folder.glob("nvidia/cu*/bin/nvcc"))[::-1]]
    return next((path for path in found if path), None)


def site_packages() -> list[Path]:
    """Where packages of this Python may be, those that pip hides from an isolated build included."""
    folders = [*sys.path, *(sysconfig.get_path(name) for name in ("purelib", "platlib")), site.getusersitepackages()]
    return [Path(folder) for folder in dict.fromkeys(folders) if folder]


def torch_cuda() -> str:
    """The CUDA version that the installed torch was built for, as `13.0`; empty without torch and for one without CUDA.

    Read from its files: an isolated build cannot import it.
    """
    for folder in site_packages():
        path = folder / "torch" / "version.py"
        if path.is_file():
            found = re.search(r"^cuda\b[^=]*= *'([\d.]+)'", path.read_text(encoding="utf-8"), re.MULTILINE)
            return found[1] if found else ""
    return ""


def build_part(part: Part, out: Path, *, note: str = "", sanitizer: Sanitizer | None = None) -> None:
    """Compile and link one library; replaces `out` at the end, so that a process that has it loaded keeps the old one.

    Args:
        part: which one.
        out: the file to write.
        note: stored in the library, for `moe-ckpt doctor`.
        sanitizer: instrument the code (CPU part only).

    Raises:
        BuildFailed: a compiler is missing or failed.
    """
    compile_command, link_command = _cuda_commands() if part == "cuda" else _cpu_commands(sanitizer)
    defines = [f"-DMOE_CKPT_SOURCE_DIGEST={json.dumps(source_digest())}", f"-DMOE_CKPT_BUILD_NOTE={json.dumps(note)}"]
    with tempfile.TemporaryDirectory(prefix="moe-ckpt-build-") as folder:
        objects = [(ROOT / source, Path(folder) / f"{Path(source).stem}.o") for source in sources(part)]
        commands = [[*compile_command, *defines, "-c", str(source), "-o", str(obj)] for source, obj in objects]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            said = list(pool.map(_run, commands))
        linked = Path(folder) / out.name
        said.append(_run([*link_command, *(str(obj) for _, obj in objects), "-o", str(linked)]))
        sys.stderr.writelines(said)
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
        raise BuildFailed(_without_nvcc(torch_cuda()))
    root = Path(nvcc).resolve().parents[1]
    if root.parent.name == "nvidia":
        _check_packages(root)
    wanted = os.environ.get("MOE_CKPT_CUDA_ARCHS", "").replace(",", ";")
    archs = wanted.split(";") if wanted else _known_archs(nvcc)
    targets = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in archs]
    targets.append(f"-gencode=arch=compute_{archs[-1]},code=compute_{archs[-1]}")
    # pip's packages have no `lib64`, where nvcc looks.
    libraries = [f"-L{root / 'lib'}"] if (root / "lib" / "libcudart_static.a").exists() else []
    return [nvcc, *NVCC_FLAGS, *targets], [nvcc, "-shared", "-cudart", "static", *libraries, *targets]


def _known_archs(nvcc: str) -> list[str]:
    """Of `ARCHS`, those that this compiler can make code for."""
    known = _run([nvcc, "--list-gpu-arch"]).split()
    archs = [arch for arch in ARCHS if f"compute_{arch}" in known]
    if not archs:
        raise BuildFailed(f"{nvcc} can make code for none of {', '.join(ARCHS)}; MOE_CKPT_CUDA_ARCHS may name others")
    return archs


def _without_nvcc(version: str) -> str:
    """Why there is no CUDA part and what to do, in one line."""
    if not version:
        return "nvcc was not found; CUDA_HOME or NVCC can say where it is"
    major = version.partition(".")[0]
    packages = " ".join(f"'{name}=={version}.*'" for name in ("nvidia-cuda-nvcc", *PIP_PARTS.values()))
    remedy = f"install CUDA's toolkit, 12.8 or newer, and name it with CUDA_HOME (pip has no nvcc for CUDA {major})"
    if int(major) >= 13:
        remedy = f"`pip install {packages}`, or install CUDA's toolkit and name it with CUDA_HOME"
    return f"torch is built for CUDA {version}, but nvcc was not found: {remedy}; then install this package again"


def _check_packages(root: Path) -> None:
    """Pip's nvcc comes without the rest of the compiler and without headers; of another version they do not fit."""
    lacking = [package for name, package in PIP_PARTS.items() if not (root / name).exists()]
    if lacking:
        raise BuildFailed(
            f"{root} has nvcc, but nothing of {', '.join(lacking)}; install these packages in the version of nvidia-cuda-nvcc"
        )


def _run(command: list[str]) -> str:
    """What it says."""
    try:
        done = subprocess.run(command, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)  # noqa: S603
    except OSError as error:
        raise BuildFailed(f"{command[0]} could not be run: {error}") from error
    if done.returncode:
        raise BuildFailed(f"{shlex.join(command)} failed:\n{done.stdout}")
    return done.stdout


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
        BuildFailed: a part that must be built could not be.
    """
    left_out, note = [], "built"
    for part in ("cuda", "cpu"):
        wanted, reason = _wanted(part), "the environment said so at build time"
        if wanted != "no":
            try:
                build_part(part, folder / library_name(part), note=note if part == "cpu" else "")
                continue
            except BuildFailed as error:
                if wanted == "must":
                    raise
                reason = str(error)
        (folder / library_name(part)).unlink(missing_ok=True)  # of an earlier build
        left_out.append(f"the {part} part was left out: {reason}")
        note = reason.splitlines()[0]
    return left_out


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
