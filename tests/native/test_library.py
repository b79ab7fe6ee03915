"""The compiled libraries are those the package was written for; what is missing is named, and nothing crashes."""

from __future__ import annotations

import importlib
import logging
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from lightning_moe_ckpt.native import _library, _prototypes, create_engine
from lightning_moe_ckpt.native._cuda import CudaCopyEngine
from lightning_moe_ckpt.native._library import LibraryPart, PartStatus

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "ext" / "build_native.py"
PARTS: tuple[LibraryPart, ...] = ("cpu", "cuda")


def _compile(folder: Path, code: str, *, part: LibraryPart = "cpu") -> None:
    """A library of our name with other contents."""
    if shutil.which("g++") is None:
        pytest.skip("no C++ compiler")
    source = folder / "source.cpp"
    source.write_text(code)
    command = ["g++", "-shared", "-fPIC", str(source), "-o", str(folder / f"libmoe_ckpt_{part}.so")]
    subprocess.run(command, check=True, timeout=60)


def _stub(prototypes: Iterable[str], abi: int) -> str:
    lines = [f'extern "C" int {name}() {{ return 0; }}' for name in prototypes if name != "moe_cpu_abi"]
    return "\n".join([*lines, f'extern "C" int moe_cpu_abi() {{ return {abi}; }}'])


def _built(part: LibraryPart) -> Path:
    path = Path(_library.__file__).with_name(f"libmoe_ckpt_{part}.so")
    if not path.exists():
        pytest.skip(f"{path.name} was not built: {BUILD.name} does so")
    return path


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Libraries are loaded anew within the test and once more after it."""
    monkeypatch.delenv("MOE_CKPT_NATIVE", raising=False)
    _library.status.cache_clear()
    yield monkeypatch
    _library.status.cache_clear()


@pytest.fixture
def elsewhere(fresh: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder from which libraries are loaded."""
    fresh.setenv("MOE_CKPT_NATIVE_PATH", str(tmp_path))
    return tmp_path


def _status(part: LibraryPart) -> PartStatus:
    return {status.part: status for status in _library.explain()}[part]


@pytest.mark.parametrize("part", PARTS)
def test_every_exported_function_is_declared(part: LibraryPart) -> None:
    """A function without a prototype would be called with guessed types."""
    if shutil.which("nm") is None:
        pytest.skip("no nm")
    command = ["nm", "-D", "--defined-only", str(_built(part))]
    lines = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout.splitlines()
    exported = {line.split()[2] for line in lines if line.split()[1] in "TiW" and line.split()[2].startswith("moe_")}
    declared = _prototypes.CPU if part == "cpu" else _prototypes.CUDA
    assert exported == set(declared)


def test_versions_of_the_interface_agree() -> None:
    """Sources and package are released together."""
    assert f"constexpr int32_t kAbi = {_prototypes.ABI};" in (ROOT / "ext/csrc/abi.hpp").read_text()


def test_what_was_built_here_is_loaded(fresh: pytest.MonkeyPatch) -> None:
    """The CPU part is in use; the CUDA part is, or says which of driver and device is missing."""
    _built("cpu")
    assert _status("cpu").active, _status("cpu").reason
    assert "g++" in _status("cpu").reason
    cuda = _status("cuda")
    assert cuda.active or any(word in cuda.reason for word in ("driver", "device", "not built")), cuda.reason


def test_switched_off_by_the_environment(fresh: pytest.MonkeyPatch) -> None:
    """`MOE_CKPT_NATIVE=0` is for comparing, and for doubts."""
    fresh.setenv("MOE_CKPT_NATIVE", "0")
    assert [status.reason for status in _library.explain()] == ["switched off by MOE_CKPT_NATIVE=0"] * 2
    assert _library.cpu() is None


def test_a_missing_library_is_no_matter_for_a_warning(elsewhere: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Whoever installed without a compiler has chosen so."""
    with caplog.at_level(logging.INFO):
        assert f"{elsewhere}/libmoe_ckpt_cpu.so was not built" in _status("cpu").reason
    assert not caplog.records


STALE = [
    pytest.param('extern "C" int moe_cpu_abi() { return 1; }', "is stale, it lacks moe_cpu_source_digest", id="lacks"),
    pytest.param(
        _stub(_prototypes.CPU, abi=_prototypes.ABI + 1),
        f"interface version {_prototypes.ABI + 1}, this package {_prototypes.ABI}",
        id="version",
    ),
]


@pytest.mark.parametrize(("code", "reason"), STALE)
def test_a_stale_library_is_named(elsewhere: Path, caplog: pytest.LogCaptureFixture, code: str, reason: str) -> None:
    """It lacks a function, or is of another interface version: calling it would crash."""
    _compile(elsewhere, code)
    assert reason in _status("cpu").reason
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_a_library_older_than_its_sources_is_named(fresh: pytest.MonkeyPatch) -> None:
    """In a checkout somebody edits a kernel and forgets to build."""
    _built("cpu")
    fresh.setattr(_library, "_source_digest", lambda: "0" * 16)
    assert "is older than the sources in ext/csrc" in _status("cpu").reason


def test_a_damaged_file_is_named(elsewhere: Path) -> None:
    """For example of another processor."""
    (elsewhere / "libmoe_ckpt_cpu.so").write_bytes(b"\x7fELF but no more than that")
    assert "libmoe_ckpt_cpu.so cannot be loaded: " in _status("cpu").reason


def test_source_digest_is_that_of_the_build_command() -> None:
    """Two programs compute it; if they differed every library would be called old."""
    command = [sys.executable, "-c", "import build_native; print(build_native.source_digest())"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=BUILD.parent, timeout=60)
    assert done.stdout.strip() == _library._source_digest()


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """The build command's module on a machine with no CUDA toolkit; `site` in `tmp_path` has what pip installed."""
    monkeypatch.syspath_prepend(str(BUILD.parent))
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    for name in ("NVCC", "CUDA_HOME", "CUDA_PATH", "MOE_CKPT_CUDA_ARCHS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    module = importlib.import_module("build_native")
    monkeypatch.setattr(module, "TOOLKITS", tmp_path / "local")
    return module


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            "cuda: Optional[str] = '13.0'",
            r"built for CUDA 13.0, but nvcc was not found: `pip install 'nvidia-cuda-nvcc==13.0.\*' 'nvidia-nvvm==13.0.\*'",
        ),
        ("cuda = '12.8'", "built for CUDA 12.8, but nvcc was not found: install CUDA's toolkit, 12.8 or newer"),
        ("cuda: Optional[str] = None", "^nvcc was not found; CUDA_HOME or NVCC can say where it is$"),
    ],
)
def test_a_torch_for_cuda_without_nvcc_is_told_what_to_install(
    build: ModuleType, tmp_path: Path, line: str, said: str
) -> None:
    """In one line, which the CPU part carries and the doctor shows; pip hides what a build prints."""
    (tmp_path / "site" / "torch").mkdir(parents=True)
    (tmp_path / "site" / "torch" / "version.py").write_text(f"debug = False\n{line}\n")
    with pytest.raises(build.BuildFailed, match=said) as raised:
        build.build_part("cuda", tmp_path / "never.so")
    assert "\n" not in str(raised.value)


