"""Declares the compiled libraries, for which pyproject.toml and setup.cfg have no stable key; all else is there."""

import sys
from pathlib import Path

from setuptools import Extension, setup

ROOT = Path(__file__).parent
sys.path.insert(0, str(ROOT / "ext"))

from build_commands import BdistWheel, BuildNative  # noqa: E402
from build_native import sources  # noqa: E402

setup(
    ext_modules=[
        Extension(f"lightning_moe_ckpt.native.{part}", sources(part), optional=True) for part in ("cuda", "cpu")
    ],
    cmdclass={"build_ext": BuildNative, "bdist_wheel": BdistWheel},
)