def test_nvcc_of_pip_is_found_and_what_it_lacks_is_named(build: ModuleType, tmp_path: Path) -> None:
    """It comes in five packages; its libraries are where nvcc does not look."""
    root = tmp_path / "site" / "nvidia" / "cu13"
    nvcc = root / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text("#!/bin/sh\necho compute_75\necho compute_80\necho compute_86\necho compute_90\n")
    nvcc.chmod(0o700)
    assert build.find_nvcc() == str(nvcc)
    with pytest.raises(
        build.BuildFailed, match="nothing of nvidia-nvvm, nvidia-cuda-crt, nvidia-cuda-runtime, nvidia-"
    ):
        build._cuda_commands()
    for name in (*build.PIP_PARTS, "lib/libcudart_static.a"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    compiling, linking = build._cuda_commands()
    assert compiling[0] == linking[0] == str(nvcc)
    assert f"-L{root / 'lib'}" in linking
    assert [option.partition(",code=")[2] for option in compiling if "gencode" in option] == [
        *("sm_75", "sm_80", "sm_90", "compute_90"),
    ]


def test_a_device_without_the_compiled_part_is_warned_of_once(
    elsewhere: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever trains on a GPU learns that snapshots are slower than they could be, and why."""
    for _ in range(2):
        assert isinstance(create_engine(torch.device("cuda", 0)), CudaCopyEngine)
    (record,) = caplog.records
    assert (record.levelname, "was not built" in record.getMessage()) == ("WARNING", True)


class TestBuildCommand:
    """A compiler that is missing or fails: a warning and no library, or an error where the caller insists."""

    @staticmethod
    def build(out: Path, **environment: str) -> subprocess.CompletedProcess[str]:
        plain = {"PATH": "/usr/bin:/bin", "MOE_CKPT_CUDA": "0"}
        command = [sys.executable, str(BUILD), "--out", str(out)]
        return subprocess.run(
            command, env={**plain, **environment}, capture_output=True, text=True, timeout=240, check=False
        )

    def test_without_a_compiler_nothing_is_built(self, tmp_path: Path) -> None:
        done = self.build(tmp_path, CXX="/no/such/compiler")
        assert done.returncode == 0
        assert "the cpu part was left out: /no/such/compiler could not be run" in done.stderr
        assert not list(tmp_path.iterdir())

    def test_a_failing_compiler_shows_what_it_said(self, tmp_path: Path) -> None:
        """And an older library does not stay in its place."""
        (tmp_path / "libmoe_ckpt_cpu.so").write_bytes(b"old")
        compiler = tmp_path / "broken"
        compiler.write_text("#!/bin/sh\necho internal compiler error\nexit 3\n")
        compiler.chmod(0o700)
        done = self.build(tmp_path, CXX=str(compiler))
        assert done.returncode == 0
        assert "internal compiler error" in done.stderr
        assert not (tmp_path / "libmoe_ckpt_cpu.so").exists()

    @pytest.mark.parametrize(
        "environment",
        [
            {"MOE_CKPT_NATIVE": "1", "CXX": "/no/such/compiler"},
            {"MOE_CKPT_CUDA": "1", "NVCC": "/no/such/nvcc"},
        ],
        ids=["cpu", "cuda"],
    )
    def test_who_insists_gets_an_error(self, tmp_path: Path, environment: dict[str, str]) -> None:
        done = self.build(tmp_path, **environment)
        assert done.returncode != 0
        assert "could not be run" in done.stderr

    def test_it_needs_no_setuptools(self) -> None:
        """A machine may have none, or one that is older than what a wheel needs."""
        code = f"import runpy, sys; sys.modules['setuptools'] = None; runpy.run_path({str(BUILD)!r}, run_name='other')"
        subprocess.run([sys.executable, "-c", code], check=True, timeout=60)

    def test_nothing_is_built_on_request(self, tmp_path: Path) -> None:
        done = self.build(tmp_path, MOE_CKPT_NATIVE="0")
        assert done.returncode == 0
        assert not list(tmp_path.iterdir())
